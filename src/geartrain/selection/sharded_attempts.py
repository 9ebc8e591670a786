"""Repeats draws from shards that were refused.

A draw is refused by limits, by the row's length, or because no window is identified by the drawn step. It is repeated
under the next attempt number, as in a single store (native/selection/selection.h).

The totals stay the same between attempts, so every rank knows the targets of all attempts. Each shard reports the
accepted ones among its own targets, one bit for each draw and attempt. Several attempts share a round, so a batch
rarely needs more than two rounds.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.selection.shard import NO_ROW, Shard, ShardedDraw
from geartrain.selection.sharded_totals import (
    Found,
    RowSums,
    chosen,
    find_mine,
    nothing_found,
    owners_of,
    told,
    told_totals,
    whole_of,
)
from geartrain.selection.strategy import Traits

#: Attempts of each round; together all that come before the last, which is made from what is left.
ROUNDS = (4, 12, _native.LAST_ATTEMPT - 16)


def draw_in_attempts(
    rows: RowSums, shard: Shard, numbers: NDArray[np.uint32], round: int, n: int, traits: Traits
) -> ShardedDraw:
    """Draws of these numbers, each by itself, of a batch of n; the same ones as from one store.

    Raises:
        EmptyStoreError: there is nothing to draw; on all ranks alike.
    """
    totals = told_totals(rows, shard)
    whole = whole_of(totals, rows.nothing)
    first, strata = round * (_native.LAST_ATTEMPT + 1), n if traits.stratified else 0
    owner, found = np.zeros(len(numbers), np.int64), nothing_found(len(numbers))
    pending = np.arange(len(numbers))
    for count in ROUNDS:
        if not len(pending):
            break
        of = numbers[pending]
        tries: list[tuple[NDArray[np.int64], Found]] = []
        for attempt in range(first, first + count):
            targets = _native.draw_targets(rows.seed, rows.step, False, attempt, of, strata, whole)
            owners, local = owners_of(totals, targets)
            tries.append((owners, find_mine(rows, shard, owners, local, of, attempt)))
        mine = np.stack([each[0] != NO_ROW for _, each in tries])
        bits = np.bitwise_or.reduce(shard.gather(np.packbits(mine)), axis=0)
        taken = np.unpackbits(bits, count=mine.size).reshape(mine.shape).astype(bool)
        settled = np.flatnonzero(taken.any(0))
        by = taken[:, settled].argmax(0)
        owner[pending[settled]] = np.stack([owners for owners, _ in tries])[by, settled]
        for number, into in enumerate(found):
            into[pending[settled]] = np.stack([each[number] for _, each in tries])[by, settled]
        pending = np.delete(pending, settled)
        first += count
    if len(pending):
        owner[pending], rest = _from_the_rest(rows, shard, numbers[pending], first, strata)
        for into, values in zip(found, rest, strict=True):
            into[pending] = values
    if rows.alone:
        found = told(shard, found)
    return chosen(rows, owner, found, totals, shard)


def _from_the_rest(
    rows: RowSums, shard: Shard, numbers: NDArray[np.uint32], attempt: int, strata: int
) -> tuple[NDArray[np.int64], Found]:
    """Draws that were refused too often, from what is not refused."""
    here = shard.leads or not rows.alone
    total, find = rows.left() if here else (0, None)
    totals = [int(each) for each in shard.gather(np.array([total], np.uint64))[:, 0]]
    whole = whole_of(totals, rows.nothing)
    targets = _native.draw_targets(rows.seed, rows.step, False, attempt, numbers, strata, whole)
    owner, local = owners_of(totals, targets)
    found = nothing_found(len(numbers))
    if find is not None:
        mine = np.flatnonzero((owner == shard.number) & (local < total))  # the leader's total may be another
        for into, values in zip(found, find(np.ascontiguousarray(local[mine])), strict=True):
            into[mine] = values
    return owner, found


__all__ = ["ROUNDS", "draw_in_attempts"]
