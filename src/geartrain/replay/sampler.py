"""One store's part of a batch: choose rows, count them, place their windows, copy them; again for what was lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError, CorruptStoreError, NotEnoughRowsError, TurnoverError
from geartrain.replay.fetch import FetchPlan, FetchedRows
from geartrain.selection.schedule import at_step
from geartrain.selection.strategy import Candidates, Draw, Redraw, Strategy, importance_of, seed_of, traits_of

# A draw that loses its row this often in a row is drawing from a store that turns over faster than it can be read.
MAX_ATTEMPTS = 64
# A schedule of the alpha is followed in steps of this share of its value.
ALPHA_STEP = 0.01


@dataclass(frozen=True)
class Sample:
    """Rows that were chosen and copied whole."""

    keys: Keys
    raw: FetchedRows
    probability: NDArray[np.float64]
    importance_weights: NDArray[np.float64] | None
    state: dict[str, int]


def alpha_at(strategy: Strategy, step: int) -> float:
    """The alpha that a strategy wants priorities to have at a step; raises `ArgumentError` unless it is above zero."""
    alpha = at_step(traits_of(strategy).alpha, step)
    if not 0 < alpha < float("inf"):
        raise ArgumentError(f"the alpha of priorities must be above zero and finite, found {alpha} at step {step}")
    return alpha


class StoreSampler:
    """Draws from one store by one strategy and fetches by one plan."""

    def __init__(self, plan: FetchPlan, strategy: Strategy, min_rows: int) -> None:
        self.plan = plan
        self.strategy = strategy
        self.min_rows = min_rows
        self.redrawn = 0
        self.alpha = alpha_at(strategy, 0)  # that the store's priorities are of
        store = plan.store
        self.candidates = Candidates.of_store(store.native, store.column)
        self._expires = store.options["max_age_s"] is not None
        self.limited = store.options["max_times_sampled"] is not None
        self.traits = traits_of(strategy)
        # Rows that stand or fall together (a group), and so are replaced together.
        self.atom = self.traits.atom
        # How long the store's rate limiter may make it wait, and what ends that early.
        self.patience_s = 60.0
        self.stopping: Callable[[], bool] | None = None

    def sample(self, n: int, step: int, state: dict[str, int], out: list[Any] | None = None) -> Sample:
        """The `n` rows of a step, into `out` or into recycled memory."""
        self.admit(n)
        try:
            return self._sample(n, step, state, out)
        except BaseException:
            self.plan.store.limiter.give_back(samples=n)
            raise

    def _sample(self, n: int, step: int, state: dict[str, int], out: list[Any] | None) -> Sample:
        self.expire()
        count = len(self.plan.store)
        self.check_count(count)
        drawn, raw = self._draw_and_fetch(n, step, state, None, out)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            lost = self.with_atoms(raw.torn)
            if lost.size == 0:
                break
            self.note_lost(lost.size, attempt)
            kept = np.delete(drawn.rows, lost)
            other, fetched = self._draw_and_fetch(
                n, step, drawn.state, Redraw(attempt, lost.astype(np.uint32), kept), None
            )
            raw.put(lost, fetched)
            drawn = drawn.with_redrawn(lost, other)
        importance_weights = importance_of(self.strategy, drawn, count, step)
        return Sample(Keys(drawn.rows, drawn.generations), raw, drawn.probability, importance_weights, drawn.state)

    # --- its steps, which drawing over several ranks takes one by one -----------------------------------------

    def admit(self, n: int) -> None:
        """Waits until the store's rate limiter lets so many rows be drawn."""
        self.plan.store.limiter.admit_samples(n, self.patience_s, self.stopping)

    def expire(self) -> None:
        """Removes rows that are too old, before they are counted."""
        if self._expires:
            self.plan.store.expire()

    def follow_exponent(self, step: int, *, apply: bool = True) -> None:
        """Raises the priorities to the alpha of the step, once it has moved by 1 %; or notes that another does."""
        wanted = alpha_at(self.strategy, step)
        if abs(wanted - self.alpha) > ALPHA_STEP * self.alpha:
            if apply:
                self.plan.store.raise_priorities(wanted / self.alpha)
            self.alpha = wanted

    def check_count(self, count: int) -> None:
        """Raises `NotEnoughRowsError` when so many selectable rows are too few."""
        if count < self.min_rows:
            raise NotEnoughRowsError(
                f"{self.min_rows} selectable rows are asked for, the store {self.plan.store.name!r} has {count}"
            )

    def note_lost(self, count: int, attempt: int) -> None:
        """Counts rows that have to be drawn again; raises `TurnoverError` when that does not end."""
        if attempt == MAX_ATTEMPTS:
            raise TurnoverError(
                f"{count} rows were overwritten before they could be copied, {MAX_ATTEMPTS} times in a row; the "
                f"store of {self.plan.store.capacity} rows is too small for the rate of inserts"
            )
        self.redrawn += int(count)

    def with_atoms(self, torn: NDArray[np.uint8]) -> NDArray[np.intp]:
        """The torn rows of whole atoms, and with each those that stand and fall with it."""
        if self.atom == 1:
            return np.flatnonzero(torn)
        whole = torn.reshape(-1, self.atom).any(1)
        return np.flatnonzero(np.repeat(whole, self.atom))

    def draw(self, n: int, step: int, state: dict[str, int], redraw: Redraw | None) -> Draw:
        """What the strategy chooses from this store, repaired first where its sums are at odds with its rows."""
        store = self.plan.store
        drawn = self.strategy.select(self.candidates, n, step, state=state or None, redraw=redraw)
        if drawn.failed:
            # Sums that disagree with their leaves: somebody died in the middle of an update. Repair, then redraw.
            store.reap()
            drawn = self.strategy.select(self.candidates, n, step, state=state or None, redraw=redraw)
            if drawn.failed:
                store.native.rebuild()  # or somebody living is in the middle of one: this waits for them
                drawn = self.strategy.select(self.candidates, n, step, state=state or None, redraw=redraw)
            if drawn.failed:
                raise CorruptStoreError(f"{drawn.failed} draws found no row; store.audit() tells what is wrong")
        return drawn

    def ends(
        self, step: int, attempt: int, numbers: NDArray[np.uint32], rows: NDArray[np.uint32]
    ) -> NDArray[np.int32] | None:
        """The last step of each draw's window; None for whole rows."""
        if not self.plan.window:
            return None
        lengths = self.plan.store.native.lengths(rows)
        return _native.window_ends(seed_of(self.strategy), step, attempt, numbers, lengths)

    def count_samples(self, rows: NDArray[np.uint32], generations: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Counts the draws; False where somebody else drew the row's last allowed sample first."""
        taken = self.plan.store.native.count_samples(rows, generations)
        return taken != 0 if self.limited else np.ones(len(rows), bool)

    def release(self, rows: NDArray[np.uint32], generations: NDArray[np.uint32]) -> None:
        """Lets go of rows whose last allowed samples these were, once they are copied."""
        if self.limited:
            self.plan.store.native.release_spent(rows, generations)

    def _draw_and_fetch(
        self, n: int, step: int, state: dict[str, int], redraw: Redraw | None, out: list[Any] | None
    ) -> tuple[Draw, FetchedRows]:
        drawn = self.draw(n, step, state, redraw)
        taken = self.count_samples(drawn.rows, drawn.generations)
        numbers = np.arange(n, dtype=np.uint32) if redraw is None else redraw.numbers
        ends = self.ends(step, 0 if redraw is None else redraw.attempt, numbers, drawn.rows)
        raw = self.plan.fetch(drawn.rows, drawn.generations, ends, out)
        if out is not None:
            raw = raw._replace(arrays=out)
        self.release(drawn.rows, drawn.generations)
        raw.torn[~taken] = 1
        return drawn, raw
