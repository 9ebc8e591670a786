"""Rows of `Epochs` passes over one store, for the batches of a replay."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from geartrain.replay.fetch_plan import FetchPlan
from geartrain.replay.supplied_rows import Chosen
from geartrain.replay.transitions import TransitionPlan
from geartrain.selection.epochs import Epochs, Taken
from geartrain.selection.shard import Shard, ShardedDraw
from geartrain.selection.strategy import Candidates


class Passes:
    """Takes the next rows, or steps, of passes over a store.

    Args:
        strategy: the passes.
        plan, transitions: the windows or transitions that batches hold.
        candidates: the store's rows.
        mixed: whether these rows fill part of a mixture's batches, and continue from pass to pass.
    """

    def __init__(
        self,
        strategy: Epochs,
        plan: FetchPlan,
        transitions: TransitionPlan | None,
        candidates: Candidates,
        mixed: bool,
    ) -> None:
        self.strategy = strategy
        self.plan = plan
        self.transitions = transitions
        self.mixed = mixed
        self.alone = Shard(candidates, 0, 1, lambda array: array[None])

    def take(self, shard: Shard, n: int, state: dict[str, int], of_batch: int | None = None) -> Taken:
        """The next n rows or steps of a pass, fewer at its end; see `Epochs.take`."""
        row_steps = self.plan.store.max_length if self.strategy.over == "steps" else 0
        need, stride, episodes, needs = 1, 1, False, (0, 0, 0)
        windows = self.plan.windows
        repeats = row_steps != 0 and shard.candidates.native.repeats_steps
        if self.transitions is None:
            need, stride = (0, 1) if windows is None else (windows.need, windows.stride if row_steps else 1)
            episodes = row_steps != 0 and windows is not None and windows.at == "episode"
            if repeats and windows is not None:
                needs = windows.needs
        elif repeats:
            needs = self.transitions.view.needs
        return self.strategy.take(
            shard,
            n,
            state,
            row_steps=row_steps,
            need=need,
            stride=stride,
            episodes=episodes,
            needs=needs,
            of_batch=of_batch,
            same_n=not self.mixed,
        )

    def take_on(self, shard: Shard, n: int, state: dict[str, int]) -> Taken:
        """The next n rows of a pass and of those after it; over several ranks collective, and alike on all."""
        taken = self.take(shard, n, state)
        while len(taken.rows) < n:
            more = self.take(shard, n - len(taken.rows), taken.state)
            taken = Epochs.joined(taken, np.arange(len(taken.rows)), more)
        return taken

    def draw(self, shard: Shard, n: int, state: dict[str, int]) -> ShardedDraw:
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

    def chosen(self, taken: Taken, *, anew: bool = False) -> Chosen:
        """The rows as a batch takes them, with the anchors of windows if the pass is over steps."""
        rows, generations, steps = taken.rows, taken.generations, None
        if self.strategy.over == "steps":
            windows = self.plan.windows
            steps = taken.steps
            if self.transitions is None and windows is not None:
                steps = windows.anchors_of(self.plan.store.native.lengths(rows), steps)
        return rows, generations, np.ones(len(rows)), steps, anew


class PassRows:
    """The rows of one batch: the next n of a pass, or fewer at its end. See `SuppliedRows`.

    A row that is lost between being taken and being copied is skipped, like one that was gone before. The next of the
    pass takes its place; at the end of the pass the batch gets smaller.
    """

    draw = None

    def __init__(self, passes: Passes, n: int, state: dict[str, int]) -> None:
        self._passes = passes
        self._n = n
        self._before = state
        self._taken: Taken | None = None

    @property
    def state(self) -> dict[str, int]:
        return self._before if self._taken is None else self._taken.state

    def __call__(self, round: int, lost: NDArray[np.uint32], kept: NDArray[np.uint32]) -> Chosen:
        if self._taken is None:
            return self._all_of(self._take(self._n, self._before))
        taken = self._taken
        here = np.delete(np.arange(len(taken.rows)), lost)
        more = self._take(len(lost), taken.rest | {"given": taken.rest["given"] - len(lost)}, self._n)
        joined = Epochs.joined(taken, here, more)
        if len(more.rows) < len(lost):
            return self._all_of(joined)
        order = np.argsort(np.concatenate([here, lost]))  # each further row where the lost one was
        self._taken = joined._replace(
            shard=joined.shard[order],
            rows=joined.rows[order],
            generations=joined.generations[order],
            steps=joined.steps[order],
        )
        return self._passes.chosen(more)

    def _all_of(self, taken: Taken) -> Chosen:
        """These rows as the whole batch; those of the next pass where too few are left of this one."""
        while not len(taken.rows) or (self._passes.strategy.drop_last and len(taken.rows) < self._n):
            taken = self._take(self._n, taken.state | {"dropped": taken.state["dropped"] + len(taken.rows)})
        self._taken = taken
        return self._passes.chosen(taken, anew=True)

    def _take(self, n: int, state: dict[str, int], of_batch: int | None = None) -> Taken:
        return self._passes.take(self._passes.alone, n, state, of_batch)


class MixedPassRows:
    """The rows of one store's part of a mixture's batch: where a pass ends the next one goes on. See `SuppliedRows`.

    A row that is lost between being taken and being copied is skipped; the next one takes its place.
    """

    draw = None

    def __init__(self, passes: Passes, n: int, state: dict[str, int]) -> None:
        self._passes = passes
        self._n = n
        self.state = state

    def __call__(self, round: int, lost: NDArray[np.uint32], kept: NDArray[np.uint32]) -> Chosen:
        if round:
            self.state = self.state | {"skipped": self.state.get("skipped", 0) + len(lost)}
        taken = self._passes.take_on(self._passes.alone, len(lost), self.state)
        self.state = taken.state
        return self._passes.chosen(taken)


__all__ = ["MixedPassRows", "PassRows", "Passes"]
