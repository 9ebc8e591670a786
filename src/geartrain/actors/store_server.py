"""Store server: peers insert into this process's stores, record in them, fetch from them and update priorities.

    node = rpc.init("learner", ...)
    with StoreServer(node, store, "replay"):
        train(gt.Replay(store, ...))

`geartrain.actors.RemoteStore` is the client. The server writes arriving data from the transport's buffers straight into
the store's rows, so this side copies it once. It uses the same native calls as local writers.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.actors.served_tasks import PeerCalls
from geartrain.actors.served_writes import PackedKeys, PeerHandle, PeerWrites, ServedStore, pack, unpack
from geartrain.core.arguments import check_text, check_type, shown
from geartrain.core.dtypes import DTYPES
from geartrain.core.lifetime import Closing
from geartrain.errors import ArgumentError, GeartrainError, MessageError, StoreClosedError
from geartrain.replay.fetch import fetch
from geartrain.rpc.caller import Caller
from geartrain.rpc.node import Node
from geartrain.rpc.registry import function
from geartrain.rpc.scheduler import about_to_wait
from geartrain.store.recorder import StepRecorder
from geartrain.store.store import Store

#: Seconds for which a numbered step waits for the one before it, which was sent first and comes first.
_ORDER_S = 60.0

#: Rows that a recorder has completed, and keys with their environments.
RecorderReply = tuple[int, PackedKeys | None, NDArray[np.uint32] | None]


class StoreServer(Closing, elsewhere="it serves a store of this process"):
    """Serves a store to the peers of a node, until the server, the node or the store is closed.

    Peers may insert at any time, so replays of this store handle wait for rows while it is served. Whoever can connect
    to the node may write. A node that listens beyond loopback has a secret; on one host, processes that may open the
    store can write anyway. One node can serve several stores under different names.

    Args:
        node: the `geartrain.rpc` node whose peers may call.
        store: an open store that is not read-only.
        name: name by which peers ask for it; the store's own by default.

    Raises:
        ArgumentError: the node serves another store under that name, or an argument is not a node or a store.
        StoreClosedError: the store is closed.

    Examples:
        >>> import geartrain as gt
        >>> from geartrain import rpc
        >>> from geartrain.actors import RemoteStore, StoreServer
        >>> store = gt.Store.create({"x": gt.Field((), "float32")}, max_length=1, capacity=8)
        >>> learner = rpc.Node("learner")
        >>> host = rpc.Node("host", peers={"learner": learner.address})
        >>> with StoreServer(learner, store, "replay"):
        ...     remote = RemoteStore(host, "learner", "replay")
        ...     keys = remote.insert({"x": np.ones((2, 1), np.float32)})
        >>> (len(store), store.keys() == keys)
        (2, True)
        >>> host.close(); learner.close(); store.close()
    """

    def __init__(self, node: Node, store: Store, name: str | None = None) -> None:
        check_type("a StoreServer takes a node of geartrain.rpc", node, Node)
        check_type("a StoreServer takes a Store", store, Store)
        if store.closed:
            raise StoreClosedError(f"the store {store.name!r} was closed")
        self.name = store.name if name is None else name
        check_text("name", self.name)
        self.node, self.store = node, store
        self._entry = ServedStore(store)
        with _lock:  # each line by itself is whole: a signal's handler may make and close servers in between
            if _served.setdefault(node, {}).setdefault(self.name, self._entry) is not self._entry:
                raise ArgumentError(f"the node {node.name!r} serves a store {self.name!r} already")
        self._writers = store.expect_writers()

    def close(self) -> None:
        """Stops serving: calls in flight end, later ones are refused, loops over claims end. The store stays open."""
        self._writers.close()
        with _lock:
            served = _served.get(self.node, {})
            if served.get(self.name) is self._entry:
                served.pop(self.name, None)
        self._entry.close()

    def __repr__(self) -> str:
        return f"<StoreServer of {self.store.name!r} as {self.name!r} at {self.node.name!r}>"


_lock = threading.RLock()  # a signal's handler may come in between
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_served: weakref.WeakKeyDictionary[Node, dict[str, ServedStore]] = weakref.WeakKeyDictionary()


# --- what peers call ------------------------------------------------------------------------------------------------


def _called(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return function(name=f"geartrain.store.{name}", with_caller=True)


def _store_of(caller: Caller, name: str) -> Store:
    return _entry_of(caller, name).store


def _entry_of(caller: Caller, name: str) -> ServedStore:
    with _lock:
        served = _served.get(caller.node, {})
        if (found := served.get(name)) is not None:
            return found
        known = ", ".join(map(repr, sorted(served))) or "none"
    raise LookupError(f"{caller.node.name!r} serves no store {shown(name)}; it serves {known}")


@_called("describe")
def _describe(caller: Caller, name: str) -> dict[str, Any]:
    store = _store_of(caller, name)
    fields = {each: (list(field.shape), field.dtype, field.per_row) for each, field in store.fields.items()}
    sizes = {"max_length": store.max_length, "capacity": store.capacity, "per_step": store.per_step}
    plan = None
    if store.plan is not None:
        about = store.native.describe()
        plan = {what: about[what] for what in ("fields", "places", "axes", "tasks")}
    return {"id": store.id, "name": store.name, "fields": fields, **sizes, "plan": plan}


@_called("open")
def _open(caller: Caller, name: str, client: int) -> tuple[int, int, int, bool]:
    """A connection's handle, the id of the client's outcomes, the store's id, and whether it has a journal."""
    served = _entry_of(caller, name)

    def check() -> None:
        if _entry_of(caller, name) is not served:
            raise LookupError("another store is served under that name")

    calls = (PeerWrites if served.store.plan is None else PeerCalls)(served, client, check)
    journaled = served.store.native.journal_state() is not None
    return caller.keep(PeerHandle(calls)), calls.outcomes.id, served.store.id, journaled


@_called("figures")
def _figures(caller: Caller, name: str) -> tuple[int, dict[str, int]]:
    store = _store_of(caller, name)
    return len(store), store.stats()


@_called("keys")
def _keys(caller: Caller, name: str) -> PackedKeys:
    return pack(_store_of(caller, name).keys())


@_called("fetch")
def _fetch(caller: Caller, name: str, keys: PackedKeys, given: Mapping[str, Any]) -> dict[str, Any]:
    store = _store_of(caller, name)
    if not isinstance(given, dict) or not set(given) <= {"fields", "window", "ends", "pad", "on_stale"}:
        raise MessageError("a fetch has fields, window, ends, pad and on_stale")
    store.check_plain("its rows are read packed")
    fields = given.get("fields")
    wanted = [each for each in store.fields if fields is None or each in fields]
    plain = all(DTYPES[store.fields[each].dtype].numpy_name is not None for each in wanted)
    batch = fetch(store, unpack(keys), output="numpy" if plain else "torch", **given)
    return {
        "fields": dict(batch.fields),
        "keys": pack(batch.keys),
        "mask": batch.mask,
        "start": batch.start,
        "length": batch.length,
        "version": batch.version,
    }


class ServedRecorder:
    """A peer's recorder. When the peer disconnects, its unpublished rows are abandoned.

    A peer numbers its calls if it sends the next one before the reply to the last. The calls are executed in the order
    of their numbers. A refused call ends the open episodes, and all numbered calls after it are refused too.
    """

    def __init__(self, serving: Callable[[], Store], n_envs: int, options: Mapping[str, Any]) -> None:
        self._serving = serving
        self._store = store = serving()
        self._recorder: StepRecorder = store.recorder(n_envs, **options)
        self.obs = self._recorder.obs
        self._lock = threading.RLock()
        self._turn = threading.Condition(self._lock)
        self._next = 0
        self._refused: str | None = None

    def call(self, number: int | None, what: str, given: Mapping[str, Any]) -> RecorderReply:
        """One of `reset`, `step`, `cut` and `discard`: rows completed so far, and the keys that it returns."""
        if what not in ("reset", "step", "cut", "discard") or not isinstance(given, dict):
            raise MessageError(f"a recorder is asked to reset, step, cut or discard, not {what!r}")
        if not (number is None or type(number) is int):
            raise MessageError("steps are numbered by whole numbers")
        if self._serving() is not self._store:
            raise LookupError("another store is served under that name")
        waits = number is not None and number > self._next
        if waits or self._store.limiter.state().enabled:
            about_to_wait()
        with self._lock:
            if number is None:
                return self._record(what, given)
            if not self._turn.wait_for(lambda: self._refused is not None or self._next >= number, _ORDER_S):
                self._refuse(f"the step before number {number} did not come within {_ORDER_S:g} s")
            try:
                if self._refused is not None:
                    raise MessageError(f"a step before this one was refused: {self._refused}")
                if self._next != number:
                    raise MessageError(f"step {number} was given twice")
                return self._record(what, given)
            except BaseException as error:
                self._refuse(f"{type(error).__name__}: {error}")
                raise
            finally:
                self._next = max(self._next, number + 1)
                self._turn.notify_all()

    def give_up(self) -> None:
        """The client gives up: waiting calls are refused, and the episodes end with their last steps."""
        about_to_wait()
        with self._lock:
            self._refuse("its client gave it up")
            self._turn.notify_all()

    def _refuse(self, why: str) -> None:
        if self._refused is None:
            self._refused = why
            with suppress(GeartrainError):
                self._recorder.cut()

    def _record(self, what: str, given: Mapping[str, Any]) -> RecorderReply:
        keys = getattr(self._recorder, what)(**given)
        return self._recorder.rows, None if keys is None else pack(keys), None if keys is None else keys.env


@_called("recorder")
def _recorder(caller: Caller, name: str, n_envs: int, options: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    allowed = {"obs", "publish_every", "overlap", "priority", "autoreset", "zeros"}
    if not isinstance(options, dict) or not set(options) <= allowed:
        raise MessageError(f"a recorder has {', '.join(sorted(allowed))}")
    made = ServedRecorder(lambda: _store_of(caller, name), n_envs, options)
    return caller.keep(made), made.obs


__all__ = ["StoreServer"]
