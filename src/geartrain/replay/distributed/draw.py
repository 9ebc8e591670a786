"""Draws of a global batch: all-gather of the shards' status, priority updates, draws from all shards (steps 1 to 3).

Every rank contributes its shard's row count and totals, and computes locally which shard owns each draw (sharded.py);
the shard's ranks look up which row it is. In a store that limits how often rows are sampled the draws are counted
here, before any row is read, and those that came too late are redrawn.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import EmptyStoreError, RanksDisagreeError, SplitGroupError
from geartrain.replay.builder import PriorityUpdate, State
from geartrain.replay.distributed.members import Members
from geartrain.replay.distributed.messages import PRIORITY_UPDATE, flat_bytes, rank_status
from geartrain.replay.distributed.priority_updates import apply_updates, parts_of
from geartrain.replay.distributed.rank_collectives import DIRECT_RANKS, all_to_all_of_known_sizes
from geartrain.replay.distributed.rank_group import Bytes
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

    def __init__(self, error: EmptyStoreError | SplitGroupError) -> None:
        self.error = error


def common_errors(body: Callable[[], T]) -> T:
    """Runs a computation whose errors about the stores are the same on all ranks."""
    try:
        return body()
    except (EmptyStoreError, SplitGroupError) as error:
        raise CommonError(error) from None


class ShardTotals(NamedTuple):
    """What all ranks know of the shards before they draw.

    Attributes:
        counts: selectable rows of each store, over all its shards.
        state: the strategies' state, with the sequence numbers that redraws have used.
        totals: for each store (shards,) uint64, where draws begin with its shards' totals; None elsewhere.
        offers: for each store the first rows of its shards, where draws begin with these; None elsewhere.
    """

    counts: list[int]
    state: State
    totals: list[NDArray[np.uint64] | None]
    offers: list[NDArray[np.uint64] | None]


class Agreed(NamedTuple):
    """What the round that begins a batch tells all ranks.

    Attributes:
        status: (ranks,) `rank_status`.
        changed: whether there were priority updates, which are applied by now.
        offers: for each store the first rows of its shards, (shards, ...), where draws begin with these.
    """

    status: NDArray[Any]
    changed: bool
    offers: list[NDArray[np.uint64] | None]


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
        self._status = rank_status(len(samplers))
        # Stores whose draws begin with their shards' totals.
        self._by_totals = [is_independent(each.strategy) for each in samplers]
        # Stores whose draws begin with their shards' first rows.
        self._by_offers = [begins_with_offers(each.strategy) for each in samplers]
        # Rows on their last allowed sample, held until all ranks have read them.
        self._held: list[list[tuple[NDArray[np.uint32], NDArray[np.uint32]]]] = [[] for _ in samplers]

    # --- steps 1 and 2 ------------------------------------------------------------------------------------------

    def gather_totals(
        self, step: int, state: State, updates: list[PriorityUpdate], quotas: Sequence[int]
    ) -> ShardTotals:
        """Steps 1 and 2: no rank draws before all ranks are at this step and all priority updates are applied.

        Args:
            step, state, updates: of the batch, and before it.
            quotas: rows that will be drawn from each store.

        Raises:
            RanksDisagreeError: a rank has another configuration or is at another step.
            CommonError: a store has fewer than `min_rows` selectable rows.
        """
        agreed = self._agree(step, updates, quotas, state)
        status, changed = agreed.status, agreed.changed
        before = state
        counts: list[int] = []
        totals: list[NDArray[np.uint64] | None] = []
        offers: list[NDArray[np.uint64] | None] = []
        state = [dict(each) for each in state]
        for number, (sampler, store) in enumerate(zip(self.samplers, self.members.stores, strict=True)):
            shards = status["stores"][:, number]
            if self.members.leads(number):
                sampler.plan.store.native.advance_sequence(int(shards["next_sequence"].max()))
            leaders = shards[store.leaders]
            counts.append(int(leaders["rows"].sum()))
            known = self._by_totals[number] and not changed
            totals.append(leaders["total"].copy() if known else None)
            offers.append(self._offers_of(number, agreed, before[number]))
            if sampler.traits.cursor:
                for rank, used in enumerate(shards["cursor"].tolist()):
                    if used:
                        name = f"after/{store.of_rank[rank]}"
                        state[number][name] = max(state[number].get(name, 0), used)
        for sampler, count in zip(self.samplers, counts, strict=True):
            common_errors(functools.partial(sampler.check_count, count))
        return ShardTotals(counts, state, totals, offers)

    def _offers_of(self, number: int, agreed: Agreed, before: dict[str, int]) -> NDArray[np.uint64] | None:
        """The first rows of all shards of a store, as their leaders have told them with their status.

        None where that was too early: priorities that rows are ordered by were updated, or a rank that shares a shard
        has used rows that its leader did not know of.
        """
        told, sampler, store = agreed.offers[number], self.samplers[number], self.members.stores[number]
        if told is None or (agreed.changed and sampler.traits.order == ORDERS["highest_priority"]):
            return None
        if sampler.traits.cursor:
            used = agreed.status["stores"]["cursor"][:, number]
            for shard, ranks in enumerate(store.ranks):
                known = max(offered_after(before, shard, len(store.ranks)), int(used[ranks[0]]))
                if used[ranks].max() > known:
                    return None
        return told

    def settle(self, step: int, updates: list[PriorityUpdate]) -> None:
        """Steps 1 and 2 without a draw: applies the priority updates of all ranks."""
        self._agree(step, updates, [0 for _ in self.samplers], [{} for _ in self.samplers])

    def _agree(
        self, step: int, updates: list[PriorityUpdate], quotas: Sequence[int], state: Sequence[dict[str, int]]
    ) -> Agreed:
        """Every rank's status, with the offers of the shards that it leads, and applies the updates of all ranks."""
        members = self.members
        mine, parts = self._status_of(step, updates, quotas), parts_of(members, updates)
        offers: list[NDArray[np.uint64] | None] = [None for _ in self.samplers]
        # Offers and updates travel with the status. Beyond ranks that send directly offers have a round of their own.
        heads = [flat_bytes(mine)]
        direct = members.group.size <= DIRECT_RANKS
        shapes = [
            offer_shape(sampler.traits, quota) if direct and of and quota else None
            for sampler, of, quota in zip(self.samplers, self._by_offers, quotas, strict=True)
        ]
        for number, shape in enumerate(shapes):
            if shape is not None and members.leads(number):
                heads.append(flat_bytes(self._offer(number, quotas[number], state[number])))
        received = self.send_parts([np.concatenate([*heads, flat_bytes(part)]) for part in parts])
        status = np.concatenate([each[: mine.nbytes] for each in received]).view(self._status)
        self.check_ranks(status[["fingerprint", "step"]].tolist(), step)
        at = [mine.nbytes for _ in received]
        for number, shape in enumerate(shapes):
            if shape is not None:
                told = []
                for leader in members.stores[number].leaders:
                    size = 8 * shape[0] * shape[1]
                    told.append(received[leader][at[leader] : at[leader] + size])
                    at[leader] += size
                offers[number] = np.stack(told).view(np.uint64).reshape(-1, *shape)
        parts = [each[first:].view(PRIORITY_UPDATE) for each, first in zip(received, at, strict=True)]
        changed = bool(status["updates"].any())
        if changed:
            for number, sampler in enumerate(self.samplers):
                sampler.follow_alpha(step, apply=members.leads(number))
            apply_updates(self.samplers, parts)
            for sampler, candidates, mirror in zip(self.samplers, self._candidates, self.mirrors, strict=True):
                if mirror is not None and candidates is not sampler.candidates:
                    mirror.follow()
            updates.clear()  # they are not sent again when this batch fails
        return Agreed(status, changed, offers)

    def _offer(self, number: int, quota: int, state: dict[str, int]) -> NDArray[np.uint64]:
        """The first rows of this rank's shard of a store."""
        sampler, store = self.samplers[number], self.members.stores[number]
        after = 0
        if sampler.traits.cursor:
            mine = store.of_rank[self.members.group.rank]
            after = max(offered_after(state, mine, len(store.ranks)), self.cursors[number])
        traits = with_min_length(sampler.traits, sampler.min_length)
        return offer_of(traits, sampler.candidates, quota, after)

    def _status_of(self, step: int, updates: Sequence[PriorityUpdate], quotas: Sequence[int]) -> NDArray[Any]:
        """This rank's status, (1,). Chooses what the batch is drawn from."""
        mine = np.zeros(1, self._status)
        mine["fingerprint"], mine["step"] = self.fingerprint, step
        # An update of no rows counts, too: as without a group, alpha follows its schedule with it.
        mine["updates"] = sum(max(1, len(update.keys)) for update in updates)
        for number, sampler in enumerate(self.samplers):
            native = sampler.plan.store.native
            if self.members.leads(number):
                sampler.expire()
            self._release(number)  # all ranks have read the rows of the batch before, or never will
            self._candidates[number] = self._begin(number, quotas[number])
            total = total_of(sampler.strategy, self._candidates[number]) or 0
            rows, sequence = native.committed_count(), native.next_sequence()
            mine["stores"][0, number] = (rows, sequence, self.cursors[number], total)
        return mine

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
        members, size = self.members, self._status.itemsize
        if members.group.size <= DIRECT_RANKS:
            return members.group.all_to_all(parts)
        status = members.all_gather(parts[0][:size])
        rest = [part[size:] for part in parts]
        if not status.reshape(-1).view(self._status)["updates"].any():
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

    # --- step 3 -------------------------------------------------------------------------------------------------

    def draw(self, number: int, quota: int, step: int, known: ShardTotals) -> ShardedDraw | None:
        """Step 3 for one store: `quota` rows from all its shards; None for no rows.

        Raises:
            CommonError: too few rows can be drawn.
        """
        if quota == 0:
            return None
        sampler, store = self.samplers[number], self.members.stores[number]
        shard = Shard(
            self._candidates[number],
            store.of_rank[self.members.group.rank],
            len(store.ranks),
            functools.partial(self.members.all_gather_shards, number),
            self.members.leads(number),
            functools.partial(self.members.broadcast_in_shard, number),
            sampler.limited,
            known.totals[number],
            known.offers[number],
            sampler.step_plan,
            sampler.min_length,
        )
        state = known.state[number] or None
        passes = sampler.passes
        if passes is not None:
            return common_errors(lambda: passes.draw(shard, quota, known.state[number]))
        drawn = common_errors(lambda: select_shards(sampler.strategy, shard, quota, step, state))
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
                refused[found] = ~sampler.count_samples(*keys)
                self._held[number].append(keys)
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


__all__ = ["CommonError", "ShardTotals", "ShardedSampler", "common_errors"]
