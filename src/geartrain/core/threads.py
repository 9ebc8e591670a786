"""Threads and events that a signal handler may use, even if it interrupts a thread that is using the same object.

Every thread that geartrain starts is a `DaemonThread`. If the system has no more threads, `start` raises
`GeartrainError`. The caller then cleans up the state that the thread would have cleaned up.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from geartrain.errors import GeartrainError

#: The longest single wait of the main thread, in seconds. The kernel may deliver a signal to any thread of the process,
#: for example if SIGCONT arrives with it. Python runs the handler on the main thread, once the main thread is awake.
SIGNAL_S = 1.0
# Period in which a join checks whether the thread's work is done.
_SLICE_S = 0.5
# Time for the last instructions of a thread whose work is done.
_END_S = 0.25


class DaemonThread(threading.Thread):
    """A daemon thread whose `join` returns when its work is done.

    Before version 3.13, CPython holds the thread's lock for an instant at the end of `join`. A signal handler that
    runs in this instant and joins the thread waits for the code that it interrupted, until its timeout or for ever.
    The thread therefore sets a flag when its work is done, and `join` waits in slices and reads the flag.

    Args:
        target: its work.
        name: of the thread.
        args: of the work.
    """

    def __init__(self, target: Callable[..., object], name: str | None = None, args: Iterable[Any] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self.over = False

    def start(self) -> None:
        """Raises `GeartrainError` where the system has no more threads."""
        if self.ident is not None:
            raise RuntimeError("threads can only be started once")
        try:
            super().start()
        except RuntimeError as error:
            raise GeartrainError(
                f"cannot start the thread {self.name!r}: {error}. Check `ulimit -u`, kernel.threads-max and the "
                "container's pids.max"
            ) from None

    def run(self) -> None:
        try:
            super().run()
        finally:
            self.over = True

    def is_alive(self) -> bool:
        """Whether it is at work. In a forked child, which has a copy of the object alone, it is not."""
        return not self.over and super().is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Waits until the thread has ended, in seconds; for as long as it takes with None."""
        until_s = float("inf") if timeout is None else time.monotonic() + timeout
        while self.is_alive() and (left_s := until_s - time.monotonic()) > 0:
            super().join(min(left_s, _SLICE_S))
        super().join(max(0.0, min(_END_S, until_s - time.monotonic())))


def owns(lock: threading.RLock) -> bool:  # type: ignore[valid-type]
    """Whether the calling thread holds the lock. True also in a signal handler that interrupted the holder."""
    return bool(lock._is_owned())  # type: ignore[attr-defined]


@contextlib.contextmanager
def held(lock: threading.RLock, timeout_s: float) -> Iterator[bool]:  # type: ignore[valid-type]
    """Holds the lock until the block ends. Yields whether it was acquired, after at most `timeout_s` seconds.

    If a signal handler raises between an `acquire` and the following `try`, the lock would stay taken for ever. Here
    the lock itself tells whether it is taken, so it is free once the exception's traceback is dropped.
    """
    mine = owns(lock)
    try:
        try:
            yield mine or lock.acquire(timeout=timeout_s)  # type: ignore[attr-defined]
        finally:
            if not mine and owns(lock):
                lock.release()  # type: ignore[attr-defined]
    finally:
        if not mine and owns(lock):  # where a handler has raised
            lock.release()  # type: ignore[attr-defined]


def refuse_within(lock: threading.RLock, what: str) -> None:  # type: ignore[valid-type]
    """Raises `GeartrainError` if this thread holds the lock: then a signal handler has interrupted the call `what`."""
    if owns(lock):
        raise GeartrainError(
            f"this thread is in the middle of {what}: a signal handler must not call it again until it returns"
        )


class ReentrantEvent:
    """`threading.Event` without a lock. A signal handler may call any method, whichever call it interrupts.

    `threading.Event` takes a lock for an instant in `set`, and at both ends of `wait`. A handler that runs in this
    instant and sets the same event would wait for the code that it interrupted, for ever.

    Here `wait` first registers a lock of its own and then reads the flag. `set` first sets the flag and then releases
    all registered locks. No wake-up is lost in this order.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waits: list[threading.Lock] = []

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Ends all present and future waits."""
        self._is_set = True
        for wait in tuple(self._waits):
            with contextlib.suppress(RuntimeError):  # it has been released already
                wait.release()

    def clear(self) -> None:
        """Further waits last until it is set again."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set, or `timeout` seconds; returns whether it was.

        The main thread waits in slices of `SIGNAL_S`, so that no handler of a signal has to wait for longer.
        """
        if self._is_set:
            return True
        mine = threading.Lock()
        mine.acquire()
        self._waits.append(mine)
        try:
            if self._is_set:
                return True
            on_main = threading.current_thread() is threading.main_thread()
            slice_s = SIGNAL_S if on_main else threading.TIMEOUT_MAX
            until_s = float("inf") if timeout is None else time.monotonic() + timeout
            while not mine.acquire(timeout=max(0.0, min(slice_s, until_s - time.monotonic()))):
                if time.monotonic() >= until_s:
                    return False
            return True
        finally:
            self._waits.remove(mine)


def sleep(seconds: float) -> None:
    """`time.sleep` in slices of `SIGNAL_S`, for the main thread of a command."""
    ReentrantEvent().wait(seconds)


@contextlib.contextmanager
def set_by(*signals: int) -> Iterator[ReentrantEvent]:
    """An event that these signals set while the block runs. Only the main thread can have that."""
    event = ReentrantEvent()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = {number: signal.signal(number, lambda *_: event.set()) for number in signals}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["SIGNAL_S", "DaemonThread", "ReentrantEvent", "held", "owns", "refuse_within", "set_by", "sleep"]
