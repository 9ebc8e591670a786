"""The answering side: threads that wait for any peer, run what it calls, and answer themselves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import CoroutineType
from typing import Any

import geartrain._native as _native
from geartrain.errors import (
    BusyError,
    ConnectionClosedError,
    GeartrainError,
    MessageError,
    UntrustedPeerError,
    WaitTimeoutError,
)
from geartrain.rpc.batching import Batcher, Pending
from geartrain.rpc.protocol import BESIDE, CALL_OBJECT, CANCEL, ERROR, HELLO, RESULT, TELL, kind_and_limit
from geartrain.rpc.registry import concurrent_functions, function, functions, with_caller_functions
from geartrain.rpc.session import Call, Caller, Running, Turn, here
from geartrain.transport.codec import native_codec
from geartrain.transport.connection import Listener

#: Threads whose functions wait for calls of their own, or were given up and do not end.
_MOST_ASIDE = 1024
#: How often calls are looked for that should have been given up.
_LATE_EVERY_S = 0.25


class Server:
    """Serves the peers that connect to a listener, until it is closed.

    Threads ask the inbox for messages, and run what they call themselves. At most `max_threads` run functions; one
    more only puts calls where they wait, so that cancellations and the ends of peers are seen however long the
    functions take. A function that waits for a call of its own, or that its peer has given up, no longer counts: it
    gets a thread beside the others, up to `_MOST_ASIDE`. How many begin at once is the inbox's to say (`max_running`).

    `lost(name, number, reason)` is called when a connection in the inbox ends: with the caller's name, or None for
    one that the server only watches.
    """

    def __init__(
        self,
        node: Any,
        name: str,
        listener: Listener,
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
        self.node = node  # for the functions of geartrain.rpc itself
        self.name, self.pickle, self.timeout_s = name, pickle, timeout_s
        self.max_threads, self.max_open, self.max_queued_bytes = max_threads, max_open, max_queued_bytes
        self._listener, self._told_of = listener, lost
        self._codec = native_codec()
        self._inbox = _native.Inbox(spin_us, max_running)
        self._numbers = itertools.count(1)
        self._callers: dict[int, Caller] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._closing = threading.Event()
        self._running: set[threading.Thread] = set()
        self._threads = 0  # that ask the inbox
        self._busy = 0  # run functions, and count
        self._aside = 0  # run functions, and do not count
        self._backlog: deque[tuple[Caller, Call, Turn | None]] = deque()  # while `max_threads` are busy
        self._backlog_bytes = 0
        self.start(self._accept, "accepts")
        self.start(self._give_up_late, "gives up late calls of")
        with self._lock:
            self._start_thread()
            self._start_thread()

    def watch(self, connection: _native.Connection) -> int:
        """Its number; from now on `lost` is called when the connection ends."""
        number = next(self._numbers)
        self._inbox.watch(number, connection)
        return number

    def hang_up(self, name: str) -> None:
        """Ends the connections of the callers of that name."""
        for caller in list(self._callers.values()):
            if caller.name == name:
                caller.connection.close()

    def has_caller(self, name: str) -> bool:
        """Whether a caller of that name is connected."""
        return any(caller.name == name for caller in list(self._callers.values()))

    def start(self, run: Callable[[], None], what: str) -> None:
        """Runs something in a thread that `close` waits for."""

        def body() -> None:
            mine = threading.current_thread()
            self._running.add(mine)
            try:
                run()
            finally:
                self._running.discard(mine)

        threading.Thread(target=body, name=f"geartrain {what} {self.name}", daemon=True).start()

    def close(self) -> None:
        """Hangs up on all callers. Functions that still run are left to end."""
        self._listener.close()
        self._inbox.close()
        for caller in list(self._callers.values()):
            caller.connection.close()
            caller.tensors.close()
        with self._lock:
            loop, self._closed = self._loop, True
        self._closing.set()
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)
        until_s = time.monotonic() + 1.0
        for thread in list(self._running):
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))

    # --- messages ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept(timeout_s=3600.0).native
            except WaitTimeoutError:
                continue
            except GeartrainError:
                return  # closed
            number = next(self._numbers)
            self._callers[number] = Caller(self, number, connection)
            with contextlib.suppress(GeartrainError):
                self._inbox.add(number, connection)

    def _start_thread(self) -> None:
        self._threads += 1
        self.start(self._serve, "serves")

    def _serve(self) -> None:
        receive = self._inbox.receive
        while True:
            try:
                event = receive(3600.0)
            except GeartrainError:
                return  # closed
            if event is None:
                continue
            number, message, standing_by = event
            if standing_by == 0:
                with self._lock:
                    if self._threads - self._aside <= self.max_threads:
                        self._start_thread()
            caller = self._callers.get(number)
            if isinstance(message, str):
                self._lost(number, message)
            elif caller is not None:  # else its end was told to another thread meanwhile
                try:
                    self._take(caller, message)
                except Exception:  # ours, not the function's: the thread goes on
                    traceback.print_exc()
            del event, message, caller  # memory of the peer's, perhaps
            if self._threads - self._aside > self.max_threads + 1 and self._is_spare():
                self._inbox.step_aside()
                return

    def _is_spare(self) -> bool:
        # It took the place of one that waited, and that one is back.
        with self._lock:
            if self._threads - self._aside <= self.max_threads + 1:
                return False
            self._threads -= 1
            return True

    def _give_up_late(self) -> None:
        # Callers say so themselves, unless they forgot the call, or cannot any more.
        while not self._closing.wait(_LATE_EVERY_S):
            late_s = time.monotonic() - _LATE_EVERY_S
            for caller in list(self._callers.values()):
                caller.give_up_late(late_s)
            with self._lock:
                late = [(caller, call[1]) for caller, call, _ in self._backlog if call[6] < late_s]
            for caller, tag in late:
                caller.cancel(tag)

    def _lost(self, number: int, reason: str) -> None:
        caller = self._callers.pop(number, None)
        if caller is not None:
            caller.lost()
        try:
            self._told_of(None if caller is None else caller.name, number, reason)
        except Exception:
            traceback.print_exc()

    def _take(self, caller: Caller, message: _native.Message) -> None:
        """Puts a message where it belongs, lets the next one come, and runs what is to be run."""
        kind, tag = kind_and_limit(message.kind)[0], message.tag
        turn = call = None
        try:
            call, turn = self._place(caller, message)
        except BaseException as error:
            self._answer(caller, kind, tag, error=error)
        finally:
            self._inbox.resume(caller.number)
        if call is not None:
            self._admit(caller, call, turn)

    def _place(self, caller: Caller, message: _native.Message) -> tuple[Call | None, Turn | None]:
        """A call to be run now, and its turn, if it is one of those that keep order."""
        (kind, limit_s), tag = kind_and_limit(message.kind), message.tag
        if kind == CANCEL:
            caller.cancel(tag)
            return None, None
        value = self._codec.decode(message, caller.pickle)
        if message.kind & BESIDE:
            value = caller.tensors.arrived(value)
        if kind == HELLO:
            caller.name = str(value)
            return None, None
        named, args, kwargs = value
        if kind != CALL_OBJECT:
            function = functions.get(named)
            if function is None:
                raise LookupError(f"{self.name!r} has no function {named!r}; it has {', '.join(sorted(functions))}")
            if function in with_caller_functions:
                args = (caller, *args)
        elif caller.pickle:
            function = named
        else:
            raise UntrustedPeerError("functions that are not registered are taken from peers with the secret only")
        call = (kind, tag, function, args, kwargs, message.nbytes, time.monotonic() + limit_s)
        if kind != CALL_OBJECT and function in concurrent_functions:
            return call, None
        turn = caller.begin(call)
        return (None, None) if turn is None else (call, turn)

    # --- who runs what ----------------------------------------------------------------------------------------------

    def _admit(self, caller: Caller, call: Call | None, turn: Turn | None) -> None:
        """Runs a call in this thread, or lets it wait until there is one for it."""
        while call is not None:
            refused = False
            with self._lock:
                if runs := self._busy < self.max_threads:
                    self._busy += 1
                elif len(self._backlog) < 4 * self.max_open and self._backlog_bytes <= self.max_queued_bytes:
                    self._backlog.append((caller, call, turn))
                    self._backlog_bytes += call[5]
                else:
                    refused = True
            if runs:
                self._work(caller, call, turn)
            if not refused:
                return
            busy = BusyError(f"{self.name!r} runs {self.max_threads} functions, and more calls wait than it takes")
            self._answer(caller, call[0], call[1], error=busy)
            call = None if turn is None else caller.next(turn)

    def go_on(self, caller: Caller, call: Call, turn: Turn) -> None:
        """Has a thread of its own run a call whose turn came while the one before it still runs."""
        with self._lock:
            if self._busy >= self.max_threads:
                self._backlog.append((caller, call, turn))  # one of each peer's at most
                self._backlog_bytes += call[5]
                return
            self._busy += 1
        self._start_worker(caller, call, turn)

    def _start_worker(self, caller: Caller, call: Call, turn: Turn | None) -> None:
        try:
            self.start(lambda: self._work(caller, call, turn), "goes on for")
        except RuntimeError as error:  # no more threads to be had
            with self._lock:
                self._busy -= 1
            self._answer(caller, call[0], call[1], error=BusyError(f"{self.name!r}: {error}"))

    def step_aside(self, running: Running, *, mine: bool = False) -> None:
        """A function that waits for something else makes room for another; `mine`: it is this thread's."""
        following = None
        with self._lock:
            if not running.counted or self._aside >= _MOST_ASIDE:
                return
            running.counted = False
            self._aside += 1
            following = self._next_of_backlog()
            self._busy -= following is None
        if mine:
            self._inbox.step_aside()
        if following is not None:
            self._start_worker(*following)

    def drop(self, caller: Caller, tag: int | None) -> None:
        """Calls that nobody waits for any more need not begin: the one with this tag, or all of a peer's."""
        with self._lock:
            left = [one for one in self._backlog if one[0] is not caller or tag not in (None, one[1][1])]
            if len(left) < len(self._backlog):
                self._backlog = deque(left)
                self._backlog_bytes = sum(one[1][5] for one in left)

    def _next_of_backlog(self) -> tuple[Caller, Call, Turn | None] | None:
        if not self._backlog:
            return None
        following = self._backlog.popleft()
        self._backlog_bytes -= following[1][5]
        return following

    def _work(self, caller: Caller, call: Call, turn: Turn | None) -> None:
        """Runs a call, those of the same peer that come meanwhile, and then what waits for a thread."""
        while True:
            running = here.running = Running(caller, turn)
            following: Call | None = call
            while following is not None:
                tag = running.tag = following[1]
                running.until_s = following[6]
                caller.running[tag] = running
                try:
                    self._run(caller, following)
                except Exception:  # ours, not the function's: what follows goes on
                    traceback.print_exc()
                if caller.running.get(tag) is running:
                    del caller.running[tag]
                following = None if turn is None else caller.next(turn)
            here.running = None
            with self._lock:
                if not running.counted:
                    self._aside -= 1
                    return
                waiting = self._next_of_backlog()
                if waiting is None:
                    self._busy -= 1
                    return
            caller, call, turn = waiting

    def _run(self, caller: Caller, call: Call) -> None:
        kind, tag, function, args, kwargs, _, until_s = call
        try:
            result = function.submit(args, kwargs) if type(function) is Batcher else function(*args, **kwargs)
        except BaseException as error:
            self._answer(caller, kind, tag, error=error)
            return
        if type(result) is not Pending and type(result) is not CoroutineType:
            self._answer(caller, kind, tag, result)
            return
        if type(result) is Pending:
            pending = result
        else:
            task: Any = asyncio.run_coroutine_threadsafe(result, self._event_loop())  # type: ignore[arg-type]
            pending = Pending(task.cancel)
            task.add_done_callback(pending.take_from)
        pending.until_s = until_s
        caller.keep(tag, pending)
        pending.when_done(lambda: self._finish(caller, kind, tag, pending))

    def _finish(self, caller: Caller, kind: int, tag: int, pending: Pending) -> None:
        caller.drop(tag)
        if not pending.cancelled:
            self._answer(caller, kind, tag, pending.value, pending.error)

    def _answer(
        self, caller: Caller, kind: int, tag: int, value: Any = None, error: BaseException | None = None
    ) -> None:
        if kind in (TELL, HELLO):
            if error is not None:
                traceback.print_exception(error)
            return
        answer, beside = RESULT, 0
        if error is None:
            try:
                beside, parcel = caller.tensors.encode(value, caller.pickle, tag)
            except BaseException as unsendable:
                error = unsendable
        if error is not None:
            parcel, answer, beside = self._codec.encode(_told(error)), ERROR, 0
        try:
            caller.connection.send(tag, answer | beside, parcel, self.timeout_s)
        except MessageError as too_large:
            if answer == RESULT:
                self._answer(caller, kind, tag, error=too_large)
        except WaitTimeoutError:
            caller.connection.close()  # it asks and does not listen
        except GeartrainError:
            pass  # it is gone: the inbox tells of that

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._closed:
                raise ConnectionClosedError(f"the node {self.name!r} was closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self.start(lambda loop=self._loop: _run_loop(loop), "loops for")  # type: ignore[misc]
            return self._loop


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Until it is stopped: then what still runs in it is cancelled."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=0.5))
    finally:
        loop.close()


def _told(error: BaseException) -> tuple[str, str, str]:
    """An error as its caller is told of it: type, text, and where it happened."""
    own = Path(__file__).parent
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent != own]
    lines = traceback.format_list(frames) + traceback.format_exception_only(type(error), error)
    said = (type(error).__name__, str(error), "".join(lines) if frames else "")
    name, text, where = (part.encode(errors="replace").decode() for part in said)
    return name, text, where


# --- objects that peers keep here ---------------------------------------------------------------------------------


def _make(caller: Caller, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    cls = functions.get(name)
    if not isinstance(cls, type):
        raise LookupError(f"no class {name!r} is registered")
    number = len(caller.objects) and max(caller.objects) + 1
    caller.objects[number] = cls(*args, **kwargs)
    return number


def _method(caller: Caller, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if method.startswith("_") and method != "__call__":
        raise AttributeError(f"{method!r} is not for peers")
    return getattr(caller.objects[number], method)(*args, **kwargs)


def _drop(caller: Caller, number: int) -> None:
    caller.objects.pop(number, None)


function(name="geartrain.rpc.make", with_caller=True)(_make)
function(name="geartrain.rpc.method", with_caller=True)(_method)
function(name="geartrain.rpc.drop", with_caller=True)(_drop)
