"""`Mixture`: draws each batch from several stores in fixed shares.

The file also derives the seeds of strategies that were created without one.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

import geartrain._native as _native
from geartrain.core.arguments import SEED, check_real, check_type, optional, shown
from geartrain.errors import ArgumentError
from geartrain.selection.strategy import Strategy

_MILLION = np.array([10**6], np.int32)
_Strategy = TypeVar("_Strategy", bound=Strategy)


class Mixture:
    """Draws each batch from several stores in fixed shares, such as 75 % offline and 25 % online.

    Pass it to `Replay` with a list of as many stores. The quotas of a batch add up to its size, and each differs from
    its share by less than one row. Their average over batches is exact.

    Args:
        shares: share of each store; they are scaled to add up to 1.
        strategies: strategy of each store.
        seed: seed of the rounding; by default `Replay` derives it from its own.

    Examples:
        >>> from geartrain.selection import Prioritized, Uniform
        >>> mixture = Mixture([0.75, 0.25], [Uniform(seed=0), Prioritized(seed=1)])
        >>> mixture.quotas(256, step=0)
        [192, 64]
    """

    def __init__(self, shares: Sequence[float], strategies: Sequence[Strategy], seed: int | None = None) -> None:
        from fractions import Fraction  # decimal comes with it: only mixtures pay for that

        optional(SEED, "seed", seed)
        for what, values in (("shares", shares), ("strategies", strategies)):
            is_list = isinstance(values, Sequence) and not isinstance(values, (str, bytes))
            if not is_list and not (isinstance(values, np.ndarray) and values.ndim == 1):
                raise ArgumentError(f"{what} are a list, one for each store, found {shown(values)}")
        if len(shares) != len(strategies) or not len(shares):
            raise ArgumentError(f"a mixture needs a strategy for each share, found {len(shares)} and {len(strategies)}")
        for strategy in strategies:
            check_type("a mixture is of strategies such as Uniform()", strategy, Strategy)
        given = [Fraction(check_real("each of the shares", share, 0)) for share in shares]
        if not sum(given):
            raise ArgumentError(f"shares are finite numbers >= 0 and not all 0, found {list(shares)}")
        exact = [share.limit_denominator(1_000_000) for share in given]
        if any(share and not rounded for share, rounded in zip(given, exact, strict=True)):  # all so small, or some
            exact = [(share / max(given)).limit_denominator(1_000_000) for share in given]
        self.shares = [share / sum(exact) for share in exact]
        self.strategies = list(strategies)
        self.seed = seed

    def quotas(self, n: int, step: int) -> list[int]:
        """Rows from each store in the batch of a step.

        Args:
            n: rows of the batch.
            step: number of the batch.
        """
        from fractions import Fraction

        # Whole parts first. What is left goes to stores by systematic sampling of the fractions: with one random
        # offset, a store gets one more row with exactly the probability of its fraction.
        random = _native.window_ends(self.seed or 0, step, 0, np.zeros(1, np.uint32), _MILLION)
        offset = Fraction(int(random[0]), 10**6)
        quotas, run = [], offset
        for share in self.shares:
            whole, part = divmod(share * n, 1)
            before, run = run, run + part
            quotas.append(int(whole) + int(run // 1 - before // 1))
        return quotas

    def __repr__(self) -> str:
        return f"Mixture({[float(share) for share in self.shares]}, {self.strategies}, seed={self.seed})"


Selection = Strategy | Mixture


def strategies_of(selection: Selection) -> list[Strategy]:
    """The strategy of each store."""
    return selection.strategies if isinstance(selection, Mixture) else [selection]


def quotas_of(selection: Selection, n: int, step: int) -> list[int]:
    """Rows from each store in the batch of a step, n in all."""
    return selection.quotas(n, step) if isinstance(selection, Mixture) else [n]


def with_seeds(selection: Selection, seed: int) -> Selection:
    """The selection with a seed wherever it names none.

    A strategy alone, and a mixture's rounding, get `seed` itself; store i of a mixture gets one of its own, mixed from
    `seed` and i, so that its draws have nothing to do with those of the others.

    Raises:
        ArgumentError: a strategy without a seed cannot be given one.
    """
    if not isinstance(selection, Mixture):
        return _with_seed(selection, seed)
    strategies = [_with_seed(each, derived_seed(seed, i)) for i, each in enumerate(selection.strategies)]
    seeded = with_strategies(selection, strategies)
    seeded.seed = seed if selection.seed is None else selection.seed
    return seeded


def with_strategies(mixture: Mixture, strategies: list[Strategy]) -> Mixture:
    """The mixture with other strategies in the places of its own."""
    other = copy.copy(mixture)
    other.strategies = strategies
    return other


def derived_seed(seed: int, place: int) -> int:
    """A seed for place 0, 1, 2, ... under one seed: number `place` of the SplitMix64 sequence that starts there.

    Example:
        >>> derived_seed(0, 0) == 0xE220A8397B1DCDAF
        True
    """
    x = (seed + (place + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _with_seed(strategy: _Strategy, seed: int) -> _Strategy:
    if strategy.seed is not None:
        return strategy
    if not dataclasses.is_dataclass(strategy):
        raise ArgumentError(
            f"{type(strategy).__name__} has no seed, and is no dataclass that Replay could make a copy of with one"
        )
    return dataclasses.replace(strategy, seed=seed)


__all__ = ["Mixture", "Selection", "derived_seed", "quotas_of", "strategies_of", "with_seeds", "with_strategies"]
