"""Assigns the draws of a batch to replicas (consumers) and to ranks (readers).

The assignment is a pure function of data that all ranks have, so each rank computes it locally. In synchronous data
parallelism any replica may train on any row of the global batch. That leaves two policies:

- `local_first` gives a replica rows of its own host while there are any. Only the surplus crosses the network: of n
  draws over W equal shards about 0.4 sqrt(n (W - 1)) rows, the excess of a multinomial draw over its mean.
- `ordered` gives replica i the i-th slice of the batch, and moves n (W - 1) / W rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.errors import ArgumentError

Assignment = Literal["local_first", "ordered"]
ASSIGNMENTS: tuple[Assignment, ...] = ("local_first", "ordered")


@dataclass(frozen=True)
class Replica:
    """A data-parallel replica of the model: the ranks that consume its rows.

    Attributes:
        ranks: its ranks that get fields, the one with the most bytes a row first.
        local_shards: for each of `ranks`, the shards in its own host's memory.
    """

    ranks: tuple[int, ...]
    local_shards: tuple[frozenset[int], ...]


@dataclass(frozen=True)
class Assigned:
    """For each draw the replica that trains on it, the rank that reads it from its shard, and its place in the
    replica's batch, in the order of draws: (n,) int64 each.
    """

    replica: NDArray[np.int64]
    reader: NDArray[np.int64]
    place: NDArray[np.int64]


class Assigner:
    """Assigns the draws of batches to replicas. `sizes_of` defines the number of draws of each replica.

    Args:
        replicas: the consumers.
        shard_ranks: for each shard, the ranks that have it in their host's memory.
        near: by rank, further shards that the rank can read. If a row of such a shard is assigned to it, it reads the
            row itself. It is not preferred for these rows.

    Attributes:
        native: the native assigner, for native draws.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        shard_ranks: Sequence[Sequence[int]],
        near: Mapping[int, Collection[int]] | None = None,
    ) -> None:
        near = near or {}
        self.native = _native.Assigner(
            [list(each.ranks) for each in replicas],
            [[sorted(shards) for shards in each.local_shards] for each in replicas],
            [list(ranks) for ranks in shard_ranks],
            [[sorted(near.get(rank, ())) for rank in each.ranks] for each in replicas],
        )

    def assign(
        self, shard: NDArray[np.int64], assignment: Assignment, atom_sizes: NDArray[np.int64] | None = None
    ) -> Assigned:
        """Assigns the draws of a batch.

        Args:
            shard: (n,) the shard of each draw's row.
            assignment: "local_first" or "ordered".
            atom_sizes: draws of each atom (a group of rows), neighbours in one shard that go to one replica; None
                where every draw stands alone. The sizes divide n / replicas.

        Raises:
            ArgumentError: atoms that do not fit.

        Cost: a few passes over the draws, about 20 ns a draw.
        """
        return Assigned(*self.native.assign(shard, atom_sizes, assignment == "ordered"))


def assign(
    shard: NDArray[np.int64],
    replicas: Sequence[Replica],
    shard_ranks: Sequence[Sequence[int]],
    assignment: Assignment,
    atom: NDArray[np.int64] | None = None,
) -> Assigned:
    """`Assigner.assign` for one batch; draws of one atom have the same number in `atom`, (n,), which never falls."""
    sizes = None
    if atom is not None:
        if (atom[1:] < atom[:-1]).any():
            raise ArgumentError("draws of an atom are neighbours")
        sizes = np.unique(atom, return_counts=True)[1].astype(np.int64)
    return Assigner(replicas, shard_ranks).assign(np.ascontiguousarray(shard, np.int64), assignment, sizes)


def check_sizes(atoms: Sequence[int], replicas: int, batch_size: int, assignment: Assignment) -> None:
    """Raises `ArgumentError` where a global batch cannot be divided evenly over the replicas, atoms of rows whole.

    Args:
        atoms: rows that stand or fall together, in each store.
        replicas: data-parallel replicas.
        batch_size: rows of the global batch.
        assignment: "local_first" or "ordered".
    """
    if batch_size % replicas:
        raise ArgumentError(
            f"a global batch of {batch_size} rows cannot be divided evenly over {replicas} data-parallel replicas"
        )
    rows = batch_size // replicas
    sizes = sorted(set(atoms))
    for size in sizes:
        if rows % size:
            raise ArgumentError(
                f"{rows} rows a replica do not hold whole groups of {size}; choose a batch_size "
                f"that is a multiple of {size * replicas}"
            )
    for small, large in itertools.pairwise(sizes):
        if large % small:
            raise ArgumentError(
                f"groups of {small} and of {large} rows cannot fill a replica together; one must divide the other"
            )
    if len(sizes) > 1 and assignment == "ordered" and replicas > 1:
        raise ArgumentError("slices of a mixture with groups would cut groups; use assignment='local_first'")


def sizes_of(n: int, replicas: int) -> NDArray[np.int64]:
    """Draws of each replica, (replicas,): equally many, or in the last batch of a pass one more of the first ones."""
    return n // replicas + (np.arange(replicas) < n % replicas)


__all__ = ["ASSIGNMENTS", "Assigned", "Assigner", "Assignment", "Replica", "assign", "check_sizes", "sizes_of"]
