"""Random strategies: uniform and prioritized sampling, and importance weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.arguments import SEED, check_choice, checked
from geartrain.errors import ArgumentError
from geartrain.selection.declared import DeclaredStrategy
from geartrain.selection.schedule import Schedule, at_step, check_schedule
from geartrain.selection.strategy import Draw, Limits, Traits


@dataclass(frozen=True)
class Uniform(DeclaredStrategy):
    """Draws every row, or every step, with the same probability.

    With over="steps", every step of the store is as likely as any other, however long its episode is. A row is drawn in
    proportion to the steps that its view can start from: its length, or its length less one with `Transitions`.
    `batch.probability` is then NaN, because the total number of steps is not kept. Ranks and devices draw the same
    rows.

    Args:
        seed: seed of the random numbers, 0 to 2**64 - 1; by default `Replay` derives it from its own.
        replacement: whether a row may be in a batch twice.
        stratified: one draw from each n-th of the rows, which spreads a batch evenly over them.
        limits: rows that may be chosen.
        over: "rows" or "steps".

    Raises:
        ArgumentError: over="steps" without replacement, stratified or with limits.

    Cost: a cache miss a draw if few rows are missing, otherwise one for each level of a tree with one bit a row. Over
    steps this grows with `max_length` divided by the mean length.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> store = gt.Store.create({"x": gt.Field((), "int64")}, max_length=10, capacity=8)
        >>> _ = store.insert({"x": np.arange(20).reshape(2, 10)}, lengths=np.array([1, 10]))
        >>> uniform = gt.selection.Uniform(over="steps", seed=0)
        >>> with gt.Replay(store, uniform, batch_size=1000, window=1, output="numpy") as replay:
        ...     np.bincount(replay.sample()["x"].ravel() >= 10).tolist()  # the second row has ten of eleven steps
        [98, 902]
        >>> store.close()
    """

    seed: int | None = field(default=None, metadata=SEED)
    replacement: bool = True
    stratified: bool = False
    limits: Limits | None = None
    over: Literal["rows", "steps"] = field(default="rows", metadata=checked(check_choice, ("rows", "steps")))

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.traits  # refuses what does not go together

    @cached_property
    def traits(self) -> Traits:
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
    """Prioritized replay: draws rows in proportion to their priorities. A row with priority 0 is never drawn.

    Without replacement rows are drawn one after the other, each in proportion to its priority among those that are
    left.

    Args:
        seed: seed of the random numbers, 0 to 2**64 - 1; by default `Replay` derives it from its own.
        replacement: whether a row may be in a batch twice.
        stratified: one draw from each n-th of the total priority, which lowers the variance.
        alpha: exponent of prioritized replay (Schaul et al., 2016): `Replay.update_priorities` stores |priority| **
            alpha. A number, or a schedule of the step such as `Linear`. Each time a schedule has moved by 1 %, all
            priorities are rewritten once, outside of a batch.
        beta: exponent of the importance weights (N * probability) ** -beta, which are scaled so that a batch's largest
            is 1. A number or a schedule. None gives no importance weights.
        limits: rows that may be chosen.

    Cost: a cache miss for each level of the sum tree. Batches of thousands of rows skip its upper levels.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> store = gt.Store.create({"x": gt.Field((), "int64", per_row=True)}, capacity=8)
        >>> _ = store.insert({"x": np.arange(3)}, priorities=np.array([0.0, 1.0, 3.0]))
        >>> per = gt.selection.Prioritized(beta=0.4, seed=0)
        >>> with gt.Replay(store, per, batch_size=1000, prefetch=0, output="numpy") as replay:
        ...     batch = replay.sample()
        ...     _ = replay.update_priorities(batch.keys, np.ones(1000))  # your new TD errors
        >>> np.bincount(batch["x"]).tolist()
        [0, 262, 738]
        >>> store.close()
    """

    seed: int | None = field(default=None, metadata=SEED)
    replacement: bool = True
    stratified: bool = False
    alpha: Schedule = 1.0
    beta: Schedule | None = field(default=None, metadata=checked(check_schedule, 0))
    limits: Limits | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.traits  # refuses what does not go together

    @cached_property
    def traits(self) -> Traits:
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
        if self.beta is None:
            return None
        return importance_weights(draw.probability, count, at_step(self.beta, step), draw.lowest)


def importance_weights(
    probability: NDArray[np.float64], count: int, beta: float, lowest: float | None = None
) -> NDArray[np.float64]:
    """Importance weights of prioritized replay: (count * probability) ** -beta, scaled so that the largest is 1.

    Args:
        probability: (n,) float64, probability of each row in one draw.
        count: rows that could be drawn.
        beta: exponent; 1 corrects the whole bias.
        lowest: lowest probability of the whole batch, if these rows are a part of it; by default of these rows.

    Raises:
        ArgumentError: beta is negative or not finite.

    Examples:
        >>> import numpy as np
        >>> importance_weights(np.array([0.1, 0.4]), count=10, beta=0.5).tolist()
        [1.0, 0.5]
    """
    given = np.ascontiguousarray(probability, np.float64)
    return _native.importance_weights(given, count, checked_beta(beta), 0.0 if lowest is None else lowest)


def checked_beta(beta: float) -> float:
    """The beta; raises `ArgumentError` unless it is finite and not negative."""
    if not 0 <= beta < float("inf"):
        raise ArgumentError(f"beta is a finite number >= 0, found {beta}")
    return float(beta)


__all__ = ["Prioritized", "Uniform", "checked_beta", "importance_weights"]
