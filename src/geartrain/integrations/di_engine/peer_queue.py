"""Event queue of one peer: encodes events in flight and bounds them by a window of events and bytes."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from geartrain.errors import MessageError, RemoteError, WaitTimeoutError
from geartrain.rpc import Future
from geartrain.rpc.client import Client
from geartrain.rpc.protocol import CALL
from geartrain.transport.codec import native_codec

_log = logging.getLogger("geartrain.di_engine")

#: Name of the function that takes an event.
EVENT = "geartrain.di_engine.event"
#: What encoding raises: the codec, or a pickler.
_UNSENDABLE = (MessageError, pickle.PicklingError, AttributeError, TypeError)


@dataclass(frozen=True)
class Window:
    """Limit of the unacknowledged events in flight to one peer. One event is always allowed."""

    events: int = 128
    nbytes: int = 512 << 20


class PeerQueue:
    """A peer's topics, and the events in flight to it.

    Attributes:
        name, node_id: of the peer.
        topics, version: the topics it subscribes to, and the number of their last change.
        lock: held by all methods, and while events are sent, so that they stay in order.
    """

    def __init__(self, name: str, node_id: int, window: Window) -> None:
        self.name, self.node_id = name, node_id
        self.version = -1
        self.topics: frozenset[str] = frozenset()
        self.lock = threading.RLock()
        self._window = window
        self._in_flight: deque[tuple[Future, int]] = deque()
        self._nbytes = 0
        self._refused = False

    @property
    def in_flight(self) -> int:
        """Events that the peer has not acknowledged yet, as far as is known."""
        return len(self._in_flight)

    def has_room(self, nbytes: int) -> bool:
        """Whether one more event fits into the window."""
        while self._in_flight and self._in_flight[0][0].done():
            self._settle(0.0)
        return not self._in_flight or (
            len(self._in_flight) < self._window.events and self._nbytes + nbytes <= self._window.nbytes
        )

    def wait_for_room(self, nbytes: int, until_s: float) -> None:
        """Waits until it does. Raises `WaitTimeoutError`, `PeerLostError`."""
        while not self.has_room(nbytes):
            self._settle(max(0.0, until_s - time.monotonic()))

    def add(self, future: Future, nbytes: int) -> None:
        """Adds an event that was sent."""
        self._in_flight.append((future, nbytes))
        self._nbytes += nbytes

    def timeout(self, timeout_s: float) -> WaitTimeoutError:
        """The error of an event that has found no room in time."""
        return WaitTimeoutError(
            f"node {self.node_id} does not keep up: {self.in_flight} events in flight to it are not acknowledged, and "
            f"there was no room for another within {timeout_s:g} s"
        )

    def _settle(self, timeout_s: float) -> None:
        """Waits for the oldest event's acknowledgement."""
        future, nbytes = self._in_flight[0]
        error = future.exception(timeout_s=timeout_s)
        self._in_flight.popleft()
        self._nbytes -= nbytes
        if isinstance(error, RemoteError):
            if not self._refused:  # once: a node whose handlers have stopped refuses all
                _log.error("node %d could not handle an event: %s", self.node_id, error)
            self._refused = True
        elif error is not None:
            raise error
        else:
            self._refused = False


def encode_event(peer: Client, value: tuple[Any, ...], by_cpu: bool, timeout_s: float) -> tuple[int, Any]:
    """An event as a call without a deadline, since its listeners may take long: message kind and payload.

    Raises:
        MessageError: it holds objects that need pickle, and the peer is not trusted; or nothing can send it.
    """
    try:
        if by_cpu:
            return CALL, native_codec().encode((EVENT, value, {}), peer.pickle)
        return peer.encode(EVENT, value, {}, timeout_s)
    except _UNSENDABLE as error:
        if not peer.pickle:
            raise MessageError(f"an event of topic {value[0]!r} cannot be sent: {error}") from None
        # A GPU tensor inside of an object, or one to go through the CPU: by torch's own pickle, as DI-engine sends all.
        topic, args, kwargs = value
        try:
            whole = (topic, _Pickled(args), _Pickled(kwargs))
            return CALL, native_codec().encode((EVENT, whole, {}), True)
        except _UNSENDABLE as second:
            raise MessageError(f"an event of topic {topic!r} cannot be sent: {error}; {second}") from None


class _Pickled:
    """A value that is pickled as a whole, and unpickled on arrival."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (pickle.dumps(self._value, protocol=5),)


__all__ = ["EVENT", "PeerQueue", "Window", "encode_event"]
