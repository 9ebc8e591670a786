"""RPC node: one process among its peers, which finds them, calls them and is called by them."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Literal, NoReturn, SupportsIndex

import geartrain._native as _native
import geartrain.core.trace as trace
from geartrain.core.arguments import (
    check_choice,
    check_flag,
    check_function,
    check_store,
    check_text,
    refuse_copies,
    shown,
    timeout,
    whole_number,
)
from geartrain.core.process_report import register
from geartrain.device.device import DeviceRuntime
from geartrain.errors import (
    ArgumentError,
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
from geartrain.rpc.lifetime import Lifetime
from geartrain.rpc.protocol import HELLO
from geartrain.rpc.pubsub import Topic, Topics
from geartrain.rpc.registry import names
from geartrain.rpc.remote_objects import MAKE, Remote
from geartrain.rpc.running import about_to_wait
from geartrain.rpc.server import Server
from geartrain.rpc.tensors.device_map import DeviceMap, of_peer
from geartrain.rpc.tensors.endpoint import CHANNELS, DeviceTensors
from geartrain.rpc.threads import ThreadGroup
from geartrain.transport.codec import native_codec
from geartrain.transport.connection import TRANSPORTS, Listener, MessageLimits, native_listener, options_of
from geartrain.transport.rendezvous import Directory
from geartrain.transport.tls import TLS

#: Longest wait for a sign of the node that has a name already.
_PROBE_S = 5.0


class Node:
    """This process among its peers. `rpc.init` makes the one that the functions of `geartrain.rpc` use.

    Any thread may use it and close it, more than once and beside every other call. `close` returns within a second or
    two; calls that wait end with `ConnectionClosedError`, those of peers to this node with `PeerLostError`, and later
    ones are refused; properties that only tell, and futures that are done, go on. In a forked child it, its clients,
    topics and futures are the parent's: what would communicate raises `ConnectionClosedError`, and `close` releases
    the child's copies alone. At the interpreter's end it is closed.
    """

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
        limits: MessageLimits | None = None,
        spin_us: float = 50.0,
        views: bool = True,
        peer_timeout_s: float = 10.0,
        driver: DeviceRuntime | None = None,
        tls: TLS | Literal[False] | None = None,
    ) -> None:
        """A node that peers can call from now on.

        Names are unique in a store. One that another node has put there goes over to this one only when nobody answers
        at that one's address, and so when it was killed; where its host does not answer at all, end the job instead.
        Under `geartrain launch` a process that was started again has its name back, for the launcher has seen it end.

        Args:
            name: by which peers address it.
            store: rendezvous of names and addresses: anything with `set`, `get` and `check` of torch's c10d stores.
            peers: addresses known without a store.
            secret: the cluster's; needed to listen on anything but loopback.
            pickle: whether objects that the codec does not know go by pickle, between peers with the secret.
            transport: to force one of `transport.TRANSPORTS`; or, for tensors, "cuda_ipc" between GPUs of a host or
                "nixl" for all on GPUs and big ones on the CPU.
            device_map: which GPU of a peer tensors go to: "1_0_0,..." (peer's name or rank, GPU here, GPU there) or
                {peer: {GPU here: GPU there}}; chosen for peers that it does not name (docs/devices.md).
            host, port, advertise, limits, spin_us, views: as for `transport.listen`.
            peer_timeout_s: a peer without heartbeats for so long is lost: its process is stopped, or its host or
                network is gone. Its calls fail with `PeerLostError`, and `on_peer_lost` is called, within a second
                more. A process that was killed is lost at once. 0 for never, or 2 and more.
            timeout_s: for calls that have none of their own, and for joining. Every `timeout_s` of `geartrain.rpc` is
                from 0, which does not wait for what is not there yet, to 1e9 seconds; others (inf, nan, negative ones)
                are `ArgumentError`.
            max_threads: functions that run at once, at most. One that waits for a call of its own, or that was
                cancelled, does not count; an `async def` needs no thread.
            max_running: functions that begin at once: the next one does when one of them returns, has run for 5 ms, or
                waits for a call of its own. Python runs one thread at a time, and every further one that wants to
                slows all down. Give more where functions wait for less than that, for disks, say, or compute
                without the GIL on cores that are free.
            max_open: calls to one peer without a reply; the next one waits for room.
            driver: of other devices than CUDA's.
            tls: certificates, to encrypt all connections over TCP; by default what the environment says. As
                for `transport.listen`; the files are read again for each peer that this node connects to.

        Raises:
            NameTakenError: a node of that name is in the store, and alive or not proven gone.
            ArgumentError: an argument that cannot be used.
        """
        numbers = {"max_threads": max_threads, "max_running": max_running, "max_open": max_open}
        if any(whole_number(what, number, 2**31 - 1) < 1 for what, number in numbers.items()):
            raise ArgumentError(
                f"a node runs at least one function, and has one call open; found max_threads={max_threads}, "
                f"max_running={max_running}, max_open={max_open}"
            )
        check_text("a node's name", name)
        pickle = check_flag("pickle", pickle)
        check_store(store)
        if peers is not None and not isinstance(peers, Mapping):
            raise ArgumentError(f"peers are addresses by name, found {shown(peers)}")
        for peer, address in (peers or {}).items():
            check_text("the name of a peer", peer)
            check_text(f"the address of peer {peer!r}", address)
        self.name, self.pickle, self.timeout_s, self.max_open = name, pickle, timeout(timeout_s), max_open
        self._options = options_of(secret, limits, spin_us, views, peer_timeout_s, tls)
        self.devices = DeviceTensors(device_map, transport, driver, (limits or MessageLimits()).max_segment_bytes)
        self.directory = Directory(store, dict(peers or {}))
        self._codec = native_codec()
        self._clients: dict[str, Client] = {}
        self._watched: dict[int, str] = {}  # number in the server's inbox -> peer
        self._dialling: dict[str, threading.Lock] = {}
        self._lock = threading.RLock()  # a signal's handler may come in between, in the same thread
        self._on_lost: list[Callable[[str, str], object]] = []
        self._lifetime = Lifetime(name)
        options = dict(self._options)
        if transport is not None and self.devices.forced is None:
            check_choice("transport", transport, (*TRANSPORTS, *CHANNELS))
            self._options["transport"] = transport
        listener = Listener(native_listener(options, host, port, advertise))
        self.address = listener.address
        self.topics = Topics(self)
        self._threads = ThreadGroup(name)
        try:
            self.server = Server(
                self,
                name,
                listener,
                self.devices,
                self._threads,
                pickle=pickle,
                timeout_s=timeout_s,
                max_threads=max_threads,
                max_running=max_running,
                max_open=max_open,
                max_queued_bytes=(limits or MessageLimits()).max_queued_bytes,
                spin_us=self._options["spin_us"],
                lost=self._lost,
            )
        except BaseException:
            listener.close()
            self._threads.join(0.5)
            self.devices.close()
            raise
        _nodes.add(self)
        try:
            trace.name_process(name)
            register(self, "node", _figures)
            self.directory.claim(name, self.address, self.why_not_gone)
        except BaseException:
            self.close()
            raise

    def why_not_gone(self, address: str) -> str | None:
        """Why it is not proven that nobody is at a node's address any more; None where it is."""
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
        """The result of a peer's function.

        Args:
            peer: its name.
            function: its name, or a registered function.
            timeout_s: for all of it: finding the peer, the call, the answer; from 0 to 1e9.

        Raises:
            RemoteError: the function raised; it is also of the built-in type that was raised there.
            WaitTimeoutError: no answer in time; the peer cancels the call.
            PeerLostError: the peer died or closed the connection meanwhile. The function may have run or not; with
                `PeerUnreachableError`, which is one, it has not: nobody answered at the peer's address.
            UnknownPeerError: no peer of that name joined in time.
        """
        limit_s = self._limit(timeout_s)
        about_to_wait()
        return self._client(peer, limit_s).call(function, args, kwargs, limit_s)

    def call_async(
        self, peer: str, function: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future:
        """The same as a `Future`; sent when this returns."""
        limit_s = self._limit(timeout_s)
        until_s = time.monotonic() + limit_s
        client = self._client(peer, limit_s)
        return Future(client, client.start(function, args, kwargs, limit_s), until_s)

    def tell(
        self, peer: str, function: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> None:
        """Calls without a reply: returns once it is sent. What the function raises is printed there."""
        limit_s = self._limit(timeout_s)
        self._client(peer, limit_s).tell(function, args, kwargs, limit_s)

    def remote(self, peer: str, cls: str | type, *args: Any, **kwargs: Any) -> Remote:
        """An object of a registered class, made and kept by the peer until closed, or until this node is lost."""
        if not isinstance(cls, (str, type)):
            raise ArgumentError(f"a peer makes objects of a class or of its name, found {shown(cls)}")
        name = cls if isinstance(cls, str) else names.get(cls, cls.__name__)
        return Remote(self, peer, self.call(peer, MAKE, name, args, kwargs))

    def topic(self, name: str, *, history: int = 1, timeout_s: float = 5.0) -> Topic:
        """A new topic of this node's; `publish` sends to its subscribers, the newest `history` values to later ones."""
        self._lifetime.check()
        return self.topics.make(name, history, timeout_s)

    def subscribe(self, peer: str, topic: str, callback: Callable[[int, Any], object]) -> None:
        """Has `callback(number, value)` called for each value of a peer's topic, in order, from a thread of this node.

        The newest values that the topic keeps come first. Subscribe again when the peer was lost and came back.
        """
        self.topics.subscribe(peer, topic, callback)

    def unsubscribe(self, peer: str, topic: str) -> None:
        """The callback is not called any more."""
        self.topics.unsubscribe(peer, topic)

    def client(self, name: str, *, timeout_s: float | None = None) -> Client:
        """The client of a peer, connected if need be: to encode a call once and send it to many. Raises as `call`."""
        return self._client(name, self._limit(timeout_s))

    def hang_up(self, name: str) -> None:
        """Closes the connections with a peer, in both directions; later calls connect again."""
        check_text("a peer's name", name)
        with self._lock:
            client = self._clients.pop(name, None)
        if client is not None:
            client.connection.close()
        self.server.hang_up(name)

    def connected(self, name: str) -> bool:
        """Whether both this node's connection to a peer and one of the peer's to this node are open."""
        client = self._clients.get(check_text("a peer's name", name))
        return client is not None and not client.connection.lost and self.server.has_client(name)

    def on_peer_lost(self, callback: Callable[[str, str], object]) -> None:
        """Calls back with the name of a peer that is lost, and why."""
        check_function("what is called back", callback)
        self._on_lost.append(callback)

    def connections(self) -> dict[str, str]:
        """Per peer that this node calls, the transport of messages and the channels of tensors, for people."""
        return {
            name: "; ".join(filter(None, (client.connection.describe(), client.tensors.describe())))
            for name, client in self._open_clients()
        }

    def considered(self) -> dict[str, list[tuple[str, str]]]:
        """Per peer that this node calls, the faster transports, and why each was not taken."""
        return {name: list(client.connection.considered) for name, client in self._open_clients()}

    def authenticated(self) -> dict[str, bool]:
        """Per peer that this node calls, whether both proved that they know the secret."""
        return {name: client.connection.authenticated for name, client in self._open_clients()}

    def counts(self) -> dict[str, dict[str, Any]]:
        """Per peer that this node calls, messages and bytes by path; `tensors`: bytes by channel."""
        return {
            name: client.connection.counts() | {"tensors": dict(client.tensors.bytes_by_channel)}
            for name, client in self._open_clients()
        }

    def device_map(self, peer: str) -> DeviceMap:
        """Which of its GPUs tensors go to."""
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
        """Until peers of these names have joined. Raises `UnknownPeerError`."""
        limit_s = self._limit(timeout_s)
        until_s = time.monotonic() + limit_s
        for name in names:
            check_text("a peer's name", name)
        for name in names:
            self._lifetime.wait_for(partial(self._address, name, until_s), until_s, f"a peer {name!r}")

    def close(self) -> None:
        """Closes all connections. Functions that still run are left to end."""
        with self._lock:
            if not self._lifetime.end():
                return
            clients = list(self._clients.values())
        self.directory.close()
        if not self._lifetime.forked:
            self.directory.remove(self.name, self.address)
        for client in clients:
            client.connection.close()
            client.tensors.close()
        self.server.close()
        self._threads.join(0.5)
        self.devices.close()
        _nodes.discard(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copies(self, "make another one there, with peers={name: address}")

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- finding peers ----------------------------------------------------------------------------------------------

    def _limit(self, timeout_s: float | None) -> float:
        return self.timeout_s if timeout_s is None else timeout(timeout_s)

    def _client(self, name: str, timeout_s: float) -> Client:
        if self._lifetime.forked:
            self._lifetime.check()
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
        return self._lifetime.wait_for(dial, until_s, f"a connection with {name!r}")

    def _dial(self, name: str, until_s: float, dialling: threading.Lock) -> Client:
        if not dialling.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise WaitTimeoutError(f"{name!r} did not answer another call, which dials it, before this one's deadline")
        try:
            client = self._clients.get(name)
            if client is not None and not client.connection.lost:
                return client
            self._lifetime.check()
            address = self._address(name, until_s)
            try:
                connection = _native.connect(address, self._options, max(0.0, until_s - time.monotonic()))
            except PeerLostError as error:  # it hung up in the handshake
                raise PeerLostError(f"{name!r} is lost: {error}") from None
            except TransportError as error:
                raise PeerUnreachableError(f"{name!r} is lost, or was never there: {error}") from None
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
                    self._lifetime.check()
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
        if name and not self._lifetime.ended:
            for callback in list(self._on_lost):
                try:
                    callback(name, reason)
                except BaseException:  # SystemExit would end this thread, which serves others
                    traceback.print_exc()

    def after_fork(self) -> None:
        """In a forked child: another thread of the parent's may have held any lock."""
        self._lock, self._dialling = threading.RLock(), {}
        self._lifetime.after_fork()
        self.topics.after_fork()
        self.server.after_fork()
        for client in list(self._clients.values()):
            client.after_fork()

    def __repr__(self) -> str:
        return f"<Node {self.name!r} at {self.address}>"


def _figures(node: Node) -> dict[str, Any]:
    """For the process's report. `open`: calls without a reply, of this node to a peer, or of a client to this node."""
    node._lifetime.check()
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
    sessions = node.server.sessions
    return {
        "name": node.name,
        "address": node.address,
        "peers": peers,
        "clients": {session.name: {"open": len(session.running) + len(session.queue)} for session in sessions},
        "backlog": node.server.scheduler.backlog,
    }


# At exit no thread may be in the native layer: Python would end it there, and the process with it.
_nodes: weakref.WeakSet[Node] = weakref.WeakSet()


def _after_fork() -> None:
    for one in list(_nodes):
        one.after_fork()


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _close_all() -> None:
    for one in list(_nodes):
        one.close()
