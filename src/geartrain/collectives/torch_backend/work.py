"""torch's `Work` for an all-reduce, and the threads that complete its futures.

Native operations end by themselves, but a thread has to wait for them and report the end. This thread is the caller of
`wait` or, once a future was requested, the group's `Finisher`. Whichever is first completes the future. The `Finisher`
takes works in the order in which they were made.

DDP requests futures. Plain `dist.all_reduce` does not, so it needs no thread. Errors are raised where the work is
waited for, and never end the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from geartrain.core.threads import DaemonThread, ReentrantEvent, held, owns
from geartrain.errors import GeartrainError, WaitTimeoutError

Function = TypeVar("Function", bound=Callable[..., Any])

#: Longest time that callbacks of one work delay the next work's callbacks, for which they may be waiting.
STALL_S = 0.05


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


def backend_error(error: Exception) -> dist.DistBackendError:
    """torch's error, a `RuntimeError`, with the text of one of geartrain's.

    Programs recognise its kind by the text only: they look for "timed out", as in the errors of Gloo and NCCL.
    """
    late = "Timed out waiting: " if isinstance(error, TimeoutError) else ""
    return dist.DistBackendError(f"geartrain: {late}{error}")


class TorchWork(dist.Work):
    """torch's handle of one operation, with `wait`, `get_future`, `is_completed`, `exception` and `result`.

    If several threads wait, one of them waits for the operation, and the others wait for that thread. It is no
    `Lifetime`: torch's works have no end but that of their operation.

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
        self._waiting = threading.RLock()  # a signal's handler may wait as well, or ask
        self._lock = threading.RLock()
        self._over = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._base: torch.futures.Future[Any] | None = None  # what `_future` waits for; taken by who completes it

    @uncompiled
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """True when the result is there; `timeout` 0 stands for the operation's own. Raises `DistBackendError`.

        The future is done too, with the result or the error; its callbacks may run on this thread.
        """
        limit_s = timeout.total_seconds()
        try:
            self.wait_on_host(limit_s if limit_s > 0 else None)
        finally:
            if self._over:
                self.settle()
        if self._join is not None:
            self._join()
        return True

    def wait_on_host(self, timeout_s: float | None = None) -> None:
        """Returns when the result is in the tensors.

        If the operation failed, raises `DistBackendError`, the same every time.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        with held(self._waiting, -1 if timeout_s is None else timeout_s) as mine:
            if not mine:
                late = WaitTimeoutError(f"the all-reduce was not done within the {timeout_s} s of this wait")
                raise backend_error(late)
            if not self._over:
                self._finish(None if until_s is None else max(0.0, until_s - time.monotonic()))
        if self._error is not None:
            raise self._error

    def _finish(self, timeout_s: float | None) -> None:
        try:
            self._wait(timeout_s)
        except Exception as error:
            if timeout_s is not None and not self._is_done():
                raise backend_error(error) from error  # this wait is over, the operation is not
            self._error = backend_error(error)
            self._error.__cause__ = error
        self._over = True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    @uncompiled
    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the list of tensors. It fails with the operation; waiting for it then raises `RuntimeError`."""
        with self._lock:
            if self._future is not None:
                return self._future
            # An exception given to Future.set_exception is a value to C++, which reads it as tensors and crashes
            # (DDP's backward). One that a callback raises is an error in C++ too.
            base: torch.futures.Future[Any] = torch.futures.Future(devices=self._devices)
            future = base.then(self._value)
            if self._future is not None:  # of a signal's handler
                return self._future
            self._base, self._future = base, future
        if self._over:
            self.settle()
        else:
            self._finisher.add(self)
        return future

    def settle(self) -> None:
        """Completes the future, if one was requested, after the operation has ended; returns when it is done."""
        with self._lock:
            base, self._base = self._base, None
            future = self._future
        if base is not None:
            with contextlib.nullcontext() if self._around is None else self._around():
                base.set_result(self._tensors)  # and runs the callbacks
        elif future is not None:
            with contextlib.suppress(Exception):  # raised by `wait`, and to who waits for the future
                future.wait()  # another thread completes it right now

    def _value(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors

    def is_completed(self) -> bool:
        """Whether the operation has ended: the result is in the tensors, or `wait` raises at once."""
        if self._over or not self._is_done():
            return self._over
        if owns(self._waiting):  # a signal's handler: what it has interrupted does what follows
            return self._over
        with held(self._waiting, 0.0) as mine:  # else another thread does what follows the operation
            if mine and not self._over:
                self._finish(None)
        return self._over

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
    """Threads that wait for works in order and then complete their futures. They start with the first work.

    Completing a future runs its callbacks. Callbacks of one work run after those of the work before it. A callback may
    start further all-reduces and wait for their futures: works made in a callback have threads of their own, one set
    for each depth. If a callback waits for a work behind its own, the wait delays only that work (`STALL_S`).
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # a signal's handler may close in between
        self._depths: list[_Completions] = []

    def add(self, work: TorchWork) -> None:
        """Settles the work once its operation has ended, with a result or an error."""
        depth = getattr(_callbacks, "depth", 0)
        with self._lock:
            depths = self._depths
            while len(depths) <= depth:
                depths.append(_Completions(f"{self._name}-finisher", len(depths)))
            completions = depths[depth]
        completions.add(work)

    def close(self, timeout_s: float) -> None:
        """Ends the threads, after the works they have; these must have ended or be able to end (their group closed)."""
        with self._lock:
            depths, self._depths = self._depths, []
        until_s = time.monotonic() + timeout_s
        for completions in depths:
            completions.close(until_s)


#: Per thread that runs callbacks: their `depth`, which is one more than their work's.
_callbacks = threading.local()


class _Completions:
    """The works of one depth, and the threads that complete them.

    While there are works, at least one thread is free to start.
    """

    def __init__(self, name: str, depth: int) -> None:
        self._name = name
        self._depth = depth
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._works: deque[TorchWork] = deque()
        self._last = ReentrantEvent()  # set after the callbacks of the work that was taken last
        self._last.set()
        self._threads: list[threading.Thread] = []
        self._free = 0  # threads that are not in a callback
        self._closing = False
        self._pid = os.getpid()

    def add(self, work: TorchWork) -> None:
        with self._lock:
            self._works.append(work)
            try:
                self._staff()
            except GeartrainError as error:  # no more threads: whoever began the work is told
                self._works.pop()
                raise backend_error(error) from error
            self._changed.notify()

    def close(self, until_s: float) -> None:
        if os.getpid() != self._pid:  # a fork has no such threads, and perhaps a lock that is held for ever
            return
        with self._lock:
            self._closing = True
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))

    def _staff(self) -> None:
        if self._works and self._free == 0:
            thread = DaemonThread(self._run, f"{self._name}-{len(self._threads)}")
            thread.start()
            self._free += 1
            self._threads.append(thread)

    def _run(self) -> None:
        _callbacks.depth = self._depth + 1
        while True:
            with self._lock:
                while not self._works:
                    if self._closing:
                        self._free -= 1
                        return
                    self._changed.wait()
                work = self._works.popleft()
                before, self._last = self._last, ReentrantEvent()
                over = self._last
            with contextlib.suppress(dist.DistBackendError):  # raised by the future
                work.wait_on_host()
            before.wait(STALL_S)
            with self._lock:
                self._free -= 1
                with contextlib.suppress(GeartrainError):  # no more threads: this one takes the next work, afterwards
                    self._staff()
            try:
                work.settle()
            except Exception:  # the device has failed; later futures must still be completed
                logging.getLogger(__name__).exception("a future of an all-reduce could not be completed")
            over.set()
            with self._lock:
                self._free += 1
            del work, before, over  # else the tensors would live until the next work
