"""`BatchLengths`: the lengths of all rows of a global batch of packed rows, as every rank knows them.

Ranks derive from it, without a message, what they have to have alike: totals over all ranks, and the number of
micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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


__all__ = ["BatchLengths"]
