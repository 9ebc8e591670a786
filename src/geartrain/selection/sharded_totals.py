"""Draws from shards by their totals. Each draw is a number below the sum, and falls into one shard.

Independent draws need only the totals. Draws without replacement also need to know whether each row is new, which takes
one bit a draw.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.errors import ArgumentError, EmptyStoreError, NotEnoughRowsError
from geartrain.selection.shard import NO_ROW, NO_ROWS, Shard, ShardedDraw
from geartrain.selection.strategy import Strategy, Traits, seed_of

# Rows, generations, priorities and steps.
Found = tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]


class RowSums:
    """Finds a shard's rows by numbers below their total; finds steps if these are drawn by priority.

    Args:
        shard: the shard, and which steps of its rows count.
        strategy: strategy of the draws, at a step.
        traits: traits of the strategy, with the limits that hold here.
    """

    def __init__(self, shard: Shard, strategy: Strategy, traits: Traits, step: int) -> None:
        self._candidates = shard.candidates.native
        self._by_priority = traits.by_priority
        self._steps = shard.steps
        self.seed, self.step = seed_of(strategy), step
        self.over_steps = traits.over_steps
        limits = traits.limits
        # Only who leads applies limits: others would see other rows by now, or another clock.
        self._limits = None if limits is None or not shard.leads else limits.now()
        self.alone = limits is not None or shard.exact  # the leader finds rows for all of the shard's ranks
        need = 0 if shard.steps is None else shard.steps.need + shard.steps.skip
        self.refuses = limits is not None or self.over_steps or need > 0
        with_priority = " has a priority above zero" if traits.by_priority else ""
        if need:
            plural = "" if need == 1 else "s"
            self.nothing = f"no selectable row that the limits allow has more than {need} step{plural}"
            self.nothing += ", with priorities above zero" if traits.by_priority else ""
        elif limits is not None:
            self.nothing = "no selectable row meets the limits on version, age and length"
        elif with_priority:
            self.nothing = "no selectable row" + with_priority
        else:
            self.nothing = "no store of the group has a selectable row"

    @property
    def finds_steps(self) -> bool:
        """Whether steps are drawn, and not rows: by priority, or over steps where rows hold several episodes or repeat
        steps of the row before."""
        steps = self._steps
        return steps is not None and (self._by_priority or self._candidates.shares_rows or steps.after > 0)

    def total(self) -> int:
        """What numbers of draws are below, and probabilities are of; no matter what is refused."""
        return self._candidates.total_priority() if self._by_priority else self._candidates.count()

    def count(self) -> int:
        """Rows that can be drawn, of priority 0 as well; no matter which are refused."""
        return self._candidates.count()

    def find(self, targets: NDArray[np.uint64], numbers: NDArray[np.uint32], attempt: int) -> Found:
        """What draws of these numbers find; NO_ROW where they are refused, or the shard changed since its total."""
        if self._steps is None and self._limits is None:
            rows, generations, priorities, _ = self._candidates.find(self._by_priority, targets)
            return rows, generations, priorities, np.zeros(len(rows), np.uint32)
        return self._candidates.find_drawn(
            self._by_priority, self.seed, self.step, attempt, numbers, targets, self._limits, self._steps
        )

    def left(self) -> tuple[int, Callable[[NDArray[np.uint64]], Found]]:
        """The total of what is not refused, and what finds it by numbers below that. A pass over the rows."""
        if self.finds_steps:
            assert self._steps is not None
            steps = _native.AllowedSteps(self._candidates, self._limits, self._steps)
            return steps.total(), steps.find
        allowed = _native.AllowedRows(self._candidates, self._by_priority, self._limits, NO_ROWS, self._steps)

        def find(targets: NDArray[np.uint64]) -> Found:
            rows, generations, priorities, _ = allowed.find(targets)
            return rows, generations, priorities, np.zeros(len(rows), np.uint32)

        return allowed.total(), find

    def without(self, rows: NDArray[np.uint32]) -> _native.AllowedRows:
        """A copy of the rows that are not refused, without some, out of which more can be taken."""
        return _native.AllowedRows(self._candidates, self._by_priority, self._limits, np.ascontiguousarray(rows))


def whole_of(totals: list[int], nothing: str) -> int:
    """The sum of all shards; raises `EmptyStoreError` with this text where it is 0."""
    whole = sum(totals)
    if whole == 0:
        raise EmptyStoreError(nothing)
    if whole >= 2**64:
        raise ArgumentError(
            "the priorities of all shards add up to more than 64 bits; use fewer priority_fraction_bits"
        )
    return whole


def owners_of(totals: list[int], targets: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """The shard that each target falls into, and how far into it."""
    ends = np.cumsum(np.array(totals, np.uint64), dtype=np.uint64)
    owner = np.searchsorted(ends, targets, side="right")
    starts = ends - np.array(totals, np.uint64)
    return owner.astype(np.int64), targets - starts[owner]


def draw_independent(
    rows: RowSums, shard: Shard, numbers: NDArray[np.uint32], round: int, n: int, traits: Traits
) -> ShardedDraw:
    """Draws of these numbers, each by itself; the same row may be drawn again. None of them is refused."""
    totals = told_totals(rows, shard)
    whole = whole_of(totals, rows.nothing)
    attempt = round * (_native.LAST_ATTEMPT + 1)
    strata = n if traits.stratified else 0
    targets = _native.draw_targets(rows.seed, rows.step, False, attempt, numbers, strata, whole)
    owner, local = owners_of(totals, targets)
    found = find_mine(rows, shard, owner, local, numbers, attempt)
    if rows.alone:
        found = told(shard, found)
    return chosen(rows, owner, found, totals, shard)


def told_totals(rows: RowSums, shard: Shard) -> list[int]:
    """The total of every shard."""
    every = shard.totals
    if every is None:
        every = shard.gather(np.array([rows.total()], np.uint64))[:, 0]
    return [int(each) for each in every]


def nothing_found(n: int) -> Found:
    """Of n draws none."""
    return np.full(n, NO_ROW), np.zeros(n, np.uint32), np.zeros(n, np.uint32), np.zeros(n, np.uint32)


def find_mine(
    rows: RowSums,
    shard: Shard,
    owner: NDArray[np.int64],
    local: NDArray[np.uint64],
    numbers: NDArray[np.uint32],
    attempt: int,
) -> Found:
    """This shard's rows among all draws; none on ranks that are told them."""
    found = nothing_found(len(owner))
    if shard.leads or not rows.alone:
        mine = np.flatnonzero(owner == shard.number)
        got = rows.find(np.ascontiguousarray(local[mine]), np.ascontiguousarray(numbers[mine]), attempt)
        for into, values in zip(found, got, strict=True):
            into[mine] = values
    return found


def told(shard: Shard, found: Found) -> Found:
    """What the leader has found, on all ranks of the shard."""
    rows, generations, priorities, steps = shard.tell(np.stack(found))
    return rows, generations, priorities, steps


def chosen(rows: RowSums, owner: NDArray[np.int64], found: Found, totals: list[int], shard: Shard) -> ShardedDraw:
    """The draws, with their probabilities; NaN over steps, whose number is not kept."""
    which, generations, priorities, steps = found
    whole = sum(totals)
    probability = np.full(len(owner), np.nan) if rows.over_steps else priorities / whole
    share = totals[shard.number] / whole
    return ShardedDraw(owner, which, generations, probability, share=share, steps=steps if rows.finds_steps else None)


def draw_distinct(rows: RowSums, shard: Shard, n: int) -> ShardedDraw:
    """Draw after draw, passing over rows that are refused or were drawn before; in rounds, mostly one."""
    rows.alone = True
    totals, counts = _integers(shard.gather(np.array([rows.total(), rows.count()], np.uint64)))
    if sum(counts) < n:
        raise NotEnoughRowsError(f"{n} different rows were asked for, {sum(counts)} can be drawn")
    whole = whole_of(totals, rows.nothing)
    most = 4 * n + 64
    owner = np.empty(0, np.int64)
    found = nothing_found(0)  # ours, of the draws so far
    fresh = np.empty(0, bool)  # whether a draw chose its row
    while (have := int(fresh.sum())) < n and len(fresh) < most:
        # A few more than it takes if as many are passed over as so far.
        expected = (n - have) * (len(fresh) or 1) // (have or 1)
        count = min(expected + expected // 8 + 16, most - len(fresh))
        numbers = np.arange(len(fresh), len(fresh) + count, dtype=np.uint32)
        targets = _native.draw_targets(rows.seed, rows.step, True, 0, numbers, 0, whole)
        owners, local = owners_of(totals, targets)
        found = _joined(found, find_mine(rows, shard, owners, local, numbers, 0))
        owner = np.concatenate([owner, owners])
        fresh = np.concatenate([fresh, _new_rows(found[0], len(fresh), shard)])
    draws = np.flatnonzero(fresh)[:n]
    owner, found = owner[draws], (found[0][draws], found[1][draws], found[2][draws], found[3][draws])
    if len(draws) < n:
        others, rest = _rest(rows, shard, n, found[0][owner == shard.number], len(draws), most)
        owner, found = np.concatenate([owner, others]), _joined(found, rest)
    return chosen(rows, owner, told(shard, found), totals, shard)


def _integers(gathered: NDArray[np.uint64]) -> tuple[list[int], list[int]]:
    """Two columns of numbers as exact integers."""
    first, second = ([int(each) for each in column] for column in gathered.T)
    return first, second


def _joined(some: Found, more: Found) -> Found:
    rows, generations, priorities, steps = (np.concatenate(pair) for pair in zip(some, more, strict=True))
    return rows, generations, priorities, steps


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
    rows: RowSums, shard: Shard, n: int, gone: NDArray[np.uint32], done: int, number: int
) -> tuple[NDArray[np.int64], Found]:
    """The remaining rows one by one, where priorities are so uneven, or rows so few, that rejection takes too long."""
    left = rows.without(gone if shard.leads else NO_ROWS)
    totals, counts = _integers(shard.gather(np.array([left.total(), left.count()], np.uint64)))
    if sum(counts) < n - done:
        raise NotEnoughRowsError(f"{n} different rows were asked for, {done + sum(counts)} can be drawn")

    def target_of(i: int, total: int) -> NDArray[np.uint64]:
        numbers = np.array([number + i], np.uint32)
        return _native.draw_targets(rows.seed, rows.step, True, _native.LAST_ATTEMPT, numbers, 0, total)

    owner = np.empty(n - done, np.int64)
    found = nothing_found(n - done)
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
                for into, got in zip(found[:3], mine, strict=True):
                    into[i] = got[index - (ends[owner[i]] - counts[owner[i]])]
        return owner, found
    for i in range(n - done):
        owners, local = owners_of(totals, target_of(i, sum(totals)))
        owner[i] = owners[0]
        if owner[i] == shard.number and shard.leads:
            for into, value in zip(found[:3], left.take(int(local[0])), strict=True):
                into[i] = value
        totals = [int(each) for each in shard.gather(np.array([left.total()], np.uint64))[:, 0]]
    return owner, found
