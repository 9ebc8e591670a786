"""Client side of one peer: the connection to it, calls, and their replies."""

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
from geartrain.core.arguments import shown
from geartrain.errors import (
    ArgumentError,
    GeartrainError,
    MessageError,
    PeerLostError,
    RemoteError,
    UntrustedPeerError,
    WaitTimeoutError,
)
from geartrain.rpc.future import Future, Reply
from geartrain.rpc.protocol import CALL, CALL_OBJECT, CANCEL, ERROR, OUT_OF_BAND, RESULT, with_timeout
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
        self.calls = _native.Calls(connection, max_open)
        self.forks = _native.forks()
        self.pickle = pickle and connection.authenticated
        self.tensors = TensorSender(devices, name, connection, self.ask, device_map)
        self._codec = native_codec()
        self._threads = threads
        self._timeout_s = timeout_s
        self._lock = threading.RLock()  # a signal's handler may come in between, in the same thread
        self._in_background: dict[int, Future] = {}
        self._completing = False  # a thread waits for their replies

    def encode_call(
        self, function: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> tuple[int, Any]:
        """A call's kind and its encoded value. Tensors that are transferred out of band are sent by then, or queued."""
        name = function if type(function) is str else _registered(function)
        if name is not None:
            out_of_band, payload = self.tensors.encode((name, args, kwargs), self.pickle, timeout_s)
            return CALL | out_of_band, payload
        if not self.pickle:
            raise UntrustedPeerError(
                f"{function!r} is not registered (@rpc.function), and functions go by pickle only between peers that "
                "proved they know the cluster's secret"
            )
        out_of_band, payload = self.tensors.encode((function, args, kwargs), True, timeout_s)
        return CALL_OBJECT | out_of_band, payload

    def call(
        self, function: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> Any:
        """The result, waited for by this thread."""
        if not trace.on and not self.tensors.forced:
            name = function if type(function) is str else _registered(function)
            if name is not None:
                found = self._call_at_once((name, args, kwargs), timeout_s)
                if found is not None:
                    return found[1] if found[0] == RESULT else self.value_of(found)
        began_s = time.perf_counter() if trace.on else 0.0
        kind, payload = self.encode_call(function, args, kwargs, timeout_s)
        try:
            message = self.calls.call(with_timeout(kind, timeout_s), payload, timeout_s, CANCEL)
        except (WaitTimeoutError, PeerLostError) as error:
            raise self._told(error, timeout_s) from None
        if trace.on:
            self.record(f"call {name_of(function)}", message.tag, began_s)
        return self.value_of(message)

    def _call_at_once(
        self, value: tuple[str, tuple[Any, ...], dict[str, Any]], timeout_s: float
    ) -> tuple[int, Any, int] | None:
        """Encodes, sends, waits and decodes in one native call. None where the call cannot be encoded so."""
        word = with_timeout(CALL, timeout_s)
        try:
            return self.calls.call_with_value(self._codec, word, value, self.pickle, timeout_s, CANCEL)
        except (WaitTimeoutError, PeerLostError) as error:
            raise self._told(error, timeout_s) from None

    def start(
        self, function: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> int:
        """Sends a call: the tag of its reply."""
        if not trace.on and not self.tensors.forced:
            name = function if type(function) is str else _registered(function)
            if name is not None:
                word = with_timeout(CALL, timeout_s)
                tag = self.calls.start_with_value(self._codec, word, (name, args, kwargs), self.pickle, timeout_s)
                if tag is not None:
                    return tag
        began_s = time.perf_counter() if trace.on else 0.0
        kind, payload = self.encode_call(function, args, kwargs, timeout_s)
        tag = self.calls.start(with_timeout(kind, timeout_s), payload, False, timeout_s)
        if trace.on:
            self.record(f"send {name_of(function)}", tag, began_s)
        return tag

    def wait(self, tag: int, timeout_s: float) -> Reply:
        """The reply to a call that was started, waited for by this thread."""
        if trace.on:  # decoding is a slice of its own
            return self.calls.wait(tag, timeout_s)
        return self.calls.wait_for_value(self._codec, tag, self.pickle, timeout_s)

    def _told(self, error: GeartrainError, timeout_s: float) -> GeartrainError:
        """A call's error as its caller gets it."""
        if isinstance(error, WaitTimeoutError):
            return WaitTimeoutError(f"no answer from {self.name!r} within {timeout_s} s")
        return self.named(error)

    def record(self, what: str, tag: int, began_s: float) -> None:
        """A slice of a trace: a call of this client, whose arrow leads to its execution."""
        trace.slice_of(what, "rpc", began_s, time.perf_counter(), flow_out=self.flow(tag), peer=self.name)

    def flow(self, tag: int) -> str:
        """The arrow of a call, the same on the other side (`ServerSession.flow`)."""
        return f"{self.caller}>{self.name}:{tag}"

    def ask(self, name: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        """The result of one of geartrain.rpc's own functions, whose values are plain."""
        began_s = time.perf_counter() if trace.on else 0.0
        message = self.calls.call(CALL, self._codec.encode((name, args, {})), timeout_s, CANCEL)
        if trace.on:
            self.record(f"call {name}", message.tag, began_s)
        return self.value_of(message)

    def drop(self, tag: int) -> None:
        """Drops the reply when it comes; the call goes on."""
        self.calls.drop(tag)

    def value_of(self, reply: Reply, elsewhere: bool = False) -> Any:
        """The result, or the peer's error, raised. `elsewhere`: another thread than this one will use it."""
        if type(reply) is tuple:
            kind, value, tag = reply
            if kind == RESULT:
                return value
            if kind != -1:
                return self._value_in(kind, value, tag, elsewhere)
            reply = value
        message: Any = reply
        began_s = time.perf_counter() if trace.on else 0.0
        value = self._codec.decode(message, self.pickle)
        if trace.on:
            arrow = f"{self.flow(message.tag)}r"
            trace.slice_of("reply", "rpc", began_s, time.perf_counter(), flow_in=arrow, peer=self.name)
        return self._value_in(message.kind, value, message.tag, elsewhere)

    def _value_in(self, kind: int, value: Any, tag: int, elsewhere: bool) -> Any:
        if kind == RESULT:
            return value
        if kind == RESULT | OUT_OF_BAND:
            return self.tensors.fetch(value, tag, self._timeout_s, elsewhere)
        if kind != ERROR or type(value) is not tuple or [type(part) for part in value] != [str] * 3:
            raise MessageError(f"{self.name!r} answered with what is no answer")
        raise remote_error(value[0], value[1], value[2], self.name)

    def named(self, error: GeartrainError) -> GeartrainError:
        """The same error; one of a lost peer with the peer's name."""
        if type(error) is PeerLostError:
            return PeerLostError(f"{self.name!r} is lost: {error}")
        return error.with_traceback(None)

    def cancel(self, tag: int) -> None:
        """Drops the reply when it comes, and has the peer cancel the call."""
        self.calls.forget(tag)
        with contextlib.suppress(GeartrainError):
            self.calls.notify(tag, CANCEL, self._codec.encode(None), 0.1)
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
                message = self.calls.next_detached(0.5)
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
            with self._lock:
                waiting = self._in_background.pop(message.tag, None)
            if waiting is not None:
                waiting.finish(message)

    def _expire(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [(tag, future) for tag, future in self._in_background.items() if future.until_s < now]
        for tag, future in late:
            self.cancel(tag)
            future.finish(WaitTimeoutError(f"no answer from {self.name!r} before the call's deadline"))


def _registered(function: Any) -> str | None:
    """The name under which a function is registered; None of one that is not."""
    if not callable(function):
        raise ArgumentError(f"a function, or the name of one, is called; found {shown(function)}")
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
