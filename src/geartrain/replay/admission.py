"""Rows that the stores' rate limiters have admitted for one batch.

If the batch is not delivered, the admitted rows are given back to the rate limiters.
"""

from __future__ import annotations

from typing import Protocol


class Admitting(Protocol):
    """A store whose rate limiter admits rows; see `StoreWaits`."""

    def give_back(self, n: int) -> None:
        """Tells the rate limiter that n of the rows that it admitted are not drawn."""
        ...


class Admission(dict[Admitting, int]):
    """Rows that rate limiters have admitted for one batch, by store: kept with the batch, or given back.

    with Admission() as admission:  # gives back where this raises
        rows, state = sampler.sample(n, step, state, admission)
        return BuiltBatch(rows, state, admission=admission)
    """

    __slots__ = ()

    def keep(self, store: Admitting, n: int) -> None:
        """Gives back what the store's rate limiter has admitted beyond n rows."""
        beyond = self.get(store, 0) - n
        if beyond > 0:
            self[store] = n
            store.give_back(beyond)

    def give_back(self) -> None:
        """Gives back all of it. A second time there is nothing left."""
        while self:
            store, n = self.popitem()
            store.give_back(n)

    def __enter__(self) -> Admission:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self.give_back()


__all__ = ["Admission", "Admitting"]
