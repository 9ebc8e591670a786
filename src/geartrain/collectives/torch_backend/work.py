"""Implementation of torch's `Work` for an all-reduce, and the thread that completes its futures.

Native operations end by themselves; a thread has to wait for them and report. That is the caller of `wait` or, once a
future was requested, the group's `Finisher`, which takes works in the order they were made. DDP requests futures; plain
`dist.all_reduce` does not, and then costs no thread. Errors are raised where the work is waited for, and never end the
process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """Equivalent of `torch.compiler.disable`, without the seconds of imports that it takes.

    A compiled DDP calls collectives between its graphs, and the compiler must not look into them.
    """
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="a collective of geartrain's")
    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # torch 2.7 and later; the attribute above has to do before
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


class TorchWork(dist.Work):
    """torch's handle of one all-reduce. `wait`, `get_future`, `is_completed`, `exception`, `result` as torch has them.

    Waited for by one thread at a time; the others wait for that one.

    Args:
        wait: waits for the operation until a deadline (seconds; None: the operation's own) and does what follows it;
            called until it returns, or raises anything but the end of a deadline that the caller chose.
        done: whether `wait` would return, or raise, at once.
        tensors: the results, in place.
        finisher: completes futures.
        devices: of the tensors, where these are not on the CPU.
        join: makes the caller's stream wait for the result, after the host has.
        around: a context in which futures are completed, such as a stream that their events are recorded on.
    """

    def __init__(
        self,
        wait: Callable[[float | None], None],
        done: Callable[[], bool],
        tensors: Sequence[torch.Tensor],
        finisher: Finisher,
        *,
        devices: Sequence[torch.device] = (),
        join: Callable[[], None] | None = None,
        around: Callable[[], Any] | None = None,
    ) -> None:
        super().__init__()
        self._wait = wait
        self._is_done = done
        self._tensors = list(tensors)
        self._finisher = finisher
        self._devices: list[int | str | torch.device] = list(devices)
        self._join = join
        self._around = around
        self._waiting = threading.Lock()
        self._lock = threading.Lock()
        self._over = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None

    @uncompiled
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """True when the result is there; `timeout` 0 stands for the operation's own. Raises `DistBackendError`."""
        limit_s = timeout.total_seconds()
        self.wait_on_host(limit_s if limit_s > 0 else None)
        if self._join is not None:
            self._join()
        return True

    def wait_on_host(self, timeout_s: float | None = None) -> None:
        """Returns when the result is in the tensors. Raises `DistBackendError`, always the same, if there is none."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._waiting.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise dist.DistBackendError(f"geartrain: the all-reduce was not done within the {timeout_s} s of this wait")
        try:
            if not self._over:
                self._finish(None if until_s is None else max(0.0, until_s - time.monotonic()))
        finally:
            self._waiting.release()
        if self._error is not None:
            raise self._error

    def _finish(self, timeout_s: float | None) -> None:
        try:
            self._wait(timeout_s)
        except Exception as error:
            if timeout_s is not None and not self._is_done():
                raise dist.DistBackendError(f"geartrain: {error}") from error  # this wait is over, the operation is not
            self._error = dist.DistBackendError(f"geartrain: {error}")
            self._error.__cause__ = error
        self._over = True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    @uncompiled
    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of tensors. It fails with the operation; waiting for it then raises `RuntimeError`."""
        with self._lock:
            if self._future is None:
                base: torch.futures.Future[Any] = torch.futures.Future(devices=self._devices)
                # An exception given to Future.set_exception is a value to C++, which reads it as tensors and crashes
                # (DDP's backward). One that a callback raises is an error in C++ too.
                self._future = base.then(self._value)
                self._finisher.add(self, lambda: self._complete(base))
            return self._future

    def _complete(self, base: torch.futures.Future[Any]) -> None:
        if self._around is None:
            base.set_result(self._tensors)
        else:
            with self._around():
                base.set_result(self._tensors)

    def _value(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._over or self._is_done()

    def is_success(self) -> bool:
        """Whether the result is there."""
        if not self.is_completed():
            return False
        try:
            self.wait_on_host()
        except dist.DistBackendError:
            return False
        return True

    def exception(self) -> BaseException | None:
        """The error, once there is one."""
        self.is_success()
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The tensors, after waiting for them."""
        self.wait()
        return self._tensors


class Finisher:
    """A thread that waits for works in order and then completes their futures. It starts with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[tuple[TorchWork, Callable[[], None]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def add(self, work: TorchWork, complete: Callable[[], None]) -> None:
        """Calls `complete` once the operation has ended, with a result or an error."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{self._name}-finisher", daemon=True)
                self._thread.start()
        self._queue.put((work, complete))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, complete = item
            with contextlib.suppress(dist.DistBackendError):  # raised by the future
                work.wait_on_host()
            try:
                complete()
            except Exception:  # the device has failed; later futures must still be completed
                logging.getLogger(__name__).exception("a future of an all-reduce could not be completed")
            del item, work, complete  # else the tensors would live until the next item

    def close(self, timeout_s: float) -> None:
        """Ends the thread, after the works it has; these must have ended or be able to end (their group closed)."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None and os.getpid() == self._pid and thread is not threading.current_thread():
            self._queue.put(None)
            thread.join(timeout_s)
