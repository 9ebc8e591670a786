"""Callbacks for experiment trackers: the host's metrics as curves, counters as rates."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.core import process_report
from geartrain.errors import ArgumentError
from geartrain.launch.trackers import TensorBoardCallback, TrackerCallback, WandbCallback


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of segments that no other program uses."""
    monkeypatch.setenv("GEARTRAIN_DIR", str(tmp_path))
    monkeypatch.setenv(process_report.PERIOD_VARIABLE, "0")


@pytest.fixture
def store() -> Any:
    with gt.Store.create("a-b", {"x": gt.Field((2,), "float32")}, max_length=1, capacity=9) as made:
        yield made


def insert(store: gt.Store, rows: int) -> None:
    store.insert({"x": np.zeros((rows, 1, 2), np.float32)})


class Writer:
    """What TensorBoard's writer is asked for."""

    def __init__(self) -> None:
        self.scalars: dict[int, dict[str, float]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.setdefault(step, {})[name] = value


class Run:
    """What a run of W&B is asked for."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], int]] = []

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.logged.append((scalars, step))


def test_gauges_are_written_as_they_are_and_counters_as_rates_since_the_call_before(store: gt.Store) -> None:
    writer = Writer()
    callback = TensorBoardCallback(writer, every_s=0)
    insert(store, 4)
    assert callback(7)
    began_s = time.monotonic()
    insert(store, 3)
    time.sleep(0.05)
    assert callback(8)
    longest_s = time.monotonic() - began_s
    first, second = writer.scalars[7], writer.scalars[8]
    assert first["geartrain/store_rows/a-b"] == 4 and second["geartrain/store_rows/a-b"] == 7
    assert not any(name.endswith("_per_s") for name in first), "there is nothing before it"
    rate = second["geartrain/store_inserted/a-b_per_s"]
    assert 3 / (longest_s + 1) < rate <= 3 / 0.05
    assert second["geartrain/store_removed/a-b/evicted_per_s"] == 0


def test_a_store_that_begins_anew_has_no_rate_below_zero(store: gt.Store) -> None:
    writer = Writer()
    callback = TensorBoardCallback(writer, every_s=0)
    insert(store, 5)
    callback(0)
    store.close()
    with gt.Store.create("a-b", {"x": gt.Field((2,), "float32")}, max_length=1, capacity=9, persist=False):
        callback(1)
    assert writer.scalars[1]["geartrain/store_inserted/a-b_per_s"] == 0


def test_calls_before_it_is_time_write_nothing(store: gt.Store) -> None:
    run = Run()
    callback = WandbCallback(run, every_s=3600)
    assert [callback(step) for step in range(3)] == [True, False, False]
    ((scalars, step),) = run.logged
    assert step == 0 and scalars["geartrain/store_capacity_rows/a-b"] == 9


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: TrackerCallback(3), "function"),  # type: ignore[arg-type]
        (lambda: TrackerCallback(print, every_s=-1), "every_s"),
        (lambda: TrackerCallback(print, every_s="soon"), "every_s"),  # type: ignore[arg-type]
        (lambda: TrackerCallback(print, trust="all"), "trust"),  # type: ignore[arg-type]
        (lambda: TensorBoardCallback(None), "SummaryWriter"),
        (lambda: WandbCallback({}), "wandb.init"),
        (lambda: TrackerCallback(print)(-1), "step"),
        (lambda: TrackerCallback(print)(1.5), "step"),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_one_error(make: Any, why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        make()


def test_tensorboard_itself_reads_the_curves_again(store: gt.Store, tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "curves"
    with tensorboard.SummaryWriter(str(folder)) as writer:
        callback = TensorBoardCallback(writer, every_s=0)
        for step in range(3):
            insert(store, 1)
            callback(step)
    events = EventAccumulator(str(folder))
    events.Reload()
    rows = events.Scalars("geartrain/store_rows/a-b")
    assert [(each.step, each.value) for each in rows] == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_a_run_of_wandb_itself_takes_them(store: gt.Store, tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(console="off")) as run:
        callback = WandbCallback(run, every_s=0)
        insert(store, 2)
        callback(0)
        assert run.summary["geartrain/store_rows/a-b"] == 2
