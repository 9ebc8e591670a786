"""Prefetch thread: makes items ahead of their use.

The consumer's requests decide which items may be made, and thread speed never does. A request for item s also permits
item s + `depth`, with the orders placed until then. So runs can be repeated exactly. Ranks whose consumers make the
same requests make the same items and stop at the same one.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from geartrain.core.threads import DaemonThread
from geartrain.errors import WaitTimeoutError

Item = TypeVar("Item")


#: Handing an item to another thread and waking it costs both of them together about this much CPU time.
HAND_OVER_S = 50e-6
_LOOKED_AT = 8
# Of an item that takes so many times as long, the handoff is one twentieth.
_LONG = 20
# A signal that comes just before a wait does not end it: its handler runs when the wait looks again.
_SLICE_S = 0.5


class BuildPlacement:
    """Decides whether items are made on the consumer's thread, or ahead of it on the prefetch thread.

    An item made ahead is made while the consumer does other work, and costs a thread handoff. A consumer that comes
    back at once waits just as long either way. So items are made ahead if that saves more than it costs. Long items
    are always made ahead: a handoff is cheap in comparison, and a wait has a deadline.

    The first items are made on the prefetch thread. The decision is reviewed every 8 items, from the shortest item and
    the consumer's mean pause. Each pause counts for at most the time of the items that may be made in it. The shortest
    item is used because a busy machine makes some of them long.

    Args:
        ahead: items that may be made ahead.

    Attributes:
        here: whether items are made on the consumer's thread.
    """

    def __init__(self, ahead: int = 1) -> None:
        self.here = False
        self._ahead = ahead
        self._least_s = float("inf")
        self._hidden_s = 0.0
        self._seen = 0

    def note(self, make_s: float, pause_s: float) -> None:
        """Takes into account how long an item took, and how long the consumer was away before it asked for it."""
        self._least_s = min(self._least_s, make_s)
        self._hidden_s += min(pause_s, self._ahead * make_s)
        self._seen += 1
        if self._seen == _LOOKED_AT:
            saved_s = min(self._least_s, self._hidden_s / _LOOKED_AT)
            # Twice as much for the way back, so that items in between do not change the thread time and again.
            least_s = 2 * HAND_OVER_S if self.here else HAND_OVER_S
            self.here = saved_s < least_s and self._least_s < _LONG * least_s
            self._least_s, self._hidden_s, self._seen = float("inf"), 0.0, 0


class StillBuildingError(WaitTimeoutError):
    """No item was ready in time, and the thread is still at it."""


class Prefetcher(Generic[Item]):
    """Makes items in order on a thread of its own.

    Args:
        make: makes the next item, from the orders that came with its request.
        name: name of the thread.
        finish: finishes an item that `make` only began.
        enter: called first on the thread.
        overlaps: whether the next requested item is begun before this one is finished; by default if there is a
            `finish`.
        ready: with overlapping items, whether a begun item can be finished without a wait. It waits a little itself. An
            item that is requested meanwhile is begun first. If `ready` raises, `finish` raises the same.
        drop: called with each item that nobody gets, begun or finished, on the thread or by the caller of `stop`.
    """

    def __init__(
        self,
        make: Callable[[Any], Any],
        name: str,
        finish: Callable[[Any], Item] | None = None,
        enter: Callable[[], None] | None = None,
        overlaps: bool | None = None,
        ready: Callable[[Any], bool] | None = None,
        drop: Callable[[Any], object] | None = None,
    ) -> None:
        self._make = make
        self._finish: Callable[[Any], Item] = finish or (lambda item: item)
        self._overlaps = finish is not None if overlaps is None else overlaps
        self._enter = enter
        self._ready_to_finish = ready
        self._drop: Callable[[Any], object] = drop or (lambda item: None)
        self._asked: queue.SimpleQueue[tuple[Any] | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Item | BaseException] = queue.SimpleQueue()
        self._pid = os.getpid()
        self._stopping = False
        self._stopped = False
        self._raised: BaseException | None = None
        self._left: list[Any] = []
        self._awaited = False
        self._thread = DaemonThread(self._run, name)
        self._thread.start()

    def ask(self, orders: Any) -> None:
        """One more item may be made."""
        self._asked.put((orders,))

    def get(self, timeout_s: float) -> Item:
        """The next item. Raises what `make` raised, and `StillBuildingError` when there is none in time."""
        until_s = time.monotonic() + timeout_s
        self._awaited = True
        try:
            while True:
                try:
                    item = self._ready.get(timeout=max(0.0, min(timeout_s, _SLICE_S, until_s - time.monotonic())))
                    break
                except queue.Empty:
                    if time.monotonic() >= until_s:
                        raise StillBuildingError(f"no item was ready within {timeout_s:g} s") from None
        finally:
            self._awaited = False
        if isinstance(item, BaseException):
            self._raised = item
            raise item
        return item

    def has_raised(self, error: BaseException) -> bool:
        """Whether `get` has raised this: else it is of a signal's handler, and an item may still be on its way."""
        return error is self._raised

    def interrupt(self, error: BaseException) -> None:
        """Has a `get` that waits, now or later, raise this. Any thread may call it; `stop` is to follow."""
        self._ready.put(error)

    def is_at_work(self) -> bool:
        """Whether the thread has not ended its work."""
        return not self._thread.over

    def is_awaited(self) -> bool:
        """Whether a `get` waits."""
        return self._awaited

    def is_mine(self) -> bool:
        """Whether the thread belongs to this process, and not to the one it was forked from."""
        return self._pid == os.getpid()

    def stop(self, timeout_s: float, *, finish: bool = False, awaited_s: float | None = None) -> list[Any]:
        """Ends the thread after its current item or, with `finish`, after all requested items.

        Returns the orders of items that were not made, and drops the items that were. A thread that is stuck in a
        strategy is left behind, and ends when it comes back. After `awaited_s` the thread is also left behind if a
        `get` still waits for its item.
        """
        if not self.is_mine():
            return []
        self._stopping = not finish
        self._asked.put(None)
        if self._thread is not threading.current_thread():  # the collector may call this on the thread itself
            self._join(timeout_s, timeout_s if awaited_s is None else awaited_s)
        self._stopped = True
        self._drop_ready()
        with suppress(queue.Empty):
            while True:
                asked = self._asked.get_nowait()
                if asked is not None:
                    self._left.append(asked[0])
        if not self._thread.over:
            self._asked.put(None)  # for when it comes back
        return self._left

    def _join(self, timeout_s: float, awaited_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        while True:
            self._thread.join(min(awaited_s, max(0.0, until_s - time.monotonic())))
            if not self._thread.is_alive() or self._awaited or time.monotonic() >= until_s:
                return

    def _drop_ready(self) -> None:
        errors = []
        with suppress(queue.Empty):
            while True:
                item = self._ready.get_nowait()
                if isinstance(item, BaseException):
                    errors.append(item)
                else:
                    self._drop(item)
        for error in errors:  # a `get` that a signal's handler has interrupted may wait for one
            self._ready.put(error)

    def _run(self) -> None:
        self._make_items()
        if self._stopped:  # by somebody who did not wait for it
            self._drop_ready()

    def _make_items(self) -> None:
        if self._enter is not None:
            self._enter()
        begun: list[Any] = []  # one at most
        while True:
            if begun and (not self._overlaps or self._asked.empty()):
                if self._is_ready(begun[0]) and not self._hand_out(begun):
                    return
                continue
            asked = self._asked.get()
            if asked is None or self._stopping:
                if asked is not None:
                    self._left.append(asked[0])
                if begun and self._stopping:
                    self._drop(begun.pop())
                elif begun:
                    self._hand_out(begun)  # it was asked for, and others may be waiting for their part of it
                return
            try:
                next_item = self._make(asked[0])
            except BaseException as error:
                self._left.append(asked[0])
                if not begun or self._hand_out(begun):
                    self._ready.put(error)
                return
            del asked
            if begun and not self._hand_out(begun):
                self._drop(next_item)
                return
            begun.append(next_item)
            del next_item

    def _is_ready(self, item: Any) -> bool:
        if self._ready_to_finish is None:
            return True
        try:
            return self._ready_to_finish(item)
        except BaseException:
            return True

    def _hand_out(self, begun: list[Any]) -> bool:
        """Finishes the item that was begun; False when that failed, which is handed out instead."""
        item: Item | BaseException
        try:
            item = self._finish(begun.pop())
        except BaseException as error:
            item = error
        self._ready.put(item)
        return not isinstance(item, BaseException)


__all__ = ["HAND_OVER_S", "BuildPlacement", "Prefetcher", "StillBuildingError"]
