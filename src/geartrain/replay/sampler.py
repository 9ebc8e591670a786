"""Sampling from one store: draw rows, count samples, place windows, fetch; redraw what was lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.errors import (
    ArgumentError,
    CallCancelledError,
    CorruptStoreError,
    NotEnoughRowsError,
    TurnoverError,
    WaitTimeoutError,
)
from geartrain.replay.fetch import FetchedRows, FetchPlan
from geartrain.selection.schedule import at_step
from geartrain.selection.strategy import Candidates, Draw, Redraw, Strategy, importance_of, seed_of, traits_of

# A draw that loses its row this often in a row is drawing from a store that turns over faster than it can be read.
MAX_ATTEMPTS = 64
# A schedule of the alpha is followed in steps of this share of its value.
ALPHA_STEP = 0.01
# How often a wait for rows looks at the store.
LOOK_EVERY_S = 0.01
_NO_ROWS = np.empty(0, np.intp)


def alpha_at(strategy: Strategy, step: int) -> float:
    """The alpha that a strategy wants priorities to have at a step; raises `ArgumentError` unless it is above zero."""
    alpha = at_step(traits_of(strategy).alpha, step)
    if not 0 < alpha < float("inf"):
        raise ArgumentError(f"the alpha of priorities must be above zero and finite, found {alpha} at step {step}")
    return alpha


class Redrawable(Protocol):
    """A batch of n rows, some of which may be lost."""

    def lost(self) -> NDArray[Any]:
        """(n,) nonzero for rows that were lost, as of the last redraw."""
        ...

    def kept(self, lost: NDArray[np.intp]) -> NDArray[np.uint32]:
        """The other rows of the batch, which a redraw must not choose again where rows are drawn once."""
        ...


@dataclass
class _Sampled:
    """A batch in host memory, until its rows are settled."""

    draw: Draw
    fetched: FetchedRows

    def lost(self) -> NDArray[Any]:
        return self.fetched.torn

    def kept(self, lost: NDArray[np.intp]) -> NDArray[np.uint32]:
        return np.delete(self.draw.rows, lost)


class StoreSampler:
    """Draws from one store by one strategy and fetches by one plan.

    Args:
        plan: what is fetched, and from which store.
        strategy: which rows.
        min_rows: fewer selectable rows than this are not drawn from.
        timeout_s: longest wait for rows, and for the store's rate limiter.
        stopping: asked while it waits; when it says so, the wait ends with `CallCancelledError`.

    Attributes:
        redrawn: rows that were lost between their draw and their copy.
        alpha: that the store's priorities are of.
        atom: rows that stand or fall together (a group), and so are replaced together.
        stage: what it is doing, for error messages.
    """

    def __init__(
        self,
        plan: FetchPlan,
        strategy: Strategy,
        min_rows: int,
        timeout_s: float = 60.0,
        stopping: Callable[[], bool] | None = None,
    ) -> None:
        self.plan = plan
        self.strategy = strategy
        self.traits = traits_of(strategy)
        self.min_rows = min_rows
        self.timeout_s = timeout_s
        self.stopping = stopping
        self.redrawn = 0
        self.alpha = alpha_at(strategy, 0)
        self.atom = self.traits.atom
        self.stage = "idle"
        store = plan.store
        self.candidates = Candidates.of_store(store.native, store.column)
        self.limited = store.options["max_times_sampled"] is not None
        self._expires = store.options["max_age_s"] is not None

    def sample(
        self, n: int, step: int, state: dict[str, int], out: list[Any] | None = None
    ) -> tuple[Draw, FetchedRows]:
        """The `n` rows of a step and their metadata, copied into `out` or into recycled memory."""
        self.wait_for_rows()
        self.admit(n)
        try:
            return self._sample(n, step, state, out)
        except BaseException:
            self.give_back(n)
            raise
        finally:
            self.stage = "idle"

    def _sample(self, n: int, step: int, state: dict[str, int], out: list[Any] | None) -> tuple[Draw, FetchedRows]:
        self.expire()
        count = len(self.plan.store)
        self.check_count(count)
        self.stage = "drawing and copying rows"
        batch = _Sampled(*self._draw_and_fetch(n, step, state, None, out))
        for redraw in self.redraws(batch):
            draw, fetched = self._draw_and_fetch(n, step, batch.draw.state, redraw, None)
            batch.fetched.put(redraw.numbers, fetched)
            batch.draw = batch.draw.with_redrawn(redraw.numbers, draw)
        weights = importance_of(self.strategy, batch.draw, count, step)
        if weights is not batch.draw.importance_weights:
            batch.draw = replace(batch.draw, importance_weights=weights)
        return batch.draw, batch.fetched

    def redraws(self, batch: Redrawable) -> Iterator[Redraw]:
        """What is to be drawn again, attempt after attempt, until no row of a batch is lost: the one redraw loop.

        Raises:
            TurnoverError: rows are lost faster than they can be replaced.
        """
        for attempt in range(1, MAX_ATTEMPTS + 1):
            lost = self.with_atoms(batch.lost())
            if lost.size == 0:
                return
            self.note_lost(len(lost), attempt)
            yield Redraw(attempt, lost.astype(np.uint32), batch.kept(lost))

    # --- its steps, which drawing over several ranks takes one by one -----------------------------------------

    def admit(self, n: int) -> None:
        """Waits until the store's rate limiter lets so many rows be drawn."""
        self.stage = "waiting for the rate limiter"
        self.plan.store.limiter.admit_samples(n, self.timeout_s, self.stopping)
        self.stage = "admitted by the rate limiter"

    def give_back(self, n: int) -> None:
        """Tells the store's rate limiter that rows were admitted and not drawn."""
        self.plan.store.limiter.give_back(samples=n)

    def wait_for_rows(self) -> None:
        """Waits until `min_rows` rows are selectable, as long as another process could insert some.

        Another process is another handle on the store, of whichever process. Where there is none this returns at once,
        and `check_count` raises.

        Raises:
            WaitTimeoutError: too few rows within `timeout_s`.
            CallCancelledError: `stopping` said so.
        """
        self.expire()
        store = self.plan.store
        if len(store) >= self.min_rows or store.native.live_clients() < 2:
            return
        self.stage = "waiting for rows"
        until_s = time.monotonic() + self.timeout_s
        while len(store) < self.min_rows and store.native.live_clients() > 1:
            if self.stopping is not None and self.stopping():
                raise CallCancelledError(f"told to stop while {self.min_rows} rows were waited for")
            if time.monotonic() >= until_s:
                raise WaitTimeoutError(f"too few rows within {self.timeout_s:g} s: {self.describe_wait()}")
            time.sleep(LOOK_EVERY_S)
            self.expire()

    def describe_wait(self) -> str:
        """The store's rows, its rate limiter and what this sampler is doing, for the message of a timeout."""
        store = self.plan.store
        return (
            f"the store {store.name!r} has {len(store)} selectable rows of {self.min_rows} wanted; its rate limiter "
            f"has {store.limiter.state()}; the replay is {self.stage}"
        )

    def expire(self) -> None:
        """Removes rows that are too old, before they are counted."""
        if self._expires:
            self.plan.store.expire()

    def follow_alpha(self, step: int, *, apply: bool = True) -> None:
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
        if not np.count_nonzero(torn):
            return _NO_ROWS
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
        draw = self.draw(n, step, state, redraw)
        taken = self.plan.store.native.count_samples(draw.rows, draw.generations)
        numbers = np.arange(n, dtype=np.uint32) if redraw is None else redraw.numbers
        ends = self.ends(step, 0 if redraw is None else redraw.attempt, numbers, draw.rows)
        fetched = self.plan.fetch(draw.rows, draw.generations, ends, out)
        if out is not None:
            fetched = fetched._replace(arrays=out)
        if self.limited:
            self.release(draw.rows, draw.generations)
            fetched.torn[taken == 0] = 1  # somebody else drew the row's last allowed sample first
        return draw, fetched
