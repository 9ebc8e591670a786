"""Calls that import and export datasets, each format with all of its options."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.actors import recorded_fields
from geartrain.integrations.datasets.exporter import export_store
from geartrain.integrations.datasets.importer import import_dataset
from hostile.subject import Tools
from hostile.values import Door, choice, door, flag, nothing, number, path, whole

EPISODES, STEPS, EDGE = 2, 3, 64
FIELDS = recorded_fields({"obs": gt.Field((2,), "float32"), "action": gt.Field((2,), "float32")})
FIELDS |= {"reward": gt.Field((), "float32"), "truncated": gt.Field((), "bool")}
FILMED = {"obs.image": gt.Field((EDGE, EDGE, 3), "uint8"), "action": gt.Field((2,), "float32")}
PROGRESS: dict[str, Any] = {"progress": False}


def rows_of(tools: Tools, fields: dict[str, gt.Field]) -> gt.Store:
    """A store with episodes of noise."""
    store = tools.enter(gt.Store.create(tools.name(), fields, max_length=STEPS, capacity=EPISODES))
    rng = np.random.default_rng(1)
    values: dict[str, Any] = {}
    for name, field in fields.items():
        shape = (EPISODES, *((STEPS,) if not field.per_row else ()), *field.shape)
        values[name] = rng.integers(0, 2, shape).astype(field.numpy_dtype)
    store.insert(values, threads=1)
    return store


def exported_to(folder: Path, name: str) -> Callable[..., Any]:
    """Writes to a new path each time, but to what is swept where that is the path."""
    numbers = itertools.count()

    def call(path: Any, **arguments: Any) -> None:
        export_store(
            path=folder / f"{next(numbers)}{name}" if isinstance(path, str) and path == "new" else path, **arguments
        )

    return call


def imported(into: str) -> Callable[..., Any]:
    """Imports under a name that is free, and leaves nothing of it."""

    def call(source: Any, into: Any, **arguments: Any) -> None:
        made = import_dataset(source, into, **arguments)
        made.unlink()
        made.close()

    return call


def importing(tools: Tools, source: Any, format: str, **options: Any) -> Door:
    name = tools.name()
    return imported(name), {"source": source, "into": name, "format": format, **options, **PROGRESS}


# --- imports ----------------------------------------------------------------------------------------------------------

ARRAYS = {"obs": np.zeros((EPISODES, STEPS, 2), np.float32), "tag": np.zeros(EPISODES, np.int64)}
STEPS_OF_ALL = {"obs": np.zeros((EPISODES * STEPS, 2), np.float32)}


def some_episodes(value: Any) -> bool:
    """Numbers of episodes, one or several, or text."""
    if isinstance(value, str):
        return value in ("1", "0:2")
    of_one = whole(0, EPISODES - 1, none=True)
    return all(map(of_one, value)) if isinstance(value, list | tuple) and value else of_one(value)


@door(
    "import_dataset",
    source=nothing,
    into=path,
    format=nothing,
    fields=choice(None),
    episodes=some_episodes,
    where=choice(None),
    capacity=whole(EPISODES, 2**32, none=True),
    max_length=whole(STEPS, 2**31, none=True),
    on_too_long=nothing,
    skip_unsupported=flag,
    persist=lambda value: value is None or flag(value),
    progress=flag,
)
def import_arrays(tools: Tools) -> Door:
    given = {"fields": None, "capacity": None, "max_length": None, "on_too_long": "error", "cast": ()}
    more = {"skip_unsupported": False, "persist": None, "lengths": None, "episodes": "0:2", "where": ["length>=1"]}
    return importing(tools, ARRAYS, "arrays", **given, **more)


@door(
    "import_dataset, steps of arrays", ends=lambda value: value is None or isinstance(value, list | tuple | np.ndarray)
)
def import_steps(tools: Tools) -> Door:
    return importing(tools, STEPS_OF_ALL, "arrays", ends=[STEPS, 2 * STEPS], untimed=())


@door("import_dataset, arrays of a file")
def import_npz(tools: Tools) -> Door:
    file = tools.folder() / "rows.npz"
    np.savez(file, **ARRAYS)  # type: ignore[arg-type]
    return importing(tools, file, "auto", lengths=None, ends=None, untimed=())


@door(
    "import_dataset, folder of .npy",
    lengths=lambda value: value is None or isinstance(value, list | tuple | np.ndarray),
    ends=choice(None),
)
def import_npy(tools: Tools) -> Door:
    folder = tools.folder() / "rows"
    folder.mkdir()
    for name, values in ARRAYS.items():
        np.save(folder / f"{name}.npy", values)
    return importing(tools, folder, "arrays", lengths=[STEPS, 1], ends=None, untimed=("tag",), fields=["obs", "tag"])


@door("import_dataset, rlds", split=choice("train", "all", None), skip_unsupported=flag, fields=choice(None, "action"))
def import_rlds(tools: Tools) -> Door:
    writer = pytest.importorskip("tfrecord.writer")
    folder = tools.folder()
    steps = {name: {"tensor": {"shape": {}, "dtype": "float32", "encoding": "none"}} for name in ("action", "reward")}
    steps_of = {"sequence": {"feature": {"featuresDict": {"features": steps}}, "length": "-1"}}
    (folder / "features.json").write_text(json.dumps({"featuresDict": {"features": {"steps": steps_of}}}))
    splits = [{"name": name, "shardLengths": [str(EPISODES)]} for name in ("train", "val")]
    (folder / "dataset_info.json").write_text(json.dumps({"name": "doors", "splits": splits}))
    for split in splits:
        file = writer.TFRecordWriter(str(folder / f"doors-{split['name']}.tfrecord-00000-of-00001"))
        for _ in range(EPISODES):
            file.write({f"steps/{name}": (np.ones(STEPS), "float") for name in steps})
        file.close()
    return importing(tools, folder, "rlds", split="train", fields=None, skip_unsupported=False, cast=())


@door("import_dataset, minari", skip_unsupported=flag, fields=choice(None), max_length=whole(STEPS, 2**31, none=True))
def import_minari(tools: Tools) -> Door:
    folder = tools.folder() / "minari"
    export_store(rows_of(tools, FIELDS), folder, format="minari", repeat_last_obs=True, progress=False)
    return importing(tools, folder, "minari", fields=None, skip_unsupported=False, max_length=None)


@door("import_dataset, torch", length=choice(None))
def import_torch(tools: Tools) -> Door:
    items = [{"obs": np.zeros((STEPS, 2), np.float32), "n": np.int64(STEPS)} for _ in range(EPISODES)]
    return importing(tools, items, "torch", names=None, untimed=(), length=None)


@door(
    "import_dataset, d4rl",
    timeouts=lambda value: value is None or flag(value),
    episode_steps=whole(1, 10**400, none=True),
)
def import_d4rl(tools: Tools) -> Door:
    import h5py

    file = tools.folder() / "d4rl.hdf5"
    with h5py.File(file, "w") as made:
        made["observations"] = np.zeros((6, 2), np.float32)
        made["actions"] = np.zeros((6, 1), np.float32)
        made["rewards"] = np.zeros(6, np.float32)
        made["terminals"] = np.array([0, 0, 1, 0, 0, 1], bool)
        made["timeouts"] = np.zeros(6, bool)
    return importing(tools, file, "d4rl", timeouts=True, episode_steps=None, keep_unfinished=True)


@door(
    "import_dataset, lerobot",
    image_layout=choice(None),
    tolerance_s=number(0, above=True, none=True, most=1e6),
    threads=whole(1, 1024, none=True),
)
def import_lerobot(tools: Tools) -> Door:
    folder = tools.folder() / "robot"
    store = rows_of(tools, FILMED)
    export_store(store, folder, format="lerobot", fps=10, video=True, progress=False)
    options = {"image_size": (32, 32), "image_layout": "hwc", "tolerance_s": 1e-3, "threads": 1}
    return importing(tools, folder, "lerobot", **options)


# --- exports ----------------------------------------------------------------------------------------------------------


@door(
    "export_store",
    source=nothing,
    path=path,
    format=choice(),
    fields=choice(None),
    skip_unsupported=flag,
    metadata=flag,
    overwrite=flag,
    progress=flag,
    trust=choice(),
    compress=lambda value: value is None or flag(value),
)
def export_npz(tools: Tools) -> Door:
    given = {"fields": None, "cast": (), "skip_unsupported": False, "metadata": False, "overwrite": True}
    more = {"trust": "user", "compress": False}
    call = exported_to(tools.folder(), ".npz")
    return call, {"source": rows_of(tools, FIELDS), "path": "new", "format": "npz", **given, **more, **PROGRESS}


@door("export_store, npy", fields=choice(None), skip_unsupported=flag, metadata=flag, overwrite=flag)
def export_npy(tools: Tools) -> Door:
    call = exported_to(tools.folder(), "")
    given = {
        "format": "npy",
        "fields": None,
        "cast": (),
        "skip_unsupported": False,
        "metadata": True,
        "overwrite": True,
    }
    return call, {"source": rows_of(tools, FIELDS), "path": "new", **given, **PROGRESS}


@door("export_store, parquet", compression=choice(None))
def export_parquet(tools: Tools) -> Door:
    call = exported_to(tools.folder(), ".parquet")
    return call, {"source": rows_of(tools, FIELDS), "path": "new", "compression": "zstd", **PROGRESS}


@door("export_store, minari", dataset_id=choice(None), repeat_last_obs=flag)
def export_minari(tools: Tools) -> Door:
    call = exported_to(tools.folder(), "")
    given = {"format": "minari", "dataset_id": "doors/rows-v0", "repeat_last_obs": True}
    return call, {"source": rows_of(tools, FIELDS), "path": "new", **given, **PROGRESS}


@door(
    "export_store, lerobot",
    fps=whole(1, 1_000_000),
    task=lambda value: value is None or isinstance(value, str),
    video=lambda value: value is None or flag(value),
    video_codec=choice(None),
    video_quality=whole(0, 51, none=True),
    video_key_frames=whole(1, 100_000, none=True),
)
def export_lerobot(tools: Tools) -> Door:
    call = exported_to(tools.folder(), "")
    given = {"format": "lerobot", "fps": 10, "task": "wipe", "tasks": None, "robot_type": "arm"}
    video = {"video": True, "video_codec": "h264", "video_quality": 40, "video_key_frames": 2}
    return call, {"source": rows_of(tools, FILMED), "path": "new", **given, **video, **PROGRESS}
