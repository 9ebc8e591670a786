"""Server side of a remote store: a connection's handle, and writes that take effect once, however often they are sent.

A client opens a handle for each connection and says its own number, which stays the same. It gives each write a slot
that none of its other writes in progress has, and a number that is larger than those before. When a connection breaks,
the client sends the write again over the next one. The second sending waits for the first and gets its outcome.

A client uses a slot again once it has the reply, so the last outcome of each slot is all that is remembered. A sending
that arrives later than the slot's next write is refused. Outcomes end with their server. A client tells by their id
whether the server that it reaches again is one that remembers.
"""

from __future__ import annotations

import asyncio
import copy
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from geartrain.core.arguments import check_whole, shown
from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError, GeartrainError, MessageError, PeerLostError, StoreClosedError
from geartrain.rpc.scheduler import about_to_wait
from geartrain.store.store import Store
from geartrain.store.waiting_claims import claim_later

T = TypeVar("T")

#: Clients without a connection whose outcomes are remembered.
_REMEMBERED = 4096
#: Most writes of a client at a time.
_MOST_SLOTS = 1 << 16

#: Keys between peers: rows, generations, steps or None, the store's id or None.
PackedKeys = tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32] | None, int | None]
#: Rows and generations.
InsertedRows = tuple[NDArray[np.uint32], NDArray[np.uint32]]
#: A write's slot and number.
CallNumber = tuple[int, int]


def pack(keys: Keys) -> PackedKeys:
    """Keys of one store as plain values, without shards and draws."""
    store = keys.store
    if isinstance(store, np.ndarray):
        stores = np.unique(store)
        if len(stores) > 1:
            raise ArgumentError(f"these keys are of {len(stores)} stores, and one of them is asked")
        store = int(stores[0]) if len(stores) else None
    return keys.row, keys.generation, keys.step, store


def unpack(packed: Any) -> Keys:
    """The same keys. Raises `MessageError` for anything else."""
    if not isinstance(packed, tuple | list) or len(packed) != 4:
        raise MessageError("keys are sent as rows, generations, steps and a store")
    row, generation, step, store = packed
    return Keys(row, generation, None, None, store, step)


@dataclass
class Turn:
    """A write of a client, in all its sendings."""

    number: int
    outcome: Any = None  # None until it has ended, and after an end that is to be tried again
    runs: bool = False
    waits: bool = False  # a sending has waited for another


class Outcomes:
    """What the last write of each slot of one client did. Any thread.

    Attributes:
        id: a random number.
    """

    def __init__(self) -> None:
        self.id = int.from_bytes(os.urandom(7), "little")
        # The garbage collector may end a connection within a call of a later one.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._turns: dict[int, Turn] = {}  # by slot

    def begin(self, call: CallNumber, lost: Callable[[], bool]) -> Turn:
        """Begins a sending of a write: until `end` no other sending of it runs.

        Args:
            call: the write's slot and number.
            lost: whether the connection of this sending is lost, and nobody waits for it. `wake` looks again.

        Raises:
            MessageError: the client has sent a later write in that slot, so nobody waits for this one.
            PeerLostError: the connection was lost while another sending ran.
        """
        if not isinstance(call, tuple) or len(call) != 2 or not all(type(each) is int for each in call):
            raise MessageError("a write has a slot and a number")
        slot, number = call
        if not 0 <= slot < _MOST_SLOTS:
            raise MessageError(f"slots are from 0 to {_MOST_SLOTS - 1}, found {slot}")
        with self._lock:
            turn = self._turns.get(slot)
            if turn is None or turn.number < number:
                turn = self._turns[slot] = Turn(number)
            elif turn.number > number:
                raise MessageError(f"write {number} came after write {turn.number} in the slot {slot}")
            if not turn.runs:
                turn.runs = True
                return turn
            turn.waits = True
        about_to_wait()
        with self._lock:
            self._changed.wait_for(lambda: not turn.runs or lost())
            if turn.runs:
                raise PeerLostError("the connection of the client is lost")
            turn.runs = True
        return turn

    def wake(self) -> None:
        """A connection is lost."""
        with self._lock:
            self._changed.notify_all()

    def end(self, turn: Turn) -> None:
        """Ends what `begin` began."""
        with self._lock:
            turn.runs = False
            if turn.waits:
                self._changed.notify_all()


class ServedStore:
    """What all connections to one served store share.

    Attributes:
        store: the store.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lock = threading.RLock()
        self._calls: WeakValueDictionary[int, PeerWrites] = WeakValueDictionary()  # of each client
        self._left: OrderedDict[int, Outcomes] = OrderedDict()  # of clients whose connection has ended
        self._waits: set[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = set()
        self._closed = False

    def close(self) -> None:
        """Ends all waits of claims with `StoreClosedError`."""
        with self._lock:
            self._closed, waits = True, list(self._waits)
        for loop, task in waits:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(task.cancel)

    async def wait(self, asked: tuple[int, int, int, int], timeout_s: float, later: bool) -> Any:
        """As `claim_later`."""
        task = asyncio.current_task()
        assert task is not None
        entry = (asyncio.get_running_loop(), task)
        with self._lock:
            self._waits.add(entry)
            closed = self._closed
        try:
            if not closed:
                return await claim_later(self.store.native, asked, timeout_s, later)
        except asyncio.CancelledError:
            if not self._closed:
                raise
        finally:
            with self._lock:
                self._waits.discard(entry)
        raise StoreClosedError(f"the store {self.store.name!r} is not served any more")

    def opened(self, client: int, calls: PeerWrites) -> None:
        """A client has connected: its calls get its outcomes, and what its earlier connection had is given up.

        The end of that connection may be noticed much later.
        """
        with self._lock:
            before, self._calls[client] = self._calls.get(client), calls
            left = self._left.pop(client, None)
            calls.outcomes = before.outcomes if before is not None else left or Outcomes()
        if before is not None:
            before.end()

    def left(self, client: int, outcomes: Outcomes) -> None:
        """A client's connection has ended."""
        with self._lock:
            self._left[client] = outcomes
            self._left.move_to_end(client)
            if len(self._left) > _REMEMBERED:
                self._left.popitem(last=False)


class PeerHandle:
    """A connection's handle: kept for the peer as long as the connection lives, or until the peer drops it.

    Calls run on `PeerWrites` alone, so a call that waits does not keep the handle, and rows are released at once.
    """

    def __init__(self, calls: PeerWrites) -> None:
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        if name not in self._calls.CALLS:
            raise AttributeError(f"a store is not asked for {shown(name)}")
        return getattr(self._calls, name)

    def __del__(self) -> None:
        with suppress(Exception):
            self._calls.end()


class PeerWrites:
    """What a peer may write to a served store. Any thread.

    Args:
        served: the store.
        client: number of the client, the same after it has connected again.
        check: raises if the store is not served any more.

    Attributes:
        outcomes: of the client's writes.
        store, native: the store.
        ended: whether the connection is lost.
    """

    #: What peers may call.
    CALLS = frozenset({"insert", "update_priorities", "delete"})

    def __init__(self, served: ServedStore, client: int, check: Callable[[], object]) -> None:
        self.served, self.check = served, check
        self.store, self.native = served.store, served.store.native
        self._client = check_whole("client", client, 0, 2**63 - 1)
        self.ended = False
        self.outcomes: Outcomes
        served.opened(self._client, self)

    def end(self) -> None:
        """The connection is lost."""
        self.ended = True
        self.outcomes.wake()
        self.served.left(self._client, self.outcomes)

    def once(self, call: CallNumber, run: Callable[[], T]) -> T:
        """The result of a write, or its error, from whichever sending of the write came first.

        Args:
            call: its slot and number.
            run: does it. A `PeerLostError` says that it did nothing and is to be done if it comes again.
        """
        turn = self.outcomes.begin(call, lambda: self.ended)
        try:
            if turn.outcome is None:
                turn.outcome = run(), None
        except PeerLostError:
            raise
        except GeartrainError as raised:
            turn.outcome = None, copy.copy(raised)  # without the traceback, which holds the values
            raise
        finally:
            self.outcomes.end(turn)
        result, error = turn.outcome
        if error is not None:
            raise copy.copy(error)
        done: T = result
        return done

    def insert(self, call: CallNumber, fields: Mapping[str, Any], given: Mapping[str, Any]) -> InsertedRows:
        """Inserts rows of a store without axes, strings and tasks.

        Args:
            call: as for `once`.
            fields: arrays by field.
            given: other arguments of `Store.insert`.
        """
        self.check()
        self.store.check_plain("insert by a RemoteStore, which sends its rows packed")
        allowed = {"lengths", "priorities", "versions", "casting", "durable"}
        if not isinstance(fields, dict) or not isinstance(given, dict) or not set(given) <= allowed:
            raise MessageError("an insert has arrays by field, and lengths, priorities, versions, casting and durable")
        if self.native.journal_state() is not None or self.native.limited:
            about_to_wait()

        def run() -> InsertedRows:
            keys = self.store.insert(fields, **given)
            return keys.row, keys.generation

        return self.once(call, run)

    def update_priorities(self, call: CallNumber, keys: PackedKeys, priorities: Any) -> int:
        """As of `Store`."""
        self.check()
        return self.once(call, lambda: self.store.update_priorities(unpack(keys), priorities))

    def delete(self, call: CallNumber, keys: PackedKeys) -> int:
        """As of `Store`."""
        self.check()
        return self.once(call, lambda: self.store.delete(unpack(keys)))


__all__ = ["CallNumber", "InsertedRows", "PackedKeys", "PeerHandle", "PeerWrites", "ServedStore", "pack", "unpack"]
