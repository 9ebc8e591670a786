"""Event bus between nodes: publish and subscribe by topic, in order, with flow control and acknowledgements.

    bus = Bus("node-0", 0, secret=secret)
    bus.set_handler(lambda topic, args, kwargs: ...)
    bus.subscribe("policy")
    bus.connect([parse_contact("tcp://10.0.0.1:50515")])
    bus.emit("policy", (tensor,), {})

Each side of a link tells the other its topics, and every change of them. An event goes to the peers that subscribe to
its topic. Subscription changes travel on the same connection as events. So a peer that replies to an event knows the
sender's earlier subscriptions.

A peer acknowledges every event after handling it. For each peer, a sender has a window of unacknowledged events and
bytes. While the window is full, `emit` blocks, and at its deadline it raises. So queues are bounded, and a full queue
never drops an event. If a peer is lost, the events in flight to it are lost too. The bus logs that and calls
`on_change`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future as Work
from typing import Any

from geartrain.core.lifetime import Uncopied, living
from geartrain.core.threads import ReentrantEvent, held
from geartrain.errors import (
    ConnectionClosedError,
    PeerLostError,
    TransportError,
    UnknownPeerError,
    WaitTimeoutError,
)
from geartrain.integrations.di_engine.discovery import Contact
from geartrain.integrations.di_engine.membership import JOIN, LEAVE, PING, TOPICS, Membership
from geartrain.integrations.di_engine.peer_queue import EVENT, PeerQueue, Window, encode_event
from geartrain.rpc import Caller, Future, Node
from geartrain.rpc.protocol import CALL
from geartrain.rpc.registry import function

#: Takes an event, and returns the work that it has started.
Handler = Callable[[str, tuple[Any, ...], dict[str, Any]], Sequence["Work[Any]"]]


class Bus(Uncopied, elsewhere="make another one there, which connects to this one"):
    """One node of the bus. `connect` joins others; nodes that join this one are accepted at any time.

    Any thread may use and close it. In a forked child it behaves like a closed bus and emits to nobody.
    """

    def __init__(
        self,
        name: str,
        node_id: int,
        *,
        secret: bytes = b"",
        host: str = "127.0.0.1",
        port: int = 0,
        transport: str | None = None,
        device_map: str | None = None,
        by_cpu: bool = False,
        window: Window | None = None,
        timeout_s: float = 60.0,
        on_change: Callable[[str, int, str], object] | None = None,
    ) -> None:
        """Starts a node that others can join.

        Args:
            name: of this run of the node: it must be another one after a restart.
            node_id: DI-engine's number of it, unique.
            secret, host, port, transport, device_map: as for `rpc.Node`, with node ids in the map.
            by_cpu: tensors of GPUs go through the CPU, by pickle, to the device of the same number.
            window: of events in flight to one peer.
            timeout_s: how long `emit` waits for room, and a send for its peer.
            on_change: called with "joined" or "lost", the peer's node id, and a reason.
        """
        self.name, self.node_id, self.timeout_s = name, node_id, timeout_s
        self._by_cpu = by_cpu
        self._handler: Handler | None = None
        self._has_handler = ReentrantEvent()
        self.node = Node(
            name,
            secret=secret,
            host=host,
            port=port,
            transport=transport,
            device_map=device_map,
            timeout_s=timeout_s,
        )
        self.members = Membership(self.node, node_id, window or Window(), timeout_s, on_change)
        _buses[self.node] = self
        _made.add(self)

    @property
    def address(self) -> str:
        """Address for contacts of other nodes."""
        return self.node.address

    @property
    def peers(self) -> dict[int, frozenset[str]]:
        """Topics of the peers, by node id."""
        return {peer.node_id: peer.topics for peer in self.members.peers()}

    def connect(self, contacts: Sequence[Contact]) -> None:
        """Joins these nodes, and retries those that do not exist yet or are lost, until `close`.

        Returns when each was tried once; `emit` waits for that as well.
        """
        self.members.connect(contacts)

    def close(self) -> None:
        """Leaves all peers. What was sent is still delivered. Does not wait for replies."""
        if self.members.close():
            self._has_handler.set()
            self.node.close()
            self.members.join_thread()
            _buses.pop(self.node, None)

    # --- topics -----------------------------------------------------------------------------------------------------

    def subscribe(self, topic: str) -> None:
        """Subscribes this node to a topic."""
        self.members.change_topics({topic}, set())

    def unsubscribe(self, topics: Iterable[str]) -> None:
        """Ends subscriptions."""
        self.members.change_topics(set(), set(topics))

    @property
    def topics(self) -> frozenset[str]:
        """Topics that this node subscribes to."""
        return self.members.topics

    # --- events -----------------------------------------------------------------------------------------------------

    def set_handler(self, handler: Handler) -> None:
        """Sets the handler of events, which wait for it. It runs on threads of the node, and must not block."""
        self._handler = handler
        self._has_handler.set()

    def emit(self, topic: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Sends an event to all peers that subscribe to its topic; returns their number. Its memory may change then.

        Peers with room in their windows get it first, so that a slow one does not block the others.

        Raises:
            WaitTimeoutError: the window of a peer was full until the deadline; the others have got the event.
            MessageError: it holds objects that only pickle can send, and there is no secret, or it is too large.
        """
        until_s = time.monotonic() + self.timeout_s
        self.members.wait_connected()
        peers = [peer for peer in self.members.peers() if topic in peer.topics]
        encoded: dict[bool, tuple[int, Any]] = {}
        full: list[PeerQueue] = []
        sent = sum(self._offer(peer, topic, args, kwargs, encoded, full, until_s) for peer in peers)
        late: BaseException | None = None
        for peer in list(full):
            try:
                sent += self._offer(peer, topic, args, kwargs, encoded, None, until_s)
            except WaitTimeoutError as error:
                late = error
        if late is not None:
            raise late
        return sent

    def _offer(
        self,
        queue: PeerQueue,
        topic: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        encoded: dict[bool, tuple[int, Any]],
        full: list[PeerQueue] | None,
        until_s: float,
    ) -> bool:
        """Sends an event to one peer, unless that is lost; with `full`, adds the peer there rather than wait."""
        left_s = max(0.0, until_s - time.monotonic())
        with held(queue.lock, 0.0 if full is not None else left_s) as mine:
            if not mine:
                if full is None:
                    raise queue.timeout(self.timeout_s)
                full.append(queue)
                return False
            try:
                peer = self.node.client(queue.name, timeout_s=left_s)
                kind, payload = encoded.get(peer.pickle, (0, None))
                if payload is None:
                    kind, payload = encode_event(peer, (topic, args, kwargs), self._by_cpu, left_s)
                    if kind == CALL:  # else tensors went to this peer out of band
                        encoded[peer.pickle] = kind, payload
                if full is None:
                    queue.wait_for_room(payload.nbytes, until_s)
                elif not queue.has_room(payload.nbytes):
                    full.append(queue)
                    return False
                tag = peer.calls.start(kind, payload, peer.tensors, until_s)
                queue.add(Future(peer, tag, float("inf")), payload.nbytes)
                return True
            except WaitTimeoutError:
                raise queue.timeout(self.timeout_s) from None
            except (PeerLostError, ConnectionClosedError, TransportError, UnknownPeerError) as error:
                self.members.drop(queue, str(error))
                return False

    def receive(self, name: str, topic: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work[None] | None:
        """Handles an event of a peer; acknowledged once all work for it is done."""
        self.members.wait_for(name)
        if not self._has_handler.wait(self.timeout_s) or self._handler is None:
            raise WaitTimeoutError(f"node {self.node_id} has no handler of events after {self.timeout_s:g} s")
        work = self._handler(topic, args, kwargs)
        if not work:
            return None
        finished, left = Work[None](), len(work)
        finished.set_running_or_notify_cancel()  # the work goes on when the peer is lost
        lock = threading.Lock()

        def done(_: Work[Any]) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                finished.set_result(None)

        for one in work:
            one.add_done_callback(done)
        return finished


# --- functions that peers call --------------------------------------------------------------------------------------

_buses: dict[Node, Bus] = {}  # until they are closed
_made: weakref.WeakSet[Bus] = living(after_fork=lambda bus: bus.members.after_fork())


def _bus(caller: Caller) -> Bus:
    bus = _buses.get(caller.node)
    if bus is None:
        raise LookupError(f"{caller.node.name!r} is no node of DI-engine's")
    return bus


def _event(caller: Caller, topic: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Work[None] | None:
    return _bus(caller).receive(caller.name, topic, args, kwargs)


def _join(caller: Caller, *about: Any) -> Any:
    return _bus(caller).members.accept(*about)


def _topics(caller: Caller, version: int, topics: Sequence[str]) -> None:
    _bus(caller).members.set_peer_topics(caller.name, version, topics)


def _leave(caller: Caller) -> None:
    _bus(caller).members.peer_left(caller.name)


def _ping(caller: Caller) -> int:
    return _bus(caller).node_id


for _name, _function in ((EVENT, _event), (JOIN, _join), (TOPICS, _topics), (LEAVE, _leave), (PING, _ping)):
    function(name=_name, with_caller=True)(_function)

__all__ = ["Bus", "Handler"]
