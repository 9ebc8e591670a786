"""Data sets: opened read-only they are drawn from and never changed, and a kill leaves them as they were."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import patience, until
from mounts import file_system
from replay_calls import replay_of
from segments import Fork, kill

import geartrain as gt
from geartrain.errors import (
    ArgumentError,
    NotEnoughRowsError,
    ReadOnlyStoreError,
    StaleStoreError,
    StoreClosedError,
    StoreExistsError,
)
from geartrain.integrations import import_dataset
from geartrain.selection import Epochs, Fifo, Mixture, Prioritized, TopK, Uniform

ROWS, STEPS = 12, 5
FIELDS = {"obs": gt.Field((2,), "float32"), "task": gt.Field((), "int64", per_row=True)}
ARRAYS = {"obs": np.arange(ROWS * STEPS * 2, dtype=np.float32).reshape(ROWS, STEPS, 2)}


def fill(store: gt.Store, n: int = ROWS) -> gt.Keys:
    obs = np.arange(n * STEPS * 2, dtype=np.float32).reshape(n, STEPS, 2)
    return store.insert({"obs": obs, "task": np.arange(n)}, priorities=np.arange(1.0, n + 1))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """The path of a store that was closed in order."""
    path = tmp_path / "dataset"
    with gt.Store.create(path, FIELDS, max_length=STEPS, capacity=ROWS) as store:
        fill(store)
    return path


STRATEGIES: dict[str, Any] = {
    "uniform": lambda: Uniform(seed=1),
    "over steps": lambda: Uniform(seed=1, over="steps"),
    "prioritized": lambda: Prioritized(seed=1),
    "distinct": lambda: Uniform(seed=1, replacement=False),
    "epochs": lambda: Epochs(seed=1),
    "epochs of steps": lambda: Epochs(seed=1, over="steps"),
    "fifo": Fifo,
    "top": TopK,
}


# --- drawn from ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_replay_of_a_read_only_store_draws_what_any_draws_and_changes_no_byte(
    dataset: Path, strategy: str, prefetch: int
) -> None:
    before = dataset.read_bytes()
    made: list[list[Any]] = []
    with gt.Store.open(dataset, mode="r") as store:
        assert store.read_only
        with gt.Replay(store, STRATEGIES[strategy](), 2, window=2, prefetch=prefetch, output="numpy") as replay:
            made.append([replay.sample()["obs"].tolist() for _ in range(5)])
        assert store.stats()["sampled"] == 0
    assert dataset.read_bytes() == before
    with gt.Store.open(dataset) as store:
        assert not store.read_only
        with gt.Replay(store, STRATEGIES[strategy](), 2, window=2, prefetch=prefetch, output="numpy") as replay:
            made.append([replay.sample()["obs"].tolist() for _ in range(5)])
    assert made[0] == made[1]


@pytest.mark.parametrize("what", ["resumed", "mixture", "fetch", "save"])
def test_whatever_reads_takes_it(dataset: Path, what: str, tmp_path: Path) -> None:
    before = dataset.read_bytes()
    with gt.Store.open(dataset, FIELDS, mode="r") as store:
        if what == "fetch":
            assert len(gt.fetch(store, store.keys())) == ROWS
        elif what == "save":
            assert store.save(tmp_path / "saved").rows == ROWS
            with gt.Store.load(tmp_path / "saved") as again:
                assert len(again) == ROWS
        elif what == "mixture":
            selection = Mixture([0.5, 0.5], [Uniform(seed=0), Uniform(seed=1)])
            with gt.Replay([store, store], selection, 4, window=2) as replay:
                assert len(replay.sample()) == 4
        else:
            with gt.Replay(store, Uniform(seed=0), 4) as replay:
                first = replay.sample()
                replay.load_state_dict({**replay.state_dict(), "step": 0})
                assert replay.sample().keys == first.keys
    assert dataset.read_bytes() == before


def test_a_data_set_on_a_read_only_file_system_is_trained_on(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with file_system(tmp_path, "4m") as place:
        with gt.Store.create(place / "x", FIELDS, max_length=STEPS, capacity=ROWS) as store:
            fill(store)
        del store  # and its mapping, for which the file is open
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        with gt.Store.open(place / "x", mode="r") as looked, gt.Replay(looked, Prioritized(seed=0), 8) as replay:
            assert len(replay.sample()) == 8
            assert looked.save(tmp_path_factory.mktemp("kept") / "saved").rows == ROWS
        del looked, replay


def test_a_reader_waits_for_a_living_writer_and_for_no_other(name: str) -> None:
    with gt.Store.create(name, FIELDS, max_length=STEPS, capacity=ROWS) as store:
        with gt.Store.open(name, mode="r") as looked, replay_of(looked, Uniform(), 4, min_rows=4) as replay:
            assert looked.other_processes() == 1
            fill(store, 4)
            assert len(replay.sample()) == 4
    path = store.path.with_name(f"{store.path.name}.empty")
    try:
        gt.Store.create(path, FIELDS, max_length=STEPS, capacity=ROWS).close()
        with gt.Store.open(path, mode="r") as looked, replay_of(looked, Uniform(), 4, timeout_s=60) as replay:
            with pytest.raises(NotEnoughRowsError, match="no other process has it open"):
                replay.sample()
    finally:
        path.unlink(missing_ok=True)


# --- refused --------------------------------------------------------------------------------------------------------


def test_what_would_change_it_is_refused_by_name(dataset: Path) -> None:
    before = dataset.read_bytes()
    with gt.Store.open(dataset, mode="r") as store, gt.Replay(store, Prioritized(seed=0), 4) as replay:
        batch = replay.sample()
        for call in (
            lambda: replay.update_priorities(batch.keys, np.ones(4)),
            lambda: store.update_priorities(batch.keys, np.ones(4)),
            lambda: store.limiter.set(samples_per_insert=1, min_size_to_sample=1, error_buffer=10),
            store.row,
            lambda: fill(store),
            lambda: store.delete(batch.keys),
            lambda: store.write(batch.keys, {"task": np.zeros(4, np.int64)}),
            lambda: store.raise_priorities(0.5),
        ):
            with pytest.raises(ReadOnlyStoreError, match=r"mode='r'.*Store\.open"):
                call()
        assert len(replay.sample()) == 4
        with pytest.raises(ReadOnlyStoreError, match="schedule of alpha"):
            gt.Replay(store, Prioritized(seed=0, alpha=lambda step: 0.5), 4)
    assert dataset.read_bytes() == before
    with pytest.raises(ArgumentError, match="mode='r' reads a store that is there"):
        gt.Store.open(dataset, FIELDS, mode="r", create="missing", max_length=STEPS, capacity=4)
    with pytest.raises(ArgumentError, match="mode"):
        gt.Store.open(dataset, mode="w")  # type: ignore[arg-type]


def test_counted_draws_need_a_handle_that_counts(name: str) -> None:
    with gt.Store.create(name, FIELDS, max_length=STEPS, capacity=ROWS, max_times_sampled=2) as store:
        fill(store)
        with gt.Store.open(name, mode="r") as looked:
            with pytest.raises(ReadOnlyStoreError, match="max_times_sampled=2"):
                gt.Replay(looked, Uniform(), 4)
    with gt.Store.create(name, FIELDS, max_length=STEPS, capacity=ROWS) as store:
        fill(store)
        with gt.Store.open(name, mode="r") as looked:
            with gt.Replay(looked, Uniform(), 4, prefetch=0) as replay:
                replay.sample()
                store.limiter.set(samples_per_insert=1.0, min_size_to_sample=1, error_buffer=100.0)
                with pytest.raises(ReadOnlyStoreError, match="rate limiter"):
                    replay.sample()
            with pytest.raises(ReadOnlyStoreError, match="rate limiter"):
                gt.Replay(looked, Uniform(), 4)


# --- kills ----------------------------------------------------------------------------------------------------------


def _trains(path: str, mode: str, ready: Path) -> None:
    """A training in a process that never ends by itself."""
    with gt.Store.open(path, mode=mode) as store, gt.Replay(store, Uniform(seed=0), 4) as replay:  # type: ignore[arg-type]
        replay.sample()
        ready.touch()
        signal.pause()


def _killed(fork: Fork, path: Path, mode: str, tmp_path: Path) -> None:
    ready = tmp_path / f"ready-{mode}"
    child = fork(lambda: _trains(str(path), mode, ready))
    until(ready.exists, patience(20))
    kill(child)


def test_a_killed_training_on_a_read_only_data_set_leaves_it_as_it_was(
    dataset: Path, fork: Fork, tmp_path: Path
) -> None:
    before = dataset.read_bytes()
    _killed(fork, dataset, "r", tmp_path)
    assert dataset.read_bytes() == before
    with gt.Store.open(dataset) as store:
        assert len(store) == ROWS and store.audit() == []


def test_a_killed_writer_s_store_is_stale_and_what_keeps_its_rows_is_said_first(
    dataset: Path, fork: Fork, tmp_path: Path
) -> None:
    _killed(fork, dataset, "rw", tmp_path)
    for mode in ("rw", "r"):
        with pytest.raises(StaleStoreError) as caught:
            gt.Store.open(dataset, mode=mode)  # type: ignore[arg-type]
        text = str(caught.value)
        assert text.index("adopt=True") < text.index("replace") < text.index("deletes")
    with gt.Store.open(dataset, mode="r", adopt=True) as looked, gt.Replay(looked, Uniform(), 4) as replay:
        assert len(replay.sample()) == 4
    with pytest.raises(StaleStoreError):  # who reads it repairs nothing
        gt.Store.open(dataset)
    with gt.Store.open(dataset, adopt=True) as store:
        assert len(store) == ROWS
    gt.Store.open(dataset).close()


# --- imports --------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["file", "memory"])
def into(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> Iterator[str]:
    yield str(tmp_path / "imported") if request.param == "file" else name
    if request.param == "memory":
        gt.Store.open(name, create="replace", fields={"a": gt.Field((), "bool", per_row=True)}, capacity=1).close()


def test_an_import_is_whole_from_its_return_on_whatever_is_killed(into: str, fork: Fork, tmp_path: Path) -> None:
    ready = tmp_path / "ready"

    def imports_and_trains() -> None:
        store = import_dataset(ARRAYS, into, progress=False)
        assert store.read_only
        with gt.Replay(store, Uniform(seed=0), 4) as replay:
            replay.sample()
            ready.touch()
            signal.pause()

    child = fork(imports_and_trains)
    until(ready.exists, patience(30))
    with gt.Store.open(into, mode="r") as looked:
        assert len(looked) == ROWS
    kill(child)
    with pytest.raises(StoreExistsError, match=r"Store.open\(.*mode='r'\) reads it.*delete its rows first"):
        import_dataset(ARRAYS, into, progress=False)
    with gt.Store.open(into, mode="r") as looked, gt.Replay(looked, Uniform(), 4) as replay:
        assert len(looked) == ROWS and len(replay.sample()) == 4
    store = gt.Store.open(into)  # for writing; the mark is taken away before anything else
    assert not store.native.closed_in_order() and store.audit() == []
    store.close(keep=True)


def test_an_import_that_is_killed_half_way_is_no_data_set(into: str, fork: Fork, tmp_path: Path) -> None:
    ready = tmp_path / "ready"

    class Stops:
        def __init__(self) -> None:
            self.at = 0

        def __len__(self) -> int:
            return ROWS

        def __getitem__(self, index: int) -> dict[str, Any]:
            if index == ROWS - 1:
                ready.touch()
                signal.pause()
            return {"obs": ARRAYS["obs"][index]}

    options: dict[str, Any] = {"format": "torch", "capacity": ROWS, "max_length": STEPS, "progress": False}
    child = fork(lambda: import_dataset(Stops(), into, **options))
    until(ready.exists, patience(30))
    kill(child)
    with pytest.raises(StaleStoreError, match="an import that was not finished"):
        gt.Store.open(into, mode="r")


def test_writing_to_a_sealed_data_set_takes_its_mark_away_first(into: str, fork: Fork, tmp_path: Path) -> None:
    with import_dataset(ARRAYS, into, progress=False) as store:
        assert store.native.closed_in_order()
        with pytest.raises(ReadOnlyStoreError):
            store.delete(store.keys())
        with gt.Store.open(into) as writer:
            assert not writer.native.closed_in_order()
            assert writer.update_priorities(writer.keys(), np.full(ROWS, 2.0)) == 0
        with gt.Replay(store, Uniform(), 4) as replay:
            assert len(replay.sample()) == 4
        copy = gt.Store.open(into, mode="r")
        assert set(copy.status()["priority"].tolist()) == {2.0}
        copy.close()


def test_a_data_set_without_a_name_is_gone_with_its_handle(name: str) -> None:
    store = import_dataset(ARRAYS, name, progress=False)
    path = store.path
    assert path.exists()
    store.close()
    assert not path.exists()
    with pytest.raises(StoreClosedError):
        store.keys()
