"""Batches of a group of one rank, each by one native call, as those of a replay without a group.

They are the batches that any number of ranks would make, with the same attributes, and priority updates take effect
when they do there: with the next request. Of other draws than those by totals, of mixtures, on devices and with fields
for some stages only a group of one takes the steps of all groups (builder.py).
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np

from geartrain.errors import StoreClosedError
from geartrain.replay.admission import Admission
from geartrain.replay.builder import (
    BuiltBatch,
    HostBatchBuilder,
    PriorityUpdate,
    State,
    check_priorities,
    raised,
)
from geartrain.replay.config import ReplayConfig
from geartrain.replay.distributed.later_updates import LaterUpdates
from geartrain.replay.distributed.rank_group import RankGroup
from geartrain.replay.native_batch import global_batch, numbers_of
from geartrain.replay.sampler import StoreSampler
from geartrain.selection.mixture import Selection
from geartrain.store.priorities import check_keys_of


def is_single_store(samplers: list[StoreSampler], config: ReplayConfig) -> bool:
    """Whether batches are of one store in host memory, by draws that use nothing up, and each has all fields."""
    names = set(samplers[0].plan.names)
    stages = [names if given is None else set(given) for given in (config.inputs, config.targets)]
    return len(samplers) == 1 and config.device is None and samplers[0].by_totals and names == set.union(*stages)


class SingleRankBuilder:
    """See `geartrain.replay.builder.BatchBuilder`.

    Args:
        samplers: of the one store.
        selection: its strategy.
        config: of the replay.
        group: the rank group, of one.
    """

    builds_anywhere = False
    overlaps = False
    collective = True

    def __init__(
        self, samplers: list[StoreSampler], selection: Selection, config: ReplayConfig, group: RankGroup
    ) -> None:
        self._host = HostBatchBuilder(samplers, selection, config.batch_size)  # whose figures these are
        self._group = group
        self._sampler = samplers[0]
        self._plan = samplers[0].plan
        self._store = samplers[0].plan.store
        self._draw, _ = numbers_of(config.batch_size)
        self._row_bytes = sum(self._plan.row_bytes(name) for name in self._plan.names)
        self._later = LaterUpdates[list[PriorityUpdate]](config.extra_lag) if config.extra_lag else None
        self.own_thread = config.extra_lag != 0  # such updates are counted from the start of the thread on
        self._first = True  # batch since the thread was started
        samplers[0].counts_attached = False  # as in any group
        self.samplers = samplers
        self.rows = config.batch_size
        self.store_ids = self._host.store_ids

    def enter(self) -> None:
        """See `BatchBuilder`."""
        self._first = True

    def start(self, step: int, state: State, updates: list[PriorityUpdate]) -> BuiltBatch:
        """See `BatchBuilder`. The batch is finished when this returns."""
        if self._later is not None and not self._first:
            self._later.keep(step, updates.copy())
            updates.clear()
            for each in self._later.due(step):
                self._apply(step, each)
        elif updates or self._later is not None:
            self.settle(step, updates)
            self._first = False
        began_s = time.perf_counter()
        with Admission() as admission:
            rows, after = self._sampler.sample(self.rows, step, state[0], admission)
            batch = global_batch(rows, self._plan, step, self.store_ids)
            self._host.note(time.perf_counter() - began_s)
            return BuiltBatch(batch, [after], admission=admission)

    def ready(self, started: BuiltBatch) -> bool:
        """See `BatchBuilder`."""
        return True

    def finish(self, started: BuiltBatch) -> BuiltBatch:
        """See `BatchBuilder`."""
        return started

    def submit_updates(self, update: PriorityUpdate, step: int) -> int | None:
        """See `BatchBuilder`. They are applied with the next batch."""
        check_priorities(update.priorities)
        keys, store = update.keys, update.keys.store
        mine = type(store) is int and store == self._store.id  # keys that are made by hand may have an array of them
        if mine and keys.draw is self._draw and keys.step is None:
            return None  # of a batch, all of it
        if len(keys):
            check_keys_of(keys, per_step=self._store.per_step, whose="a store of this replay")
        if len(keys) and not mine:
            keys.places_among(np.array(self.store_ids, np.uint64), "shards of this replay")
        return None

    def settle(self, step: int, updates: list[PriorityUpdate]) -> None:
        """See `BatchBuilder`."""
        for each in [] if self._later is None else self._later.all():
            self._apply(step, each)
        self._apply(step, updates)
        updates.clear()

    def _apply(self, step: int, updates: list[PriorityUpdate]) -> None:
        for update in updates:
            self._sampler.follow_alpha(step)
            keys, priorities = update.keys, raised(update.priorities, self._sampler.alpha)
            self._store.native.apply_updates(keys.row, keys.generation, None, keys.draw, priorities)

    def rewind(self) -> None:
        """See `BatchBuilder`. What is kept besides the state are updates that are not applied yet."""
        if self._later is not None:
            self._later.all()

    def stats(self) -> dict[str, Any]:
        """See `BatchBuilder`: with the figures that there are over several ranks."""
        mine = self._host.stats()
        local_bytes = mine["built"] * self.rows * self._row_bytes
        nothing = dict.fromkeys(("sent_bytes", "received_bytes", "selection_bytes", "select_s", "exchange_s"), 0)
        return {**mine, **nothing, "local_bytes": local_bytes, "local_share": 1.0, "fetch_s": mine["make_s"]}

    def describe(self) -> list[dict[str, Any]]:
        """See `BatchBuilder`."""
        return []

    def abort(self, reason: str) -> None:
        """See `BatchBuilder`; the segment stays in shared memory."""
        with contextlib.suppress(StoreClosedError):
            self._store.native.keep_segment()
        self._group.abort(reason)

    def close(self) -> None:
        """See `BatchBuilder`."""
        self._group.close()


__all__ = ["SingleRankBuilder", "is_single_store"]
