"""Background threads of one node, which the node joins when it closes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from geartrain.core.threads import DaemonThread


class ThreadGroup:
    """Daemon threads that `join` waits for. `owner` stands in their names."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._alive: set[threading.Thread] = set()

    def start(self, run: Callable[[], object], what: str) -> None:
        """Runs `run()` in a new thread. Raises `GeartrainError` when the system has no more threads."""

        def body() -> None:
            mine = threading.current_thread()
            self._alive.add(mine)
            try:
                run()
            finally:
                self._alive.discard(mine)

        DaemonThread(body, f"geartrain {what} {self._owner}").start()

    def join(self, timeout_s: float) -> None:
        """Waits for all threads, except the calling one, for at most this long in total."""
        until_s = time.monotonic() + timeout_s
        for thread in list(self._alive):
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))
