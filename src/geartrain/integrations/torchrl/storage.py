"""Storage of a torchrl `ReplayBuffer` in shared memory: items by index, packed into rows, each with a priority."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import is_tensor_collection, is_tensorclass
from torchrl.data.replay_buffers.storages import TensorStorage
from torchrl.data.replay_buffers.storages.base import Storage

from geartrain.core.arguments import check_whole
from geartrain.errors import SchemaError
from geartrain.integrations.torchrl.indices import cells_along, cells_of, folded, indices_of, is_number
from geartrain.integrations.torchrl.items import batch_dims_of, fields_of, item_of, leaves_of, name_of, stacked
from geartrain.integrations.torchrl.saving import (
    StoreCheckpointer,
    items_of_state_dict,
    load_items,
    save_items,
    saved_items,
)
from geartrain.integrations.torchrl.store_place import StorePlace, new_name
from geartrain.integrations.torchrl.stored_items import (
    ADDED,
    BATCH_DIMS,
    CURSOR,
    GENERATION,
    LENGTH,
    REVISION,
    REWRITES,
    StoredItems,
    dtype_of,
)
from geartrain.store.store import Store


class SharedStorage(StoredItems, TensorStorage):  # type: ignore[misc]
    """A torchrl storage whose items are in a `geartrain.Store`, which processes of a host can share by name.

    Item i is always the same step of the same row. `set` writes it in place, and a reader gets the item either before
    or after the write. The store is made with the first item. All others must have its entries, shapes and dtypes.
    Batches are copies in the CPU's memory.

    Args:
        max_size: number of items. With several axes it counts cells, rounded up to whole entries along the first axis.
        ndim: number of axes. With 2 or more, the first axis is time, and an entry along it has the items of all
            environments of a step: (T, B, ...). The first entry determines their number. The same in all processes.
        store: name of a store that several processes share; the first that writes makes it. A storage without a name is
            shared by pickling, and after its first item by forking. The last process that used the store removes it.
            But if a storage without a name was pickled before its first item, the store is removed with that storage.
        scratch_dir: folder for the store's file, for example on a disk; an alternative to a name.
        existsok: accept an existing file, whose items the storage then has. With False the first write raises
            `RuntimeError`.
        auto_cleanup: remove the store with the last process that uses it. By default True, unless it is a file.
        timeout_s: longest wait for another process that writes.
        reserve: allocate the memory when the store is made, as in `geartrain.Store.create`.

    Attributes:
        store: the store, or None before the first item.
        cursor_to_save: the cursor that a writer saves with a checkpoint that has none.

    Raises:
        ArgumentError: a size or number of axes that is none. IncompatibleStoreError: the store of that name is of other
            items, or is of another size. NoSpaceError: /dev/shm is too small.
    """

    # torchrl's samplers and sample units ask for a `TensorStorage`; none of its code that stores or reads items runs.
    supports_conditional_update = True
    _default_checkpointer = StoreCheckpointer
    device = torch.device("cpu")

    def __init__(
        self,
        max_size: int,
        *,
        ndim: int = 1,
        store: str | None = None,
        scratch_dir: str | os.PathLike[str] | None = None,
        existsok: bool = False,
        auto_cleanup: bool | None = None,
        timeout_s: float = 10.0,
        reserve: bool = True,
    ) -> None:
        check_whole("max_size", max_size, 1)
        check_whole("ndim", ndim, 1)
        Storage.__init__(self, max_size)
        place = StorePlace(store, scratch_dir, existsok, auto_cleanup)
        StoredItems.__init__(self, max_size, ndim, place, timeout_s, reserve)
        self.ndim = ndim
        self._tensorclass: Any = None
        self.cursor_to_save: dict[str, int] | None = None
        self._guard = threading.local()

    @property
    def _len(self) -> int:
        return self.shared(LENGTH)

    @_len.setter
    def _len(self, value: int) -> None:
        self.share(LENGTH, value)

    @property
    def initialized(self) -> bool:
        """Whether the store is there."""
        return self.join()

    def __len__(self) -> int:
        return self.shared(LENGTH)

    @property
    def _total_shape(self) -> torch.Size | None:
        if not self.join():
            return None
        tail = self._tail
        return torch.Size([self.max_size // prod(tail), *tail])

    @property
    def _tail(self) -> tuple[int, ...]:
        """Axes after the first; the store is there, or the storage has one."""
        assert self.tail is not None
        return self.tail

    @property
    def _storage(self) -> Any:
        """Views of all that there is room for, as torchrl's storages have it: for its own samplers, which read."""
        return self._views(self.max_size) if self.join() else None

    @property
    def _mutation_revision(self) -> int:
        return self.shared(REVISION)

    def _bump_mutation_revision(self) -> None:
        """Tells all processes that items have changed; torchrl calls it when it has written through `buffer[:]`."""
        self._count(REVISION, REWRITES)

    def _count(self, *places: int) -> None:
        """Raises numbers of the state by one."""
        for place in places:
            self.share(place, self.shared(place) + 1)

    @property
    def _last_cursor_index(self) -> int | None:
        """The entry along the first axis that was written last, by any process."""
        if not self.shared(LENGTH):
            return None
        return (self.shared(CURSOR) - 1) % self.max_size // prod(self._tail)

    def _empty(self) -> None:
        if self.join():
            with self.locked():
                self.clear()
                self._bump_mutation_revision()

    def flatten(self) -> Any:
        """A `TensorStorage` of one axis with a copy of all items; this one, where it has one."""
        if self.ndim == 1:
            return self
        if not self.join():
            raise RuntimeError("Cannot flatten a non-initialized storage.")
        index = np.arange(len(self))
        return TensorStorage(self._items(self.read(index, self.names), (len(index),)))

    def contains(self, item: Any) -> Any:
        """Whether there is an entry of this index along the first axis, or of each."""
        n = len(self) // prod(self.tail or (1,))
        if isinstance(item, torch.Tensor) and item.ndim:
            return (item >= -n) & (item < n)
        return bool(-n <= int(item) < n)

    # --- writing ----------------------------------------------------------------------------------------------

    def make_for(self, data: Any, batched: bool) -> None:
        """Makes the store for items like this one, or like these, unless it is there.

        Raises:
            SchemaError: parts that are no tensors, or that lack the storage's axes.
        """
        if is_tensorclass(data):
            self._tensorclass = type(data)
        if self.join():
            return
        leaves = leaves_of(data)
        lead = batched + self.ndim - 1
        tail = tuple(next(iter(leaves.values())).shape)[batched:lead]
        if any(tuple(leaf.shape)[batched:lead] != tail or leaf.ndim < lead for leaf in leaves.values()) or 0 in tail:
            raise SchemaError(f"items of a storage with ndim={self.ndim} have {self.ndim - 1} axes in common")
        self.make(fields_of(leaves, lead), batch_dims_of(data, lead), tail)

    def _init(self, data: Any) -> None:
        """Makes the store for items like this one, as torchrl's storages do."""
        self.make_for(data, False)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Writes items in place; new ones get the highest priority so far.

        Args:
            cursor: index, or indices (n,), from 0 to max_size - 1, along the first axis of several.
            data: an item, or n of them along the first axis, or a list of items.
            set_cursor: whether the storage becomes as long as that. Without, priorities are kept, and what is set
                behind the last item becomes one when the storage is that long.

        Raises:
            SchemaError: entries, shapes or dtypes that are not those of the first item. ArgumentError: indices out of
                range. WaitTimeoutError: another process writes for too long.
        """
        self._put(cursor, data, new=set_cursor, moves=set_cursor)

    def __setitem__(self, index: Any, data: Any) -> None:
        """Sets existing items; raises `IndexError` if an index has none."""
        self._put(index, data, new=False, moves=False, there=True)

    def write_at(self, cursor: Any, data: Any) -> None:
        """Writes new items at indices, like `set`, without moving the cursor."""
        self._put(cursor, data, new=True, moves=False)

    def _put(self, cursor: Any, data: Any, *, new: bool, moves: bool, there: bool = False) -> None:
        if isinstance(data, list):
            data = stacked(data)
        batched = not is_number(cursor)
        self.make_for(data, batched)
        assert self.store is not None
        if isinstance(cursor, tuple) and self.ndim > 1:
            index, shape = cells_of(cursor, self._shape(not there))
        else:
            first = indices_of(cursor, self._shape(not there)[0])
            index, shape = cells_along(first, self._tail), ((len(first),) if batched else ()) + self._tail
        arrays = self._checked(leaves_of(data), shape)
        writes = np.ones(len(index), np.int64)
        if len(index) > self.max_size:  # the last ones stay
            writes = np.bincount(index, minlength=self.max_size)[index[-self.max_size :]]
            arrays = {name: array[-self.max_size :] for name, array in arrays.items()}
            index = index[-self.max_size :]
        with self.locked():
            if moves:
                self._set_last_cursor(cursor)
            come_next = self._come_next(index, moves)
            try:
                self.write(index, arrays | (self.stamped(index, writes) if new else {}))
            except BaseException:
                come_next = False
                raise
            finally:
                if not come_next:
                    self.share(
                        REWRITES, self.shared(REWRITES) + 1
                    )  # of what is half written too: whoever looks reads all anew
            if new and len(index):
                self.store.update_priorities(self.keys_at(index), np.full(len(index), self.highest))
                # An interrupted write leaves all of these as they were: the next one goes to the same place.
                self.share(ADDED, self.shared(ADDED) + (len(index) if come_next else 0))
                if moves:
                    self.share(CURSOR, (int(index[-1]) + 1) % self.max_size)
                self.share(LENGTH, max(self.shared(LENGTH), int(index.max()) + 1))
            self._count(REVISION)

    def shape_of_all(self) -> tuple[int, ...]:
        """Entries along each axis that there is room for; the store is there, or the storage has one axis."""
        return self._shape(True)

    def _shape(self, all_of_it: bool) -> tuple[int, ...]:
        """Entries along each axis: of the whole capacity, or of the present items."""
        tail = self._tail
        return ((self.max_size if all_of_it else len(self)) // prod(tail), *tail)

    def _come_next(self, index: NDArray[np.int64], moves: bool) -> bool:
        """Whether these items are appended: for `Trajectories`, which then reads no others."""
        length, cursor = self.shared(LENGTH), self.shared(CURSOR)
        follows = moves and len(index) and index[0] == cursor and length in (cursor, self.max_size)
        return bool(follows and ((np.diff(index) - 1) % self.max_size == 0).all())

    def _checked(self, leaves: dict[str, torch.Tensor], shape: tuple[int, ...]) -> dict[str, Any]:
        """Tensors (n, ...) of the fields, on the CPU, of items that lie in an array of this shape."""
        assert self.store is not None
        if "index" not in self.names:
            leaves.pop("index", None)  # a TensorDictReplayBuffer adds it to what it was given
        if set(leaves) != set(self.names):
            raise SchemaError(f"items have {sorted(self.names)}, found {sorted(leaves)}")
        found = {}
        for name, leaf in leaves.items():
            field = self.store.fields[name]
            wanted = (*shape, *field.shape)
            if tuple(leaf.shape) != wanted:
                raise SchemaError(f"{name!r} has shape {tuple(leaf.shape)}, {wanted} was expected")
            if leaf.dtype != dtype_of(field):
                raise SchemaError(f"{name!r} is {leaf.dtype}, items have {field.dtype}")
            found[name] = leaf.cpu().contiguous().reshape(-1, *field.shape)
        return found

    # --- reading ----------------------------------------------------------------------------------------------

    def __getitem__(self, item: Any) -> Any:
        """As `get`; `[:]` and `[...]` are views of all items, as of torchrl's storages.

        Writes to a view change the storage, without a lock. A process that reads meanwhile may get a part of such a
        write.
        """
        parts = item if isinstance(item, tuple) and item else (item,)
        if not all(part is Ellipsis or (isinstance(part, slice) and part == slice(None)) for part in parts):
            return self.get(item)
        if not self.join():
            raise RuntimeError("Cannot get elements out of a non-initialized storage.")
        return self._views(len(self))

    def _views(self, n: int) -> Any:
        """Views of the first items, entries of them where there are several axes."""
        shape = (n // prod(self._tail), *self._tail)
        return self._items({name: folded(self.view(name)[:n], shape) for name in self.names}, shape)

    def get(self, index: Any) -> Any:
        """A copy of items, one native call: of one for a number, of all for `...`; None puts an axis before all.

        Args:
            index: numbers along the first axis, as torch's indexing; of several axes a tuple of such. The name of an
                entry, or the names on the way to it: that entry of all items, a view to be read.

        Raises:
            RuntimeError: nothing was written yet. IndexError: there is no such item. KeyError: no such entry.
        """
        if not self.join():
            raise RuntimeError("Cannot get elements out of a non-initialized storage.")
        if isinstance(index, str) or (isinstance(index, tuple) and index and all(isinstance(k, str) for k in index)):
            return self._entry(index)
        self.check_open()
        if self.ndim > 1:
            chosen, shape = cells_of(index, self._shape(False))
        elif index is None:
            return self.get(slice(None))[None]
        else:
            array = isinstance(index, torch.Tensor | np.ndarray)  # a buffer makes arrays of tensors
            chosen = indices_of(index, len(self))
            shape = (len(chosen),)
            if is_number(index):
                shape = ()
            elif array and index.dtype not in (torch.bool, np.bool_):
                shape = tuple(index.shape)
        leaves = self.read(chosen, self.names)
        if len(shape) != 1:
            leaves = {name: leaf.reshape((*shape, *leaf.shape[1:])) for name, leaf in leaves.items()}
        return self._items(leaves, shape)

    def _items(self, leaves: dict[str, torch.Tensor], shape: tuple[int, ...]) -> Any:
        """Items of this shape as what was added."""
        dims = self.shared(BATCH_DIMS)
        inner = tuple(next(iter(leaves.values())).shape)[len(shape) : len(shape) + dims]
        item = item_of(leaves, (*shape, *inner))
        return item if self._tensorclass is None else self._tensorclass.from_tensordict(item)

    def _entry(self, key: Any) -> Any:
        """A view of an entry of all items."""
        name = name_of(key)
        if name not in self.names:
            return self._views(len(self))[key]
        return folded(self.view(name)[: len(self)], self._shape(False))

    # --- conditional updates ----------------------------------------------------------------------------------

    def _conditional_patch_leaf(self, key: Any) -> torch.Tensor:
        if not self.join():
            raise RuntimeError(
                "Conditional updates require an initialized storage: add items before calling update_if_present."
            )
        name = name_of(key)
        if name not in self.names:
            raise KeyError(f"Key {key} does not exist in the storage, whose items have {', '.join(self.names)}")
        shape = self._total_shape
        assert shape is not None
        return folded(self.view(name), shape)

    def _validate_conditional_patch(self, index: Any, patch: Any) -> Any:
        found = TensorStorage._validate_conditional_patch(self, index, patch)
        self._guard.armed, self._guard.seen = True, None
        return found

    def set_generations(self, generations: torch.Tensor) -> None:
        """Sets how often entries along the first axis were written before, from the first one on."""
        n = min(len(generations), self.shape_of_all()[0])
        index = cells_along(np.arange(n), self._tail)
        written = torch.repeat_interleave(generations[:n].cpu().long() + 1, len(index) // max(1, n))
        with self.locked():
            self.write(index, {GENERATION: written})

    def generations_along(self, entries: torch.Tensor) -> torch.Tensor:
        """How often entries along the first axis were written before, (n,); -1 of those that never were."""
        flat = entries.reshape(-1).cpu().numpy().astype(np.int64)
        found = np.full(len(flat), -1, np.int64)
        if self.tracks_generations:
            shape = self.shape_of_all()
            valid = (flat >= 0) & (flat < shape[0])
            found[valid] = self.generations_of(flat[valid] * prod(shape[1:]))
        if getattr(self._guard, "armed", False):
            self._guard.armed, self._guard.seen = False, dict(zip(flat.tolist(), found.tolist(), strict=True))
        return torch.from_numpy(found).reshape(entries.shape).to(entries.device)

    def _apply_conditional_patch(self, index: torch.Tensor, patch: Mapping[Any, torch.Tensor]) -> None:
        """Writes a patch, except to items that another process overwrote since `update_if_present` looked."""
        cells = index.cpu().numpy().astype(np.int64)
        several = cells.ndim > 1
        if several:
            flat = np.ravel_multi_index(tuple(cells.T), self.shape_of_all()).astype(np.int64)
        else:
            flat = cells_along(cells, self._tail)
        first = cells[:, 0] if several else cells
        seen = getattr(self._guard, "seen", None) or {}
        with self.locked():
            now = self.generations_along(torch.from_numpy(first)).numpy()
            live = np.array([seen.get(i, g) == g for i, g in zip(first.tolist(), now.tolist(), strict=True)], bool)
            live = np.repeat(live, len(flat) // max(1, len(live)))
            chosen = np.flatnonzero(live)
            # Of an item that is there twice the last one stays.
            _, last = np.unique(flat[chosen][::-1], return_index=True)
            chosen = chosen[::-1][last]
            arrays = {}
            for key, value in patch.items():
                field = self.store.fields[name_of(key)]  # type: ignore[union-attr]
                arrays[name_of(key)] = value.cpu().reshape(-1, *field.shape)[torch.from_numpy(chosen)].contiguous()
            if len(chosen):
                self.write(flat[chosen], arrays)
            self._bump_mutation_revision()

    # --- saving and sharing -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A copy of all items in the format of torchrl's `LazyTensorStorage`, which loads it; without priorities.

        Raises:
            TypeError: items are trees of tensors: `dumps` saves these.
        """
        if not self.join():
            return {"_storage": {}, "initialized": False, "_len": 0}
        with self.locked():
            items = self._storage
            if not is_tensor_collection(items) and not isinstance(items, torch.Tensor):
                raise TypeError("trees of tensors are not supported by state_dict: use dumps")
            items = items.clone()
        stored = items if isinstance(items, torch.Tensor) and not is_tensor_collection(items) else items.state_dict()
        return {"_storage": stored, "initialized": True, "_len": len(self)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Writes the items of a state dict, of this class or of torchrl's tensor storages, from index 0 on."""
        self._load(*items_of_state_dict(state_dict))

    def _load(self, items: Any, length: int) -> None:
        if length:
            load_items(self, items, length)
        else:
            self._empty()

    def dumps(self, path: Any) -> None:
        """Saves a checkpoint of the store, priorities included, as `geartrain.Store.save`.

        Where save hooks are registered, or the buffer has a checkpointer of torchrl's, it is in torchrl's format,
        without priorities.
        """
        if not self.join():
            raise RuntimeError("Cannot save a non-initialized storage.")
        with self.locked():
            self._set_last_cursor(self._last_cursor_index)
            self.cursor_to_save = save_items(self, Path(path))

    def loads(self, path: Any) -> None:
        """Loads one, in the place of all items there are. A storage without a name or items takes the store as it is.

        What torchrl's own storages and checkpointers have saved is read too, without priorities.

        Raises:
            IncompatibleStoreError: it is of another size. SchemaError: it is of other items. ArgumentError: there are
                load hooks for a checkpoint of a store.
        """
        if (found := saved_items(self, Path(path))) is not None:
            self._load(*found)
            return
        if self.name is None:
            self.adopt(Store.load(Path(path) / "store", new_name(), persist=False))
            self._bump_mutation_revision()
            return
        saved = SharedStorage(self.max_size, ndim=self.ndim)
        saved.loads(path)
        try:
            self.take(saved)
        finally:
            saved.close()
        self._bump_mutation_revision()

    def __getstate__(self) -> dict[str, Any]:
        """The store by name: what a pickle leads to is the same storage, in any process of the host."""
        state = self.pickled(Storage.__getstate__(self))
        del state["_guard"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        store = state.pop("store")
        Storage.__setstate__(self, state)
        self._guard = threading.local()
        self.restore(store)

    def __repr__(self) -> str:
        length = 0 if self.closed else len(self)
        return f"SharedStorage(store={self.name!r}, len={length}, max_size={self.max_size})"


__all__ = ["SharedStorage"]
