"""Rows of transitions in batches and messages: what a view makes of a row, gathered by the rank that reads it.

Only what the view needs travels: of 20 fields of 1,000 steps two observations, an action, a reward and two flags. The
arrays are those of native/fetch/transitions.h: of each field what it gives (an observation two, or with n_step=1 and
stacks the one window that both are parts of), then reward, discount, terminated and truncated, and with hindsight
relabelled. Goals are gathered with them; the rewards that they bring are the consumer's (hindsight.py), so that each
rank calls its own function for its own rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.keys import Keys
from geartrain.core.schema import round_up
from geartrain.errors import ArgumentError
from geartrain.replay.batch import Batch
from geartrain.replay.fetch_plan import FetchedRows, FetchPlan
from geartrain.replay.transitions import TransitionPlan
from geartrain.replay.windows import Windows


class ReadDraws(NamedTuple):
    """Of which draws rows are read: the step of the batch, the attempt, and (k,) uint32 numbers within the store."""

    step: int
    attempt: int
    numbers: NDArray[np.uint32]


class TransitionRows(FetchPlan):
    """A plan whose arrays are those of transitions, for ranks that exchange them.

    Args:
        view: the transitions.
        plan: the fields that are gathered, and the kind of arrays.
        seed: of the strategy, which goals are drawn by.
    """

    def __init__(self, view: TransitionPlan, plan: FetchPlan, seed: int) -> None:
        self._arrays = view.arrays()
        super().__init__(plan.store, list(plan.names), plan.windows, True, plan.output, plan.threads)
        self.names = list(self._arrays)
        self.places = {name: place for place, name in enumerate(self.names)}
        self._view = view
        self._seed = seed

    def of_fields(self, names: Sequence[str]) -> FetchPlan:
        """See `FetchPlan`: the same, or for a rank that gets nothing a plan of no fields."""
        if list(names) == self.names:
            return self
        if names:
            raise ArgumentError("a view is handed out as a whole, to every rank that gets fields")
        return FetchPlan(self.store, [], Windows(self._view.frame_stack), True, self.output, self.threads)

    def shape(self, name: str, n: int) -> tuple[int, ...]:
        """See `FetchPlan`."""
        return (n, *self._arrays[name][0])

    def raw_dtype(self, name: str) -> np.dtype[Any]:
        """See `FetchPlan`."""
        return self._arrays[name][1]

    def schema(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """See `FetchPlan`."""
        return {name: (self.shape(name, 1), str(self.raw_dtype(name))) for name in self.names}

    def empty(self, n: int) -> list[NDArray[Any]]:
        """See `FetchPlan`."""
        sizes = [round_up(n * self.row_bytes(name)) for name in self.names]
        memory = _native.pooled_bytes(sum(sizes))
        made, at = [], 0
        for name, size in zip(self.names, sizes, strict=True):
            shape, dtype = self.shape(name, n), self.raw_dtype(name)
            made.append(memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape))
            at += size
        return made

    def mask(self, starts: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.bool_]:
        """See `FetchPlan`: of the frames of observations."""
        frames = self._view.frame_stack
        mask: NDArray[np.bool_] = np.arange(frames) >= frames - counts[:, None]
        return mask

    def anchors(self, starts: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.uint32]:
        """See `FetchPlan`: the transitions' steps."""
        return starts.astype(np.uint32)

    def gather(
        self,
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        steps: NDArray[np.int32],
        out: list[Any],
        places: NDArray[np.uint32],
        draws: ReadDraws,
        room: int,
    ) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
        """Copies transitions to their places in arrays for `room` rows, and reports torn rows.

        Returns:
            For each row: whether it is torn, its length, the transition's step, real frames, and its version.
        """
        torn, starts, lengths, frames, versions = _native.gather_transitions(
            self.store.native,
            self._view.native,
            self.numbers,
            rows,
            generations,
            steps.astype(np.uint32),
            places,
            draws.numbers,
            self._seed,
            draws.step,
            draws.attempt,
            self.threads,
            room,
            out,
        )
        return torn, lengths, starts, frames, versions

    def batch(
        self,
        raw: FetchedRows,
        keys: Keys,
        probability: NDArray[np.float64] | None = None,
        importance_weights: NDArray[np.float64] | None = None,
        step: int | None = None,
    ) -> Batch:
        """See `FetchPlan`. With hindsight the consumer's functions are called here."""
        shown = self._view.shown_of(dict(zip(self.names, raw.arrays, strict=True)))
        self._view.settle(shown)
        fields = {name: self._view.as_field(name, shown.field(place)) for name, place in self._view.places.items()}
        metadata: list[Any] = [raw.mask, raw.starts, raw.lengths, raw.versions, probability, importance_weights]
        metadata = [None if array is None else self.as_output(array) for array in metadata]
        mask, start, length, version, probability, importance_weights = metadata
        return Batch(fields, keys, mask, start, length, version, probability, importance_weights, step)


__all__ = ["ReadDraws", "TransitionRows"]
