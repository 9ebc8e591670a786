"""Takes the first rows of several shards in an order: oldest, newest or highest priority first.

Each shard offers its own first rows, and every rank merges the offers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import NotEnoughRowsError
from geartrain.selection.declared import first_rows
from geartrain.selection.shard import NO_ROW, NO_ROWS, Shard, ShardedDraw
from geartrain.selection.strategy import ORDERS, Candidates, Traits


def offered_after(cursors: Mapping[str, int] | None, number: int, count: int) -> int:
    """The cursor of a shard: of those that it offers, all rows come after it."""
    if not cursors:
        return 0
    return cursors.get(f"after/{number}", cursors.get("after", 0) if count == 1 else 0)


def offer_shape(traits: Traits, n: int) -> tuple[int, int]:
    """The shape of what each shard offers for n rows."""
    return n, 3 if traits.order == ORDERS["highest_priority"] else 2


def offer_of(traits: Traits, candidates: Candidates, n: int, after: int) -> NDArray[np.uint64]:
    """The first rows of a shard, (n, 2 or 3): sequence number (0: none), key, and for `TopK` priority."""
    order = traits.order
    assert order is not None
    offer = np.zeros(offer_shape(traits, n), np.uint64)
    rows, generations, sequences, priorities = first_rows(candidates, order, n, after, traits.limits, NO_ROWS)
    offer[: len(rows), 0] = sequences
    offer[: len(rows), 1] = rows.astype(np.uint64) << np.uint64(32) | generations
    if offer.shape[1] == 3:
        offer[: len(rows), 2] = priorities
    return offer


def draw_first(traits: Traits, shard: Shard, n: int, cursors: Mapping[str, int] | None) -> ShardedDraw:
    """The first rows of all shards, from the first n of each."""
    order, offers = traits.order, shard.offers
    opened: NDArray[np.uint64] | None = None
    if offers is None:
        count, columns = offer_shape(traits, n)
        told = np.zeros((count + 1, columns), np.uint64)
        if shard.leads:
            # Read before the rows: the number only grows, so no older row was under way when those before it were read.
            told[count] = 0 if shard.first_open is None else shard.first_open(n)
            told[:count] = offer_of(traits, shard.candidates, n, offered_after(cursors, shard.number, shard.count))
        every = shard.gather(told)
        offers, opened = every[:, :count], every[:, count, 0]
    width = offers.shape[2]
    flat = offers.reshape(-1, width)
    shards = np.repeat(np.arange(shard.count), offers.shape[1])
    real, waits = np.flatnonzero(flat[:, 0] != 0), ""  # sequence numbers start at 1
    if shard.first_open is not None:
        waits = " before the first one that is under way or yet to be inserted"
        assert opened is not None  # a strict order does not begin with offers
        first = int(opened.argmin())
        before = (flat[real, 0] < opened[first]) | ((flat[real, 0] == opened[first]) & (shards[real] < first))
        real = real[before]
    if len(real) < n:
        raise NotEnoughRowsError(f"{n} rows were asked for, {len(real)} can be chosen{waits}")
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
