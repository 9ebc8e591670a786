"""Draws and reads of a rank in one native call, from its own shard and from those of other ranks of its host.

Independent draws from one store a rank need no more than the shards' totals, so that a rank makes, assigns, finds and
copies them without a look at Python (native/fetch/rank_reader.h); what else a batch may be takes the steps of
`ShardReader` (read.py), whose messages are the same.

Ranks of one host whose shards are segments of their own (a store a process) have each other's open, read-only: rows
that a rank gets of such a shard it copies from there itself, checked for writers as those of its own are, and no
message carries them. A segment that is read so has no client for it: it is removed, adopted and repaired as if nobody
did, and its mapping stays readable where it was removed. A rank that is lost is told by the exchanges, as ever. Who
leads a shard counts the samples of rows that others read so.

Where priority updates take effect later than with the next batch (lagged_builder.py), a rank applies those of its shard
while others may not have drawn yet. So only the rank that leads a shard reads it then, and sends others their rows.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.errors import EmptyStoreError, GeartrainError
from geartrain.replay.builder import PriorityUpdate, raised
from geartrain.replay.config import ReplayConfig
from geartrain.replay.distributed.assignment import Assigner, Replica
from geartrain.replay.distributed.draw import CommonError, ShardedSampler
from geartrain.replay.distributed.members import Members
from geartrain.replay.distributed.rank_collectives import RADIX
from geartrain.replay.distributed.rank_group import Bytes
from geartrain.replay.distributed.read_agreement import ReadAgreement, ReadOutcome
from geartrain.replay.distributed.single_rank import is_one_call
from geartrain.replay.native_batch import RankNativeBatch, rank_batch
from geartrain.selection.mixture import Selection
from geartrain.selection.strategy import Draw, importance_of, seed_of
from geartrain.store.store import Store


def open_native_reader(agreed: ShardedSampler, selection: Selection, config: ReplayConfig) -> NativeReader | None:
    """What reads this rank's rows natively; None where a batch is more than that. Collective."""
    samplers, members = agreed.samplers, agreed.members
    names = samplers[0].plan.names
    everyone_reads = len(members.consumers) == members.group.size and all(
        each.fields == tuple(names) and not each.peers for each in members.consumers
    )
    viable = everyone_reads and is_one_call(list(samplers), selection, config)
    paths: list[str] = members.group.all_gather_object(str(samplers[0].plan.store.path))
    near: dict[int, Store] = {}
    with contextlib.ExitStack() as opened:  # closes what is open where this fails
        opened.callback(_close_all, near)
        if viable and not config.extra_lag:
            _open_near(near, samplers[0].plan.store, members, paths)
        # What one rank has open all others know, since they do not send it those rows.
        reached = members.group.all_gather_object((viable, sorted(near)))
        if not all(each for each, _ in reached):
            _close_all(near)
            near.clear()
            reached = [(each, []) for each, _ in reached]
        if not viable:
            return None
        reader = NativeReader(agreed, config, near, [shards for _, shards in reached])
        opened.pop_all()
    return reader


def _close_all(stores: dict[int, Store]) -> None:
    for store in stores.values():
        store.close()


def _open_near(found: dict[int, Store], mine: Store, members: Members, paths: Sequence[str]) -> None:
    """Opens to read, by number, the shards of ranks of this host that this rank has not."""
    group, shards = members.group, members.stores[0]
    # A group of the user's own may not know which of its ranks are of one host.
    for peer in sorted(group.shm_peers()) if hasattr(group, "shm_peers") else ():
        shard = shards.of_rank[peer]
        if shard == shards.of_rank[group.rank] or shard in found:
            continue
        # Of another mount namespace, of another user, or no more files may be open: its rows come in messages.
        with contextlib.suppress(GeartrainError):
            store = Store.peek(paths[peer], trust=mine.trust)
            if store.id == shards.ids[shard]:
                found[shard] = store
            else:
                store.close()


def _with_led_shards(replica: Replica, leaders: Sequence[int]) -> Replica:
    """A replica whose ranks have none but the shards that they lead in their memory."""
    local = [
        frozenset(shard for shard in shards if leaders[shard] == rank)
        for rank, shards in zip(replica.ranks, replica.local_shards, strict=True)
    ]
    return Replica(replica.ranks, tuple(local))


class NativeReader:
    """Reads this rank's rows of each batch, in one native call, which makes the draws as well.

    Args:
        agreed: of this rank's shard of the one store, and of the ranks.
        config: of the replay.
        near: by number, shards of ranks of this host, which this rank has open to read.
        reached: for every rank, the numbers of those that it has.

    Attributes:
        near: see above.
        local_rows, sent_rows, received_rows: how many rows went where, in all batches.
    """

    def __init__(
        self,
        agreed: ShardedSampler,
        config: ReplayConfig,
        near: dict[int, Store],
        reached: Sequence[Sequence[int]],
    ) -> None:
        samplers, members = agreed.samplers, agreed.members
        self.samplers = samplers
        self.near = near
        self.local_rows = self.sent_rows = self.received_rows = 0
        self._agreed, self._members, self._config = agreed, members, config
        sampler, rank, shards = samplers[0], members.group.rank, members.stores[0]
        plan, traits, self._sampler = sampler.plan, sampler.traits, sampler
        self._n = config.batch_size
        self._rows = config.batch_size // len(members.replicas)
        own = shards.of_rank[rank]
        self._leads = members.leads(0)
        self._idle = all(len({shards.of_rank[other], *each}) == len(shards.ranks) for other, each in enumerate(reached))
        shard_ranks, replicas = shards.ranks, members.replicas
        if config.extra_lag:
            shard_ranks, self._idle = [[leader] for leader in shards.leaders], False
            replicas = [_with_led_shards(each, shards.leaders) for each in replicas]
        assigner = Assigner(replicas, shard_ranks, {at: set(each) for at, each in enumerate(reached)})
        views: list[tuple[_native.Store | None, list[int], bool, int, int, list[int]]] = []
        for shard, ranks in enumerate(shard_ranks):
            readers = [*ranks, *(other for other, each in enumerate(reached) if shard in each)]
            store = plan.store if shard == own else near.get(shard)
            if store is None:
                views.append((None, [], False, 0, 1, ranks))
                continue
            numbers = [store.field_number(name) for name in plan.names]
            counts = ranks[0] == rank and len(readers) > len(ranks)
            turn = readers.index(rank) if rank in readers else 0  # one that is none of them reads nothing here
            views.append((store.native, numbers, counts, turn, len(readers), ranks))
        self._native = _native.RankReader(
            rank,
            [consumer.rank for consumer in sorted(members.consumers, key=lambda each: each.replica)],
            views,
            assigner.native,
            plan.window,
            plan.pad_left,
            plan.threads,
            seed_of(sampler.strategy),
            traits.by_priority,
            traits.stratified,
            config.assignment == "ordered",
            None if plan.windows is None else plan.windows.native,
        )
        group: Any = members.group
        self._rounds: Any = getattr(group, "native_rounds", None)  # of a group of the user's own there are none
        direct = group.size <= RADIX
        self._exchange = _native.RankExchange(
            self._rounds,
            0.0 if self._rounds is None else group.timeout_s,
            direct and len(shards.leaders) == group.size,
            direct and self._idle,
            shards.leaders,
            agreed.send_parts,
            lambda mine: members.all_gather_shards(0, np.array([mine], np.uint64))[:, 0].copy(),
        )
        self._steps = _native.RankSteps(
            plan.store.native,
            rank,
            group.size,
            agreed.fingerprint,
            traits.by_priority,
            shards.leaders,
            sampler.min_rows,
            traits.importance,
        )
        self._nothing = (
            "no selectable row has a priority above zero"
            if traits.by_priority
            else "no store of the group has a selectable row"
        )

    def build(self, step: int, updates: list[PriorityUpdate]) -> tuple[_native.SampledBatch, _native.RankRead]:
        """Steps 1 to 5, and 6 where no row moves: this rank's rows of a batch, with the updates of all ranks before it.

        Raises:
            RanksDisagreeError: a rank has another configuration or is at another step.
            CommonError: there is nothing to draw, or too little.
            PeerLostError: a rank is lost.
        """
        sampler, group = self._sampler, self._members.group
        if self._leads:
            sampler.expire()
        batch = sampler.empty_batch(self._rows, True)
        beta = sampler.beta_at(step) if sampler.traits.importance else None
        given = [self._given(update) for update in updates]
        change = functools.partial(self._change, step) if sampler.raises else None
        try:
            if self._rounds is not None:
                group.check_usable()  # type: ignore[attr-defined]
            read = self._native.build(batch, self._steps, self._exchange, step, self._n, given, change, beta)
        except GeartrainError as error:
            if self._rounds is None:
                raise
            group.round_failed(error)  # type: ignore[attr-defined]
        if read.changed:
            updates.clear()  # they are not sent again when this batch fails
        self.check(read, step)
        sampler.redrawn += read.redrawn
        return batch, read

    # --- the same in steps, between which other rounds may be begun -------------------------------------------------

    def begin(self, step: int, updates: list[PriorityUpdate]) -> list[Bytes]:
        """What this rank tells each rank before a batch: rows and total of its shard, and the updates, taken out."""
        if self._leads:
            self._sampler.expire()
        parts = self._steps.begin(step, [self._given(update) for update in updates])
        updates.clear()
        return parts

    def hear(self, step: int, parts: Sequence[Bytes]) -> tuple[_native.RankRead, Bytes]:
        """What all ranks have told, to be checked; and the updates for this one, which `apply` takes."""
        return self._steps.hear(step, parts)

    def apply(self, step: int, updates: Bytes) -> None:
        """Applies the updates of one round before the batch of a step. All ranks do, with those that they got."""
        self._steps.apply(updates, functools.partial(self._change, step) if self._sampler.raises else None)

    def read(self, step: int, heard: _native.RankRead) -> _native.SampledBatch:
        """Draws the batch of a step, and reads this rank's rows, into it and into the messages of `heard`."""
        batch = self._sampler.empty_batch(self._rows, True)
        self._native.read(batch, heard, step, self._n)
        self._sampler.redrawn += heard.redrawn
        return batch

    def check(self, read: _native.RankRead, step: int) -> None:
        """Raises what all ranks have found wrong before they draw: see `build`."""
        if read.refusal:
            self._refuse(read, step)

    def _given(self, update: PriorityUpdate) -> _native.GivenPriorities:
        keys = update.keys
        return keys.row, keys.generation, keys.draw, self._members.shard_of(keys), update.priorities

    def _change(self, step: int, priorities: NDArray[np.float64]) -> NDArray[np.float64]:
        """What this rank's shard stores of priorities that are updated before a step."""
        self._sampler.follow_alpha(step, apply=self._leads)
        return raised(priorities, self._sampler.alpha)

    def _refuse(self, read: _native.RankRead, step: int) -> NoReturn:
        if read.refusal == "disagree":
            self._agreed.check_ranks(read.status, step)
        elif read.refusal == "few rows":
            self._agreed.check_count(0, read.rows)
        raise CommonError(EmptyStoreError(self._nothing))

    def outcome(self, read: _native.RankRead) -> ReadOutcome:
        """Of this rank's read."""
        failed = read.failed
        return ReadOutcome([read.lowest], None if failed is None else EmptyStoreError(failed))

    def exchange(self, agreement: ReadAgreement, batch: _native.SampledBatch, read: _native.RankRead) -> None:
        """Step 6: rows of shards that a rank does not have open. Collective; raises what `agreement` raises."""
        if read.outcome is not None:  # no row moves, and all ranks have told already
            agreement.check(read.outcome)
        else:
            agreement.exchange(read.sends, read.receives, idle=self._idle)
        self.place(batch, read)

    def place(self, batch: _native.SampledBatch, read: _native.RankRead) -> None:
        """Puts rows that have been received into the batch, and counts those that were moved."""
        if read.received_rows:
            self._native.place(batch, read)
        self.local_rows += read.local_rows
        self.sent_rows += read.sent_rows
        self.received_rows += read.received_rows

    def finish(
        self, batch: _native.SampledBatch, read: _native.RankRead, agreement: ReadAgreement, step: int
    ) -> RankNativeBatch:
        """The batch, with importance weights scaled by the largest of the global one."""
        sampler = self._sampler
        if sampler.traits.importance:
            beta = sampler.beta_at(step)
            lowest = read.lowest_of_all if agreement.lowest is None else float(agreement.lowest[0])
            assert lowest is not None
            if beta is None or read.outcome is None:  # else they are made already
                self._weigh(batch, read.rows, beta, lowest, step)
        return rank_batch(batch, sampler.plan, step, self._members.shard_ids, read.draws())

    def _weigh(self, batch: _native.SampledBatch, count: int, beta: float | None, lowest: float, step: int) -> None:
        if beta is not None:
            self._native.weigh(batch, count, beta, lowest)
            return
        draw = Draw(batch.rows(), batch.generations(), batch.probability(), lowest=lowest)
        weights = importance_of(self._sampler.strategy, draw, count, step)
        if weights is not None:
            batch.set_importance(0, weights)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the batch."""
        return self._native.row_bytes

    def close(self) -> None:
        """Closes the shards of other ranks."""
        _close_all(self.near)


__all__ = ["NativeReader", "open_native_reader"]
