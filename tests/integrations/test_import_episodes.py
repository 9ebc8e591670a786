"""Choosing episodes by number and by metadata: the same arguments for every format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from imports import assert_rows, imported, rows, store_name

import geartrain.integrations.datasets.lerobot as lerobot
from geartrain.errors import ArgumentError, FieldError, SourceError
from geartrain.integrations import Episode, Source, import_dataset, open_source

pytestmark = pytest.mark.filterwarnings("ignore")

LENGTHS = [5, 3, 8, 2, 7, 4]
TASKS = ["pick", "place", "pick", "stack", "pick", "place"]
SEEDS = [10, 11, 12, 13, 14, 15]
#: The reward of every step is the episode's number.
RETURNS = [float(number * length) for number, length in enumerate(LENGTHS)]
STARTS = np.cumsum([0, *LENGTHS])
TOTAL = sum(LENGTHS)
OBS = np.arange(TOTAL * 2, dtype=np.float32).reshape(TOTAL, 2)
REWARD = np.repeat(np.arange(len(LENGTHS)), LENGTHS).astype(np.float32)
LAST = np.isin(np.arange(TOTAL), STARTS[1:] - 1)


def padded() -> dict[str, Any]:
    obs = np.zeros((len(LENGTHS), max(LENGTHS), 2), np.float32)
    reward = np.zeros((len(LENGTHS), max(LENGTHS)), np.float32)
    for index, length in enumerate(LENGTHS):
        obs[index, :length], reward[index, :length] = OBS[STARTS[index] :][:length], index
    about = {"task": np.array(TASKS), "seed": np.array(SEEDS)}
    return {"obs": obs, "reward": reward, "lengths": np.array(LENGTHS), **about}


def make_arrays(path: Path) -> tuple[Any, dict[str, Any]]:
    data = padded()
    return data, {"lengths": data.pop("lengths"), "skip_unsupported": True}


def make_npz(path: Path) -> tuple[Any, dict[str, Any]]:
    np.savez(path / "data.npz", **padded())
    return path / "data.npz", {"skip_unsupported": True}


def make_flat(path: Path) -> tuple[Any, dict[str, Any]]:
    (path / "flat").mkdir()
    about = {"task": np.array(TASKS), "seed": np.array(SEEDS)}
    for name, array in {"obs": OBS, "reward": REWARD, "ends": STARTS[1:], **about}.items():
        np.save(path / "flat" / f"{name}.npy", array)
    return path / "flat", {"fields": ["obs", "reward", "seed"], "untimed": ["seed"]}


def make_d4rl(path: Path) -> tuple[Any, dict[str, Any]]:
    with h5py.File(path / "data.hdf5", "w") as file:
        file["observations"], file["actions"], file["rewards"] = OBS, OBS, REWARD
        file["terminals"] = LAST & (np.arange(TOTAL) < STARTS[3])
        file["timeouts"] = LAST & (np.arange(TOTAL) >= STARTS[3])
    return path / "data.hdf5", {}


def make_minari(path: Path, layout: str = "hdf5") -> tuple[Any, dict[str, Any]]:
    gym, minari = pytest.importorskip("gymnasium"), pytest.importorskip("minari")
    from minari.data_collector import EpisodeBuffer

    box = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    buffers = [
        EpisodeBuffer(
            id=index,
            seed=SEEDS[index],
            observations=np.full((length + 1, 2), index, np.float32),
            actions=np.full((length, 2), index, np.float32),
            rewards=[float(index)] * length,
            terminations=[False] * length,
            truncations=[False] * (length - 1) + [True],
        )
        for index, length in enumerate(LENGTHS)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(path))
        minari.create_dataset_from_buffers(
            "toy/small-v0", buffers, observation_space=box, action_space=box, data_format=layout
        )
    return path / "toy" / "small-v0", {}


def make_parquet(path: Path) -> tuple[Any, dict[str, Any]]:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for number, (first, last) in enumerate([(0, 4), (4, 6)]):
        edges, cut = arrow.array(STARTS[first : last + 1] - STARTS[first]), slice(STARTS[first], STARTS[last])
        obs = arrow.FixedSizeListArray.from_arrays(arrow.array(OBS[cut].ravel()), 2)
        columns = {
            "obs": arrow.LargeListArray.from_arrays(edges, obs),
            "reward": arrow.LargeListArray.from_arrays(edges, arrow.array(REWARD[cut])),
            "task": TASKS[first:last],
            "seed": SEEDS[first:last],
        }
        (path / "parquet").mkdir(exist_ok=True)
        parquet.write_table(arrow.table(columns), path / "parquet" / f"{number}.parquet", row_group_size=2)
    return path / "parquet", {"skip_unsupported": True}


def make_lerobot(path: Path) -> tuple[Any, dict[str, Any]]:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    root = path / "lerobot"
    for each in ("meta/episodes/chunk-000", "data/chunk-000"):
        (root / each).mkdir(parents=True)
    features = {
        "observation.state": {"dtype": "float32", "shape": [2], "names": None},
        "observation.image": {"dtype": "image", "shape": [2, 2, 3], "names": ["height", "width", "channels"]},
        "next.reward": {"dtype": "float32", "shape": [1], "names": None},
        "next.success": {"dtype": "bool", "shape": [1], "names": None},
        "episode_index": {"dtype": "int64", "shape": [1], "names": None},
    }
    template = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    info = {"codebase_version": "v3.0", "features": features, "data_path": template, "fps": 10}
    (root / "meta/info.json").write_text(json.dumps(info))
    files = [0, 0, 0, 0, 1, 1]
    meta = {
        "episode_index": list(range(6)),
        "length": LENGTHS,
        "tasks": [[task] for task in TASKS],
        "seed": SEEDS,
        "data/chunk_index": [0] * 6,
        "data/file_index": files,
        "stats/next.reward/max": RETURNS,
    }
    parquet.write_table(arrow.table(meta), root / "meta/episodes/chunk-000/file-000.parquet")
    numbers = np.repeat(np.arange(6), LENGTHS)
    for file in (0, 1):
        of_file = np.isin(numbers, np.flatnonzero(np.array(files) == file))
        columns = {
            "observation.state": arrow.FixedSizeListArray.from_arrays(arrow.array(OBS[of_file].ravel()), 2),
            "observation.image": [{"bytes": png(index), "path": ""} for index in numbers[of_file].tolist()],
            "next.reward": REWARD[of_file],
            "next.success": (LAST & (numbers % 2 == 0))[of_file],
            "episode_index": numbers[of_file],
        }
        # Row groups of other sizes than episodes.
        parquet.write_table(
            arrow.table(columns), root / template.format(chunk_index=0, file_index=file), row_group_size=6
        )
    return root, {}


def png(value: int) -> bytes:
    image = pytest.importorskip("PIL.Image")
    import io

    held = io.BytesIO()
    image.fromarray(np.full((2, 2, 3), value, np.uint8)).save(held, "png")
    return held.getvalue()


def make_rlds(path: Path) -> tuple[Any, dict[str, Any]]:
    tfrecord = pytest.importorskip("tfrecord.writer")
    folder = path / "rlds"
    folder.mkdir()

    def tensor(dtype: str, *shape: int) -> dict[str, Any]:
        dimensions = {"dimensions": [str(n) for n in shape]} if shape else {}
        return {"tensor": {"shape": dimensions, "dtype": dtype, "encoding": "none"}}

    observation = {"featuresDict": {"features": {"state": tensor("float32", 2)}}}
    steps = {"observation": observation, "reward": tensor("float32"), "language_instruction": {"text": {}}}
    steps_of = {"sequence": {"feature": {"featuresDict": {"features": steps}}, "length": "-1"}}
    about = {"featuresDict": {"features": {"seed": tensor("int64"), "file": {"text": {}}}}}
    features = {"featuresDict": {"features": {"steps": steps_of, "episode_metadata": about}}}
    (folder / "features.json").write_text(json.dumps(features))
    info = {"name": "toy", "splits": [{"name": "train", "shardLengths": ["4", "2"]}]}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    for shard, numbers in enumerate((range(4), range(4, 6))):
        writer = tfrecord.TFRecordWriter(str(folder / f"toy-train.tfrecord-0000{shard}-of-00002"))
        for index in numbers:
            cut = slice(STARTS[index], STARTS[index + 1])
            record = {
                "steps/observation/state": (OBS[cut].ravel(), "float"),
                "steps/reward": (REWARD[cut], "float"),
                "steps/language_instruction": ([TASKS[index].encode()] * LENGTHS[index], "byte"),
                "episode_metadata/seed": ([SEEDS[index]], "int"),
                "episode_metadata/file": ([b"%d.h5" % index], "byte"),
            }
            writer.write(record)
        writer.close()
    return folder, {"skip_unsupported": True}


def make_torch(path: Path) -> tuple[Any, dict[str, Any]]:
    return [{"obs": OBS[STARTS[i] : STARTS[i + 1]], "seed": np.int64(SEEDS[i])} for i in range(len(LENGTHS))], {}


class Squares(Source):
    """A source of a user's: it says nothing but its episodes."""

    name = "squares"

    def __iter__(self) -> Iterator[Episode]:
        for index, length in enumerate(LENGTHS):
            yield Episode(f"episode {index}", {"x": np.arange(length) ** 2}, {"seed": np.int64(SEEDS[index])})


MADE: dict[str, Callable[[Path], tuple[Any, dict[str, Any]]]] = {
    "arrays": make_arrays,
    "npz": make_npz,
    "flat .npy": make_flat,
    "d4rl": make_d4rl,
    "minari hdf5": make_minari,
    "minari arrow": lambda path: make_minari(path, "arrow"),
    "minari parquet": lambda path: make_minari(path, "parquet"),
    "parquet": make_parquet,
    "lerobot": make_lerobot,
    "rlds": make_rlds,
    "torch": make_torch,
    "a user's source": lambda path: (Squares(), {}),
}
#: What each format's episodes have beside number and length.
NAMES = {
    "arrays": {"task", "seed", "return"},
    "npz": {"task", "seed", "return"},
    "flat .npy": {"task", "seed", "return"},
    "d4rl": {"return", "terminated", "truncated"},
    "minari hdf5": {"id", "seed", "return"},
    "minari arrow": {"id", "seed", "return"},
    "minari parquet": {"id", "seed", "return"},
    "parquet": {"task", "seed", "return"},
    "lerobot": {"episode_index", "tasks", "task", "seed", "return", "success"},
    "rlds": {"language_instruction", "seed", "file", "return"},
    "torch": {"seed"},
    "a user's source": {"seed"},
}
KNOWN: dict[str, list[Any]] = {
    "episode": list(range(6)),
    "length": LENGTHS,
    "task": TASKS,
    "language_instruction": TASKS,
    "seed": SEEDS,
    "return": RETURNS,
    "success": [True, False] * 3,
    "terminated": [True] * 3 + [False] * 3,
    "truncated": [False] * 3 + [True] * 3,
    "id": list(range(6)),
    "file": [f"{index}.h5" for index in range(6)],
}


@pytest.mark.parametrize("name", MADE)
def test_episodes_are_chosen_by_number_and_by_metadata(name: str, tmp_path: Path) -> None:
    source, options = MADE[name](tmp_path)
    with imported(source, **options) as store:
        every = rows(store)
    assert len(every) == 6
    for choice, numbers in {
        "number and slice": ({"episodes": "5,1:4:2"}, [1, 3, 5]),
        "a range": ({"episodes": range(4, 6)}, [4, 5]),
        "metadata": ({"where": lambda about: about["length"] < 5}, [1, 3, 5]),
        "both": ({"episodes": slice(-4, None), "where": ["length>=4", "length<8"]}, [4, 5]),
    }.values():
        with imported(source, **options, **choice) as store:
            assert store.capacity == len(numbers)
            assert store.max_length == max(LENGTHS[number] for number in numbers)
            assert_rows(store, [every[number] for number in numbers])


@pytest.mark.parametrize("name", MADE)
def test_each_format_tells_what_it_knows_of_episodes(name: str, tmp_path: Path) -> None:
    source, options = MADE[name](tmp_path)
    found = list(open_source(source, **options).metadata())
    assert len(found) == 6
    for number, about in enumerate(found):
        assert {"episode", "length", *NAMES[name]} <= about.keys()
        for each in about:
            if each in KNOWN:
                assert about[each] == KNOWN[each][number], (number, each)
                assert type(about[each]) is type(KNOWN[each][number]), each
    for each in NAMES[name] & {"return", "seed"}:
        chosen = open_source(source, **options, where=f"{each}<={KNOWN[each][2]}")
        assert [about["episode"] for about in chosen.metadata()] == [
            number for number in range(6) if KNOWN[each][number] <= KNOWN[each][2]
        ]


def test_figures_are_those_of_their_episodes_where_a_file_has_them_in_another_order(tmp_path: Path) -> None:
    root, _ = make_lerobot(tmp_path)
    parquet = pytest.importorskip("pyarrow.parquet")
    file = root / "data/chunk-000/file-000.parquet"
    table = parquet.read_table(file)
    parquet.write_table(table.take(np.argsort(-table.column("episode_index").to_numpy(), kind="stable")), file)
    assert [about["return"] for about in open_source(root).metadata()] == RETURNS


DAMAGED = {
    "minari arrow": ("toy/small-v0/data/[12345]/*.arrow", 0),
    "lerobot": ("data/*/file-000.parquet", 4),
    "rlds": ("toy-train.tfrecord-00001*", 1),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_data_of_other_episodes_is_not_read(name: str, tmp_path: Path) -> None:
    source, options = MADE[name](tmp_path)
    files, number = DAMAGED[name]
    with imported(source, **options) as store:
        every = rows(store)
    damaged = list(tmp_path.rglob(files))
    assert damaged
    for file in damaged:
        data = file.read_bytes()
        # A Parquet file's end, which says where its row groups are, stays.
        end = 8 + int.from_bytes(data[-8:-4], "little") if name == "lerobot" else 0
        file.write_bytes(b"x" * (len(data) - end) + data[len(data) - end :])
    with imported(source, **options, episodes=[number], where=f"length={LENGTHS[number]}") as store:
        assert_rows(store, [every[number]])
    with pytest.raises(SourceError):
        import_dataset(source, store_name(), progress=False, **options)


def test_images_of_other_episodes_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = make_lerobot(tmp_path)
    decode, decoded = lerobot.decode_image, []

    def counted(data: bytes, *more: Any) -> Any:
        decoded.append(data)
        return decode(data, *more)

    monkeypatch.setattr(lerobot, "decode_image", counted)
    opened = open_source(source, where=["task=place", "success=false", "return>0"])
    assert not decoded
    assert [episode.length for episode in opened] == [3, 4] and len(decoded) == 3 + 4


@pytest.mark.parametrize(
    ("conditions", "numbers"),
    [
        ("task=pick", [0, 2, 4]),
        (["task!=pick", "length>2"], [1, 5]),
        ("tag=red", [0, 3]),
        ("tag!=red", [1, 2, 4, 5]),
        ("score>=0.5", [1, 2, 5]),
        ("score=2", [2]),
        ("won=true", [0, 5]),
        ("won = 0", [1, 2, 3, 4]),
        (lambda about: about.get("won") and "score" in about, [0, 5]),
        (lambda about: np.bool_(about["episode"] == 3), [3]),
    ],
)
def test_conditions_compare_texts_numbers_flags_and_lists(conditions: Any, numbers: list[int]) -> None:
    class Told(Squares):
        """Episode 1 lacks tags, those of episode 5 are missing, as is the score of 4."""

        def metadata(self) -> Iterator[dict[str, Any]]:
            tags = [["red", "blue"], [], ["blue"], ["red"], ["blue"], None]
            scores = [0.25, 0.5, 2, float("nan"), None, 1.5]
            for index, length in enumerate(LENGTHS):
                about = {"length": length, "task": TASKS[index], "score": scores[index], "won": index in (0, 5)}
                yield about if index == 1 else {**about, "tag": tags[index]}

    chosen = open_source(Told(), where=conditions)
    assert [episode.name for episode in chosen] == [f"episode {number}" for number in numbers]


@pytest.mark.parametrize(
    ("choice", "error", "said"),
    [
        ({"episodes": 6}, SourceError, r"there is no episode 6; it has 6, numbered 0 to 5"),
        ({"episodes": range(4, 10**12)}, SourceError, r"there is no episode 6"),
        ({"episodes": "9:"}, SourceError, r"episodes= chooses no episode; it has 6, numbered 0 to 5"),
        ({"episodes": [3, 1, 3]}, SourceError, r"names episode 3 twice"),
        ({"episodes": [-1]}, ArgumentError, r"numbered from 0, found -1; episodes='-10:' is the last ten"),
        ({"episodes": "1-3"}, ArgumentError, r"episodes='0:100' is the first hundred.*found '1-3'"),
        ({"episodes": "5:1:-1"}, ArgumentError, r"in the dataset's own order: a slice has a step of at least 1"),
        ({"episodes": 2.5}, ArgumentError, r"whole number, found 2\.5"),
        ({"where": "sed=3"}, FieldError, r"no metadata 'sed'; they have episode, length, seed; did you mean 'seed'"),
        ({"where": lambda about: about["sed"] == 3}, FieldError, r"no metadata 'sed'.*did you mean 'seed'"),
        (
            {"where": "seed>15"},
            SourceError,
            r"no episode matches where='seed>15'; 6 episodes were looked at\. seed is 10",
        ),
        ({"where": "seed=3", "episodes": [4]}, SourceError, r"1 episode was looked at\. seed is 14$"),
        ({"where": lambda about: False}, SourceError, r"no episode matches where=; 6 episodes were looked at$"),
        ({"where": lambda about: None}, ArgumentError, r"returns True or False; for episode 0 it returned None"),
        ({"where": "seed"}, ArgumentError, r"'seed' is no condition: write a name, one of .*quotes"),
        ({"where": "seed==11"}, ArgumentError, r"is no condition"),
        ({"where": "seed=many"}, ArgumentError, r"seed is a number, such as 10; 'many' is none"),
        ({"where": []}, ArgumentError, r"where is empty"),
        ({"where": 7}, ArgumentError, r"where is a function of an episode's metadata, or conditions"),
    ],
)
def test_a_choice_of_no_episode_is_refused(choice: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        import_dataset(Squares(), store_name(), progress=False, **choice)


def test_passes_over_the_metadata_show_their_progress(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("geartrain.core.progress.LINE_EVERY_S", 0.0)
    name = store_name()
    with import_dataset(Squares(), name, where="seed<12"):
        told = capfd.readouterr().err
    assert "squares: metadata: 6 episodes" in told
    assert "squares: 2 of 2 episodes" in told
    with import_dataset(Squares(), store_name(), episodes="0:2"):
        assert "squares: lengths: 6 episodes" in capfd.readouterr().err


def test_the_command_line_chooses_episodes(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    import geartrain.tools.cli.app as app

    source, _ = make_npz(tmp_path)
    command = ["import", str(source), "--skip-unsupported", "--into"]
    words = ["--episodes", "-5:", "--where", "task=pick", "--where", "return>10"]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "chosen.gt"), *words])
    assert done.exit_code == 0 and "2 rows, 15 steps" in done.output, done.output
    refused = CliRunner().invoke(app, [*command, str(tmp_path / "none.gt"), "--where", "task=fold"])
    assert refused.exit_code == 1 and not (tmp_path / "none.gt").exists()
    said = " ".join(refused.output.split())
    assert (
        "no episode matches --where task=fold; 6 episodes were looked at. task is 'pick' or 'place' or 'stack'" in said
    )
    refused = CliRunner().invoke(app, [*command, str(tmp_path / "none.gt"), "--where", "tsk=fold"])
    assert refused.exit_code == 2 and "did you mean 'task'" in " ".join(refused.output.split())
    refused = CliRunner().invoke(app, [*command, str(tmp_path / "none.gt"), "--option", "where=task=pick"])
    assert refused.exit_code == 2 and "it is --where" in " ".join(refused.output.split())
