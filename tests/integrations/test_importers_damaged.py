"""Damaged and foreign data: an import ends with a `SourceError` that names the file, or with every row that is there.

Each format's small dataset is made once, and then damaged by a seeded generator: bits are flipped, files are cut, and
numbers of its JSON are replaced. What no checksum covers may change values, but an import never ends in an error of
another class, and a refusal names the dataset in one line.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from imports import imported, rows, store_name

from geartrain.errors import ArgumentError, SourceError
from geartrain.integrations import import_dataset
from geartrain.integrations.datasets.arrays import ArraySource

pytestmark = pytest.mark.filterwarnings("ignore")

DAMAGES = 60
STEPS = 12
#: Rows or steps of a damaged file's metadata beyond this are refused here, and not given a segment.
MOST_STEPS = 1000


def make_npz(path: Path) -> Path:
    file = path / "data.npz"
    np.savez(file, obs=np.ones((3, 4, 2), "float32"), reward=np.ones((3, 4)), lengths=np.array([4, 2, 3]))
    return file


def make_npy(path: Path) -> Path:
    folder = path / "arrays"
    folder.mkdir()
    np.save(folder / "obs.npy", np.ones((STEPS, 2), "float32"))
    np.save(folder / "reward.npy", np.ones(STEPS))
    np.save(folder / "ends.npy", np.array([4, 8, STEPS]))
    return folder


def d4rl_arrays() -> dict[str, Any]:
    return {
        "observations": np.ones((STEPS, 3), np.float32),
        "actions": np.ones((STEPS, 2), np.float32),
        "rewards": np.ones(STEPS, np.float32),
        "terminals": np.arange(STEPS) % 4 == 3,
        "timeouts": np.zeros(STEPS, bool),
    }


def make_d4rl(path: Path, **more: Any) -> Path:
    file = path / "data.hdf5"
    with h5py.File(file, "w") as opened:
        for name, array in {**d4rl_arrays(), **more}.items():
            if isinstance(array, dict):
                group = opened.create_group(name)
                for below, values in array.items():
                    group.create_dataset(below, data=values)
            elif array is not None:
                opened.create_dataset(name, data=array)
    return file


def make_minari(path: Path, layout: str) -> Path:
    gym = pytest.importorskip("gymnasium")
    minari = pytest.importorskip("minari")
    from minari.data_collector import EpisodeBuffer

    box = gym.spaces.Box(-10, 10, (3,), np.float32)
    buffers = [
        EpisodeBuffer(
            id=index,
            observations=np.ones((length + 1, 3), np.float32),
            actions=np.ones((length, 3), np.float32),
            rewards=[1.0] * length,
            terminations=[False] * (length - 1) + [True],
            truncations=[False] * length,
            infos=None,
        )
        for index, length in enumerate((4, 1, 6))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(path))
        minari.create_dataset_from_buffers(
            "toy/small-v0", buffers, observation_space=box, action_space=box, data_format=layout
        )
    return path / "toy" / "small-v0"


def make_lerobot(path: Path) -> Path:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = path / "lerobot"
    for each in ("meta/episodes/chunk-000", "data/chunk-000"):
        (folder / each).mkdir(parents=True)
    features = {
        "observation.state": {"dtype": "float32", "shape": [3], "names": None},
        "action": {"dtype": "float64", "shape": [2], "names": None},
        "episode_index": {"dtype": "int64", "shape": [1], "names": None},
    }
    info = {
        "codebase_version": "v3.0",
        "features": features,
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    }
    (folder / "meta/info.json").write_text(json.dumps(info))
    lengths = [4, 7, 1]
    meta = {"episode_index": range(3), "length": lengths, "data/chunk_index": [0] * 3, "data/file_index": [0] * 3}
    parquet.write_table(
        arrow.table({key: arrow.array(list(value)) for key, value in meta.items()}),
        folder / "meta/episodes/chunk-000/file-000.parquet",
    )
    frames = {
        "observation.state": arrow.array([[1.0, 2.0, 3.0]] * STEPS, arrow.list_(arrow.float32(), 3)),
        "action": arrow.array([[1.0, 2.0]] * STEPS, arrow.list_(arrow.float64(), 2)),
        "episode_index": arrow.array(np.repeat(range(3), lengths)),
    }
    parquet.write_table(arrow.table(frames), folder / "data/chunk-000/file-000.parquet")
    return folder


def make_rlds(path: Path, kind: str = "tfrecord") -> Path:
    tfrecord = pytest.importorskip("tfrecord.writer")
    folder = path / "rlds"
    folder.mkdir()
    tensor = {"shape": {"dimensions": ["3"]}, "dtype": "float32", "encoding": "none"}
    scalar = {"shape": {}, "dtype": "float32", "encoding": "none"}
    flag = {"shape": {}, "dtype": "bool", "encoding": "none"}
    steps = {"observation": {"tensor": tensor}, "reward": {"tensor": scalar}, "is_last": {"tensor": flag}}
    steps_of = {"sequence": {"feature": {"featuresDict": {"features": steps}}, "length": "-1"}}
    (folder / "features.json").write_text(json.dumps({"featuresDict": {"features": {"steps": steps_of}}}))
    info = {"name": "toy", "fileFormat": kind, "splits": [{"name": "train", "shardLengths": ["3"]}]}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    file = str(folder / f"toy-train.{kind}-00000-of-00001")
    records = [
        {
            "steps/observation": (np.ones(3 * length), "float"),
            "steps/reward": (np.ones(length), "float"),
            "steps/is_last": ((np.arange(length) == length - 1).astype(int), "int"),
        }
        for length in (4, 1, 6)
    ]
    if kind == "tfrecord":
        writer = tfrecord.TFRecordWriter(file)
        for record in records:
            writer.write(record)
    else:
        module = pytest.importorskip("array_record.python.array_record_module")
        writer = module.ArrayRecordWriter(file, "group_size:1")
        for record in records:
            writer.write(tfrecord.TFRecordWriter.serialize_tf_example(record))
    writer.close()
    return folder


MADE: dict[str, Callable[[Path], Path]] = {
    "npz": make_npz,
    "npy": make_npy,
    "d4rl": make_d4rl,
    "minari-hdf5": lambda path: make_minari(path, "hdf5"),
    "minari-arrow": lambda path: make_minari(path, "arrow"),
    "minari-parquet": lambda path: make_minari(path, "parquet"),
    "lerobot": make_lerobot,
    "rlds-tfrecord": make_rlds,
    "rlds-array_record": lambda path: make_rlds(path, "array_record"),
}
FORMAT = {"npz": "arrays", "npy": "arrays"}


def damage(source: Path, random: np.random.Generator) -> str:
    """Damages one file of a dataset; returns what was done to which."""
    files = [source] if source.is_file() else sorted(each for each in source.rglob("*") if each.is_file())
    file = files[random.integers(len(files))]
    data = bytearray(file.read_bytes())
    kind = ("flip", "header", "cut", "zeros", "json")[random.integers(5)]
    if kind == "json" and file.suffix != ".json":
        kind = "header"
    if kind == "cut":
        data = data[: random.integers(len(data))]
    elif kind == "zeros":
        at = random.integers(len(data))
        data[at : at + 16] = bytes(len(data[at : at + 16]))
    elif kind == "json":
        damage_json(json_ := json.loads(data), random)
        data = bytearray(json.dumps(json_).encode())
    else:
        for at in random.integers(0, len(data) if kind == "flip" else min(512, len(data)), 4):
            data[at] ^= 1 << random.integers(8)
    file.write_bytes(data)
    return f"{kind} of {file.name}"


def damage_json(node: Any, random: np.random.Generator) -> None:
    """Replaces one value, at any depth, by one of another type or sign."""
    keys: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node)))
    if not keys:
        return
    key = keys[random.integers(len(keys))]
    if isinstance(node[key], dict | list) and node[key] and random.integers(4):
        damage_json(node[key], random)
        return
    node[key] = [None, -1, "x", [], {}, 2.5, True, [3], "{"][random.integers(9)]


@pytest.mark.parametrize("name", MADE)
def test_a_damaged_dataset_is_refused_by_name_or_read(name: str, tmp_path: Path) -> None:
    sound = tmp_path / "sound"
    sound.mkdir()
    source = MADE[name](sound)
    kind = FORMAT.get(name, name.partition("-")[0])
    with imported(source, format=kind) as store:
        expected = len(store)
    random = np.random.default_rng(list(name.encode()))
    wrong, refused = [], 0
    for number in range(DAMAGES):
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
        shutil.copytree(sound, tmp_path / "damaged")
        damaged = tmp_path / "damaged" / source.relative_to(sound)
        done = damage(damaged, random)
        try:
            with imported(damaged, format=kind, capacity=expected, max_length=MOST_STEPS) as store:
                assert len(store) <= expected
        except SourceError as error:
            refused += 1
            if "\n" in str(error) or "damaged" not in str(error):
                wrong.append(f"{number}, {done}: not one line that names the dataset: {error}")
        except Exception as error:
            wrong.append(f"{number}, {done}: {type(error).__name__}: {error}")
    assert not wrong, f"{len(wrong)} of {DAMAGES}:\n" + "\n".join(wrong)
    assert refused >= DAMAGES // 6, "the damages are too small to be noticed"


WRONG_ARRAYS: dict[str, tuple[dict[str, Any], str]] = {
    "an empty group of observations": ({"observations": {}}, "observations holds no array of 12 steps"),
    "a group in place of rewards": ({"rewards": {"x": np.ones(STEPS)}}, "rewards is one number a step"),
    "rewards of no axis": ({"rewards": 1.0}, "rewards is one number a step"),
    "fewer actions": ({"actions": np.ones((STEPS - 1, 2))}, r"actions has shape \(11, 2\), rewards has 12 steps"),
    "flags of two values a step": ({"terminals": np.zeros((STEPS, 2))}, r"terminals has shape \(12, 2\)"),
    "a flag that is NaN": ({"terminals": np.where(np.arange(STEPS) == 5, np.nan, 0.0)}, "terminals: step 5 is nan"),
    "a flag that is 7": ({"timeouts": np.where(np.arange(STEPS) == 9, 7, 0)}, "timeouts: step 9 is 7"),
    "flags that are words": (
        {"terminals": np.array([b"no"] * STEPS)},
        "terminals: flags are booleans, or numbers 0 and 1",
    ),
    "no terminals": ({"terminals": None}, "lacks terminals"),
}


@pytest.mark.parametrize("name", WRONG_ARRAYS)
def test_d4rl_arrays_of_a_wrong_kind_are_named(name: str, tmp_path: Path) -> None:
    more, said = WRONG_ARRAYS[name]
    file = make_d4rl(tmp_path, **more)
    with pytest.raises(SourceError, match=rf"data\.hdf5.*{said}"):
        import_dataset(file, store_name(), progress=False)


def test_flags_that_only_are_stored_are_checked_too(tmp_path: Path) -> None:
    file = make_d4rl(tmp_path, timeouts=np.where(np.arange(STEPS) == 9, np.nan, 0.0))
    with pytest.raises(SourceError, match=r"timeouts: step 9 is nan"):
        import_dataset(file, store_name(), progress=False, timeouts=False)


def test_flags_of_zeros_and_ones_of_any_dtype_are_read(tmp_path: Path) -> None:
    file = make_d4rl(tmp_path, terminals=(np.arange(STEPS) % 4 == 3).astype(np.float64)[:, None])
    with imported(file) as store:
        assert [row["terminated"].tolist() for row in rows(store)] == [[False] * 3 + [True]] * 3


@pytest.mark.parametrize("layout", ["hdf5", "arrow", "parquet"])
def test_a_minari_episode_longer_than_its_metadata_promise_is_refused(layout: str, tmp_path: Path) -> None:
    source = make_minari(tmp_path, layout)
    if layout == "hdf5":
        with h5py.File(source / "data/main_data.hdf5", "a") as file:
            file["episode_2"].attrs["total_steps"] = 5
    else:
        about = source / "data/2/metadata.json"
        document = json.loads(about.read_text())
        assert document["total_steps"] == 6
        about.write_text(json.dumps({**document, "total_steps": 5}))
    with pytest.raises(SourceError, match=r"episode_2: field 'obs' has 7 steps, its metadata promise 6"):
        import_dataset(source, store_name(), progress=False)


def test_minari_episodes_that_the_metadata_do_not_count_are_refused(tmp_path: Path) -> None:
    source = make_minari(tmp_path, "hdf5")
    with h5py.File(source / "data/main_data.hdf5", "a") as file:
        file.copy("episode_2", "episode_3")
    with pytest.raises(SourceError, match="holds 4 episodes, its metadata promise 3"):
        import_dataset(source, store_name(), progress=False)


@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        (np.array([4.0, np.nan, 3.0]), "lengths are whole numbers, found nan"),
        (np.array([4.0, 2.5, 3.0]), "lengths are whole numbers, found 2.5"),
        (np.array([4, -1, 3]), "episode 1: length -1"),
        (np.array(["4", "2", "3"]), "lengths are whole numbers, found <U1"),
        (np.array([[4, 2, 3]]), "3 episodes need as many lengths"),
        (np.array([0, 0, 0]), "has no episode with at least one step"),
    ],
)
def test_lengths_that_are_none_are_refused(lengths: np.ndarray, said: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", obs=np.ones((3, 4, 2)), lengths=lengths)
    with pytest.raises(SourceError, match=rf"data\.npz.*{said}"):
        import_dataset(tmp_path / "data.npz", store_name(), progress=False)


def test_episodes_without_a_step_are_counted_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "data.npz", obs=np.ones((3, 4, 2)), lengths=np.array([4, 0, 3]))
    with imported(tmp_path / "data.npz") as store:
        assert len(store) == 2
    assert "2 episodes, 7 steps" in caplog.text
    assert "1 without a step left out" in caplog.text
    store = import_dataset(tmp_path / "data.npz", store_name(), progress=True)
    store.unlink()
    store.close()
    assert "1 without a step left out" in capfd.readouterr().err


def test_integers_of_a_record_are_not_made_of_fractions(tmp_path: Path) -> None:
    tfrecord = pytest.importorskip("tfrecord.writer")
    folder = make_rlds(tmp_path)
    writer = tfrecord.TFRecordWriter(str(folder / "toy-train.tfrecord-00000-of-00001"))
    for _ in range(3):
        writer.write(
            {
                "steps/observation": (np.ones(6), "float"),
                "steps/reward": (np.ones(2), "float"),
                "steps/is_last": (np.array([0.5, 1.0]), "float"),
            }
        )
    writer.close()
    with pytest.raises(
        SourceError, match=r"record 0: field 'is_last': holds a float_list, features\.json promises bool"
    ):
        import_dataset(folder, store_name(), progress=False)


@pytest.mark.parametrize(
    "options",
    [
        {"format": "hdf6"},
        {"capacity": 0},
        {"capacity": 2.5},
        {"max_length": 0},
        {"on_too_long": "cut"},
        {"cast": "float64"},
        {"fields": "obs="},
        {"no_such": 1},
        {"episode_steps": "ten"},
        {"episode_steps": True},
        {"timeouts": "no"},
        {"keep_unfinished": 1},
    ],
    ids=str,
)
def test_arguments_that_cannot_be_meant_are_argument_errors(options: dict[str, Any], tmp_path: Path) -> None:
    file = make_d4rl(tmp_path)
    with pytest.raises(ArgumentError):
        import_dataset(file, store_name(), progress=False, **options)


@pytest.mark.parametrize("begin", [b"", b"P", b"hello, no arrays", b"\x80\x04K\x01.", b"\x93NUMPY\x01\x00"], ids=repr)
@pytest.mark.parametrize("suffix", ["npz", "npy"])
def test_a_file_that_begins_as_no_other_is_named_and_nobody_told_to_unpickle_it(
    tmp_path: Path, suffix: str, begin: bytes
) -> None:
    if suffix == "npy" and begin.startswith(b"\x93NUMPY"):
        begin = begin[:4]
    (tmp_path / f"data.{suffix}").write_bytes(begin)
    with pytest.raises(
        SourceError, match=rf"data\.{suffix}: is damaged, or no \.{suffix} file: it (begins|is empty)"
    ) as raised:
        ArraySource(tmp_path / "data.npz" if suffix == "npz" else tmp_path)
    assert "pickle" not in str(raised.value)
