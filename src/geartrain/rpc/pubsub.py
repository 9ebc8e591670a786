"""Publish and subscribe: topics that this node publishes, and callbacks for topics of its peers."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from geartrain.core.arguments import (
    check_function,
    check_text,
    check_whole,
    did_you_mean,
    timeout,
)
from geartrain.core.lifetime import Uncopied
from geartrain.errors import ArgumentError, GeartrainError
from geartrain.rpc.registry import function
from geartrain.transport.rendezvous import Directory

if TYPE_CHECKING:
    from geartrain.rpc.session import ServerSession

_log = logging.getLogger(__name__)

SUBSCRIBE, UNSUBSCRIBE, DELIVER = (f"geartrain.rpc.{name}" for name in ("subscribe", "unsubscribe", "deliver"))


class Publishes(Protocol):
    """The part of a node that topics use."""

    name: str
    address: str
    directory: Directory
    topics: Topics

    def call(self, peer: str, function: str, /, *args: Any) -> Any:
        """The result of a peer's function."""

    def tell(self, peer: str, function: str, /, *args: Any, timeout_s: float | None = None) -> None:
        """A call without a reply."""


class Topic(Uncopied, elsewhere="make another one there, with node.topic(...)"):
    """A named sequence of values that this node publishes, numbered from 0. `Node.topic` opens one.

    Each subscriber gets every value as one message, in order. A new subscriber first gets the newest `history` values.
    A subscriber that is lost, or accepts nothing for `timeout_s`, is removed. Any thread and any signal handler may
    publish. On a closed node, or in a forked child, a published value reaches nobody.

    Args:
        node, name, history, timeout_s: as for `Node.topic`, which makes the object.

    Examples:
        >>> import queue
        >>> from geartrain import rpc
        >>> learner = rpc.Node("learner")
        >>> topic = learner.topic("versions")  # a Topic
        >>> worker = rpc.Node("worker", peers={"learner": learner.address})
        >>> received = queue.Queue()
        >>> worker.subscribe("learner", "versions", lambda number, value: received.put((number, value)))
        >>> topic.publish(7)
        0
        >>> received.get(timeout=10)
        (0, 7)
        >>> worker.close(); learner.close()
    """

    def __init__(self, node: Publishes, name: str, history: int = 1, timeout_s: float = 5.0) -> None:
        history = check_whole("history", history, 0, 2**31 - 1)
        self.name = check_text("a topic's name", name)
        self._node = node
        self._timeout_s = timeout(timeout_s)
        self._lock = threading.RLock()  # a signal's handler may come in between, in the same thread
        self._subscribers: dict[str, str] = {}  # name -> token of its subscription
        self._newest: deque[tuple[int, Any]] = deque(maxlen=history)
        self._numbers = itertools.count()
        self._unsent: dict[int, Any] = {}
        self._publishing = False

    @property
    def subscribers(self) -> list[str]:
        """Names of the nodes that get the next value."""
        with self._lock:
            return sorted(self._subscribers)

    def publish(self, value: Any) -> int:
        """Sends a value to all subscribers; returns its number.

        Args:
            value: the value. Do not change it while it is in the history.
        """
        with self._lock:
            within, self._publishing = self._publishing, True
            try:
                number = next(self._numbers)
                self._unsent[number] = value
                while self._unsent and not within:
                    self._publishing = True
                    first = min(self._unsent)
                    self._send_to_all(first, self._unsent.pop(first))
                    if not self._unsent:
                        self._publishing = False  # from here on a handler sends by itself
            finally:
                self._publishing = within
        return number

    def _send_to_all(self, number: int, value: Any) -> None:
        self._newest.append((number, value))
        for subscriber in sorted(self._subscribers):
            self._send(subscriber, number, value)

    def _send(self, subscriber: str, number: int, value: Any) -> None:
        try:
            self._node.tell(
                subscriber,
                DELIVER,
                self._node.name,
                self.name,
                number,
                value,
                self._subscribers[subscriber],
                timeout_s=self._timeout_s,
            )
        except GeartrainError as error:
            self._subscribers.pop(subscriber, None)
            _log.warning("%r is unsubscribed from topic %r: %s", subscriber, self.name, error)

    def after_fork(self) -> None:
        """Internal: in a forked child, replaces the lock that another thread of the parent may have held."""
        self._lock = threading.RLock()  # a signal's handler may come in between, in the same thread

    def add(self, subscriber: str, token: str) -> None:
        """Internal: subscribes a peer, and sends it the newest values."""
        with self._lock:
            self._subscribers[subscriber] = token
            for number, value in self._newest:
                if subscriber in self._subscribers:  # else the one before did not reach it
                    self._send(subscriber, number, value)

    def remove(self, subscriber: str, token: str | None = None) -> None:
        """Internal: unsubscribes a peer; with a token, only if it is still that subscription."""
        with self._lock:
            if token is None or self._subscribers.get(subscriber) == token:
                self._subscribers.pop(subscriber, None)


class Topics:
    """The topics that a node publishes, and its subscriptions to topics of its peers."""

    def __init__(self, node: Publishes) -> None:
        self._node = node
        self._lock = threading.RLock()  # a signal's handler may come in between, in the same thread
        self._mine: dict[str, Topic] = {}
        # With the subscription's token: a peer that restarted under its name may be sent what was meant for the process
        # before it.
        self._callbacks: dict[tuple[str, str], tuple[str, Callable[[int, Any], object]]] = {}

    def make(self, name: str, history: int, timeout_s: float) -> Topic:
        """A new topic of this node's."""
        topic = Topic(self._node, name, history, timeout_s)
        with self._lock:
            if name in self._mine:
                raise ArgumentError(f"the node {self._node.name!r} has a topic {name!r} already")
            self._mine[name] = topic
        return topic

    def after_fork(self) -> None:
        """In a forked child: the locks anew."""
        self._lock = threading.RLock()  # a signal's handler may come in between, in the same thread
        for topic in self._mine.values():
            topic.after_fork()

    def subscribe(self, peer: str, name: str, callback: Callable[[int, Any], object]) -> None:
        """Subscribes to a peer's topic; the callback is set before the first value arrives."""
        check_text("a peer's name", peer)
        check_text("a topic's name", name)
        check_function("what is called back", callback)
        token = secrets.token_hex(8)
        with self._lock:
            before = self._callbacks.get((peer, name))
            self._callbacks[peer, name] = token, callback
        try:
            self._node.call(peer, SUBSCRIBE, name, self._node.name, self._node.address, token)
        except BaseException:
            with self._lock:
                if before is None:
                    self._callbacks.pop((peer, name), None)
                else:
                    self._callbacks[peer, name] = before
            raise

    def unsubscribe(self, peer: str, name: str) -> None:
        """The callback is not called any more."""
        check_text("a peer's name", peer)
        check_text("a topic's name", name)
        with self._lock:
            self._callbacks.pop((peer, name), None)
        self._node.call(peer, UNSUBSCRIBE, name, self._node.name)

    def of(self, name: str) -> Topic:
        """A topic of this node's. Raises `LookupError`."""
        with self._lock:
            if name not in self._mine:
                raise LookupError(
                    f"{self._node.name!r} has no topic {name!r}; it has {sorted(self._mine)}"
                    f"{did_you_mean(name, self._mine)}"
                )
            return self._mine[name]

    def deliver(self, publisher: str, name: str, number: int, value: Any, token: str) -> None:
        """Calls back with a value that has arrived."""
        with self._lock:
            wanted, callback = self._callbacks.get((publisher, name), ("", None))
        if wanted == token and callback is not None:
            callback(number, value)
        else:
            with contextlib.suppress(GeartrainError):
                self._node.tell(publisher, UNSUBSCRIBE, name, self._node.name, token, timeout_s=1.0)


# --- what subscribers and publishers call on each other's nodes -----------------------------------------------------


def _subscribe(session: ServerSession, name: str, subscriber: str, address: str, token: str) -> None:
    node: Publishes = session.node
    topic = node.topics.of(name)
    if node.directory.store is None:
        node.directory.known[subscriber] = address  # it may have come back at another one
    topic.add(subscriber, token)


def _unsubscribe(session: ServerSession, name: str, subscriber: str, token: str | None = None) -> None:
    node: Publishes = session.node
    node.topics.of(name).remove(subscriber, token)


def _deliver(session: ServerSession, publisher: str, name: str, number: int, value: Any, token: str) -> None:
    node: Publishes = session.node
    node.topics.deliver(publisher, name, number, value, token)


function(name=SUBSCRIBE, with_caller=True)(_subscribe)
function(name=UNSUBSCRIBE, with_caller=True)(_unsubscribe)
function(name=DELIVER, with_caller=True)(_deliver)
