"""Membership of an event bus: connects to contacts, accepts peers, exchanges topics, and detects peers that leave."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from geartrain.core.threads import DaemonThread, ReentrantEvent
from geartrain.errors import ArgumentError, GeartrainError, TransportError
from geartrain.integrations.di_engine.discovery import Contact
from geartrain.integrations.di_engine.peer_queue import PeerQueue, Window
from geartrain.rpc import Node

_log = logging.getLogger("geartrain.di_engine")

#: Names of the functions that peers call.
JOIN, TOPICS, LEAVE, PING = (f"geartrain.di_engine.{what}" for what in ("join", "topics", "leave", "ping"))
#: Pause between attempts to connect to contacts.
RETRY_S = 0.5
#: Attempts for a contact that had joined the store before, and may have left since.
MAX_ATTEMPTS = 4


class Membership:
    """The peers of one node, connected both ways.

    Args:
        node: the `geartrain.rpc` node. Its name is the bus's name.
        node_id: DI-engine's number of the node.
        window: limit of each peer's queue.
        timeout_s: longest wait to send a change of topics.
        on_change: called with "joined" or "lost", the peer's node id, and a reason.
    """

    def __init__(
        self,
        node: Node,
        node_id: int,
        window: Window,
        timeout_s: float,
        on_change: Callable[[str, int, str], object] | None,
    ) -> None:
        self.node, self.name, self.node_id, self.timeout_s = node, node.name, node_id, timeout_s
        self._window = window
        self._on_change = on_change
        self._make_locks()
        self._peers: dict[str, PeerQueue] = {}
        self._early: dict[str, tuple[int, frozenset[str]]] = {}  # topics of peers that are about to be added
        self._joining = False  # a contact may send events before this side has added it
        self._lost: set[str] = set()  # peers that are looked for again, without a warning
        self._topics: set[str] = set()
        self._version = 0
        self._stopped = False
        self._thread: threading.Thread | None = None
        node.on_peer_lost(self._peer_lost)

    def _make_locks(self) -> None:
        # A signal's handler may come in between, in the same thread, and close.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._sending_topics = threading.RLock()
        self._connected = ReentrantEvent()

    def after_fork(self) -> None:
        """In a forked child, where a thread of the parent may have held any lock: the links are the parent's."""
        self._make_locks()
        self._connected.set()
        self._peers, self._thread, self._stopped = {}, None, True

    # --- peers --------------------------------------------------------------------------------------------------

    def peers(self) -> list[PeerQueue]:
        """The present peers."""
        with self._lock:
            return list(self._peers.values())

    def wait_for(self, name: str) -> None:
        """Waits while a contact that may have this name is joined: a reply to its event must find it."""
        if name not in self._peers:
            with self._lock:
                self._changed.wait_for(lambda: name in self._peers or not self._joining, self.timeout_s)

    def wait_connected(self) -> None:
        """Waits until each contact was tried once."""
        if self._thread is not None and not self._connected.is_set():
            self._connected.wait(self.timeout_s)

    def drop(self, peer: PeerQueue, reason: str, left: bool = False) -> None:
        """Removes a peer that is lost, or has `left`."""
        with self._lock:
            if self._stopped or self._peers.get(peer.name) is not peer:
                return
            del self._peers[peer.name]
            self._lost.add(peer.name)
            self._changed.notify_all()
        self.node.hang_up(peer.name)
        if left:
            _log.info("node %d has left", peer.node_id)
        else:
            _log.warning(
                "node %d is lost, with up to %d events that it had not handled: %s",
                peer.node_id,
                peer.in_flight,
                reason,
            )
        self._notify("lost", peer.node_id, reason)

    # --- topics -------------------------------------------------------------------------------------------------

    @property
    def topics(self) -> frozenset[str]:
        """Topics that this node subscribes to."""
        with self._lock:
            return frozenset(self._topics)

    def change_topics(self, more: set[str], fewer: set[str]) -> None:
        """Changes this node's topics, and sends them to all peers."""
        with self._sending_topics:  # so that peers get changes in their order
            with self._lock:
                changed = (self._topics | more) - fewer
                if changed == self._topics:
                    return
                self._topics, self._version = changed, self._version + 1
                version, topics, peers = self._version, sorted(changed), list(self._peers.values())
            for peer in peers:
                try:
                    self.node.tell(peer.name, TOPICS, version, topics, timeout_s=self.timeout_s)
                except GeartrainError as error:
                    self.drop(peer, f"it did not take a change of topics: {error}")

    def set_peer_topics(self, name: str, version: int, topics: Iterable[str]) -> None:
        """A peer has changed its topics."""
        with self._lock:
            peer = self._peers.get(name)
            if peer is None:
                if version > self._early.get(name, (-1, frozenset()))[0]:
                    self._early[name] = version, frozenset(topics)
            elif version > peer.version:
                peer.version, peer.topics = version, frozenset(topics)

    # --- joining ------------------------------------------------------------------------------------------------

    def connect(self, contacts: Sequence[Contact]) -> None:
        """Joins these nodes, and retries those that do not exist yet or are lost, until `close`.

        Returns when each was tried once.
        """
        if self._thread is None:
            thread = DaemonThread(self._keep_connected, "geartrain links", (list(contacts),))
            thread.start()
            self._thread = thread
        self._connected.wait(self.timeout_s)

    def _keep_connected(self, contacts: list[Contact]) -> None:
        while True:
            for contact in list(contacts):
                if self._stopped:
                    return
                with self._lock:
                    present = contact.name in self._peers or contact.name == self.name
                if not present and not self._join(contact):
                    contact.failures += 1
                    if contact.seen and contact.failures >= MAX_ATTEMPTS:
                        contacts.remove(contact)  # it has left; if it is started again, it joins this node
            self._connected.set()
            with self._lock:
                if self._stopped:
                    return
                missing = any(contact.name not in self._peers for contact in contacts if contact.name != self.name)
                self._changed.wait(RETRY_S if missing else None)

    def _join(self, contact: Contact) -> bool:
        """Tries to join the node at a contact."""
        seed = f"at {contact.text}"
        self._joining = True
        try:
            address = contact.address()
            if address is None:
                return False
            self.node.directory.known[seed] = address
            with self._lock:
                version, topics = self._version, sorted(self._topics)
            mine = (self.node_id, self.node.address, version, topics)
            name, node_id, address, version, topics = self.node.call(seed, JOIN, self.name, *mine, timeout_s=5.0)
            contact.name = name
            if name != self.name:
                self._register(name, node_id, address)
                self.node.call(name, PING, timeout_s=5.0)  # so that it knows this connection before the seed's ends
                self._add(name, node_id, version, topics)
            return True
        except (GeartrainError, RuntimeError) as error:  # RuntimeError: of a store that is gone
            if contact.failures == 0 and not self._stopped and contact.name not in self._lost:
                _log.warning("node %d cannot reach %s, and retries: %s", self.node_id, contact.text, error)
            return False
        finally:
            with self._lock:
                self._joining = False
                self._changed.notify_all()
            self.node.hang_up(seed)

    def accept(self, name: str, node_id: int, address: str, version: int, topics: Sequence[str]) -> Any:
        """Adds a peer that joins this node. Dials it back, so that it gets an error at once if that fails."""
        if name != self.name:
            self._check_node_id(name, node_id)
            self._register(name, node_id, address)
            try:
                self.node.client(name, timeout_s=4.0)
            except GeartrainError as error:
                raise TransportError(f"node {self.node_id} cannot reach node {node_id} back: {error}") from None
            self._add(name, node_id, version, topics)
        with self._lock:
            return self.name, self.node_id, self.node.address, self._version, sorted(self._topics)

    def _register(self, name: str, node_id: int, address: str) -> None:
        known = self.node.directory.known
        known[name] = address
        known[f"rank/{node_id}"] = name  # its name in device maps

    def _check_node_id(self, name: str, node_id: int) -> None:
        with self._lock:
            others = [peer for peer in self._peers.values() if peer.node_id == node_id and peer.name != name]
        for other in others:
            try:  # it may be the peer before a restart, whose end was not noticed yet
                self.node.call(other.name, PING, timeout_s=1.0)
            except GeartrainError as error:
                self.drop(other, f"it was replaced: {error}")
                continue
            raise ArgumentError(f"two nodes have the id {node_id}; give each another one with --node-ids")
        if node_id == self.node_id:
            raise ArgumentError(f"two nodes have the id {node_id}; give each another one with --node-ids")

    def _add(self, name: str, node_id: int, version: int, topics: Iterable[str]) -> None:
        with self._lock:
            peer = self._peers.get(name)
            new = peer is None
            if peer is None:
                peer = self._peers[name] = PeerQueue(name, node_id, self._window)
                peer.version, peer.topics = self._early.pop(name, (-1, frozenset()))
            if version > peer.version:
                peer.version, peer.topics = version, frozenset(topics)
            own = self._version, sorted(self._topics)
        if new:
            path = self.node.connections().get(name, "no connection")
            _log.info("node %d is linked with node %d over %s", self.node_id, node_id, path)
            self._notify("joined", node_id, "")
            # Topics that have changed during the join.
            try:
                self.node.tell(name, TOPICS, *own, timeout_s=self.timeout_s)
            except GeartrainError as error:
                self.drop(peer, str(error))

    # --- leaving ------------------------------------------------------------------------------------------------

    def _peer_lost(self, name: str, reason: str) -> None:
        with self._lock:
            peer = self._peers.get(name)
        if peer is not None and not self.node.connected(name):  # the seed's connection ends, too
            self.drop(peer, reason)

    def peer_left(self, name: str) -> None:
        """A peer closes its bus."""
        with self._lock:
            peer = self._peers.get(name)
        if peer is not None:
            self.drop(peer, "it has left", left=True)

    def _notify(self, what: str, node_id: int, reason: str) -> None:
        if self._on_change is not None:
            try:
                self._on_change(what, node_id, reason)
            except Exception:
                _log.exception("a callback of node %d raised", self.node_id)

    def close(self) -> bool:
        """Leaves all peers; False if it was closed before. Does not wait for replies."""
        with self._lock:
            if self._stopped:
                return False
            self._stopped = True
            peers, self._peers = list(self._peers.values()), {}
            self._changed.notify_all()
        self._connected.set()
        for peer in peers:
            try:
                self.node.tell(peer.name, LEAVE, timeout_s=0.2)
            except GeartrainError:
                continue
        return True

    def join_thread(self) -> None:
        """Waits for the thread of `connect`, after the node was closed."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)


__all__ = ["JOIN", "LEAVE", "MAX_ATTEMPTS", "PING", "RETRY_S", "TOPICS", "Membership"]
