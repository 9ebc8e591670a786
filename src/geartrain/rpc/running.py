"""Records which RPC call the current thread executes.

Code that is about to block uses it to yield the call's turn.
"""

from __future__ import annotations

import threading
from typing import Protocol


class RunsCalls(Protocol):
    """The object that executes a client's call in this thread: `session.Worker`."""

    def before_wait(self) -> None:
        """The call's function is about to wait for a call of its own."""


class _Current(threading.local):
    worker: RunsCalls | None = None


#: `current.worker`: the worker that executes a call in this thread, or None. The scheduler sets it.
current = _Current()


def about_to_wait() -> None:
    """Yields the call's turn before this thread waits, because it may wait for the same client's next call.

    The call also stops counting against `max_threads`.
    """
    worker = current.worker
    if worker is not None:
        worker.before_wait()
