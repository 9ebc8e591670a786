"""Load balancing over shards: pure functions that give the same results on every rank.

`deal` partitions rows that are in no shard yet. `flows`, `heaviest_within` and `rounds_of` plan moves between shards.
An *amount* is a sum of priorities, or a number of rows. A *share* is a fraction of the amounts of all shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

# Rows of highest priority that are dealt one by one, each to the shard that lacks most; the others in turns.
SINGLY = 4096
# The others are dealt by shares alone when their part of the priorities is smaller than this: a million rows of almost
# no priority need not all go to a shard that lacks a little.
NEGLIGIBLE = 0.01

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


def deal(priorities: Floats, amount: Floats, share: Floats, reads: Floats, free: Counts) -> NDArray[np.int64]:
    """The shard that each row should go to, (n,) int64; see `geartrain.placement.placement.Placement.deal`.

    Args:
        priorities: (n,) of the rows.
        amount: (shards,) what each holds.
        share: (shards,) what each should hold of everything in the end.
        reads: (shards,) part of a batch's bytes read from the shard; orders those whose share is 0.
        free: (shards,) rows each can take; n in all, at least.
    """
    n = len(priorities)
    amount, free = amount.copy(), free.copy()
    hottest_first = _descending(priorities)
    dealt = np.empty(n, np.int64)
    wanted = _missing(amount, share, float(priorities.sum()))
    # Relative to what a shard is to get, so that all fill up evenly and a large row goes where it matters least.
    whole = np.maximum(wanted, 1e-9 * priorities.sum())
    count = 0
    for row in hottest_first[: min(SINGLY, int(np.count_nonzero(priorities)))].tolist():
        shard = int(np.where((free > 0) & (share > 0), (wanted - priorities[row]) / whole, -np.inf).argmax())
        if free[shard] == 0 or share[shard] == 0:
            break
        dealt[row] = shard
        wanted[shard] -= priorities[row]
        amount[shard] += priorities[row]
        free[shard] -= 1
        count += 1
    rest = hottest_first[count:]
    coming = float(priorities[rest].sum())
    tiers = [
        _missing(amount, share, coming) if coming > NEGLIGIBLE * amount.sum() else share,
        share,
        np.where(share > 0, 0.0, reads),
        np.where(reads > 0, 0.0, free),
    ]
    at = 0
    for counts in _turns(len(rest), tiers, free):
        turn = int(counts.sum())
        dealt[rest[at : at + turn]] = _evenly(counts)
        at += turn
    return dealt


def _descending(priorities: Floats) -> NDArray[np.intp]:
    """Stable order by descending priority; at most 2**32 of them.

    Priorities are compared as float32, which is finer than what stores keep, so that one sort of 64-bit words does.
    """
    n = len(priorities)
    if n == 0 or priorities.min() == priorities.max():
        return np.arange(n)
    scaled = (priorities / priorities.max()).astype(np.float32)
    words = (~scaled.view(np.uint32)).astype(np.uint64) << np.uint64(32) | np.arange(n, dtype=np.uint64)
    words.sort()
    order: NDArray[np.intp] = (words & np.uint64(0xFFFFFFFF)).astype(np.intp)
    return order


def _missing(amount: Floats, share: Floats, coming: float) -> Floats:
    """Amount that each shard should get of a dealt amount, to reach its share in the end.

    A shard that has too much already gets nothing. The others get as near to their shares as possible.
    """
    level = 0.0  # each shard is filled up to its share of this
    readers = np.flatnonzero(share)
    order = readers[np.argsort(amount[readers] / share[readers], kind="stable")]
    for count in range(1, len(order) + 1):
        low = order[:count]
        level = (coming + amount[low].sum()) / share[low].sum()
        if count == len(order) or level <= amount[order[count]] / share[order[count]]:
            break
    missing: Floats = np.where(share > 0, np.maximum(level * share - amount, 0.0), 0.0)
    return missing


def _turns(n: int, tiers: Sequence[Floats], free: Counts) -> Iterator[Counts]:
    """How many of n rows each shard gets, in steps: at the rates of a tier, until a shard is full."""
    free = free.copy()
    for rates in tiers:
        while n:
            open_to = np.where(free > 0, rates, 0.0)
            if not open_to.sum() > 0:
                break
            open_to /= open_to.sum()
            active = open_to > 0
            depth = max(1, min(n, int((free[active] / open_to[active]).min())))
            counts = np.minimum(_apportion(open_to, depth), free)
            yield counts
            free -= counts
            n -= int(counts.sum())


def _apportion(rates: Floats, n: int) -> Counts:
    """n as a sum of whole numbers in proportion to rates that add up to 1 (largest remainder)."""
    exact = rates * n
    counts = np.floor(exact).astype(np.int64)
    behind = np.argsort(counts - exact, kind="stable")
    counts[behind[: n - int(counts.sum())]] += 1
    return counts


def _evenly(counts: Counts) -> NDArray[np.int64]:
    """Shard numbers, each `counts` times, the turns of every shard spread evenly."""
    shards = np.flatnonzero(counts)
    if len(shards) == 1:
        return np.full(int(counts.sum()), shards[0])
    # Turn j of c is due at (j + 1/2) / c; a 64-bit word each, whose low bits are the shard.
    due = [
        ((np.arange(counts[shard]) + 0.5) * (2.0**47 / counts[shard])).astype(np.uint64) << np.uint64(16)
        | np.uint64(shard)
        for shard in shards
    ]
    words = np.concatenate(due)
    words.sort(kind="stable")  # merges sorted runs
    turns: NDArray[np.int64] = (words & np.uint64(0xFFFF)).astype(np.int64)
    return turns


# --- moving ------------------------------------------------------------------------------------------------------


def flows(amount: Floats, share: Floats, free: Counts, tolerance: float) -> Floats:
    """The amount that goes from each shard to each, (shards, shards), so that each has its share of the whole.

    From shards whose share is 0 first, and only to shards with free rows. All zeros where every shard is within
    `tolerance` of its share.
    """
    n = len(amount)
    moving = np.zeros((n, n))
    whole = amount.sum()
    if not whole or np.abs(amount / whole - share).max() <= tolerance:
        return moving
    surplus = np.maximum(amount - share * whole, 0.0)
    lack = np.where(free > 0, np.maximum(share * whole - amount, 0.0), 0.0)
    for sender in np.argsort(share > 0, kind="stable").tolist():
        for receiver in range(n):
            flow = min(surplus[sender], lack[receiver])
            if flow > 0:
                moving[sender, receiver] = flow
                surplus[sender] -= flow
                lack[receiver] -= flow
    return moving


def heaviest_within(amounts: Floats, limit: float) -> NDArray[np.intp]:
    """Indices of descending amounts, greedily taken while their sum stays within the limit."""
    taken: list[NDArray[np.intp]] = []
    at = 0
    limit *= 1 + 1e-12  # floating-point sums: a shard that is to be emptied must become empty
    while at < len(amounts):
        at += int(np.searchsorted(-amounts[at:], -limit))  # the first that fits
        sums = amounts[at:].cumsum()
        count = int(np.searchsorted(sums, limit, side="right"))
        if count == 0:
            break
        taken.append(np.arange(at, at + count))
        limit -= float(sums[count - 1])
        at += count
    return np.concatenate(taken) if taken else np.empty(0, np.intp)


def rounds_of(counts: Counts, piece: int) -> Iterator[list[tuple[int, int, int, int]]]:
    """Rounds of simultaneous transfers (sender, receiver, first row, rows); each shard is in one of them at most."""
    done = np.zeros_like(counts)
    while (done < counts).any():
        busy: set[int] = set()
        transfers = []
        for sender, receiver in np.argwhere(done < counts).tolist():
            if sender not in busy and receiver not in busy:
                busy |= {sender, receiver}
                start = int(done[sender, receiver])
                count = min(piece, int(counts[sender, receiver]) - start)
                transfers.append((sender, receiver, start, count))
                done[sender, receiver] += count
        yield transfers


# --- expectation ---------------------------------------------------------------------------------------------------


def expected_up_to(n: int, probability: float, most: int) -> float:
    """The mean of min(X, most) for X ~ Binomial(n, probability)."""
    if probability <= 0 or probability >= 1 or most >= n:
        return min(n * probability, most)
    count = np.arange(n + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    log_ways = log_factorial[n] - log_factorial - log_factorial[::-1]
    mass = np.exp(log_ways + count * np.log(probability) + (n - count) * np.log1p(-probability))
    return float(mass @ np.minimum(count, most))


__all__ = ["deal", "expected_up_to", "flows", "heaviest_within", "rounds_of"]
