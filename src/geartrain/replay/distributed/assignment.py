"""Who trains on which draw, and who reads it: worked out by every rank alone, from what all of them know.

In synchronous data parallelism it does not matter which replica trains on which row of the global batch. `local_first`
gives every replica rows of its own host as long as there are any; only what one host has too much of, and another too
little, crosses the network: of n draws over W equal shards about 0.4 sqrt(n (W - 1)), the part of a multinomial draw
above its mean, where `ordered`, which gives replica i the i-th slice, moves n (W - 1) / W.
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
class Reader:
    """A replica of the model, as far as data is concerned.

    Attributes:
        ranks: those that read its rows from shards and get them from other ranks: first the one that reads most.
        homes: for each of `ranks`, the shards that it has in its own host's memory.
    """

    ranks: tuple[int, ...]
    homes: tuple[frozenset[int], ...]


@dataclass(frozen=True)
class Assigned:
    """For each draw, the replica that trains on it and the rank that reads it from its shard: (n,) int64 each."""

    replica: NDArray[np.int64]
    server: NDArray[np.int64]


def assign(
    shard: NDArray[np.int64],
    readers: Sequence[Reader],
    servers: Sequence[Sequence[int]],
    assignment: Assignment,
    atom: NDArray[np.int64] | None = None,
) -> Assigned:
    """Shares the draws of a batch out, equally many to each replica.

    Args:
        shard: (n,) which shard each draw's row is in; n is a multiple of the number of replicas.
        readers: the replicas.
        servers: the ranks that have each shard in their host's memory.
        assignment: "local_first" or "ordered".
        atom: (n,) draws with the same number, which are neighbours, stay together (a group); their number divides
            n / replicas, and they are in one shard.

    Cost: a few passes and sorts over the draws.
    """
    n, replicas = len(shard), len(readers)
    if atom is None:
        starts, sizes = np.arange(n), np.ones(n, np.int64)
    else:
        _, starts, sizes = np.unique(atom, return_index=True, return_counts=True)
    if assignment == "ordered" or replicas == 1:
        replica = np.arange(n) // (n // replicas)
    else:
        replica = np.repeat(_local_first(shard[starts], sizes, readers, n // replicas), sizes)
    server = np.repeat(_servers(shard[starts], replica[starts], readers, servers), sizes)
    return Assigned(replica.astype(np.int64), server)


def _local_first(
    shard: NDArray[np.int64], sizes: NDArray[np.int64], readers: Sequence[Reader], per_replica: int
) -> NDArray[np.int64]:
    replica = np.full(len(shard), -1, np.int64)
    room = np.full(len(readers), per_replica, np.int64)
    near = _near(readers)
    # Large atoms first: what is left of a replica is then a multiple of every smaller size.
    for size in np.unique(sizes)[::-1].tolist():
        waiting = np.flatnonzero(sizes == size)
        for level in near:
            waiting = waiting[replica[waiting] < 0]
            for number, draws in _by_shard(waiting, shard):
                if number in level:
                    _deal(draws, level[number], size, room, replica)
        waiting = waiting[replica[waiting] < 0]
        _deal(waiting, np.arange(len(readers)), size, room, replica)
    if (replica < 0).any():
        raise ValueError(f"{np.count_nonzero(replica < 0)} draws found no replica with room for them")
    return replica


def _by_shard(draws: NDArray[np.intp], shard: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """The draws of each shard, in order."""
    if len(draws):
        ordered = draws[np.argsort(shard[draws], kind="stable")]
        numbers, starts = np.unique(shard[ordered], return_index=True)
        yield from zip(numbers.tolist(), np.split(ordered, starts[1:]), strict=True)


def _near(readers: Sequence[Reader]) -> list[dict[int, NDArray[np.int64]]]:
    """For each preference, the replicas that have a shard at home, by shard."""
    levels: list[dict[int, list[int]]] = []
    for number, reader in enumerate(readers):
        for preference, homes in enumerate(reader.homes):
            if preference == len(levels):
                levels.append({})
            for shard in homes:
                levels[preference].setdefault(shard, []).append(number)
    return [{shard: np.array(replicas) for shard, replicas in level.items()} for level in levels]


def _deal(
    draws: NDArray[np.intp], among: NDArray[np.int64], size: int, room: NDArray[np.int64], replica: NDArray[np.int64]
) -> None:
    """Deals draws of one size round among replicas, in order, until there is no room or no draw left."""
    if not len(draws):
        return
    # Places that are free: the first of every replica, then the second of every replica, and so on.
    free = room[among] // size
    turn = np.arange(free.sum()) - np.repeat(np.cumsum(free) - free, free)
    places = np.repeat(among, free)[np.argsort(turn, kind="stable")][: len(draws)]
    replica[draws[: len(places)]] = places
    room -= size * np.bincount(places, minlength=len(room))


def _servers(
    shard: NDArray[np.int64],
    replica: NDArray[np.int64],
    readers: Sequence[Reader],
    servers: Sequence[Sequence[int]],
) -> NDArray[np.int64]:
    """A rank of the replica itself where one has the shard; the shard's ranks in turn otherwise."""
    # (replica, shard) pairs that are near, with the rank that makes them so; of several the one that reads most.
    near = {
        number * len(servers) + home: rank
        for number, reader in enumerate(readers)
        for rank, homes in zip(reversed(reader.ranks), reversed(reader.homes), strict=True)
        for home in homes
    }
    pairs = np.array(sorted(near), np.int64)
    ranks = np.array([near[pair] for pair in pairs.tolist()], np.int64)
    wanted = replica * len(servers) + shard
    at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    server = np.where(pairs[at] == wanted, ranks[at], -1)
    far = np.flatnonzero(server < 0)
    for number, draws in _by_shard(far, shard):
        server[draws] = np.asarray(servers[number], np.int64)[np.arange(len(draws)) % len(servers[number])]
    return server


__all__ = ["ASSIGNMENTS", "Assigned", "Assignment", "Reader", "assign"]
