"""Scheduler of a server: decides which calls run now, in which thread, and which calls wait.

It follows four rules, under one lock:

1. Order. A session's calls run one after the other, in the order in which they arrived. One worker holds the session's
   turn, and further calls wait in `session.queue`. The turn passes to the next call when the worker's function
   returns, is cancelled, or is about to wait for a call of its own (`about_to_wait`). Functions registered `concurrent`
   take no turn.
2. Threads. At most `max_threads` workers run functions. Further calls wait in the backlog. A worker stops counting when
   its function waits for a call of its own, or when its call was cancelled. Another worker then takes its place. At
   most `_MAX_ASIDE` workers may be uncounted.
3. Receivers. The threads that receive messages also execute the calls, so a quick reply needs no thread switch. There
   is one receiver more than `max_threads`, and the last one only queues calls. The server therefore notices
   cancellations and lost clients however long the functions take.
4. Bounds. A session's queue and the backlog accept a limited number of calls and bytes. Calls beyond it get a
   `BusyError`.

The native inbox limits how many functions start at once (`max_running`), by when it delivers the next message.
"""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from geartrain.errors import BusyError, GeartrainError
from geartrain.rpc.running import current
from geartrain.rpc.session import Call, ServerSession, Worker
from geartrain.rpc.threads import ThreadGroup

#: Most workers that do not count, because their function waits for a call of its own or was cancelled.
_MAX_ASIDE = 1024


class Scheduler:
    """Schedules the calls of all sessions of one server. Any thread may use it.

    Args:
        name: the server's, for errors.
        threads: where more threads come from.
        execute: runs a call's function and replies; called without the lock.
        refuse: replies with an error instead.
        yield_slot: reports to the inbox that this thread will not come back for long.
        max_threads: workers that run functions at once.
        max_open: calls that wait in one session's queue; four times as many wait for a thread.
        max_queued_bytes: the same in bytes of their messages.
    """

    def __init__(
        self,
        name: str,
        threads: ThreadGroup,
        execute: Callable[[Call], None],
        refuse: Callable[[Call, BusyError], None],
        yield_slot: Callable[[], None],
        *,
        max_threads: int,
        max_open: int,
        max_queued_bytes: int,
    ) -> None:
        self._name, self._threads = name, threads
        self._execute, self._refuse, self._leave_inbox = execute, refuse, yield_slot
        self._max_threads, self._max_open, self._max_queued_bytes = max_threads, max_open, max_queued_bytes
        self._on_wait = self._yield_turn
        self._lock = threading.Lock()  # of all below, and of the sessions' queues
        self._receivers = 0  # threads that wait for messages
        self._busy = 0  # workers that count
        self._aside = 0  # workers that do not
        self._backlog: deque[Worker] = deque()
        self._backlog_bytes = 0

    def after_fork(self) -> None:
        """In a forked child, which has none of the threads: the lock anew."""
        self._lock = threading.Lock()

    # --- calls ------------------------------------------------------------------------------------------------------

    def admit(self, call: Call, ordered: bool) -> Worker | None:
        """A worker for this thread to `run`; None when the call waits. Raises `BusyError`.

        Args:
            call: a new one.
            ordered: whether it waits for the session's calls before it.
        """
        session = call.session
        with self._lock:
            if ordered and session.worker is not None:
                if len(session.queue) >= self._max_open or session.queued_bytes > self._max_queued_bytes:
                    raise BusyError(
                        f"{self._name!r} is busy: {len(session.queue)} calls of {session.name!r} wait already"
                    )
                session.queue.append(call)
                session.queued_bytes += call.nbytes
                return None
            if self._busy >= self._max_threads and (
                len(self._backlog) >= 4 * self._max_open or self._backlog_bytes > self._max_queued_bytes
            ):
                raise BusyError(f"{self._name!r} is busy: it runs {self._max_threads} functions, and its queue is full")
            worker = Worker(call, ordered, self._on_wait)
            if ordered:
                session.worker = worker
            return self._begin(worker)

    def run(self, worker: Worker) -> None:
        """Executes a worker's call in this thread, then later calls of its session, and then the backlog."""
        following: Worker | None = worker
        while following is not None:
            current.worker = following
            try:
                self._execute(following.call)
            except Exception:  # ours, not the function's: what follows goes on
                traceback.print_exc()
            following = self._next(following)
        current.worker = None

    def cancel(self, session: ServerSession, tag: int) -> None:
        """A call need not begin any more; if it runs, it no longer holds up others."""
        with self._lock:
            for i, call in enumerate(session.queue):
                if call.tag == tag:
                    del session.queue[i]
                    session.queued_bytes -= call.nbytes
                    return
            self._drop_from_backlog(session, tag)
            holds_turn = session.worker is not None and session.worker.call.tag == tag
            first = self._pass_turn(session) if holds_turn else None
            running = session.running.get(tag)
            second = None if running is None else self._step_aside(running)
        self._start(first, second)

    def drop(self, session: ServerSession) -> None:
        """The client is gone. Its waiting calls do not start, and its running calls no longer delay other calls."""
        with self._lock:
            session.queue.clear()
            session.queued_bytes = 0
            self._drop_from_backlog(session, None)
            started = [self._step_aside(worker) for worker in list(session.running.values())]
        self._start(*started)

    def expired(self, sessions: Iterable[ServerSession], now_s: float) -> list[tuple[ServerSession, int]]:
        """Calls that run or wait beyond their deadline: session and tag of each."""
        with self._lock:
            calls = [worker.call for worker in self._backlog]
            for session in sessions:
                calls += [worker.call for worker in session.running.values()]
                calls += session.queue
        return [(call.session, call.tag) for call in calls if call.until_s < now_s]

    @property
    def backlog(self) -> int:
        """How many calls wait for a thread."""
        return len(self._backlog)

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

    def _begin(self, worker: Worker) -> Worker | None:
        """The worker, if there is a thread's place for it; else it waits in the backlog."""
        if self._busy >= self._max_threads:
            self._backlog.append(worker)
            self._backlog_bytes += worker.call.nbytes
            return None
        self._busy += 1
        worker.call.session.running[worker.call.tag] = worker
        return worker

    def _pass_turn(self, session: ServerSession) -> Worker | None:
        """Gives the turn to the session's next call: a worker to be started, if there is a place for it."""
        session.worker = None
        if not session.queue:
            return None
        session.worker = Worker(self._pop(session), True, self._on_wait)
        return self._begin(session.worker)

    def _step_aside(self, worker: Worker) -> Worker | None:
        """The worker no longer counts: the one of the backlog that takes its place and is to be started."""
        if not worker.counted or self._aside >= _MAX_ASIDE:
            return None
        worker.counted = False
        self._aside += 1
        following = self._pop_backlog()
        self._busy -= following is None
        return following

    def _pop(self, session: ServerSession) -> Call:
        call = session.queue.popleft()
        session.queued_bytes -= call.nbytes
        return call

    def _pop_backlog(self) -> Worker | None:
        if not self._backlog:
            return None
        worker = self._backlog.popleft()
        call = worker.call
        self._backlog_bytes -= call.nbytes
        call.session.running[call.tag] = worker
        return worker

    def _drop_from_backlog(self, session: ServerSession, tag: int | None) -> None:
        """The call with this tag, or all of a session's."""
        left = [w for w in self._backlog if w.call.session is not session or tag not in (None, w.call.tag)]
        if len(left) < len(self._backlog):
            self._backlog = deque(left)
            self._backlog_bytes = sum(worker.call.nbytes for worker in left)

    # --- taking the lock --------------------------------------------------------------------------------------------

    def _next(self, worker: Worker) -> Worker | None:
        """The next call for a worker's thread when its call has ended."""
        call = worker.call
        session = call.session
        with self._lock:
            if session.running.get(call.tag) is worker:
                del session.running[call.tag]
            if worker.ordered and session.worker is worker:
                if session.queue:
                    call = worker.call = self._pop(session)
                    session.running[call.tag] = worker
                    return worker
                session.worker = None
            if not worker.counted:
                self._aside -= 1
                return None
            following = self._pop_backlog()
            self._busy -= following is None
            return following

    def _yield_turn(self, worker: Worker) -> None:
        """This thread's function is about to wait."""
        session = worker.call.session
        with self._lock:
            first = self._pass_turn(session) if worker.ordered and session.worker is worker else None
            second = self._step_aside(worker)
        if not worker.counted:
            self._leave_inbox()
        self._start(first, second)

    def _start(self, *workers: Worker | None) -> None:
        """Has a thread of its own run each of them."""
        for worker in workers:
            waiting = worker
            while waiting is not None:
                try:
                    self._threads.start(partial(self.run, waiting), "executes calls for")
                    break
                except GeartrainError as error:  # no more threads to be had
                    self._refuse(waiting.call, BusyError(f"{self._name!r}: {error}"))
                    waiting = self._next(waiting)
