"""The answering side: threads that wait for any peer, run what it calls, and answer themselves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CoroutineType
from typing import Any

from geartrain import _native
from geartrain.codec import native_codec
from geartrain.errors import GeartrainError, MessageError, UntrustedPeerError, WaitTimeoutError
from geartrain.rpc.batch import Batcher, Pending
from geartrain.rpc.caller import Call, Caller, Turn, here
from geartrain.rpc.functions import concurrent_functions, functions
from geartrain.rpc.kinds import CALL_OBJECT, CANCEL, ERROR, HELLO, RESULT, TELL
from geartrain.transport import Listener


class Server:
    """Serves the peers that connect to a listener, until it is closed.

    Two threads ask the inbox for messages, and more are started while all are busy, up to `max_threads`.
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
        self._inbox = _native.Inbox(spin_us)
        self._numbers = itertools.count(1)
        self._callers: dict[int, Caller] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: set[threading.Thread] = set()
        self._threads = 0
        self.start(self._accept, "accepts")
        with self._lock:
            self._start_thread()
            self._start_thread()

    def watch(self, connection: _native.Connection) -> int:
        """Its number; from now on `lost` is called when the connection ends."""
        number = next(self._numbers)
        self._inbox.watch(number, connection)
        return number

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
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
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
                    if self._threads < self.max_threads:
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
        kind, tag = message.kind, message.tag
        turn = call = None
        try:
            call, turn = self._place(caller, message)
        except BaseException as error:
            self._answer(caller, kind, tag, error=error)
        finally:
            self._inbox.resume(caller.number)
        if turn is not None and call is not None:
            self.run_in_order(caller, call, turn)
        elif call is not None:
            self._run(caller, call)

    def _place(self, caller: Caller, message: _native.Message) -> tuple[Call | None, Turn | None]:
        """A call to be run now, and its turn, if it is one of those that keep order."""
        kind, tag = message.kind, message.tag
        if kind == CANCEL:
            caller.cancel(tag)
            return None, None
        value = self._codec.decode(message, caller.pickle)
        if kind == HELLO:
            caller.name = str(value)
            return None, None
        named, args, kwargs = value
        if kind != CALL_OBJECT:
            function = functions.get(named)
            if function is None:
                raise LookupError(f"{self.name!r} has no function {named!r}; it has {', '.join(sorted(functions))}")
            if named.startswith("geartrain.rpc."):
                args = (caller, *args)
        elif caller.pickle:
            function = named
        else:
            raise UntrustedPeerError("functions that are not registered are taken from peers with the secret only")
        call = (kind, tag, function, args, kwargs, message.nbytes)
        if kind != CALL_OBJECT and function in concurrent_functions:
            return call, None
        turn = caller.begin(call)
        return (None, None) if turn is None else (call, turn)

    def run_in_order(self, caller: Caller, call: Call, turn: Turn) -> None:
        """Runs a call, and those of the same peer that have come meanwhile."""
        following: Call | None = call
        while following is not None:
            here.turn = (caller, turn)
            self._run(caller, following)
            here.turn = None
            following = caller.next(turn)

    def _run(self, caller: Caller, call: Call) -> None:
        kind, tag, function, args, kwargs, _ = call
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
        answer = RESULT
        if error is None:
            try:
                parcel = self._codec.encode(value, caller.pickle)
            except BaseException as unsendable:
                error = unsendable
        if error is not None:
            parcel, answer = self._codec.encode(_told(error)), ERROR
        try:
            caller.connection.send(tag, answer, parcel, self.timeout_s)
        except MessageError as too_large:
            if answer == RESULT:
                self._answer(caller, kind, tag, error=too_large)
        except WaitTimeoutError:
            caller.connection.close()  # it asks and does not listen
        except GeartrainError:
            pass  # it is gone: the inbox tells of that

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self.start(self._loop.run_forever, "loops for")
            return self._loop


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


functions |= {"geartrain.rpc.make": _make, "geartrain.rpc.method": _method, "geartrain.rpc.drop": _drop}
