"""Rows of one batch as the stores' limiters count them.

Rate limiters have admitted them: if the batch is not delivered, they are given back. In stores with tasks they are in
flight until the batch is finished.
"""

from __future__ import annotations

from typing import Protocol


class Admitting(Protocol):
    """A store whose rate limiter admits rows; see `StoreWaits`."""

    def give_back(self, n: int) -> None:
        """Tells the rate limiter that n of the rows that it admitted are not drawn."""
        ...

    def finish(self, n: int) -> None:
        """Tells the store that the batch of n rows is finished, whose last samples it had."""
        ...


class Admission(dict[Admitting, int]):
    """Rows that rate limiters have admitted for one batch, by store: kept with the batch, or given back.

    with Admission() as admission:  # gives back where this raises
        rows, state = sampler.sample(n, step, state, admission)
        return BuiltBatch(rows, state, admission=admission)
    """

    __slots__ = ("used_up",)

    def __init__(self) -> None:
        super().__init__()
        self.used_up: dict[Admitting, int] = {}  # rows whose last samples were drawn, by store

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
        self.finish()

    def finish(self) -> None:
        """The batch's rows are in flight no more. A second time there is nothing left."""
        while self.used_up:
            store, n = self.used_up.popitem()
            store.finish(n)

    def __enter__(self) -> Admission:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self.give_back()


__all__ = ["Admission", "Admitting"]
