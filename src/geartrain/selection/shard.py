"""`Shard` and `ShardedDraw`: one rank's view of the shards, and of a batch drawn from all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from geartrain.selection.strategy import Candidates

# Where a row is unknown: another shard's, or one that changed under the draw and is to be drawn again.
NO_ROW = np.uint32(0xFFFFFFFF)
NO_ROWS = np.empty(0, np.uint32)


class StepPlan(NamedTuple):
    """Which steps of a row can be drawn, as the native layer takes it (native/selection/selection.h, DrawPlan).

    `max_steps`: rows are drawn in proportion to their steps, of so many at most; 0 where steps are drawn by priority.
    `need` and `skip`: steps at a row's end and at its beginning that do not count. `stride`: of the others every so
    many-th does. `before` and `after`: steps that a step needs around it, where rows repeat steps of the row before, so
    that it is drawn from the row that has them (native/selection/row_repeats.h); `after` is 0 elsewhere. `shift`: from
    the number that is drawn over steps to the step.
    """

    max_steps: int
    need: int
    skip: int
    stride: int
    before: int = 0
    after: int = 0
    shift: int = 0


@dataclass(frozen=True)
class Shard:
    """This rank's shard, and the data that is known of the other shards.

    Attributes:
        candidates: the shard's rows.
        number, count: number of this shard, and number of shards.
        gather: takes this shard's array and returns every shard's, (count, ...), in their order. Only the array of the
            shard's leader counts.
        leads: whether this rank leads the shard.
        tell: takes the leader's array and returns it on all ranks of the shard.
        exact: whether ranks may only read rows that the leader has found. That is so if the store limits how often rows
            are sampled, because rows then vanish as they are drawn.
        totals: `total_of` on the leader of every shard, (count,), if that is known already.
        offers: `offer_of` on the leader of every shard, (count, ...), if that is known already.
        steps: the steps that count, if draws are over steps or by their priorities; None if rows are drawn.
        min_length: shorter rows are not drawn.
        moves_on: whether an order with a cursor passes over rows before it. Not where rows are freed by their draw:
            then rows that can be drawn late come first.
        first_open: in a strict order, called with a number of rows for the sequence number of the shard's first row
            that cannot be drawn yet, or of one that so many rows come before.
    """

    candidates: Candidates
    number: int
    count: int
    gather: Callable[[NDArray[Any]], NDArray[Any]]
    leads: bool = True
    tell: Callable[[NDArray[Any]], NDArray[Any]] = lambda array: array
    exact: bool = False
    totals: NDArray[np.uint64] | None = None
    offers: NDArray[np.uint64] | None = None
    steps: StepPlan | None = None
    min_length: int = 0
    moves_on: bool = True
    first_open: Callable[[int], int] | None = None


@dataclass(frozen=True)
class ShardedDraw:
    """A batch as one rank knows it: arrays (n,), in the order of draws.

    Attributes:
        shard: int64, whose row each is; the same on all ranks.
        rows, generations: uint32; of this rank's shard only, NO_ROW elsewhere.
        probability: float64, of the row in one draw with replacement; of this rank's shard only, 0 elsewhere.
        state: what the strategy has to know at its next step; the same on all ranks.
        steps: uint32, the step that was drawn, where steps are drawn by their priorities, or over the steps of rows of
            several episodes; where a pass is over steps, which element of its row each is. Of this rank's shard only;
            None where rows are drawn.
        share: of the total that is this rank's shard's; what a probability within the shard is multiplied with.
        rounds: int64, how often each was drawn again because its row had no sample left; the same on all ranks. None
            where none was.
    """

    shard: NDArray[np.int64]
    rows: NDArray[np.uint32]
    generations: NDArray[np.uint32]
    probability: NDArray[np.float64]
    state: dict[str, int] = field(default_factory=dict)
    share: float = 1.0
    steps: NDArray[np.uint32] | None = None
    rounds: NDArray[np.int64] | None = None


class ShardedStrategy(Protocol):
    """A strategy of a user's that can draw from several shards."""

    def select_shards(self, shard: Shard, n: int, step: int, *, state: Mapping[str, int] | None) -> ShardedDraw:
        """Chooses the `n` rows of a step from all shards."""
        ...
