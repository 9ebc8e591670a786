"""Who trains on which draw, and who reads it: worked out by every rank alone, from what all of them know.

In synchronous data parallelism it does not matter which replica trains on which row of the global batch. `local_first`
gives every replica rows of its own host as long as there are any; only what one host has too much of, and another too
little, crosses the network: of n draws over W equal shards about 0.4 sqrt(n (W - 1)), the part of a multinomial draw above its
mean, where `ordered`, which gives replica i the i-th slice, moves n (W - 1) / W.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    present = np.unique(shard).tolist()
    most = max(len(reader.homes) for reader in readers)
    for preference in range(most):
        for number in present:
            near = [
                r
                for r, reader in enumerate(readers)
                if preference < len(reader.homes) and number in reader.homes[preference]
            ]
            _deal(np.flatnonzero((shard == number) & (replica < 0)), near, sizes, room, replica)
    _deal(np.flatnonzero(replica < 0), list(range(len(readers))), sizes, room, replica)
    return replica


def _deal(
    draws: NDArray[np.intp],
    among: list[int],
    sizes: NDArray[np.int64],
    room: NDArray[np.int64],
    replica: NDArray[np.int64],
) -> None:
    """Deals draws round among replicas, in order, until there is no room or no draw left."""
    if not len(draws) or not among:
        return
    if (sizes == sizes[0]).all():
        # Places that are free: the first of every replica, then the second of every replica, and so on.
        free = room[among] // sizes[0]
        turn = np.concatenate([np.arange(count) for count in free])
        whose = np.repeat(among, free)
        places = whose[np.argsort(turn, kind="stable")][: len(draws)]
        replica[draws[: len(places)]] = places
        np.subtract.at(room, places, sizes[0])
        return
    for draw in draws.tolist():  # a mixture with groups: few and of different sizes
        best = max(among, key=lambda r: room[r])
        if room[best] >= sizes[draw]:
            replica[draw] = best
            room[best] -= sizes[draw]


def _servers(
    shard: NDArray[np.int64],
    replica: NDArray[np.int64],
    readers: Sequence[Reader],
    servers: Sequence[Sequence[int]],
) -> NDArray[np.int64]:
    """A rank of the replica itself where one has the shard; the shard's ranks in turn otherwise."""
    near = np.full((len(readers), len(servers)), -1, np.int64)
    for r, reader in enumerate(readers):
        for rank, homes in zip(reversed(reader.ranks), reversed(reader.homes), strict=True):
            near[r, list(homes)] = rank
    server = near[replica, shard]
    for number in np.unique(shard[server < 0]).tolist():
        far = np.flatnonzero((shard == number) & (server < 0))
        server[far] = np.asarray(servers[number], np.int64)[np.arange(len(far)) % len(servers[number])]
    return server


__all__ = ["ASSIGNMENTS", "Assigned", "Assignment", "Reader", "assign"]
