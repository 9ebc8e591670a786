"""Server side of a node: accepts clients, receives their messages, executes the calls, and replies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CoroutineType
from typing import Any, TypeVar

import geartrain._native as _native
import geartrain.core.trace as trace
from geartrain.core.arguments import did_you_mean, shown
from geartrain.core.threads import ReentrantEvent
from geartrain.errors import ConnectionClosedError, GeartrainError, MessageError, UntrustedPeerError, WaitTimeoutError
from geartrain.rpc.batching import Batcher, PendingReply
from geartrain.rpc.protocol import CALL_OBJECT, CANCEL, ERROR, HELLO, KIND, OUT_OF_BAND, RESULT, TELL, timeout_in
from geartrain.rpc.registry import concurrent_functions, functions, name_of, with_caller_functions
from geartrain.rpc.scheduler import Scheduler
from geartrain.rpc.session import Call, ServerSession, Worker
from geartrain.rpc.tensors.endpoint import DeviceTensors
from geartrain.rpc.tensors.receiver import TensorReceiver
from geartrain.rpc.threads import ThreadGroup
from geartrain.transport.codec import native_codec
from geartrain.transport.connection import Listener

T = TypeVar("T")

#: Most characters of an error's text, and of its traceback, that are sent.
_MOST_TEXT = 64 << 10
#: Period of the check for calls whose deadline has passed.
_EXPIRE_EVERY_S = 0.25


class Server:
    """Serves the clients that connect to a listener, until it is closed.

    All clients share one inbox. The server's threads receive messages from it. If the scheduler permits, the receiving
    thread executes the call; otherwise the call waits (scheduler.py).

    Args:
        node: the `Node`, for functions registered `with_caller`.
        name: the node's.
        listener: that clients connect to; closed with the server.
        devices: the node's tensors on GPUs.
        threads: where its threads are started.
        pickle, max_threads, max_running, max_open, spin_us: as for `Node`.
        max_queued_bytes: of messages whose calls wait.
        timeout_s: how long a reply waits for a client that does not take it.
        lost: `lost(name, number, reason)` is called when a connection in the inbox ends: with the client's name, or
            None for a connection that the server only watches.
    """

    def __init__(
        self,
        node: object,
        name: str,
        listener: Listener,
        devices: DeviceTensors,
        threads: ThreadGroup,
        *,
        pickle: bool,
        timeout_s: float,
        max_threads: int,
        max_running: int,
        max_open: int,
        max_queued_bytes: int,
        spin_us: float,
        lost: Callable[[str | None, int, str], None],
    ) -> None:
        self.name = name
        self._node, self._pickle, self._timeout_s = node, pickle, timeout_s
        self._listener, self._devices, self._threads, self._on_lost = listener, devices, threads, lost
        self._codec = native_codec()
        self._inbox = _native.Inbox(spin_us, max_running)
        self._numbers = itertools.count(1)
        self._sessions: dict[int, ServerSession] = {}  # by number in the inbox
        self.scheduler = Scheduler(
            name,
            threads,
            self._execute,
            self._refuse,
            self._inbox.yield_slot,
            max_threads=max_threads,
            max_open=max_open,
            max_queued_bytes=max_queued_bytes,
        )
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._closing = ReentrantEvent()
        try:
            threads.start(self._accept, "accepts")
            threads.start(self._expire, "expires calls of")
            for _ in range(2):
                if self.scheduler.claim_receiver():
                    threads.start(self._receive, "serves")
        except BaseException:  # no more threads: those that were started end
            self.close()
            raise

    @property
    def sessions(self) -> list[ServerSession]:
        """The sessions of the connected clients."""
        return list(self._sessions.values())

    def watch(self, connection: _native.Connection) -> int:
        """Its number; from now on `lost` is called when the connection ends."""
        number = next(self._numbers)
        self._inbox.watch(number, connection)
        return number

    def hang_up(self, name: str) -> None:
        """Ends the connections of the clients of that name."""
        for session in self.sessions:
            if session.name == name:
                session.connection.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed, or is being closed."""
        return self._closed

    def has_client(self, name: str) -> bool:
        """Whether a client of that name is connected."""
        return any(session.name == name for session in self.sessions)

    def close(self) -> None:
        """Closes all connections of clients. Functions that still run are left to end."""
        with self._lock:  # no session begins any more
            loop, self._closed = self._loop, True
        self._listener.close()
        self._inbox.close()
        for session in self.sessions:
            session.connection.close()
            session.tensors.close()
        self._closing.set()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # another thread that closes was first
                loop.call_soon_threadsafe(loop.stop)

    def after_fork(self) -> None:
        """In a forked child, which has none of the threads: the locks anew, and the loop is the parent's."""
        self._lock, self._closing, self._loop = threading.Lock(), ReentrantEvent(), None
        self.scheduler.after_fork()

    # --- messages ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.native.accept_in_thread(3600.0)
            except WaitTimeoutError:
                continue
            except GeartrainError:
                return  # closed
            number = next(self._numbers)
            tensors = TensorReceiver(self._devices, connection)
            session = ServerSession(self._node, number, connection, self._pickle, tensors)
            with self._lock:
                closed = self._closed
                if not closed:
                    self._sessions[number] = session
            if closed:  # nobody would serve it, nor end it
                connection.close()
                session.close()
                return
            with contextlib.suppress(GeartrainError):
                self._inbox.add(number, connection, session.pickle)

    def _receive(self) -> None:
        receive, codec, scheduler = self._inbox.receive, self._codec, self.scheduler
        while True:
            try:
                event = receive(codec, 3600.0)
            except GeartrainError:
                return  # closed
            if event is None:
                continue
            number, standing_by, word, tag, nbytes, value, undecodable = event
            if standing_by == 0 and scheduler.claim_receiver():
                try:
                    self._threads.start(self._receive, "serves")
                except GeartrainError:  # no more threads: this one waits again once it has served
                    scheduler.unclaim_receiver()
            session = self._sessions.get(number)
            if word == -1:
                self._lost(number, value)
            elif session is not None:  # else another thread has seen the end of the connection meanwhile
                try:
                    self._dispatch(session, word, tag, nbytes, value, undecodable)
                except Exception:  # ours, not the function's: the thread goes on
                    traceback.print_exc()
            del event, value, undecodable, session  # memory of the peer's, perhaps
            if scheduler.retire_receiver():
                self._inbox.yield_slot()
                return

    def _expire(self) -> None:
        # Clients cancel late calls themselves, unless they forgot the call, or cannot any more.
        while not self._closing.wait(_EXPIRE_EVERY_S):
            late_s = time.monotonic() - _EXPIRE_EVERY_S
            sessions = self.sessions
            late = self.scheduler.expired(sessions, late_s)
            late += [(session, tag) for session in sessions for tag in session.expired(late_s)]
            for session, tag in late:
                self._cancel(session, tag)

    def _lost(self, number: int, reason: str) -> None:
        session = self._sessions.pop(number, None)
        if session is not None:
            session.close()
            self.scheduler.drop(session)
        try:
            self._on_lost(None if session is None else session.name, number, reason)
        except BaseException:  # of a program's callback: SystemExit would end this thread, which serves others
            traceback.print_exc()

    def _cancel(self, session: ServerSession, tag: int) -> None:
        session.cancel(tag)
        self.scheduler.cancel(session, tag)

    def _dispatch(
        self, session: ServerSession, word: int, tag: int, nbytes: int, value: Any, undecodable: BaseException | None
    ) -> None:
        """Handles one message, resumes the client's connection, and executes the call if it may run now.

        `undecodable` is the error of a message that cannot be decoded: the reply, then.
        """
        kind, worker = word & KIND, None
        try:
            if kind == CANCEL:
                self._cancel(session, tag)
            elif undecodable is not None:
                self._reply(session, kind, tag, error=undecodable)
            else:
                if word & OUT_OF_BAND:
                    value = session.tensors.received(value)
                worker = self._schedule(session, kind, word, tag, nbytes, value)
        except BaseException as error:
            self._reply(session, kind, tag, error=error)
        finally:
            self._inbox.resume(session.number)
        if worker is not None:
            del value
            self.scheduler.run(worker)

    def _schedule(
        self, session: ServerSession, kind: int, word: int, tag: int, nbytes: int, value: Any
    ) -> Worker | None:
        """Schedules a message, and returns a worker if its call may run now. Raises the error that the client gets."""
        if kind == HELLO:
            session.name = str(value)
            return None
        named, args, kwargs = value
        if kind != CALL_OBJECT:
            function = functions.get(named)
            if function is None:
                there = sorted(one for one in functions if not one.startswith("geartrain.")) or ["none"]
                raise LookupError(
                    f"{self.name!r} has no function {shown(named)}; it has {', '.join(there)}"
                    f"{did_you_mean(named, there)}"
                )
            if function in with_caller_functions:
                args = (session, *args)
            ordered = function not in concurrent_functions
        elif session.pickle:
            function, ordered = named, True
        else:
            raise UntrustedPeerError("functions that are not registered are accepted only from peers with the secret")
        until_s = time.monotonic() + timeout_in(word)
        call = Call(session, kind, tag, function, args, kwargs, nbytes, until_s)
        return self.scheduler.admit(call, ordered)

    # --- calls ------------------------------------------------------------------------------------------------------

    def _execute(self, call: Call) -> None:
        """Runs a call's function, and replies now or when a pending result is complete."""
        session, kind, tag, function, args, kwargs, _, until_s = call
        began_s = time.perf_counter() if trace.on else 0.0
        try:
            result = function.submit(args, kwargs) if type(function) is Batcher else function(*args, **kwargs)
            if type(result) is CoroutineType:
                result = self._begin(result)
        except BaseException as error:
            self._reply(session, kind, tag, error=error)
        else:
            if type(result) is PendingReply:
                result.until_s = until_s
                session.pending[tag] = result
                result.when_done(partial(self._finish, session, kind, tag, result))
            else:
                self._reply(session, kind, tag, result)
        if began_s:
            arrow = None if kind == TELL else session.flow(tag)
            what, ended_s = f"run {name_of(function)}", time.perf_counter()
            trace.slice_of(what, "rpc", began_s, ended_s, flow_in=arrow, flow_in_s=began_s, peer=session.name)

    def _begin(self, coroutine: CoroutineType[Any, Any, Any]) -> PendingReply:
        """Has the event loop run an `async def`."""
        guarded = _ending_itself_alone(coroutine)
        try:
            task: Any = asyncio.run_coroutine_threadsafe(guarded, self._event_loop())
        except BaseException:
            guarded.close()
            coroutine.close()
            raise
        pending = PendingReply(task.cancel)
        task.add_done_callback(pending.take_from)
        return pending

    def _finish(self, session: ServerSession, kind: int, tag: int, pending: PendingReply) -> None:
        session.pending.pop(tag, None)
        if not pending.cancelled:
            error = pending.error.error if isinstance(pending.error, _ExitError) else pending.error
            self._reply(session, kind, tag, pending.value, error)

    def _refuse(self, call: Call, error: BaseException) -> None:
        self._reply(call.session, call.kind, call.tag, error=error)

    def _reply(
        self, session: ServerSession, kind: int, tag: int, value: Any = None, error: BaseException | None = None
    ) -> None:
        if kind in (TELL, HELLO):
            if error is not None:
                traceback.print_exception(error)
            return
        if trace.on:
            now_s = time.perf_counter()
            trace.slice_of("answer", "rpc", now_s, now_s, flow_out=f"{session.flow(tag)}r", peer=session.name)
        if error is None:
            error = self._send(session, tag, RESULT, value)
        if error is not None:
            self._send(session, tag, ERROR, _described(error))

    def _send(self, session: ServerSession, tag: int, kind: int, value: Any) -> BaseException | None:
        """Sends a reply: None; or the error of a value that cannot be sent, where nothing was."""
        connection = session.connection
        try:
            return connection.send_value(
                self._codec, tag, kind, value, session.pickle, self._timeout_s, session.tensors
            )
        except MessageError as too_large:
            return too_large
        except WaitTimeoutError:
            connection.close()  # the client does not read replies
        except GeartrainError:
            pass  # it is gone, which the inbox reports
        return None

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise ConnectionClosedError(f"the node {self.name!r} was closed")
            if self._loop is None:
                loop = asyncio.new_event_loop()
                try:
                    self._threads.start(partial(_run_loop, loop, self._closing), "loops for")
                except BaseException:
                    loop.close()
                    raise
                self._loop = loop
            return self._loop


async def _ending_itself_alone(coroutine: CoroutineType[Any, Any, T]) -> T:
    """What it returns or raises; as `_ExitError` what asyncio would end its loop with."""
    try:
        return await coroutine
    except (SystemExit, KeyboardInterrupt) as error:
        raise _ExitError(error) from None


class _ExitError(Exception):
    """Carries a function's SystemExit or KeyboardInterrupt through asyncio."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


def _run_loop(loop: asyncio.AbstractEventLoop, closing: ReentrantEvent) -> None:
    """Runs the event loop until the server closes, then cancels running functions. A function cannot end the loop."""
    asyncio.set_event_loop(loop)
    try:
        while not closing.is_set():
            try:
                loop.run_forever()
            except BaseException:  # of a callback of theirs
                traceback.print_exc()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=0.5))
    finally:
        loop.close()


def _described(error: BaseException) -> tuple[str, str, str]:
    """An error as it is sent: type, text, and traceback without this package's own frames."""
    own = Path(__file__).parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent != own]
    try:
        text = _cut(str(error))
        last = "".join(_cut(line) for line in traceback.format_exception_only(type(error), error))
    except Exception as failure:  # of its own __str__
        text, last = f"(its text cannot be had: {type(failure).__name__})", f"{type(error).__name__}\n"
    lines = _cut("".join(traceback.format_list(frames)))
    said = (_cut(type(error).__name__), text, lines + _cut(last) if frames else "")
    name, text, where = (part.encode(errors="replace").decode() for part in said)
    return name, text, where


def _cut(text: str) -> str:
    """The text, or its beginning and its length if it is too long. Every error must fit into a reply."""
    if len(text) <= _MOST_TEXT:
        return text
    return f"{text[:_MOST_TEXT]}... (cut here; the text has {len(text):,} characters)"
