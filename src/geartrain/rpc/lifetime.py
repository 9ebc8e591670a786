"""Lifetime of a node: open until it is closed, in the process that made it, and waits that its end cuts short."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from geartrain.core.threads import DaemonThread
from geartrain.errors import ConnectionClosedError

T = TypeVar("T")


class Lifetime:
    """Of the node `name`. Any thread may call, also from the handler of a signal."""

    def __init__(self, name: str) -> None:
        self.ended = False
        self._name = name
        self._changed = threading.Condition()  # `ended`, or what `wait_for` waits for
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether the node belongs to the process that this one was forked from."""
        return self._pid != os.getpid()

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
        with self._changed:
            self._changed.notify_all()
        return first

    def wait_for(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises; `ConnectionClosedError` once the node is closed.

        A store that is waited for, and a peer that is dialled, know nothing of `close`: a thread of its own waits.
        """
        self.check()
        outcome: list[tuple[T | None, BaseException | None]] = []

        def run() -> None:
            try:
                outcome.append((work(), None))
            except BaseException as error:
                outcome.append((None, error))
            with self._changed:
                self._changed.notify_all()

        DaemonThread(run, f"geartrain finds a peer of {self._name}").start()
        with self._changed:
            self._changed.wait_for(lambda: outcome or self.ended)
        if not outcome:
            self.check()
        value, error = outcome[0]
        if error is None:
            return value  # type: ignore[return-value]
        try:
            raise error
        finally:
            outcome.clear()
            del error  # the traceback holds this frame

    def after_fork(self) -> None:
        """In a forked child: another thread of the parent's may have held the lock."""
        self._changed = threading.Condition()
