"""A peer that calls this node, and the order in which its calls are run."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import geartrain._native as _native
from geartrain.errors import BusyError
from geartrain.rpc.batching import Pending

if TYPE_CHECKING:
    from geartrain.rpc.node import Node
    from geartrain.rpc.server import Server
    from geartrain.rpc.tensors.receiver import Inbound

#: Kind, tag, function, args, kwargs, the bytes of the message, and when it is given up (`time.monotonic()`).
Call = tuple[int, int, Any, tuple[Any, ...], dict[str, Any], int, float]
Turn = object

#: `.running` is what this thread runs for a peer.
here = threading.local()


class Running:
    """A thread that runs calls for peers."""

    __slots__ = ("caller", "counted", "tag", "turn", "until_s")

    def __init__(self, caller: Caller, turn: Turn | None) -> None:
        self.caller, self.turn, self.tag, self.until_s = caller, turn, 0, float("inf")
        self.counted = True  # among those that the server's `max_threads` bounds


class Caller:
    """A peer that calls this node: its connection, the order of its calls, and what of them is still open.

    Functions registered `with_caller` get it, for `name`, `node` and `authenticated`.
    """

    def __init__(self, server: Server, number: int, connection: _native.Connection) -> None:
        self.number = number
        self.connection = connection
        self.pickle = server.pickle and connection.authenticated
        self.name = ""
        self.objects: dict[int, Any] = {}
        self.server = server
        self.tensors: Inbound = server.node.devices.inbound(connection)
        self.running: dict[int, Running] = {}  # who runs a call, by its tag
        self._open: dict[int, Pending] = {}
        self._lock = threading.Lock()
        self._turn: Turn | None = None  # of the call that others wait for
        self._running = 0  # its tag
        self._queue: deque[Call] = deque()
        self._queued_bytes = 0

    @property
    def node(self) -> Node:
        """The node that is called."""
        node: Node = self.server.node
        return node

    @property
    def authenticated(self) -> bool:
        """Whether it proved that it knows the cluster's secret."""
        return self.connection.authenticated

    def begin(self, call: Call) -> Turn | None:
        """A turn to run it now; None when it waits for those before it. Raises `BusyError`."""
        with self._lock:
            if self._turn is None:
                self._turn, self._running = object(), call[1]
                return self._turn
            if len(self._queue) >= self.server.max_open or self._queued_bytes > self.server.max_queued_bytes:
                raise BusyError(f"{len(self._queue)} calls of {self.name!r} wait for {self.server.name!r} already")
            self._queue.append(call)
            self._queued_bytes += call[5]
            return None

    def next(self, turn: Turn) -> Call | None:
        """The call after the one that ended, for whoever still has the turn."""
        with self._lock:
            if self._turn is not turn:
                return None
            if not self._queue:
                self._turn = None
                return None
            call = self._queue.popleft()
            self._queued_bytes -= call[5]
            self._running = call[1]
            return call

    def let_go(self, turn: Turn | None, tag: int | None = None) -> None:
        """The running call no longer holds up those after it: all with this turn, or the one with this tag."""
        with self._lock:
            if self._turn is None or (turn is not None and self._turn is not turn):
                return
            if tag is not None and tag != self._running:
                return
            self._turn = None
            if not self._queue:
                return
            mine = self._turn = object()
            call = self._queue.popleft()
            self._queued_bytes -= call[5]
            self._running = call[1]
        self.server.go_on(self, call, mine)

    def keep(self, tag: int, pending: Pending) -> None:
        """An answer that comes later."""
        self._open[tag] = pending

    def drop(self, tag: int) -> None:
        """It came."""
        self._open.pop(tag, None)

    def cancel(self, tag: int) -> None:
        """The peer gave a call up."""
        with self._lock:
            for call in self._queue:
                if call[1] == tag:
                    self._queue.remove(call)
                    self._queued_bytes -= call[5]
                    return
        pending = self._open.pop(tag, None)
        if pending is not None:
            pending.cancel()
        self.tensors.forget_held(tag)
        self.server.drop(self, tag)
        running = self.running.get(tag)
        self.let_go(None, tag)
        if running is not None:
            self.server.step_aside(running)

    def give_up_late(self, now_s: float) -> None:
        """What the peer should have given up by now, and has not."""
        late = [running.tag for running in list(self.running.values()) if running.until_s < now_s]
        late += [tag for tag, pending in list(self._open.items()) if pending.until_s < now_s]
        with self._lock:
            late += [call[1] for call in self._queue if call[6] < now_s]
        for tag in late:
            self.cancel(tag)

    def lost(self) -> None:
        """The peer is gone."""
        with self._lock:
            self._queue.clear()
            self._queued_bytes = 0
        for pending in list(self._open.values()):
            pending.cancel()
        self._open.clear()
        self.objects.clear()
        self.tensors.close()
        self.server.drop(self, None)
        for running in list(self.running.values()):
            self.server.step_aside(running)


def about_to_wait() -> None:
    """A function that waits for a call of its own lets its peer's next call begin: it may be what it waits for.

    It no longer counts among those that run, either.
    """
    running = getattr(here, "running", None)
    if running is not None and running.counted:
        if running.turn is not None:
            running.caller.let_go(running.turn)
        running.caller.server.step_aside(running, mine=True)
