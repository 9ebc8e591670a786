"""The thread that waits for due rows in the place of all `claim_async` calls of a process.

A call tries once by itself. What it does not get it leaves to this thread, which begins with the first such call and
ends with the last one. The calls for a task wait in a queue, and only the first of them looks for rows. So thousands of
calls cost no more than one. The thread sleeps until rows are due, if all calls wait for one task; else it looks at one
queue after the other every few milliseconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import geartrain._native as _native
from geartrain.core.threads import DaemonThread

if TYPE_CHECKING:
    import asyncio

#: Number of the task, most rows, most items and their axis.
Asked = tuple[int, int, int, int]
#: A new call, or the end of one, is noticed after this time at the latest.
_LOOK_EVERY_S = 0.01


@dataclass(eq=False)
class _Call:
    native: _native.Store
    asked: Asked
    later: bool
    until_s: float
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    ended: threading.Event = field(default_factory=threading.Event)

    def tell(self, found: Any, error: BaseException | None = None) -> None:
        """Hands the result to the call's event loop; releases rows that nobody takes any more."""

        def settle() -> None:
            if self.future.done():
                release(self.native, self.asked[0], found)
            elif error is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(found)

        try:
            self.loop.call_soon_threadsafe(settle)
        except RuntimeError:  # the loop is closed
            release(self.native, self.asked[0], found)


def release(native: _native.Store, task: int, found: Any) -> None:
    """Gives claimed rows back."""
    if isinstance(found, tuple):
        with suppress(Exception):  # the store may be closed, which released them
            native.release_rows(task, *found[:3])


class _Waiter:
    """The calls that wait, and their thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._lock = threading.Lock()
        self._queues: dict[tuple[int, int], deque[_Call]] = {}  # by store and task
        self._runs = False
        self._swept_s = 0.0

    def add(self, call: _Call) -> None:
        with self._lock:
            self._queues.setdefault((id(call.native), call.asked[0]), deque()).append(call)
            if not self._runs:
                self._runs = True
                DaemonThread(self._run, name="geartrain-claims").start()

    def _run(self) -> None:
        while True:
            self._sweep()
            with self._lock:
                queues = list(self._queues.values())
                if not queues:
                    self._runs = False
                    return
            for queue in queues:
                # A wait would miss rows of other tasks.
                self._serve(queue, _LOOK_EVERY_S if len(queues) == 1 else 0.0)
            if len(queues) > 1:
                time.sleep(_LOOK_EVERY_S / 4)

    def _serve(self, queue: deque[_Call], wait_s: float) -> None:
        """Hands due rows to the calls of a queue, first come, first served."""
        while queue:
            call = queue[0]
            if not call.ended.is_set():
                left_s = max(0.0, call.until_s - time.monotonic())
                try:
                    found = call.native.claim_rows(*call.asked, min(wait_s, left_s), call.later)
                except BaseException as error:
                    self._end(call, None, error)
                else:
                    if found is None:
                        return
                    self._end(call, found)
            with self._lock:
                queue.popleft()

    def _end(self, call: _Call, found: Any, error: BaseException | None = None) -> None:
        call.ended.set()
        call.tell(found, error)

    def _sweep(self) -> None:
        """Ends the calls whose time is over, and forgets those that have ended."""
        now_s = time.monotonic()
        if now_s - self._swept_s < _LOOK_EVERY_S:
            return
        self._swept_s = now_s
        with self._lock:
            for key, queue in list(self._queues.items()):
                late = [call for call in queue if not call.ended.is_set() and call.until_s <= now_s]
                for call in late:
                    self._end(call, None)
                if any(call.ended.is_set() for call in queue):
                    kept = [call for call in queue if not call.ended.is_set()]
                    queue.clear()
                    queue.extend(kept)
                if not queue:
                    del self._queues[key]


_waiter = _Waiter()


async def claim_later(native: _native.Store, asked: Asked, timeout_s: float, later: bool = False) -> Any:
    """What `claim_rows` returns, once rows are due, none can become due any more, or the time is over.

    Args:
        later: the caller says the version of what is claimed.
    """
    global _waiter
    if _waiter.pid != os.getpid():  # a forked child has the calls of its parent, and no thread
        _waiter = _Waiter()
    import asyncio  # loaded by whoever awaits

    loop = asyncio.get_running_loop()
    call = _Call(native, asked, later, time.monotonic() + timeout_s, loop, loop.create_future())
    _waiter.add(call)
    try:
        return await call.future
    except asyncio.CancelledError:
        call.ended.set()
        if call.future.done() and not call.future.cancelled() and call.future.exception() is None:
            release(native, asked[0], call.future.result())
        raise


__all__ = ["claim_later"]
