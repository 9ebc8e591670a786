"""Items of a torchrl storage in a `geartrain.Store`: their rows and places, and the state that processes share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from geartrain.core.arguments import timeout as checked_timeout
from geartrain.core.keys import Keys
from geartrain.core.lifetime import on_error
from geartrain.core.schema import Field
from geartrain.errors import (
    ArgumentError,
    IncompatibleStoreError,
    SchemaError,
    StaleKeyError,
    StoreClosedError,
)
from geartrain.integrations.torchrl.indices import pieces_of
from geartrain.integrations.torchrl.items import OWN, is_items_field
from geartrain.integrations.torchrl.store_place import StorePlace
from geartrain.integrations.transitions.writer_lock import WriterLock
from geartrain.replay.fetch import fetch
from geartrain.store.store import Store

# Items of a row, at most; and bytes of rows that are made at once.
_ROW_ITEMS, _BYTES_AT_ONCE = 512, 1 << 24
# Items whose priorities are set at once, or that are copied.
_PIECE = 1 << 16
# Fields of the storage itself. Only the first row's values count.
_PLACE, _STATE, _HIGHEST = OWN + "place", OWN + "state", OWN + "highest"
#: A field of each item: how often it was written, where a writer tracks that.
GENERATION = OWN + "generation"
#: Places in the state that all processes share. Behind them are the axes of a storage after its first, if any.
SIZE, LENGTH, CURSOR, WRITES, BATCH_DIMS, ADDED, REWRITES, REVISION = range(8)


class StoredItems:
    """Items by number, from 0, in a store that several processes may share. Writes are in place.

    If the storage has several axes, an item here is one cell. Item i is step i % length of row i // length.

    Args:
        max_size: items; where there are `axes`, rounded up to a whole number of entries along the first one.
        axes: of the storage. Those after the first are told when the store is made.
        place: where the store is, or will be.
        timeout_s: longest wait for another process that writes.
        reserve: as in `geartrain.Store.create`.

    Attributes:
        store: the store, or None before the first item.
        keys: of its rows. names: of its fields that are the items'.
        tail: lengths of the axes after the first; None where they are not known yet.
    """

    max_size: int
    keys: Keys
    names: list[str]

    def __init__(self, max_size: int, axes: int, place: StorePlace, timeout_s: float, reserve: bool) -> None:
        self.max_size, self._axes = max_size, axes
        self._store_place = place
        self._timeout_s = checked_timeout(timeout_s)
        self._reserve = reserve
        self._closed = False
        self._made_by = os.getpid()
        self._writer = WriterLock(self._timeout_s)
        self._tracked = False
        self.tail: tuple[int, ...] | None = () if axes == 1 else None
        self.store: Store | None = None

    # --- the store --------------------------------------------------------------------------------------------

    def join(self) -> bool:
        """Whether the store is there; opens one that another process has made."""
        if self._closed:
            raise StoreClosedError("the storage was closed")
        if self.store is not None:
            return True
        if self._store_place.name is None:
            return False
        with self._writer.thread():
            if self.store is not None:
                return True
            store = self._store_place.find()
            if store is None:
                return False
            if _unfinished(store):  # another process is making it
                store.close()
                return False
            self.adopt(store)
        return True

    def adopt(self, store: Store) -> None:
        """Takes an open store; raises if it does not belong to a storage of this size."""
        with on_error(store.close):
            if _STATE not in store.fields or not store.per_step:
                raise IncompatibleStoreError(f"the store {store.name!r} is none of a torchrl storage")
            found = store.keys()
            places = np.asarray(fetch(store, found, fields=[_PLACE], window=1, output="numpy")[_PLACE])
            keys = found[np.argsort(places, kind="stable")]
            state: Any = store.column(_STATE)[int(keys.row[0])]
            tail = tuple(int(n) for n in state[REVISION + 1 :])
            if len(tail) != self._axes - 1:
                raise IncompatibleStoreError(
                    f"the store {store.name!r} is of a storage with ndim={len(tail) + 1}, not ndim={self._axes}"
                )
            size = rounded(self.max_size, tail)
            rows = -(-size // store.max_length)
            if len(keys) != rows or int(state[SIZE]) != size:
                raise IncompatibleStoreError(
                    f"the store {store.name!r} is of a storage of {int(state[SIZE])} items, this one is of {size}"
                )
            if self._tracked and GENERATION not in store.fields:
                raise IncompatibleStoreError(
                    f"the store {store.name!r} has no generations of items: whoever makes it needs a writer with "
                    "track_generations=True too"
                )
        self.keys, self.tail, self.max_size = keys, tail, size
        self._place = np.zeros(store.capacity, np.int64)  # of each row
        self._place[keys.row] = np.arange(rows)
        self._state: NDArray[np.int64] = state  # a view of the segment
        self._highest: NDArray[np.float64] = store.column(_HIGHEST)[int(keys.row[0])]
        self.names = [name for name in store.fields if is_items_field(name)]
        self.store = store  # at last: other threads take what is above as soon as they see it

    def make(self, fields: Mapping[str, Field], batch_dims: int, tail: tuple[int, ...]) -> None:
        """Makes the store for items of these fields, unless it is there.

        Args:
            batch_dims: batch axes of an item.
            tail: lengths of the storage's axes after the first.
        """
        if self.join():
            return
        with self._writer.thread():
            if self.store is None:
                self._make(dict(fields), batch_dims, tail)

    def _make(self, fields: dict[str, Field], batch_dims: int, tail: tuple[int, ...]) -> None:
        """Makes the store, or joins the one that another process makes at the same time."""
        if self._store_place.name is None and os.getpid() != self._made_by:
            raise ArgumentError(
                "this storage has no name and had no item when it was shared, so the processes would not share any: "
                "add an item before, or give it a name (store=...)"
            )
        if self._tracked:
            fields[GENERATION] = Field((), "int64")
        size = rounded(self.max_size, tail)
        length = min(size, _ROW_ITEMS)
        rows = -(-size // length)
        own = {
            _PLACE: Field((), "int64", per_row=True),
            _STATE: Field((REVISION + 1 + len(tail),), "int64", per_row=True),
            _HIGHEST: Field((1,), "float64", per_row=True),
        }
        options: dict[str, Any] = {"capacity": rows, "reserve": self._reserve, "priority_per": "step"}
        store = self._store_place.make(fields | own, max_length=length, **options)
        state = np.zeros(REVISION + 1 + len(tail), np.int64)
        state[SIZE], state[BATCH_DIMS], state[REVISION + 1 :] = size, batch_dims, tail
        with on_error(store.close):
            with self._writer.locked(store):
                if len(store) < rows:
                    _fill(store, fields, rows, state)
        self.adopt(store)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes and threads from writing; may be nested. Before the first item it keeps threads.

        Raises:
            WaitTimeoutError: another process writes for longer than `timeout_s`.
        """
        if self.join():
            assert self.store is not None
            with self._writer.locked(self.store):
                yield
        else:
            with self._writer.thread():
                yield

    def close(self) -> None:
        """Closes the storage's store; what is called then raises `StoreClosedError`."""
        self._closed = True
        if self.store is not None:
            self.store.close()
        self._writer.close()
        self._store_place.leave()

    def cleanup(self) -> bool:
        """Closes the storage and removes its store for all processes, and the `scratch_dir` if that is then empty.

        Returns: whether there was a store with a name or a file. One without goes with its last process.
        """
        removed = False
        if not self._closed:
            if self._store_place.name is not None and self.join():
                assert self.store is not None
                removed = self.store.unlink()
            self.close()
            self._store_place.tidy()
        return removed

    # --- what all processes share -----------------------------------------------------------------------------

    def shared(self, place: int) -> int:
        """A number of the state; 0 before the first item."""
        if not self.join():
            return 0
        self.check_open()
        return int(self._state[place])

    def share(self, place: int, value: int) -> None:
        """Sets a number of the state; before the first item there is none."""
        if self.join():
            self.check_open()
            self._state[place] = value

    def move_cursor(self, index: int) -> None:
        """Sets where the next item goes; before the first item there is no cursor."""
        if self.join() and self.shared(CURSOR) != index:
            with self.locked():
                self._state[CURSOR] = index
                self._state[REWRITES] += 1

    @property
    def name(self) -> str | None:
        """Of the store; None where it has none and is not there."""
        return self._store_place.name if self.store is None else self.store.name

    @property
    def scratch_dir(self) -> str | None:
        """The folder of the store's file, if it was given."""
        folder = self._store_place.folder
        return None if folder is None else str(folder)

    @property
    def auto_cleanup(self) -> bool:
        """Whether the store is removed with the last process that uses it."""
        return self._store_place.auto_cleanup

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def check_open(self) -> None:
        """Raises `StoreClosedError` where the store is closed."""
        if self.store is None or self.store.closed:
            raise StoreClosedError("the storage's store was closed")

    @property
    def highest(self) -> float:
        """The priority that new items get: the highest that was set so far, as it is stored, and 1 before the first."""
        self.check_open()
        return float(self._highest[0]) or 1.0

    def raise_highest_to(self, power: float) -> None:
        """Raises it to a power, as all priorities are; while none was set it stays 1."""
        self.check_open()
        if self._highest[0]:
            self._highest[0] **= power

    def raise_highest(self, priority: float) -> None:
        """Raises it to that of an item, if that is higher."""
        if priority > float(self._highest[0]):
            with self.locked():
                self._highest[0] = max(priority, float(self._highest[0]))

    # --- items ------------------------------------------------------------------------------------------------

    def keys_at(self, index: NDArray[np.int64]) -> Keys:
        """Keys of the steps that items are."""
        self.check_open()
        assert self.store is not None
        length = self.store.max_length
        return self.keys[index // length].of_steps(index % length)

    def index_of(self, keys: Keys) -> NDArray[np.int64]:
        """Items by the keys of their steps."""
        assert self.store is not None
        assert keys.step is not None
        found: NDArray[np.int64] = self._place[keys.row] * self.store.max_length + keys.step
        return found

    def read(self, index: NDArray[np.int64], names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tensors (n, ...) of items, of some fields of the store."""
        keys = self.keys_at(index)
        assert self.store is not None
        batch: Any = fetch(self.store, keys.without_steps(), fields=list(names), window=1, ends=keys.step)
        return {name: batch[name][:, 0] for name in names}

    def view(self, name: str) -> torch.Tensor:
        """A field of all items there is room for, (max_size, ...): the segment's own memory, to be read.

        What another process writes meanwhile may be there by halves; `read` is never torn.
        """
        self.check_open()
        assert self.store is not None
        column = self.store.column(name)
        if not np.array_equal(self.keys.row, np.arange(len(self.keys))):
            column = column[self.keys.row]  # a copy: a store that was loaded may have its rows in another order
        flat = torch.from_numpy(column.reshape(-1, *column.shape[2:])[: self.max_size])
        return flat.view(dtype_of(self.store.fields[name]))

    def write(self, index: NDArray[np.int64], arrays: Mapping[str, Any]) -> None:
        """Writes fields (n, ...) of items in place. The caller has the lock.

        Raises:
            StaleKeyError: a process was killed while it wrote to such an item's row.
        """
        assert self.store is not None
        skipped = sum(
            self.store.write(self.keys[rows], fields, starts=starts)
            for rows, starts, fields in pieces_of(index, dict(arrays), self.store.max_length)
        )
        if skipped:
            raise StaleKeyError(
                "rows of the storage are gone: a process was killed while it wrote to them; make the buffer anew"
            )

    def clear(self) -> None:
        """Leaves no item. The caller has the lock."""
        assert self.store is not None
        n = self.shared(LENGTH)
        self._state[LENGTH] = self._state[CURSOR] = 0
        self._state[REWRITES] += 1
        for index in _pieces(n):
            self.outdate(index)
            self.store.update_priorities(self.keys_at(index), np.zeros(len(index)))

    def take(self, saved: StoredItems) -> None:
        """Replaces items, priorities and cursor by another storage's.

        Raises:
            SchemaError: they have other fields.
        """
        assert saved.store is not None
        assert saved.tail is not None
        fields = {name: saved.store.fields[name] for name in saved.names}
        self.make(fields, saved.shared(BATCH_DIMS), saved.tail)
        assert self.store is not None
        if fields != {name: self.store.fields[name] for name in self.names}:
            raise SchemaError(f"items have {sorted(self.names)}, those of the checkpoint {sorted(saved.names)}")
        with self.locked():
            self.clear()
            n = saved.shared(LENGTH)
            for index in _pieces(n):
                stamps = self.stamped(index, np.ones(len(index), np.int64))
                self.write(index, saved.read(index, saved.names) | stamps)
                priorities = saved.store.status(saved.keys_at(index))["priority"]
                self.store.update_priorities(self.keys_at(index), priorities)
            for place in (LENGTH, CURSOR, WRITES):
                self._state[place] = saved.shared(place)
            self._state[ADDED] += n
            self._state[REWRITES] += 1
            self._highest[0] = saved.highest

    # --- pickling ---------------------------------------------------------------------------------------------

    def pickled(self, state: dict[str, Any]) -> dict[str, Any]:
        """What a pickle holds of this: the store by name."""
        if not self.join():
            self._store_place.own()
        for name in ("_writer", "keys", "_place", "_state", "_highest", "names"):
            state.pop(name, None)
        return state

    def restore(self, store: Store | None) -> None:
        """Takes the store of a pickle, when all else is there."""
        self._writer, self.store = WriterLock(self._timeout_s), None
        if store is not None:
            self.adopt(store)

    # --- generations ------------------------------------------------------------------------------------------

    def track_generations(self) -> None:
        """Has the store count how often each item is written. It is made so, or was.

        Raises:
            IncompatibleStoreError: it is there and does not.
        """
        self._tracked = True
        if self.join() and not self.tracks_generations:
            raise IncompatibleStoreError(
                "the storage has items and no generations: make its first writer with track_generations=True"
            )

    @property
    def tracks_generations(self) -> bool:
        """Whether the store counts how often items are written; False before the first item."""
        return self.join() and self.store is not None and GENERATION in self.store.fields

    def generations_of(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        """Generations (n,) of items, -1 of those that were never written."""
        return self.read(index, [GENERATION])[GENERATION].numpy() - 1

    def stamped(self, index: NDArray[np.int64], writes: NDArray[np.int64]) -> dict[str, torch.Tensor]:
        """What is written with items that are written so often; nothing where generations are not tracked."""
        if not self.tracks_generations:
            return {}
        return {GENERATION: torch.from_numpy(self.generations_of(index) + 1 + writes)}

    def outdate(self, index: NDArray[np.int64]) -> None:
        """Makes generations of items that were ever written those of earlier ones. The caller has the lock."""
        if self.tracks_generations:
            written = index[self.generations_of(index) >= 0]
            self.write(written, self.stamped(written, np.ones(len(written), np.int64)))


def _pieces(n: int) -> Iterator[NDArray[np.int64]]:
    """Numbers below n, some at once."""
    for begin in range(0, n, _PIECE):
        yield np.arange(begin, min(n, begin + _PIECE))


def rounded(max_size: int, tail: Sequence[int]) -> int:
    """Items of a storage with these axes after the first: at least so many."""
    return -(-max_size // prod(tail)) * prod(tail)


def dtype_of(field: Field) -> torch.dtype:
    """A field's torch dtype."""
    return getattr(torch, field.dtype)  # type: ignore[no-any-return]


def _fill(store: Store, fields: Mapping[str, Field], rows: int, state: NDArray[np.int64]) -> None:
    """Inserts the rows that are still missing: zeros, of priority 0."""
    if store.capacity != rows:
        raise IncompatibleStoreError(f"the store {store.name!r} has {store.capacity} rows, {rows} are needed")
    length = store.max_length
    size = sum(field.block_nbytes(length) for field in fields.values())
    some = max(1, min(1024, _BYTES_AT_ONCE // max(1, size)))
    for begin in range(len(store), rows, some):
        n = min(some, rows - begin)
        zeros = {name: torch.zeros(n, length, *field.shape, dtype=dtype_of(field)) for name, field in fields.items()}
        store.insert(
            {
                **zeros,
                _PLACE: np.arange(begin, begin + n),
                _STATE: np.tile(state, (n, 1)),
                _HIGHEST: np.zeros((n, 1)),
            },
            priorities=np.zeros(n),
        )


def _unfinished(store: Store) -> bool:
    """Whether rows of a storage's store are still missing: they are inserted in several batches."""
    if not len(store):
        return True
    if _STATE not in store.fields:
        return False
    state: Any = store.column(_STATE)[int(store.keys().row[0])]
    return len(store) < -(-int(state[SIZE]) // store.max_length)


__all__ = [
    "ADDED",
    "BATCH_DIMS",
    "CURSOR",
    "GENERATION",
    "LENGTH",
    "REVISION",
    "REWRITES",
    "SIZE",
    "WRITES",
    "StoredItems",
    "dtype_of",
    "rounded",
]
