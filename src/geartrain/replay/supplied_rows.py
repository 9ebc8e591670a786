"""Rows of a batch that a Python strategy chooses.

Native code calls back for the rows, and does the rest of the sampling with them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from geartrain.selection.strategy import Draw, Redraw

#: Rows and generations (k,), probabilities (k,), and the steps (k,) that were drawn with them, or None; and whether
#: these are all rows of the batch, of another size than before (native/fetch/batch_sampler.h, Supplier::Rows).
Chosen = tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.float64], NDArray[np.uint32] | None, bool]


#: `StoreSampler.draw`.
Select = Callable[[int, int, dict[str, int], Redraw | None], Draw]


class SuppliedRows(Protocol):
    """Chooses the rows of one batch.

    Called once for all draws of the batch, and in each further round for those whose rows were lost before they could
    be copied: with their numbers (k,), and the rows that stay.
    """

    @property
    def state(self) -> dict[str, int]:
        """The strategy's state after the batch."""
        ...

    @property
    def draw(self) -> Draw | None:
        """What importance weights are asked for; None where there are none."""
        ...

    def __call__(self, round: int, numbers: NDArray[np.uint32], kept: NDArray[np.uint32], /) -> Chosen:
        """The rows of a round, 0 for the first."""
        ...


class StrategyRows:
    """Rows that a strategy's own `select` chooses. See `SuppliedRows`.

    Args:
        select: asks the strategy.
        n, step, state: of the batch.
    """

    draw: Draw

    def __init__(
        self,
        select: Select,
        n: int,
        step: int,
        state: dict[str, int],
    ) -> None:
        self._select = select
        self._n = n
        self._step = step
        self.state = state

    def __call__(self, round: int, numbers: NDArray[np.uint32], kept: NDArray[np.uint32], /) -> Chosen:
        redraw = Redraw(round, numbers, kept) if round else None
        drawn = self._select(self._n, self._step, self.state, redraw)
        self.draw = drawn if redraw is None else self.draw.with_redrawn(numbers, drawn)
        self.state = drawn.state
        return drawn.rows, drawn.generations, drawn.probability, None, False


__all__ = ["Chosen", "StrategyRows", "SuppliedRows"]
