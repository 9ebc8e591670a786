"""Admission of a batch's rows by the rate limiters of its stores, which is given back where nobody gets the batch."""

from __future__ import annotations

from collections.abc import Sequence

from geartrain.replay.sampler import StoreSampler


class Admission:
    """Rows of one batch that the rate limiters of its stores have admitted.

    Args:
        samplers: of the stores.

    Attributes:
        rows: of each store.
    """

    def __init__(self, samplers: Sequence[StoreSampler]) -> None:
        self.rows = [0] * len(samplers)
        self._samplers = samplers

    def keep(self, number: int, n: int) -> None:
        """Gives back what a store has admitted beyond n rows."""
        given = max(0, self.rows[number] - n)
        self.rows[number] -= given
        self._samplers[number].give_back(given)

    def give_back(self) -> None:
        """Gives all of it back; a second time there is nothing left."""
        for number in range(len(self.rows)):
            self.keep(number, 0)


def give_back(samplers: Sequence[StoreSampler], rows: Sequence[int]) -> None:
    """Tells the stores' rate limiters that so many rows of each were admitted for a batch that nobody gets."""
    for sampler, n in zip(samplers, rows, strict=True):
        sampler.give_back(n)


__all__ = ["Admission", "give_back"]
