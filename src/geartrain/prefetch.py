"""A thread that makes things ahead of their use, each only once it was asked for.

What is made when is settled by what the consumer has asked for, not by how fast anybody is: when item s is asked for,
the item `depth` further on may be made, with the orders that were placed until then. So a run can be repeated, and
several ranks whose consumers ask alike make the same things and stop at the same one.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from geartrain.errors import WaitTimeoutError

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Makes items in order on a thread of its own.

    Args:
        make: makes the next item; is given the orders that came with the request for it.
        name: of the thread.
    """

    def __init__(self, make: Callable[[Any], Item], name: str) -> None:
        self._make = make
        self._asked: queue.SimpleQueue[tuple[Any] | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Item | BaseException] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._stopping = False
        self._left: list[Any] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(self, orders: Any) -> None:
        """One more item may be made."""
        self._asked.put((orders,))

    def get(self, timeout_s: float) -> Item:
        """The next item. Raises what `make` raised, and `WaitTimeoutError`."""
        try:
            item = self._ready.get(timeout=timeout_s)
        except queue.Empty:
            raise WaitTimeoutError(f"no batch was ready within {timeout_s} s") from None
        if isinstance(item, BaseException):
            raise item
        return item

    def is_mine(self) -> bool:
        """Whether the thread belongs to this process, and not to the one it was forked from."""
        return self._pid == os.getpid()

    def stop(self, timeout_s: float, *, finish: bool = False) -> list[Any]:
        """Ends the thread: after the item it is at, or, with `finish`, after all that was asked for.

        Returns the orders of items that were not made. A thread stuck in a strategy that never returns is left behind;
        it ends when it comes back.
        """
        if not self.is_mine():
            return []
        self._stopping = not finish
        self._asked.put(None)
        if self._thread is not threading.current_thread():  # the collector may call this on the thread itself
            deadline_s = time.monotonic() + timeout_s
            self._thread.join(max(0.0, deadline_s - time.monotonic()))
        with suppress(queue.Empty):
            while True:
                asked = self._asked.get_nowait()
                if asked is not None:
                    self._left.append(asked[0])
        if self._thread.is_alive():
            self._asked.put(None)  # for when it comes back
        return self._left

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            if self._stopping:
                self._left.append(asked[0])
                return
            item: Item | BaseException
            try:
                item = self._make(asked[0])
            except BaseException as error:
                item = error
                self._left.append(asked[0])
            del asked
            self._ready.put(item)
            if isinstance(item, BaseException):
                return
            del item


__all__ = ["Prefetcher"]
