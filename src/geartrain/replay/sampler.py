"""Samples the rows of a batch from one store, in one native call.

The call draws rows, counts the samples, places windows, copies the rows and redraws those that were overwritten or
evicted. It calls back into Python in two cases: Python code chooses the rows (supplied_rows.py), or a Python function
places the windows. Everything else is the same for every strategy.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.keys import Keys
from geartrain.errors import (
    ArgumentError,
    CorruptStoreError,
    NotEnoughRowsError,
    TurnoverError,
)
from geartrain.replay.admission import Admission
from geartrain.replay.fetch_plan import FetchPlan
from geartrain.replay.kept_rows import KeptRows
from geartrain.replay.passes import MixedPassRows, Passes, PassRows
from geartrain.replay.store_waits import StoreWaits
from geartrain.replay.supplied_rows import Select, StrategyRows, SuppliedRows
from geartrain.replay.transitions import TransitionPlan
from geartrain.selection.declared import DeclaredStrategy, describe_incomplete, select_declared
from geartrain.selection.epochs import Epochs
from geartrain.selection.random import Prioritized, Uniform, checked_beta
from geartrain.selection.schedule import at_step
from geartrain.selection.shard import NO_ROW, Shard, StepPlan
from geartrain.selection.strategy import (
    ORDERS,
    Candidates,
    Draw,
    Limits,
    Redraw,
    Strategy,
    importance_of,
    seed_of,
    traits_of,
    with_min_length,
)
from geartrain.store.packed import PackedReader

# A draw that loses its row this often in a row is drawing from a store that turns over faster than it can be read.
MAX_ATTEMPTS = 64
# A schedule of the alpha is followed in steps of this share of its value.
ALPHA_STEP = 0.01
_STRICT_ATTEMPTS = 3
_MOST = 2**31 - 1


def alpha_at(strategy: Strategy, step: int) -> float:
    """The alpha that a strategy wants priorities to have at a step; raises `ArgumentError` unless it is above zero."""
    alpha = at_step(traits_of(strategy).alpha, step)
    if not 0 < alpha < float("inf"):
        raise ArgumentError(f"the alpha of priorities must be above zero and finite, found {alpha} at step {step}")
    return alpha


class PriorityCopy(Protocol):
    """A copy of a store's priorities, for example on a device; see `StoreSampler.change_priorities`."""

    def change(self, rows: NDArray[np.uint32], change: Callable[[], int]) -> int:
        """Calls `change`, which sets priorities of these rows and returns how many of them were gone; so does this."""
        ...


class StoreSampler(StoreWaits):
    """Draws from one store by one strategy and fetches by one plan.

    Args:
        plan: store and fields to fetch.
        strategy: chooses the rows.
        min_rows, timeout_s, stopping, min_steps: as in `StoreWaits`.
        transitions: transitions to gather instead of windows.
        mixed: whether this sampler fills part of a mixture's batches.
        keeps: whether drawn rows stay until they are told to be saved.

    Attributes:
        redrawn: rows that were lost between their draw and their copy.
        alpha: exponent of the store's priorities.
        raises: whether updated priorities are raised to a power: the alpha is not 1, or follows a schedule.
        atom: number of rows that can only be replaced as a whole (a group).
        moves_on: whether the strategy draws each row once and passes over older ones; not where drawn rows are freed.
        draws_natively: whether native code draws the rows, not the strategy's own code.
        placed: whether a Python function chooses the windows of rows.
        passes: passes of `Epochs`; None for other strategies.
        has_tasks: whether the store has tasks. The last one's draw frees the row.
        packed: reads the fields of a store with axes or tasks; None for other stores.
        callbacks: the parts of a batch that Python is called for, by name.
        priority_copy: copy of the priorities, which has to follow the changes of this process; None if there is none.
    """

    def __init__(
        self,
        plan: FetchPlan,
        strategy: Strategy,
        min_rows: int,
        timeout_s: float = 60.0,
        stopping: Callable[[], bool] | None = None,
        transitions: TransitionPlan | None = None,
        mixed: bool = False,
        min_steps: int = 0,
        keeps: bool = False,
    ) -> None:
        kept = KeptRows(plan.store) if keeps else None
        super().__init__(plan.store, min_rows, timeout_s, stopping, min_steps, kept)
        self.plan = plan
        tasks = plan.store.plan
        self.packed = (
            None if tasks is None else PackedReader(plan.store.native, tasks, plan.names, threads=plan.threads)
        )
        self.transitions = transitions
        self.strategy = strategy
        self.traits = traits_of(strategy)
        self.strict = self.traits.strict
        self.redrawn = 0
        self._used_up = 0  # last samples that were counted and not noted
        self.priority_copy: PriorityCopy | None = None
        self.alpha = alpha_at(strategy, 0)
        # Of a strategy that has its own traits at hand, and cannot change them.
        fixed = isinstance(strategy, (Uniform, Prioritized)) and not callable(self.traits.alpha)
        self._fixed_alpha = self.alpha if fixed else None
        self.raises = self._fixed_alpha != 1
        self.atom = self.traits.atom
        # Rows are finished in another order than they were inserted in, and freed by their draw: none is passed over.
        self.has_tasks = tasks is not None and bool(tasks.tasks)
        self.moves_on = self.traits.cursor and not self.has_tasks
        self._cursor_name = "after" if self.moves_on else ""
        self._asks_shards = False  # of code of the strategy's own: for many shards
        # Built-in strategies and others that follow from their traits; the rest are asked for their draws.
        self.draws_natively = (
            self.traits.form in ("random", *ORDERS)
            and self.atom == 1
            and getattr(type(strategy), "select", None) is DeclaredStrategy.select
        )
        windows = plan.windows if transitions is None else None
        self.placed = windows is not None and windows.function is not None
        store = plan.store
        self.candidates = Candidates.of_store(store.native, store.column)
        self.passes = (
            Passes(strategy, plan, transitions, self.candidates, mixed) if isinstance(strategy, Epochs) else None
        )
        if (transitions is not None or self.traits.over_steps) and not (self.draws_natively or self.passes):
            raise ArgumentError(
                f"{type(strategy).__name__} chooses rows by code of its own, which knows nothing of transitions; use "
                f"Uniform, Prioritized, Epochs or an ordered strategy"
            )
        weigh = getattr(type(strategy), "importance_weights", None)
        self._beta = (
            strategy.beta if isinstance(strategy, Prioritized) and weigh is Prioritized.importance_weights else None
        )
        self._weighs = weigh not in (DeclaredStrategy.importance_weights, Prioritized.importance_weights)
        self._weighs |= self.traits.importance and weigh is DeclaredStrategy.importance_weights  # refused: it has none
        # A number is the same at every step, and limits that are none at every time.
        self._fixed_beta = None if self._beta is None or callable(self._beta) else checked_beta(float(self._beta))
        by_row = transitions is not None and not self.traits.over_steps
        self._limits = self.limits_now() if by_row and self.traits.limits is None else None
        self._by_step = self.traits.limits is not None or callable(self._beta)  # or asked for at each
        self.limited = store.options["max_times_sampled"] is not None
        self._groups = strategy if self.traits.form == "groups" and isinstance(strategy, DeclaredStrategy) else None

    @overload
    def sample(
        self,
        n: int,
        step: int,
        state: dict[str, int],
        admission: Admission,
        into: _native.SampledBatch | None = None,
        first: int = 0,
    ) -> tuple[_native.SampledBatch, dict[str, int]]: ...

    @overload
    def sample(
        self,
        n: int,
        step: int,
        state: dict[str, int],
        admission: Admission,
        into: _native.SampledBatch | None,
        first: int,
        begin: Callable[..., _native.BegunBatch | None],
    ) -> BegunRows: ...

    def sample(
        self,
        n: int,
        step: int,
        state: dict[str, int],
        admission: Admission,
        into: _native.SampledBatch | None = None,
        first: int = 0,
        begin: Callable[..., Any] | None = None,
    ) -> tuple[_native.SampledBatch, dict[str, int]] | BegunRows:
        """The n rows of a step, and the strategy's state after it.

        In a batch in recycled memory, which has fewer rows where a pass ends, or as rows [first, first + n) of one.

        Args:
            admission: to which the rate limiter's of the rows is added.
            begin: native call that only begins the batch; see `begin`.
        """
        rows, limits, beta = None, self._limits, self._fixed_beta
        if not self.draws_natively:  # by code that knows its limits, and weighs its rows itself
            rows, beta = self._rows_of(n, step, state), None
        elif self._by_step:
            limits = self._limits if self.traits.limits is None else self.limits_now()
            beta = self.beta_at(step)
        anchors = functools.partial(self.anchors_by_function, step) if self.placed else None
        cursor = int(state.get("after", state.get("after/0", 0))) if self._cursor_name else 0
        native = self.batch_sampler.sample if begin is None else begin
        self.stage = "drawing and copying rows"
        try:
            result: Any = native(n, step, limits, cursor, False, beta, rows, anchors, into, first)
            if result is None:  # rows, or the rate limiter, have to be waited for
                self.wait_to_draw(n, admission)
                self.check_count()
                self.stage = "drawing and copying rows"
                result = native(n, step, limits, cursor, True, beta, rows, anchors, into, first)
                assert result is not None
            else:
                admission[self] = n
        finally:
            self.stage = "idle"
        if begin is not None:
            return BegunRows(self, result, rows, n, step, admission, into, first)
        if rows is None and not self._weighs:  # the usual case, without another call
            batch, cursor, redrawn, _ = result
            self.redrawn += redrawn
            return batch if into is None else into, {self._cursor_name: cursor} if self._cursor_name else {}
        return self.settle_rows(result, rows, n, step, admission, into, first)

    def begin(
        self,
        n: int,
        step: int,
        state: dict[str, int],
        admission: Admission,
        into: _native.SampledBatch | None,
        first: int,
        transfer: Any,
        store: int,
    ) -> BegunRows:
        """The same of rows that a transfer copies (replay/device/transfer.py), as far as the launch of their copies.

        The batch has metadata alone.

        Args:
            transfer: copies the rows.
            store: the number that it knows this one by.
        """
        begin = functools.partial(self._row_sampler.begin, transfer=transfer, store=store)
        return self.sample(n, step, state, admission, into, first, begin)

    def sample_packed(
        self, n: int, step: int, state: dict[str, int], admission: Admission
    ) -> tuple[_native.SampledBatch, _native.PackedArrays, dict[str, int]]:
        """The rows of a step of a store with axes or tasks: metadata, values, and the strategy's state after it."""
        assert self.packed is not None
        self.step = step
        for attempt in itertools.count():
            transfer = self.packed.native.transfer()
            begun = None
            try:
                begun = self.begin(n, step, state, admission, None, 0, transfer, 0)
                rows, after = begun.finish()
                values = transfer.taken()
            except BaseException as error:
                if begun is not None:
                    begun.abandon()
                if self.kept is not None:
                    self.kept.give_up(step)
                # A row was deleted at this moment, and an older one than the next is under way: it is waited for.
                if not (self.strict and isinstance(error, NotEnoughRowsError) and attempt < _STRICT_ATTEMPTS):
                    raise
                admission.keep(self, 0)
            else:
                admission.used_up[self] = begun.begun.used_up
                if self.kept is not None:  # they are drawn for good, even if nobody gets this batch
                    admission.pop(self, None)
                return rows, values, after
        raise AssertionError

    def repeat_packed(self, n: int, step: int) -> tuple[Keys, _native.PackedArrays] | None:
        """The rows that the batch of a step has drawn before, with their values; None if it is to be drawn."""
        if self.kept is None:
            return None
        assert self.packed is not None
        found, given_up = self.kept.of_step(step, n)
        if found is not None:
            values = self.packed.read(found)
            if not values.torn().any():
                return found, values
            given_up = self.kept.give_up(step)  # some were deleted meanwhile
        self.give_back(given_up)
        return None

    def settle_rows(
        self,
        result: Any,
        rows: SuppliedRows | None,
        n: int,
        step: int,
        admission: Admission,
        into: _native.SampledBatch | None,
        first: int,
    ) -> tuple[_native.SampledBatch, dict[str, int]]:
        """Turns the result of a native call into the result of `sample`."""
        batch, cursor, redrawn, count = result
        self.redrawn += redrawn
        batch = batch if into is None else into
        if rows is not None:
            if len(batch) < n:  # where a pass ends
                admission.keep(self, len(batch))
            self._weigh(batch, first, rows.draw, count, step)
            return batch, rows.state
        if self._weighs:
            self._weigh(batch, first, _drawn_of(batch, first, n), count, step)
        return batch, {self._cursor_name: cursor} if self._cursor_name else {}

    def join_group(self) -> None:
        """Draws from here on what a group of ranks draws whose only shard this store is.

        Any number of ranks takes up its states. Other processes that have the store open do not count as writers,
        because they may be ranks; those of a store with tasks do, because they work for it.
        """
        self.counts_attached = self.has_tasks
        self._cursor_name = "after/0" if self.moves_on else ""
        if self.passes is None and hasattr(self.strategy, "select_shards"):
            self.draws_natively, self._asks_shards = False, True

    def _select_shards(self, n: int, step: int, state: dict[str, int], redraw: Redraw | None) -> Draw:
        """The rows that a strategy's own code for many shards chooses from this one."""
        if redraw is not None:
            return self.draw(n, step, state, redraw)
        strategy: Any = self.strategy
        alone = Shard(self.candidates, 0, 1, lambda array: array[None], exact=self.limited, steps=self.step_plan)
        drawn = strategy.select_shards(alone, n, step, state=state or None)
        return Draw(drawn.rows, drawn.generations, drawn.probability, state=drawn.state)

    @property
    def arrays(self) -> dict[str, int]:
        """The arrays of a row in a batch, and the bytes of a row in each, by name; of packed rows those of an item."""
        if self.packed is not None:
            fields = self.packed.plan.fields
            return {name: fields[name].nbytes for name in self.packed.names}
        if self.transitions is None:
            return {name: self.plan.row_bytes(name) for name in self.plan.names}
        made = self.transitions.arrays()
        return {name: int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for name, (shape, dtype) in made.items()}

    def _weigh(self, batch: _native.SampledBatch, first: int, draw: Draw | None, count: int, step: int) -> None:
        """Gives rows the importance weights of the strategy's own code."""
        weights = None if draw is None else importance_of(self.strategy, draw, count, step)
        if weights is not None:
            batch.set_importance(first, weights)

    def change_priorities(self, rows: NDArray[np.uint32], change: Callable[[], int]) -> int:
        """Calls `change`, which sets priorities of these rows. Returns its result: how many of the rows were gone."""
        if self.priority_copy is None:
            return change()
        there = np.where(rows < self.plan.store.capacity, rows, np.uint32(0))  # others are stale
        return self.priority_copy.change(there, change)

    def _rows_of(self, n: int, step: int, state: dict[str, int]) -> SuppliedRows:
        """The rows of a batch that Python code chooses."""
        if self.passes is not None:
            return (MixedPassRows if self.passes.mixed else PassRows)(self.passes, n, state)
        if self._asks_shards:
            return StrategyRows(self._select_shards, n, step, state)
        if self._groups is None:
            return StrategyRows(self.draw, n, step, state)
        return StrategyRows(self._drawer_of_groups(), n, step, state)

    def _drawer_of_groups(self) -> Select:
        """Draws the groups of one batch, and waits for them."""
        until_s = min(self.until_s, time.monotonic() + self.timeout_s)

        def draw(n: int, step: int, state: dict[str, int], redraw: Redraw | None) -> Draw:
            while True:
                try:
                    return self.draw(n, step, state, redraw)
                except NotEnoughRowsError as error:
                    if redraw is not None:
                        raise
                    self.wait_for_groups(error, until_s)

        return draw

    def describe_groups(self) -> str:
        """Names incomplete groups, for the end of an error message; nothing where groups are not drawn."""
        if self._groups is None:
            return ""
        groups = self._groups.whole_groups(self.candidates)
        return describe_incomplete(self._groups, self.candidates, groups.seen_keys, groups.seen_counts)

    def beta_at(self, step: int) -> float | None:
        """The exponent of importance weights at a step; None where the strategy has none, or code of its own."""
        if self._fixed_beta is None and self._beta is not None:
            return checked_beta(at_step(self._beta, step))
        return self._fixed_beta

    def limits_now(self) -> tuple[int, int, int]:
        """The strategy's limits; of transitions drawn by row, a row needs a step behind one."""
        least_version, from_ns, length = (self.traits.limits or Limits()).now()
        return least_version, from_ns, max(self.min_length, length)

    @property
    def min_length(self) -> int:
        """Steps that a row must have for its view, where draws of steps do not see to it: a step behind one."""
        return 2 if self.transitions is not None and not self.traits.over_steps else 0

    @property
    def callbacks(self) -> list[str]:
        """The parts of a batch that Python is called for, by name: those of the strategy and of user functions."""
        strategy, name = type(self.strategy), type(self.strategy).__name__
        found = []
        if self.passes is not None:
            found.append(f"{name}.take")
        elif not self.draws_natively:
            found += ["select_shards"] if self._asks_shards else []
            found.append(f"{name}.select")
        if self.traits.limits is not None and callable(self.traits.limits.min_version):
            found.append("Limits.min_version")
        if self.placed:
            found.append("Windows.at")
        if self.transitions is not None:
            found += self.transitions.callbacks
        if self._beta is not None and callable(self._beta):
            found.append(f"{name}.beta")
        weigh = getattr(strategy, "importance_weights", None)
        if weigh not in (None, DeclaredStrategy.importance_weights) and (self._weighs or not self.draws_natively):
            found.append(f"{name}.importance_weights")
        return found

    @functools.cached_property
    def step_plan(self) -> StepPlan | None:
        """Which steps count, where draws are over steps or by their priorities; None where rows are drawn."""
        plan = self.batch_sampler.step_plan if self.draws_natively else None
        return None if plan is None else StepPlan(*plan)

    @property
    def by_totals(self) -> bool:
        """Whether draws from many shards follow from the shards' totals alone, so that native code makes them.

        They are independent, none of them is refused, and none of them uses a sample up.
        """
        independent = self.draws_natively and self.traits.independent and not hasattr(self.strategy, "select_shards")
        return independent and not (self.limited or self.may_refuse or self.plan.store.per_step)

    @property
    def may_refuse(self) -> bool:
        """Whether a draw may find a row, or a step of it, that cannot be drawn, and be made again."""
        needs = self.step_plan is not None and max(self.step_plan.need, self.step_plan.skip) > 0
        return needs or self.traits.over_steps or self.traits.limits is not None or self.min_length > 0

    @functools.cached_property
    def batch_sampler(self) -> _native.BatchSampler:
        """The native sampler, which draws, places, copies and redraws."""
        return self._sampler_of(self.plan if self.packed is None else self.plan.of_fields([]))

    @functools.cached_property
    def _row_sampler(self) -> _native.BatchSampler:
        """The same of rows that a transfer copies, so that it has no fields."""
        return self._sampler_of(self.plan.of_fields([]))

    def native_draws(self, cursor: bool) -> _native.Draws:
        """How rows are drawn, for the native samplers. With a cursor, rows up to it are passed over."""
        one = self.traits
        return one.by_priority, one.replacement, one.stratified, one.order, cursor, one.over_steps

    def _sampler_of(self, plan: FetchPlan) -> _native.BatchSampler:
        return _native.BatchSampler(
            plan.store.native,
            plan.numbers,
            plan.window,
            plan.pad_left,
            plan.threads,
            seed_of(self.strategy),
            self.native_draws(self.moves_on),
            self.min_rows,
            self.min_steps,
            None if self.transitions is None else self.transitions.native,
            None if self.transitions is not None else plan.native_windows,
            self.atom,
            self.kept is not None,
            self.strict,
        )

    def empty_batch(self, n: int, shards: bool = False, plan: FetchPlan | None = None) -> _native.SampledBatch:
        """A batch of n rows to be sampled into, in recycled memory; `plan` if not all fields are."""
        plan, view = plan or self.plan, self.transitions
        native = None if view is None else view.native
        steps = None if view is not None else plan.native_steps
        return _native.SampledBatch(plan.store.native, n, plan.numbers, plan.window, shards, native, True, steps)

    def empty_rows(self, n: int) -> _native.SampledBatch:
        """The same of rows of several stores that a transfer copies: metadata alone."""
        return _native.SampledBatch(self.plan.store.native, n, [], self.plan.window, True, mask=False)

    # --- its steps, which drawing over several ranks takes one by one -----------------------------------------

    def follow_alpha(self, step: int, *, apply: bool = True) -> None:
        """Raises the priorities to the alpha of the step, once it has moved by 1 %; or notes that another does."""
        wanted = self._fixed_alpha or alpha_at(self.strategy, step)
        if abs(wanted - self.alpha) > ALPHA_STEP * self.alpha:
            if apply:
                self.plan.store.raise_priorities(wanted / self.alpha)
            self.alpha = wanted

    def note_lost(self, count: int, attempt: int) -> None:
        """Counts rows that have to be drawn again; raises `TurnoverError` when that does not end."""
        if attempt == MAX_ATTEMPTS:
            raise TurnoverError(
                f"{count} rows were overwritten before they could be copied, {MAX_ATTEMPTS} times in a row; the "
                f"store of {self.plan.store.capacity} rows is too small for the rate of inserts"
            )
        self.redrawn += int(count)

    def draw(self, n: int, step: int, state: dict[str, int], redraw: Redraw | None) -> Draw:
        """The rows that the strategy chooses. Repairs the store first if its sums do not match its rows.

        Args:
            n, step, state, redraw: see `Strategy.select`.
        """
        store = self.plan.store
        candidates = self.candidates
        drawn = self._select(candidates, n, step, state, redraw)
        if drawn.failed and not store.read_only:
            # Sums that disagree with their leaves: somebody died in the middle of an update. Repair, then redraw.
            store.reap()
            drawn = self._select(candidates, n, step, state, redraw)
            if drawn.failed:
                store.native.rebuild()  # or somebody living is in the middle of one: this waits for them
                drawn = self._select(candidates, n, step, state, redraw)
        if drawn.failed:
            raise CorruptStoreError(
                f"{drawn.failed} draws found no row; store.audit() of a handle that may write tells what is wrong"
            )
        return drawn

    def _select(self, candidates: Candidates, n: int, step: int, state: dict[str, int], redraw: Redraw | None) -> Draw:
        if not self.draws_natively or not isinstance(self.strategy, DeclaredStrategy):
            return self.strategy.select(candidates, n, step, state=state or None, redraw=redraw)
        traits = with_min_length(self.traits, self.min_length)
        return select_declared(
            self.strategy, traits, candidates, n, step, state=state, redraw=redraw, steps=self.step_plan
        )

    def anchors_by_function(
        self,
        step: int,
        attempt: int,
        numbers: NDArray[np.uint32],
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
    ) -> NDArray[np.int32]:
        """The anchors of the draws' windows, (n,), as the user's function places them.

        If a row was replaced since its draw, its anchor may be beyond its end; the read then finds the row torn.
        """
        windows = self.plan.windows
        assert windows is not None
        lengths = np.minimum(self.plan.store.native.lengths(rows), self.plan.store.max_length)
        most = np.full(len(numbers), _MOST, np.int32)
        random = _native.window_ends(seed_of(self.strategy), step, attempt, numbers, most) / _MOST
        return windows.ask(Keys(rows, generations, store=self.plan.store.id), lengths, random)

    def anchors(self, rows: NDArray[np.uint32], steps: NDArray[np.uint32]) -> NDArray[np.uint32] | None:
        """The anchors of windows of rows whose steps were drawn with them; None for whole rows.

        For transitions the anchors are the drawn steps. Unknown rows (NO_ROW) have 0.
        """
        windows = self.plan.windows
        if windows is None:
            return None
        if self.transitions is not None or (self.step_plan is not None and not self.traits.over_steps):
            return steps
        found = np.zeros(len(rows), np.uint32)
        here = np.flatnonzero(rows != NO_ROW)
        lengths = np.minimum(self.plan.store.native.lengths(rows[here]), self.plan.store.max_length)
        found[here] = windows.anchors_of(lengths, steps[here])
        return found

    def count_samples(
        self, rows: NDArray[np.uint32], generations: NDArray[np.uint32], step: int, places: NDArray[np.uint32]
    ) -> NDArray[np.bool_]:
        """Counts the draws of a step, which have these places in its batch.

        Returns:
            False for each row whose last allowed sample was drawn elsewhere first.
        """
        native = self.plan.store.native
        if self.kept is not None:
            taken, used_up = native.count_samples(rows, generations, step, places)
        else:
            taken, used_up = native.count_samples(rows, generations)
        self._used_up += used_up
        return taken != 0 if self.limited else np.ones(len(rows), bool)

    def note_used_up(self, admission: Admission) -> None:
        """Adds the rows whose last samples were counted to what a batch has in flight."""
        used_up, self._used_up = self._used_up, 0
        if used_up:
            admission.used_up[self] = admission.used_up.get(self, 0) + used_up

    def release(self, rows: NDArray[np.uint32], generations: NDArray[np.uint32]) -> None:
        """Releases rows whose last allowed samples these were, once they are copied."""
        if self.limited:
            self.plan.store.native.release_exhausted(rows, generations)


@dataclass(slots=True)
class BegunRows:
    """Rows of a step whose copies are launched; see `StoreSampler.begin`."""

    sampler: StoreSampler
    begun: _native.BegunBatch
    rows: SuppliedRows | None
    n: int
    step: int
    admission: Admission
    into: _native.SampledBatch | None
    first: int

    @property
    def state(self) -> dict[str, int]:
        """The strategy's state after the batch, where that does not follow from how it is finished."""
        return {} if self.rows is None else self.rows.state

    def finish(self) -> tuple[_native.SampledBatch, dict[str, int]]:
        """What `StoreSampler.sample` returns, once all rows are whole."""
        result = self.begun.finish()
        n, step, first = self.n, self.step, self.first
        return self.sampler.settle_rows(result, self.rows, n, step, self.admission, self.into, first)

    def abandon(self) -> None:
        """Releases the rows, which nobody gets."""
        self.begun.abandon()


def _drawn_of(batch: _native.SampledBatch, first: int, n: int) -> Draw:
    """What native code has drawn, as a strategy's own code weighs it."""
    part = slice(first, first + n)
    return Draw(batch.rows()[part], batch.generations()[part], batch.probability()[part])
