"""Random strategies: uniform and prioritized sampling, and importance weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.errors import ArgumentError
from geartrain.selection.declared import DeclaredStrategy
from geartrain.selection.schedule import Schedule, at_step, check_schedule
from geartrain.selection.strategy import Draw, Limits, Traits, check_seed


@dataclass(frozen=True)
class Uniform(DeclaredStrategy):
    """Every selectable row with the same probability, or every step.

    Over steps a row is drawn in proportion to the steps that its view can start from: its length, or with `Transitions`
    its length less one. So every step of the store is as likely as any other, however long its episode. The number of
    all steps is not kept, so `batch.probability` is NaN. Over ranks and on devices the same draws.

    Args:
        seed: of the random numbers, 0 to 2**64 - 1; by default `Replay` derives it from its own.
        replacement: whether a row may be in a batch twice.
        stratified: spread the draws of a batch evenly over the rows: one from each n-th of them.
        limits: rows that may be chosen.
        over: "rows" or "steps".

    Raises:
        ArgumentError: over="steps" without replacement, with strata or limits.

    Cost: a cache miss, the row's own, where few rows are missing, else one per level of a tree over one bit a row; over
    steps as many times that as `max_length` is longer than the rows on average, and a pass over the rows for a batch
    with a draw that was refused 63 times.
    """

    seed: int | None = None
    replacement: bool = True
    stratified: bool = False
    limits: Limits | None = None
    over: Literal["rows", "steps"] = "rows"

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if not isinstance(self.over, str) or self.over not in ("rows", "steps"):
            raise ArgumentError(f"over is 'rows' or 'steps', found {self.over!r}")
        _ = self.traits  # refuses what does not go together

    @cached_property
    def traits(self) -> Traits:
        """See `DeclaredStrategy`."""
        if self.over == "steps":
            return Traits(
                "random",
                over_steps=True,
                replacement=self.replacement,
                stratified=self.stratified,
                limits=self.limits,
            )
        return Traits("random", replacement=self.replacement, stratified=self.stratified, limits=self.limits)


@dataclass(frozen=True)
class Prioritized(DeclaredStrategy):
    """Rows in proportion to their priorities; a row with priority 0 is never drawn.

    Without replacement rows are drawn one after the other, each in proportion to its priority among those left.

    Args:
        seed: of the random numbers, 0 to 2**64 - 1; by default `Replay` derives it from its own.
        replacement: whether a row may be in a batch twice.
        stratified: one draw from each n-th of the total priority, which lowers the variance.
        alpha: alpha of prioritized replay (Schaul et al., 2016): `Replay.update_priorities` stores
            |priority| ** alpha. A number or a schedule of the step. A schedule is followed in steps of 1 % of its
            value: each rewrites all priorities once, no batch does.
        beta: of the importance weights (N * probability) ** -beta, scaled so that a batch's largest is 1. A number
            or a schedule of the step. None for no importance weights.
        limits: rows that may be chosen.

    Cost: a cache miss per level of the sum tree; batches of thousands of rows skip its upper levels.
    """

    seed: int | None = None
    replacement: bool = True
    stratified: bool = False
    alpha: Schedule = 1.0
    beta: Schedule | None = None
    limits: Limits | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.beta is not None:
            check_schedule("beta", self.beta)
        _ = self.traits  # refuses what does not go together

    @cached_property
    def traits(self) -> Traits:
        """See `DeclaredStrategy`."""
        return Traits(
            "random",
            by_priority=True,
            replacement=self.replacement,
            stratified=self.stratified,
            importance=self.beta is not None,
            alpha=self.alpha,
            limits=self.limits,
        )

    def importance_weights(self, draw: Draw, count: int, step: int) -> NDArray[np.float64] | None:
        """Importance weights of rows drawn from `count` selectable ones, the whole batch's largest being 1."""
        if self.beta is None:
            return None
        return importance_weights(draw.probability, count, at_step(self.beta, step), draw.lowest)


def importance_weights(
    probability: NDArray[np.float64], count: int, beta: float, lowest: float | None = None
) -> NDArray[np.float64]:
    """(count * probability) ** -beta, scaled so that the largest is 1.

    Args:
        probability: (n,) float64, of each row in one draw.
        count: rows that could be drawn.
        beta: how much of the bias is corrected; 1 for all of it.
        lowest: the lowest probability of the batch that these rows are a part of; of these rows by default.

    Raises:
        ArgumentError: beta is negative or not finite.
    """
    given = np.ascontiguousarray(probability, np.float64)
    return _native.importance_weights(given, count, checked_beta(beta), 0.0 if lowest is None else lowest)


def checked_beta(beta: float) -> float:
    """The beta; raises `ArgumentError` unless it is finite and not negative."""
    if not 0 <= beta < float("inf"):
        raise ArgumentError(f"beta is a finite number >= 0, found {beta}")
    return float(beta)


__all__ = ["Prioritized", "Uniform", "checked_beta", "importance_weights"]
