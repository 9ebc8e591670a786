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


#: `current.worker`: what executes a call in this thread, or None; set by the scheduler.
current = _Current()


def about_to_wait() -> None:
    """Yields this thread's turn before a wait: the client's next call may be what the wait is for.

    The call no longer counts among those that `max_threads` bounds, either.
    """
    worker = current.worker
    if worker is not None:
        worker.before_wait()
