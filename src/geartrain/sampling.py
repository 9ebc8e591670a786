"""One store's part of a batch: choose rows, count them, place their windows, copy them; again for what was lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain import _native
from geartrain.errors import CorruptStoreError, NotEnoughRowsError, TurnoverError
from geartrain.fetch import Plan, Raw
from geartrain.keys import Keys
from geartrain.selection import Again, Candidates, Drawn, Strategy, Weighted

# A draw that loses its row this often in a row is drawing from a store that turns over faster than it can be read.
MAX_ATTEMPTS = 64


@dataclass(frozen=True)
class Sample:
    """Rows that were chosen and copied whole."""

    keys: Keys
    raw: Raw
    probability: NDArray[np.float64]
    importance: NDArray[np.float64] | None
    state: dict[str, int]


class Sampler:
    """Draws from one store by one strategy and fetches by one plan."""

    def __init__(self, plan: Plan, strategy: Strategy, min_rows: int) -> None:
        self.plan = plan
        self.strategy = strategy
        self.min_rows = min_rows
        self.redrawn = 0
        store = plan.store
        self._candidates = Candidates.of_store(store.native, store.column)
        self._expires = store.options["max_age_s"] is not None
        self._limited = store.options["max_times_sampled"] is not None
        # Rows that stand or fall together (a group), and so are replaced together.
        self._atom = int(getattr(strategy, "atom", 1))

    def sample(self, n: int, step: int, state: dict[str, int], out: list[Any] | None = None) -> Sample:
        """The `n` rows of a step, into `out` or into recycled memory."""
        store = self.plan.store
        if self._expires:
            store.expire()
        if len(store) < self.min_rows:
            raise NotEnoughRowsError(
                f"{self.min_rows} selectable rows are asked for, the store {store.name!r} has {len(store)}"
            )
        count = len(store)
        drawn, raw = self._draw_and_fetch(n, step, state, None, out)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            lost = self._lost(raw)
            if lost.size == 0:
                break
            if attempt == MAX_ATTEMPTS:
                raise TurnoverError(
                    f"{lost.size} rows were overwritten before they could be copied, {MAX_ATTEMPTS} times in a "
                    f"row; the store of {store.capacity} rows is too small for the rate of inserts"
                )
            self.redrawn += int(lost.size)
            kept = np.delete(drawn.rows, lost)
            again, fetched = self._draw_and_fetch(
                n, step, drawn.state, Again(attempt, lost.astype(np.uint32), kept), None
            )
            raw.put(lost, fetched)
            drawn.rows[lost] = again.rows
            drawn.generations[lost] = again.generations
            drawn.probability[lost] = again.probability
            drawn = Drawn(drawn.rows, drawn.generations, drawn.probability, state=again.state)
        importance = None
        if isinstance(self.strategy, Weighted):
            importance = self.strategy.importance(drawn.probability, count, step)
        return Sample(Keys(drawn.rows, drawn.generations), raw, drawn.probability, importance, drawn.state)

    def _lost(self, raw: Raw) -> NDArray[np.intp]:
        if self._atom == 1:
            return np.flatnonzero(raw.torn)
        whole = raw.torn.reshape(-1, self._atom).any(1)
        return np.flatnonzero(np.repeat(whole, self._atom))

    def _draw_and_fetch(
        self, n: int, step: int, state: dict[str, int], again: Again | None, out: list[Any] | None
    ) -> tuple[Drawn, Raw]:
        store = self.plan.store
        drawn = self.strategy.select(self._candidates, n, step, state=state or None, again=again)
        if drawn.failed:
            # Sums that disagree with their leaves: somebody died in the middle of an update. Repair, then redraw.
            store.reap()
            drawn = self.strategy.select(self._candidates, n, step, state=state or None, again=again)
            if drawn.failed:
                store.native.rebuild()  # or somebody living is in the middle of one: this waits for them
                drawn = self.strategy.select(self._candidates, n, step, state=state or None, again=again)
            if drawn.failed:
                raise CorruptStoreError(f"{drawn.failed} draws found no row; store.audit() tells what is wrong")
        taken = store.native.count_samples(drawn.rows, drawn.generations)
        ends = None
        if self.plan.window:
            numbers = np.arange(n, dtype=np.uint32) if again is None else again.numbers
            attempt = 0 if again is None else again.attempt
            lengths = store.native.lengths(drawn.rows)
            ends = _native.window_ends(self.strategy.seed, step, attempt, numbers, lengths)
        raw = self.plan.fetch(drawn.rows, drawn.generations, ends, out)
        if out is not None:
            raw = raw._replace(arrays=out)
        if self._limited:
            store.native.release_spent(drawn.rows, drawn.generations)
            raw.torn[taken == 0] = 1  # somebody else drew its last allowed sample first
        return drawn, raw
