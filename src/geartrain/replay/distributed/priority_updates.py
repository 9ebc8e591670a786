"""Priorities that consumers give to rows of other shards, on their way there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from geartrain.core.keys import Keys
from geartrain.replay.distributed.members import Members
from geartrain.replay.sampler import Sampler

# As an update travels. Where a row was drawn twice the later draw's priority holds, as on one rank.
UPDATE = np.dtype(
    [("part", "<u4"), ("row", "<u4"), ("generation", "<u4"), ("call", "<u4"), ("draw", "<i8"), ("priority", "<f8")]
)
_LARGEST = np.finfo(np.float64).max


@dataclass(frozen=True)
class Update:
    """Priorities (n,) that a consumer has given to rows of its batch."""

    keys: Keys
    priorities: NDArray[np.float64]


def send_updates(members: Members, parts: Sequence[Sampler], updates: Sequence[Update]) -> None:
    """Brings updates to the ranks that lead their rows' shards, which set the priorities. Collective."""
    keys = Keys.join([update.keys for update in updates]) if updates else Keys.empty().of_shard(0)
    assert keys.shard is not None
    records = np.zeros(len(keys), UPDATE)
    records["row"], records["generation"] = keys.row, keys.generation
    records["draw"] = 0 if keys.draw is None else keys.draw
    if updates:
        records["priority"] = np.concatenate([update.priorities for update in updates])
        records["call"] = np.repeat(np.arange(len(updates)), [len(update.keys) for update in updates])
    part_of = np.repeat(np.arange(len(members.stores)), [len(store.servers) for store in members.stores])
    leader_of = np.concatenate([store.leaders for store in members.stores])
    records["part"] = part_of[keys.shard]
    leader = leader_of[keys.shard]

    rank, size = members.ranks.rank, members.ranks.size
    counts = members.gather(np.bincount(leader, minlength=size).astype(np.int64))
    outboxes = [np.ascontiguousarray(records[leader == to]) for to in range(size)]
    inboxes = [np.empty(count, UPDATE) for count in counts[:, rank].tolist()]
    inboxes[rank] = outboxes[rank]
    others = [other for other in range(size) if other != rank]
    members.ranks.exchange(
        [(other, outboxes[other].view(np.uint8)) for other in others],
        [(other, inboxes[other].view(np.uint8)) for other in others],
    )
    every = np.concatenate(inboxes)
    every = every[np.lexsort((every["draw"], every["call"]))]
    for number, part in enumerate(parts):
        mine = every[every["part"] == number]
        if len(mine):
            with np.errstate(over="ignore"):
                priorities = np.minimum(np.abs(mine["priority"]) ** part.alpha, _LARGEST)
            part.plan.store.update_priorities(Keys(mine["row"], mine["generation"]), priorities)


__all__ = ["Update", "send_updates"]
