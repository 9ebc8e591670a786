"""Assigns the draws of a batch to replicas (consumers) and to ranks (readers).

The assignment is a pure function of data that all ranks have, so each rank computes it locally. In synchronous data
parallelism any replica may train on any row of the global batch. That leaves three policies:

- `local_first` gives a replica rows of its own host while there are any. Only the surplus crosses the network: of n
  draws over W equal shards about 0.4 sqrt(n (W - 1)) rows, the excess of a multinomial draw over its mean.
- `ordered` gives replica i the i-th slice of the batch, and moves n (W - 1) / W rows.
- `balanced` gives every replica rows of about the same cost, such as their number of tokens. Replicas then have
  different numbers of rows.
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
        self._shard_ranks = [list(ranks) for ranks in shard_ranks]
        # (replicas, shards): the first rank of the replica that has the shard in its memory, or -1
        self._rank_of = np.full((len(replicas), len(shard_ranks)), -1, np.int64)
        for number, replica in enumerate(replicas):
            for rank, shards in reversed(list(zip(replica.ranks, replica.local_shards, strict=True))):
                self._rank_of[number, sorted(shards)] = rank
        self._has = self._rank_of >= 0

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

    def assign_by_cost(self, shard: NDArray[np.int64], cost: Sequence[int], atom: int = 1) -> Assigned:
        """Assigns rows so that all replicas have about the same cost; see `balanced`.

        Args:
            shard: (n,) the shard of each row.
            cost: (n,) whole numbers, 0 or more.
            atom: this many neighbours go to one replica together.
        """
        costs = [sum(cost[first : first + atom]) for first in range(0, len(cost), atom)]
        replica = np.repeat(balanced(costs, self._has[:, shard[::atom]]), atom)[: len(shard)]
        reader = np.where(self._has[replica, shard], self._rank_of[replica, shard], -1)
        for each in np.unique(shard[reader < 0]).tolist():  # the shard's ranks in turn
            far = np.flatnonzero((reader < 0) & (shard == each))
            ranks = self._shard_ranks[each]
            reader[far] = np.resize(ranks, len(far))
        place = np.empty(len(shard), np.int64)
        for number in range(len(self._has)):
            mine = np.flatnonzero(replica == number)
            place[mine] = np.arange(len(mine))
        return Assigned(replica, reader, place)


def assign(
    shard: NDArray[np.int64],
    replicas: Sequence[Replica],
    shard_ranks: Sequence[Sequence[int]],
    assignment: Assignment,
) -> Assigned:
    """`Assigner.assign` for one batch."""
    return Assigner(replicas, shard_ranks).assign(np.ascontiguousarray(shard, np.int64), assignment)


# Of the mean cost: how much more a replica may have for the sake of rows on its own host, and from how much more on
# hosts do not count.
_SLACK, _TOO_MUCH = 0.008, 0.012
# Swaps that are looked for at most, and what a cost that leaves its host counts against the cost that is levelled.
_MOST_SWAPS, _FAR = 64, 0.25


def balanced(cost: Sequence[int], has: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The replica of each row, (n,), so that the largest cost of a replica is low: the same on every rank.

    Rows are given away whole, longest first, each to the replica that has least so far. A row goes to a replica of its
    own host as long as that replica stays within 0.8 % of the mean. Afterwards the replica with most swaps or gives
    away rows until it is within that, too, or no swap helps. If it then still has 1.2 % more than the mean, all rows
    are given away anew, and hosts do not count. If there are as many rows as replicas, every replica gets one.

    Args:
        cost: (n,) whole numbers, 0 or more.
        has: (replicas, n) whether the replica has the row in its host's memory.

    Cost: about 2 us a row for a few replicas.
    """
    replicas, n = has.shape
    costs = [int(each) for each in cost]
    load, rows = [0] * replicas, [0] * replicas
    found = np.zeros(n, np.int64)
    mean = sum(costs) / replicas
    local: dict[bytes, list[int]] = {}
    columns = [column.tobytes() for column in np.ascontiguousarray(has.T)]
    everyone, empty = list(range(replicas)), replicas
    for left, row in zip(range(n, 0, -1), sorted(range(n), key=lambda row: (-costs[row], row)), strict=True):
        near = local.get(columns[row])
        if near is None:
            near = local[columns[row]] = np.flatnonzero(has[:, row]).tolist()
        among, others = near, everyone
        if empty >= left:  # one for each that has none yet
            among = [each for each in near if not rows[each]]
            others = [each for each in everyone if not rows[each]] or everyone
        best = min(among, key=load.__getitem__) if among else -1
        if best < 0 or load[best] + costs[row] > (1 + _SLACK) * mean:
            least = min(others, key=load.__getitem__)
            if best < 0 or load[best] > load[least]:
                best = least
        found[row] = best
        empty -= not rows[best]
        load[best] += costs[row]
        rows[best] += 1
    if replicas > 1 and n >= replicas:
        loads = np.array(load, np.float64)
        _level(np.array(costs, np.float64), has, found, loads, (1 + _SLACK) * mean)
        if loads.max() > (1 + _TOO_MUCH) * mean and not has.all():
            anywhere = balanced(costs, np.ones_like(has))
            if max(_loads(costs, anywhere, replicas)) < loads.max():
                return anywhere
    return found


def _loads(costs: Sequence[int], replica: NDArray[np.int64], replicas: int) -> list[int]:
    """The cost of each replica."""
    load = [0] * replicas
    for each, cost in zip(replica.tolist(), costs, strict=True):
        load[each] += cost
    return load


def _level(
    cost: NDArray[np.float64],
    has: NDArray[np.bool_],
    replica: NDArray[np.int64],
    load: NDArray[np.float64],
    wanted: float,
) -> None:
    """Swaps rows of the replica with most for smaller ones of others, or gives some away, until it has what is wanted
    or nothing helps.
    """
    for _ in range(_MOST_SWAPS):
        most = int(load.argmax())
        if load[most] <= wanted:
            return
        mine, others = np.flatnonzero(replica == most), np.flatnonzero(replica != most)
        # Each row of `mine` may be swapped for one of `others`; unless it is the only one, also for none.
        none = np.flatnonzero(np.arange(len(load)) != most) if len(mine) > 1 else np.empty(0, np.int64)
        to = np.concatenate([replica[others], none])
        moved = cost[mine][:, None] - np.concatenate([cost[others], np.zeros(len(none))])
        far = cost[mine][:, None] * (has[most, mine][:, None] & ~has[to[None, :], mine[:, None]])
        back = cost[others] * (has[replica[others], others].astype(np.int64) - has[most, others])
        far[:, : len(others)] += back
        after = np.maximum(load[most] - moved, load[to] + moved)
        score = np.minimum(load[most] - after, load[most] - wanted) - _FAR * far
        score[after >= load[most]] = -np.inf
        a, b = np.unravel_index(int(score.argmax()), score.shape)
        if score[a, b] == -np.inf:
            return
        load[most] -= moved[a, b]
        load[to[b]] += moved[a, b]
        replica[mine[a]] = to[b]
        if b < len(others):
            replica[others[b]] = most


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


__all__ = [
    "ASSIGNMENTS",
    "Assigned",
    "Assigner",
    "Assignment",
    "Replica",
    "assign",
    "balanced",
    "check_sizes",
    "sizes_of",
]
