"""Passes over one store: what `StoreSampler` is for other strategies, for `Epochs`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.replay.fetch_plan import FetchPlan
from geartrain.replay.sampler import StoreSampler
from geartrain.replay.transitions import TransitionPlan
from geartrain.selection.epochs import Epochs, Taken
from geartrain.selection.shard import Shard, ShardedDraw


class PassSampler(StoreSampler):
    """Takes the next rows, or steps, of passes over a store and fetches them by one plan.

    Args:
        strategy: the passes.
        mixed: batches are a mixture's, of which this fills a part, going on from pass to pass.
    """

    strategy: Epochs

    def __init__(
        self,
        plan: FetchPlan,
        strategy: Epochs,
        min_rows: int,
        timeout_s: float = 60.0,
        stopping: Callable[[], bool] | None = None,
        transitions: TransitionPlan | None = None,
        mixed: bool = False,
    ) -> None:
        super().__init__(plan, strategy, min_rows, timeout_s, stopping, transitions)
        self.mixed = mixed

    def sample_into(
        self, batch: _native.SampledBatch, first: int, n: int, step: int, state: dict[str, int]
    ) -> dict[str, int]:
        """Fills a part of a mixture's batch: where a pass ends the next one goes on.

        A row that is lost between being taken and being copied is skipped; the next one takes its place.
        """
        self.wait_to_draw(n)
        try:
            self.expire()
            self.check_count(len(self.plan.store))
            self.stage = "drawing and copying rows"
            numbers = np.arange(n, dtype=np.uint32)
            torn, attempt = batch.torn()[first : first + n], 0
            while True:
                taken = self.take_on(self._shard, len(numbers), state)
                state, rows, generations = taken.state, taken.rows, taken.generations
                steps = self._steps_of(rows, generations, taken.steps, numbers, step, attempt)
                self.batch_sampler.gather(
                    batch, first, n, numbers, rows, generations, np.ones(len(rows)), step, attempt, steps
                )
                lost = np.flatnonzero(torn)
                if not len(lost):
                    return state
                attempt += 1
                self.note_lost(len(lost), attempt)
                state = state | {"skipped": state.get("skipped", 0) + len(lost)}
                numbers = lost.astype(np.uint32)
        except BaseException:
            self.give_back(n)
            raise
        finally:
            self.stage = "idle"

    def sample_pass(self, n: int, step: int, state: dict[str, int]) -> tuple[_native.SampledBatch, dict[str, int]]:
        """The next batch of a pass, of n rows or fewer at its end, and the strategy's state after it.

        A row that is lost between being taken and being copied is skipped like one that was gone before: the next of
        the pass takes its place, and at the end of the pass the batch gets smaller.
        """
        self.wait_to_draw(n)
        given = 0
        try:
            self.expire()
            self.check_count(len(self.plan.store))
            self.stage = "drawing and copying rows"
            batch, state = self._sample_pass(n, step, state)
            given = len(batch)
            return batch, state
        finally:
            if given < n:
                self.give_back(n - given)
            self.stage = "idle"

    def _sample_pass(self, n: int, step: int, state: dict[str, int]) -> tuple[_native.SampledBatch, dict[str, int]]:
        taken = self._take(n, state)
        attempt = 0
        while True:
            if not len(taken.rows) or (self.strategy.drop_last and len(taken.rows) < n):  # so many of its end went
                state = taken.state | {"dropped": taken.state["dropped"] + len(taken.rows)}
                taken = self._take(n, state)
                continue
            size = len(taken.rows)
            batch, numbers = self.empty_batch(size), np.arange(size, dtype=np.uint32)
            while True:
                here = numbers.astype(np.intp)
                rows, generations = taken.rows[here], taken.generations[here]
                steps = self._steps_of(rows, generations, taken.steps[here], numbers, step, attempt)
                self.batch_sampler.gather(
                    batch, 0, size, numbers, rows, generations, np.ones(len(here)), step, attempt, steps
                )
                lost = np.flatnonzero(batch.torn())
                if not len(lost):
                    return batch, taken.state
                attempt += 1
                self.note_lost(len(lost), attempt)
                taken, numbers = self._without(taken, lost, n)
                if len(taken.rows) < size:
                    break  # the pass has no more; what is left is copied into a smaller batch

    @property
    def _shard(self) -> Shard:
        return Shard(self.candidates, 0, 1, lambda array: array[None])

    def take_on(self, shard: Shard, n: int, state: dict[str, int]) -> Taken:
        """The next n rows of a pass and of those after it; over several ranks collective, and alike on all."""
        taken = self.take(shard, n, state)
        while len(taken.rows) < n:
            more = self.take(shard, n - len(taken.rows), taken.state)
            taken = Epochs.joined(taken, np.arange(len(taken.rows)), more)
        return taken

    def draw_pass(self, shard: Shard, n: int, state: dict[str, int]) -> ShardedDraw:
        """The next rows of a pass over all shards: n, or fewer at its end unless these are a mixture's."""
        if self.mixed:
            taken = self.take_on(shard, n, state)
        else:
            taken = self.take(shard, n, state)
            while not len(taken.rows):  # the rest of the pass went since the batch before
                taken = self.take(shard, n, taken.state)
        probability = np.where(taken.shard == shard.number, 1.0, 0.0)
        steps = taken.steps if self.strategy.over == "steps" else None
        return ShardedDraw(taken.shard, taken.rows, taken.generations, probability, taken.state, steps=steps)

    def _take(self, n: int, state: dict[str, int], of_batch: int | None = None) -> Taken:
        return self.take(self._shard, n, state, of_batch)

    def take(self, shard: Shard, n: int, state: dict[str, int], of_batch: int | None = None) -> Taken:
        """The next n rows or steps of a pass, fewer at its end; see `Epochs.take`."""
        row_steps = self.plan.store.max_length if self.strategy.over == "steps" else 0
        need, stride, episodes = 1, 1, False
        if self.transitions is None:
            windows = self.plan.windows
            need, stride = (0, 1) if windows is None else (windows.need, windows.stride if row_steps else 1)
            episodes = row_steps != 0 and windows is not None and windows.at == "episode"
        return self.strategy.take(
            shard,
            n,
            state,
            row_steps=row_steps,
            need=need,
            stride=stride,
            episodes=episodes,
            of_batch=of_batch,
            same_n=not self.mixed,
        )

    def _steps_of(
        self,
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        elements: NDArray[np.uint32],
        numbers: NDArray[np.uint32],
        step: int,
        attempt: int,
    ) -> NDArray[np.uint32] | None:
        """The steps that windows of a pass are told by; None where they are drawn natively, and for whole rows."""
        if self.strategy.over == "rows":
            return self.asked(step, attempt, numbers, rows, generations)
        windows = self.plan.windows
        if self.transitions is not None or windows is None:
            return elements
        return windows.anchors_of(self.plan.store.native.lengths(rows), elements)

    def _without(self, taken: Taken, lost: NDArray[np.intp], n: int) -> tuple[Taken, NDArray[np.uint32]]:
        """Further rows of the pass in the place of lost ones, as far as there are any, and their numbers.

        Where there are fewer, what is left is one after the other, and all of it is to be copied anew.
        """
        kept = np.delete(np.arange(len(taken.rows)), lost)
        rest = taken.rest | {"given": taken.rest["given"] - len(lost)}
        more = self._take(len(lost), rest, n)
        if len(more.rows) < len(lost):
            return Epochs.joined(taken, kept, more), taken.rows[:0]
        order = np.argsort(np.concatenate([kept, lost]))  # each further row where the lost one was
        joined = Epochs.joined(taken, kept, more)
        return joined._replace(
            shard=joined.shard[order],
            rows=joined.rows[order],
            generations=joined.generations[order],
            steps=joined.steps[order],
        ), lost.astype(np.uint32)


__all__ = ["PassSampler"]
