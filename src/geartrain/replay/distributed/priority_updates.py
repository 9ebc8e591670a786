"""Priority updates of rows, or of steps: sent to the leaders of their shards, which apply them before the next draw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError
from geartrain.replay.builder import PriorityUpdate, raised
from geartrain.replay.distributed.members import Members
from geartrain.replay.distributed.messages import PRIORITY_UPDATE, flat_bytes
from geartrain.replay.sampler import StoreSampler


def parts_of(members: Members, updates: Sequence[PriorityUpdate]) -> list[NDArray[Any]]:
    """The updates for each rank: `PRIORITY_UPDATE` of rows whose shard it leads."""
    size = members.group.size
    if not updates:
        return [np.empty(0, PRIORITY_UPDATE)] * size
    shards = [members.shard_of(update.keys) for update in updates]
    records = _pack(members, updates, shards)
    leader = members.leader_of_shard[np.concatenate(shards)]
    return [np.ascontiguousarray(records[leader == to]) for to in range(size)]


def apply_updates(samplers: Sequence[StoreSampler], parts: Sequence[NDArray[Any]]) -> None:
    """Applies what all ranks have sent to this one, in the order of calls and draws."""
    # As bytes: to find the common type of records takes longer than to copy them.
    received = np.concatenate([flat_bytes(part) for part in parts]).view(PRIORITY_UPDATE)
    if not len(received):
        return
    received = received[np.lexsort((received["draw"], received["call"]))]
    for number, sampler in enumerate(samplers):
        mine = received if len(samplers) == 1 else received[received["store"] == number]
        if len(mine):
            _apply(sampler, mine)


def check_steps(per_step: bool, keys: Keys) -> None:
    """Raises `ArgumentError` unless keys name steps where stores keep priorities of steps, and rows where of rows."""
    if len(keys) and per_step != (keys.step is not None):
        raise ArgumentError(
            "the stores of this replay keep a priority for every step, and these keys name rows; those of its batches "
            "name steps, and `keys.of_steps(step)` makes such keys of others"
            if per_step
            else "these keys name steps, and the stores of this replay keep priorities of rows; `keys.without_steps()` "
            "are those of their rows"
        )


def _apply(sampler: StoreSampler, updates: NDArray[Any]) -> None:
    """Sets priorities of a shard; a key of a row or step that the store cannot have is counted as stale."""
    store = sampler.plan.store
    there = updates["row"] < store.capacity
    if store.per_step:
        there &= updates["step"] < store.max_length
    if not there.all():
        updates = updates.copy()
        for name in ("row", "generation", "step"):
            updates[name][~there] = 0
    rows, generations, steps = (np.ascontiguousarray(updates[name]) for name in ("row", "generation", "step"))
    priorities = raised(np.ascontiguousarray(updates["priority"]), sampler.alpha)
    native = store.native
    if store.per_step:
        native.update_step_priorities(rows, generations, steps, priorities)
    else:
        sampler.change_priorities(rows, lambda: int(native.update_priorities(rows, generations, priorities)))


def _pack(members: Members, updates: Sequence[PriorityUpdate], shards: Sequence[NDArray[np.int64]]) -> NDArray[Any]:
    """The updates as records, in the order they were given."""
    records = np.zeros(sum(len(update.keys) for update in updates), PRIORITY_UPDATE)
    store_of, at = members.store_of_shard, 0
    for call, (update, shard) in enumerate(zip(updates, shards, strict=True)):
        keys = update.keys
        into = records[at : at + len(keys)]
        into["store"], into["row"], into["generation"] = store_of[shard], keys.row, keys.generation
        if keys.step is not None:
            into["step"] = keys.step
        if keys.draw is not None:
            large = (keys.draw >> 32).any()  # or negative, of keys made by hand
            into["draw"] = np.clip(keys.draw, 0, 2**32 - 1) if large else keys.draw
        into["call"], into["priority"] = call, update.priorities
        at += len(keys)
    return records


__all__ = ["apply_updates", "check_steps", "parts_of"]
