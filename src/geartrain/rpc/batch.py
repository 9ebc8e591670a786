"""Many calls answered by one: the server's side of `rpc.batched`, and answers that come later."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

from geartrain.errors import BusyError, MessageError, SchemaError

_LOCK = threading.Lock()  # of the one moment in which a result meets whoever wants it


class Pending:
    """An answer that is not there yet. Completed once, by whoever comes first: a result, an error, or a cancel."""

    __slots__ = ("_done", "_on_cancel", "_when_done", "cancelled", "error", "value")

    def __init__(self, on_cancel: Callable[[], object] | None = None) -> None:
        self.cancelled = False
        self._done = False
        self.value: Any = None
        self.error: BaseException | None = None
        self._on_cancel = on_cancel
        self._when_done: Callable[[], object] | None = None

    def when_done(self, callback: Callable[[], object]) -> None:
        """Calls back once; at once when it is done already."""
        self._when_done = callback
        if self._done:
            self._call_back()

    def complete(self, value: Any = None, error: BaseException | None = None) -> None:
        """Sets the result or the error."""
        self.value, self.error, self._done = value, error, True
        self._call_back()

    def take_from(self, task: Any) -> None:
        """Completes like a `concurrent.futures.Future` that is done."""
        if task.cancelled():
            self.complete(error=CancelledError())
        else:
            error = task.exception()
            self.complete(None if error is not None else task.result(), error)

    def _call_back(self) -> None:
        with _LOCK:
            callback, self._when_done = self._when_done, None
        if callback is not None:
            callback()

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.cancelled = True
        if self._on_cancel is not None:
            self._on_cancel()


class Batcher:
    """Gathers calls of one function and runs it for all of them.

    The thread whose call fills a batch runs it, with nothing handed to another; a thread of the batcher's own runs
    those that did not fill in time.
    """

    def __init__(
        self, function: Callable[..., Any], max_size: int, max_wait_us: float | None, max_queued: int, stack: bool
    ) -> None:
        if max_size < 1 or max_queued < max_size or (max_wait_us is not None and max_wait_us < 0):
            raise SchemaError(
                f"a batch has at least one call, and the queue room for one batch; found max_size={max_size}, "
                f"max_queued={max_queued}, max_wait_us={max_wait_us}"
            )
        self.__module__, self.__qualname__ = function.__module__, function.__qualname__
        self._function = function
        self._max_size, self._max_queued, self._stack = max_size, max_queued, stack
        self._max_wait_s = None if max_wait_us is None else max_wait_us * 1e-6
        self._waiting: list[tuple[Pending, tuple[Any, ...]]] = []
        self._since_s = 0.0
        self._changed = threading.Condition()
        self._timer: threading.Thread | None = None
        self._timer_sleeps = False

    def submit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pending:
        """Adds a call; runs the batch when that fills it. Raises `BusyError`."""
        if kwargs:
            raise MessageError("a batched function takes positional arguments only")
        pending = Pending()
        full = None
        with self._changed:
            if len(self._waiting) >= self._max_queued:
                raise BusyError(f"{len(self._waiting)} calls of {self.__qualname__} wait already")
            self._waiting.append((pending, args))
            if len(self._waiting) == 1:
                self._since_s = time.monotonic()
            if len(self._waiting) >= self._max_size:
                full, self._waiting = self._waiting, []
            elif self._max_wait_s is not None:
                self._keep_time()
        if full is not None:
            self._run(full)
        return pending

    def _keep_time(self) -> None:
        if self._timer is None:
            self._timer = threading.Thread(
                target=self._watch, name=f"geartrain batches {self.__qualname__}", daemon=True
            )
            self._timer.start()
        elif self._timer_sleeps:
            self._changed.notify()

    def _watch(self) -> None:
        assert self._max_wait_s is not None
        while True:
            with self._changed:
                # While calls keep coming it looks at the clock now and then, and need not be woken for each batch.
                if not self._waiting:
                    self._timer_sleeps = True
                    self._changed.wait()
                    self._timer_sleeps = False
                    continue
                left_s = self._since_s + self._max_wait_s - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                    continue
                late, self._waiting = self._waiting, []
            self._run(late)

    def _run(self, batch: list[tuple[Pending, tuple[Any, ...]]]) -> None:
        batch = [entry for entry in batch if not entry[0].cancelled]
        if not batch:
            return
        try:
            width = len(batch[0][1])
            if any(len(args) != width for _, args in batch):
                raise MessageError(f"calls of {self.__qualname__} that share a batch need as many arguments each")
            columns: list[Any] = [[args[i] for _, args in batch] for i in range(width)]
            if self._stack:
                columns = [_stacked(column) for column in columns]
            results = self._function(*columns)
            if len(results) != len(batch):
                raise SchemaError(f"{self.__qualname__} got {len(batch)} calls and returned {len(results)} results")
        except BaseException as error:
            for pending, _ in batch:
                pending.complete(error=error)
            return
        for (pending, _), result in zip(batch, results, strict=True):
            pending.complete(result)


def _stacked(values: Sequence[Any]) -> Any:
    if type(values[0]).__module__.startswith("torch"):
        import torch

        return torch.stack(list(values))
    import numpy as np

    return np.stack(values)
