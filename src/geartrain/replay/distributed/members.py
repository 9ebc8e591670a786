"""Who the ranks of a job are: checked to agree with each other, and what follows from where they stand.

Every rank tells the others once, when a replay or a placement is made, what it takes the job to be, its place in the
mesh, the shards it has attached and what it reads. From that all of them derive the same maps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import ArgumentError, RanksDisagreeError
from geartrain.replay.distributed.assignment import Reader
from geartrain.replay.distributed.rank_group import Ranks, gather_among
from geartrain.replay.distributed.topology import Place


@dataclass(frozen=True)
class Consumer:
    """A rank that gets fields, from whom its tensor-parallel peers get the same."""

    rank: int
    replica: int
    fields: tuple[str, ...]
    peers: tuple[int, ...]


@dataclass(frozen=True)
class Shards:
    """One store of the job, as it is cut into shards over its ranks.

    Attributes:
        of_rank: by rank, which shard it has attached. Shards are numbered by the lowest ranks that have them.
        servers: by shard, the ranks that have it; the first leads it and speaks for it.
        first: number of its first shard among those of all stores of the job.
    """

    of_rank: list[int]
    servers: list[list[int]]
    first: int

    @property
    def leaders(self) -> list[int]:
        """The rank that leads each shard."""
        return [servers[0] for servers in self.servers]


def agree(what: str, one: Any, other: Any, rank: int) -> None:
    """Raises `RanksDisagreeError` unless rank 0 and another say the same."""
    if one != other:
        raise RanksDisagreeError(f"{what} is {one} on rank 0 and {other} on rank {rank}")


class Members:
    """The ranks of a job.

    Args:
        ranks: the group.
        place: where this rank stands.
        job: what this rank takes the job to be: words and numbers that all ranks must have alike, by their names.
        store_ids: the ids of the segments it has attached, one for each store of the job.
        fields: names of the fields it gets.
        row_bytes: bytes of those fields in a batch, for one row.

    Raises:
        RanksDisagreeError: names two ranks and what differs.
        ArgumentError: a replica that nobody reads for.
    """

    def __init__(
        self,
        ranks: Ranks,
        place: Place,
        job: Mapping[str, Any],
        store_ids: Sequence[int],
        fields: Sequence[str],
        row_bytes: int,
    ) -> None:
        self.ranks = ranks
        self.place = place
        about = {
            "job": dict(job),
            "place": dataclasses.astuple(place),
            "stores": list(store_ids),
            "fields": tuple(fields),
            "row_bytes": int(row_bytes),
        }
        everyone: list[dict[str, Any]] = ranks.gather_objects(about)
        _check(everyone)
        self.row_bytes = [int(each["row_bytes"]) for each in everyone]
        self.stores: list[Shards] = []
        for number in range(len(store_ids)):
            first = sum(len(store.servers) for store in self.stores)
            self.stores.append(_shards([each["stores"][number] for each in everyone], first))
        self.consumers = _consumers(everyone)
        self.readers = [self._reader(replica, everyone) for replica in range(place.dp_size)]
        self.me = next((c for c in self.consumers if c.rank == ranks.rank or ranks.rank in c.peers), None)

    def _reader(self, replica: int, everyone: list[dict[str, Any]]) -> Reader:
        """A replica's ranks that read, whoever reads most first."""
        ranks = [c.rank for c in self.consumers if c.replica == replica and self.row_bytes[c.rank]]
        if not ranks:
            raise ArgumentError(f"replica {replica} has no rank that reads anything; name inputs or targets")
        ranks.sort(key=lambda rank: (-self.row_bytes[rank], rank))
        homes = [frozenset(store.first + store.of_rank[rank] for store in self.stores) for rank in ranks]
        return Reader(tuple(ranks), tuple(homes))

    @property
    def shards(self) -> int:
        """Shards of all stores."""
        return sum(len(store.servers) for store in self.stores)

    def leads(self, store: int) -> bool:
        """Whether this rank speaks for its shard of a store."""
        shards = self.stores[store]
        return shards.servers[shards.of_rank[self.ranks.rank]][0] == self.ranks.rank

    # --- what they tell each other -----------------------------------------------------------------------------

    def gather(self, mine: NDArray[Any]) -> NDArray[Any]:
        """Every rank's array, (ranks, ...)."""
        mine = np.ascontiguousarray(mine)
        every = self.ranks.gather(mine.reshape(-1).view(np.uint8))
        return np.ascontiguousarray(every).view(mine.dtype).reshape(self.ranks.size, *mine.shape)

    def gather_shards(self, store: int, mine: NDArray[Any]) -> NDArray[Any]:
        """Every shard's array, (shards, ...), as its leader has it."""
        shards = self.stores[store]
        leaders = shards.leaders
        if len(leaders) == self.ranks.size:
            return self.gather(mine)[leaders]
        mine = np.ascontiguousarray(mine)
        every = gather_among(self.ranks, leaders, mine.reshape(-1).view(np.uint8))
        every = self.tell(store, every)
        return every.view(mine.dtype).reshape(len(leaders), *mine.shape)

    def tell(self, store: int, mine: NDArray[Any]) -> NDArray[Any]:
        """The array of this shard's leader, on all ranks of the shard; of the same shape and dtype everywhere."""
        shards = self.stores[store]
        if all(len(servers) == 1 for servers in shards.servers):
            return mine
        servers = shards.servers[shards.of_rank[self.ranks.rank]]
        told = np.array(mine, order="C")
        data = told.reshape(-1).view(np.uint8)
        if self.ranks.rank == servers[0]:
            self.ranks.exchange([(rank, data) for rank in servers[1:]], [])
        else:
            self.ranks.exchange([], [(servers[0], data)])
        return told


def _check(everyone: list[dict[str, Any]]) -> None:
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for name in {**first["job"], **other["job"]}:
            agree(name, first["job"].get(name, "missing"), other["job"].get(name, "missing"), rank)
        agree("the mesh's (data, pipeline, tensor) size", first["place"][3:], other["place"][3:], rank)
    places = {tuple(each["place"][:3]) for each in everyone}
    if len(places) != len(everyone) or len(places) != int(np.prod(first["place"][3:])):
        raise RanksDisagreeError(
            f"{len(everyone)} ranks stand at {len(places)} different places of a mesh of "
            f"{' x '.join(map(str, first['place'][3:]))}"
        )


def _shards(ids: Sequence[int], first: int) -> Shards:
    order = list(dict.fromkeys(ids))
    of_rank = [order.index(each) for each in ids]
    servers: list[list[int]] = [[] for _ in order]
    for rank, shard in enumerate(of_rank):
        servers[shard].append(rank)
    return Shards(of_rank, servers, first)


def _consumers(everyone: list[dict[str, Any]]) -> list[Consumer]:
    """The ranks with tensor-parallel number 0, in the order of ranks."""
    peers: dict[tuple[int, int], list[int]] = {}
    for rank, each in enumerate(everyone):
        dp, pp, tp = each["place"][:3]
        if tp:
            peers.setdefault((dp, pp), []).append(rank)
    return [
        Consumer(rank, each["place"][0], tuple(each["fields"]), tuple(peers.get(tuple(each["place"][:2]), ())))
        for rank, each in enumerate(everyone)
        if each["place"][2] == 0
    ]


__all__ = ["Consumer", "Members", "Shards", "agree"]
