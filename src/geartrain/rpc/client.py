"""Client side of one peer: the connection to the peer, the calls sent over it, and their replies."""

from __future__ import annotations

import builtins
import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import geartrain._native as _native
import geartrain.core.trace as trace
import geartrain.errors as errors
from geartrain.core.arguments import check_function
from geartrain.errors import (
    GeartrainError,
    MessageError,
    PeerLostError,
    RemoteError,
    UntrustedPeerError,
    WaitTimeoutError,
)
from geartrain.rpc.future import UNDECODABLE, Future, Reply
from geartrain.rpc.protocol import CALL, CALL_OBJECT, CANCEL, ERROR, OUT_OF_BAND, RESULT, TELL, timeout_bits
from geartrain.rpc.registry import name_of, names
from geartrain.rpc.tensors.device_map import DeviceMap
from geartrain.rpc.tensors.endpoint import DeviceTensors
from geartrain.rpc.tensors.sender import TensorSender
from geartrain.rpc.threads import ThreadGroup
from geartrain.transport.codec import native_codec


class Client:
    """Calls to one peer, over the connection that this node made. Any thread may use it.

    Args:
        name: the peer's.
        connection: to it.
        threads: where the thread that completes futures in the background comes from.
        devices: this node's tensors on GPUs.
        device_map: finds the map to this peer, when a tensor on a GPU is first sent.
        pickle: whether what the codec does not know goes by pickle, if the peer is authenticated.
        max_open: calls without a reply; the next one waits for room.
        timeout_s: of fetching tensors of a result.
    """

    def __init__(
        self,
        name: str,
        connection: _native.Connection,
        threads: ThreadGroup,
        devices: DeviceTensors,
        device_map: Callable[[], DeviceMap],
        *,
        pickle: bool,
        max_open: int,
        timeout_s: float,
    ) -> None:
        self.name = name
        self.number = 0  # in the server's inbox
        self.caller = ""  # this node's name
        self.connection = connection
        self.forks = _native.forks()
        self.pickle = pickle and connection.authenticated
        self._codec = native_codec()
        self.calls = _native.PendingCalls(connection, max_open, self._codec, self.pickle)
        self.tensors = TensorSender(devices, name, connection, self.ask, device_map)
        self._threads = threads
        self._timeout_s = timeout_s
        self._lock = threading.RLock()  # a signal's handler may come in between, in the same thread
        self._in_background: dict[int, Future] = {}
        self._completing = False  # a thread waits for their replies

    def call(
        self, function: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> Any:
        """The result, waited for by this thread."""
        kind, value = self._request(function, args, kwargs, timeout_s)
        return self._ask(function, kind, value, timeout_s)

    def ask(self, name: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        """The result of one of geartrain.rpc's own functions. They also negotiate, so they do not wait for that."""
        return self._ask(name, CALL, (name, args, {}), timeout_s)

    def _ask(self, function: str | Callable[..., Any], kind: int, value: Any, timeout_s: float) -> Any:
        until_s = time.monotonic() + timeout_s
        began_s = time.perf_counter() if trace.on else 0.0
        tag = 0
        try:
            tag = self.calls.start(kind | timeout_bits[timeout_s], value, self.tensors, until_s)
            reply = self.calls.wait(tag, until_s)
        except BaseException as error:  # by a signal's handler, perhaps
            if tag:
                self.cancel(tag)
            if self._is_of_call(error, until_s):
                raise self._told(error, timeout_s) from None
            raise
        if began_s:
            self._trace_call("call", function, tag, began_s, reply[3])
            self._trace_reply(reply)
        try:
            return reply[1] if reply[0] == RESULT else self.value_of(reply)
        finally:
            del reply  # the traceback of an error in it holds this frame

    def start(
        self,
        function: str | Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float,
        until_s: float,
    ) -> int:
        """Sends a call until `until_s` in `time.monotonic()`: the tag of its reply."""
        began_s = time.perf_counter() if trace.on else 0.0
        kind, value = self._request(function, args, kwargs, timeout_s)
        try:
            tag = self.calls.start(kind | timeout_bits[timeout_s], value, self.tensors, until_s)
        except (WaitTimeoutError, PeerLostError) as error:
            if self._is_of_call(error, until_s):
                raise self._told(error, timeout_s) from None
            raise
        if began_s:
            self._trace_call("send", function, tag, began_s, time.perf_counter())
        return tag

    def tell(
        self, function: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> None:
        """Sends a call without a reply. Raises `MessageError` for a function that is not registered."""
        kind, value = self._request(function, args, kwargs, timeout_s)
        if kind != CALL:
            raise MessageError("`tell` takes registered functions only")
        until_s = time.monotonic() + timeout_s
        kind, payload = self._codec.encode_message(TELL, value, self.pickle, self.tensors, 0, until_s)
        self.connection.send(0, kind, payload, timeout_s)

    def encode(
        self, function: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> tuple[int, _native.Payload]:
        """A call's kind and payload, for `calls.start`. Tensors that go out of band are sent by then, or queued."""
        kind, value = self._request(function, args, kwargs, timeout_s)
        until_s = time.monotonic() + timeout_s
        return self._codec.encode_message(kind, value, self.pickle, self.tensors, 0, until_s)

    def _request(
        self, function: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> tuple[int, Any]:
        """A call's kind and value."""
        name = function if type(function) is str else _registered(function)
        if name is None and not self.pickle:
            raise UntrustedPeerError(
                f"{function!r} is not registered (@rpc.function), and pickled functions are sent only between "
                "peers that proved they know the cluster's secret"
            )
        if self.tensors.forced:
            self.tensors.negotiate(timeout_s)
        return (CALL_OBJECT, (function, args, kwargs)) if name is None else (CALL, (name, args, kwargs))

    def wait(self, tag: int, until_s: float) -> Reply:
        """The reply to a call that was started, waited for by this thread until `until_s` in `time.monotonic()`."""
        reply = self.calls.wait(tag, until_s)
        if trace.on:
            self._trace_reply(reply)
        return reply

    def _is_of_call(self, error: BaseException, until_s: float) -> bool:
        """Whether an error is the call's timeout or the loss of its peer. Pickling an argument may raise the same."""
        if isinstance(error, WaitTimeoutError):
            return time.monotonic() >= until_s
        return isinstance(error, PeerLostError) and self.connection.lost

    def _told(self, error: BaseException, timeout_s: float) -> GeartrainError:
        """The call's timeout, or the loss of its peer, as its caller gets it."""
        if isinstance(error, PeerLostError):
            return self.named(error)
        return WaitTimeoutError(f"no answer from {self.name!r} within {timeout_s} s")

    def _trace_call(
        self, what: str, function: str | Callable[..., Any], tag: int, began_s: float, ended_s: float
    ) -> None:
        """A slice of a call, whose arrow leads to its execution."""
        name = f"{what} {name_of(function)}"
        trace.slice_of(name, "rpc", began_s, ended_s, flow_out=self.flow(tag), peer=self.name)

    def _trace_reply(self, reply: Reply) -> None:
        """A slice of a reply's decoding, which has just ended."""
        kind, _, tag, arrived_s = reply
        if kind != UNDECODABLE:
            arrow = f"{self.flow(tag)}r"
            trace.slice_of("reply", "rpc", arrived_s, time.perf_counter(), flow_in=arrow, peer=self.name)

    def flow(self, tag: int) -> str:
        """The trace arrow of a call. The server uses the same one (`ServerSession.flow`)."""
        return f"{self.caller}>{self.name}:{tag}"

    def drop(self, tag: int) -> None:
        """Drops the reply when it comes; the call goes on."""
        self.calls.drop(tag)

    def value_of(self, reply: Reply, elsewhere: bool = False) -> Any:
        """The result, or the peer's error, raised. `elsewhere`: another thread than this one will use it."""
        kind, value, tag, _ = reply
        if kind == RESULT:
            return value
        if kind == RESULT | OUT_OF_BAND:
            return self.tensors.fetch(value, tag, self._timeout_s, elsewhere)
        if kind == UNDECODABLE:
            try:
                raise value
            finally:
                del value, reply  # the traceback holds this frame
        if kind != ERROR or type(value) is not tuple or [type(part) for part in value] != [str] * 3:
            raise MessageError(f"the reply of {self.name!r} is malformed")
        raise remote_error(value[0], value[1], value[2], self.name)

    def named(self, error: GeartrainError) -> GeartrainError:
        """The same error. The error of a lost peer gets the peer's name."""
        lost, said = f"{self.name!r} is lost: ", str(error)
        if type(error) is PeerLostError and not said.startswith(lost):
            return PeerLostError(lost + said)
        return error.with_traceback(None)

    def cancel(self, tag: int) -> None:
        """Drops the reply when it comes, and has the peer cancel the call."""
        self.calls.forget(tag)
        with contextlib.suppress(GeartrainError):
            self.connection.send(tag, CANCEL, self._codec.encode(None), 0.1)
        with self._lock:
            self._in_background.pop(tag, None)

    def after_fork(self) -> None:
        """In a forked child, whose calls they are not: the locks anew."""
        self._lock = threading.RLock()
        self._in_background, self._completing = {}, False

    # Futures with callbacks are completed by a thread of the client's, started for the first of them.

    def complete_in_background(self, future: Future, tag: int) -> None:
        """Has a thread of this client's wait for the reply, and finish the future."""
        with self._lock:
            self._in_background[tag] = future
            if not self._completing:
                self._threads.start(self._complete, "completes futures of")
                self._completing = True
        self.calls.detach(tag)

    def _complete(self) -> None:
        while True:
            try:
                reply = self.calls.next_detached(0.5)
            except WaitTimeoutError:
                self._expire()
                with self._lock:
                    if not self._in_background:
                        self._completing = False  # another is started when it is needed
                        return
                continue
            except GeartrainError as error:
                with self._lock:
                    left, self._in_background, self._completing = list(self._in_background.values()), {}, False
                for future in left:
                    future.finish(self.named(error))
                return
            if trace.on:
                self._trace_reply(reply)
            with self._lock:
                waiting = self._in_background.pop(reply[2], None)
            if waiting is not None:
                waiting.finish(reply)
            del reply, waiting  # memory of the peer's, perhaps

    def _expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [(tag, future) for tag, future in self._in_background.items() if future.until_s < now]
        for tag, future in late:
            self.cancel(tag)
            future.finish(WaitTimeoutError(f"no answer from {self.name!r} before the call's deadline"))


def _registered(function: Any) -> str | None:
    """The name under which a function is registered; None of one that is not."""
    if not callable(function):  # once a call
        check_function("what is called", function, "a function, or the name of one")
    try:
        return names.get(function)
    except TypeError:  # it has no hash
        return None


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
