"""The calling side: a peer that this node dialled, and the answers that it owes."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import threading
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import geartrain._native as _native
import geartrain.errors as errors
from geartrain.errors import (
    CallCancelledError,
    GeartrainError,
    MessageError,
    PeerLostError,
    RemoteError,
    UntrustedPeerError,
    WaitTimeoutError,
)
from geartrain.rpc.protocol import BESIDE, CALL, CALL_OBJECT, CANCEL, ERROR, RESULT, limited
from geartrain.rpc.registry import names
from geartrain.rpc.session import about_to_wait
from geartrain.rpc.tensors.sender import Outbound
from geartrain.transport.codec import native_codec

if TYPE_CHECKING:
    from geartrain.rpc.node import Node


class Future:
    """The answer to a call, when it comes. Wait for it with `result`, or `await` it."""

    def __init__(self, peer: Peer, tag: int, until_s: float) -> None:
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
            about_to_wait()
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
            self._error = self._peer.named(error)
            self._finished = True

    def _settle(self, message: _native.Message, elsewhere: bool = False) -> None:
        try:
            self._value = self._peer.value_of(message, elsewhere)
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
                self._settle(outcome, elsewhere=True)
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
                loop.call_soon_threadsafe(_settle_once, waiting)

        self.add_done_callback(wake)
        try:
            yield from waiting
        except asyncio.CancelledError:
            self.cancel()
            raise
        return self.result()


class Peer:
    """A peer that this node calls: the connection it dialled, and the calls that are open on it."""

    def __init__(self, node: Node, name: str, connection: _native.Connection) -> None:
        self.name = name
        self.number = 0  # in the server's inbox
        self.connection = connection
        self.calls = _native.Calls(connection, node.max_open)
        self.pickle = node.pickle and connection.authenticated
        self._codec = native_codec()
        self._elsewhere: dict[int, Future] = {}
        self._completer = False  # runs
        self._node = node
        self._lock = threading.Lock()
        self.tensors = Outbound(node.devices, self, lambda: node.device_map(name))

    def parcel(
        self, function: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> Any:
        """The question, and its kind. What travels beside it has been sent, or is on its way."""
        name = function if type(function) is str else names.get(function)  # type: ignore[arg-type]
        if name is not None:
            beside, parcel = self.tensors.encode((name, args, kwargs), self.pickle, timeout_s)
            return CALL | beside, parcel
        if not self.pickle:
            raise UntrustedPeerError(
                f"{function!r} is not registered (@rpc.function), and functions go by pickle only between peers that "
                "proved they know the cluster's secret"
            )
        beside, parcel = self.tensors.encode((function, args, kwargs), True, timeout_s)
        return CALL_OBJECT | beside, parcel

    def ask(self, name: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        """The result of one of geartrain.rpc's own functions, whose values are plain."""
        return self.value_of(self.calls.call(CALL, self._codec.encode((name, args, {})), timeout_s))

    def value_of(self, message: _native.Message, elsewhere: bool = False) -> Any:
        """The result, or the peer's error, raised. `elsewhere`: it is for another thread than this one."""
        value = self._codec.decode(message, self.pickle)
        if message.kind == RESULT:
            return value
        if message.kind == RESULT | BESIDE:
            return self.tensors.fetch(value, message.tag, self._node.timeout_s, elsewhere)
        if message.kind != ERROR or type(value) is not tuple or [type(part) for part in value] != [str] * 3:
            raise MessageError(f"{self.name!r} answered with what is no answer")
        raise remote_error(value[0], value[1], value[2], self.name)

    def call(
        self, function: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> Any:
        """The result, waited for by this thread."""
        kind, parcel = self.parcel(function, args, kwargs, timeout_s)
        try:
            message = self.calls.call(limited(kind, timeout_s), parcel, timeout_s)
        except WaitTimeoutError:
            raise WaitTimeoutError(f"no answer from {self.name!r} within {timeout_s} s") from None
        except PeerLostError as error:
            raise self.named(error) from None
        return self.value_of(message)

    def named(self, error: GeartrainError) -> GeartrainError:
        """The same error, which says of a lost peer who that was."""
        if type(error) is PeerLostError:
            return PeerLostError(f"{self.name!r} is lost: {error}")
        return error.with_traceback(None)

    def give_up(self, tag: int) -> None:
        """Nobody wants the answer any more: drops it, and tells the peer."""
        self.calls.forget(tag)
        with contextlib.suppress(GeartrainError):
            self.calls.tell(tag, CANCEL, self._codec.encode(None), 0.1)
        with self._lock:
            self._elsewhere.pop(tag, None)

    # Futures with callbacks are completed by a thread of the peer's, started for the first of them.

    def complete_elsewhere(self, future: Future, tag: int) -> None:
        """Has a thread of the peer wait for the answer."""
        with self._lock:
            self._elsewhere[tag] = future
            if not self._completer:
                self._completer = True
                self._node.server.start(self._complete, "completes answers for")
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
                    future._finish_elsewhere(self.named(error))
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


def remote_error(kind: str, text: str, where: str, peer: str) -> RemoteError:
    """An error that is also the built-in exception that the peer raised, where it was one."""
    base = getattr(builtins, kind, None) or getattr(errors, kind, None)
    made: Any = RemoteError
    if isinstance(base, type) and issubclass(base, Exception) and not issubclass(RemoteError, base):
        with contextlib.suppress(TypeError):
            made = type(kind, (RemoteError, base), {"__module__": "geartrain.rpc"})
    try:
        error = made(f"{peer}: {kind}: {text}")
    except TypeError:  # a built-in that wants more than a text
        error = RemoteError(f"{peer}: {kind}: {text}")
    assert isinstance(error, RemoteError)
    error.remote_type, error.remote_traceback = kind, where
    if where:
        error.args = (f"{error.args[0]}\n\n--- on {peer} ---\n{where}",)
    return error


def _settle_once(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
