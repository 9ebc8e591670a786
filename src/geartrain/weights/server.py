"""RPC functions of a publisher or relay. Relays on other hosts call them to fetch versions.

    newer(name, after_id, after_sequence, wait_s)   metadata of the newest version after that one; None at the timeout
    piece(name, sequence, offset, size)             a range of its bytes
    done(name, sequence)                            releases it; False when it was released before
    segment_of(name)                                id of the file: a process that finds that file needs no relay

`newer` pins a version, so that its bytes stay until `done`. If a relay is idle for `PIN_S` and the publisher needs the
buffer, the relay loses its pin. `done` then returns False, and the relay discards the version.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from geartrain.core.arguments import did_you_mean, shown
from geartrain.core.lifetime import living
from geartrain.errors import ArgumentError
from geartrain.rpc import function
from geartrain.weights.format import Head
from geartrain.weights.segment import WeightsSegment
from geartrain.weights.writer import Writer

if TYPE_CHECKING:
    from geartrain.rpc import Caller, Node

PIN_S = 30.0


def check_node(node: object) -> None:
    """Raises `ArgumentError` unless it can be asked, and answer, as a node does."""
    if not hasattr(node, "call_async") or not hasattr(node, "directory"):
        raise ArgumentError(f"node is a geartrain.rpc.Node, found {shown(node)}")


class _Pin(NamedTuple):
    fd: int  # holds the buffer
    segment: WeightsSegment
    head: Head
    used_s: float


class _Served:
    """The weights that a node serves, with the pins of their relays."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self._pins: dict[str, _Pin] = {}
        self._waiting: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._lock = threading.RLock()  # a signal's handler may come in between, in the same thread
        writer.on_commit = self.wake
        writer.on_wait = self.drop_idle
        _living.add(self)

    async def newer(self, caller: str, after_id: bytes, after_sequence: int, wait_s: float) -> dict[str, Any] | None:
        until_s = time.monotonic() + wait_s
        loop = asyncio.get_running_loop()
        while True:
            event = asyncio.Event()
            with self._lock:
                self._waiting.add((loop, event))
            try:
                found = self._pin_newest(caller, after_id, after_sequence)
                if found is not None:
                    return found
                await asyncio.wait_for(event.wait(), max(0.0, until_s - time.monotonic()))
            except asyncio.TimeoutError:
                return None
            finally:
                with self._lock:
                    self._waiting.discard((loop, event))

    def _pin_newest(self, caller: str, after_id: bytes, after_sequence: int) -> dict[str, Any] | None:
        segment = self.writer.readable
        head = segment.head()
        if head is None or (segment.id == after_id and head.sequence <= after_sequence):
            return None
        fd = None
        with contextlib.suppress(OSError):  # it is being closed: replaced by another, or the publisher ends
            fd = segment.hold(head)
        if fd is None:
            return None  # the publisher has published two more, and wakes us
        with self._lock:
            self._drop(caller)
            self._pins[caller] = _Pin(fd, segment, head, time.monotonic())
        layout = segment.layout()
        return {
            "id": segment.id,
            "sequence": head.sequence,
            "version": head.version,
            "schema": segment.schema(),
            "nbytes": int(layout["version_bytes"]),
        }

    def piece(self, caller: str, sequence: int, offset: int, size: int) -> Any:
        with self._lock:
            pin = self._pins.get(caller)
            if pin is None or pin.head.sequence != sequence:
                raise LookupError(f"{caller!r} holds no version with the number {sequence}")
            self._pins[caller] = pin._replace(used_s=time.monotonic())
        return pin.segment.memory(pin.head.buffer)[offset : offset + size]

    def done(self, caller: str, sequence: int) -> bool:
        with self._lock:
            pin = self._pins.get(caller)
            if pin is None or pin.head.sequence != sequence:
                return False
            self._drop(caller)
            return True

    def _drop(self, caller: str) -> None:
        pin = self._pins.pop(caller, None)
        if pin is not None:
            os.close(pin.fd)
            pin.segment.wake_publisher()

    def drop(self, caller: str) -> None:
        """Releases the pin of a lost relay."""
        with self._lock:
            self._drop(caller)

    def drop_idle(self) -> None:
        """Releases the pins of idle relays: the publisher needs a buffer."""
        with self._lock:
            for caller in [c for c, pin in self._pins.items() if pin.used_s < time.monotonic() - PIN_S]:
                self._drop(caller)

    def wake(self) -> None:
        """Wakes relays that wait for a version."""
        with self._lock:
            for loop, event in self._waiting:
                with contextlib.suppress(RuntimeError):  # the loop was closed
                    loop.call_soon_threadsafe(event.set)

    def after_fork(self) -> None:
        """In a forked child: its copies of the descriptors would hold the buffers for as long as it lives."""
        self._lock = threading.RLock()  # another thread of the parent's may have held it
        self._waiting.clear()
        pins, self._pins = list(self._pins.values()), {}
        for pin in pins:
            with contextlib.suppress(OSError):  # a thread of the parent's was closing it
                os.close(pin.fd)

    def close(self) -> None:
        with self._lock:
            for caller in list(self._pins):
                self._drop(caller)


_living: weakref.WeakSet[_Served] = living(after_fork=_Served.after_fork)
_served: weakref.WeakKeyDictionary[Node, dict[str, _Served]] = weakref.WeakKeyDictionary()


def serve(node: Node, name: str, writer: Writer) -> None:
    """Serves the weights of a name to relays that call this node."""
    known = _served.get(node)
    if known is None:
        known = _served[node] = {}
        mine = known  # without a reference to the node, which would keep it alive
        node.on_peer_lost(lambda peer, _: _drop_pins(mine, peer))
    known[name] = _Served(writer)


def _drop_pins(known: dict[str, _Served], peer: str) -> None:
    for served in list(known.values()):
        served.drop(peer)


def stop_serving(node: Node, name: str, writer: Writer) -> None:
    """Stops serving; later calls raise LookupError."""
    known = _served.get(node, {})
    served = known.get(name)
    if served is not None and served.writer is writer:
        known.pop(name, None)  # another thread that closes may have been first
        served.close()


def _of(caller: Caller, name: str) -> _Served:
    node = caller.node
    served = _served.get(node, {}).get(name)
    if served is None:
        there = sorted(_served.get(node, {}))
        raise LookupError(f"{node.name!r} publishes no weights {name!r}; it has {there}{did_you_mean(name, there)}")
    return served


async def _newer(caller: Caller, name: str, after_id: bytes, after_sequence: int, wait_s: float) -> Any:
    return await _of(caller, name).newer(caller.name, after_id, after_sequence, min(wait_s, 60.0))


def _piece(caller: Caller, name: str, sequence: int, offset: int, size: int) -> Any:
    return _of(caller, name).piece(caller.name, sequence, offset, size)


def _done(caller: Caller, name: str, sequence: int) -> bool:
    return _of(caller, name).done(caller.name, sequence)


def _segment_of(caller: Caller, name: str) -> bytes:
    found: bytes = _of(caller, name).writer.readable.id
    return found


NEWER, PIECE, DONE = "geartrain.weights.newer", "geartrain.weights.piece", "geartrain.weights.done"
SEGMENT_OF = "geartrain.weights.segment_of"
function(name=NEWER, with_caller=True)(_newer)
function(name=PIECE, with_caller=True)(_piece)
function(name=DONE, with_caller=True)(_done)
function(name=SEGMENT_OF, with_caller=True)(_segment_of)
