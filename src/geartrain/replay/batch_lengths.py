"""`BatchLengths`: the lengths of all rows of a global batch of packed rows, as every rank knows them.

Ranks derive from it, without a message, what they have to have alike: totals over all ranks, and the number of
micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from geartrain.core.tasks import RowPlan
from geartrain.store.packed import PackedFields


@dataclass(eq=False)
class BatchLengths:
    """What every rank knows of the whole global batch, in the order of global places, which is the order of the draw.

    Ranks that know the same cut the batch alike without a message.

    Attributes:
        lengths: of each axis, (B,) int64: items of each row.
        parts: of each axis that a field divides, how many parts each row has, (B,) int64, and the items of all parts,
            row after row.
        sums: of each bool field with an axis, (B,) int64: how many items of each row are True.
        replica: (B,) int64, the replica that has each row.
        places: (n,) int64, the global place of each row of this replica's batch, in the batch's order.
        me: this replica.
        replicas: number of replicas.
    """

    lengths: dict[str, NDArray[np.int64]]
    parts: dict[str, tuple[NDArray[np.int64], NDArray[np.int64]]]
    sums: dict[str, NDArray[np.int64]]
    replica: NDArray[np.int64]
    places: NDArray[np.int64]
    me: int = 0
    replicas: int = 1
    warned: bool = field(default=False, init=False, repr=False)  # of a sequence that is too long for a micro-batch

    def __len__(self) -> int:
        """Rows of the global batch."""
        return len(self.replica)

    def items(self, axis: str | None, places: NDArray[np.int64]) -> int:
        """Items of an axis in some rows of the global batch; without an axis, one for each row."""
        return len(places) if axis is None else int(self.lengths[axis][places].sum())


def lengths_of_one(
    batch: PackedFields, plan: RowPlan, names: Iterable[str], axes: Iterable[str], n: int
) -> BatchLengths:
    """The same of a batch that one replica has all of.

    Args:
        batch: the values.
        plan: fields and axes of its store.
        names: fields of the batch.
        axes: axes that the batch has lengths of.
        n: rows.
    """
    lengths, parts, sums = {}, {}, {}
    for axis in axes:
        bounds = batch.bounds_of(axis)
        lengths[axis] = bounds.lengths.astype(np.int64)
        into = plan.divided_into(axis)
        if into is not None and bounds.parts is not None:
            counts = batch.bounds_of(into).lengths.astype(np.int64)
            parts[axis] = counts, np.diff(bounds.parts).astype(np.int64)
    for name in names:
        found = plan.fields[name]
        if found.axis is not None and found.dtype == "bool" and not found.shape:
            sums[name] = _true_items(batch[name], batch.bounds_of(found.axis).bounds)
    return BatchLengths(lengths, parts, sums, np.zeros(n, np.int64), np.arange(n))


def _true_items(values: object, bounds: NDArray[np.int32]) -> NDArray[np.int64]:
    """How many items are True in each run."""
    array = values if isinstance(values, np.ndarray) else values.cpu().numpy()  # type: ignore[attr-defined]
    at = bounds.tolist()
    counts = [np.count_nonzero(array[begin:end]) for begin, end in itertools.pairwise(at)]
    return np.array(counts, np.int64)


__all__ = ["BatchLengths", "lengths_of_one"]
