"""Lifetime of a node: checks that a node is open and was made in this process, and ends its waits when it is closed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from geartrain._native import forks
from geartrain.core.threads import DaemonThread, ReentrantEvent
from geartrain.errors import ConnectionClosedError, WaitTimeoutError

T = TypeVar("T")

#: Work may end this long after its deadline, because its own error says best what was missing.
_LATE_S = 5.0


class Lifetime:
    """Lifetime of the node `name`. Any thread and any signal handler may call its methods."""

    def __init__(self, name: str) -> None:
        self.ended = False
        self._name = name
        self._waits: list[ReentrantEvent] = []
        self._forks = forks()

    @property
    def forked(self) -> bool:
        """Whether the node belongs to the process that this one was forked from."""
        return self._forks != forks()

    def check(self) -> None:
        """Raises `ConnectionClosedError` unless the node is open, and of this process."""
        if self.forked:
            raise ConnectionClosedError(
                f"the node {self._name!r} belongs to the process that this one was forked from; make one here"
            )
        if self.ended:
            raise ConnectionClosedError(f"the node {self._name!r} was closed")

    def end(self) -> bool:
        """Closed from now on: waits end. False when it was before. The caller holds a lock against other ends."""
        first, self.ended = not self.ended, True
        for over in tuple(self._waits):
            over.set()
        return first

    def wait_for(self, work: Callable[[], T], until_s: float, what: str) -> T:
        """What `work` returns or raises; `ConnectionClosedError` once the node is closed.

        `work` runs on a thread of its own, because a wait for a store or a dialled peer does not notice `close`. The
        thread cannot start in a signal handler that has interrupted the start of another thread, because `threading`
        holds a lock then.

        Args:
            work: ends by itself at `until_s`, in `time.monotonic()`; raises `WaitTimeoutError` when it does not.
            what: is waited for, for this error.
        """
        outcome: list[tuple[T | None, BaseException | None]] = []

        def run() -> None:
            try:
                outcome.append((work(), None))
            except BaseException as error:
                outcome.append((None, error))
            over.set()

        # No condition: of one that waits, a handler that waits for it as well takes the lock away, and may have its
        # notification.
        over = ReentrantEvent()
        self._waits.append(over)
        try:
            self.check()
            DaemonThread(run, f"geartrain finds a peer of {self._name}").start()
            over.wait(max(0.0, until_s - time.monotonic()) + _LATE_S)
        finally:
            with contextlib.suppress(ValueError):  # a child that was forked within the wait
                self._waits.remove(over)
        if not outcome:
            self.check()
            raise WaitTimeoutError(f"no {what} before the deadline")
        value, error = outcome[0]
        if error is None:
            return value  # type: ignore[return-value]
        try:
            raise error
        finally:
            outcome.clear()
            del error  # the traceback holds this frame

    def after_fork(self) -> None:
        """In a forked child, which has none of the threads that are waited for."""
        waits, self._waits = self._waits, []
        for over in waits:
            over.set()
