"""Server side of a node: accepts clients, receives their messages, and has the scheduler run their calls."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import geartrain._native as _native
from geartrain.core.arguments import did_you_mean, shown
from geartrain.core.lifetime import on_error
from geartrain.core.threads import ReentrantEvent
from geartrain.errors import GeartrainError, UntrustedPeerError, WaitTimeoutError
from geartrain.rpc.event_loop import EventLoop
from geartrain.rpc.protocol import CALL_OBJECT, CANCEL, HELLO, KIND, OUT_OF_BAND, timeout_in
from geartrain.rpc.registry import concurrent_functions, functions, with_caller_functions
from geartrain.rpc.scheduler import Call, Scheduler
from geartrain.rpc.session import ServerSession
from geartrain.rpc.tensors.endpoint import DeviceTensors
from geartrain.rpc.tensors.receiver import TensorReceiver
from geartrain.rpc.threads import ThreadGroup
from geartrain.transport.codec import native_codec
from geartrain.transport.connection import Listener

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
            self._inbox.yield_slot,
            max_threads=max_threads,
            max_open=max_open,
            max_queued_bytes=max_queued_bytes,
        )
        self._lock = threading.Lock()
        self._loop = EventLoop(name, threads)
        self._closed = False
        self._closing = ReentrantEvent()
        with on_error(self.close):  # no more threads: those that were started end
            threads.start(self._accept, "accepts")
            threads.start(self._expire, "expires calls of")
            for _ in range(2):
                if self.scheduler.claim_receiver():
                    threads.start(self._receive, "serves")

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
            self._closed = True
        self._listener.close()
        self._inbox.close()
        for session in self.sessions:
            session.connection.close()
            session.tensors.close()
        self._closing.set()
        self._loop.close()

    def after_fork(self) -> None:
        """In a forked child, which has none of the threads: the locks anew."""
        self._lock, self._closing = threading.Lock(), ReentrantEvent()
        self._loop.after_fork()
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
            session = ServerSession(
                self._node,
                number,
                connection,
                tensors,
                self._loop,
                pickle=self._pickle,
                timeout_s=self._timeout_s,
            )
            with self._lock:
                closed = self._closed
                if not closed:
                    self._sessions[number] = session
                    self.scheduler.add(session)
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
            self.scheduler.expire(time.monotonic() - _EXPIRE_EVERY_S)

    def _lost(self, number: int, reason: str) -> None:
        session = self._sessions.pop(number, None)
        if session is not None:
            self.scheduler.drop(session)
            session.close()
        try:
            self._on_lost(None if session is None else session.name, number, reason)
        except BaseException:  # of a program's callback: SystemExit would end this thread, which serves others
            traceback.print_exc()

    def _dispatch(
        self, session: ServerSession, word: int, tag: int, nbytes: int, value: Any, undecodable: BaseException | None
    ) -> None:
        """Handles one message, resumes the client's connection, and executes the call if it may run now.

        `undecodable` is the error of a message that cannot be decoded: the reply, then.
        """
        kind, call = word & KIND, None
        try:
            if kind == CANCEL:
                self.scheduler.cancel(session, tag)
                session.tensors.discard(tag)
            elif undecodable is not None:
                session.reply(kind, tag, error=undecodable)
            elif kind == HELLO:
                session.name = str(value)
            else:
                if word & OUT_OF_BAND:
                    value = session.tensors.received(value)
                asked = self._call(session, word, tag, nbytes, value)
                call = asked if self.scheduler.admit(asked) else None
        except BaseException as error:
            session.reply(kind, tag, error=error)
        finally:
            self._inbox.resume(session.number)
        if call is not None:
            del value
            self.scheduler.run(call)

    def _call(self, session: ServerSession, word: int, tag: int, nbytes: int, value: Any) -> Call:
        """The call in a message. Raises the error that the client gets."""
        kind = word & KIND
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
        return Call(session, kind, tag, function, args, kwargs, nbytes, until_s, ordered)
