"""Server side of one client: its connection, its calls in order, and the replies that are still pending."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import geartrain._native as _native
from geartrain.rpc.batching import PendingReply
from geartrain.rpc.tensors.receiver import TensorReceiver

#: Numbers of kept objects start at random, so a handle of a lost connection or earlier process names no object.
_numbers = itertools.count(int.from_bytes(os.urandom(6), "little"))


class Call(NamedTuple):
    """One call of a client."""

    session: ServerSession
    kind: int
    tag: int
    function: Any  # callable, or a `Batcher`
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    nbytes: int  # of its message
    until_s: float  # its deadline, in `time.monotonic()`


class Worker:
    """One thread's work for a session: a call and, if calls keep order, the calls of the session that follow it."""

    __slots__ = ("_on_wait", "call", "counted", "ordered")

    def __init__(self, call: Call, ordered: bool, on_wait: Callable[[Worker], None]) -> None:
        self.call, self.ordered = call, ordered
        self.counted = True  # among those that `max_threads` bounds
        self._on_wait = on_wait

    def before_wait(self) -> None:
        """The call's function is about to wait for a call of its own."""
        if self.counted:
            self._on_wait(self)


class ServerSession:
    """A client that has connected to this node, from its first message to the end of its connection.

    Functions registered `with_caller` get the session. Its public part is `rpc.Caller`: `name`, `node`, `authenticated`
    and `keep`.

    `queue`, `queued_bytes`, `worker` and `running` belong to the scheduler, which changes them under its lock.
    """

    def __init__(
        self, node: Any, number: int, connection: _native.Connection, pickle: bool, tensors: TensorReceiver
    ) -> None:
        self.node = node  # the `Node` that is called
        self.number = number  # in the server's inbox
        self.connection = connection
        self.pickle = pickle and connection.authenticated
        self.name = ""
        self.objects: dict[int, Any] = {}  # that the client keeps here
        self.tensors = tensors
        self.pending: dict[int, PendingReply] = {}  # by the call's tag
        self.queue: deque[Call] = deque()  # that wait for the one before them
        self.queued_bytes = 0
        self.worker: Worker | None = None  # has the turn: the call that the queue waits for
        self.running: dict[int, Worker] = {}  # by the call's tag

    @property
    def authenticated(self) -> bool:
        """Whether the client proved that it knows the cluster's secret."""
        return self.connection.authenticated

    def flow(self, tag: int) -> str:
        """The trace arrow of a call. The client uses the same one."""
        return f"{self.name}>{self.node.name}:{tag}"

    def keep(self, kept: Any) -> int:
        """Keeps an object for the client until the client drops it or is lost.

        The client's `Remote` calls it by its number.
        """
        number = next(_numbers)
        self.objects[number] = kept
        return number

    def cancel(self, tag: int) -> None:
        """The client does not want the reply to a call any more: a pending one, or tensors held for it."""
        pending = self.pending.pop(tag, None)
        if pending is not None:
            pending.cancel()
        self.tensors.discard(tag)

    def expired(self, now_s: float) -> list[int]:
        """Tags of calls that have no reply at their deadline."""
        return [tag for tag, pending in list(self.pending.items()) if pending.until_s < now_s]

    def close(self) -> None:
        """The connection has ended: cancels pending calls, and frees the objects kept for the client."""
        for pending in list(self.pending.values()):
            pending.cancel()
        self.pending.clear()
        self.objects.clear()
        self.tensors.close()
