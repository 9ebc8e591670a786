"""Selection over shards: every rank finds out the whole batch from a few numbers of each shard.

The rows of all shards, one shard after the other, are one population. What is drawn from it is what would be drawn if
they lay in one store (native/selection/selection.h), so the same rows in the same order give the same batch, however
they are cut into shards. Each shard contributes, per batch:

| strategy | what its ranks learn from a shard | bytes |
|---|---|---|
| `Uniform`, `Prioritized`, stratified or not | the sum of its priorities, or the number of its rows | 8 |
| the same without replacement | that, and a bit per draw: is the row new? | 16 + n/8, rarely more |
| `GroupSampling` | its groups: key, number of rows, priority | 16 a group of the largest shard |
| `TopK`, `Fifo`, `Lifo` | its first n rows: order and key | 16 or 24 a row |

With totals in hand a draw is a number below their sum; whose shard it falls into is a search among W numbers, which
every rank does for itself, and which row it is only that shard's ranks need to find out. (GEAR, section 3.3, gathers
all N priorities on one GPU and broadcasts the result.)

Where several ranks share a shard, one of them is its leader, and where all of them must see the same
rows while writers change them (no row twice, limits, limited samples) it finds the rows and sends them to the others,
12 bytes a draw within the host.

A strategy of your own takes part by its declared form (`geartrain.selection.Traits`), or by a method
`select_shards(shard, n, step, *, state) -> ShardedDraw`.

Under `Limits`, draws are made from a copy of the allowed rows at once, a pass over the shard a batch, where a single
store first tries without: the rows are as likely, but not the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.errors import ArgumentError, EmptyStoreError, NotEnoughRowsError, SplitGroupError
from geartrain.selection.declared import DeclaredStrategy, WholeGroups, check_groups, check_n, first_rows
from geartrain.selection.strategy import ORDERS, Candidates, Limits, Strategy, Traits, seed_of, traits_of

# Where a row is unknown: another shard's, or one that changed under the draw and is to be drawn again.
NO_ROW = np.uint32(0xFFFFFFFF)
_NONE = np.empty(0, np.uint32)
# A group of one shard: its key, how many rows the shard has of it, and its priority if these are enough.
_GROUP = np.dtype([("key", "<u8"), ("count", "<u4"), ("priority", "<u4")])
# Rows, generations and priorities.
_Found = tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]


@dataclass(frozen=True)
class Shard:
    """This rank's shard, and what is known of the others.

    Attributes:
        candidates: the shard's rows.
        number, count: which of how many shards it is.
        gather: takes this shard's array and returns every shard's, (count, ...), in their order. Only the rank that
            leads the shard is heard.
        leads: whether this rank does.
        tell: takes the leader's array and returns it on all ranks of the shard.
        exact: whether ranks may only read rows that the leader has found: the store limits how often rows are
            sampled, so that they vanish as they are drawn.
        totals: what `totals_of` says on the leader of every shard, (count, 2), where that is known already.
    """

    candidates: Candidates
    number: int
    count: int
    gather: Callable[[NDArray[Any]], NDArray[Any]]
    leads: bool = True
    tell: Callable[[NDArray[Any]], NDArray[Any]] = lambda array: array
    exact: bool = False
    totals: NDArray[np.uint64] | None = None


@dataclass(frozen=True)
class ShardedDraw:
    """A batch as one rank knows it: arrays (n,), in the order of draws.

    Attributes:
        shard: int64, whose row each is; the same on all ranks.
        rows, generations: uint32; of this rank's shard only, NO_ROW elsewhere.
        probability: float64, of the row in one draw with replacement; of this rank's shard only, 0 elsewhere.
        state: what the strategy has to know at its next step; the same on all ranks.
        share: of the total that is this rank's shard's; what a probability within the shard is multiplied with.
    """

    shard: NDArray[np.int64]
    rows: NDArray[np.uint32]
    generations: NDArray[np.uint32]
    probability: NDArray[np.float64]
    state: dict[str, int] = field(default_factory=dict)
    share: float = 1.0


class ShardedStrategy(Protocol):
    """A strategy of a user's that can draw from several shards."""

    def select_shards(self, shard: Shard, n: int, step: int, *, state: Mapping[str, int] | None) -> ShardedDraw:
        """Chooses the `n` rows of a step from all shards."""
        ...


def check_strategy(strategy: Strategy) -> None:
    """Raises `ArgumentError` unless the strategy can draw from several shards."""
    if traits_of(strategy).form == "custom" and not hasattr(strategy, "select_shards"):
        raise ArgumentError(
            f"{type(strategy).__name__} does not say how to choose over several ranks; declare a form in its traits "
            f"(geartrain.selection.Traits), or give it a method select_shards(shard, n, step, *, state) -> "
            f"geartrain.selection.sharded.ShardedDraw"
        )


def select_shards(strategy: Strategy, shard: Shard, n: int, step: int, state: Mapping[str, int] | None) -> ShardedDraw:
    """The batch of a step from all shards together.

    Raises:
        EmptyStoreError, NotEnoughRowsError: on all ranks alike.
    """
    if hasattr(strategy, "select_shards"):
        draw: ShardedDraw = strategy.select_shards(shard, n, step, state=state)
        return draw
    check_strategy(strategy)
    check_n(n)
    traits = traits_of(strategy)
    if traits.order is not None:
        return _first(traits, shard, n, (state or {}) if traits.cursor else None)
    if traits.form == "groups":
        return _groups(strategy, traits.atom, shard, n, step)
    rows = _RowSums(shard, traits.by_priority, traits.limits)
    if traits.replacement:
        return _independent(rows, shard, np.arange(n, dtype=np.uint32), 0, n, step, strategy)
    return _distinct(rows, shard, n, seed_of(strategy), step)


def totals_of(strategy: Strategy, candidates: Candidates) -> NDArray[np.uint64] | None:
    """The numbers that a shard contributes to draws that need no more than its total; None for other strategies."""
    traits = traits_of(strategy)
    if not is_independent(strategy) or traits.limits is not None:
        return None
    native = candidates.native
    total = native.total_priority() if traits.by_priority else native.count()
    return np.array([total, total], np.uint64)


def is_independent(strategy: Strategy) -> bool:
    """Whether the strategy's draws do not depend on each other, so that some can be made again on their own."""
    return traits_of(strategy).independent and not hasattr(strategy, "select_shards")


def redraw_shards(
    strategy: Strategy, shard: Shard, draw: ShardedDraw, refused: NDArray[np.intp], round: int, step: int
) -> ShardedDraw:
    """The same batch with some draws made again, from all shards, as one store would make them.

    The strategy's draws are independent.

    Raises:
        EmptyStoreError: on all ranks alike.
    """
    traits = traits_of(strategy)
    rows = _RowSums(shard, traits.by_priority, traits.limits)
    numbers = refused.astype(np.uint32)
    other = _independent(rows, shard, numbers, round, len(draw.shard), step, strategy)
    merged = replace(
        draw,
        shard=draw.shard.copy(),
        rows=draw.rows.copy(),
        generations=draw.generations.copy(),
        probability=draw.probability.copy(),
    )
    for name in ("shard", "rows", "generations", "probability"):
        getattr(merged, name)[refused] = getattr(other, name)
    return merged


# --- draws that are numbers below a total ----------------------------------------------------------------------


class _RowSums:
    """A shard's rows, to be found by numbers below their total."""

    def __init__(self, shard: Shard, by_priority: bool, limits: Limits | None) -> None:
        self._candidates = shard.candidates.native
        self._by_priority = by_priority
        # Only who leads copies the allowed rows: others would see other rows by now, or another clock.
        self._limits = None if limits is None or not shard.leads else limits.now()
        self._allowed = None if self._limits is None else self.without(_NONE)
        self.alone = limits is not None or shard.exact  # the leader finds rows for all of the shard's ranks
        self.nothing = (
            "no selectable row meets the limits on version, age and length"
            if limits is not None
            else "no selectable row has a priority above zero"
            if by_priority
            else "no store of the group has a selectable row"
        )

    def total(self) -> int:
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


def _independent(
    rows: _RowSums,
    shard: Shard,
    numbers: NDArray[np.uint32],
    round: int,
    n: int,
    step: int,
    strategy: Strategy,
) -> ShardedDraw:
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


def _find(rows: _RowSums, shard: Shard, owner: NDArray[np.int64], local: NDArray[np.uint64]) -> _Found:
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


def _distinct(rows: _RowSums, shard: Shard, n: int, seed: int, step: int) -> ShardedDraw:
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
    found = (_NONE, _NONE, _NONE)  # ours, of the draws so far
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
    rows: _RowSums, shard: Shard, n: int, gone: NDArray[np.uint32], done: int, number: int, seed: int, step: int
) -> tuple[NDArray[np.int64], _Found]:
    """The remaining rows one by one, where priorities are so uneven, or rows so few, that rejection takes too long."""
    left = rows.without(gone if shard.leads else _NONE)
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
        together = _native.AllowedRows(_native.Candidates(every), True, None, _NONE)
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


def _groups(strategy: Strategy, size: int, shard: Shard, n: int, step: int) -> ShardedDraw:
    """Groups are drawn as one store draws them, by every rank, from the list of all shards' groups in their order."""
    if not isinstance(strategy, DeclaredStrategy):
        raise ArgumentError(f"{type(strategy).__name__} has the form 'groups' and is no DeclaredStrategy")
    check_groups(n, size)
    wanted = n // size
    groups = strategy.whole_groups(shard.candidates) if shard.leads else None
    every, owner = _every_group(strategy, size, shard, groups)
    first = np.flatnonzero(np.append(True, every["key"][1:] != every["key"][:-1])[: len(every)])
    parts = np.diff(np.append(first, len(every)))
    rows = np.add.reduceat(every["count"].astype(np.int64), first) if len(first) else parts
    if (split := np.flatnonzero((parts > 1) & (rows >= size))).size:
        at, count = int(first[split[0]]), int(parts[split[0]])
        shards = ", ".join(
            f"{has} in shard {of}" for has, of in zip(every["count"][at:], owner[at : at + count], strict=False)
        )
        raise SplitGroupError(
            f"{strategy.describe_group(shard.candidates, int(every['key'][at]))} has rows in {count} shards "
            f"({shards}), and groups of {size} are drawn as a whole; keep the rows of a group in one shard"
        )
    whole = np.flatnonzero(every["count"] >= size)
    if len(whole) < wanted:
        raise NotEnoughRowsError(
            f"{wanted} groups of {size} were asked for, {len(whole)} are whole, each on one shard, of {len(every)}"
        )
    priorities, owner = np.ascontiguousarray(every["priority"][whole]), owner[whole]
    chosen, _, probability, _ = _native.Candidates(priorities).draw_distinct(
        True, seed_of(strategy), step, 0, wanted, _NONE, None
    )
    members = np.full((wanted, size), NO_ROW)
    generations = np.zeros((wanted, size), np.uint32)
    mine = owner == shard.number
    here = np.flatnonzero(mine[chosen])
    if groups is not None:
        number = np.cumsum(mine)[chosen[here]] - 1  # among the whole groups of this shard, which are in the same order
        members[here], generations[here] = groups.rows[number], groups.generations[number]
    members, generations = shard.tell(np.stack([members, generations]))
    return ShardedDraw(
        np.repeat(owner[chosen], size).astype(np.int64),
        members.reshape(-1),
        generations.reshape(-1),
        np.repeat(np.where(mine[chosen], probability, 0.0), size),
        share=float(priorities[mine].sum(dtype=np.float64) / max(priorities.sum(dtype=np.float64), 1.0)),
    )


def _every_group(
    strategy: Strategy, size: int, shard: Shard, groups: WholeGroups | None
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The groups that all shards have rows of, by key, and the shard of each: twice in the list if in two shards."""
    mine = np.zeros(0, _GROUP)
    if groups is not None:
        if groups.seen_keys is None or groups.seen_counts is None:
            raise ArgumentError(
                f"{type(strategy).__name__}.whole_groups gives no keys of its groups, by which those of several shards "
                f"are drawn from"
            )
        mine = np.zeros(len(groups.seen_keys), _GROUP)
        mine["key"], mine["count"] = groups.seen_keys, groups.seen_counts
        mine["priority"][groups.seen_counts >= size] = groups.priorities
    counts = shard.gather(np.array([len(mine)], np.uint64))[:, 0].astype(np.int64)
    padded = np.zeros(int(counts.max()), _GROUP)
    if groups is not None:
        padded[: len(mine)] = mine
    gathered = shard.gather(padded.view(np.uint64)).view(_GROUP).reshape(len(counts), -1)
    every = np.concatenate([part[:count] for part, count in zip(gathered, counts, strict=True)])
    order = np.argsort(every["key"], kind="stable")
    return every[order], np.repeat(np.arange(len(counts)), counts)[order]


# --- in order --------------------------------------------------------------------------------------------------


def _first(traits: Traits, shard: Shard, n: int, cursors: Mapping[str, int] | None) -> ShardedDraw:
    """The first rows of all shards, from the first n of each."""
    order, after = traits.order, 0
    assert order is not None
    if cursors:  # one store's own cursor is that of the only shard
        after = cursors.get(f"after/{shard.number}", cursors.get("after", 0) if shard.count == 1 else 0)
    offer = np.zeros((n, 3 if order == ORDERS["highest_priority"] else 2), np.uint64)
    if shard.leads:
        rows, generations, sequences, priorities = first_rows(shard.candidates, order, n, after, traits.limits, _NONE)
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


__all__ = [
    "NO_ROW",
    "ShardedDraw",
    "Shard",
    "ShardedStrategy",
    "check_strategy",
    "redraw_shards",
    "is_independent",
    "select_shards",
    "totals_of",
]
