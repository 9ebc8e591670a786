"""Batches made on the host, from one store or a mixture of several."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from geartrain.core.keys import Keys
from geartrain.replay.batch import Batch
from geartrain.replay.distributed.priority_updates import Update
from geartrain.replay.fetch import FetchedRows
from geartrain.replay.sampler import StoreSampler
from geartrain.selection.mixture import Selection, quotas_of

# What every strategy has to know at its next step.
State = list[dict[str, int]]


def nothing() -> None:
    """Done."""


@dataclass(frozen=True)
class BuiltBatch:
    """A batch, the strategies' state after it, and what the consumer's thread does as it takes the batch."""

    batch: Batch
    state: State
    deliver: Callable[[], None] = nothing


@dataclass(frozen=True)
class Rows:
    """The rows of a batch before they are anybody's: copied, with their books."""

    raw: FetchedRows
    keys: Keys
    probability: Any
    importance_weights: Any
    state: State


class HostBatchBuilder:
    """Makes the batch of a given step in host memory."""

    def __init__(self, parts: list[StoreSampler], selection: Selection, batch_size: int) -> None:
        self.parts = parts
        self.selection = selection
        self.mixed = selection is not parts[0].strategy
        self.batch_size = batch_size
        self.make_s = 0.0
        self.made = 0

    def make(self, step: int, state: State, updates: list[Update]) -> BuiltBatch:
        """The batch of a step, and the strategies' state after it. One process sets priorities when they are given."""
        began_s = time.perf_counter()
        rows = self.rows(step, state)
        batch = self.parts[0].plan.batch(rows.raw, rows.keys, rows.probability, rows.importance_weights, step)
        self.make_s += time.perf_counter() - began_s
        self.made += 1
        return BuiltBatch(batch, rows.state)

    def quotas(self, step: int) -> list[int]:
        """Rows from each store in the batch of a step."""
        return quotas_of(self.selection, self.batch_size, step)

    def rows(self, step: int, state: State, out: list[Any] | None = None) -> Rows:
        """The rows of a step, in `out` or in recycled memory."""
        if not self.mixed:
            (part,) = self.parts
            sample = part.sample(self.batch_size, step, state[0], out)
            return Rows(sample.raw, sample.keys, sample.probability, sample.importance_weights, [sample.state])
        arrays = self.parts[0].plan.empty(self.batch_size) if out is None else out
        samples = []
        at = 0
        for number, (part, quota) in enumerate(zip(self.parts, self.quotas(step), strict=True)):
            if quota:
                piece = [array[at : at + quota] for array in arrays]
                samples.append((number, part.sample(quota, step, state[number], piece)))
                at += quota
        state = list(state)
        for number, sample in samples:
            state[number] = sample.state
        raw = FetchedRows.join(arrays, [sample.raw for _, sample in samples])
        keys = Keys.join([sample.keys.of_shard(number) for number, sample in samples])
        probability = np.concatenate([sample.probability for _, sample in samples])
        importance_weights = join_importance([(sample.importance_weights, len(sample.keys)) for _, sample in samples])
        return Rows(raw, keys, probability, importance_weights, state)


def join_importance(parts: list[tuple[Any, int]]) -> Any:
    """Importance weights of all parts; 1 where one has none, None when nobody has any."""
    if all(importance_weights is None for importance_weights, _ in parts):
        return None
    return np.concatenate(
        [np.ones(n) if importance_weights is None else importance_weights for importance_weights, n in parts]
    )


__all__ = ["HostBatchBuilder", "BuiltBatch", "Rows", "State", "join_importance"]
