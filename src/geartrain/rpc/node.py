"""RPC node: a process's endpoint, which finds peers, calls their functions, and serves its own functions to them."""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import geartrain._native as _native
import geartrain.core.trace as trace
from geartrain.core.arguments import (
    check_choice,
    check_flag,
    check_function,
    check_store,
    check_text,
    check_type,
    timeout,
)
from geartrain.core.lifetime import Lifetime, on_error
from geartrain.core.process_report import register
from geartrain.errors import (
    ConnectionClosedError,
    GeartrainError,
    ListenerGoneError,
    PeerLostError,
    PeerUnreachableError,
    TransportError,
    UnknownPeerError,
    WaitTimeoutError,
)
from geartrain.rpc.client import Client
from geartrain.rpc.future import Future
from geartrain.rpc.options import NodeOptions
from geartrain.rpc.protocol import HELLO
from geartrain.rpc.pubsub import Topic, Topics
from geartrain.rpc.registry import names
from geartrain.rpc.remote_objects import MAKE, Remote
from geartrain.rpc.scheduler import about_to_wait
from geartrain.rpc.server import Server
from geartrain.rpc.tensors.device_map import DeviceMap, of_peer
from geartrain.rpc.tensors.endpoint import CHANNELS, DeviceTensors
from geartrain.rpc.threads import ThreadGroup
from geartrain.transport.codec import native_codec
from geartrain.transport.connection import TRANSPORTS, Listener, MessageLimits, native_listener, options_of
from geartrain.transport.rendezvous import Directory
from geartrain.transport.tls import TLS

#: Longest wait for an answer of the node that already has a name.
_PROBE_S = 5.0


class Node(
    Lifetime,
    error=ConnectionClosedError,
    at_exit=True,
    elsewhere="make another one there, with peers={name: address}",
):
    """RPC endpoint of this process: calls functions of its peers and serves its own.

    `rpc.init` makes the node that the functions of `geartrain.rpc` use. Any thread may use a node. `close` may be
    called more than once, also during other calls, and returns within two seconds. Calls that wait at that time end
    with `ConnectionClosedError`. Calls from peers to this node end with `PeerLostError`. A forked child cannot use its
    parent's node. The interpreter closes the node at exit.

    Examples:
        >>> from geartrain import rpc
        >>> @rpc.function
        ... def joined(a, b):
        ...     return f"{a} {b}"
        >>> learner = rpc.Node("learner")
        >>> worker = rpc.Node("worker", peers={"learner": learner.address})
        >>> worker.call("learner", "joined", 1, 2)
        '1 2'
        >>> future = worker.call_async("learner", joined, 3, 4)  # a Future
        >>> future.result()
        '3 4'
        >>> worker.close(); learner.close()
    """

    def __init__(
        self,
        name: str,
        *,
        store: Any = None,
        peers: dict[str, str] | None = None,
        secret: bytes = b"",
        tls: TLS | Literal[False] | None = None,
        pickle: bool = True,
        host: str | None = "127.0.0.1",
        port: int = 0,
        timeout_s: float = 30.0,
        transport: str | None = None,
        device_map: Any = None,
        options: NodeOptions | None = None,
    ) -> None:
        """Starts a node that peers can call from now on.

        Names are unique in a store. If a node of this name is registered already, the new one replaces it if the old
        one is gone: nothing answers at its address, or something else does. If its host does not answer at all, end the
        job instead. Under `geartrain launch` a restarted process gets its name back, because the launcher has seen the
        old one end.

        Args:
            name: name by which peers address it.
            store: rendezvous of names and addresses: an object with `set`, `get` and `check`, like torch's c10d stores.
            peers: addresses that are known without a store, by name.
            secret: the cluster's secret; needed to listen on anything but loopback.
            tls: certificates, to encrypt all TCP connections; by default what the environment says. As for
                `transport.listen`; the files are read again for each peer that this node connects to.
            pickle: send objects that the codec does not know by pickle, between peers with the secret.
            host, port: as for `transport.listen`.
            timeout_s: default deadline of calls, and of joining, in seconds. Every `timeout_s` of `geartrain.rpc` is
                from 0 (does not wait) to 1e9.
            transport: forces one of `transport.TRANSPORTS`; or, for tensors, "cuda_ipc" between GPUs of a host or
                one of `transport.one_sided.names()` for all on GPUs and large ones on the CPU (docs/devices.md).
            device_map: GPU of a peer that tensors go to: "1_0_0,..." (peer's name or rank, GPU here, GPU there) or
                {peer: {GPU here: GPU there}}. Chosen automatically for other peers (docs/devices.md).
            options: numbers of threads and calls, limits of messages and the like.

        Raises:
            NameTakenError: a node of that name is registered, and is alive or may be.
            ArgumentError: an argument is out of range.
        """
        rare = NodeOptions() if options is None else options
        check_type("options are geartrain.rpc.NodeOptions", rare, NodeOptions)
        check_text("a node's name", name)
        pickle = check_flag("pickle", pickle)
        check_store(store)
        check_type("peers are addresses by name", peers, Mapping | None)
        for peer, address in (peers or {}).items():
            check_text("the name of a peer", peer)
            check_text(f"the address of peer {peer!r}", address)
        super().__init__(f"the node {name!r}")
        self.name, self.pickle, self.timeout_s, self.max_open = name, pickle, timeout(timeout_s), rare.max_open
        self._options = options_of(secret, rare.limits, rare.spin_us, rare.views, rare.peer_timeout_s, tls)
        limits = rare.limits or MessageLimits()
        self.devices = DeviceTensors(device_map, transport, rare.driver, limits.max_segment_bytes)
        self.directory = Directory(store, dict(peers or {}))
        self._codec = native_codec()
        self._clients: dict[str, Client] = {}
        self._watched: dict[int, str] = {}  # number in the server's inbox -> peer
        self._dialling: dict[str, threading.Lock] = {}
        self._lock = threading.RLock()  # a signal's handler may come in between, in the same thread
        self._on_lost: list[Callable[[str, str], object]] = []
        listening = dict(self._options)
        if transport is not None and self.devices.forced is None:
            check_choice("transport", transport, (*TRANSPORTS, *CHANNELS))
            self._options["transport"] = transport
        listener = Listener(native_listener(listening, host, port, rare.advertise))
        self.address = listener.address
        self.topics = Topics(self)
        self._threads = ThreadGroup(name)
        with on_error(self.devices.close), on_error(self._threads.join, 0.5), on_error(listener.close):
            self.server = Server(
                self,
                name,
                listener,
                self.devices,
                self._threads,
                pickle=pickle,
                timeout_s=timeout_s,
                max_threads=rare.max_threads,
                max_running=rare.max_running,
                max_open=rare.max_open,
                max_queued_bytes=limits.max_queued_bytes,
                spin_us=self._options["spin_us"],
                lost=self._lost,
            )
        self._begin()
        with on_error(self.close):
            trace.name_process(name)
            register(self, "node", _figures)
            self.directory.claim(name, self.address, self.why_not_gone)

    def why_not_gone(self, address: str) -> str | None:
        """Internal: why a node may still be alive at an address. None if it is proven to be gone."""
        check_text("an address", address)
        try:
            _native.connect(address, {**self._options, "transport": ""}, min(self.timeout_s, _PROBE_S)).close()
        except (ListenerGoneError, PeerLostError):
            return None
        except GeartrainError as error:  # it does not answer in time, or has another secret, or cannot be reached now
            return str(error)
        return "it is alive"

    # --- calling ----------------------------------------------------------------------------------------------------

    def call(
        self, peer: str, function: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        """Calls a function of a peer and waits for the result.

        Args:
            peer: name of the peer.
            function: name of the function, or a registered function.
            args: positional arguments of the function.
            timeout_s: deadline of the whole call, 0 to 1e9 seconds: finding the peer, the call and the reply.
            kwargs: keyword arguments of the function.

        Returns:
            What the function returned.

        Raises:
            RemoteError: the function raised. It is also of the built-in type that was raised there.
            WaitTimeoutError: no reply in time. The peer cancels the call.
            PeerLostError: the peer died or closed the connection. The function may or may not have run. After its
                subclass `PeerUnreachableError` it has not: nothing answered at the peer's address.
            UnknownPeerError: no peer of that name joined in time.
        """
        limit_s = self._limit(timeout_s)
        about_to_wait()
        return self._client(peer, limit_s).call(function, args, kwargs, limit_s)

    def call_async(
        self, peer: str, function: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future:
        """Sends a call and returns its `Future`.

        Args:
            peer, function, args, timeout_s, kwargs: as for `call`.
        """
        limit_s = self._limit(timeout_s)
        until_s = time.monotonic() + limit_s
        client = self._client(peer, limit_s)
        return Future(client, client.start(function, args, kwargs, limit_s, until_s), until_s)

    def tell(
        self, peer: str, function: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> None:
        """Sends a call without a reply. If the function raises, the peer prints the error.

        Args:
            peer, function, args, timeout_s, kwargs: as for `call`.
        """
        limit_s = self._limit(timeout_s)
        self._client(peer, limit_s).tell(function, args, kwargs, limit_s)

    def remote(self, peer: str, cls: str | type, *args: Any, **kwargs: Any) -> Remote:
        """Makes an object of a registered class at a peer, which keeps it until it is closed or this node is lost.

        Args:
            peer: name of the peer.
            args: the class, or its name, and the positional arguments of its constructor.
            kwargs: keyword arguments of the constructor.

        Raises:
            ArgumentError: no class was given. Other errors are those of `call`.
        """
        check_type("a peer makes objects of a class or of its name", cls, (str, type))
        name = cls if isinstance(cls, str) else names.get(cls, cls.__name__)
        return Remote(self, peer, self.call(peer, MAKE, name, args, kwargs))

    def topic(self, name: str, *, history: int = 1, timeout_s: float = 5.0) -> Topic:
        """Opens a topic of this node: `publish` sends a value to all subscribers.

        Args:
            name: name of the topic.
            history: newest values that a later subscriber gets first.
            timeout_s: a subscriber that takes no value for this many seconds is removed.
        """
        self._check_open()
        return self.topics.make(name, history, timeout_s)

    def subscribe(self, peer: str, topic: str, callback: Callable[[int, Any], object]) -> None:
        """Subscribes to a peer's topic. The newest values that the topic keeps come first.

        Subscribe again if the peer was lost and came back.

        Args:
            peer: name of the peer.
            topic: name of the topic.
            callback: `callback(number, value)`, called in order from a thread of this node.
        """
        self.topics.subscribe(peer, topic, callback)

    def unsubscribe(self, peer: str, topic: str) -> None:
        """Ends a subscription.

        Args:
            peer: name of the peer.
            topic: name of the topic.
        """
        self.topics.unsubscribe(peer, topic)

    def client(self, name: str, *, timeout_s: float | None = None) -> Client:
        """The client of a peer, connected if needed. Use it to encode a call once and send it to many peers.

        Args:
            name: name of the peer.
            timeout_s: longest wait for the peer, in seconds. Errors are those of `call`.
        """
        return self._client(name, self._limit(timeout_s))

    def hang_up(self, name: str) -> None:
        """Closes the connections with a peer in both directions. Later calls connect again.

        Args:
            name: name of the peer.
        """
        check_text("a peer's name", name)
        with self._lock:
            client = self._clients.pop(name, None)
        if client is not None:
            client.connection.close()
        self.server.hang_up(name)

    def connected(self, name: str) -> bool:
        """Whether this node's connection to a peer and the peer's connection to this node are both open.

        Args:
            name: name of the peer.
        """
        client = self._clients.get(check_text("a peer's name", name))
        return client is not None and not client.connection.lost and self.server.has_client(name)

    def on_peer_lost(self, callback: Callable[[str, str], object]) -> None:
        """Calls a function whenever a peer is lost.

        Args:
            callback: function of the peer's name and the reason.
        """
        check_function("what is called back", callback)
        self._on_lost.append(callback)

    def connections(self) -> dict[str, str]:
        """For each peer that this node calls: transport of messages and channels of tensors, as text."""
        return {
            name: "; ".join(filter(None, (client.connection.describe(), client.tensors.describe())))
            for name, client in self._open_clients()
        }

    def considered(self) -> dict[str, list[tuple[str, str]]]:
        """For each peer that this node calls: the faster transports, and why each was not used."""
        return {name: list(client.connection.considered) for name, client in self._open_clients()}

    def authenticated(self) -> dict[str, bool]:
        """For each peer that this node calls: whether both proved that they know the secret."""
        return {name: client.connection.authenticated for name, client in self._open_clients()}

    def counts(self) -> dict[str, dict[str, Any]]:
        """For each peer that this node calls: messages and bytes by path; `tensors`: bytes by channel."""
        return {
            name: client.connection.counts() | {"tensors": dict(client.tensors.bytes_by_channel)}
            for name, client in self._open_clients()
        }

    def device_map(self, peer: str) -> DeviceMap:
        """Which GPUs of a peer tensors go to.

        Args:
            peer: name of the peer.
        """
        check_text("a peer's name", peer)
        ranks = []
        for key in self.devices.maps:
            if key.isdigit() and key != peer:
                with contextlib.suppress(UnknownPeerError):
                    if self.directory.find(f"rank/{key}", 0.0) == peer:
                        ranks.append(key)
        return of_peer(self.devices.maps, (peer, *ranks))

    def _open_clients(self) -> list[tuple[str, Client]]:
        with self._lock:
            return list(self._clients.items())

    def wait_for(self, *names: str, timeout_s: float | None = None) -> None:
        """Waits until peers have joined.

        Args:
            names: names of the peers.
            timeout_s: longest wait, in seconds.

        Raises:
            UnknownPeerError: a peer did not join in time.
        """
        limit_s = self._limit(timeout_s)
        until_s = time.monotonic() + limit_s
        for name in names:
            check_text("a peer's name", name)
        for name in names:
            self._wait_for(partial(self._address, name, until_s), until_s, f"a peer {name!r}")

    def close(self) -> None:
        """Closes all connections. Functions that still run are not interrupted."""
        if not self._end():
            return
        with self._lock:
            clients = list(self._clients.values())
        self.directory.close()
        if not self._forked:
            self.directory.remove(self.name, self.address)
        for client in clients:
            client.connection.close()
            client.tensors.close()
        self.server.close()
        self._threads.join(0.5)
        self.devices.close()

    # --- finding peers ----------------------------------------------------------------------------------------------

    def _limit(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else timeout(timeout_s)

    def _client(self, name: str, timeout_s: float) -> Client:
        if self._forked:
            self._check_open()
        try:
            client = self._clients.get(name)
        except (TypeError, ValueError):  # no name: it has no hash, or an array's comparison
            client = None
        if client is not None and not client.connection.lost:
            return client
        check_text("a peer's name", name)
        with self._lock:
            dialling = self._dialling.setdefault(name, threading.Lock())
        until_s = time.monotonic() + timeout_s
        dial = partial(self._dial, name, until_s, dialling)
        return self._wait_for(dial, until_s, f"a connection with {name!r}")

    def _dial(self, name: str, until_s: float, dialling: threading.Lock) -> Client:
        if not dialling.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise WaitTimeoutError(
                f"{name!r} did not answer another call, which was connecting to it, before this call's deadline"
            )
        try:
            client = self._clients.get(name)
            if client is not None and not client.connection.lost:
                return client
            self._check_open()
            address = self._address(name, until_s)
            try:
                connection = _native.connect(address, self._options, max(0.0, until_s - time.monotonic()))
            except PeerLostError as error:  # it hung up in the handshake
                raise PeerLostError(f"{name!r} is lost: {error}") from None
            except TransportError as error:
                raise PeerUnreachableError(f"{name!r} is lost, or never joined: {error}") from None
            connection.send(0, HELLO, self._codec.encode(self.name), max(0.0, until_s - time.monotonic()))
            client = Client(
                name,
                connection,
                self._threads,
                self.devices,
                lambda: self.device_map(name),
                pickle=self.pickle,
                max_open=self.max_open,
                timeout_s=self.timeout_s,
            )
            client.caller = self.name
            with self._lock:
                try:
                    self._check_open()
                except ConnectionClosedError:
                    connection.close()
                    raise
                self._clients[name] = client
                client.number = self.server.watch(connection)
                self._watched[client.number] = name
        finally:
            dialling.release()
        return client

    def _address(self, name: str, until_s: float) -> str:
        return self.address if name == self.name else self.directory.find(name, until_s)

    def _lost(self, name: str | None, number: int, reason: str) -> None:
        if name is None:
            with self._lock:
                name = self._watched.pop(number, "")
                if name in self._clients and self._clients[name].number == number:
                    self._clients.pop(name).tensors.close()  # waits for replies end by themselves
        if name and self._unended:
            for callback in list(self._on_lost):
                try:
                    callback(name, reason)
                except BaseException:  # SystemExit would end this thread, which serves others
                    traceback.print_exc()

    def _after_fork(self) -> None:
        self._lock, self._dialling = threading.RLock(), {}
        super()._after_fork()
        self.topics.after_fork()
        self.server.after_fork()
        for client in list(self._clients.values()):
            client.after_fork()

    def __repr__(self) -> str:
        return f"<Node {self.name!r} at {self.address}>"


def _figures(node: Node) -> dict[str, Any]:
    """For the process's report. `open`: calls without a reply, of this node to a peer, or of a client to this node."""
    node._check_open()
    peers = {}
    for name, client in node._open_clients():
        counts = client.connection.counts()
        peers[name] = {
            "open": client.calls.open,
            "transport": client.connection.transport,
            "messages_sent": counts["messages_sent"],
            "messages_received": counts["messages_received"],
            "bytes_sent": sum(counts["bytes_sent"].values()),
            "bytes_received": sum(counts["bytes_received"].values()),
        }
    scheduler = node.server.scheduler
    return {
        "name": node.name,
        "address": node.address,
        "peers": peers,
        "clients": {one.name: {"open": scheduler.open_calls(one)} for one in node.server.sessions},
        "backlog": scheduler.backlog,
    }
