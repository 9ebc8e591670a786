"""Draws from shards by their totals: each is a number below the sum, and falls into one shard.

Independent draws need the totals alone; draws without replacement also whether each row is new, a bit a draw.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.errors import ArgumentError, EmptyStoreError, NotEnoughRowsError
from geartrain.selection.shard import NO_ROW, NO_ROWS, Shard, ShardedDraw
from geartrain.selection.strategy import Limits, Strategy, seed_of, traits_of

# Rows, generations and priorities.
_Found = tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]


class RowSums:
    """A shard's rows, to be found by numbers below their total."""

    def __init__(self, shard: Shard, by_priority: bool, limits: Limits | None) -> None:
        self._candidates = shard.candidates.native
        self._by_priority = by_priority
        # Only who leads copies the allowed rows: others would see other rows by now, or another clock.
        self._limits = None if limits is None or not shard.leads else limits.now()
        self._allowed = None if self._limits is None else self.without(NO_ROWS)
        self.alone = limits is not None or shard.exact  # the leader finds rows for all of the shard's ranks
        self.nothing = (
            "no selectable row meets the limits on version, age and length"
            if limits is not None
            else "no selectable row has a priority above zero"
            if by_priority
            else "no store of the group has a selectable row"
        )

    def total(self) -> int:
        """What numbers of draws are below."""
        return self.unlimited() if self._allowed is None else self._allowed.total()

    def unlimited(self) -> int:
        """The total without limits, which probabilities are of."""
        return self._candidates.total_priority() if self._by_priority else self._candidates.count()

    def count(self) -> int:
        """Rows that can be drawn, of priority 0 as well."""
        return self._candidates.count() if self._allowed is None else self._allowed.count()

    def find(self, targets: NDArray[np.uint64]) -> _Found:
        """Rows, generations and priorities; NO_ROW where the shard changed since its total was told."""
        if self._allowed is not None:
            return self._allowed.find(targets)[:3]
        return self._candidates.find(self._by_priority, targets)[:3]

    def without(self, rows: NDArray[np.uint32]) -> _native.AllowedRows:
        """A copy without some rows, out of which more can be taken."""
        return _native.AllowedRows(self._candidates, self._by_priority, self._limits, np.ascontiguousarray(rows))


def _whole(totals: list[int], nothing: str) -> int:
    whole = sum(totals)
    if whole == 0:
        raise EmptyStoreError(nothing)
    if whole >= 2**64:
        raise ArgumentError(
            "the priorities of all shards add up to more than 64 bits; use fewer priority_fraction_bits"
        )
    return whole


def _owners(totals: list[int], targets: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """The shard that each target falls into, and how far into it."""
    ends = np.cumsum(np.array(totals, np.uint64), dtype=np.uint64)
    owner = np.searchsorted(ends, targets, side="right")
    starts = ends - np.array(totals, np.uint64)
    return owner.astype(np.int64), targets - starts[owner]


def draw_independent(
    rows: RowSums,
    shard: Shard,
    numbers: NDArray[np.uint32],
    round: int,
    n: int,
    step: int,
    strategy: Strategy,
) -> ShardedDraw:
    """Draws of these numbers, each by itself; the same row may be drawn again."""
    told = shard.totals
    if told is None:
        told = shard.gather(np.array([rows.total(), rows.unlimited()], np.uint64))
    totals, unlimited = _integers(told)
    whole = _whole(totals, rows.nothing)
    attempt = round * (_native.LAST_ATTEMPT + 1)
    strata = n if traits_of(strategy).stratified else 0
    targets = _native.draw_targets(seed_of(strategy), step, False, attempt, numbers, strata, whole)
    owner, local = _owners(totals, targets)
    found = _find(rows, shard, owner, local)
    if rows.alone:
        found = _told(shard, found)
    return _chosen(owner, found, unlimited, shard)


def _integers(gathered: NDArray[np.uint64]) -> tuple[list[int], list[int]]:
    """Two columns of numbers as exact integers."""
    first, second = ([int(each) for each in column] for column in gathered.T)
    return first, second


def _find(rows: RowSums, shard: Shard, owner: NDArray[np.int64], local: NDArray[np.uint64]) -> _Found:
    """This shard's rows among all draws; none on ranks that are told them."""
    n = len(owner)
    found = (np.full(n, NO_ROW), np.zeros(n, np.uint32), np.zeros(n, np.uint32))
    if shard.leads or not rows.alone:
        mine = np.flatnonzero(owner == shard.number)
        for into, got in zip(found, rows.find(np.ascontiguousarray(local[mine])), strict=True):
            into[mine] = got
    return found


def _told(shard: Shard, found: _Found) -> _Found:
    """What the leader has found, on all ranks of the shard."""
    rows, generations, priorities = shard.tell(np.stack(found))
    return rows, generations, priorities


def _chosen(owner: NDArray[np.int64], found: _Found, totals: list[int], shard: Shard) -> ShardedDraw:
    rows, generations, priorities = found
    whole = sum(totals)
    return ShardedDraw(owner, rows, generations, priorities / whole, share=totals[shard.number] / whole)


def draw_distinct(rows: RowSums, shard: Shard, n: int, seed: int, step: int) -> ShardedDraw:
    """Draw after draw, passing over rows that were drawn before; in rounds, of which one is nearly always enough."""
    rows.alone = True
    told = shard.gather(np.array([rows.total(), rows.count(), rows.unlimited()], np.uint64))
    totals, counts = _integers(told[:, :2])
    unlimited = [int(each) for each in told[:, 2]]
    if sum(counts) < n:
        raise NotEnoughRowsError(f"{n} different rows were asked for, {sum(counts)} can be drawn")
    whole = _whole(totals, rows.nothing)
    most = 4 * n + 64
    owner = np.empty(0, np.int64)
    found = (NO_ROWS, NO_ROWS, NO_ROWS)  # ours, of the draws so far
    fresh = np.empty(0, bool)  # whether a draw chose its row
    while (chosen := int(fresh.sum())) < n and len(fresh) < most:
        # A few more than it takes if as many are passed over as so far.
        expected = (n - chosen) * (len(fresh) or 1) // (chosen or 1)
        count = min(expected + expected // 8 + 16, most - len(fresh))
        numbers = np.arange(len(fresh), len(fresh) + count, dtype=np.uint32)
        targets = _native.draw_targets(seed, step, True, 0, numbers, 0, whole)
        owners, local = _owners(totals, targets)
        found = _joined(found, _find(rows, shard, owners, local))
        owner = np.concatenate([owner, owners])
        fresh = np.concatenate([fresh, _new_rows(found[0], len(fresh), shard)])
    draws = np.flatnonzero(fresh)[:n]
    owner, found = owner[draws], (found[0][draws], found[1][draws], found[2][draws])
    if len(draws) < n:
        others, rest = _rest(rows, shard, n, found[0][owner == shard.number], len(draws), most, seed, step)
        owner, found = np.concatenate([owner, others]), _joined(found, rest)
    return _chosen(owner, _told(shard, found), unlimited, shard)


def _joined(some: _Found, more: _Found) -> _Found:
    rows, generations, priorities = (np.concatenate(pair) for pair in zip(some, more, strict=True))
    return rows, generations, priorities


def _new_rows(rows: NDArray[np.uint32], before: int, shard: Shard) -> NDArray[np.bool_]:
    """Of the draws from number `before` on: whether their row, in whichever shard, was not drawn before."""
    first = np.zeros(len(rows), bool)
    mine = np.flatnonzero(rows != NO_ROW)
    first[mine[np.unique(rows[mine], return_index=True)[1]]] = True
    bits = shard.gather(np.packbits(first[before:]))
    return np.unpackbits(np.bitwise_or.reduce(bits, axis=0), count=len(rows) - before).astype(bool)


# Rather than ask for the priorities that are left after every row, ask for all of them once, up to so many bytes a row.
_ASK_BYTES = 4096


def _rest(
    rows: RowSums, shard: Shard, n: int, gone: NDArray[np.uint32], done: int, number: int, seed: int, step: int
) -> tuple[NDArray[np.int64], _Found]:
    """The remaining rows one by one, where priorities are so uneven, or rows so few, that rejection takes too long."""
    left = rows.without(gone if shard.leads else NO_ROWS)
    totals, counts = _integers(shard.gather(np.array([left.total(), left.count()], np.uint64)))
    if sum(counts) < n - done:
        raise NotEnoughRowsError(f"{n} different rows were asked for, {done + sum(counts)} can be drawn")

    def target_of(i: int, total: int) -> NDArray[np.uint64]:
        numbers = np.array([number + i], np.uint32)
        return _native.draw_targets(seed, step, True, _native.LAST_ATTEMPT, numbers, 0, total)

    owner = np.empty(n - done, np.int64)
    found = (np.full(n - done, NO_ROW), np.zeros(n - done, np.uint32), np.zeros(n - done, np.uint32))
    if 4 * sum(counts) <= _ASK_BYTES * (n - done):
        mine = left.priorities()
        padded = np.zeros(max(counts), np.uint32)
        if shard.leads:
            padded[: counts[shard.number]] = mine[2]
        every = np.concatenate([part[:count] for part, count in zip(shard.gather(padded), counts, strict=True)])
        together = _native.AllowedRows(_native.Candidates(every), True, None, NO_ROWS)
        ends = np.cumsum(counts)
        for i in range(n - done):
            index = int(together.take(int(target_of(i, together.total())[0]))[0])
            owner[i] = np.searchsorted(ends, index, side="right")
            if owner[i] == shard.number and shard.leads:
                for into, got in zip(found, mine, strict=True):
                    into[i] = got[index - (ends[owner[i]] - counts[owner[i]])]
        return owner, found
    for i in range(n - done):
        owners, local = _owners(totals, target_of(i, sum(totals)))
        owner[i] = owners[0]
        if owner[i] == shard.number and shard.leads:
            for into, value in zip(found, left.take(int(local[0])), strict=True):
                into[i] = value
        totals = [int(each) for each in shard.gather(np.array([left.total()], np.uint64))[:, 0]]
    return owner, found
