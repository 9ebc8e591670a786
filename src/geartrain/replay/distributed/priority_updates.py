"""Priority updates: sent to the leaders of the rows' shards, which apply them before the next draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.replay.builder import PriorityUpdate, raised
from geartrain.replay.distributed.members import Members
from geartrain.replay.distributed.messages import PRIORITY_UPDATE, flat_bytes
from geartrain.replay.distributed.rank_group import all_to_all_of_known_sizes
from geartrain.replay.sampler import StoreSampler


def parts_of(members: Members, updates: Sequence[PriorityUpdate]) -> list[NDArray[Any]]:
    """The updates for each rank: `PRIORITY_UPDATE` of rows whose shard it leads."""
    size = members.group.size
    if not updates:
        return [np.empty(0, PRIORITY_UPDATE)] * size
    shards = [members.shard_of(update.keys) for update in updates]
    records = _pack(members, updates, shards)
    leader_of = np.concatenate([store.leaders for store in members.stores])
    leader = leader_of[np.concatenate(shards)]
    return [np.ascontiguousarray(records[leader == to]) for to in range(size)]


def send_updates(members: Members, parts: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """Sends each rank its part, and returns what all ranks have sent to this one. Collective."""
    received = all_to_all_of_known_sizes(members.group, [flat_bytes(part) for part in parts])
    return [part.view(PRIORITY_UPDATE) for part in received]


def apply_updates(samplers: Sequence[StoreSampler], parts: Sequence[NDArray[Any]]) -> None:
    """Applies what all ranks have sent to this one, in the order of calls and draws."""
    received = np.concatenate(parts)
    if not len(received):
        return
    received = received[np.lexsort((received["draw"], received["call"]))]
    for number, sampler in enumerate(samplers):
        mine = received[received["store"] == number]
        if len(mine):
            # The key of a row that the store does not have is counted as stale, and is no error of this rank.
            there = mine["row"] < sampler.plan.store.capacity
            rows, generations = np.where(there, mine["row"], 0), np.where(there, mine["generation"], 0)
            sampler.plan.store.native.update_priorities(rows, generations, raised(mine["priority"], sampler.alpha))


def _pack(members: Members, updates: Sequence[PriorityUpdate], shards: Sequence[NDArray[np.int64]]) -> NDArray[Any]:
    """The updates as records, in the order they were given."""
    records = np.zeros(sum(len(update.keys) for update in updates), PRIORITY_UPDATE)
    store_of = np.repeat(np.arange(len(members.stores)), [len(store.ranks) for store in members.stores])
    at = 0
    for call, (update, shard) in enumerate(zip(updates, shards, strict=True)):
        keys = update.keys
        into = records[at : at + len(keys)]
        into["store"], into["row"], into["generation"] = store_of[shard], keys.row, keys.generation
        into["call"], into["draw"], into["priority"] = call, 0 if keys.draw is None else keys.draw, update.priorities
        at += len(keys)
    return records


__all__ = ["apply_updates", "parts_of", "send_updates"]
