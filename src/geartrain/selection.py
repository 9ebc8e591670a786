"""Which rows make a batch: strategies that are plain functions of arrays, a seed and a step.

A strategy holds nothing but its settings. Everything random comes from Philox counters keyed by (seed, step,
draw number), so the same candidates, seed and step give the same rows on any machine, and a resumed run draws
what the uninterrupted one would have (Salmon et al., 2011; GEAR, section 3.3).

Weights are fixed-point integers summed in 64 bits: exact, whatever their number and order.

Example:
    >>> import numpy as np
    >>> from geartrain.selection import Candidates, Weighted
    >>> drawn = Weighted(seed=7).select(Candidates(np.array([0, 1, 3], np.uint32)), n=1000, step=0)
    >>> sorted(set(drawn.rows.tolist()))
    [1, 2]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from geartrain._native import Candidates
from geartrain.errors import SchemaError

MAX_DRAWS = 2**32 - 1


@dataclass(frozen=True)
class Drawn:
    """What a strategy chose: arrays (n,).

    rows and generations (uint32) name the rows; probability (float64) is that of the row in one draw; `failed`
    counts draws that found the sums and the weights at odds, which only a store in need of repair causes.
    """

    rows: NDArray[np.uint32]
    generations: NDArray[np.uint32]
    probability: NDArray[np.float64]
    failed: int


@runtime_checkable
class Strategy(Protocol):
    """What `Replay` asks of a selection strategy."""

    @property
    def seed(self) -> int:
        """Of everything it draws."""
        ...

    def select(
        self,
        candidates: Candidates,
        n: int,
        step: int,
        *,
        attempt: int = 0,
        numbers: NDArray[np.uint32] | None = None,
    ) -> Drawn:
        """Draws `n` rows for this step.

        `numbers` are the draw numbers, 0..n-1 by default. A draw whose row was lost before it could be read
        is asked for again under its number with the next `attempt`.
        """
        ...


@dataclass(frozen=True)
class Uniform:
    """Every selectable row with the same probability, with replacement.

    Cost: one cache miss per level of a tree over one bit per row.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        _check_seed(self.seed)

    def select(
        self,
        candidates: Candidates,
        n: int,
        step: int,
        *,
        attempt: int = 0,
        numbers: NDArray[np.uint32] | None = None,
    ) -> Drawn:
        """Draws `n` rows; see `Strategy.select`. Raises `EmptyStoreError` when there is none."""
        return Drawn(*candidates.draw_uniform(self.seed, step, attempt, _numbers(n, numbers)))


@dataclass(frozen=True)
class Weighted:
    """Rows in proportion to their weights, with replacement.

    A row with weight 0 is never drawn. Cost: one cache miss per level of the sum tree.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        _check_seed(self.seed)

    def select(
        self,
        candidates: Candidates,
        n: int,
        step: int,
        *,
        attempt: int = 0,
        numbers: NDArray[np.uint32] | None = None,
    ) -> Drawn:
        """Draws `n` rows; see `Strategy.select`. Raises `EmptyStoreError` when all weights are 0."""
        return Drawn(*candidates.draw_weighted(self.seed, step, attempt, _numbers(n, numbers)))


def _numbers(n: int, numbers: NDArray[np.uint32] | None) -> NDArray[np.uint32]:
    if numbers is not None:
        return numbers
    if not 0 < n <= MAX_DRAWS:
        raise SchemaError(f"1 to {MAX_DRAWS} rows can be drawn at once, found {n}")
    return np.arange(n, dtype=np.uint32)


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**64:
        raise SchemaError(f"a seed is a whole number from 0 to 2**64 - 1, found {seed}")


__all__ = ["Candidates", "Drawn", "Strategy", "Uniform", "Weighted"]
