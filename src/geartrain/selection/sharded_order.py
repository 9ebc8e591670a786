"""Rows of several shards in order (oldest, newest, highest priority first), from the first rows of each."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from geartrain.errors import NotEnoughRowsError
from geartrain.selection.declared import first_rows
from geartrain.selection.shard import NO_ROW, NO_ROWS, Shard, ShardedDraw
from geartrain.selection.strategy import ORDERS, Traits


def draw_first(traits: Traits, shard: Shard, n: int, cursors: Mapping[str, int] | None) -> ShardedDraw:
    """The first rows of all shards, from the first n of each."""
    order, after = traits.order, 0
    assert order is not None
    if cursors:  # one store's own cursor is that of the only shard
        after = cursors.get(f"after/{shard.number}", cursors.get("after", 0) if shard.count == 1 else 0)
    offer = np.zeros((n, 3 if order == ORDERS["highest_priority"] else 2), np.uint64)
    if shard.leads:
        rows, generations, sequences, priorities = first_rows(shard.candidates, order, n, after, traits.limits, NO_ROWS)
        offer[: len(rows), 0] = sequences
        offer[: len(rows), 1] = rows.astype(np.uint64) << np.uint64(32) | generations
        if order == ORDERS["highest_priority"]:
            offer[: len(rows), 2] = priorities
    offers = shard.gather(offer)
    width = offers.shape[2]
    flat = offers.reshape(-1, width)
    shards = np.repeat(np.arange(shard.count), n)
    real = np.flatnonzero(flat[:, 0] != 0)  # sequence numbers start at 1
    if len(real) < n:
        raise NotEnoughRowsError(f"{n} rows were asked for, {len(real)} can be chosen")
    sequence, key, owner = flat[real, 0], flat[real, 1], shards[real]
    if order == ORDERS["newest"]:
        ranking = np.lexsort((-owner, ~sequence))
    elif order == ORDERS["highest_priority"]:
        ranking = np.lexsort((owner, sequence, ~flat[real, 2]))
    else:
        ranking = np.lexsort((owner, sequence))
    taken = ranking[:n]
    owner, key, sequence = owner[taken], key[taken], sequence[taken]
    mine = owner == shard.number
    state: dict[str, int] = {}
    if cursors is not None:
        state = {name: value for name, value in cursors.items() if name != "after"}
        for number in np.unique(owner).tolist():
            name = f"after/{number}"
            state[name] = max(state.get(name, 0), int(sequence[owner == number].max()))
    return ShardedDraw(
        owner.astype(np.int64),
        np.where(mine, key >> np.uint64(32), NO_ROW).astype(np.uint32),
        np.where(mine, key & np.uint64(0xFFFFFFFF), 0).astype(np.uint32),
        mine.astype(np.float64),
        state,
    )
