"""Draws and reads of a rank in one native call, from its own shard and from those of other ranks of its host.

Independent draws from one store a rank need no more than the shards' totals, so that a rank makes, assigns, finds and
copies them without a look at Python (native/fetch/rank_reader.h); what else a batch may be takes the steps of
`ShardReader` (read.py), whose messages are the same.

Ranks of one host whose shards are segments of their own (a store a process) have each other's open, read-only: rows
that a rank gets of such a shard it copies from there itself, checked for writers as those of its own are, and no
message carries them. A segment that is read so has no client for it: it is removed, adopted and repaired as if nobody
did, and its mapping stays readable where it was removed. A rank that is lost is told by the exchanges, as ever. Who
leads a shard counts the samples of rows that others read so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.errors import EmptyStoreError, GeartrainError
from geartrain.replay.config import ReplayConfig
from geartrain.replay.distributed.assignment import Assigner
from geartrain.replay.distributed.draw import CommonError
from geartrain.replay.distributed.members import Members
from geartrain.replay.distributed.read_agreement import ReadAgreement, ReadOutcome
from geartrain.replay.distributed.single_rank import is_one_call
from geartrain.replay.native_batch import RankNativeBatch, rank_batch
from geartrain.replay.sampler import StoreSampler
from geartrain.selection.mixture import Selection
from geartrain.selection.sharded import total_of
from geartrain.selection.strategy import Draw, importance_of, seed_of
from geartrain.store.store import Store


def open_native_reader(
    samplers: Sequence[StoreSampler], selection: Selection, config: ReplayConfig, members: Members
) -> NativeReader | None:
    """What reads this rank's rows natively; None where a batch is more than that. Collective."""
    names = samplers[0].plan.names
    everyone_reads = len(members.consumers) == members.group.size and all(
        each.fields == tuple(names) and not each.peers for each in members.consumers
    )
    viable = everyone_reads and is_one_call(list(samplers), selection, config)
    paths: list[str] = members.group.all_gather_object(str(samplers[0].plan.store.path))
    near: dict[int, Store] = {}
    with contextlib.ExitStack() as opened:  # closes what is open where this fails
        opened.callback(_close_all, near)
        if viable:
            _open_near(near, samplers[0].plan.store, members, paths)
        # What one rank has open all others know, since they do not send it those rows.
        reached = members.group.all_gather_object((viable, sorted(near)))
        if not all(each for each, _ in reached):
            _close_all(near)
            near.clear()
            reached = [(each, []) for each, _ in reached]
        if not viable:
            return None
        reader = NativeReader(samplers, config, members, near, [shards for _, shards in reached])
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


class NativeReader:
    """Reads this rank's rows of each batch, in one native call, which makes the draws as well.

    Args:
        samplers: of this rank's shard of the one store.
        config: of the replay.
        members: the ranks.
        near: by number, shards of ranks of this host, which this rank has open to read.
        reached: for every rank, the numbers of those that it has.

    Attributes:
        near: see above.
        local_rows, sent_rows, received_rows: how many rows went where, in all batches.
    """

    def __init__(
        self,
        samplers: Sequence[StoreSampler],
        config: ReplayConfig,
        members: Members,
        near: dict[int, Store],
        reached: Sequence[Sequence[int]],
    ) -> None:
        self.samplers = samplers
        self.near = near
        self.local_rows = self.sent_rows = self.received_rows = 0
        self._members = members
        sampler, rank, shards = samplers[0], members.group.rank, members.stores[0]
        plan, traits, self._sampler = sampler.plan, sampler.traits, sampler
        self._n = config.batch_size
        self._rows = config.batch_size // len(members.replicas)
        own = shards.of_rank[rank]
        self._idle = all(len({shards.of_rank[other], *each}) == len(shards.ranks) for other, each in enumerate(reached))
        assigner = Assigner(members.replicas, shards.ranks, {at: set(each) for at, each in enumerate(reached)})
        views: list[tuple[_native.Store | None, list[int], bool, int, int, list[int]]] = []
        for shard, ranks in enumerate(shards.ranks):
            readers = [*ranks, *(other for other, each in enumerate(reached) if shard in each)]
            store = plan.store if shard == own else near.get(shard)
            if store is None:
                views.append((None, [], False, 0, 1, ranks))
                continue
            numbers = [store.field_number(name) for name in plan.names]
            counts = ranks[0] == rank and len(readers) > len(ranks)
            views.append((store.native, numbers, counts, readers.index(rank), len(readers), ranks))
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
        self._nothing = (
            "no selectable row has a priority above zero"
            if traits.by_priority
            else "no store of the group has a selectable row"
        )

    def totals(self, known: NDArray[np.uint64] | None) -> NDArray[np.uint64]:
        """(shards,) of all shards, as their leaders tell them where they are not known already.

        Raises:
            CommonError: there is nothing to draw.
        """
        if known is None:
            total = total_of(self._sampler.strategy, self._sampler.candidates) or 0
            known = self._members.all_gather_shards(0, np.array([total], np.uint64))[:, 0]
        if not known.any():
            raise CommonError(EmptyStoreError(self._nothing))
        return np.ascontiguousarray(known)

    def read(self, step: int, totals: NDArray[np.uint64]) -> tuple[_native.SampledBatch, _native.RankRead, ReadOutcome]:
        """Draws the batch of a step, and reads this rank's rows of it."""
        batch = self._sampler.empty_batch(self._rows, True, None)
        read = self._native.read(batch, step, self._n, totals)
        self._sampler.redrawn += read.redrawn
        failed = read.failed
        return batch, read, ReadOutcome([read.lowest], None if failed is None else EmptyStoreError(failed))

    def exchange(self, agreement: ReadAgreement, batch: _native.SampledBatch, read: _native.RankRead) -> None:
        """Sends and receives rows of shards that a rank does not have open. Collective; raises what that raises."""
        agreement.exchange(read.sends, read.receives, idle=self._idle)
        if read.received_rows:
            self._native.place(batch, read)
        self.local_rows += read.local_rows
        self.sent_rows += read.sent_rows
        self.received_rows += read.received_rows

    def finish(
        self, batch: _native.SampledBatch, read: _native.RankRead, lowest: float | None, count: int, step: int
    ) -> RankNativeBatch:
        """The batch, with importance weights scaled by the largest of the global one."""
        sampler = self._sampler
        if lowest is not None:
            beta = sampler.beta_at(step)
            if beta is not None:
                self._native.weigh(batch, count, beta, lowest)
            else:
                draw = Draw(batch.rows(), batch.generations(), batch.probability(), lowest=lowest)
                weights = importance_of(sampler.strategy, draw, count, step)
                if weights is not None:
                    batch.set_importance(0, weights)
        return rank_batch(batch, sampler.plan, step, self._members.shard_ids, read.draws())

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the batch."""
        return self._native.row_bytes

    def close(self) -> None:
        """Closes the shards of other ranks."""
        _close_all(self.near)


__all__ = ["NativeReader", "open_native_reader"]
