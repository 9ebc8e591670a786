"""Dynamic batching: collects calls of one function and runs them as one batch."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from geartrain.core.arguments import check_flag, check_function, check_real, check_whole, optional
from geartrain.core.lifetime import living, on_error
from geartrain.core.threads import DaemonThread
from geartrain.errors import ArgumentError, BusyError, MessageError
from geartrain.rpc.stats import BatchDone, BatchStats

#: Timer threads of one function, which run batches that did not fill in time.
_MAX_TIMERS = 64


class BatchedCall(Protocol):
    """A call of a batched function: `scheduler.Call`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cancelled: bool

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        """Replies."""


class Batcher:
    """Collects calls of one function and runs the function once for all of them.

    The thread whose call fills a batch runs the batch, without a thread switch. Timer threads run the batches that did
    not fill in time. One timer thread is always free, so a batch that never returns does not delay others. There are at
    most `_MAX_TIMERS` of these threads.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        max_size: int,
        max_wait_us: float | None,
        max_queued: int,
        stack: bool,
        on_batch: Callable[[BatchDone], object] | None = None,
    ) -> None:
        optional(check_real, "max_wait_us", max_wait_us, 0, 1e15)
        check_whole("max_size", max_size, 1)
        check_whole("max_queued, the calls of a batch or more,", max_queued, max_size)
        check_flag("stack", stack)
        optional(check_function, "on_batch", on_batch)
        self.__module__, self.__qualname__ = function.__module__, function.__qualname__
        self._function = function
        self._max_size, self._max_queued, self._stack = max_size, max_queued, stack
        self._max_wait_s = None if max_wait_us is None else max_wait_us * 1e-6
        self._on_batch = on_batch
        self._stats = BatchStats()
        self._waiting: list[BatchedCall] = []
        self._since_s = 0.0
        self._after_fork()
        _batchers.add(self)

    def _after_fork(self) -> None:
        """In a forked child, too: the threads are the parent's, and so are the calls that wait."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting = []
        self._timers = self._free_timers = self._sleeping_timers = 0

    def stats(self) -> BatchStats:
        """A copy of the counters."""
        with self._lock:
            return self._stats.copy()

    def submit(self, call: BatchedCall) -> None:
        """Adds a call, which a batch will finish; runs the batch when that fills it. Raises `BusyError`."""
        if call.kwargs:
            raise MessageError("a batched function takes positional arguments only")
        full = None
        with self._lock:
            if len(self._waiting) >= self._max_queued:
                self._drop_cancelled()
            if len(self._waiting) >= self._max_queued:
                self._stats.refused += 1
                raise BusyError(
                    f"the queue of {self.__qualname__} is full: {len(self._waiting)} calls wait already. Retry "
                    "later, or raise max_queued"
                )
            self._waiting.append(call)
            if len(self._waiting) == 1:
                self._since_s = time.monotonic()
            if len(self._waiting) >= self._max_size:
                self._drop_cancelled()
            if len(self._waiting) >= self._max_size:
                full, self._waiting, since_s = self._waiting, [], self._since_s
            elif self._max_wait_s is not None:
                with on_error(self._waiting.pop):  # no more threads: whoever calls is told, and waits for no batch
                    self._keep_time()
        if full is not None:
            self._run(full, since_s, True)

    def _drop_cancelled(self) -> None:
        # Cancelled calls fill no batch, and take no place in the queue.
        left = [call for call in self._waiting if not call.cancelled]
        self._stats.cancelled += len(self._waiting) - len(left)
        self._waiting = left

    def _keep_time(self) -> None:
        if self._free_timers == 0 and self._timers < _MAX_TIMERS:
            DaemonThread(self._watch, f"geartrain batches {self.__qualname__}").start()
            self._timers += 1
            self._free_timers += 1
        elif 0 < self._free_timers == self._sleeping_timers:
            self._changed.notify()

    def _watch(self) -> None:
        assert self._max_wait_s is not None
        while True:
            with self._lock:
                # While calls keep coming it looks at the clock now and then, and need not be woken for each batch.
                if not self._waiting:
                    self._sleeping_timers += 1
                    self._changed.wait()
                    self._sleeping_timers -= 1
                    continue
                since_s = self._since_s
                left_s = since_s + self._max_wait_s - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                    continue
                late, self._waiting = self._waiting, []
                self._free_timers -= 1
            self._run(late, since_s, False)
            del late  # the calls' memory
            with self._lock:
                if self._free_timers >= 2:  # others were started meanwhile, and one free one is enough
                    self._timers -= 1
                    return
                self._free_timers += 1

    def _run(self, batch: list[BatchedCall], asked_s: float, full: bool) -> None:
        wanted = [call for call in batch if not call.cancelled]
        if len(wanted) < len(batch):
            with self._lock:
                self._stats.cancelled += len(batch) - len(wanted)
        if not wanted:
            return
        for alike in _alike(wanted, self._stack):
            self._run_alike(alike, asked_s, full)

    def _run_alike(self, wanted: list[BatchedCall], asked_s: float, full: bool) -> None:
        error: BaseException | None = None
        results: Sequence[Any] = ()
        began_s = time.monotonic()
        try:
            results = self._results(wanted)
        except BaseException as raised:
            error = raised
        returned_s = time.monotonic()
        if error is not None:
            for call in wanted:
                call.finish(error=error)
        else:
            for call, result in zip(wanted, results, strict=True):
                call.finish(result)
        done = BatchDone(len(wanted), asked_s, began_s, returned_s, time.monotonic(), error)
        with self._lock:
            self._stats.add(done, full)
        if self._on_batch is not None:
            try:
                self._on_batch(done)
            except Exception:
                traceback.print_exc()

    def _results(self, batch: list[BatchedCall]) -> Sequence[Any]:
        columns: list[Any] = [[call.args[i] for call in batch] for i in range(len(batch[0].args))]
        if self._stack:
            columns = [_stacked(column) for column in columns]
        results: Sequence[Any] = self._function(*columns)
        if isinstance(results, Mapping):
            return self._rows_of(results, len(batch))
        try:
            count = len(results)
        except TypeError:  # a number, None, an array without axes, an iterator
            raise ArgumentError(
                f"{self.__qualname__} got {len(batch)} calls and returned a {type(results).__name__}, not a sequence "
                f"of as many results"
            ) from None
        if count != len(batch):
            raise ArgumentError(f"{self.__qualname__} got {len(batch)} calls and returned {count} results")
        return results

    def _rows_of(self, columns: Mapping[str, Any], n: int) -> list[dict[str, Any]]:
        """Arrays by name, a row a call, as a dict for each call."""
        if not self._stack:
            raise ArgumentError(
                f"{self.__qualname__} returned a dict; only with stack=True is that one of arrays by name"
            )
        for name, column in columns.items():
            if not hasattr(column, "__len__") or not getattr(column, "shape", (0,)) or len(column) != n:
                found = getattr(column, "shape", type(column).__name__)
                raise ArgumentError(f"{self.__qualname__} got {n} calls and returned {name!r} as {found}, not {n} rows")
        return [{name: column[i] for name, column in columns.items()} for i in range(n)]


def _alike(batch: list[BatchedCall], stack: bool) -> list[list[BatchedCall]]:
    """Groups calls that can run together, in the order of each group's first call.

    Calls of a group have the same number of arguments. If they are stacked, the arguments have the same shape and
    dtype. One caller's mistake therefore cannot cause another caller's error, or change its dtype.
    """
    groups: dict[Any, list[BatchedCall]] = {}
    for call in batch:
        groups.setdefault(tuple(map(_form, call.args)) if stack else len(call.args), []).append(call)
    return list(groups.values())


def _form(value: Any) -> Any:
    """The properties that stacked values must share. Never raises, or waiting calls would get no reply."""
    import numpy as np

    if isinstance(value, (np.ndarray, np.generic)):
        return value.shape, value.dtype
    if type(value).__module__.startswith("torch") and hasattr(value, "device"):
        return value.shape, value.dtype, value.device
    if not isinstance(value, (list, tuple)):
        return type(value)
    try:
        array = np.asarray(value)
    except Exception:
        return id(value)  # it is ragged, say: its own call's error
    return list, array.shape, array.dtype


def _stacked(values: Sequence[Any]) -> Any:
    if type(values[0]).__module__.startswith("torch"):
        import torch

        return torch.stack(list(values))
    import numpy as np

    return np.stack(values)


_batchers = living(after_fork=Batcher._after_fork)
