"""Members of a job: its ranks, shards, consumers and replicas, all-gathered once at construction.

A replay or a placement makes this all-gather when it is created. Each rank contributes its configuration, its mesh
position, the ids of its attached shards, and the fields it reads. Every rank checks that the configurations are equal,
and derives the same tables.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError, RanksDisagreeError
from geartrain.ranks.rank_collectives import DIRECT_RANKS, all_gather_among, all_to_all_of_known_sizes
from geartrain.ranks.rank_group import Bytes, RankGroup
from geartrain.ranks.topology import MeshPosition
from geartrain.replay.config import ReplayConfig
from geartrain.replay.distributed.assignment import Replica, check_sizes
from geartrain.replay.distributed.fingerprint import describe_job
from geartrain.replay.sampler import StoreSampler
from geartrain.selection.mixture import Selection
from geartrain.selection.sharded import check_strategy


@dataclass(frozen=True)
class Consumer:
    """A rank that gets rows, and its tensor-parallel peers, which get copies of them."""

    rank: int
    replica: int
    fields: tuple[str, ...]
    peers: tuple[int, ...]


@dataclass(frozen=True)
class StoreShards:
    """The shards of one store of the job.

    Attributes:
        of_rank: the shard that each rank has attached. Shards are numbered by their lowest ranks.
        ranks: the ranks of each shard; the first one is its leader.
        first: number of its first shard among those of all stores of the job.
        ids: the id of each shard's segment.
        processes: number of different processes that the ranks of each shard are.
    """

    of_rank: list[int]
    ranks: list[list[int]]
    first: int
    ids: list[int]
    processes: list[int]

    @property
    def leaders(self) -> list[int]:
        """The leader of each shard: the rank that contributes its totals."""
        return [ranks[0] for ranks in self.ranks]


def check_same(what: str, first: Any, other: Any, rank: int) -> None:
    """Raises `RanksDisagreeError` unless rank 0 and another rank have the same value."""
    if first != other:
        raise RanksDisagreeError(f"{what} is {first} on rank 0 and {other} on rank {rank}")


class Members:
    """The ranks of a job, and collectives over its shards.

    Args:
        group: the rank group.
        position: this rank's position in the mesh.
        job: configuration that all ranks must have alike, by name.
        store_ids: ids of the segments this rank has attached, one for each store of the job.
        fields: names of the fields this rank gets.
        row_bytes: bytes of those fields in a batch, for one row.

    Raises:
        RanksDisagreeError: names two ranks and the difference.
        ArgumentError: a replica none of whose ranks reads a field.
    """

    def __init__(
        self,
        group: RankGroup,
        position: MeshPosition,
        job: Mapping[str, Any],
        store_ids: Sequence[int],
        fields: Sequence[str],
        row_bytes: int,
    ) -> None:
        self.group = group
        self.position = position
        self.job = dict(job)
        self.fields = tuple(fields)
        mine = {
            "job": self.job,
            "position": dataclasses.astuple(position),
            "stores": list(store_ids),
            "fields": self.fields,
            "row_bytes": int(row_bytes),
            "process": os.getpid(),
        }
        everyone: list[dict[str, Any]] = group.all_gather_object(mine)
        _check(everyone)
        _check_order([each["stores"] for each in everyone])
        self.row_bytes = [int(each["row_bytes"]) for each in everyone]
        self.stores: list[StoreShards] = []
        for number in range(len(store_ids)):
            first = sum(len(store.ranks) for store in self.stores)
            ids, processes = ([each[what] for each in everyone] for what in ("stores", "process"))
            self.stores.append(_shards([each[number] for each in ids], first, processes))
        #: (shards,) uint64, the ids of the segments of all shards of all stores.
        self.shard_ids = np.array([each for store in self.stores for each in store.ids], np.uint64)
        self.consumers = _consumers(everyone)
        self.replicas = [self._replica(number) for number in range(position.dp_size)]
        self.me = next((c for c in self.consumers if c.rank == group.rank or group.rank in c.peers), None)

    def _replica(self, number: int) -> Replica:
        """A replica's ranks that get fields, the one with the most bytes a row first."""
        ranks = [c.rank for c in self.consumers if c.replica == number and self.row_bytes[c.rank]]
        if not ranks:
            raise ArgumentError(f"no rank of replica {number} reads a field; name inputs or targets")
        ranks.sort(key=lambda rank: (-self.row_bytes[rank], rank))
        local = [frozenset(store.first + store.of_rank[rank] for store in self.stores) for rank in ranks]
        return Replica(tuple(ranks), tuple(local))

    @property
    def shards(self) -> int:
        """Number of shards of all stores."""
        return sum(len(store.ranks) for store in self.stores)

    def shard_of(self, keys: Keys) -> NDArray[np.int64]:
        """(n,) the shard of each key, among those of all stores. Raises `ArgumentError` for keys of other stores."""
        shard, store, ids = keys.shard, keys.store, self.shard_ids
        if shard is not None and type(store) is np.ndarray and len(keys) and int(shard.max()) < len(ids):
            there = ids[shard] == store
            if there.all():  # as in the keys of a batch
                return shard.astype(np.int64)
        return keys.places_among(self.shard_ids, "shards of this replay")

    @functools.cached_property
    def leader_of_shard(self) -> NDArray[np.int64]:
        """(shards,) the rank that leads each shard."""
        return np.concatenate([store.leaders for store in self.stores]).astype(np.int64)

    def leads(self, store: int) -> bool:
        """Whether this rank is the leader of its shard of a store."""
        shards = self.stores[store]
        return shards.ranks[shards.of_rank[self.group.rank]][0] == self.group.rank

    # --- collectives --------------------------------------------------------------------------------------------

    def all_gather(self, mine: NDArray[Any]) -> NDArray[Any]:
        """Every rank's array, (ranks, ...)."""
        mine = np.ascontiguousarray(mine)
        every = self.group.all_gather(mine.reshape(-1).view(np.uint8))
        return np.ascontiguousarray(every).view(mine.dtype).reshape(self.group.size, *mine.shape)

    def all_to_all(self, parts: Sequence[Bytes]) -> list[Bytes]:
        """Sends each rank its part; returns each rank's for this one, of any size."""
        if self.group.size <= DIRECT_RANKS:
            return self.group.all_to_all(parts)
        return all_to_all_of_known_sizes(self.group, parts)

    def all_gather_shards(self, store: int, mine: NDArray[Any]) -> NDArray[Any]:
        """Every shard's array, (shards, ...), as its leader has it."""
        leaders = self.stores[store].leaders
        if len(leaders) == self.group.size:
            return self.all_gather(mine)[leaders]
        mine = np.ascontiguousarray(mine)
        if self.group.size <= DIRECT_RANKS:
            return self._from_leaders(leaders, mine)
        every = all_gather_among(self.group, leaders, mine.reshape(-1).view(np.uint8))
        every = self.broadcast_in_shard(store, every)
        return every.view(mine.dtype).reshape(len(leaders), *mine.shape)

    def _from_leaders(self, leaders: Sequence[int], mine: NDArray[Any]) -> NDArray[Any]:
        """The leaders' arrays, (leaders, ...), by one message from each of them to every other rank."""
        rank, data = self.group.rank, mine.reshape(-1).view(np.uint8)
        every = np.zeros((len(leaders), data.size), np.uint8)
        sends = [(other, data) for other in range(self.group.size) if other != rank] if rank in leaders else []
        receives = [(leader, every[at]) for at, leader in enumerate(leaders) if leader != rank]
        self.group.exchange(sends, receives)
        if rank in leaders:
            every[leaders.index(rank)] = data
        return every.view(mine.dtype).reshape(len(leaders), *mine.shape)

    def broadcast_in_shard(self, store: int, mine: NDArray[Any]) -> NDArray[Any]:
        """The array of this shard's leader, on all ranks of the shard; of one shape and dtype on all of them."""
        shards = self.stores[store]
        if all(len(ranks) == 1 for ranks in shards.ranks):
            return mine
        ranks = shards.ranks[shards.of_rank[self.group.rank]]
        copied = np.array(mine, order="C")
        data = copied.reshape(-1).view(np.uint8)
        if self.group.rank == ranks[0]:
            self.group.exchange([(rank, data) for rank in ranks[1:]], [])
        else:
            self.group.exchange([], [(ranks[0], data)])
        return copied


def join_job(
    group: RankGroup,
    position: MeshPosition,
    samplers: Sequence[StoreSampler],
    selection: Selection,
    config: ReplayConfig,
) -> Members:
    """The ranks of a replay, which have told each other what they draw. Collective.

    Raises:
        RanksDisagreeError: the ranks differ in strategy, seed, schema or sizes.
        ArgumentError: a strategy cannot draw from many shards; or the batch cannot be divided evenly.
    """
    for sampler in samplers:
        check_strategy(sampler.strategy)
    arrays, options = samplers[0].arrays, config.device
    inputs = list(arrays) if config.inputs is None else config.inputs
    targets = list(arrays) if config.targets is None else config.targets
    mine = [*(inputs if position.is_first_stage else ()), *(targets if position.is_last_stage else ())]
    # Every rank has all fields of packed rows, as every stage of a pipeline needs their lengths.
    fields = tuple(arrays) if samplers[0].packed is not None else tuple(dict.fromkeys(mine))
    job = describe_job(samplers, selection, config.batch_size, config.view)
    job |= {name: getattr(config, name) for name in ("assignment", "prefetch", "num_batches", "keep")}
    job["balance"] = None if config.cost is None else repr(config.cost)
    job["update_lag"] = config.prefetch + config.extra_lag
    job["exchange"] = "host" if options is None else options.exchange
    if options is not None and options.exchange == "nccl":
        # The consumer's batch holds what the reader's GPU has converted.
        job["convert"] = {name: repr(into) for name, into in sorted(options.convert.items())}
    store_ids = [sampler.plan.store.id for sampler in samplers]
    members = Members(group, position, job, store_ids, fields, sum(arrays[name] for name in fields))
    atoms = [sampler.atom for sampler in samplers]
    if config.cost is None:
        check_sizes(atoms, len(members.replicas), config.batch_size, config.assignment)
    return members


def _check(everyone: list[dict[str, Any]]) -> None:
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for name in {**first["job"], **other["job"]}:
            check_same(name, first["job"].get(name, "missing"), other["job"].get(name, "missing"), rank)
        check_same("the mesh's (data, pipeline, tensor) size", first["position"][3:], other["position"][3:], rank)
    positions = {tuple(each["position"][:3]) for each in everyone}
    if len(positions) != len(everyone) or len(positions) != int(np.prod(first["position"][3:])):
        raise RanksDisagreeError(
            f"{len(everyone)} ranks have {len(positions)} different positions in a mesh of "
            f"{' x '.join(map(str, first['position'][3:]))}"
        )


def _check_order(ids: Sequence[Sequence[int]]) -> None:
    """Raises `RanksDisagreeError` where two ranks have the same segments as other stores of the job."""
    places: dict[int, tuple[int, list[int]]] = {}
    for rank, mine in enumerate(ids):
        for store in dict.fromkeys(mine):
            here = [number for number, each in enumerate(mine) if each == store]
            first, there = places.setdefault(store, (rank, here))
            if here != there:
                raise RanksDisagreeError(
                    f"the segment with id {store:016x} is store {there} of the replay on rank {first} and {here} on "
                    f"rank {rank}; give the stores in the same order on all ranks"
                )


def _shards(ids: Sequence[int], first: int, processes: Sequence[int]) -> StoreShards:
    order = list(dict.fromkeys(ids))
    of_rank = [order.index(each) for each in ids]
    ranks: list[list[int]] = [[] for _ in order]
    for rank, shard in enumerate(of_rank):
        ranks[shard].append(rank)
    return StoreShards(of_rank, ranks, first, order, [len({processes[rank] for rank in each}) for each in ranks])


def _consumers(everyone: list[dict[str, Any]]) -> list[Consumer]:
    """The ranks with tensor-parallel coordinate 0, in the order of ranks."""
    peers: dict[tuple[int, int], list[int]] = {}
    for rank, each in enumerate(everyone):
        dp, pp, tp = each["position"][:3]
        if tp:
            peers.setdefault((dp, pp), []).append(rank)
    return [
        Consumer(rank, each["position"][0], tuple(each["fields"]), tuple(peers.get(tuple(each["position"][:2]), ())))
        for rank, each in enumerate(everyone)
        if each["position"][2] == 0
    ]


__all__ = ["Consumer", "Members", "StoreShards", "check_same", "join_job"]
