"""Fills rows of a store from episodes, with threads for deferred values, and commits them in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from types import TracebackType

import numpy as np

from geartrain.core.threads import ReentrantEvent
from geartrain.integrations.datasets.episode import Array, DeferredSteps, Episode
from geartrain.store.row import Row
from geartrain.store.store import Store


@dataclass
class _Filled:
    """A row that is being filled: its bytes, steps and those of deferred values."""

    row: Row
    nbytes: int = 0
    deferred: int = 0
    parts: list[Future[None]] = field(default_factory=list)


class RowFiller:
    """Fills rows of a store from episodes, several rows at a time, and commits them in the order of the episodes.

    Values that an episode already has are copied at once. Threads produce `DeferredSteps` straight in the rows, for as
    many rows as keep the threads busy.

    After an error, or if the `with` block is left by an exception, uncommitted rows are abandoned. That waits for the
    threads, which stop within one frame. An interruption meanwhile, such as a second Ctrl-C, is raised afterwards.

    Args:
        store: the store to fill.
        threads: number of threads that produce deferred steps.
        committed: called with each row's bytes after its commit.
    """

    def __init__(self, store: Store, threads: int, committed: Callable[[int], None]) -> None:
        self._store, self._threads, self._committed = store, threads, committed
        self._filling: deque[_Filled] = deque()
        self._pool: ThreadPoolExecutor | None = None
        self._stop = ReentrantEvent()
        self.rows = 0  # added
        self.deferred = 0  # steps of deferred values that are in committed rows

    def add(self, episode: Episode) -> None:
        """Begins a row, and commits those before it that are complete. The episode fits the store.

        Raises:
            SourceError: deferred steps, of this episode or one before, cannot be made.
        """
        length = episode.length
        # All steps of the episode are written, so no block needs to be zeroed.
        row = Row(self._store.columns, self._store.native.allocate_one(), 1.0, 0, taken=self._store.fields)
        filled = _Filled(row)
        self._filling.append(filled)
        row.length = length
        for name, values in episode.timed.items():
            block = row[name][:length]
            filled.nbytes += block.nbytes
            if isinstance(values, DeferredSteps):
                filled.deferred += length
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="geartrain-import")
                filled.parts.append(self._pool.submit(_make, values, block, self._stop.is_set, row))
            else:
                np.copyto(block, values, casting="unsafe")  # the caller has checked the conversion
        for name, value in episode.untimed.items():
            row[name] = value
            filled.nbytes += value.nbytes
        self.rows += 1
        self._commit_ready()

    def finish(self) -> None:
        """Commits the remaining rows."""
        while self._filling:
            self._commit_first()

    def _commit_ready(self) -> None:
        while self._filling and (
            all(part.done() for part in self._filling[0].parts)
            or sum(not part.done() for filled in self._filling for part in filled.parts) > 2 * self._threads
        ):
            self._commit_first()

    def _commit_first(self) -> None:
        filled = self._filling[0]
        for part in filled.parts:
            part.result()
        filled.row.commit()
        self._filling.popleft()
        self.deferred += filled.deferred
        self._committed(filled.nbytes)

    def __enter__(self) -> RowFiller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        interrupted: BaseException | None = None
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        # By the parts: a thread whose join was interrupted counts as ended in CPython before 3.13.
        while writing := [part for filled in self._filling for part in filled.parts if not part.done()]:
            try:
                wait(writing)
            except BaseException as another:  # of a signal
                interrupted = another
        for filled in self._filling:
            filled.row.abandon()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        if interrupted is not None:
            raise interrupted


def _make(values: DeferredSteps, block: Array, stopped: Callable[[], bool], row: Row) -> None:
    """Makes the steps in a block of the row, which is kept meanwhile: one that is dropped gives its block back."""
    values.read_into(block, stopped)


__all__ = ["RowFiller"]
