"""Batch in native memory that creates each array on first access.

A consumer that reads two of ten fields pays for two. The cost of a batch in Python does not grow with its fields.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.keys import Keys
from geartrain.replay.batch import Array, Batch, unknown_field
from geartrain.replay.fetch_plan import BatchFields

_METADATA = ("mask", "start", "length", "version", "probability", "importance_weights")


class NativeBatch(Batch):
    """A batch as `BatchSampler` fills it; made by `native_batch`."""

    __slots__ = ("_plan", "_rows", "_shown", "_store_ids")
    _rows: _native.SampledBatch
    _plan: BatchFields
    _shown: dict[str, Array]
    _store_ids: Sequence[int]

    def __new__(cls, **values: Any) -> Any:
        """Made of a batch's own attributes, as `dataclasses.replace` does, it is a plain batch."""
        return Batch(**values)

    def __getattr__(self, name: str) -> Any:
        value: Any
        if name in _METADATA:
            value = getattr(self._rows, name)(self._plan.from_dlpack)
        elif name == "keys":
            value = keys_of(self._rows, self._store_ids, self._plan.per_step)
        elif name == "fields":
            value = {each: self[each] for each in self._plan.names}
        elif name in ("draw", "cu_seqlens"):
            value = None
        else:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        object.__setattr__(self, name, value)
        return value

    def __getitem__(self, name: str) -> Array:
        try:
            found = self._shown.get(name)
        except TypeError:  # no name, and nothing that can be looked up
            found = None
        if found is None:
            plan = self._plan
            if name not in self:
                raise unknown_field(name, plan.names)
            place = plan.exchanged.get(name)
            if place is None:
                found = plan.as_field(name, self._rows.field(plan.places[name]))
            else:
                found = self._rows.field(place, plan.from_dlpack)
            self._shown[name] = found
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan.names)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._plan.places

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        metadata = [getattr(self, name) for name in _METADATA]
        return Batch, (self.fields, self.keys, *metadata, self.step)


class FetchedBatch(NativeBatch):
    """A native batch of rows by key, without draws; made by `fetched_batch`."""

    __slots__ = ()


class GlobalNativeBatch(NativeBatch):
    """A native batch that is a rank's part of a global one, with the numbers of its rows; made by `global_batch`."""

    __slots__ = ("_draws",)
    _draws: NDArray[np.int64] | None  # None: this is all of it

    def __getattr__(self, name: str) -> Any:
        if name not in ("draw", "keys"):
            return super().__getattr__(name)
        value: Any
        if name == "draw":
            value = self._plan.as_output(np.arange(len(self)) if self._draws is None else self._draws)
        else:
            rows, ids = self._rows, self._store_ids
            draw, first_shard = (self._draws, None) if self._draws is not None else _numbers_of(len(rows))
            shard = first_shard if len(ids) == 1 and first_shard is not None else rows.shard()
            assert shard is not None
            store: Any = ids[0] if shard is first_shard else np.asarray(ids, np.uint64)[shard]
            steps = rows.steps() if self._plan.per_step else None
            value = Keys.of_rows(rows.rows(), rows.generations(), store, shard=shard, draw=draw, step=steps)
        object.__setattr__(self, name, value)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        made, values = super().__reduce__()
        return made, (*values, self.draw)


_put_rows, _put_plan, _put_shown, _put_store_ids, _put_step, _put_keys, _put_probability = (
    getattr(NativeBatch, name).__set__
    for name in ("_rows", "_plan", "_shown", "_store_ids", "step", "keys", "probability")
)
_put_draws = GlobalNativeBatch._draws.__set__  # type: ignore[attr-defined, union-attr]


@functools.lru_cache(8)
def _numbers_of(n: int) -> tuple[NDArray[np.int64], NDArray[np.uint16]]:
    """The numbers of the n rows of a global batch of one rank, and their shard, for keys: shared, so not writeable."""
    draw, shard = np.arange(n), np.zeros(n, np.uint16)
    draw.flags.writeable = shard.flags.writeable = False
    return draw, shard


def native_batch(
    rows: _native.SampledBatch,
    plan: BatchFields,
    step: int | None,
    store_ids: Sequence[int] | NDArray[np.uint64],
    kind: type[NativeBatch] = NativeBatch,
) -> Any:
    """A batch over native memory.

    Args:
        rows: all of them whole.
        plan: names of the fields and the kind of arrays.
        step: the number of the batch.
        store_ids: of the stores that its rows are of, in the order of their shard numbers.
        kind: the batch's class.
    """
    made = object.__new__(kind)
    # The dataclass is frozen, so by the slots themselves; other attributes are set when they are first asked for.
    _put_rows(made, rows)
    _put_plan(made, plan)
    _put_shown(made, {})
    _put_store_ids(made, store_ids)
    _put_step(made, step)
    return made


def fetched_batch(rows: _native.SampledBatch, fields: BatchFields, keys: Keys) -> FetchedBatch:
    """A batch over native memory of the rows behind `keys`, all of them whole."""
    made: FetchedBatch = native_batch(rows, fields, None, (), FetchedBatch)
    _put_keys(made, keys)
    _put_probability(made, None)
    return made


def global_batch(
    rows: _native.SampledBatch,
    plan: BatchFields,
    step: int,
    store_ids: Sequence[int] | NDArray[np.uint64],
    draws: NDArray[np.int64] | None = None,
) -> GlobalNativeBatch:
    """The same of a rank's part of a global batch.

    Args:
        rows, plan, step: see `native_batch`.
        store_ids: of all shards, by the numbers that the rows have.
        draws: (n,) the rows' numbers in the global batch; None where this is all of it.
    """
    made: GlobalNativeBatch = native_batch(rows, plan, step, store_ids, GlobalNativeBatch)
    _put_draws(made, draws)
    return made


def keys_of(
    rows: _native.SampledBatch, store_ids: Sequence[int], per_step: bool = False, *, copied: bool = False
) -> Keys:
    """The keys of a batch's rows, or of the steps that its windows were placed by; `copied` from its memory."""
    shard = rows.shard()
    store = store_ids[0] if shard is None else np.array(store_ids, np.uint64)[shard]
    steps = rows.steps() if per_step else None
    if copied:
        shard = None if shard is None else shard.copy()
        steps = None if steps is None else steps.copy()
        return Keys.of_rows(rows.rows().copy(), rows.generations().copy(), store, shard=shard, step=steps)
    return Keys.of_rows(rows.rows(), rows.generations(), store, shard=shard, step=steps)


__all__ = [
    "FetchedBatch",
    "GlobalNativeBatch",
    "NativeBatch",
    "fetched_batch",
    "global_batch",
    "keys_of",
    "native_batch",
]
