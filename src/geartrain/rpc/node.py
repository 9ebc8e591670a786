"""A process among its peers: it finds them, calls them, and is called."""

from __future__ import annotations

import atexit
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from geartrain import _native
from geartrain.codec import native_codec
from geartrain.errors import ConnectionClosedError, MessageError
from geartrain.rpc.caller import about_to_wait
from geartrain.rpc.functions import names
from geartrain.rpc.kinds import CALL, HELLO, TELL
from geartrain.rpc.peer import Future, Peer
from geartrain.rpc.rendezvous import Directory
from geartrain.rpc.server import Server
from geartrain.rpc.topic import Topic, Topics
from geartrain.transport import Limits, listen, options_of


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
        self.name, self.pickle, self.timeout_s, self.max_open = name, pickle, timeout_s, max_open
        self._options = options_of(secret, limits, spin_us, True)
        if transport is not None:
            self._options["transport"] = transport
        self.directory = Directory(store, dict(peers or {}))
        self._codec = native_codec()
        self._peers: dict[str, Peer] = {}
        self._watched: dict[int, str] = {}  # number in the server's inbox -> peer
        self._dialling: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()
        self._on_lost: list[Callable[[str, str], object]] = []
        self._closed = False
        self._pid = os.getpid()
        listener = listen(host, secret=secret, advertise=advertise, limits=limits, spin_us=spin_us)
        self.address = listener.address
        self.topics = Topics(self)
        self.server = Server(
            self,
            name,
            listener,
            pickle=pickle,
            timeout_s=timeout_s,
            max_threads=max_threads,
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
        kind, parcel = found.parcel(function, args, kwargs)
        return Future(found, found.calls.start(kind, parcel, False, limit_s), until_s)

    def tell(
        self, peer: str, function: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> None:
        """Calls without wanting an answer: returns once it is sent. What the function raises is printed there."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        found = self._peer(peer, limit_s)
        kind, parcel = found.parcel(function, args, kwargs)
        if kind != CALL:
            raise MessageError("only functions with a name can be told")
        found.connection.send(0, TELL, parcel, limit_s)

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
        if self._pid == os.getpid():
            self.directory.remove(self.name, self.address)
        for peer in peers:
            peer.connection.close()
        self.server.close()
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
                    del self._peers[name]  # who waits for it finds out alone
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
