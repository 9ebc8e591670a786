"""Events between nodes that are linked: shipped to those that asked for them, in order, and never too many at once.

    bus = Bus("node-0", 0, secret=secret)
    bus.hand_to(lambda topic, args, kwargs: ...)
    bus.subscribe("policy")
    bus.link([parse_contact("tcp://10.0.0.1:50515")])
    bus.emit("policy", (tensor,), {})

Each side of a link tells the other its topics, and whenever they change; an event goes to whoever has its topic. The
news travels on the connection that events travel on, so what a node emits after it subscribed is answered by peers
that know.

Every event is acknowledged once it is handled. A sender has a window of events and bytes that are not, for each peer:
when it is full, `emit` waits, and raises at its deadline. So nothing piles up anywhere, and nothing is dropped for want
of room. A peer that is lost takes what was under way to it along; that is logged, and told to `on_change`.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future as Work
from dataclasses import dataclass
from typing import Any

from geartrain.errors import (
    ArgumentError,
    ConnectionClosedError,
    GeartrainError,
    MessageError,
    PeerLostError,
    RemoteError,
    TransportError,
    UnknownPeerError,
    WaitTimeoutError,
)
from geartrain.integrations.di_engine.discovery import Contact
from geartrain.rpc import Caller, Future, Node
from geartrain.rpc.batching import PendingReply
from geartrain.rpc.client import Client
from geartrain.rpc.protocol import CALL
from geartrain.rpc.registry import function
from geartrain.transport.codec import native_codec

_log = logging.getLogger("geartrain.di_engine")

#: Takes an event, and returns what is still to be done for it.
Handler = Callable[[str, tuple[Any, ...], dict[str, Any]], Sequence["Work[Any]"]]

RETRY_S = 0.5
#: Tries at one that had joined the store before, and may have left since.
MOST_FAILURES = 4


@dataclass(frozen=True)
class Window:
    """What may be under way to one peer, emitted and not yet handled there. One event always may."""

    events: int = 128
    nbytes: int = 512 << 20


class Link:
    """A peer that gets events, and those that it has not yet acknowledged."""

    def __init__(self, name: str, node_id: int, window: Window) -> None:
        self.name, self.node_id = name, node_id
        self.version = -1
        self.topics: frozenset[str] = frozenset()
        self.lost = False
        self.lock = threading.Lock()  # of the rest, and of the order in which events leave
        self._window = window
        self._under_way: deque[tuple[Future, int]] = deque()
        self._nbytes = 0
        self._refused = False

    @property
    def under_way(self) -> int:
        """How many events the peer has not acknowledged, as far as is known."""
        return len(self._under_way)

    def has_room(self, nbytes: int) -> bool:
        """Whether one more event fits into the window. Under the lock."""
        while self._under_way and self._under_way[0][0].done():
            self._settle(0.0)
        return not self._under_way or (
            len(self._under_way) < self._window.events and self._nbytes + nbytes <= self._window.nbytes
        )

    def wait_for_room(self, nbytes: int, until_s: float) -> None:
        """Until it does. Under the lock. Raises `WaitTimeoutError`, `PeerLostError`."""
        while not self.has_room(nbytes):
            self._settle(max(0.0, until_s - time.monotonic()))

    def add(self, future: Future, nbytes: int) -> None:
        """An event has left. Under the lock."""
        self._under_way.append((future, nbytes))
        self._nbytes += nbytes

    def _settle(self, timeout_s: float) -> None:
        """Waits for the oldest event's acknowledgement."""
        future, nbytes = self._under_way[0]
        error = future.exception(timeout_s=timeout_s)
        self._under_way.popleft()
        self._nbytes -= nbytes
        if isinstance(error, RemoteError):
            if not self._refused:  # once: whoever no longer handles events refuses them all
                _log.error("node %d could not handle an event: %s", self.node_id, error)
            self._refused = True
        elif error is not None:
            raise error
        else:
            self._refused = False


class Bus:
    """One node's end of it. `link` looks for others; those that look for this one are taken as they come."""

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
        """A node that can be reached from now on.

        Args:
            name: of this run of the node: it must be another one after a restart.
            node_id: DI-engine's number of it, another one for each node.
            secret, host, port, transport, device_map: as for `rpc.Node`, with node ids in the map.
            by_cpu: tensors of GPUs go through the CPU, by pickle, to the device of the same number.
            window: what may be under way to one peer.
            timeout_s: how long `emit` waits for room, and a send for its peer.
            on_change: called with "joined" or "lost", the peer's node id, and words.
        """
        self.name, self.node_id, self.timeout_s = name, node_id, timeout_s
        self._window = window or Window()
        self._by_cpu = by_cpu
        self._on_change = on_change
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._links: dict[str, Link] = {}
        self._early: dict[str, tuple[int, frozenset[str]]] = {}  # topics of peers that are about to be linked
        self._meeting = False  # whom the keeper greets may send events before this side is done
        self._away: set[str] = set()  # who was here, and is looked for in silence
        self._topics: set[str] = set()
        self._version = 0
        self._telling = threading.Lock()
        self._handler: Handler | None = None
        self._handled = threading.Event()
        self._linked = threading.Event()
        self._stopped = False
        self._keeper: threading.Thread | None = None
        self.node = Node(
            name,
            secret=secret,
            host=host,
            port=port,
            transport=transport,
            device_map=device_map,
            timeout_s=timeout_s,
        )
        _buses[self.node] = self
        self.node.on_peer_lost(self._peer_lost)

    @property
    def address(self) -> str:
        """What to give to others."""
        return self.node.address

    @property
    def peers(self) -> dict[int, frozenset[str]]:
        """The topics of the peers that this node is linked with, by node id."""
        with self._lock:
            return {link.node_id: link.topics for link in self._links.values()}

    # --- events -----------------------------------------------------------------------------------------------------

    def hand_to(self, handler: Handler) -> None:
        """Has events handled. They wait for this; it is called from threads of the node's, and must not wait."""
        self._handler = handler
        self._handled.set()

    def emit(self, topic: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Sends an event to all peers that have its topic; how many these are. Its memory may change afterwards.

        Peers with room in their windows get it first, so that a slow one does not hold up the others.

        Raises:
            WaitTimeoutError: a peer has not handled enough of what was sent before; the others have got it.
            MessageError: it holds objects that only pickle can send, and there is no secret, or it is too large.
        """
        until_s = time.monotonic() + self.timeout_s
        if self._keeper is not None and not self._linked.is_set():
            self._linked.wait(self.timeout_s)
        with self._lock:
            links = [link for link in self._links.values() if topic in link.topics]
        payloads: dict[bool, tuple[int, Any]] = {}
        full: list[Link] = []
        sent = sum(self._offer(link, topic, args, kwargs, payloads, full, until_s) for link in links)
        late: BaseException | None = None
        for link in list(full):
            try:
                sent += self._offer(link, topic, args, kwargs, payloads, None, until_s)
            except WaitTimeoutError as error:
                late = error
        if late is not None:
            raise late
        return sent

    def _offer(
        self,
        link: Link,
        topic: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        payloads: dict[bool, tuple[int, Any]],
        full: list[Link] | None,
        until_s: float,
    ) -> bool:
        """Sends an event to one peer, unless that is lost; with `full`, adds the peer there rather than wait."""
        left_s = max(0.0, until_s - time.monotonic())
        if not link.lock.acquire(timeout=0.0 if full is not None else left_s):
            if full is None:
                raise _no_room(link, self.timeout_s)
            full.append(link)
            return False
        try:
            peer = self.node.client(link.name, timeout_s=left_s)
            kind, payload = payloads.get(peer.pickle, (0, None))
            if payload is None:
                kind, payload = _question(peer, (topic, args, kwargs), self._by_cpu, left_s)
                if kind == CALL:  # else tensors went to this peer beside it
                    payloads[peer.pickle] = kind, payload
            if full is None:
                link.wait_for_room(payload.nbytes, until_s)
            elif not link.has_room(payload.nbytes):
                full.append(link)
                return False
            tag = peer.calls.start(kind, payload, False, max(0.0, until_s - time.monotonic()))
            link.add(Future(peer, tag, float("inf")), payload.nbytes)
            return True
        except WaitTimeoutError:
            raise _no_room(link, self.timeout_s) from None
        except (PeerLostError, ConnectionClosedError, TransportError, UnknownPeerError) as error:
            self._drop(link, str(error))
            return False
        finally:
            link.lock.release()

    def _take(self, name: str, topic: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingReply | None:
        """An event has come. Acknowledged once all that it asks for is done."""
        if name not in self._links:
            with self._changed:  # who answers it must find its sender
                self._changed.wait_for(lambda: name in self._links or not self._meeting, self.timeout_s)
        if not self._handled.wait(self.timeout_s) or self._handler is None:
            raise WaitTimeoutError(f"node {self.node_id} has not begun to handle events within {self.timeout_s:g} s")
        work = self._handler(topic, args, kwargs)
        if not work:
            return None
        pending, left = PendingReply(), len(work)
        lock = threading.Lock()

        def done(_: Work[Any]) -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                pending.complete()

        for one in work:
            one.add_done_callback(done)
        return pending

    # --- topics -----------------------------------------------------------------------------------------------------

    def subscribe(self, topic: str) -> None:
        """Has events of this topic sent here from now on."""
        self._change_topics({topic}, set())

    def unsubscribe(self, topics: Iterable[str]) -> None:
        """No longer."""
        self._change_topics(set(), set(topics))

    @property
    def topics(self) -> frozenset[str]:
        """Those that this node has subscribed to."""
        with self._lock:
            return frozenset(self._topics)

    def _change_topics(self, more: set[str], fewer: set[str]) -> None:
        with self._telling:  # so that peers hear of it in the order in which it happens
            with self._lock:
                changed = (self._topics | more) - fewer
                if changed == self._topics:
                    return
                self._topics, self._version = changed, self._version + 1
                version, topics, links = self._version, sorted(changed), list(self._links.values())
            for link in links:
                try:
                    self.node.tell(link.name, _TOPICS, version, topics, timeout_s=self.timeout_s)
                except GeartrainError as error:
                    self._drop(link, f"it did not take the news of topics: {error}")

    def _set_topics(self, name: str, version: int, topics: Iterable[str]) -> None:
        with self._lock:
            link = self._links.get(name)
            if link is None:
                if version > self._early.get(name, (-1, frozenset()))[0]:
                    self._early[name] = version, frozenset(topics)
            elif version > link.version:
                link.version, link.topics = version, frozenset(topics)

    # --- links ------------------------------------------------------------------------------------------------------

    def link(self, contacts: Sequence[Contact]) -> None:
        """Looks for these nodes, and again for those that are not there yet or are lost, until `close`.

        Returns when each has been tried once; `emit` waits for that as well.
        """
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, args=(list(contacts),), name="geartrain links")
            self._keeper.daemon = True
            self._keeper.start()
        self._linked.wait(self.timeout_s)

    def _keep(self, contacts: list[Contact]) -> None:
        while True:
            for contact in list(contacts):
                if self._stopped:
                    return
                with self._lock:
                    linked = contact.name in self._links or contact.name == self.name
                if not linked and not self._meet(contact):
                    contact.failures += 1
                    if contact.seen and contact.failures >= MOST_FAILURES:
                        contacts.remove(contact)  # it has left; should it come back, it looks for this one
            self._linked.set()
            with self._changed:
                if self._stopped:
                    return
                missing = any(contact.name not in self._links for contact in contacts if contact.name != self.name)
                self._changed.wait(RETRY_S if missing else None)

    def _meet(self, contact: Contact) -> bool:
        """Tries to link with whoever is there."""
        seed = f"at {contact.text}"
        self._meeting = True
        try:
            address = contact.address()
            if address is None:
                return False
            self.node.directory.known[seed] = address
            with self._lock:
                version, topics = self._version, sorted(self._topics)
            mine = (self.node_id, self.address, version, topics)
            name, node_id, address, version, topics = self.node.call(seed, _JOIN, self.name, *mine, timeout_s=5.0)
            contact.name = name
            if name != self.name:
                self._know(name, node_id, address)
                self.node.call(name, _PING, timeout_s=5.0)  # so that it knows this connection before the other ends
                self._add(name, node_id, version, topics)
            return True
        except (GeartrainError, RuntimeError) as error:  # RuntimeError: of a store that is gone
            if contact.failures == 0 and not self._stopped and contact.name not in self._away:
                _log.warning("node %d does not reach %s, and tries again: %s", self.node_id, contact.text, error)
            return False
        finally:
            with self._changed:
                self._meeting = False
                self._changed.notify_all()
            self.node.hang_up(seed)

    def _joined(self, name: str, node_id: int, address: str, version: int, topics: Sequence[str]) -> Any:
        """A peer that looked for this node. Dials it back, so that it hears at once if that does not work."""
        if name != self.name:
            self._check_node_id(name, node_id)
            self._know(name, node_id, address)
            try:
                self.node.client(name, timeout_s=4.0)
            except GeartrainError as error:
                raise TransportError(f"node {self.node_id} does not reach node {node_id} back: {error}") from None
            self._add(name, node_id, version, topics)
        with self._lock:
            return self.name, self.node_id, self.address, self._version, sorted(self._topics)

    def _know(self, name: str, node_id: int, address: str) -> None:
        known = self.node.directory.known
        known[name] = address
        known[f"rank/{node_id}"] = name  # what device maps call it

    def _check_node_id(self, name: str, node_id: int) -> None:
        with self._lock:
            others = [link for link in self._links.values() if link.node_id == node_id and link.name != name]
        for other in others:
            try:  # it may be what was there before a restart, and its end not yet noticed
                self.node.call(other.name, _PING, timeout_s=1.0)
            except GeartrainError as error:
                self._drop(other, f"it was replaced: {error}")
                continue
            raise ArgumentError(f"two nodes have the id {node_id}; give each another one with --node-ids")
        if node_id == self.node_id:
            raise ArgumentError(f"two nodes have the id {node_id}; give each another one with --node-ids")

    def _add(self, name: str, node_id: int, version: int, topics: Iterable[str]) -> None:
        with self._lock:
            link = self._links.get(name)
            new = link is None
            if link is None:
                link = self._links[name] = Link(name, node_id, self._window)
                link.version, link.topics = self._early.pop(name, (-1, frozenset()))
            if version > link.version:
                link.version, link.topics = version, frozenset(topics)
            behind = self._version, sorted(self._topics)
        if new:
            _log.info("node %d is linked with node %d over %s", self.node_id, node_id, self._way(name))
            self._tell_change("joined", node_id, "")
            # What changed here while the two greeted each other.
            try:
                self.node.tell(name, _TOPICS, *behind, timeout_s=self.timeout_s)
            except GeartrainError as error:
                self._drop(link, str(error))

    def _way(self, name: str) -> str:
        return self.node.connections().get(name, "no connection")

    def _peer_lost(self, name: str, reason: str) -> None:
        with self._lock:
            link = self._links.get(name)
        if link is not None and not self.node.connected(name):  # the connection of the greeting ends as well
            self._drop(link, reason)

    def _drop(self, link: Link, reason: str, left: bool = False) -> None:
        with self._changed:
            if self._stopped or self._links.get(link.name) is not link:
                return
            del self._links[link.name]
            self._away.add(link.name)
            link.lost = True
            self._changed.notify_all()
        self.node.hang_up(link.name)
        if left:
            _log.info("node %d has left", link.node_id)
        else:
            _log.warning(
                "node %d is lost, and with it what it had not handled of %d events: %s",
                link.node_id,
                link.under_way,
                reason,
            )
        self._tell_change("lost", link.node_id, reason)

    def _left(self, name: str) -> None:
        with self._lock:
            link = self._links.get(name)
        if link is not None:
            self._drop(link, "it has left", left=True)

    def _tell_change(self, what: str, node_id: int, reason: str) -> None:
        if self._on_change is not None:
            try:
                self._on_change(what, node_id, reason)
            except Exception:
                _log.exception("a callback of node %d raised", self.node_id)

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leaves: says so, and hangs up. What was sent is still delivered. Does not wait for anybody."""
        with self._changed:
            if self._stopped:
                return
            self._stopped = True
            links, self._links = list(self._links.values()), {}
            self._changed.notify_all()
        self._linked.set()
        self._handled.set()
        for link in links:
            try:
                self.node.tell(link.name, _LEAVE, timeout_s=0.2)
            except GeartrainError:
                continue
        self.node.close()
        if self._keeper is not None and self._keeper is not threading.current_thread():
            self._keeper.join(timeout=1.0)


#: What encoding raises: the codec, or a pickler.
_UNSENDABLE = (MessageError, pickle.PicklingError, AttributeError, TypeError)


def _question(peer: Client, value: tuple[Any, ...], by_cpu: bool, timeout_s: float) -> tuple[int, Any]:
    """An event as a call without a deadline, since its listeners may take long: kind and payload."""
    try:
        if by_cpu:
            return CALL, native_codec().encode((_EVENT, value, {}), peer.pickle)
        return peer.encode_call(_EVENT, value, {}, timeout_s)
    except _UNSENDABLE as error:
        if not peer.pickle:
            raise MessageError(f"an event of topic {value[0]!r} cannot be sent: {error}") from None
        # A GPU's tensor that is to go through the CPU, or in an object: as DI-engine sends all, by torch's own pickle.
        topic, args, kwargs = value
        try:
            whole = (topic, _Pickled(args), _Pickled(kwargs))
            return CALL, native_codec().encode((_EVENT, whole, {}), True)
        except _UNSENDABLE as hopeless:
            raise MessageError(f"an event of topic {topic!r} cannot be sent: {error}; {hopeless}") from None


class _Pickled:
    """A value that goes by pickle as a whole. It arrives as the value."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (pickle.dumps(self._value, protocol=5),)


def _no_room(link: Link, timeout_s: float) -> WaitTimeoutError:
    return WaitTimeoutError(
        f"node {link.node_id} does not keep up: it has not handled {link.under_way} events that were sent to it, and "
        f"took no other within {timeout_s:g} s"
    )


# --- what peers may ask ---------------------------------------------------------------------------------------------

_EVENT, _JOIN, _TOPICS, _LEAVE, _PING = (
    f"geartrain.di_engine.{what}" for what in ("event", "join", "topics", "leave", "ping")
)
_buses: weakref.WeakKeyDictionary[Node, Bus] = weakref.WeakKeyDictionary()


def _bus(caller: Caller) -> Bus:
    bus = _buses.get(caller.node)
    if bus is None:
        raise LookupError(f"{caller.node.name!r} is no node of DI-engine's")
    return bus


def _event(caller: Caller, topic: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingReply | None:
    return _bus(caller)._take(caller.name, topic, args, kwargs)


def _join(caller: Caller, *about: Any) -> Any:
    return _bus(caller)._joined(*about)


def _topics(caller: Caller, version: int, topics: Sequence[str]) -> None:
    _bus(caller)._set_topics(caller.name, version, topics)


def _leave(caller: Caller) -> None:
    _bus(caller)._left(caller.name)


def _ping(caller: Caller) -> int:
    return _bus(caller).node_id


_ANSWERS: dict[str, Callable[..., Any]] = {
    _EVENT: _event,
    _JOIN: _join,
    _TOPICS: _topics,
    _LEAVE: _leave,
    _PING: _ping,
}
for _name, _answer in _ANSWERS.items():
    function(name=_name, with_caller=True)(_answer)
