"""`BatchLengths`: the lengths of all rows of a global batch of packed rows, as every rank knows them.

Ranks derive from it, without a message, what they have to have alike: totals over all ranks, and the number of
micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from geartrain.core.tasks import RowPlan
from geartrain.store.packed import PackedFields


@dataclass(frozen=True)
class BatchLengths:
    """Lengths of the B rows of a global batch, in the order of their draws. Their numbers in it are global places.

    Attributes:
        rank: (B,) the replica that has each row.
        me: this replica.
        replicas: number of replicas.
        lengths: for each axis (B,) int64, the items of each row.
        parts: for each axis that a field divides: (B,) int64, the sequences of each row; and the lengths of all these
            sequences, one row's behind the other's.
        sums: for each bool field with an axis (B,) int64, how many items of each row are True.
        places: (n,) int64, the global places of this replica's rows, in the order of its batch.
    """

    rank: NDArray[np.int64]
    me: int
    replicas: int
    lengths: Mapping[str, NDArray[np.int64]]
    parts: Mapping[str, tuple[NDArray[np.int64], NDArray[np.int64]]]
    sums: Mapping[str, NDArray[np.int64]]
    places: NDArray[np.int64]

    def __len__(self) -> int:
        """Rows of the global batch."""
        return len(self.rank)


def lengths_of_one(
    batch: PackedFields, plan: RowPlan, names: Iterable[str], axes: Iterable[str], n: int
) -> BatchLengths:
    """Lengths of a batch that is the whole global batch.

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
    here = np.arange(n, dtype=np.int64)
    return BatchLengths(np.zeros(n, np.int64), 0, 1, lengths, parts, sums, here)


def _true_items(values: object, bounds: NDArray[np.int32]) -> NDArray[np.int64]:
    """How many items are True in each run."""
    array = values if isinstance(values, np.ndarray) else values.cpu().numpy()  # type: ignore[attr-defined]
    at = bounds.tolist()
    counts = [np.count_nonzero(array[begin:end]) for begin, end in itertools.pairwise(at)]
    return np.array(counts, np.int64)


__all__ = ["BatchLengths", "lengths_of_one"]
