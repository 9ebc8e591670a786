"""`Keys`: row keys of the form (store, row index, generation).

A key goes stale when its row is overwritten or removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from geartrain.core.arguments import check_calls, check_whole, shown
from geartrain.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class Keys:
    """Keys of n rows. Each key names one trajectory, and never the trajectory that overwrites it.

    A row's generation changes whenever the row is overwritten or removed. A key whose generation differs is stale.
    Functions that take keys skip stale ones and count them.

    Index keys with an integer, slice, mask or index array; `+` joins them. `==` compares rows, generations and shards,
    but not stores, so that you can compare the batches of two runs.

    Args:
        row: (n,) uint32, row numbers.
        generation: (n,) uint32, generation that each row had.
        shard: (n,) uint16, number of each row's store or shard in its replay; None if there is only one.
        draw: (n,) int64, the row's number in a global batch; None outside of one.
        store: id of the rows' segment (`Store.id`), an int for all or (n,) uint64. Ids are random, so a key stays valid
            when it is pickled, sent or saved, and a store refuses the keys of another. A segment that is created again,
            or loaded from a checkpoint, has a new id: see `of_store`. None stands for the store that the keys are given
            to.
        step: (n,) uint32, step of the row, for stores with `priority_per="step"`. Batches have it; `Store.insert` and
            `Store.keys` return keys of rows, with None.
        env: (n,) index of the environment that each row was recorded from, in the keys that a recorder returns; of an
            `AgentRecorder` the agent. None elsewhere.

    Raises:
        ArgumentError: an array has the wrong shape, or a number is out of range.
        IndexError: an index is out of range or has the wrong type.

    Examples:
        >>> import geartrain as gt
        >>> keys = gt.Keys([3, 5], [1, 1])
        >>> keys[1] == gt.Keys([5], [1])
        True
        >>> len(keys + keys)
        4
    """

    __array_ufunc__ = None  # NumPy's operators leave keys alone

    row: NDArray[np.uint32]
    generation: NDArray[np.uint32]
    shard: NDArray[np.uint16] | None = None
    draw: NDArray[np.int64] | None = None
    store: int | NDArray[np.uint64] | None = None
    step: NDArray[np.uint32] | None = None
    env: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        row = _whole("rows", self.row, np.uint32)
        generation = _whole("generations", self.generation, np.uint32)
        if row.ndim != 1 or row.shape != generation.shape:
            raise ArgumentError(
                f"keys need rows and generations as two arrays (n,) of the same length, found {row.shape} and "
                f"{generation.shape}"
            )
        object.__setattr__(self, "row", row)
        object.__setattr__(self, "generation", generation)
        for name, dtype in (("shard", np.uint16), ("draw", np.int64), ("step", np.uint32)):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, self._column(name, dtype))
        if self.env is not None and np.shape(self.env) != self.row.shape:
            raise ArgumentError(f"{len(self.row)} keys have envs of shape {np.shape(self.env)}")
        store = self.store
        if store is None:
            return
        if type(store) is not int:
            is_array = np.ndim(store) > 0
            object.__setattr__(self, "store", self._column("store", np.uint64) if is_array else _store_id(store))
        elif not 0 <= store < 2**64:
            _store_id(store)

    def _column(self, name: str, dtype: Any) -> NDArray[Any]:
        array = _whole(f"{name}s", getattr(self, name), dtype)
        if array.shape != self.row.shape:
            raise ArgumentError(f"{len(self.row)} keys have {name}s of shape {array.shape}")
        return array

    @classmethod
    def packed(cls, raw: bytes | tuple[int, int], store: int) -> Keys:
        """Internal: keys of a store's rows from the bytes of the native layer (rows, then generations, uint32), or from
        the numbers of one row.

        The arrays are made when they are first used: writers often drop the keys of what they insert.
        """
        keys = cls.__new__(cls)
        keys.__dict__.update(_raw=raw, store=store)
        return keys

    def __getattr__(self, name: str) -> Any:
        if name not in ("row", "generation") or "_raw" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raw = self.__dict__["_raw"]
        both = np.frombuffer(raw, np.uint32).copy() if isinstance(raw, bytes) else np.array(raw, np.uint32)
        both = both.reshape(2, -1)
        self.__dict__["row"], self.__dict__["generation"] = both[0], both[1]
        return self.__dict__[name]

    def __len__(self) -> int:
        return len(self.row)

    def __call__(self) -> NoReturn:
        """Raises `TypeError`. `dict(batch)` would call it, because a batch has an attribute `keys`."""
        raise TypeError(
            "batch.keys are the keys of the rows, not a method: use dict(batch.fields) or batch.items() for the "
            "fields, list(batch) for their names, and batch.as_dict() for fields and metadata"
        )

    def __getitem__(self, index: Any) -> Keys:
        try:
            row = np.atleast_1d(self.row[index])
        except (IndexError, OverflowError, TypeError, ValueError):
            raise IndexError(
                f"index {len(self)} keys with a whole number, a slice, a mask ({len(self)},) or an array of whole "
                f"numbers; found {shown(index)}"
            ) from None
        shard = None if self.shard is None else np.atleast_1d(self.shard[index])
        draw = None if self.draw is None else np.atleast_1d(self.draw[index])
        store = np.atleast_1d(self.store[index]) if isinstance(self.store, np.ndarray) else self.store
        step = None if self.step is None else np.atleast_1d(self.step[index])
        env = None if self.env is None else np.atleast_1d(self.env[index])
        return Keys(row, np.atleast_1d(self.generation[index]), shard, draw, store, step, env)

    def __iter__(self) -> Iterator[Keys]:
        return (self[i] for i in range(len(self)))

    def __add__(self, other: Keys) -> Keys:
        return Keys.join([self, other])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Keys):
            return NotImplemented
        if (self.shard is None) != (other.shard is None):
            return False
        if (self.step is None) != (other.step is None):
            return False
        same_shard = self.shard is None or other.shard is None or np.array_equal(self.shard, other.shard)
        same_step = self.step is None or other.step is None or np.array_equal(self.step, other.step)
        return (
            same_shard
            and same_step
            and np.array_equal(self.row, other.row)
            and np.array_equal(self.generation, other.generation)
        )

    def __repr__(self) -> str:
        shown = ", ".join(f"{r}@{g}" for r, g in zip(self.row[:4], self.generation[:4], strict=True))
        if self.step is not None:
            named = zip(self.row[:4], self.generation[:4], self.step[:4], strict=True)
            shown = ", ".join(f"{r}@{g}[{s}]" for r, g, s in named)
        return f"Keys({len(self)}: {shown}{', ...' if len(self) > 4 else ''})"

    def of_shard(self, number: int) -> Keys:
        """The same keys with another shard number.

        Args:
            number: the shard.
        """
        return Keys(
            self.row,
            self.generation,
            np.full(len(self), check_whole("a shard", number)),
            self.draw,
            self.store,
            self.step,
        )

    def of_store(self, store: int | None) -> Keys:
        """The same rows and generations in another store.

        Use it after `Store.load`: rows keep their places and generations, so keys made before the save name the same
        trajectories in the new store. Keys made after the save may name others.

        Args:
            store: id of the other store; None for any store.
        """
        return Keys(self.row, self.generation, None, self.draw, store, self.step)

    @classmethod
    def of_rows(
        cls,
        row: NDArray[np.uint32],
        generation: NDArray[np.uint32],
        store: int | NDArray[np.uint64],
        *,
        shard: NDArray[np.uint16] | None = None,
        draw: NDArray[np.int64] | None = None,
        step: NDArray[np.uint32] | None = None,
        env: NDArray[Any] | None = None,
    ) -> Keys:
        """Internal: keys from arrays of the native layer, without a check."""
        made = cls.__new__(cls)
        made.__dict__.update(row=row, generation=generation, shard=shard, draw=draw, store=store, step=step, env=env)
        return made

    def of_steps(self, step: ArrayLike) -> Keys:
        """Keys of single steps of these rows.

        Args:
            step: (n,) step of each row, or one number for all.
        """
        steps = np.broadcast_to(_whole("steps", step, np.uint32), self.row.shape) if np.ndim(step) == 0 else step
        return Keys(self.row, self.generation, self.shard, self.draw, self.store, np.array(steps))

    def without_steps(self) -> Keys:
        """The same keys without steps: keys of rows."""
        return Keys(self.row, self.generation, self.shard, self.draw, self.store)

    @staticmethod
    def join(parts: Iterable[Keys]) -> Keys:
        """Concatenates keys.

        Args:
            parts: keys to concatenate.

        Raises:
            ArgumentError: only some of the parts have a shard, a store or steps.
        """
        try:
            if isinstance(parts, str | bytes | Mapping):
                raise TypeError
            parts = list(parts)
        except TypeError:
            raise ArgumentError(f"Keys.join takes a list of Keys, found {shown(parts)}") from None
        parts = [part for part in parts if len(check_keys(part))]
        if len(parts) <= 1:
            return parts[0] if parts else Keys.empty()
        shards = [part.shard for part in parts if part.shard is not None]
        if shards and len(shards) != len(parts):
            raise ArgumentError(
                "keys with a shard cannot be joined with keys without one: give all of them a shard (`of_shard`), or "
                "none"
            )
        steps = [part.step for part in parts if part.step is not None]
        if steps and len(steps) != len(parts):
            raise ArgumentError("keys of steps cannot be joined with keys of rows: drop the steps with `without_steps`")
        draws = [part.draw for part in parts if part.draw is not None]
        envs = [part.env for part in parts if part.env is not None]
        return Keys(
            np.concatenate([part.row for part in parts]),
            np.concatenate([part.generation for part in parts]),
            np.concatenate(shards) if shards else None,
            np.concatenate(draws) if draws and len(draws) == len(parts) else None,
            _joined_stores(parts),
            np.concatenate(steps) if steps else None,
            np.concatenate(envs) if len(envs) == len(parts) else None,
        )

    def as_array(self) -> NDArray[np.int64]:
        """The keys as numbers, (n, 6) int64: store, row, generation, step, shard and draw; -1 for None.

        Use it where only arrays and tensors pass, such as a torch `DataLoader`. Functions that take keys accept these
        numbers too.
        """
        made = np.full((len(self), 6), -1, np.int64)
        if self.store is not None:
            made[:, 0] = np.asarray(self.store, np.uint64).view(np.int64)
        for column, values in enumerate((self.row, self.generation, self.step, self.shard, self.draw), 1):
            if values is not None:
                made[:, column] = values
        return made

    @classmethod
    def from_array(cls, array: ArrayLike) -> Keys:
        """Keys from the numbers that `as_array` made.

        Args:
            array: (..., 6) integers: an array, or a tensor on any device.

        Raises:
            ArgumentError: another shape, or numbers that are out of range.
        """
        given: Any = array
        found = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
        if found.dtype != np.int64 or found.ndim == 0 or found.shape[-1] != 6:
            raise ArgumentError(
                "keys must be geartrain.Keys, as batches and inserts return them, or the numbers (n, 6) int64 of "
                f"Keys.as_array; found {type(array).__name__} {found.shape} of {found.dtype}"
            )
        columns = np.ascontiguousarray(found.reshape(-1, 6).T)
        store, _, _, step, shard, draw = (None if (each == -1).all() else each for each in columns)
        if store is not None:
            ids = store.view(np.uint64)
            store = int(ids[0]) if (ids == ids[0]).all() else ids
        return cls(columns[1], columns[2], shard, draw, store, step)

    @staticmethod
    def empty() -> Keys:
        """No keys: n = 0."""
        return Keys(np.empty(0, np.uint32), np.empty(0, np.uint32))

    # --- their stores -----------------------------------------------------------------------------------------

    def is_of(self, store: int) -> NDArray[np.bool_]:
        """(n,) bool: whether each row is in a store. Keys with `store=None` may be of any.

        Args:
            store: id of the store.
        """
        if isinstance(self.store, np.ndarray):
            mine: NDArray[np.bool_] = self.store == np.uint64(store)
            return mine
        return np.full(len(self), self.store is None or self.store == store)

    def check_store(self, store: int, name: str) -> None:
        """Internal: raises `ArgumentError` unless all rows are in the store with this id. Cost: at most one comparison
        a key.
        """
        mine = self.store
        if mine is None:
            if self.shard is not None and len(self):
                raise ArgumentError(
                    f"these keys have shards but no store, so it is unknown which of them belong to {name!r}: use "
                    "the keys of a batch, or keys without shards"
                )
        elif isinstance(mine, int):
            if mine != store and len(self):
                _refuse(len(self), len(self), mine, store, name)
        elif (mine != np.uint64(store)).any():
            foreign = np.flatnonzero(mine != np.uint64(store))
            _refuse(len(foreign), len(self), int(mine[foreign[0]]), store, name)

    def places_among(self, stores: NDArray[np.uint64], what: str = "stores") -> NDArray[np.int64]:
        """Internal: (n,) int64, the place of each row's store among `stores`, which are ids (k,) uint64.

        A store that occurs more than once is found by the key's `shard` if that is one of its places, else at its first
        place. `what` says in errors what the stores are. Raises `ArgumentError` for rows of none of the stores, and for
        keys without a store if there are several.
        """
        shard = None if self.shard is None else self.shard.astype(np.int64)
        if self.store is None:
            if shard is None and (len(stores) <= 1 or not len(self)):
                return np.zeros(len(self), np.int64)
            if shard is None or (shard >= len(stores)).any():
                raise ArgumentError(
                    f"these keys have no store, and there are {len(stores)} {what}: use the keys of a batch"
                )
            return shard
        wanted = np.broadcast_to(np.asarray(self.store, np.uint64), len(self))
        place = np.zeros(len(self), np.int64) if shard is None else np.where(shard < len(stores), shard, 0)
        wrong = np.flatnonzero(stores[place] != wanted)
        if wrong.size:  # of another numbering, or of none: look it up
            order = np.argsort(stores, kind="stable")
            found = order[np.minimum(np.searchsorted(stores[order], wanted[wrong]), len(stores) - 1)]
            place[wrong] = found
            if (foreign := wrong[stores[found] != wanted[wrong]]).size:
                raise ArgumentError(
                    f"{len(foreign)} of {len(self)} keys belong to none of the {len(stores)} {what} (first: row "
                    f"{self.row[foreign[0]]} of the store with id {int(wanted[foreign[0]]):016x}): use the keys of "
                    "their batches"
                )
        return place


def check_keys(keys: object) -> Keys:
    """The keys, from the numbers of `Keys.as_array` too; raises `ArgumentError` for anything else."""
    if isinstance(keys, Keys):
        return keys
    return Keys.from_array(
        check_calls("keys must be geartrain.Keys, as batches and inserts return them", keys, "__array__")
    )


def _whole(what: str, values: Any, dtype: Any) -> NDArray[Any]:
    """Numbers as a contiguous array of an integer type, which must hold all of them."""
    if type(values) is np.ndarray and values.dtype == dtype and values.flags.c_contiguous:
        return values
    array = np.asarray(values)
    if isinstance(values, (list, tuple)) and values and all(type(each) is int for each in values):
        array = np.array(values, object)  # or large and small ones together would become floating point
    elif array.size and array.dtype.kind not in "iu":
        raise ArgumentError(f"{what} of keys must be whole numbers, found {array.dtype}")
    most = np.iinfo(dtype)
    if array.size and not most.min <= int(array.min()) <= int(array.max()) <= most.max:
        raise ArgumentError(
            f"{what} of keys must be from {most.min} to {most.max}, found {array.min()} to {array.max()}"
        )
    return np.ascontiguousarray(array, dtype=dtype)


def _store_id(store: Any) -> int:
    return check_whole("a store's id", store, 0, 2**64 - 1)


def _joined_stores(parts: Sequence[Keys]) -> int | NDArray[np.uint64] | None:
    first = parts[0].store
    if all(part.store is None for part in parts):
        return None
    if any(part.store is None for part in parts):
        raise ArgumentError("keys of a store cannot be joined with keys without one: give them a store with `of_store`")
    if isinstance(first, int) and all(isinstance(part.store, int) and part.store == first for part in parts):
        return first
    return np.concatenate([np.broadcast_to(np.asarray(part.store, np.uint64), len(part)) for part in parts])


def _refuse(foreign: int, n: int, found: int, store: int, name: str) -> NoReturn:
    raise ArgumentError(
        f"{foreign} of {n} keys belong to another store: {name!r} has the id {store:016x}, theirs is "
        f"{found:016x}. Pass each store its own keys (`keys[keys.is_of(store.id)]`)"
    )


__all__ = ["Keys", "check_keys"]
