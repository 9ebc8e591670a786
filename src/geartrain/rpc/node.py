"""A process among its peers: it finds them, calls them, and is called."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

import geartrain._native as _native
from geartrain.device.device import DeviceRuntime
from geartrain.errors import ArgumentError, ConnectionClosedError, MessageError, UnknownPeerError
from geartrain.rpc.client import Future, Peer
from geartrain.rpc.protocol import BESIDE, CALL, HELLO, TELL, limited
from geartrain.rpc.pubsub import Topic, Topics
from geartrain.rpc.registry import names
from geartrain.rpc.server import Server
from geartrain.rpc.session import about_to_wait
from geartrain.rpc.tensors.device_map import DeviceMap, of_peer
from geartrain.rpc.tensors.endpoint import Devices
from geartrain.transport.codec import native_codec
from geartrain.transport.connection import Limits, Listener, options_of
from geartrain.transport.rendezvous import Directory
from geartrain.transport.tls import TLS


class Node:
    """This process among its peers. `rpc.init` makes the one that the functions of `geartrain.rpc` use."""

    def __init__(
        self,
        name: str,
        *,
        store: Any = None,
        peers: dict[str, str] | None = None,
        secret: bytes = b"",
        pickle: bool = True,
        transport: str | None = None,
        device_map: Any = None,
        host: str | None = "127.0.0.1",
        port: int = 0,
        advertise: Iterable[str] = (),
        timeout_s: float = 30.0,
        max_threads: int = 64,
        max_running: int = 1,
        max_open: int = 1024,
        limits: Limits | None = None,
        spin_us: float = 30.0,
        views: bool = True,
        peer_timeout_s: float = 10.0,
        driver: DeviceRuntime | None = None,
        tls: TLS | Literal[False] | None = None,
    ) -> None:
        """A node that peers can call from now on.

        Args:
            name: what peers call it by.
            store: where names become addresses: anything with torch's c10d store's `set`, `get` and `check`.
            peers: addresses known without a store.
            secret: the cluster's; needed to listen on anything but loopback.
            pickle: whether objects that the codec does not know go by pickle, between peers with the secret.
            transport: to force one of `transport.TRANSPORTS`; or, for tensors, "cuda_ipc" between GPUs of a host or
                "nixl" for all on GPUs and big ones on the CPU.
            device_map: which GPU of a peer tensors go to: "1_0_0,..." (peer's name or rank, GPU here, GPU there) or
                {peer: {GPU here: GPU there}}; chosen for peers that it does not name (docs/devices.md).
            host, port, advertise, limits, spin_us, views: as for `transport.listen`.
            peer_timeout_s: a peer without a sign of life for so long is lost: its process is stopped, or its host or
                the way to it is gone. Its calls fail with `PeerLostError`, and `on_peer_lost` is told, within a second
                more. A process that was killed is lost at once. 0 for never, or 2 and more.
            timeout_s: for calls that have none of their own, and for joining.
            max_threads: functions that run at once, at most. One that waits for a call of its own, or that its peer
                has given up, does not count; an `async def` needs no thread.
            max_running: functions that begin at once: the next one does when one of them returns, has run for 5 ms, or
                waits for a call of its own. Python runs one thread at a time, and every further one that wants to
                slows all down. Give more where functions wait for less than that, for disks, say, or compute
                without the GIL on cores that are free.
            max_open: calls to one peer without an answer; the next one waits for room.
            driver: of other devices than CUDA's.
            tls: certificates, for all connections over TCP to be encrypted; by default what the environment says. As
                for `transport.listen`; the files are read again for each peer that this node connects to.
        """
        if max_threads < 1 or max_running < 1 or max_open < 1:
            raise ArgumentError(
                f"a node runs at least one function, and has one call open; found max_threads={max_threads}, "
                f"max_running={max_running}, max_open={max_open}"
            )
        self.name, self.pickle, self.timeout_s, self.max_open = name, pickle, timeout_s, max_open
        self._options = options_of(secret, limits, spin_us, views, peer_timeout_s, tls)
        self.devices = Devices(device_map, transport, driver, (limits or Limits()).max_segment_bytes)
        self.directory = Directory(store, dict(peers or {}))
        self._codec = native_codec()
        self._peers: dict[str, Peer] = {}
        self._watched: dict[int, str] = {}  # number in the server's inbox -> peer
        self._dialling: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._on_lost: list[Callable[[str, str], object]] = []
        self._closed = False
        self._pid = os.getpid()
        native = _native.Listener.make(dict(self._options), host or "", port, list(advertise), True)
        listener = Listener(native)
        if transport is not None and self.devices.forced is None:
            self._options["transport"] = transport
        self.address = listener.address
        self.topics = Topics(self)
        self.server = Server(
            self,
            name,
            listener,
            pickle=pickle,
            timeout_s=timeout_s,
            max_threads=max_threads,
            max_running=max_running,
            max_open=max_open,
            max_queued_bytes=(limits or Limits()).max_queued_bytes,
            spin_us=spin_us,
            lost=self._lost,
        )
        _nodes.add(self)
        self.directory.put(name, self.address)

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
        about_to_wait()
        return self._peer(peer, limit_s).call(function, args, kwargs, limit_s)

    def call_async(
        self, peer: str, function: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future:
        """The same as a `Future`; sent when this returns."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        until_s = time.monotonic() + limit_s
        found = self._peer(peer, limit_s)
        kind, parcel = found.parcel(function, args, kwargs, limit_s)
        return Future(found, found.calls.start(limited(kind, limit_s), parcel, False, limit_s), until_s)

    def tell(
        self, peer: str, function: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> None:
        """Calls without wanting an answer: returns once it is sent. What the function raises is printed there."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        found = self._peer(peer, limit_s)
        kind, parcel = found.parcel(function, args, kwargs, limit_s)
        if kind & ~BESIDE != CALL:
            raise MessageError("only functions with a name can be told")
        found.connection.send(0, TELL | (kind & BESIDE), parcel, limit_s)

    def remote(self, peer: str, cls: str | type, *args: Any, **kwargs: Any) -> Remote:
        """An object of a registered class, made and kept by the peer until closed, or until this node is lost."""
        name = cls if isinstance(cls, str) else names.get(cls, cls.__name__)
        return Remote(self, peer, self.call(peer, "geartrain.rpc.make", name, args, kwargs))

    def topic(self, name: str, *, history: int = 1, timeout_s: float = 5.0) -> Topic:
        """A topic of this node's; `publish` sends to whoever has subscribed."""
        return self.topics.make(name, history, timeout_s)

    def subscribe(self, peer: str, topic: str, callback: Callable[[int, Any], object]) -> None:
        """Has `callback(number, value)` called for each value of a peer's topic, in order, from a thread of this node.

        The newest values that the topic keeps come first. Subscribe again when the peer was lost and came back.
        """
        self.topics.subscribe(peer, topic, callback)

    def unsubscribe(self, peer: str, topic: str) -> None:
        """The callback is not called any more."""
        self.topics.unsubscribe(peer, topic)

    def peer(self, name: str, *, timeout_s: float | None = None) -> Peer:
        """The connection to a peer, made if need be: for who encodes once and sends to many. Raises as `call` does."""
        return self._peer(name, self.timeout_s if timeout_s is None else timeout_s)

    def hang_up(self, name: str) -> None:
        """Ends the connections with a peer, both ways; both sides may call again, which makes new ones."""
        with self._lock:
            peer = self._peers.pop(name, None)
        if peer is not None:
            peer.connection.close()
        self.server.hang_up(name)

    def connected(self, name: str) -> bool:
        """Whether both this node's connection to a peer and one of the peer's to this node live."""
        peer = self._peers.get(name)
        return peer is not None and not peer.connection.lost and self.server.has_caller(name)

    def on_peer_lost(self, callback: Callable[[str, str], object]) -> None:
        """Calls back with the name of a peer that is lost, and why."""
        self._on_lost.append(callback)

    def connections(self) -> dict[str, str]:
        """The peers that this node calls, and the way to each: of messages, and of tensors on GPUs."""
        return {
            name: "; ".join(filter(None, (peer.connection.describe(), peer.tensors.describe())))
            for name, peer in self._open_peers()
        }

    def considered(self) -> dict[str, list[tuple[str, str]]]:
        """For each peer that this node calls, the faster transports, and why each was not taken."""
        return {name: list(peer.connection.considered) for name, peer in self._open_peers()}

    def authenticated(self) -> dict[str, bool]:
        """For each peer that this node calls, whether both proved that they know the secret."""
        return {name: peer.connection.authenticated for name, peer in self._open_peers()}

    def counts(self) -> dict[str, dict[str, Any]]:
        """Messages and bytes by path to and from each peer that this node calls; `tensors`: bytes by way."""
        return {
            name: peer.connection.counts() | {"tensors": dict(peer.tensors.bytes_by_way)}
            for name, peer in self._open_peers()
        }

    def device_map(self, peer: str) -> DeviceMap:
        """Which of its GPUs tensors go to."""
        ranks = []
        for key in self.devices.maps:
            if key.isdigit() and key != peer:
                with contextlib.suppress(UnknownPeerError):
                    if self.directory.find(f"rank/{key}", 0.0) == peer:
                        ranks.append(key)
        return of_peer(self.devices.maps, (peer, *ranks))

    def _open_peers(self) -> list[tuple[str, Peer]]:
        with self._lock:
            return list(self._peers.items())

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
        if self._pid == os.getpid():
            self.directory.remove(self.name, self.address)
        for peer in peers:
            peer.connection.close()
            peer.tensors.close()
        self.server.close()
        self.devices.close()
        _nodes.discard(self)

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- finding peers ----------------------------------------------------------------------------------------------

    def _peer(self, name: str, timeout_s: float) -> Peer:
        peer = self._peers.get(name)
        if peer is not None and not peer.connection.lost:
            return peer
        with self._lock:
            dialling = self._dialling.setdefault(name, threading.Lock())
        until_s = time.monotonic() + timeout_s
        with dialling:
            peer = self._peers.get(name)
            if peer is not None and not peer.connection.lost:
                return peer
            self._check_open()
            address = self._address(name, until_s)
            connection = _native.connect(address, self._options, max(0.0, until_s - time.monotonic()))
            connection.send(0, HELLO, self._codec.encode(self.name), timeout_s)
            peer = Peer(self, name, connection)
            with self._lock:
                try:
                    self._check_open()
                except ConnectionClosedError:
                    connection.close()
                    raise
                self._peers[name] = peer
                peer.number = self.server.watch(connection)
                self._watched[peer.number] = name
        return peer

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise ConnectionClosedError(
                f"the node {self.name!r} belongs to the process that this one was forked from; make one here"
            )
        if self._closed:
            raise ConnectionClosedError(f"the node {self.name!r} was closed")

    def _address(self, name: str, until_s: float) -> str:
        return self.address if name == self.name else self.directory.find(name, until_s)

    def _lost(self, name: str | None, number: int, reason: str) -> None:
        if name is None:
            with self._lock:
                name = self._watched.pop(number, "")
                if name in self._peers and self._peers[name].number == number:
                    self._peers.pop(name).tensors.close()  # who waits for it finds out alone
        if name and not self._closed:
            for callback in list(self._on_lost):
                try:
                    callback(name, reason)
                except Exception:
                    traceback.print_exc()

    def __repr__(self) -> str:
        return f"<Node {self.name!r} at {self.address}>"


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


# At exit nobody may be left in the native layer: a thread that Python ends there takes the process with it.
_nodes: weakref.WeakSet[Node] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for one in list(_nodes):
        one.close()
