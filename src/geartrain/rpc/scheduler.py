"""Calls at the server, and the scheduler that decides which run now, in which thread, and which wait.

The scheduler owns the queues. It follows four rules, under one lock:

1. Order. A client's calls run one after the other, in the order in which they arrived. One call has the client's turn,
   and further calls wait in the client's queue. The turn passes to the next call when the function returns, is
   cancelled, or is about to wait for a call of its own (`about_to_wait`). Functions registered `concurrent` take no
   turn.
2. Threads. At most `max_threads` calls run at once. Further calls wait in the backlog. A call stops counting when its
   function waits for a call of its own, or when it was cancelled. Another call then takes its place. At most
   `_MAX_ASIDE` calls may be uncounted.
3. Receivers. The threads that receive messages also execute the calls, so a quick reply needs no thread switch. There
   is one receiver more than `max_threads`, and the last one only queues calls. The server therefore notices
   cancellations and lost clients however long the functions take.
4. Bounds. A client's queue and the backlog accept a limited number of calls and bytes. Calls beyond it get a
   `BusyError`.

The native inbox limits how many functions start at once (`max_running`), by when it delivers the next message.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from functools import partial
from types import CoroutineType
from typing import Any, Protocol

import geartrain.core.trace as trace
from geartrain.errors import BusyError, GeartrainError
from geartrain.rpc.batching import Batcher
from geartrain.rpc.event_loop import EventLoop, ExitError
from geartrain.rpc.protocol import TELL
from geartrain.rpc.registry import name_of
from geartrain.rpc.threads import ThreadGroup

#: Most running calls that do not count, because their function waits for a call of its own or was cancelled.
_MAX_ASIDE = 1024


class SendsReplies(Protocol):
    """The client of a call: `session.ServerSession`."""

    name: str
    loop: EventLoop  # runs its `async def` functions

    def reply(self, kind: int, tag: int, value: Any = None, error: BaseException | None = None) -> None:
        """Replies to a call."""

    def flow(self, tag: int) -> str:
        """The trace arrow of a call."""


class Call:
    """One call of a client. The scheduler says when `run` executes it.

    Args:
        session: the client.
        kind, tag: of the call's message.
        function: a callable, or a `Batcher`.
        args, kwargs: of the function.
        nbytes: of the message.
        until_s: the call's deadline, in `time.monotonic()`.
        ordered: whether it waits for the client's calls before it.
    """

    #: A batch or an event loop has the call, and replies with `finish`.
    deferred = False
    #: The client does not want a reply any more.
    cancelled = False
    #: Ends deferred work of a cancelled call.
    on_cancel: Callable[[], object] | None = None

    # The scheduler's, under its lock.
    line: _Line
    waits_in: _Queue | None = None
    #: A thread executes it, or is about to.
    running = False
    #: It is among the running calls that `max_threads` bounds.
    counted = True

    def __init__(
        self,
        session: SendsReplies,
        kind: int,
        tag: int,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        nbytes: int,
        until_s: float,
        ordered: bool,
    ) -> None:
        self.session, self.kind, self.tag = session, kind, tag
        self.function, self.args, self.kwargs = function, args, kwargs
        self.nbytes, self.until_s, self.ordered = nbytes, until_s, ordered

    def run(self) -> None:
        """Executes the function in this thread, and replies now, or when a batch or a future is done."""
        session, function = self.session, self.function
        began_s = time.perf_counter() if trace.on else 0.0
        batched, result = type(function) is Batcher, None
        try:
            if batched:
                self.deferred = True
                function.submit(self)
            else:
                result = function(*self.args, **self.kwargs)
                if type(result) is CoroutineType:
                    result = session.loop.begin(result)
        except BaseException as error:
            self.deferred = False
            self.reply(error=error)
        else:
            if isinstance(result, Future):
                self._wait_for(result)
            elif not batched and not self.cancelled:
                session.reply(self.kind, self.tag, result)
        if began_s:
            arrow = None if self.kind == TELL else session.flow(self.tag)
            what, ended_s = f"run {name_of(function)}", time.perf_counter()
            trace.slice_of(what, "rpc", began_s, ended_s, flow_in=arrow, flow_in_s=began_s, peer=session.name)

    def _wait_for(self, future: Future[Any]) -> None:
        self.deferred, self.on_cancel = True, future.cancel
        future.add_done_callback(self._take_from)
        if self.cancelled:  # before there was anything to cancel
            future.cancel()

    def _take_from(self, future: Future[Any]) -> None:
        error = CancelledError() if future.cancelled() else future.exception()
        if isinstance(error, ExitError):
            error = error.error
        self.finish(None if error is not None else future.result(), error)

    def reply(self, value: Any = None, error: BaseException | None = None) -> None:
        """Replies with a value or an error, unless the call was cancelled."""
        if not self.cancelled:
            self.session.reply(self.kind, self.tag, value, error)

    def finish(self, value: Any = None, error: BaseException | None = None) -> None:
        """Replies to a deferred call, from any thread."""
        self.reply(value, error)
        self.on_cancel, self.args, self.kwargs = None, (), {}  # memory of the peer's, perhaps
        self.line.scheduler.finished(self)


class _Current(threading.local):
    call: Call | None = None


#: `current.call`: the call that this thread executes, or None. The scheduler sets it.
current = _Current()


def about_to_wait() -> None:
    """Yields the turn of this thread's call, because the thread may wait for the same client's next call.

    The call also stops counting against `max_threads`.
    """
    call = current.call
    if call is not None and call.counted:
        call.line.scheduler.yield_turn(call)


class _Queue:
    """Calls that wait, first in, first out."""

    __slots__ = ("calls", "nbytes")

    def __init__(self) -> None:
        self.calls: deque[Call] = deque()
        self.nbytes = 0

    def append(self, call: Call) -> None:
        self.calls.append(call)
        self.nbytes += call.nbytes
        call.waits_in = self

    def pop(self) -> Call | None:
        """The first call; None if the queue is empty."""
        if not self.calls:
            return None
        call = self.calls.popleft()
        self.nbytes -= call.nbytes
        call.waits_in = None
        return call

    def remove(self, call: Call) -> None:
        self.calls.remove(call)
        self.nbytes -= call.nbytes
        call.waits_in = None


class _Line:
    """The calls of one client."""

    __slots__ = ("open", "queue", "scheduler", "turn")

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.open: set[Call] = set()  # that wait, run, or have no reply
        self.turn: Call | None = None  # the call that the queue waits for
        self.queue = _Queue()


class Scheduler:
    """Schedules the calls of all clients of one server. Any thread may use it.

    Args:
        name: the server's, for errors.
        threads: where more threads come from.
        yield_slot: reports to the inbox that this thread will not come back for long.
        max_threads: calls that run at once.
        max_open: calls that wait in one client's queue; four times as many wait for a thread.
        max_queued_bytes: the same in bytes of their messages.
    """

    def __init__(
        self,
        name: str,
        threads: ThreadGroup,
        yield_slot: Callable[[], None],
        *,
        max_threads: int,
        max_open: int,
        max_queued_bytes: int,
    ) -> None:
        self._name, self._threads, self._yield_slot = name, threads, yield_slot
        self._max_threads, self._max_open, self._max_queued_bytes = max_threads, max_open, max_queued_bytes
        self._lock = threading.Lock()  # of all below, and of the calls' own state
        self._lines: dict[SendsReplies, _Line] = {}
        self._receivers = 0  # threads that wait for messages
        self._busy = 0  # running calls that count
        self._aside = 0  # running calls that do not
        self._backlog = _Queue()

    def after_fork(self) -> None:
        """In a forked child, which has none of the threads: the lock anew."""
        self._lock = threading.Lock()

    # --- calls ------------------------------------------------------------------------------------------------------

    def add(self, session: SendsReplies) -> None:
        """A client that may call from now on."""
        with self._lock:
            self._lines[session] = _Line(self)

    def admit(self, call: Call) -> bool:
        """Whether this thread is to `run` a new call. False when it waits, or its client is lost.

        Raises:
            BusyError: too many wait already.
        """
        with self._lock:
            line = self._lines.get(call.session)
            if line is None:
                return False
            if call.ordered and line.turn is not None:
                queue = line.queue
                if len(queue.calls) >= self._max_open or queue.nbytes > self._max_queued_bytes:
                    raise BusyError(
                        f"{self._name!r} is busy: {len(queue.calls)} calls of {call.session.name!r} wait already"
                    )
                queue.append(call)
            else:
                if self._busy >= self._max_threads and (
                    len(self._backlog.calls) >= 4 * self._max_open or self._backlog.nbytes > self._max_queued_bytes
                ):
                    raise BusyError(
                        f"{self._name!r} is busy: it runs {self._max_threads} functions, and its queue is full"
                    )
                if call.ordered:
                    line.turn = call
                self._begin(call)
            call.line = line
            line.open.add(call)
            return call.running

    def run(self, call: Call) -> None:
        """Executes a call in this thread, then later calls of its client, and then the backlog."""
        following: Call | None = call
        while following is not None:
            current.call = following
            try:
                following.run()
            except Exception:  # ours, not the function's: what follows goes on
                traceback.print_exc()
            following = self._next(following)
        current.call = None

    def yield_turn(self, call: Call) -> None:
        """The call's function, in this thread, is about to wait."""
        with self._lock:
            following = self._pass_turn(call) + self._step_aside(call)
        if not call.counted:
            self._yield_slot()
        self._start(following)

    def finished(self, call: Call) -> None:
        """The reply to a deferred call was sent."""
        with self._lock:
            call.deferred = False
            if not call.running:
                call.line.open.discard(call)

    def cancel(self, session: SendsReplies, tag: int) -> None:
        """A call need not begin any more; if it runs, it no longer holds up others."""
        with self._lock:
            line = self._lines.get(session)
            calls = [] if line is None else [call for call in line.open if call.tag == tag]
            following = self._withdraw(calls)
        self._go_on(calls, following)

    def drop(self, session: SendsReplies) -> None:
        """The client is gone: all its calls are cancelled."""
        with self._lock:
            line = self._lines.pop(session, None) or _Line(self)
            line.turn = None
            calls = list(line.open)
            following = self._withdraw(calls)
        self._go_on(calls, following)

    def expire(self, now_s: float) -> None:
        """Cancels the calls beyond their deadline."""
        with self._lock:
            calls = [call for line in self._lines.values() for call in line.open if call.until_s < now_s]
            following = self._withdraw(calls)
        self._go_on(calls, following)

    def open_calls(self, session: SendsReplies) -> int:
        """How many calls of a client have no reply."""
        line = self._lines.get(session)
        return 0 if line is None else len(line.open)

    @property
    def backlog(self) -> int:
        """How many calls wait for a thread."""
        return len(self._backlog.calls)

    # --- threads that wait for messages -----------------------------------------------------------------------------

    def claim_receiver(self) -> bool:
        """Whether one more thread is needed to wait for messages; it counts from now on."""
        with self._lock:
            if self._receivers - self._aside > self._max_threads:
                return False
            self._receivers += 1
            return True

    def unclaim_receiver(self) -> None:
        """The thread that was claimed last cannot be started: it does not count."""
        with self._lock:
            self._receivers -= 1

    def retire_receiver(self) -> bool:
        """Whether this receiver is no longer needed, because the receiver that it replaced is back.

        If so, it stops counting.
        """
        if self._receivers - self._aside <= self._max_threads + 1:
            return False
        with self._lock:
            if self._receivers - self._aside <= self._max_threads + 1:
                return False
            self._receivers -= 1
            return True

    # --- with the lock held -----------------------------------------------------------------------------------------

    def _begin(self, call: Call) -> None:
        """The call runs from now on if there is a thread's place for it; else it waits in the backlog."""
        if self._busy >= self._max_threads:
            self._backlog.append(call)
        else:
            self._busy += 1
            call.running = True

    def _pass_turn(self, call: Call) -> list[Call]:
        """Gives a call's turn, if it has one, to the client's next call: what is to be started."""
        line = call.line
        if line.turn is not call:
            return []
        line.turn = line.queue.pop()
        if line.turn is None:
            return []
        self._begin(line.turn)
        return [line.turn] if line.turn.running else []

    def _step_aside(self, call: Call) -> list[Call]:
        """A running call does not count any more: the call of the backlog that takes its place, to be started."""
        if not call.counted or self._aside >= _MAX_ASIDE:
            return []
        call.counted = False
        self._aside += 1
        following = self._backlog.pop()
        if following is None:
            self._busy -= 1
            return []
        following.running = True
        return [following]

    def _withdraw(self, calls: list[Call]) -> list[Call]:
        """Cancels calls: those that take their places, to be started."""
        following: list[Call] = []
        for call in sorted(calls, key=lambda call: call.running):  # first those that must not take a place any more
            call.cancelled = True
            if call.waits_in is not None:
                call.waits_in.remove(call)
            following += self._pass_turn(call)
            if call.running:
                following += self._step_aside(call)
            else:
                call.line.open.discard(call)
        return following

    # --- taking the lock --------------------------------------------------------------------------------------------

    def _next(self, call: Call) -> Call | None:
        """The next call for a call's thread when its function has ended."""
        line = call.line
        with self._lock:
            call.running = False
            if not call.deferred:
                line.open.discard(call)
            following = None
            if line.turn is call:
                line.turn = following = line.queue.pop()
            if not call.counted:
                self._aside -= 1
                return None
            if following is None:
                following = self._backlog.pop()
            if following is None:
                self._busy -= 1
            else:
                following.running = True
            return following

    def _go_on(self, cancelled: list[Call], following: list[Call]) -> None:
        self._start(following)
        for call in cancelled:
            if call.on_cancel is not None:
                call.on_cancel()

    def _start(self, calls: Iterable[Call]) -> None:
        """Has a thread of its own run each of them."""
        for call in calls:
            waiting: Call | None = call
            while waiting is not None:
                try:
                    self._threads.start(partial(self.run, waiting), "executes calls for")
                    break
                except GeartrainError as error:  # no more threads to be had
                    waiting.reply(error=BusyError(f"{self._name!r}: {error}"))
                    waiting = self._next(waiting)
