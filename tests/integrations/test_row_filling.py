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
