"""Rows that threads fill: nobody else has their memory before the last thread has ended with them."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from geartrain.core.schema import Field
from geartrain.errors import SourceError, StoreFullError
from geartrain.integrations import Episode, Source, ingest
from geartrain.integrations.datasets.episode import DeferredSteps
from geartrain.integrations.datasets.row_filling import RowFiller
from geartrain.store.store import Store


class Slow(DeferredSteps):
    """Steps that are made once they are let go, whether anyone still wants them or not."""

    dtype = np.dtype(np.int64)

    def __init__(self, length: int = 2, error: str | None = None) -> None:
        self.shape = (length,)
        self.error = error
        self.begun, self.let_go, self.ended = threading.Event(), threading.Event(), threading.Event()

    def read_into(self, out: np.ndarray, stopped: Callable[[], bool] = lambda: False) -> None:
        self.begun.set()
        assert self.let_go.wait(30)
        if self.error is not None:
            raise SourceError(self.error)
        out[:] = 7
        self.ended.set()

    def first(self, length: int) -> Slow:
        raise NotImplementedError


class Several(Source):
    """A source of these episodes' steps, of two threads."""

    name = "several"
    threads = 2

    def __init__(self, *steps: Any) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Episode]:
        for number, each in enumerate(self.steps):
            yield Episode(f"episode {number}", {"x": each})


@pytest.fixture
def store() -> Iterator[Store]:
    with Store.create({"x": Field((), "int64")}, max_length=2, capacity=1) as made:
        yield made


def test_an_interruption_while_the_threads_end_is_raised_after_them(store: Store) -> None:
    """A second Ctrl-C left the rows' blocks to whoever came next, while a thread still wrote into them."""
    slow = Slow()

    def interrupt() -> None:
        slow.begun.wait(30)
        for _ in range(2):
            time.sleep(0.1)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.1)
        slow.let_go.set()

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            ingest(Several(slow), store, progress=False)
        assert slow.ended.is_set()
        store.row().abandon()
        assert len(store) == 0
    finally:
        slow.let_go.set()
        thread.join()


def test_a_row_is_kept_while_a_thread_writes_into_it(store: Store) -> None:
    slow = Slow()
    filler = RowFiller(store, 1, lambda nbytes: None)
    filler.add(Episode("only", {"x": slow}))
    assert slow.begun.wait(30)
    del filler
    gc.collect()
    try:
        with pytest.raises(StoreFullError):
            store.row()
    finally:
        slow.let_go.set()
    until = time.monotonic() + 30
    while True:
        try:
            store.row().abandon()
            break
        except StoreFullError:
            assert time.monotonic() < until
            time.sleep(0.01)
    assert slow.ended.is_set()


def let_go_soon(*steps: Slow) -> threading.Thread:
    """Lets them go once the first has begun and the source had time for all."""

    def later() -> None:
        steps[0].begun.wait(30)
        time.sleep(0.2)
        for each in steps:
            each.let_go.set()

    thread = threading.Thread(target=later)
    thread.start()
    return thread


@pytest.mark.parametrize("broken", [True, False])
def test_the_rows_before_an_episode_that_does_not_fit_are_written(broken: bool) -> None:
    """Which of them were was a matter of how fast the threads were."""

    class Broken(Several):
        def __iter__(self) -> Iterator[Episode]:
            yield from super().__iter__()
            raise SourceError("the file ends")

    steps = [Slow(), Slow()]
    source = Broken(*steps) if broken else Several(*steps, np.zeros(9, np.int64))
    with Store.create({"x": Field((), "int64")}, max_length=2, capacity=4) as store:
        thread = let_go_soon(*steps)
        try:
            with pytest.raises(SourceError, match="the file ends" if broken else "episode 2: has 9 steps"):
                ingest(source, store, progress=False)
        finally:
            thread.join()
        assert len(store) == 2


def test_the_error_of_the_first_episode_that_fails_is_told() -> None:
    steps = [Slow(), Slow(error="episode 1: no frame"), Slow()]
    with Store.create({"x": Field((), "int64")}, max_length=2, capacity=4) as store:
        thread = let_go_soon(*steps)
        try:
            with pytest.raises(SourceError, match="episode 1: no frame"):
                ingest(Several(*steps, np.zeros(9, np.int64)), store, progress=False)
        finally:
            thread.join()
        assert len(store) == 1


def test_deferred_steps_are_no_array_without_a_copy() -> None:
    steps = Slow()
    steps.let_go.set()
    with pytest.raises(ValueError, match="without a copy"):
        steps.__array__(copy=False)
    assert np.asarray(steps).tolist() == [7, 7]
    assert np.array(steps, copy=True, dtype="f4").tolist() == [7, 7]
