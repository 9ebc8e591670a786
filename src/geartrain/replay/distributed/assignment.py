"""Deterministic assignment of draws to replicas (consumers) and to ranks (readers).

A pure function of what all ranks know, so that each computes it locally. In synchronous data parallelism any replica
may train on any row of the global batch. `local_first` gives a replica rows of its own host while there are any, and
only the surplus crosses the network: of n draws over W equal shards about 0.4 sqrt(n (W - 1)) rows, the excess of a
multinomial draw over its mean. `ordered` gives replica i the i-th slice of the batch and moves n (W - 1) / W rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

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
    """For each draw the replica that trains on it and the rank that reads it from its shard: (n,) int64 each."""

    replica: NDArray[np.int64]
    reader: NDArray[np.int64]


def assign(
    shard: NDArray[np.int64],
    replicas: Sequence[Replica],
    shard_ranks: Sequence[Sequence[int]],
    assignment: Assignment,
    atom: NDArray[np.int64] | None = None,
) -> Assigned:
    """Assigns the draws of a batch to replicas, to each as many as `sizes_of` says.

    Args:
        shard: (n,) the shard of each draw's row.
        replicas: the consumers.
        shard_ranks: for each shard, the ranks that have it in their host's memory.
        assignment: "local_first" or "ordered".
        atom: (n,) draws with the same number, which are neighbours in one shard, go to one replica (a group of rows);
            the size of an atom divides n / replicas.

    Cost: a few passes and sorts over the draws.
    """
    n, count = len(shard), len(replicas)
    if atom is None and assignment == "local_first" and len(shard_ranks) == 1:
        local = [_first_with(each, 0) for each in replicas]
        if None not in local:  # every replica may have any draw: they take turns
            replica = np.arange(n) % count
            return Assigned(replica, np.array(local, np.int64)[replica])
    if atom is None:
        starts, sizes = np.arange(n), np.ones(n, np.int64)
    else:
        _, starts, sizes = np.unique(atom, return_index=True, return_counts=True)
    room = sizes_of(n, count)
    if assignment == "ordered" or count == 1:
        replica = np.repeat(np.arange(count), room)
    else:
        replica = np.repeat(_local_first(shard[starts], sizes, replicas, room), sizes)
    reader = np.repeat(_readers(shard[starts], replica[starts], replicas, shard_ranks), sizes)
    return Assigned(replica.astype(np.int64), reader)


def _first_with(replica: Replica, shard: int) -> int | None:
    """The first of a replica's ranks that has a shard in its host's memory."""
    return next((r for r, shards in zip(replica.ranks, replica.local_shards, strict=True) if shard in shards), None)


def sizes_of(n: int, replicas: int) -> NDArray[np.int64]:
    """Draws of each replica, (replicas,): equally many, or in the last batch of a pass one more of the first ones."""
    return n // replicas + (np.arange(replicas) < n % replicas)


def _local_first(
    shard: NDArray[np.int64], sizes: NDArray[np.int64], replicas: Sequence[Replica], room: NDArray[np.int64]
) -> NDArray[np.int64]:
    replica = np.full(len(shard), -1, np.int64)
    levels = _local_replicas(replicas)
    # Large atoms first: what is left of a replica is then a multiple of every smaller size.
    for size in np.unique(sizes)[::-1].tolist():
        waiting = np.flatnonzero(sizes == size)
        for level in levels:
            waiting = waiting[replica[waiting] < 0]
            for number, draws in _by_shard(waiting, shard):
                if number in level:
                    _round_robin(draws, level[number], size, room, replica)
        waiting = waiting[replica[waiting] < 0]
        _round_robin(waiting, np.arange(len(replicas)), size, room, replica)
    if (replica < 0).any():
        raise ValueError(f"{np.count_nonzero(replica < 0)} draws fit into no replica")
    return replica


def _by_shard(draws: NDArray[np.intp], shard: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """The draws of each shard, in order."""
    if len(draws):
        ordered = draws[np.argsort(shard[draws], kind="stable")]
        numbers, starts = np.unique(shard[ordered], return_index=True)
        yield from zip(numbers.tolist(), np.split(ordered, starts[1:]), strict=True)


def _local_replicas(replicas: Sequence[Replica]) -> list[dict[int, NDArray[np.int64]]]:
    """For each preference, the replicas that have a shard locally, by shard."""
    levels: list[dict[int, list[int]]] = []
    for number, replica in enumerate(replicas):
        for preference, shards in enumerate(replica.local_shards):
            if preference == len(levels):
                levels.append({})
            for shard in shards:
                levels[preference].setdefault(shard, []).append(number)
    return [{shard: np.array(numbers) for shard, numbers in level.items()} for level in levels]


def _round_robin(
    draws: NDArray[np.intp], among: NDArray[np.int64], size: int, room: NDArray[np.int64], replica: NDArray[np.int64]
) -> None:
    """Assigns draws of one atom size to replicas in turn, until no room or no draw is left."""
    if not len(draws):
        return
    # Free places: the first one of every replica, then the second one of every replica, and so on.
    free = room[among] // size
    turn = np.arange(free.sum()) - np.repeat(np.cumsum(free) - free, free)
    places = np.repeat(among, free)[np.argsort(turn, kind="stable")][: len(draws)]
    replica[draws[: len(places)]] = places
    room -= size * np.bincount(places, minlength=len(room))


def _readers(
    shard: NDArray[np.int64],
    replica: NDArray[np.int64],
    replicas: Sequence[Replica],
    shard_ranks: Sequence[Sequence[int]],
) -> NDArray[np.int64]:
    """The replica's own rank where one has the shard locally; the shard's ranks in turn otherwise."""
    # The rank of each local (replica, shard) pair; of several the one with the most bytes a row.
    local = {
        number * len(shard_ranks) + shard_number: rank
        for number, each in enumerate(replicas)
        for rank, shards in zip(reversed(each.ranks), reversed(each.local_shards), strict=True)
        for shard_number in shards
    }
    pairs = np.array(sorted(local), np.int64)
    ranks = np.array([local[pair] for pair in pairs.tolist()], np.int64)
    wanted = replica * len(shard_ranks) + shard
    at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    reader = np.where(pairs[at] == wanted, ranks[at], -1)
    remote = np.flatnonzero(reader < 0)
    for number, draws in _by_shard(remote, shard):
        turns = np.arange(len(draws)) % len(shard_ranks[number])
        reader[draws] = np.asarray(shard_ranks[number], np.int64)[turns]
    return reader


__all__ = ["ASSIGNMENTS", "Assigned", "Assignment", "Replica", "assign", "sizes_of"]
