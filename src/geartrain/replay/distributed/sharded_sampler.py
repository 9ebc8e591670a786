"""`ShardedSampler`: draws a global batch from the shards of all ranks.

1. Every rank sends the row counts and totals of its shards, and the priority updates for other ranks.
2. It applies the updates for its own shards (native/fetch/rank_steps.h).
3. It computes locally which shard owns each draw (selection/sharded.py).
4. The ranks of that shard look up the row of each draw.

A store may limit how often its rows are sampled. Then the draws are counted here, before any row is read. Draws of rows
that have reached the limit are redrawn.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.errors import EmptyStoreError, GeartrainError, NotEnoughRowsError, RanksDisagreeError, SplitGroupError
from geartrain.ranks.rank_collectives import DIRECT_RANKS, RADIX, all_to_all_of_known_sizes
from geartrain.ranks.rank_group import Bytes
from geartrain.replay.builder import PriorityUpdate, State, raised
from geartrain.replay.distributed.members import Members
from geartrain.replay.distributed.messages import SHARD_STATUS, flat_bytes, rank_status
from geartrain.replay.sampler import MAX_ATTEMPTS, StoreSampler
from geartrain.selection.sharded import (
    NO_ROW,
    Shard,
    ShardedDraw,
    begins_with_offers,
    is_independent,
    redraw_shards,
    select_shards,
    total_of,
)
from geartrain.selection.sharded_order import offer_of, offer_shape, offered_after
from geartrain.selection.strategy import ORDERS, Candidates, with_min_length

if TYPE_CHECKING:
    from geartrain.replay.device.priority_mirror import DevicePriorities

T = TypeVar("T")


class CommonError(Exception):
    """An error that every rank derives from the same data, so that no rank has to be told and none is lost."""

    def __init__(self, error: GeartrainError) -> None:
        self.error = error


class TooFewRowsError(CommonError):
    """Store number `store` has fewer rows than `min_rows`, or steps than `min_steps`.

    All ranks know, and can wait for more.
    """

    def __init__(self, error: NotEnoughRowsError, store: int) -> None:
        super().__init__(error)
        self.store = store


class TooFewGroupsError(TooFewRowsError):
    """Too few groups of store number `store` can be drawn. All ranks know, and can wait for more."""


class DrawAgainError(CommonError):
    """All ranks draw the batch again at once, from what there is now."""


def common_errors(body: Callable[[], T]) -> T:
    """Runs a computation whose errors about the stores are the same on all ranks."""
    try:
        return body()
    except (EmptyStoreError, SplitGroupError) as error:
        raise CommonError(error) from None


class ShardTotals(NamedTuple):
    """Data about the shards that all ranks have before they draw.

    Attributes:
        counts: selectable rows of each store, over all its shards.
        state: the strategies' state, with the sequence numbers that redraws have used.
        totals: for each store (shards,) uint64, if its draws begin with its shards' totals; else None.
        offers: for each store the first rows of its shards, if its draws begin with these; else None.
    """

    counts: list[int]
    state: State
    totals: list[NDArray[np.uint64] | None]
    offers: list[NDArray[np.uint64] | None]


class DrawnBatch(NamedTuple):
    """A global batch as one rank knows it.

    Attributes:
        counts: selectable rows of each store, over all its shards.
        state: the strategies' state after it.
        found: the draws of each store; None where it gives none.
    """

    counts: list[int]
    state: State
    found: list[ShardedDraw | None]

    @property
    def sizes(self) -> list[int]:
        """Rows of each store: fewer than were asked for where a pass ends."""
        return [0 if each is None else len(each.shard) for each in self.found]


class ShardedSampler:
    """Draws from the shards of all stores, together with all other ranks.

    Args:
        samplers: of this rank's shards, one for each store.
        members: the ranks.
        fingerprint: of the configuration (fingerprint.py).

    Attributes:
        fingerprint: see above.
        mirrors: for each store, a copy of this rank's shard that its draws may be made from; None where there is none.
        cursors: for each store, the last sequence number that a redraw on this rank has used, for FIFO; 0 for none.
    """

    def __init__(self, samplers: Sequence[StoreSampler], members: Members, fingerprint: int) -> None:
        self.samplers = samplers
        self.members = members
        self.cursors = [0 for _ in samplers]
        self.fingerprint = fingerprint
        self.mirrors: Sequence[DevicePriorities | None] = [None for _ in samplers]
        # What this batch is drawn from: the shards themselves, or their copies.
        self._candidates = [sampler.candidates for sampler in samplers]
        self._status_bytes = rank_status(len(samplers)).itemsize
        # Stores whose draws begin with their shards' totals.
        self._by_totals = [is_independent(each.strategy) for each in samplers]
        # Stores whose draws begin with their shards' first rows.
        self._by_offers = [begins_with_offers(each.strategy) for each in samplers]
        # Rows on their last allowed sample, held until all ranks have read them.
        self._held: list[list[tuple[NDArray[np.uint32], NDArray[np.uint32]]]] = [[] for _ in samplers]
        self._raises = any(sampler.raises for sampler in samplers)
        group = members.group
        self._native_rounds = getattr(group, "native_rounds", None) is not None
        self.steps = _native.RankSteps(
            group.rank,
            group.size,
            fingerprint,
            [
                (
                    sampler.plan.store.native,
                    sampler.traits.by_priority,
                    by_totals,
                    store.leaders,
                    sampler.min_rows,
                    sampler.min_steps,
                )
                for sampler, by_totals, store in zip(samplers, self._by_totals, members.stores, strict=True)
            ],
            any(sampler.traits.importance for sampler in samplers),
        )

    def exchange_of(self, *, idle: bool) -> _native.RankExchange:
        """The native exchange of messages with other ranks. It refers to this object, which must not keep it.

        Args:
            idle: no row ever moves between ranks.
        """
        group: Any = self.members.group
        native = getattr(group, "native_rounds", None)  # of a group of the user's own there are none
        leaders = [store.leaders for store in self.members.stores]
        direct = group.size <= RADIX
        return _native.RankExchange(
            native,
            0.0 if native is None else group.timeout_s,
            direct and all(len(each) == group.size for each in leaders),
            direct and idle,
            leaders,
            self.send_parts,
            lambda mine: np.concatenate(
                [self.members.all_gather_shards(number, mine[number : number + 1])[:, 0] for number in range(len(mine))]
            ),
        )

    def over_ranks(self, call: Callable[..., T], *arguments: Any) -> T:
        """Calls native code that exchanges messages; its errors become those of the group."""
        group: Any = self.members.group
        if not self._native_rounds:
            return call(*arguments)
        group.check_usable()
        try:
            return call(*arguments)
        except GeartrainError as error:
            group.round_failed(error)
            raise  # for type checkers: round_failed never returns

    # --- status and priority updates ------------------------------------------------------------------------------

    def given(self, updates: Sequence[PriorityUpdate]) -> list[_native.GivenPriorities]:
        """Priority updates as native code takes them."""
        return [
            (keys.row, keys.generation, keys.draw, self.members.shard_of(keys), keys.step, update.priorities)
            for update in updates
            for keys in [update.keys]
        ]

    def change_at(self, step: int) -> Callable[[int, NDArray[np.float64]], NDArray[np.float64]] | None:
        """The function that turns priorities updated before a step into stored ones; None for their absolute value."""
        return functools.partial(self._change, step) if self._raises else None

    def _change(self, step: int, number: int, priorities: NDArray[np.float64]) -> NDArray[np.float64]:
        sampler = self.samplers[number]
        sampler.follow_alpha(step, apply=self.members.leads(number))
        return raised(priorities, sampler.alpha)

    def _set(
        self,
        number: int,
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        priorities: NDArray[np.float64],
    ) -> bool:
        """Stores priorities of a shard that a device has a copy of, which has to learn of them."""
        sampler = self.samplers[number]
        if sampler.priority_copy is None:
            return False
        native = sampler.plan.store.native
        sampler.change_priorities(rows, lambda: native.apply_updates(rows, generations, None, None, priorities))
        return True

    def _totals(self, agreed: _native.RankRead, before: State, quotas: Sequence[int]) -> ShardTotals:
        """What all ranks know once they have agreed. Raises `TooFewRowsError`."""
        status, changed = self._status_in(agreed), agreed.changed
        counts: list[int] = []
        totals: list[NDArray[np.uint64] | None] = []
        offers: list[NDArray[np.uint64] | None] = []
        state = [dict(each) for each in before]
        for number, (sampler, store) in enumerate(zip(self.samplers, self.members.stores, strict=True)):
            shards = status[:, number]
            leaders = shards[store.leaders]
            counts.append(int(leaders["rows"].sum()))
            known = self._by_totals[number] and not changed
            totals.append(leaders["total"].copy() if known else None)
            offers.append(self._offers_of(number, agreed, quotas[number], before[number]))
            if sampler.moves_on:
                for rank, used in enumerate(shards["cursor"].tolist()):
                    if used:
                        name = f"after/{store.of_rank[rank]}"
                        state[number][name] = max(state[number].get(name, 0), used)
        for number, count in enumerate(counts):
            self.check_count(number, count, agreed.steps[number])
        return ShardTotals(counts, state, totals, offers)

    def check_count(self, number: int, count: int, steps: int) -> None:
        """Raises `TooFewRowsError` if a store has too few rows, or steps, on all ranks together."""
        sampler = self.samplers[number]
        if count < sampler.min_rows or steps < sampler.min_steps:
            name = sampler.plan.store.name
            raise TooFewRowsError(
                NotEnoughRowsError(
                    f"{sampler.wanted} are asked for, the ranks have {count}"
                    f"{f' and {steps}' if sampler.min_steps else ''} together (the store of this one is {name!r})"
                ),
                number,
            )

    def _status_in(self, agreed: _native.RankRead) -> NDArray[Any]:
        """The status of every rank's shards, (ranks, stores) `SHARD_STATUS`."""
        return agreed.shards.view(SHARD_STATUS).reshape(self.members.group.size, len(self.samplers))

    def _offers_of(
        self, number: int, agreed: _native.RankRead, quota: int, before: dict[str, int]
    ) -> NDArray[np.uint64] | None:
        """The first rows of all shards of a store, as their leaders have told them with their status.

        None where that was too early: priorities that rows are ordered by were updated, or a rank that shares a shard
        has used rows that its leader did not know of.
        """
        told, sampler, store = agreed.offers[number], self.samplers[number], self.members.stores[number]
        if not len(told) or (agreed.changed and sampler.traits.order == ORDERS["highest_priority"]):
            return None
        if sampler.moves_on:
            used = self._status_in(agreed)["cursor"][:, number]
            for shard, ranks in enumerate(store.ranks):
                known = max(offered_after(before, shard, len(store.ranks)), int(used[ranks[0]]))
                if used[ranks].max() > known:
                    return None
        return told.view(np.uint64).reshape(-1, *offer_shape(sampler.traits, quota))

    def settle(self, step: int, updates: list[PriorityUpdate], exchange: _native.RankExchange) -> None:
        """Applies the priority updates of all ranks, without a draw."""
        self._agree(step, updates, [0 for _ in self.samplers], [{} for _ in self.samplers], exchange)

    def _agree(
        self,
        step: int,
        updates: list[PriorityUpdate],
        quotas: Sequence[int],
        state: Sequence[dict[str, int]],
        exchange: _native.RankExchange,
    ) -> _native.RankRead:
        """Every rank's status, with the offers of the shards that it leads; the updates of all ranks are applied."""
        told = [self._told(number, quotas[number], state[number]) for number in range(len(self.samplers))]
        copies = any(sampler.priority_copy is not None for sampler in self.samplers)
        given, change, set_copy = self.given(updates), self.change_at(step), self._set if copies else None
        agreed = self.over_ranks(self.steps.agree, exchange, step, given, told, change, set_copy)
        if agreed.refusal == "disagree":
            self.check_ranks(agreed.status, step)
        if agreed.changed:
            for sampler, candidates, mirror in zip(self.samplers, self._candidates, self.mirrors, strict=True):
                if mirror is not None and candidates is not sampler.candidates:
                    mirror.follow()
            updates.clear()  # they are not sent again when this batch fails
        return agreed

    def _told(
        self, number: int, quota: int, state: dict[str, int]
    ) -> tuple[int, int | None, NDArray[np.uint8] | None, int]:
        """What this rank tells of its shard of a store, and chooses what the batch is drawn from.

        The cursor of its redraws, the total of a copy that draws are made from, and the first rows in the strategy's
        order: beyond ranks that send directly these have a round of their own.
        """
        sampler, leads = self.samplers[number], self.members.leads(number)
        if leads:
            sampler.expire()
        self._release(number)  # all ranks have read the rows of the batch before, or never will
        candidates = self._candidates[number] = self._begin(number, quota)
        total = None if candidates is sampler.candidates else total_of(sampler.strategy, candidates) or 0
        if not (self._by_offers[number] and quota and self.members.group.size <= DIRECT_RANKS):
            return self.cursors[number], total, None, 0
        shape = offer_shape(sampler.traits, quota)
        offer = flat_bytes(self._offer(number, quota, state)) if leads else None
        return self.cursors[number], total, offer, 8 * shape[0] * shape[1]

    def _offer(self, number: int, quota: int, state: dict[str, int]) -> NDArray[np.uint64]:
        """The first rows of this rank's shard of a store."""
        sampler, store = self.samplers[number], self.members.stores[number]
        after = 0
        if sampler.moves_on:
            mine = store.of_rank[self.members.group.rank]
            after = max(offered_after(state, mine, len(store.ranks)), self.cursors[number])
        traits = with_min_length(sampler.traits, sampler.min_length)
        return offer_of(traits, sampler.candidates, quota, after)

    def _begin(self, number: int, quota: int) -> Candidates:
        """This rank's shard of a store, or the copy of it that costs less for its part of so many draws."""
        candidates, mirror = self.samplers[number].candidates, self.mirrors[number]
        if mirror is None or quota == 0:
            return candidates
        mine = -(-quota // len(self.members.stores[number].ranks))
        return candidates.with_native(mirror) if mirror.begin(mine) else candidates

    def send_parts(self, parts: Sequence[Bytes]) -> list[Bytes]:
        """Sends each rank its part, a status and what follows it: as `RankGroup.all_to_all`. Collective.

        Beyond `DIRECT_RANKS` ranks statuses are relayed, and only updates follow: these take rounds of their own.
        """
        members, size = self.members, self._status_bytes
        if members.group.size <= DIRECT_RANKS:
            return members.group.all_to_all(parts)
        status = members.all_gather(parts[0][:size])
        rest = [part[size:] for part in parts]
        if not np.ascontiguousarray(status).reshape(-1).view(rank_status(len(self.samplers)))["updates"].any():
            return list(status)
        rest = all_to_all_of_known_sizes(members.group, rest)
        return [np.concatenate(each) for each in zip(status, rest, strict=True)]

    def check_ranks(self, told: Sequence[tuple[int, int]], step: int) -> None:
        """Raises `RanksDisagreeError` where a rank has another configuration or is at another step.

        Args:
            told: the fingerprint and the step of every rank.
            step: of this one.
        """
        rank = self.members.group.rank
        for other, (fingerprint, other_step) in enumerate(told):
            if fingerprint != self.fingerprint:
                raise RanksDisagreeError(
                    f"rank {other} draws with another strategy, seed or batch size than rank {rank} by now"
                )
            if other_step != step:
                raise RanksDisagreeError(
                    f"rank {other} is at step {other_step}, rank {rank} at step {step}; all ranks iterate, and load "
                    f"their state, at the same steps"
                )

    def draw_all(
        self,
        step: int,
        state: State,
        updates: list[PriorityUpdate],
        quotas: Sequence[int],
        exchange: _native.RankExchange,
    ) -> DrawnBatch:
        """Steps 1 to 3. No rank draws before all ranks are at this step and all priority updates are applied.

        Args:
            step, state, updates: of the batch, and before it.
            quotas: rows to draw from each store.
            exchange: of `exchange_of`.

        Raises:
            RanksDisagreeError: a rank has another configuration or is at another step.
            TooFewRowsError: a store has fewer rows than `min_rows`, or steps than `min_steps`.
            CommonError: of `draw`.
        """
        known = self._totals(self._agree(step, updates, quotas, state, exchange), state, quotas)
        found = [self.draw(number, quota, step, known) for number, quota in enumerate(quotas)]
        after = [old if each is None else each.state for old, each in zip(known.state, found, strict=True)]
        return DrawnBatch(known.counts, after, found)

    # --- step 3 -------------------------------------------------------------------------------------------------

    def draw(self, number: int, quota: int, step: int, known: ShardTotals) -> ShardedDraw | None:
        """Step 3 for one store: `quota` rows from all its shards; None for no rows.

        Raises:
            CommonError: too few rows can be drawn.
            TooFewGroupsError: too few groups, and nothing was changed by then.
            DrawAgainError: rows came while the ranks told each other of their shards.
        """
        if quota == 0:
            return None
        sampler, store = self.samplers[number], self.members.stores[number]
        leads, grouped = self.members.leads(number), sampler.traits.form == "groups"
        shard = Shard(
            self._candidates[number],
            store.of_rank[self.members.group.rank],
            len(store.ranks),
            functools.partial(self.members.all_gather_shards, number),
            leads,
            functools.partial(self.members.broadcast_in_shard, number),
            sampler.limited,
            known.totals[number],
            known.offers[number],
            sampler.step_plan,
            sampler.min_length,
            sampler.moves_on,
            sampler.first_open if sampler.strict else None,
        )
        state = known.state[number] or None
        passes = sampler.passes
        if passes is not None:
            return common_errors(lambda: passes.draw(shard, quota, known.state[number]))
        try:
            drawn = common_errors(lambda: select_shards(sampler.strategy, shard, quota, step, state))
        except CommonError as error:
            # To draw the batch again would count the samples of the stores before this one again.
            counted = any(before.limited for before in self.samplers[:number])
            if counted or not isinstance(error.error, NotEnoughRowsError):
                raise
            if grouped:
                raise TooFewGroupsError(error.error, number) from None
            if sampler.strict:  # an older row is waited for
                raise TooFewRowsError(error.error, number) from None
            all_rows = sampler.traits.limits is None and not sampler.min_length and not sampler.moves_on
            if known.offers[number] is not None and all_rows and known.counts[number] >= quota:
                raise DrawAgainError(error.error) from None  # a row came after its shard's first rows were told
            raise
        return self._count_samples(number, shard, drawn, step) if sampler.limited else drawn

    def _count_samples(self, number: int, shard: Shard, drawn: ShardedDraw, step: int) -> ShardedDraw:
        """Counts samples in a store that limits them, before the rows are read; draws that came too late are redrawn.

        The leader counts for its shard, and holds rows on their last sample until all ranks have read them.
        """
        sampler = self.samplers[number]
        shard = dataclasses.replace(shard, totals=None)
        pending = np.arange(len(drawn.shard))
        for attempt in range(1, MAX_ATTEMPTS + 1):
            refused = np.zeros(len(drawn.shard), bool)
            if shard.leads:
                mine = pending[drawn.shard[pending] == shard.number]
                found = mine[drawn.rows[mine] != NO_ROW]
                keys = np.ascontiguousarray(drawn.rows[found]), np.ascontiguousarray(drawn.generations[found])
                refused[mine] = True
                refused[found] = ~self.count_mine(number, *keys, step, found.astype(np.uint32))
            bits = np.bitwise_or.reduce(shard.gather(np.packbits(refused)), axis=0)
            pending = np.flatnonzero(np.unpackbits(bits, count=len(refused)))
            if not len(pending):
                return drawn
            if not is_independent(sampler.strategy):
                drawn.rows[pending] = NO_ROW  # the rank that reads them redraws them from its shard
                return drawn
            sampler.note_lost(len(pending), attempt)
            drawn = common_errors(
                functools.partial(redraw_shards, sampler.strategy, shard, drawn, pending, attempt, step)
            )
        raise AssertionError("unreachable")

    def count_mine(
        self,
        number: int,
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        step: int,
        places: NDArray[np.uint32],
    ) -> NDArray[np.bool_]:
        """Counts samples of rows of the shard that this rank leads, and holds these until all ranks have read them.

        Returns:
            False for each row whose last allowed sample was drawn elsewhere first.
        """
        if self.samplers[number].kept is None:
            self._held[number].append((rows, generations))
        return self.samplers[number].count_samples(rows, generations, step, places)

    # --- leaving ------------------------------------------------------------------------------------------------

    def rewind(self) -> None:
        """Forgets the redraws of later batches, before the state of an earlier one is loaded."""
        self.cursors[:] = [0 for _ in self.samplers]

    def close(self) -> None:
        """Releases the rows that are held."""
        for number, sampler in enumerate(self.samplers):
            if not sampler.plan.store.closed:
                self._release(number)

    def _release(self, number: int) -> None:
        for keys in self._held[number]:
            self.samplers[number].release(*keys)
        self._held[number].clear()


__all__ = [
    "CommonError",
    "DrawAgainError",
    "DrawnBatch",
    "ShardTotals",
    "ShardedSampler",
    "TooFewGroupsError",
    "TooFewRowsError",
    "common_errors",
]
