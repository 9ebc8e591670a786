"""Named functions of named peers, called with tensors and plain values.

    @rpc.function
    def add(a, b):
        return a + b

    rpc.init("worker", rank=1, world_size=2, init_method="tcp://10.0.0.1:29500")
    rpc.call("learner", "add", 1, 2)                   # waits
    rpc.call_async("learner", add, 1, 2).result()      # a registered function stands for its name
    await rpc.call_async("learner", add, 1, 2)

A call is sent, and its answer received, by the thread that makes it (native/transport/calls.h); on the other side a
thread that has waited for any peer runs the function and answers itself (native/transport/inbox.h).

A peer's calls are run in the order it made them, one after the other; different peers' at the same time. The next one
goes on when a function returns (a batched or async one at once), waits for a call of its own, or is given up by the
peer at its deadline. `@rpc.function(concurrent=True)` runs beside all others instead.

Every wait has a deadline. A lost peer fails its calls with `PeerLostError` and is told of by `on_peer_lost`; a peer
that comes back under its name is found again by the next call.

Functions are addressed by name, and values go by `geartrain.codec`, which executes nothing. Where every peer has the
same `secret`, Python objects and functions that are not registered go by pickle as well; `pickle=False` forbids it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable
from datetime import timedelta
from typing import Any, TypeVar, overload
from urllib.parse import urlparse

from geartrain import _native
from geartrain.codec import native_codec
from geartrain.errors import (
    BusyError,
    CallCancelledError,
    ConnectionClosedError,
    GeartrainError,
    MessageError,
    PeerLostError,
    RemoteError,
    UnknownPeerError,
    UntrustedPeerError,
    WaitTimeoutError,
)
from geartrain.rpc_batch import Batcher, Pending
from geartrain.rpc_batch import __file__ as _BATCH_FILE
from geartrain.transport import Limits, listen, options_of

F = TypeVar("F", bound=Callable[..., Any])

# Kinds of messages. Questions go to the side that listened, answers back.
_HELLO, _CALL, _CALL_OBJECT, _TELL, _CANCEL, _RESULT, _ERROR = range(1, 8)

_functions: dict[str, Callable[..., Any]] = {}
_names: dict[Callable[..., Any], str] = {}
_concurrent: set[Callable[..., Any]] = set()
_here = threading.local()  # .turn: of the call that this thread runs for a peer


@overload
def function(given: F) -> F: ...
@overload
def function(*, name: str | None = None, concurrent: bool = False) -> Callable[[F], F]: ...
def function(given: F | None = None, *, name: str | None = None, concurrent: bool = False) -> F | Callable[[F], F]:
    """Lets peers call a function (or make objects of a class) by its name; a decorator.

    A `concurrent` one may run while other calls of the same peer run, in any order.
    """

    def register(function: F) -> F:
        _register(name or function.__name__, function)
        if concurrent:
            _concurrent.add(function)
        return function

    return register if given is None else register(given)


def _register(name: str, function: Callable[..., Any], called: Callable[..., Any] | None = None) -> None:
    other = _functions.get(name)
    if other is not None and (other.__module__, other.__qualname__) != (function.__module__, function.__qualname__):
        raise GeartrainError(f"the name {name!r} is taken by {other!r}; give another: @rpc.function(name=...)")
    _functions[name] = function if called is None else called
    _names[function] = name


def batched(
    *, max_size: int, max_wait_us: float | None = 1000.0, max_queued: int = 4096, stack: bool = False
) -> Callable[[F], F]:
    """Makes a function that gets many calls at once, and answers them one by one; a decorator.

    The function gets one list for each positional argument, with the values of all calls in it, and returns as many
    results. It runs as soon as `max_size` calls are there, or `max_wait_us` after the first of them; None waits for
    ever. With `stack` the lists are stacked into one tensor or array each. More than `max_queued` waiting calls are
    refused with `BusyError`.

    Example:
        >>> @batched(max_size=8, max_wait_us=500)
        ... def double(values: list[int]) -> list[int]:
        ...     return [2 * value for value in values]
    """

    def make(function: F) -> F:
        _register(function.__name__, function, Batcher(function, max_size, max_wait_us, max_queued, stack))
        return function

    return make


# --- answers ----------------------------------------------------------------------------------------------------------


class Future:
    """The answer to a call, when it comes. Wait for it with `result`, or `await` it."""

    def __init__(self, peer: _Peer, tag: int, until_s: float) -> None:
        self._peer = peer
        self._tag = tag
        self._until_s = until_s
        self._lock = threading.Lock()
        self._done: threading.Event | None = None  # made when another thread is to complete it
        self._value: Any = None
        self._error: BaseException | None = None
        self._finished = False
        self._callbacks: list[Callable[[Future], object]] = []

    def result(self, *, timeout_s: float | None = None) -> Any:
        """The function's result.

        Raises:
            WaitTimeoutError: not there in time; by default the call's own deadline, at which it is given up.
            RemoteError: the function raised. PeerLostError, CallCancelledError: there will be none.
        """
        error = self.exception(timeout_s=timeout_s)
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del error, self  # the traceback holds this frame, and would hold the connection

    def exception(self, *, timeout_s: float | None = None) -> BaseException | None:
        """What `result` would raise, or None; waits as it does."""
        left_s = self._until_s - time.monotonic()
        wait_s = left_s if timeout_s is None else min(timeout_s, left_s)
        if not self._finished:
            _about_to_wait()
        with self._lock:
            event = self._done
            if not self._finished and event is None:
                self._wait(max(wait_s, 0.0), given_up=timeout_s is None or timeout_s >= left_s)
        if event is not None and not event.wait(max(wait_s, 0.0)):
            raise WaitTimeoutError(f"no answer from {self._peer.name!r} before the deadline")
        return self._error

    def _wait(self, wait_s: float, given_up: bool) -> None:
        try:
            self._settle(self._peer.calls.wait(self._tag, wait_s))
        except WaitTimeoutError:
            if not given_up:
                raise
            self._peer.give_up(self._tag)
            self._error = WaitTimeoutError(f"no answer from {self._peer.name!r} before the call's deadline")
            self._finished = True
        except GeartrainError as error:
            self._error = error.with_traceback(None)
            self._finished = True

    def _settle(self, message: _native.Message) -> None:
        try:
            self._value = self._peer.value_of(message)
        except GeartrainError as error:
            self._error = error.with_traceback(None)
        self._finished = True

    def done(self) -> bool:
        """Whether `result` would not wait."""
        if not self._finished and self._done is None:
            with contextlib.suppress(WaitTimeoutError):
                self.exception(timeout_s=0.0)
        return self._finished

    def cancel(self) -> bool:
        """Gives the call up, and asks the peer to. False when the answer is already there."""
        if self.done():
            return False
        self._peer.give_up(self._tag)
        self._finish_elsewhere(CallCancelledError("the call was cancelled"))
        return True

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        """Calls back with this future when it is done: from a thread of geartrain's, or at once."""
        with self._lock:
            if not self._finished:
                self._callbacks.append(callback)
                if self._done is None:
                    self._done = threading.Event()
                    self._peer.complete_elsewhere(self, self._tag)
                return
        callback(self)

    def _finish_elsewhere(self, outcome: _native.Message | BaseException) -> None:
        with self._lock:
            if self._finished:
                return
            if isinstance(outcome, BaseException):
                self._error = outcome
                self._finished = True
            else:
                self._settle(outcome)
            callbacks, self._callbacks = self._callbacks, []
            if self._done is not None:
                self._done.set()
        for callback in callbacks:
            callback(self)

    def __await__(self) -> Generator[Any, None, Any]:
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[None] = loop.create_future()

        def wake(_: Future) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(lambda: waiting.done() or waiting.set_result(None))

        self.add_done_callback(wake)
        try:
            yield from waiting
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result()


def _remote_error(kind: str, text: str, where: str, peer: str) -> RemoteError:
    """An error that is also the built-in exception that the peer raised, where it was one."""
    import builtins

    base = getattr(builtins, kind, None)
    made = RemoteError
    if isinstance(base, type) and issubclass(base, Exception):
        with contextlib.suppress(TypeError):
            made = type(kind, (RemoteError, base), {"__module__": "geartrain.rpc"})
    try:
        error = made(f"{peer}: {kind}: {text}")
    except TypeError:  # a built-in that wants more than a text
        error = RemoteError(f"{peer}: {kind}: {text}")
    error.remote_type, error.remote_traceback = kind, where
    if where:
        error.args = (f"{error.args[0]}\n\n--- on {peer} ---\n{where}",)
    return error


class _Peer:
    """A peer that this node calls: the connection it dialled, and the calls that are open on it."""

    def __init__(self, node: Node, name: str, number: int, connection: _native.Connection) -> None:
        self.name = name
        self.number = number
        self.connection = connection
        self.calls = _native.Calls(connection, node.max_open)
        self.pickle = node.pickle and connection.authenticated
        self._codec = native_codec()
        self._elsewhere: dict[int, Future] = {}
        self._completer = False  # runs
        self._node = node
        self._lock = threading.Lock()

    def parcel(self, function: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The question, and its kind."""
        if type(function) is str:
            return _CALL, self._codec.encode((function, args, kwargs), self.pickle)
        name = _names.get(function)  # type: ignore[arg-type]
        if name is not None:
            return _CALL, self._codec.encode((name, args, kwargs), self.pickle)
        if not self.pickle:
            raise UntrustedPeerError(
                f"{function!r} is not registered (@rpc.function), and functions go by pickle only between peers that "
                "proved they know the cluster's secret"
            )
        return _CALL_OBJECT, self._codec.encode((function, args, kwargs), True)

    def value_of(self, message: _native.Message) -> Any:
        """The result, or the peer's error, raised."""
        value = self._codec.decode(message, self.pickle)
        if message.kind == _RESULT:
            return value
        if message.kind != _ERROR or type(value) is not tuple or [type(part) for part in value] != [str] * 3:
            raise MessageError(f"{self.name!r} answered with what is no answer")
        raise _remote_error(*value, self.name)

    def call(
        self, function: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> Any:
        kind, parcel = self.parcel(function, args, kwargs)
        try:
            message = self.calls.call(kind, parcel, timeout_s)
        except WaitTimeoutError:
            raise WaitTimeoutError(f"no answer from {self.name!r} within {timeout_s} s") from None
        return self.value_of(message)

    def give_up(self, tag: int) -> None:
        self.calls.forget(tag)
        with contextlib.suppress(GeartrainError):
            self.calls.tell(tag, _CANCEL, self._codec.encode(None), 0.1)
        with self._lock:
            self._elsewhere.pop(tag, None)

    # Futures with callbacks are completed by a thread of the peer's, started for the first of them.

    def complete_elsewhere(self, future: Future, tag: int) -> None:
        with self._lock:
            self._elsewhere[tag] = future
            if not self._completer:
                self._completer = True
                self._node._start(self._complete, "completes answers for")
        self.calls.loosen(tag)

    def _complete(self) -> None:
        while True:
            try:
                message = self.calls.next_loose(0.5)
            except WaitTimeoutError:
                self._expire()
                with self._lock:
                    if not self._elsewhere:
                        self._completer = False  # another is started when it is needed
                        return
                continue
            except GeartrainError as error:
                with self._lock:
                    left, self._elsewhere, self._completer = list(self._elsewhere.values()), {}, False
                for future in left:
                    future._finish_elsewhere(error)
                return
            with self._lock:
                waiting = self._elsewhere.pop(message.tag, None)
            if waiting is not None:
                waiting._finish_elsewhere(message)

    def _expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [(tag, future) for tag, future in self._elsewhere.items() if future._until_s < now]
        for tag, future in late:
            self.give_up(tag)
            future._finish_elsewhere(WaitTimeoutError(f"no answer from {self.name!r} before the call's deadline"))


# --- the node -----------------------------------------------------------------------------------------------------------


class Node:
    """This process among its peers. `init` makes the one that the functions of this module use."""

    def __init__(
        self,
        name: str,
        *,
        store: Any = None,
        peers: dict[str, str] | None = None,
        secret: bytes = b"",
        pickle: bool = True,
        transport: str | None = None,
        host: str | None = "127.0.0.1",
        advertise: Iterable[str] = (),
        timeout_s: float = 30.0,
        max_threads: int = 64,
        max_open: int = 1024,
        limits: Limits | None = None,
        spin_us: float = 30.0,
    ) -> None:
        """A node that peers can call from now on.

        Args:
            name: what peers call it by.
            store: where names become addresses: anything with torch's c10d store's `set`, `get` and `check`.
            peers: addresses known without a store.
            secret: the cluster's; needed to listen on anything but loopback.
            pickle: whether objects that the codec does not know go by pickle, between peers with the secret.
            transport: to force one of `transport.TRANSPORTS`.
            host, advertise, limits, spin_us: as for `transport.listen`.
            timeout_s: for calls that have none of their own, and for joining.
            max_threads: of threads that run functions; more are started only while all are busy.
            max_open: calls to one peer without an answer; the next one waits for room.
        """
        self.name, self.pickle, self.timeout_s = name, pickle, timeout_s
        self.max_threads, self.max_open = max_threads, max_open
        self.max_queued_bytes = (limits or Limits()).max_queued_bytes
        self._secret, self._transport, self._limits, self._spin_us = secret, transport, limits, spin_us
        self._store = store
        self._addresses = dict(peers or {})
        self._codec = native_codec()
        self._peers: dict[str, _Peer] = {}
        self._dialling: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._on_lost: list[Callable[[str, str], object]] = []
        self._numbers = itertools.count(1)
        self._dialled: dict[int, str] = {}  # number in the inbox -> peer
        self._callers: dict[int, _Caller] = {}
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener = listen(host, secret=secret, advertise=advertise, limits=limits, spin_us=spin_us)
        self.address = self._listener.address
        self._inbox = _native.Inbox(spin_us)
        self._idle = self._threads = 0
        self._running: set[threading.Thread] = set()
        self._start(self._accept, "accepts")
        self._start_thread()
        self._start_thread()
        _nodes.add(self)
        if store is not None:
            store.set(_key(name), self.address)

    # --- calling ----------------------------------------------------------------------------------------------------

    def call(
        self, peer: str, function: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        """The result of a peer's function.

        Args:
            peer: its name.
            function: its name, or a registered function.
            timeout_s: for all of it: finding the peer, the call, the answer.

        Raises:
            RemoteError: the function raised; it is also of the built-in type that was raised there.
            WaitTimeoutError: no answer in time; the peer is told to give the call up.
            PeerLostError: the peer died or hung up meanwhile. The function may have run or not.
            UnknownPeerError: nobody of that name joined in time.
        """
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        _about_to_wait()
        return self._peer(peer, limit_s).call(function, args, kwargs, limit_s)

    def call_async(
        self, peer: str, function: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future:
        """The same as a `Future`; sent when this returns."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        until_s = time.monotonic() + limit_s
        found = self._peer(peer, limit_s)
        kind, parcel = found.parcel(function, args, kwargs)
        return Future(found, found.calls.start(kind, parcel, False, limit_s), until_s)

    def tell(self, peer: str, function: str | Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Calls without wanting an answer: returns once it is sent. What the function raises is printed there."""
        found = self._peer(peer, self.timeout_s)
        kind, parcel = found.parcel(function, args, kwargs)
        if kind != _CALL:
            raise MessageError("only functions with a name can be told")
        found.connection.send(0, _TELL, parcel, self.timeout_s)

    def remote(self, peer: str, cls: str | type, *args: Any, **kwargs: Any) -> Remote:
        """An object of a registered class, made and kept by the peer until closed, or until this node is lost."""
        name = cls if isinstance(cls, str) else _names.get(cls, cls.__name__)
        return Remote(self, peer, self.call(peer, "geartrain.rpc.make", name, args, kwargs))

    def on_peer_lost(self, callback: Callable[[str, str], object]) -> None:
        """Calls back with the name of a peer that is lost, and why."""
        self._on_lost.append(callback)

    def connections(self) -> dict[str, str]:
        """The peers that this node calls, and the way to each."""
        return {name: peer.connection.describe() for name, peer in self._peers.items()}

    def counts(self) -> dict[str, dict[str, Any]]:
        """Messages and bytes by path to and from each peer that this node calls."""
        return {name: peer.connection.counts() for name, peer in self._peers.items()}

    def wait_for(self, *names: str, timeout_s: float | None = None) -> None:
        """Until peers of these names have joined. Raises `UnknownPeerError`."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        until_s = time.monotonic() + limit_s
        for name in names:
            self._address(name, until_s)

    def close(self) -> None:
        """Hangs up on everybody. Functions that still run are left to end."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            peers = list(self._peers.values())
        if self._store is not None and hasattr(self._store, "delete_key"):
            with contextlib.suppress(RuntimeError, AttributeError):
                if self._store.check([_key(self.name)]) and _text(self._store.get(_key(self.name))) == self.address:
                    self._store.delete_key(_key(self.name))
        self._listener.close()
        self._inbox.close()
        for peer in peers:
            peer.connection.close()
        for caller in list(self._callers.values()):
            caller.connection.close()
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
        until_s = time.monotonic() + 1.0
        for thread in list(self._running):
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - time.monotonic()))
        _nodes.discard(self)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- finding peers ----------------------------------------------------------------------------------------------

    def _peer(self, name: str, timeout_s: float) -> _Peer:
        peer = self._peers.get(name)
        if peer is not None and not peer.connection.lost:
            return peer
        if self._closed:
            raise ConnectionClosedError(f"the node {self.name!r} was closed")
        with self._lock:
            dialling = self._dialling.setdefault(name, threading.Lock())
        until_s = time.monotonic() + timeout_s
        with dialling:
            peer = self._peers.get(name)
            if peer is not None and not peer.connection.lost:
                return peer
            address = self._address(name, until_s)
            connection = _native.connect(address, self._options(), max(0.0, until_s - time.monotonic()))
            connection.send(0, _HELLO, self._codec.encode(self.name), timeout_s)
            number = next(self._numbers)
            peer = _Peer(self, name, number, connection)
            with self._lock:
                if self._closed:
                    connection.close()
                    raise ConnectionClosedError(f"the node {self.name!r} was closed")
                self._peers[name] = peer
                self._dialled[number] = name
            self._inbox.watch(number, connection)
        return peer

    def _options(self) -> dict[str, Any]:
        options = options_of(self._secret, self._limits, self._spin_us, True)
        return options if self._transport is None else options | {"transport": self._transport}

    def _address(self, name: str, until_s: float) -> str:
        if name == self.name:
            return self.address
        if name in self._addresses:
            return self._addresses[name]
        if self._store is None:
            raise UnknownPeerError(f"no peer {name!r}: there is no store to find it in, and its address was not given")
        while not self._store.check([_key(name)]):
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise UnknownPeerError(f"no peer {name!r} has joined before the deadline")
            # In slices: a c10d store answers nobody else in this process while it waits, and takes 0 ms for no limit.
            with contextlib.suppress(RuntimeError):
                self._store.wait([_key(name)], timedelta(seconds=min(max(left_s, 0.01), 0.1)))
        return _text(self._store.get(_key(name)))

    # --- answering --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept(timeout_s=3600.0).native
            except WaitTimeoutError:
                continue
            except GeartrainError:
                return
            number = next(self._numbers)
            self._callers[number] = _Caller(self, number, connection)
            self._inbox.add(number, connection)

    def _start(self, run: Callable[[], None], what: str) -> None:
        def body() -> None:
            try:
                run()
            finally:
                self._running.discard(thread)

        thread = threading.Thread(target=body, name=f"geartrain {what} {self.name}", daemon=True)
        self._running.add(thread)
        thread.start()

    def _start_thread(self) -> None:
        self._threads += 1
        self._idle += 1
        self._start(self._serve, "serves")

    def _serve(self) -> None:
        receive = self._inbox.receive
        while True:
            try:
                event = receive(3600.0)
            except GeartrainError:
                return  # closed
            if event is None:
                continue
            number, _, message = event
            with self._lock:
                self._idle -= 1
                if self._idle == 0 and self._threads < self.max_threads:
                    self._start_thread()
            if isinstance(message, str):
                self._lost(number, message)
            else:
                caller = self._callers.get(number)
                if caller is not None:
                    self._take(caller, message)
            del event, message  # memory of the peer's, perhaps
            with self._lock:
                self._idle += 1

    def _take(self, caller: _Caller, message: _native.Message) -> None:
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
            self._run_in_order(caller, call, turn)
        elif call is not None:
            self._run(caller, call)

    def _place(self, caller: _Caller, message: _native.Message) -> tuple[_Call | None, Turn | None]:
        """A call to be run now, and its turn, if it is one of those that keep order."""
        kind, tag = message.kind, message.tag
        if kind == _CANCEL:
            caller.cancel(tag)
            return None, None
        value = self._codec.decode(message, caller.pickle)
        if kind == _HELLO:
            caller.name = str(value)
            return None, None
        named, args, kwargs = value
        if kind != _CALL_OBJECT:
            function = _functions.get(named)
            if function is None:
                raise LookupError(f"{self.name!r} has no function {named!r}; it has {', '.join(sorted(_functions))}")
            if named.startswith("geartrain.rpc."):
                args = (caller, *args)
        elif caller.pickle:
            function = named
        else:
            raise UntrustedPeerError("functions that are not registered are taken from peers with the secret only")
        call = (kind, tag, function, args, kwargs, message.nbytes)
        if kind != _CALL_OBJECT and function in _concurrent:
            return call, None
        turn = caller.begin(call)
        return (None, None) if turn is None else (call, turn)

    def _run_in_order(self, caller: _Caller, call: _Call, turn: Turn) -> None:
        following: _Call | None = call
        while following is not None:
            _here.turn = (caller, turn)
            self._run(caller, following)
            _here.turn = None
            following = caller.next(turn)

    def _run(self, caller: _Caller, call: _Call) -> None:
        kind, tag, function, args, kwargs, _ = call
        try:
            result = function.submit(args, kwargs) if type(function) is Batcher else function(*args, **kwargs)
        except BaseException as error:
            self._answer(caller, kind, tag, error=error)
            return
        if type(result) is not Pending and not asyncio.iscoroutine(result):
            self._answer(caller, kind, tag, result)
            return
        if type(result) is Pending:
            pending = result
        else:
            task = asyncio.run_coroutine_threadsafe(result, self._event_loop())
            pending = Pending(task.cancel)
            task.add_done_callback(pending.take_from)
        caller.keep(tag, pending)
        pending.when_done(lambda: self._finish(caller, kind, tag, pending))

    def _finish(self, caller: _Caller, kind: int, tag: int, pending: Pending) -> None:
        caller.drop(tag)
        if not pending.cancelled:
            self._answer(caller, kind, tag, pending.value, pending.error)

    def _answer(
        self, caller: _Caller, kind: int, tag: int, value: Any = None, error: BaseException | None = None
    ) -> None:
        if kind == _TELL or kind == _HELLO:
            if error is not None:
                traceback.print_exception(error)
            return
        answer = _RESULT
        if error is None:
            try:
                parcel = self._codec.encode(value, caller.pickle)
            except BaseException as unsendable:
                error = unsendable
        if error is not None:
            parcel, answer = self._codec.encode(_told(error)), _ERROR
        try:
            caller.connection.send(tag, answer, parcel, self.timeout_s)
        except MessageError as too_large:
            if answer == _RESULT:
                self._answer(caller, kind, tag, error=too_large)
        except WaitTimeoutError:
            caller.connection.close()  # it asks and does not listen
        except GeartrainError:
            pass  # it is gone: the inbox tells of that

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._start(self._loop.run_forever, "loop of")
            return self._loop

    def _lost(self, number: int, reason: str) -> None:
        caller = self._callers.pop(number, None)
        name = self._dialled.pop(number, None)
        if caller is not None:
            caller.lost()
            name = caller.name
        elif name is not None:
            with self._lock:
                if name in self._peers and self._peers[name].number == number:
                    del self._peers[name]  # who waits for it finds out alone
        if name and not self._closed:
            for callback in list(self._on_lost):
                try:
                    callback(name, reason)
                except Exception:
                    traceback.print_exc()

    def __repr__(self) -> str:
        return f"<Node {self.name!r} at {self.address}>"


Turn = object
_Call = tuple[int, int, Any, tuple[Any, ...], dict[str, Any], int]  # kind, tag, function, args, kwargs, bytes


class _Caller:
    """A peer that calls this node: its connection, the order of its calls, and what of them is still open."""

    def __init__(self, node: Node, number: int, connection: _native.Connection) -> None:
        self.number = number
        self.connection = connection
        self.pickle = node.pickle and connection.authenticated
        self.name = ""
        self.objects: dict[int, Any] = {}
        self._node = node
        self._open: dict[int, Pending] = {}
        self._lock = threading.Lock()
        self._turn: Turn | None = None  # of the call that others wait for
        self._running = 0  # its tag
        self._queue: deque[_Call] = deque()
        self._queued_bytes = 0

    def begin(self, call: _Call) -> Turn | None:
        """A turn to run it now; None when it waits for those before it. Raises `BusyError`."""
        with self._lock:
            if self._turn is None:
                self._turn, self._running = object(), call[1]
                return self._turn
            if len(self._queue) >= self._node.max_open or self._queued_bytes > self._node.max_queued_bytes:
                raise BusyError(f"{len(self._queue)} calls of {self.name!r} wait for {self._node.name!r} already")
            self._queue.append(call)
            self._queued_bytes += call[5]
            return None

    def next(self, turn: Turn) -> _Call | None:
        """The call after the one that ended, for whoever still has the turn."""
        with self._lock:
            if self._turn is not turn:
                return None
            if not self._queue:
                self._turn = None
                return None
            call = self._queue.popleft()
            self._queued_bytes -= call[5]
            self._running = call[1]
            return call

    def let_go(self, turn: Turn | None, tag: int | None = None) -> None:
        """The running call no longer holds up those after it: all with this turn, or the one with this tag."""
        with self._lock:
            if self._turn is None or (turn is not None and self._turn is not turn):
                return
            if tag is not None and tag != self._running:
                return
            self._turn = None
            if not self._queue:
                return
            mine = self._turn = object()
            call = self._queue.popleft()
            self._queued_bytes -= call[5]
            self._running = call[1]
        run = self._node._run_in_order
        threading.Thread(target=run, args=(self, call, mine), name="geartrain goes on", daemon=True).start()

    def keep(self, tag: int, pending: Pending) -> None:
        """An answer that comes later."""
        self._open[tag] = pending

    def drop(self, tag: int) -> None:
        """It came."""
        self._open.pop(tag, None)

    def cancel(self, tag: int) -> None:
        """The peer gave a call up."""
        with self._lock:
            for call in self._queue:
                if call[1] == tag:
                    self._queue.remove(call)
                    self._queued_bytes -= call[5]
                    return
        pending = self._open.pop(tag, None)
        if pending is not None:
            pending.cancel()
        self.let_go(None, tag)

    def lost(self) -> None:
        """The peer is gone."""
        with self._lock:
            self._queue.clear()
            self._queued_bytes = 0
        for pending in list(self._open.values()):
            pending.cancel()
        self._open.clear()
        self.objects.clear()


def _about_to_wait() -> None:
    """A function that waits for a call of its own lets its peer's next call begin: it may be what it waits for."""
    turn = getattr(_here, "turn", None)
    if turn is not None:
        _here.turn = None
        turn[0].let_go(turn[1])


def _told(error: BaseException) -> tuple[str, str, str]:
    """An error as its caller is told of it: type, text, and where it happened."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in (__file__, _BATCH_FILE)]
    lines = traceback.format_list(frames) + traceback.format_exception_only(type(error), error)
    return type(error).__name__, str(error), "".join(lines) if frames else ""


class Remote:
    """An object that a peer keeps. `remote.call("method", ...)` calls it there."""

    def __init__(self, node: Node, peer: str, number: int) -> None:
        self._node, self.peer, self._number = node, peer, number

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """The method's result; raises what `Node.call` does."""
        return self._node.call(
            self.peer, "geartrain.rpc.method", self._number, method, args, kwargs, timeout_s=timeout_s
        )

    def call_async(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Future:
        """The same as a `Future`."""
        return self._node.call_async(
            self.peer, "geartrain.rpc.method", self._number, method, args, kwargs, timeout_s=timeout_s
        )

    def close(self) -> None:
        """Lets the peer drop the object."""
        self._node.call(self.peer, "geartrain.rpc.drop", self._number)

    def __repr__(self) -> str:
        return f"<Remote {self._number} of {self.peer!r}>"


def _make(caller: _Caller, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    cls = _functions.get(name)
    if not isinstance(cls, type):
        raise LookupError(f"no class {name!r} is registered")
    number = len(caller.objects) and max(caller.objects) + 1
    caller.objects[number] = cls(*args, **kwargs)
    return number


def _method(caller: _Caller, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if method.startswith("_") and method != "__call__":
        raise AttributeError(f"{method!r} is not for peers")
    return getattr(caller.objects[number], method)(*args, **kwargs)


def _drop(caller: _Caller, number: int) -> None:
    caller.objects.pop(number, None)


# What peers may ask of a node itself.
_functions |= {"geartrain.rpc.make": _make, "geartrain.rpc.method": _method, "geartrain.rpc.drop": _drop}


def _key(name: str) -> str:
    return f"geartrain/rpc/{name}"


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


# At exit nobody may be left in the native layer: a thread that Python ends there takes the process with it.
_nodes: weakref.WeakSet[Node] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for one in list(_nodes):
        one.close()


# --- one node for the process ---------------------------------------------------------------------------------------------

_node: Node | None = None


def init(
    name: str,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    store: Any = None,
    secret: bytes | None = None,
    timeout_s: float = 60.0,
    **options: Any,
) -> Node:
    """Joins the others, and makes this process's node, which the functions of this module use.

    Args:
        name: what peers call this process by.
        rank, world_size: its number among those that start together; `init` then waits until all have joined. More
            may join later, without a rank.
        init_method: "tcp://host:port", "env://" (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE) or "file:///path", as
            for `torch.distributed`; the tcp store is started by rank 0.
        store: a store instead, of torch's kind.
        secret: the cluster's; by default the environment's GEARTRAIN_SECRET.
        options: as for `Node`.

    Raises:
        WaitTimeoutError: not all joined in time; says who did not.
    """
    global _node
    if _node is not None:
        raise GeartrainError(f"this process has joined as {_node.name!r} already; rpc.shutdown() first, or make a Node")
    if store is None and init_method is not None:
        store, rank, world_size = _store_of(init_method, rank, world_size, timeout_s)
    if secret is None:
        secret = os.environ.get("GEARTRAIN_SECRET", "").encode()
    node = Node(name, store=store, secret=secret, timeout_s=timeout_s, **options)
    _node = node  # before the others can call: their functions may ask for it
    try:
        if store is not None and rank is not None:
            store.set(_key(f"rank/{rank}"), name)
        if store is not None and world_size is not None:
            _wait_for_ranks(node, store, world_size, timeout_s)
    except BaseException:
        shutdown()
        raise
    return node


def _wait_for_ranks(node: Node, store: Any, world_size: int, timeout_s: float) -> None:
    until_s = time.monotonic() + timeout_s
    try:
        for other in range(world_size):
            node.wait_for(f"rank/{other}", timeout_s=max(0.0, until_s - time.monotonic()))
    except UnknownPeerError:
        missing = [r for r in range(world_size) if not store.check([_key(f"rank/{r}")])]
        raise WaitTimeoutError(f"{len(missing)} of {world_size} did not join within {timeout_s} s: ranks {missing}") from None


def _store_of(
    init_method: str, rank: int | None, world_size: int | None, timeout_s: float
) -> tuple[Any, int | None, int | None]:
    from torch import distributed

    url = urlparse(init_method)
    if url.scheme == "file":
        return distributed.FileStore(url.path, world_size or -1), rank, world_size
    host, port = url.hostname, url.port
    if url.scheme == "env":
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        rank = int(os.environ["RANK"]) if rank is None else rank
        world_size = int(os.environ["WORLD_SIZE"]) if world_size is None else world_size
    elif url.scheme != "tcp" or host is None or port is None:
        raise GeartrainError(f"init_method is tcp://host:port, env:// or file:///path, found {init_method!r}")
    store = distributed.TCPStore(
        host, port, is_master=rank == 0, timeout=timedelta(seconds=timeout_s), wait_for_workers=False, multi_tenant=True
    )
    return store, rank, world_size


def node() -> Node:
    """This process's node. Raises `GeartrainError` before `init`."""
    if _node is None:
        raise GeartrainError("this process has not joined: rpc.init(name, ...) first")
    return _node


def call(peer: str, function: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
    """`Node.call` of this process's node."""
    return node().call(peer, function, *args, timeout_s=timeout_s, **kwargs)


def call_async(
    peer: str, function: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
) -> Future:
    """`Node.call_async` of this process's node."""
    return node().call_async(peer, function, *args, timeout_s=timeout_s, **kwargs)


def shutdown() -> None:
    """Leaves: closes this process's node. Nobody waits for anybody; a peer that still calls it gets `PeerLostError`."""
    global _node
    if _node is not None:
        _node.close()
        _node = None


__all__ = ["Future", "Node", "PeerLostError", "Remote", "batched", "call", "call_async", "function", "init", "node", "shutdown"]
