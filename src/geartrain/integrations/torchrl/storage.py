"""Storage of a torchrl `ReplayBuffer` in shared memory: items by index, in rows of many, with a priority each."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import is_tensorclass
from torchrl.data.replay_buffers.storages import StoreStorage
from torchrl.data.replay_buffers.storages.base import Storage

from geartrain.core.arguments import check_whole
from geartrain.core.arguments import timeout as checked_timeout
from geartrain.core.keys import Keys
from geartrain.core.schema import Field
from geartrain.errors import (
    ArgumentError,
    IncompatibleStoreError,
    SchemaError,
    StaleKeyError,
    StoreClosedError,
    StoreMissingError,
)
from geartrain.integrations.torchrl.indices import indices_of, pieces_of
from geartrain.integrations.torchrl.items import (
    OWN,
    batch_dims_of,
    fields_of,
    is_items_field,
    item_of,
    leaves_of,
    stacked,
)
from geartrain.integrations.transitions.writer_lock import WriterLock
from geartrain.replay.fetch import fetch
from geartrain.store.store import Store

# Items of a row, at most; and bytes of rows that are made at once.
_ROW_ITEMS, _BYTES_AT_ONCE = 512, 1 << 24
# Items whose priorities are set at once, or that are copied.
_PIECE = 1 << 16
# Fields of a row that are the storage's own; those of the first row count.
_PLACE, _STATE, _HIGHEST = OWN + "place", OWN + "state", OWN + "highest"
#: Places in the state that all processes share.
SIZE, LENGTH, CURSOR, WRITES, BATCH_DIMS, ADDED, REWRITES = range(7)


class SharedStorage(StoreStorage):  # type: ignore[misc]
    """A torchrl storage whose items are in a `geartrain.Store`: of one process, or by name of all of a host.

    Item i is a step of a row, and stays there: what is set is written in place, and a reader gets an item as it was
    before or as it is afterwards. The store is made with the first item, whose entries, shapes and dtypes all others
    have. Batches are copies in the CPU's memory.

    Args:
        max_size: items.
        store: the name of a store that several processes share; the first that writes makes it. Without one the storage
            is shared by pickling, and once it holds an item by forking.
        timeout_s: longest wait for another process that writes.
        reserve: allocate the memory when the store is made, as in `geartrain.Store.create`.

    Attributes:
        store: the store, or None before the first item.

    Raises:
        ArgumentError: a size that is none. IncompatibleStoreError: the store of that name is of other items, or is of
            another size. NoSpaceError: /dev/shm is too small.
    """

    device = torch.device("cpu")

    def __init__(
        self, max_size: int, *, store: str | None = None, timeout_s: float = 10.0, reserve: bool = True
    ) -> None:
        if check_whole("max_size", max_size) < 1:
            raise ArgumentError(f"max_size must be at least 1, found {max_size}")
        Storage.__init__(self, max_size)
        self._name = store
        self._timeout_s = checked_timeout(timeout_s)
        self._reserve = reserve
        self._tensorclass: Any = None
        self._closed = False
        self._made_by = os.getpid()
        self._writer = WriterLock(self._timeout_s)
        self.store: Store | None = None

    # --- the store --------------------------------------------------------------------------------------------

    def _join(self) -> bool:
        """Whether the store is there; opens one that another process has made."""
        if self._closed:
            raise StoreClosedError("the storage was closed")
        if self.store is not None:
            return True
        if self._name is None:
            return False
        with self._writer.thread():
            if self.store is not None:
                return True
            try:
                store = Store.open(self._name)
            except StoreMissingError:
                return False
            if _unfinished(store):  # another process is making it
                store.close()
                return False
            self._adopt(store)
        return True

    def _adopt(self, store: Store) -> None:
        """Takes an open store; raises where it is none of a storage of this size."""
        rows = -(-self.max_size // store.max_length)
        if _STATE not in store.fields or store.capacity < rows or not store.per_step:
            store.close()
            raise IncompatibleStoreError(f"the store {store.name!r} is none of a storage of {self.max_size} items")
        found = store.keys()
        places = np.asarray(fetch(store, found, fields=[_PLACE], window=1, output="numpy")[_PLACE])
        keys = found[np.argsort(places, kind="stable")]
        state: Any = store.column(_STATE)[int(keys.row[0])]
        if len(keys) != rows or int(state[SIZE]) != self.max_size:
            store.close()
            raise IncompatibleStoreError(
                f"the store {store.name!r} is of a storage of {int(state[SIZE])} items, this one is of {self.max_size}"
            )
        self.keys = keys
        self._place = np.zeros(store.capacity, np.int64)  # of each row
        self._place[keys.row] = np.arange(rows)
        self._state: NDArray[np.int64] = state  # a view of the segment
        self._highest: NDArray[np.float64] = store.column(_HIGHEST)[int(keys.row[0])]
        self.names = [name for name in store.fields if is_items_field(name)]
        self.store = store  # at last: other threads take what is above as soon as they see it

    def make_for(self, data: Any, batched: bool) -> None:
        """Makes the store for items like this one, or like these, unless it is there."""
        if self._join():
            return
        with self._writer.thread():
            if self.store is None:
                self._make(leaves_of(data), batched, batch_dims_of(data, batched))

    def _make(self, leaves: dict[str, torch.Tensor], batched: bool, batch_dims: int) -> None:
        """Makes the store, or joins the one that another process makes at the same time."""
        if self._name is None and os.getpid() != self._made_by:
            raise ArgumentError(
                "this storage has no name and had no item when it was shared, so the processes would not share any: "
                "add an item before, or give it a name (store=...)"
            )
        fields = fields_of(leaves, batched)
        length = min(self.max_size, _ROW_ITEMS)
        rows = -(-self.max_size // length)
        own = {
            _PLACE: Field((), "int64", per_row=True),
            _STATE: Field((8,), "int64", per_row=True),
            _HIGHEST: Field((1,), "float64", per_row=True),
        }
        options: dict[str, Any] = {"capacity": rows, "reserve": self._reserve, "priority_per": "step"}
        if self._name is None:
            store = Store.create(fields | own, max_length=length, **options)
        else:
            store = Store.open(self._name, fields | own, max_length=length, create="missing", **options)
        try:
            with self._writer.locked(store):
                if len(store) < rows:
                    self._fill(store, fields, rows, length, batch_dims)
        except BaseException:
            store.close()
            raise
        self._adopt(store)

    def _fill(self, store: Store, fields: dict[str, Field], rows: int, length: int, batch_dims: int) -> None:
        """Inserts the rows that are still missing: zeros, of priority 0."""
        if store.capacity != rows:
            raise IncompatibleStoreError(f"the store {store.name!r} has {store.capacity} rows, {rows} are needed")
        size = sum(length * field.itemsize * int(np.prod(field.shape)) for field in fields.values())
        some = max(1, min(1024, _BYTES_AT_ONCE // max(1, size)))
        for begin in range(len(store), rows, some):
            n = min(some, rows - begin)
            zeros = {name: torch.zeros(n, length, *field.shape, dtype=_dtype(field)) for name, field in fields.items()}
            state = np.zeros((n, 8), np.int64)
            state[:, SIZE], state[:, BATCH_DIMS] = self.max_size, batch_dims
            store.insert(
                {**zeros, _PLACE: np.arange(begin, begin + n), _STATE: state, _HIGHEST: np.ones((n, 1))},
                priorities=np.zeros(n),
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes and threads from writing; may be nested. Before the first item it keeps threads.

        Raises:
            WaitTimeoutError: another process writes for longer than `timeout_s`.
        """
        if self._join():
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

    # --- what all processes share -----------------------------------------------------------------------------

    def shared(self, place: int) -> int:
        """A number of the state; 0 before the first item."""
        if not self._join():
            return 0
        self._check_open()
        return int(self._state[place])

    def share(self, place: int, value: int) -> None:
        """Sets a number of the state; before the first item there is none."""
        if self._join():
            self._check_open()
            self._state[place] = value

    def move_cursor(self, index: int) -> None:
        """Sets where the next item goes; before the first item there is no cursor."""
        if self._join() and self.shared(CURSOR) != index:
            with self.locked():
                self._state[CURSOR] = index
                self._state[REWRITES] += 1

    def _check_open(self) -> None:
        if self.store is None or self.store.closed:
            raise StoreClosedError("the storage's store was closed")

    @property
    def highest(self) -> float:
        """The priority that new items get: the highest so far, as it is stored."""
        self._check_open()
        return float(self._highest[0])

    def raise_highest(self, priority: float) -> None:
        """Raises it to that of an item, if that is higher."""
        if priority > self.highest:
            with self.locked():
                self._highest[0] = max(priority, float(self._highest[0]))

    @property
    def _len(self) -> int:
        return self.shared(LENGTH)

    @_len.setter
    def _len(self, value: int) -> None:
        self.share(LENGTH, value)

    @property
    def initialized(self) -> bool:
        """Whether the store is there."""
        return self._join()

    def __len__(self) -> int:
        return self.shared(LENGTH)

    def _empty(self) -> None:
        if self._join():
            with self.locked():
                n = len(self)
                self._state[LENGTH] = self._state[CURSOR] = 0
                self._state[REWRITES] += 1
                for begin in range(0, n, _PIECE):
                    index = np.arange(begin, min(n, begin + _PIECE))
                    self.store.update_priorities(self.keys_at(index), np.zeros(len(index)))  # type: ignore[union-attr]
        self._bump_mutation_revision()

    # --- items ------------------------------------------------------------------------------------------------

    def keys_at(self, index: NDArray[np.int64]) -> Keys:
        """Keys of the steps that items are."""
        self._check_open()
        assert self.store is not None
        length = self.store.max_length
        return self.keys[index // length].of_steps(index % length)

    def index_of(self, keys: Keys) -> NDArray[np.int64]:
        """Items by the keys of their steps."""
        assert self.store is not None
        assert keys.step is not None
        found: NDArray[np.int64] = self._place[keys.row] * self.store.max_length + keys.step
        return found

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Writes items in place; new ones get the highest priority so far.

        Args:
            cursor: index, or indices (n,), from 0 to max_size - 1.
            data: an item, or n of them along the first axis, or a list of items.
            set_cursor: whether the storage becomes as long as that; priorities are kept without.

        Raises:
            SchemaError: entries, shapes or dtypes that are not those of the first item. ArgumentError: indices out of
                range. WaitTimeoutError: another process writes for too long.
        """
        if isinstance(data, list):
            data = stacked(data)
        batched = not (isinstance(cursor, int | np.integer) or (isinstance(cursor, torch.Tensor) and cursor.ndim == 0))
        index = indices_of(cursor, self.max_size if set_cursor else len(self))
        if is_tensorclass(data):
            self._tensorclass = type(data)
        self.make_for(data, batched)
        assert self.store is not None
        leaves = leaves_of(data)
        arrays = self._checked(leaves, index, batched)
        if len(index) > self.max_size:  # the last ones stay
            arrays = {name: array[-self.max_size :] for name, array in arrays.items()}
            index = index[-self.max_size :]
        with self.locked():
            if set_cursor:
                self._set_last_cursor(cursor)
            come_next = self._come_next(index, set_cursor)
            try:
                skipped = sum(
                    self.store.write(self.keys[rows], fields, starts=starts)
                    for rows, starts, fields in pieces_of(index, arrays, self.store.max_length)
                )
            except BaseException:
                come_next = False
                raise
            finally:
                if not come_next:
                    self._state[REWRITES] += 1  # of what is half written too: whoever looks reads all anew
            if skipped:
                raise StaleKeyError(
                    "rows of the storage are gone: a process was killed while it wrote to them; make the buffer anew"
                )
            if set_cursor and len(index):
                self.store.update_priorities(self.keys_at(index), np.full(len(index), self.highest))
                # An interrupted write leaves all of these as they were: the next one goes to the same place.
                self._state[ADDED] += len(index) if come_next else 0
                self._state[CURSOR] = (int(index[-1]) + 1) % self.max_size
                self._state[LENGTH] = max(int(self._state[LENGTH]), int(index.max()) + 1)
        self._bump_mutation_revision()

    def _come_next(self, index: NDArray[np.int64], set_cursor: bool) -> bool:
        """Whether these items are appended: for `Trajectories`, which then reads no others."""
        length, cursor = int(self._state[LENGTH]), int(self._state[CURSOR])
        follows = set_cursor and len(index) and index[0] == cursor and length in (cursor, self.max_size)
        return bool(follows and ((np.diff(index) - 1) % self.max_size == 0).all())

    def _checked(self, leaves: dict[str, torch.Tensor], index: NDArray[np.int64], batched: bool) -> dict[str, Any]:
        """Tensors (n, ...) of the fields, on the CPU."""
        assert self.store is not None
        if "index" not in self.names:
            leaves.pop("index", None)  # a TensorDictReplayBuffer adds it to what it was given
        if set(leaves) != set(self.names):
            raise SchemaError(f"items have {sorted(self.names)}, found {sorted(leaves)}")
        found = {}
        for name, leaf in leaves.items():
            field = self.store.fields[name]
            wanted = (len(index), *field.shape) if batched else tuple(field.shape)
            if tuple(leaf.shape) != wanted:
                raise SchemaError(f"{name!r} has shape {tuple(leaf.shape)}, {wanted} was expected")
            if leaf.dtype != _dtype(field):
                raise SchemaError(f"{name!r} is {leaf.dtype}, items have {field.dtype}")
            found[name] = (leaf if batched else leaf[None]).cpu().contiguous()
        return found

    def get(self, index: Any) -> Any:
        """A copy of items, one native call: of one for a number, of all for `...`; None puts an axis before all.

        Raises:
            RuntimeError: nothing was written yet. IndexError: there is no such item.
        """
        if not self._join():
            raise RuntimeError("Cannot get elements out of a non-initialized storage.")
        if index is None:
            return self.get(slice(None))[None]
        assert self.store is not None
        self._check_open()
        array = isinstance(index, torch.Tensor | np.ndarray)  # a buffer makes arrays of tensors
        alone = isinstance(index, int | np.integer) or (array and index.ndim == 0)
        shape = tuple(index.shape) if array and index.dtype not in (torch.bool, np.bool_) else None
        chosen = indices_of(index, len(self))
        leaves = self.read(chosen, self.names)
        if alone:
            leaves, shape = {name: leaf[0] for name, leaf in leaves.items()}, ()
        elif shape is not None and len(shape) > 1:
            leaves = {name: leaf.reshape(*shape, *leaf.shape[1:]) for name, leaf in leaves.items()}
        else:
            shape = (len(chosen),)
        dims = int(self._state[BATCH_DIMS])
        inner = tuple(next(iter(leaves.values())).shape)[len(shape) : len(shape) + dims]
        item = item_of(leaves, (*shape, *inner))
        return item if self._tensorclass is None else self._tensorclass.from_tensordict(item)

    def read(self, index: NDArray[np.int64], names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Tensors (n, ...) of items, of some fields of the store."""
        keys = self.keys_at(index)
        assert self.store is not None
        batch: Any = fetch(self.store, keys.without_steps(), fields=list(names), window=1, ends=keys.step)
        return {name: batch[name][:, 0] for name in names}

    def contains(self, item: Any) -> Any:
        """Whether there is an item of this index, or of each."""
        if isinstance(item, torch.Tensor) and item.ndim:
            n = len(self)
            return (item >= -n) & (item < n)
        return bool(-len(self) <= int(item) < len(self))

    # --- saving and sharing -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A copy of all items."""
        n = len(self)
        return {"_storage": self.get(slice(0, n)) if n else None, "_len": n}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Writes the items that `state_dict` had, from index 0 on."""
        self._empty()
        if state_dict["_len"]:
            self.set(torch.arange(state_dict["_len"]), state_dict["_storage"])
            self.move_cursor(state_dict["_len"] % self.max_size)

    def dumps(self, path: Any) -> None:
        """Saves a checkpoint of the store, priorities included, as `geartrain.Store.save`."""
        if not self._join():
            raise RuntimeError("Cannot save a non-initialized storage.")
        with self.locked():
            self.store.save(Path(path) / "store")  # type: ignore[union-attr]

    def loads(self, path: Any) -> None:
        """Loads one, in the place of all items there are. A storage without a name or items takes the store as it is.

        Raises:
            IncompatibleStoreError: it is of another size. SchemaError: it is of other items.
        """
        if self._name is None and self.store is None:
            self._adopt(Store.load(Path(path) / "store", _new_name(), persist=False))
            self._bump_mutation_revision()
            return
        saved = SharedStorage(self.max_size)
        saved.loads(path)
        assert saved.store is not None
        try:
            with self.locked():
                self._empty()
                n = len(saved)
                for begin in range(0, n, _PIECE):
                    index = np.arange(begin, min(n, begin + _PIECE))
                    self.set(torch.from_numpy(index), saved.get(index))
                    priorities = saved.store.status(saved.keys_at(index))["priority"]
                    self.store.update_priorities(self.keys_at(index), priorities)  # type: ignore[union-attr]
                if n:
                    self.move_cursor(saved.shared(CURSOR))
                    self.share(WRITES, saved.shared(WRITES))
                    self._highest[0] = saved.highest
        finally:
            saved.close()

    def __getstate__(self) -> dict[str, Any]:
        """The store by name: what a pickle leads to is the same storage, in any process of the host."""
        if not self._join() and self._name is None:
            self._name = _new_name()  # of the store that this one or the copy makes
        state = Storage.__getstate__(self)
        for name in ("_writer", "keys", "_place", "_state", "_highest", "names"):
            state.pop(name, None)
        return state  # type: ignore[no-any-return]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `__getstate__`."""
        store = state.pop("store")
        Storage.__setstate__(self, state)
        self._writer, self.store = WriterLock(self._timeout_s), None
        if store is not None:
            self._adopt(store)

    def __repr__(self) -> str:
        name = self._name if self.store is None else self.store.name
        return f"SharedStorage(store={name!r}, len={0 if self._closed else len(self)}, max_size={self.max_size})"


def _new_name() -> str:
    """A name for a store that was given none."""
    return f"torchrl-{os.getpid()}-{secrets.token_hex(8)}"


def _unfinished(store: Store) -> bool:
    """Whether rows of a storage's store are still missing: they are inserted in several batches."""
    if not len(store):
        return True
    if _STATE not in store.fields:
        return False
    state: Any = store.column(_STATE)[int(store.keys().row[0])]
    return len(store) < -(-int(state[SIZE]) // store.max_length)


def _dtype(field: Field) -> torch.dtype:
    """A field's torch dtype."""
    return getattr(torch, field.dtype)  # type: ignore[no-any-return]


__all__ = ["ADDED", "BATCH_DIMS", "CURSOR", "LENGTH", "REWRITES", "SIZE", "WRITES", "SharedStorage"]
