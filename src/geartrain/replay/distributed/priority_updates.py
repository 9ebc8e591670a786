"""Priority updates: sent to the leaders of the rows' shards, which apply them before the next draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.replay.builder import PriorityUpdate, raised
from geartrain.replay.distributed.members import Members
from geartrain.replay.distributed.messages import PRIORITY_UPDATE, flat_bytes
from geartrain.replay.sampler import StoreSampler


def send_updates(members: Members, samplers: Sequence[StoreSampler], updates: Sequence[PriorityUpdate]) -> None:
    """Sends each update to the leader of its row's shard, and applies those that this rank receives. Collective."""
    shards = [members.shard_of(update.keys) for update in updates]
    records = _pack(members, updates, shards)
    leader_of = np.concatenate([store.leaders for store in members.stores])
    leader = leader_of[np.concatenate(shards)] if updates else np.empty(0, np.int64)

    group = members.group
    counts = members.all_gather(np.bincount(leader, minlength=group.size).astype(np.int64))
    outboxes = [np.ascontiguousarray(records[leader == to]) for to in range(group.size)]
    inboxes = [np.empty(count, PRIORITY_UPDATE) for count in counts[:, group.rank].tolist()]
    inboxes[group.rank] = outboxes[group.rank]
    others = [other for other in range(group.size) if other != group.rank]
    group.exchange(
        [(other, flat_bytes(outboxes[other])) for other in others],
        [(other, flat_bytes(inboxes[other])) for other in others],
    )
    received = np.concatenate(inboxes)
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


__all__ = ["send_updates"]
