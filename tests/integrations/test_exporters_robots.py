"""Export to Minari and LeRobot v3: read back to the bit, by the importers and by the formats' own rules."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import minari
import numpy as np
import pyarrow.parquet as pq
import pytest
from imports import imported, rows, store_name
from mounts import file_system
from PIL import Image

import geartrain as gt
import geartrain.integrations.datasets.export_lerobot as export_lerobot
import geartrain.integrations.datasets.export_minari as export_minari
import geartrain.integrations.datasets.exporter as exporter
import geartrain.integrations.datasets.stored_rows as stored_rows
from geartrain.errors import ArgumentError, DatasetExistsError, NoSpaceError, ProcessDiedError, SourceError
from geartrain.integrations import export_store
from geartrain.integrations.datasets.feature_stats import FeatureStats, episode_stats
from geartrain.integrations.datasets.writer_process import WriterProcess

pytestmark = pytest.mark.filterwarnings("ignore")  # Minari warns about every field left empty

MINARI = {
    "obs.state": gt.Field((3,), "float32"),
    "obs.camera": gt.Field((32, 33, 3), "uint8"),  # which Minari would make a JPEG of
    "action": gt.Field((2,), "float64"),
    "reward": gt.Field((), "float32"),
    "terminated": gt.Field((), "bool"),
    "truncated": gt.Field((), "bool"),
    "final_obs.state": gt.Field((3,), "float32", per_row=True),
    "final_obs.camera": gt.Field((32, 33, 3), "uint8", per_row=True),
    "infos.speed": gt.Field((), "float16"),
    "log_prob": gt.Field((), "float32"),
}
LEROBOT = {
    "obs.state": gt.Field((3,), "float32"),
    "obs.images.front": gt.Field((16, 17, 3), "uint8"),
    "obs.images.depth": gt.Field((8, 9, 1), "uint8"),
    "obs.grid": gt.Field((2, 2), "float32"),
    "obs.pixels": gt.Field((3, 8, 8), "uint8"),  # no image: channels come first
    "action": gt.Field((2,), "float64"),
    "reward": gt.Field((), "float32"),
    "done": gt.Field((), "bool"),
    "count": gt.Field((), "int64"),
}


def filled(fields: dict[str, gt.Field], n: int = 6, max_length: int = 5) -> gt.Store:
    """A store of ragged rows."""
    rng = np.random.default_rng(0)
    store = gt.Store.create(store_name(), fields, max_length=max_length, capacity=n)
    data = {}
    for name, field in fields.items():
        shape = (n, *field.shape) if field.per_row else (n, max_length, *field.shape)
        kind = field.numpy_dtype
        if kind.kind == "f":
            data[name] = rng.normal(size=shape).astype(kind)
        else:
            data[name] = rng.integers(0, 2 if kind.kind == "b" else 256, shape).astype(kind)
    store.insert(data, lengths=rng.integers(1, max_length + 1, n))
    return store


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rows, "GROUP_BYTES", 7_000)  # a row or two


@pytest.fixture
def robots() -> Iterator[gt.Store]:
    with filled(LEROBOT) as store:
        yield store


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]], names: dict[str, str]) -> None:
    assert len(found) == len(expected)
    for row, other in zip(found, expected, strict=True):
        for name, stored in names.items():
            assert row[name].dtype == other[stored].dtype
            assert row[name].shape == other[stored].shape
            assert row[name].tobytes() == other[stored].tobytes(), name


def test_a_minari_dataset_comes_back_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    with filled(MINARI) as store:
        export_store(store, tmp_path / "mine-v0", format="minari", dataset_id="mine-v0", progress=False)
        wanted = [name for name in MINARI if "." not in name or not name.startswith("infos")]
        wanted.remove("log_prob")
        with imported(tmp_path / "mine-v0", fields=[*wanted, "infos.speed", "log_prob=infos.log_prob"]) as found:
            assert found.fields == store.fields
            same(rows(found), rows(store), {name: name for name in MINARI})
        dataset = minari.load_dataset("mine-v0")
        assert dataset.total_episodes == len(store)
        assert dataset.observation_space["camera"].shape == (32, 33, 3)
        for episode, row in zip(dataset.iterate_episodes(), rows(store), strict=True):
            np.testing.assert_array_equal(episode.observations["state"][:-1], row["obs.state"])
            np.testing.assert_array_equal(episode.observations["camera"][-1], row["final_obs.camera"])
            np.testing.assert_array_equal(episode.actions, row["action"])
            assert dataset.observation_space.contains({k: v[0] for k, v in episode.observations.items()})
        export_store(store, tmp_path / "mine-v0", format="minari", overwrite=True, progress=False)


PLAIN = {
    "obs": gt.Field((1000,), "float32"),
    "action": gt.Field((), "int64"),
    "reward": gt.Field((), "float32"),
    "terminated": gt.Field((), "bool"),
    "truncated": gt.Field((), "bool"),
}


def test_a_limit_of_file_sizes_ends_a_minari_export_before_hdf5_meets_it(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with filled(PLAIN, 40, 5) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
        try:
            with pytest.raises(NoSpaceError, match="File too large"):
                export_store(store, tmp_path / "x", format="minari", repeat_last_obs=True, progress=False)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not any(tmp_path.iterdir())


def test_a_full_disk_ends_a_minari_export_before_hdf5_meets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(PLAIN, 40, 5) as store, file_system(tmp_path, "300k"):
        options: dict[str, Any] = {"format": "minari", "repeat_last_obs": True, "progress": False}
        steps = int(store.status()["length"].sum())
        needed = steps * 4014 + 40 * (4000 + 5 * 2048)
        with pytest.raises(NoSpaceError, match=f"needs {needed:,} bytes"):
            export_store(store, tmp_path / "x", **options)
        monkeypatch.setattr(export_minari.MinariWriter, "needed_bytes", classmethod(lambda *_: 0))
        with pytest.raises(NoSpaceError, match="No space left"):
            export_store(store, tmp_path / "x", **options)
        assert not any(tmp_path.iterdir())


def test_what_hdf5_says_of_a_full_disk_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, group: Any) -> int:
        raise ValueError("Unable to synchronously create group (errno = 28, error message = 'No space left on device')")

    monkeypatch.setattr(export_minari.MinariWriter, "write", full)
    with filled(PLAIN, 2) as store, pytest.raises(NoSpaceError, match="No space left"):
        export_store(store, tmp_path / "x", format="minari", repeat_last_obs=True, progress=False)
    assert not any(tmp_path.iterdir())


def writers(monkeypatch: pytest.MonkeyPatch) -> list[WriterProcess]:
    """The child processes of exports, as they are asked to write."""
    found: list[WriterProcess] = []
    call = WriterProcess.call

    def noted(self: WriterProcess, *arguments: Any) -> Any:
        found.append(self)
        return call(self, *arguments)

    monkeypatch.setattr(WriterProcess, "call", noted)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_process_that_writes_hdf5_and_leaves_nothing(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(BaseException):
        pass

    def stopped(*_: object) -> None:
        raise Stopped

    found = writers(monkeypatch)
    advance = exporter.Progress.advance

    def signalled(*arguments: Any) -> None:
        advance(*arguments)
        os.kill(os.getpid(), number)
        signal.pthread_sigmask(signal.SIG_BLOCK, [])  # a point where pending handlers run

    monkeypatch.setattr(exporter.Progress, "advance", signalled)
    before = signal.signal(number, stopped)
    try:
        with filled(PLAIN, 6) as store, pytest.raises(Stopped):
            export_store(store, tmp_path / "x", format="minari", repeat_last_obs=True, progress=False)
    finally:
        signal.signal(number, before)
    assert len(found) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(found[0].pid, 0)
    assert not any(tmp_path.iterdir())


def test_a_crash_of_the_process_that_writes_hdf5_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = WriterProcess.call

    def crashing(self: WriterProcess, *arguments: Any) -> Any:
        os.kill(self.pid, signal.SIGSEGV)
        return call(self, *arguments)

    monkeypatch.setattr(WriterProcess, "call", crashing)
    with filled(PLAIN, 2) as store, pytest.raises(ProcessDiedError, match=r"x.*died of SIGSEGV"):
        export_store(store, tmp_path / "x", format="minari", repeat_last_obs=True, progress=False)
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("size", ["100k", "200k", "300k", "400k"])
def test_a_disk_that_fills_behind_the_check_is_one_error(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = writers(monkeypatch)
    monkeypatch.setattr(export_minari.MinariWriter, "needed_bytes", classmethod(lambda *_: 0))
    monkeypatch.setattr(export_minari.MinariWriter, "_check_room", lambda *_: None)
    with filled(PLAIN, 40, 5) as store, file_system(tmp_path, size):
        with pytest.raises(NoSpaceError, match="No space left"):
            export_store(store, tmp_path / "x", format="minari", repeat_last_obs=True, progress=False)
        assert found, "HDF5 itself met the full disk"
        assert not any(tmp_path.iterdir())


def test_what_minari_cannot_hold_is_told_by_name(tmp_path: Path) -> None:
    names = {"o": "obs", "a": "action", "r": "reward", "t": "terminated", "u": "truncated"}
    fields = {
        "o": gt.Field((2,), "float32"),
        "a": gt.Field((), "int64"),
        "r": gt.Field((), "float32"),
        "t": gt.Field((), "bool"),
        "u": gt.Field((), "uint8"),
        "z": gt.Field((), "complex64"),
        "goal": gt.Field((), "int64", per_row=True),
    }

    def refused(message: str, **options: Any) -> None:
        with pytest.raises(SourceError, match=message):
            export_store(store, tmp_path / "x", format="minari", progress=False, **options)
        assert not any(tmp_path.iterdir())

    swapped = {to: name for name, to in names.items()}
    with filled(fields, 2) as store:
        refused("goal .once a row")
        refused("z .complex64", fields=["z"])
        refused("have no obs, action, reward, terminated, truncated", fields=["o"])
        refused("truncated is one bool a step", fields=swapped)
        refused("have no final_obs", fields=swapped, cast="uint8=bool")
        with pytest.raises(ArgumentError, match="dataset_id is"):
            export_store(store, tmp_path / "x", format="minari", fields=swapped, dataset_id="x", progress=False)
        export_store(
            store,
            tmp_path / "x",
            format="minari",
            fields=swapped,
            cast="uint8=bool",
            repeat_last_obs=True,
            progress=False,
        )
        with imported(tmp_path / "x") as found:
            for row in rows(found):
                assert row["final_obs"].tolist() == row["obs"][-1].tolist()


def test_a_lerobot_dataset_comes_back_to_the_bit(robots: gt.Store, tmp_path: Path) -> None:
    report = export_store(robots, tmp_path / "x", format="lerobot", fps=10, task="pick the cube", progress=False)
    assert report.left_out == {}
    with imported(tmp_path / "x") as found:
        assert found.fields == {
            **LEROBOT,
            "timestamp": gt.Field((), "float32"),
            "task_index": gt.Field((), "int64"),
        }
        same(rows(found), rows(robots), {name: name for name in LEROBOT})
        for row in rows(found):
            np.testing.assert_array_equal(row["timestamp"], (np.arange(len(row["done"])) / 10).astype("f"))
            assert not row["task_index"].any()


def test_a_lerobot_dataset_keeps_the_rules_of_its_format(
    robots: gt.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_lerobot, "_FILE_BYTES", 1)  # a file for each group
    monkeypatch.setattr(export_lerobot, "_FILES_PER_CHUNK", 2)
    export_store(robots, tmp_path / "x", format="lerobot", fps=10, robot_type="arm", progress=False)
    info = json.loads((tmp_path / "x/meta/info.json").read_text())
    lengths = robots.status()["length"].tolist()
    assert info["codebase_version"] == "v3.0"
    assert (info["total_episodes"], info["total_frames"], info["fps"]) == (6, sum(lengths), 10)
    assert info["splits"] == {"train": "0:6"}
    assert info["features"]["observation.images.front"] == {
        "dtype": "image",
        "shape": [16, 17, 3],
        "names": ["height", "width", "channels"],
    }
    assert info["features"]["next.reward"]["shape"] == [1]
    assert {"timestamp", "frame_index", "episode_index", "index", "task_index"} <= info["features"].keys()
    tasks = pq.read_table(tmp_path / "x/meta/tasks.parquet")
    assert tasks.to_pylist() == [{"task_index": 0, "task": "unknown"}]
    assert json.loads(tasks.schema.metadata[b"pandas"])["index_columns"] == ["task"]
    episodes = [
        row
        for path in sorted((tmp_path / "x/meta/episodes").glob("*/*.parquet"))
        for row in pq.read_table(path, partitioning=None).to_pylist()
    ]
    assert [row["episode_index"] for row in episodes] == list(range(6))
    assert [row["length"] for row in episodes] == lengths
    places = {(row["data/chunk_index"], row["data/file_index"]) for row in episodes}
    assert len(places) > 2
    assert {chunk for chunk, _ in places} >= {0, 1}
    at = 0
    for row in episodes:
        assert (row["dataset_from_index"], row["dataset_to_index"]) == (at, at + row["length"])
        chunk, file = row["data/chunk_index"], row["data/file_index"]
        path = tmp_path / "x" / info["data_path"].format(chunk_index=chunk, file_index=file)
        table = pq.read_table(path, partitioning=None)
        mine = [each for each in table.to_pylist() if each["episode_index"] == row["episode_index"]]
        assert [each["frame_index"] for each in mine] == list(range(row["length"]))
        assert [each["index"] for each in mine] == list(range(at, at + row["length"]))
        assert mine[0]["observation.images.front"]["bytes"].startswith(b"\x89PNG")
        assert row["stats/action/count"] == [row["length"]]
        at += row["length"]
    stats = json.loads((tmp_path / "x/meta/stats.json").read_text())
    actions = np.concatenate([row["action"] for row in rows(robots)])
    for name, expected in {"mean": actions.mean(0), "std": actions.std(0), "max": actions.max(0)}.items():
        np.testing.assert_allclose(stats["action"][name], expected, rtol=1e-9)
    assert np.shape(stats["observation.images.front"]["mean"]) == (3, 1, 1)
    pixels = np.concatenate([row["obs.images.front"].reshape(-1, 3) for row in rows(robots)]) / 255
    means = [row["stats/observation.images.front/mean"] for row in episodes]
    np.testing.assert_allclose(np.average(means, axis=0, weights=lengths).ravel(), pixels.mean(0), rtol=1e-9)
    np.testing.assert_allclose(np.ravel(stats["observation.images.front"]["std"]), pixels.std(0), rtol=1e-9)
    with imported(tmp_path / "x") as found:
        same(rows(found), rows(robots), {name: name for name in LEROBOT})


def test_tasks_have_names(tmp_path: Path) -> None:
    fields = {"obs": gt.Field((2,), "float32"), "task_index": gt.Field((), "int64")}
    with gt.Store.create(store_name(), fields, max_length=2, capacity=2) as store:
        store.insert({"obs": np.ones((2, 2, 2), "f"), "task_index": np.array([[0, 1], [1, 1]])})
        with pytest.raises(ArgumentError, match="the option tasks"):
            export_store(store, tmp_path / "x", format="lerobot", fps=5, progress=False)
        with pytest.raises(SourceError, match="task_index 1 has no name"):
            export_store(store, tmp_path / "x", format="lerobot", fps=5, tasks="pick", progress=False)
        for tasks in (["a", "a"], [], [3]):
            with pytest.raises(ArgumentError, match="each another one"):
                export_store(store, tmp_path / "x", format="lerobot", fps=5, tasks=tasks, progress=False)
        assert not any(tmp_path.iterdir())
        export_store(store, tmp_path / "x", format="lerobot", fps=5, tasks=["pick", "place"], progress=False)
        with imported(tmp_path / "x", fields=["obs=obs.state", "task_index"]) as found:
            same(rows(found), rows(store), {"obs": "obs", "task_index": "task_index"})
        (table,) = (tmp_path / "x/meta/episodes").glob("*/*.parquet")
        assert [row["tasks"] for row in pq.read_table(table, partitioning=None).to_pylist()] == [
            ["pick", "place"],
            ["place"],
        ]


def test_several_tasks_need_a_task_index(tmp_path: Path) -> None:
    with filled({"obs": gt.Field((2,), "float32")}, 2) as store:
        with pytest.raises(ArgumentError, match="2 tasks are given, and the rows have no task_index"):
            export_store(store, tmp_path / "x", format="lerobot", fps=5, tasks=["a", "b"], progress=False)
        assert not any(tmp_path.iterdir())
        export_store(store, tmp_path / "x", format="lerobot", fps=5, tasks=["a"], progress=False)


def test_what_lerobot_cannot_hold_is_told_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields = {
        "obs": gt.Field((2,), "float32"),
        "goal": gt.Field((2,), "float32", per_row=True),
        "deep": gt.Field((1, 1, 1, 1, 1, 2), "uint8"),
        "index": gt.Field((), "int64"),
        "timestamp": gt.Field((), "float64"),
        "a/b": gt.Field((), "int64"),
        "c": gt.Field((), "complex64"),
    }
    with filled(fields, 2) as store:
        with pytest.raises(SourceError) as told:
            export_store(store, tmp_path / "x", format="lerobot", fps=5, progress=False)
        for name in set(fields) - {"obs"}:
            assert f"{name} (" in str(told.value)
        with caplog.at_level(logging.WARNING):
            report = export_store(store, tmp_path / "x", format="lerobot", fps=5, skip_unsupported=True, progress=False)
        assert set(report.left_out) == set(fields) - {"obs"}
        assert all(name in caplog.text for name in report.left_out)
        with pytest.raises(SourceError, match=r"two fields would be written as 'observation\.state'"):
            export_store(store, tmp_path / "y", format="lerobot", fps=5, fields={"obs": "obs", "obs.state": "obs"},
                         progress=False)  # fmt: skip
        with pytest.raises(DatasetExistsError):
            export_store(store, tmp_path / "x", format="lerobot", fields="obs", fps=5, progress=False)
        for fps in (0, -1, 10**9):
            with pytest.raises(ArgumentError, match="fps"):
                export_store(store, tmp_path / "y", format="lerobot", fields="obs", fps=fps, progress=False)


def test_images_are_exactly_the_pixels(robots: gt.Store, tmp_path: Path) -> None:
    export_store(robots, tmp_path / "x", format="lerobot", fps=5, fields="obs.images.front", progress=False)
    (table,) = (tmp_path / "x/data").glob("*/*.parquet")
    first = pq.read_table(table, partitioning=None).to_pylist()[0]["observation.images.front"]["bytes"]
    (tmp_path / "frame.png").write_bytes(first)
    np.testing.assert_array_equal(
        np.asarray(Image.open(tmp_path / "frame.png")), rows(robots)[0]["obs.images.front"][0]
    )


def test_statistics_are_the_same_in_any_pieces() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=(60, 2, 3)).astype("f") * 100
    ends = np.array([1, 2, 30, 60])
    starts = np.array([0, 1, 2, 30])
    whole, pieces = FeatureStats(), FeatureStats()
    whole.add(episode_stats(values, starts, ends, image=False))
    for start, end in zip(starts, ends, strict=True):
        pieces.add(episode_stats(values, np.array([start]), np.array([end]), image=False))
    for name, figure in whole.as_json().items():
        np.testing.assert_allclose(figure, pieces.as_json()[name], rtol=1e-12, err_msg=name)
    np.testing.assert_allclose(whole.as_json()["std"], values.astype("d").std(0), rtol=1e-9)
    frames = rng.integers(0, 256, (9, 8, 8, 3)).astype("u1")
    stats = episode_stats(frames, np.array([0]), np.array([9]), image=True)
    flat = frames.reshape(-1, 3) / 255
    np.testing.assert_allclose(stats["std"][0].ravel(), flat.std(0), rtol=1e-9)
    found = np.quantile(flat, 0.9, axis=0, method="inverted_cdf")
    np.testing.assert_allclose(stats["q90"][0].ravel(), found)
