"""Source of batches from the stores of this process.

A replay without a rank group uses it, and so does a replay of a group with one rank.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

import geartrain._native as _native
from geartrain.errors import StoreClosedError
from geartrain.ranks.rank_group import RankGroup
from geartrain.replay.admission import Admission
from geartrain.replay.builder import (
    BuiltBatch,
    PriorityUpdate,
    RowSource,
    State,
    apply_updates,
    check_priorities,
    places_of,
)
from geartrain.replay.fetch_plan import BatchFields
from geartrain.replay.later_updates import LaterUpdates
from geartrain.replay.native_batch import global_batch, keys_of, native_batch
from geartrain.replay.packed_batch import numbered, packed_batch, repeated_probability
from geartrain.replay.sampler import StoreSampler
from geartrain.replay.store_waits import wait_together
from geartrain.selection.mixture import Selection, quotas_of
from geartrain.store.packed import PackedReader
from geartrain.store.priorities import check_keys_of

#: Figures of a job's ranks that one rank has nothing to tell of.
_OF_RANKS = dict.fromkeys(("sent_bytes", "received_bytes", "selection_bytes", "select_s", "exchange_s"), 0)


class LocalRows(RowSource):
    """Draws and reads batches from the stores of this process; see `RowSource`.

    With a number as `update_lag` the batches are the same as on any number of ranks. They are global batches, and their
    keys contain draw numbers. Any number of ranks can resume from their state. Priority updates come with requests.

    Args:
        samplers: one for each store.
        selection: the strategy, or the mixture.
        batch_size: rows of a batch.
        update_lag: number of batches after which priority updates take effect; None: at once.
        extra_lag: how many of these batches are requested after the batch that the updates come with.
        group: the group of one rank that is left when the replay is closed; None for none.

    Attributes:
        mixed: whether batches are a mixture's.
    """

    def __init__(
        self,
        samplers: list[StoreSampler],
        selection: Selection,
        batch_size: int,
        update_lag: int | None = None,
        extra_lag: int = 0,
        group: RankGroup | None = None,
    ) -> None:
        self.samplers = samplers
        self.store_ids = [sampler.plan.store.id for sampler in samplers]
        self.rows = batch_size
        self.update_lag = update_lag
        self.mixed = selection is not samplers[0].strategy
        self._selection = selection
        self._transitions = samplers[0].transitions
        self._shown: BatchFields = self._transitions or samplers[0].plan
        self._make_batch = native_batch if update_lag is None else global_batch
        self._group = group
        self._only = self.store_ids[0] if len(samplers) == 1 else None
        self._per_step = samplers[0].plan.store.per_step
        self._first = True  # batch of a run
        self._later = LaterUpdates[list[PriorityUpdate]](extra_lag) if extra_lag else None
        self._read = self._packed_bytes = 0  # rows, and of packed ones their fields
        self._kept = samplers[0].kept
        if self._kept is not None:
            self._kept.hold()
        if update_lag is not None:
            for sampler in samplers:
                sampler.join_group()

    @property
    def callbacks(self) -> list[str]:
        return [name for sampler in self.samplers for name in sampler.callbacks]

    # --- a batch ------------------------------------------------------------------------------------------------

    def start(self, step: int, state: State, updates: list[PriorityUpdate], admission: Admission) -> BuiltBatch:
        if self._later is not None:
            self._apply_due(self._later, step, updates)
        elif updates:
            self._apply(step, updates)  # in a frame of its own: keys hold the memory of their batch
        reader = self.samplers[0].packed
        if reader is not None:
            return self._packed(reader, step, state, admission)
        if self.mixed:
            rows = self.samplers[0].empty_batch(self.rows, shards=True)
            after = self.sample_into(rows, step, state, admission)
        else:
            rows, last = self.samplers[0].sample(self.rows, step, state[0], admission)
            after = [last]
        if self._transitions is not None:
            self._transitions.settle(rows)  # which asks functions of the user's
        self._read += len(rows)
        return BuiltBatch(self._make_batch(rows, self._shown, step, self.store_ids), after, admission=admission)

    def _packed(self, reader: PackedReader, step: int, state: State, admission: Admission) -> BuiltBatch:
        sampler, after, weights = self.samplers[0], state, None
        repeated = sampler.repeat_packed(self.rows, step)
        if repeated is not None:
            keys, found = repeated
            probability = np.full(len(keys), repeated_probability(sampler.traits.form))
        else:
            rows, found, last = sampler.sample_packed(self.rows, step, state[0], admission)
            keys, after = keys_of(rows, self.store_ids), [last]
            probability, weights = rows.probability(), rows.importance_weights()
        batch = packed_batch(
            reader,
            sampler.plan.output,
            found,
            keys if self.update_lag is None else numbered(keys, self.store_ids[0]),
            found.versions(),
            probability=probability,
            importance_weights=weights,
            step=step,
        )
        self._read += len(batch)
        self._packed_bytes += found.nbytes
        return BuiltBatch(batch, after, admission=admission)

    def quotas(self, step: int) -> list[int]:
        """Rows from each store in the batch of a step."""
        return quotas_of(self._selection, self.rows, step)

    def sample_into(self, batch: _native.SampledBatch, step: int, state: State, admission: Admission) -> State:
        """Fills a batch with the rows of a step; returns the strategies' state after it."""
        state, first = list(state), 0
        wait_together(self.samplers)
        for number, (sampler, quota) in enumerate(zip(self.samplers, self.quotas(step), strict=True)):
            if quota:
                _, state[number] = sampler.sample(quota, step, state[number], admission, batch, first)
                batch.set_shard(first, quota, number)
                first += quota
        return state

    # --- priorities, state, leaving -------------------------------------------------------------------------------

    def submit_updates(self, update: PriorityUpdate, step: int) -> int | None:
        check_priorities(update.priorities)
        if self.update_lag is None:
            return apply_updates(self.samplers, update, step)
        keys = update.keys
        if type(keys.store) is not int or keys.store != self._only:
            places_of(self.samplers, keys)
        if (keys.step is not None) != self._per_step and len(keys):
            check_keys_of(keys, per_step=self._per_step, whose="a store of this replay")
        return None

    def _apply_due(self, later: LaterUpdates[list[PriorityUpdate]], step: int, updates: list[PriorityUpdate]) -> None:
        """Takes the updates that came with a batch, and applies the updates that are due for its draw."""
        if updates:
            later.keep(step, updates.copy())
            updates.clear()
        for came in later.all() if self._first else later.due(step):
            self._apply(step, came)
        self._first = False

    def _apply(self, step: int, updates: list[PriorityUpdate]) -> None:
        for update in updates:
            apply_updates(self.samplers, update, step)
        updates.clear()

    def settle(self, step: int, updates: list[PriorityUpdate]) -> None:
        for came in [] if self._later is None else self._later.all():
            self._apply(step, came)
        self._apply(step, updates)

    def restart(self) -> None:
        self._first = True

    def rewind(self) -> None:
        if self._later is not None:
            self._later.all()

    def stats(self, make_s: float) -> dict[str, Any]:
        """Where any number of ranks would make the batches, with the figures of ranks."""
        if self.update_lag is None:
            return {}
        figures = {**_OF_RANKS, "local_share": 1.0, "fetch_s": make_s}
        if self.samplers[0].packed is not None:
            return {**figures, "local_bytes": self._packed_bytes, "balance": 1.0, "balance_newest": 1.0}
        return {**figures, "local_bytes": self._read * sum(self.samplers[0].arrays.values())}

    def abort(self, reason: str) -> None:
        """The segments stay where a group is left so."""
        if self._group is None:
            return
        for sampler in self.samplers:
            with contextlib.suppress(StoreClosedError):
                sampler.plan.store.native.keep_segment()
        self._group.abort(reason)

    def close(self) -> None:
        """Host memory is recycled by itself."""
        if self._kept is not None:
            self._kept.close()
        if self._group is not None:
            self._group.close()


__all__ = ["LocalRows"]
