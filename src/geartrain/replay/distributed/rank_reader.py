"""`RankReader`: draws, reads and assembles one rank's part of a global batch, in native code.

The strategy decides where the rows are drawn:

- `build` draws them natively if the draws follow from the shards' totals. That holds for Uniform and Prioritized with
  replacement and without limits. One call then agrees on the totals, draws and reads.
- `read` takes rows that any other strategy has drawn.

The rest is the same for both (native/fetch/rank_reader.h). It assigns draws to ranks, places windows, copies rows into
the batch and into messages, and redraws lost rows.

Ranks of one host open each other's stores read-only and copy rows directly, so no message carries these rows. A rank
that only reads another rank's store does not keep that store alive. The store can be removed, adopted and repaired
meanwhile, and the mapping stays readable. The rank that leads a shard counts the samples of rows that others read from
it.

If `update_lag` exceeds `prefetch`, a rank may apply updates to its shard before other ranks have drawn. Then only the
rank that leads a shard reads it, and sends the others their rows. The same holds if a function places the windows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.errors import EmptyStoreError, GeartrainError
from geartrain.ranks.rank_group import Bytes
from geartrain.replay.builder import PriorityUpdate
from geartrain.replay.config import ReplayConfig
from geartrain.replay.distributed.assignment import Assigner, Replica
from geartrain.replay.distributed.members import Members
from geartrain.replay.distributed.read_agreement import ReadAgreement, ReadOutcome
from geartrain.replay.distributed.sharded_sampler import CommonError, DrawnBatch, ShardedSampler
from geartrain.replay.sampler import StoreSampler
from geartrain.selection.shard import ShardedDraw
from geartrain.selection.sharded import begins_with_offers, is_independent
from geartrain.selection.strategy import Redraw, seed_of
from geartrain.store.store import Store

#: A buffer in memory of the caller's: the consumer's rank, its arrays, its headers as bytes, and the transfer that
#: copies its rows; None where the CPU does.
Target = tuple[int, list[Any], Bytes, Any]


class NearStores(NamedTuple):
    """Shards of other ranks of this host, by their numbers among the shards of all stores.

    Attributes:
        stores: the shards that this rank has open to read.
        reached: for every rank, the numbers of the shards that it has open.
        by_totals: whether all ranks draw by totals.
    """

    stores: dict[int, Store]
    reached: list[list[int]]
    by_totals: bool

    def close(self) -> None:
        """Closes them."""
        _close_all(self.stores)


def open_near(samplers: Sequence[StoreSampler], members: Members, *, by_totals: bool, lagged: bool) -> NearStores:
    """Opens the shards of ranks of this host, where all ranks draw by totals. Collective.

    Args:
        samplers: of this rank's shards, one for each store.
        members: the ranks.
        by_totals: whether this rank draws so.
        lagged: only who leads a shard may read it.
    """
    mine = [sampler.plan.store for sampler in samplers]
    paths: list[list[str]] = members.group.all_gather_object([str(store.path) for store in mine])
    found: dict[int, Store] = {}
    with contextlib.ExitStack() as opened:  # closes what is open where this fails
        opened.callback(_close_all, found)
        # A function that places windows is asked about rows of this rank's own store.
        if by_totals and not lagged and not any(sampler.placed for sampler in samplers):
            for number, store in enumerate(mine):
                _open_near(found, store, members, number, [each[number] for each in paths])
        # What one rank has open all others know, since they do not send it those rows.
        told = members.group.all_gather_object((by_totals, sorted(found)))
        everyone = all(each for each, _ in told)
        if not everyone:
            _close_all(found)
            found.clear()
        reached = [shards if everyone else [] for _, shards in told]
        opened.pop_all()
    return NearStores(found, reached, everyone)


def _close_all(stores: Mapping[int, Store]) -> None:
    for store in stores.values():
        store.close()


def _open_near(found: dict[int, Store], mine: Store, members: Members, number: int, paths: Sequence[str]) -> None:
    group, shards = members.group, members.stores[number]
    # A group of the user's own may not know which of its ranks are of one host.
    for peer in sorted(group.shm_peers()) if hasattr(group, "shm_peers") else ():
        shard = shards.of_rank[peer]
        if shard == shards.of_rank[group.rank] or shards.first + shard in found:
            continue
        # Of another mount namespace, of another user, or no more files may be open: its rows come in messages.
        with contextlib.suppress(GeartrainError):
            store = Store.open(paths[peer], mode="r", adopt=True, trust=mine.trust)
            if store.id == shards.ids[shard]:
                found[shards.first + shard] = store
            else:
                store.close()


def _with_led_shards(replica: Replica, leaders: Sequence[int]) -> Replica:
    """A replica whose ranks have none but the shards that they lead in their memory."""
    local = [
        frozenset(shard for shard in shards if leaders[shard] == rank)
        for rank, shards in zip(replica.ranks, replica.local_shards, strict=True)
    ]
    return Replica(replica.ranks, tuple(local))


class RankReader:
    """Reads this rank's rows of each batch, for itself and for other ranks.

    Args:
        sharded: draws from this rank's shards (one for each store) and all others.
        config: the replay's configuration.
        near: shards of other ranks that this rank reads.

    Attributes:
        native: the native reader.
        plan: fetch plan of this rank's batch.
        by_totals: whether `build` makes the draws.
        with_lowest: whether importance weights are needed. The ranks then exchange their lowest probabilities.
        idle: whether no row ever moves from one rank to another.
        row_bytes: bytes of a row in this rank's batch.
        exchange: used by native code to exchange messages with other ranks.
    """

    def __init__(self, sharded: ShardedSampler, config: ReplayConfig, near: NearStores) -> None:
        samplers, members = sharded.samplers, sharded.members
        self.samplers = samplers
        self.members = members
        self.near = near
        self.by_totals = by_totals = near.by_totals
        self._sharded = sharded
        rank = members.group.rank
        me = members.me
        names = list(samplers[0].arrays)
        self.plan = samplers[0].plan
        if samplers[0].transitions is None and me is not None:
            self.plan = samplers[0].plan.of_fields(me.fields)
        lagged = config.extra_lag > 0
        shard_ranks = [ranks for store in members.stores for ranks in store.ranks]
        replicas = members.replicas
        if lagged:
            leaders = members.leader_of_shard.tolist()
            shard_ranks = [[leader] for leader in leaders]
            replicas = [_with_led_shards(each, leaders) for each in replicas]
        reached = near.reached
        self.idle = not lagged and by_totals
        self.idle &= all(
            len({*(store.first + store.of_rank[other] for store in members.stores), *each}) == len(shard_ranks)
            for other, each in enumerate(reached)
        )
        assigner = Assigner(replicas, shard_ranks, {at: set(each) for at, each in enumerate(reached)})
        # Whether a batch can be drawn again by all ranks: draws that are independent or in an order use nothing up.
        self._can_redraw = all(
            (is_independent(each.strategy) or begins_with_offers(each.strategy))
            and not (each.limited or each.may_refuse)
            for each in samplers
        )
        self.with_lowest = any(sampler.traits.importance for sampler in samplers)
        self._place = self._placed if any(sampler.placed for sampler in samplers) else None
        plan = samplers[0].plan
        view = samplers[0].transitions
        self.native = _native.RankReader(
            rank,
            [(each.rank, each.replica, [names.index(name) for name in each.fields]) for each in members.consumers],
            [_plan_of(sampler) for sampler in samplers],
            [
                self._shard_view(number, shard, ranks, reached, rank)
                for number, store in enumerate(members.stores)
                for shard, ranks in enumerate(shard_ranks[store.first : store.first + len(store.ranks)])
            ],
            assigner.native,
            plan.window,
            plan.pad_left,
            plan.threads,
            config.assignment == "ordered",
            None if view is not None else plan.native_windows,
            None if view is None else view.native,
            None if me is None or not me.fields else me.replica,
        )
        self.row_bytes = self.native.row_bytes(rank if me is None else me.rank)
        self.exchange = sharded.exchange_of(idle=self.idle)
        self._led = [sampler for number, sampler in enumerate(samplers) if members.leads(number) and sampler.expires]
        self._step = 0  # of the batch that is read
        self._after = [0 for _ in samplers]  # sequence numbers that its draws have used, in orders that move on
        self._limits_now: dict[int, tuple[int, int, int]] = {}  # of stores whose rows were drawn again for it
        self._failed: EmptyStoreError | None = None  # why rows of it were not drawn again

    def _shard_view(
        self, number: int, shard: int, ranks: list[int], reached: Sequence[Sequence[int]], rank: int
    ) -> tuple[_native.Store | None, int, list[int], bool, int, int, list[int]]:
        plan, shards = self.samplers[number].plan, self.members.stores[number]
        readers = [*ranks, *(other for other, each in enumerate(reached) if shards.first + shard in each)]
        mine = shard == shards.of_rank[rank]
        store = plan.store if mine else self.near.stores.get(shards.first + shard)
        if store is None:
            return None, number, [], False, 0, 1, ranks
        fields = [store.field_number(name) for name in plan.names]
        counts = ranks[0] == rank and len(readers) > len(ranks)
        turn = readers.index(rank) if rank in readers else 0  # one that is none of them reads nothing here
        return store.native, number, fields, counts, turn, len(readers), ranks

    # --- what Python is asked for ---------------------------------------------------------------------------------

    @property
    def callbacks(self) -> list[str]:
        """The parts of a batch that Python code is called for, by name.

        These are the entries of `StoreSampler.callbacks`, and draws that need more of other shards than totals.
        """
        found = [name for sampler in self.samplers for name in sampler.callbacks]
        return found if self.by_totals else ["select_shards", *found]

    def _placed(
        self,
        store: int,
        numbers: NDArray[np.uint32],
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        attempt: int,
    ) -> NDArray[np.int32]:
        return self.samplers[store].anchors_by_function(self._step, attempt, numbers, rows, generations)

    def _again(
        self, store: int, n: int, attempt: int, numbers: NDArray[np.uint32], kept: NDArray[np.uint32]
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.float64]] | None:
        """Other rows in the place of lost ones, by the strategy's own code; None where there are none."""
        sampler, cursors = self.samplers[store], self._sharded.cursors
        state = {"after": self._after[store]} if sampler.moves_on else {}
        try:
            drawn = sampler.draw(n, self._step, state, Redraw(attempt, numbers, kept))
        except EmptyStoreError as error:
            self._failed = error
            return None
        if sampler.moves_on:
            cursors[store] = max(cursors[store], drawn.state["after"])
        return drawn.rows, drawn.generations, drawn.probability

    def _limits(self, store: int) -> tuple[int, int, int]:
        """Which rows may be drawn again in the place of lost ones; asked for once a batch at most."""
        found = self._limits_now.get(store)
        if found is None:
            found = self._limits_now[store] = self.samplers[store].limits_now()
        return found

    # --- a batch --------------------------------------------------------------------------------------------------

    def empty_batch(self, n: int) -> _native.SampledBatch:
        """Recycled memory for n rows of this rank's batch."""
        return self.samplers[0].empty_batch(n, shards=True, plan=self.plan)

    def build(
        self, step: int, updates: list[PriorityUpdate], quotas: Sequence[int]
    ) -> tuple[_native.SampledBatch, _native.RankRead]:
        """Agrees, draws the given number of rows of each store, and reads them, in one native call.

        If no row ever moves, the call also sends the outcome.

        Raises:
            RanksDisagreeError: a rank has another configuration or is at another step.
            CommonError: there are no rows to draw, or too few.
            PeerLostError: a rank is lost.
        """
        sharded = self._sharded
        self.expire()
        self._step = step
        batch = self.empty_batch(sum(quotas) // len(self.members.replicas))
        read = sharded.over_ranks(
            self.native.build,
            batch,
            sharded.steps,
            self.exchange,
            step,
            quotas,
            sharded.given(updates),
            sharded.change_at(step),
            self.beta_at(step),
            self._place,
        )
        if read.changed:
            updates.clear()  # they are not sent again when this batch fails
        self.check(read, step)
        self._count(read)
        return batch, read

    def expire(self) -> None:
        """Removes rows that are too old from the shards that this rank leads."""
        for sampler in self._led:
            sampler.expire()

    def beta_at(self, step: int) -> float | None:
        """The exponent of importance weights where native code makes them for the whole batch."""
        first = self.samplers[0]
        return first.beta_at(step) if len(self.samplers) == 1 and first.traits.importance else None

    def read_heard(self, step: int, heard: _native.RankRead, quotas: Sequence[int]) -> _native.SampledBatch:
        """Draws the batch of a step that all ranks have begun, and reads this rank's rows."""
        self._step = step
        batch = self.empty_batch(sum(quotas) // len(self.members.replicas))
        self.native.read(batch, heard, step, quotas, self._place)
        self._count(heard)
        return batch

    def _drawn(self, number: int, drawn: ShardedDraw, state: dict[str, int]) -> tuple[Any, ...]:
        sampler, store = self.samplers[number], self.members.stores[number]
        steps = None if drawn.steps is None else sampler.anchors(drawn.rows, drawn.steps)
        rounds = None if drawn.rounds is None else drawn.rounds.astype(np.uint32)
        shard = store.of_rank[self.members.group.rank]
        cursor = self._after[number] = state.get(f"after/{shard}", 0)
        return (
            drawn.shard + store.first,
            drawn.rows,
            drawn.generations,
            drawn.probability,
            steps,
            rounds,
            drawn.share,
            cursor,
        )

    def read(
        self,
        step: int,
        drawn: DrawnBatch,
        own: _native.SampledBatch | Target | None,
        targets_of: Callable[[Callable[[], list[tuple[int, int]]]], Sequence[Target] | None],
    ) -> _native.RankRead:
        """Reads this rank's rows of a batch that was drawn.

        Args:
            step: of the batch.
            drawn: the batch.
            own: where this rank's own rows go; None where it gets none.
            targets_of: where those of other ranks go: asked with what tells how many each gets, (rank, rows); None for
                messages in host memory.
        """
        self._step = step
        self._limits_now.clear()
        draws = [
            None if each is None else self._drawn(number, each, drawn.state[number])
            for number, each in enumerate(drawn.found)
        ]
        others = targets_of(lambda: self.native.outgoing(draws))
        read = self.native.read_drawn(
            own, others or [], others is None, draws, step, self._place, self._again, self._limits
        )
        self._count(read)
        return read

    def _count(self, read: _native.RankRead) -> None:
        if not read.lost:
            return
        for number, sampler in enumerate(self.samplers):
            sampler.redrawn += read.redrawn[number]
            if sampler.moves_on:
                self._sharded.cursors[number] = max(self._sharded.cursors[number], read.cursors[number])

    def check(self, read: _native.RankRead, step: int) -> None:
        """Raises what all ranks have found wrong before they draw: see `build`."""
        if not read.refusal:
            return
        if read.refusal == "disagree":
            self._sharded.check_ranks(read.status, step)
        elif read.refusal == "few rows":
            store = read.refused_store
            self._sharded.check_count(store, read.rows[store], read.steps[store])
        raise CommonError(
            EmptyStoreError(
                "no selectable row has a priority above zero"
                if self.samplers[read.refused_store].traits.by_priority
                else "no store of the group has a selectable row"
            )
        )

    def agreement(self, read: _native.RankRead) -> ReadAgreement:
        """The exchange of what was read, which tells all ranks of lost rows."""
        failed, self._failed = self._failed, None
        if read.failed is not None and failed is None:
            failed = EmptyStoreError(read.failed)
        outcome = ReadOutcome(read.lowest, failed)
        return ReadAgreement(self.members, outcome, with_lowest=self.with_lowest, can_redraw=self._can_redraw)

    def place(self, batch: _native.SampledBatch, read: _native.RankRead) -> int:
        """Puts rows that were received to their places; returns the bytes of their fields."""
        if read.received_rows:
            self.native.place(batch, read)
        return read.received_rows * self.row_bytes

    def close(self) -> None:
        """Closes the shards of other ranks."""
        self.near.close()


def _plan_of(sampler: StoreSampler) -> tuple[tuple[Any, ...] | None, int, int, bool]:
    draws = sampler.native_draws(sampler.traits.cursor) if sampler.draws_natively else None
    return draws, seed_of(sampler.strategy), sampler.atom, sampler.limited


__all__ = ["NearStores", "RankReader", "Target", "open_near"]
