"""Waits before a draw from one store: until it has enough rows, and until its rate limiter admits the draw."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence

from geartrain.errors import CallCancelledError, NotEnoughRowsError, StoreClosedError, WaitTimeoutError
from geartrain.replay.admission import Admission
from geartrain.replay.kept_rows import KeptRows
from geartrain.store.rate_limiter import check_reachable
from geartrain.store.store import Store

# How often a wait for rows looks at the store.
LOOK_EVERY_S = 0.01
# Why nothing is waited for, and what to do, of stores without tasks and with them.
_ALONE = (
    "; no other process has it open, so nothing is waited for. Insert rows first; or start the writers within `with "
    "store.expect_writers()`; or, where a thread of this process inserts, store.limiter.set(min_size_to_sample=...). "
    "A recorder's row counts once its episode ends or it is full; with recorder(publish_every=1), at each step"
)
_ALONE_WITH_TASKS = (
    "; no other process has it open, so nothing is waited for{lag}. Start the processes that insert and claim; if they "
    "have not opened the store yet, or are threads of this process, make batches within `with store.expect_writers()`"
)


class NoMoreRowsError(NotEnoughRowsError):
    """The store's `finish` was called, and fewer rows than a batch needs can ever come. It ends an iteration."""


class StoreWaits:
    """Waits before a draw from one store, for rows and for the rate limiter.

    Args:
        store: the store that is drawn from.
        min_rows, min_steps: a draw needs at least this many selectable rows, and steps (`Store.num_steps`).
        timeout_s: longest wait for rows and the store's rate limiter together.
        stopping: called during the wait. When it returns True, the wait ends with `CallCancelledError`; over ranks, on
            all of them.
        kept: rows that batches keep; None if they keep none.

    Attributes:
        stage: current activity of the drawing thread, for error messages.
        until_s: latest end of a wait (`time.monotonic`). A batch from several stores has one for all of them.
        counts_attached: whether a process that has the store open counts as a possible writer. Over ranks it may be
            another rank.
        step: the batch that is drawn.
        is_awaited: called with a step; whether the consumer waits for its batch now. If not, it may free kept rows
            before it does.
        strict: whether a row waits for all rows that were inserted earlier.
    """

    def __init__(
        self,
        store: Store,
        min_rows: int,
        timeout_s: float,
        stopping: Callable[[], bool] | None,
        min_steps: int = 0,
        kept: KeptRows | None = None,
    ) -> None:
        self.min_rows = min_rows
        self.min_steps = min_steps
        self.timeout_s = timeout_s
        self.until_s = math.inf
        self.stopping = stopping
        self.counts_attached = True
        self.step = 0
        self.is_awaited: Callable[[int], bool] = lambda step: True
        self.strict = False
        self.kept = kept
        self.stage = "idle"
        self._store = store
        self.expires = store.options["max_age_s"] is not None and not store.read_only

    def check_reachable(self, rows: str) -> None:
        """Raises `ArgumentError` if the store can never have so many rows, which the argument `rows` says, or steps."""
        store = self._store
        check_reachable(rows, self.min_rows, "rows", store.capacity)
        check_reachable("min_steps", self.min_steps, "steps", store.capacity * store.max_length)

    def wait_to_draw(self, n: int, admission: Admission) -> None:
        """Waits for rows, and until the rate limiter lets so many be drawn; raises what either raises."""
        until_s = time.monotonic() + self.timeout_s
        self.wait_for_rows(until_s)
        self.admit(n, admission, until_s)

    def admit(self, n: int, admission: Admission, until_s: float = math.inf, *, may_stop: bool = True) -> None:
        """Waits until the store's rate limiter lets so many rows be drawn, for `timeout_s` at most.

        Args:
            n: rows of the batch.
            admission: to which they are added.
            until_s: when the wait ends at the latest (`time.monotonic`).
            may_stop: whether `stopping` ends the wait. Over ranks it does not: the others need this one's part.

        Raises:
            NotEnoughRowsError: the writers that were expected have given up, and no process has the store open.
            WaitTimeoutError, CallCancelledError: as `wait_for_rows`.
        """
        store = self._store
        self.stage = "waiting for the rate limiter"
        left_s = max(0.0, min(self.timeout_s, min(until_s, self.until_s) - time.monotonic()))
        try:
            store.limiter.admit_samples(n, left_s, lambda: (may_stop and self.is_stopped()) or self._is_in_vain())
        except CallCancelledError:
            if may_stop and self.is_stopped():
                raise
            raise NotEnoughRowsError(
                f"{n} rows cannot be sampled, and no process is left that could insert more: {self.describe_wait()}"
            ) from store.writers.failure
        except WaitTimeoutError as error:
            why = f"{self.describe_groups()}{store.writers.trouble}"
            if why:
                raise WaitTimeoutError(f"{error}{why}") from store.writers.failure
            raise
        admission[self] = n
        self.stage = "admitted by the rate limiter"

    def is_stopped(self) -> bool:
        """Whether `stopping` says so."""
        return self.stopping is not None and self.stopping()

    def _is_in_vain(self) -> bool:
        """Whether a wait for the rate limiter never ends. Where no writer has given up, a thread may insert."""
        return self._store.writers.failure is not None and not self.rows_may_come()

    def rows_may_come(self) -> bool:
        """Whether another process may insert: one that has the store open, by another handle, or that is expected."""
        store = self._store
        return store.writers.expected or (self.counts_attached and store.other_processes() > 0)

    def give_back(self, n: int) -> None:
        """Tells the store's rate limiter that rows were admitted for a batch that nobody gets."""
        if n:
            with contextlib.suppress(StoreClosedError):  # its counts are out of reach
                self._store.limiter.give_back(samples=n)

    def finish(self, n: int) -> None:
        """Tells the store that the batch of n rows is finished, whose last samples it had."""
        if n:
            with contextlib.suppress(StoreClosedError):  # which took them off
                self._store.native.finished(n)

    def wait_for_rows(self, until_s: float) -> None:
        """Waits until the store has `min_rows` and `min_steps`, as long as another process could insert some.

        Where none could this returns at once, and `check_count` raises.

        Raises:
            WaitTimeoutError: too few by `until_s`, which follows from `timeout_s`.
            NotEnoughRowsError: the consumer waits, and no row can come before it frees kept ones.
            CallCancelledError: `stopping` said so.
        """
        self.expire()
        store = self._store
        if self.has_enough() or not (self.rows_may_come() or self._kept_alone_stop()):
            return
        self.stage, before = "waiting for rows", len(store)
        while not self.has_enough() and not self.is_over():
            if self.is_stopped():
                raise CallCancelledError(f"the replay was stopped while it waited for {self.wanted}")
            if self._kept_alone_stop():
                if self.is_awaited(self.step):
                    raise NotEnoughRowsError(
                        f"a batch needs {self.wanted}, the store {store.name!r} has {len(store)}, and no other can "
                        f"come: {self.kept.describe()}"  # type: ignore[union-attr]
                    )
                until_s = max(until_s, time.monotonic() + self.timeout_s)
            elif not self.rows_may_come():
                return
            most = store.limiter.state().most_in_flight  # any process may have lowered it
            if most is not None and most < self.min_rows:
                raise NotEnoughRowsError(
                    f"a batch needs {self.wanted}, and the limiter of the store {store.name!r} lets {most} rows be in "
                    f"flight: raise limiter.set(in_flight=)"
                )
            if time.monotonic() >= min(until_s, self.until_s):
                raise WaitTimeoutError(
                    f"too few rows within {self.timeout_s:g} s; meanwhile the store went from {before} to "
                    f"{len(store)} rows: {self.describe_wait()}"
                ) from store.writers.failure
            time.sleep(LOOK_EVERY_S)
            self.expire()

    def _kept_alone_stop(self) -> bool:
        return self.kept is not None and self.kept.alone_stop(self.min_rows)

    def is_over(self) -> bool:
        """Whether `min_rows` rows can never be there any more, as the store's `finish` was called."""
        left = self.rows_left()
        return left is not None and left < self.min_rows

    def rows_left(self) -> int | None:
        """How many rows can be drawn from now on, as the store's `finish` was called; None if more may come."""
        return None if self._store.plan is None else self._store.native.rows_left()

    def wait_for_groups(self, few: NotEnoughRowsError, until_s: float) -> None:
        """Waits a moment, after which the groups are counted again.

        Args:
            few: what was raised because too few groups can be drawn.
            until_s: when the wait ends at the latest (`time.monotonic`).

        Raises:
            NotEnoughRowsError: there will be no more.
            WaitTimeoutError: the end was before.
            CallCancelledError: `stopping` said so.
        """
        writers = self._store.writers
        if not self.rows_may_come():
            raise NotEnoughRowsError(f"{few}{writers.trouble}") from writers.failure
        if self.is_stopped():
            raise CallCancelledError("the replay was stopped while it waited for groups")
        if time.monotonic() >= until_s:
            raise WaitTimeoutError(
                f"too few whole groups within {self.timeout_s:g} s: {few}{writers.trouble}"
            ) from writers.failure
        self.stage = "waiting for groups"
        time.sleep(LOOK_EVERY_S)
        self.expire()

    @property
    def lag(self) -> str:
        """Which task keeps rows from becoming due, for the end of an error message; nothing for stores without."""
        store = self._store
        if store.plan is None or not store.plan.tasks or store.closed:
            return ""
        return f"; of the store {store.name!r}, {store.lag_before(len(store.plan.tasks))}"

    def describe_groups(self) -> str:
        """Names incomplete groups, for the end of an error message; nothing where groups are not drawn."""
        return ""

    def has_enough(self) -> bool:
        """Whether the store has `min_rows` and `min_steps` now."""
        if self.ready_rows() < self.min_rows:
            return False
        return self.min_steps == 0 or self._store.native.step_count_up_to(self.min_steps) >= self.min_steps

    def ready_rows(self) -> int:
        """Rows that can be drawn now; in a strict order as many as a draw needs at most."""
        return self._store.native.complete(self.min_rows)[0] if self.strict else len(self._store)

    def first_open(self, n: int) -> int:
        """Sequence number of the first row that is under way or yet to be inserted, or of one that n rows come before.

        The largest number there is if all rows can be drawn and `finish` was called.
        """
        native = self._store.native
        if self.rows_left() is not None and native.task_figures()["under_way"] == 0:
            return 2**64 - 1
        return native.complete(n)[1]

    @property
    def wanted(self) -> str:
        """What a draw needs, for errors."""
        return f"{self.min_rows} selectable rows" + (f" and {self.min_steps} steps" if self.min_steps else "")

    def describe_wait(self) -> str:
        """The store's rows, its rate limiter, what this sampler is doing and what its writers lack, for an error."""
        store = self._store
        steps = f" and {store.num_steps} steps of {self.min_steps}" if self.min_steps else ""
        return (
            f"the store {store.name!r} has {len(store)} selectable rows of {self.min_rows} wanted{steps}"
            f"{self.describe_groups()}{self._describe_order()}{self._describe_kept()}; its rate limiter has "
            f"{store.limiter.state()}; the replay is {self.stage}{store.writers.trouble}{self.lag}"
        )

    def _describe_order(self) -> str:
        return f", {self.ready_rows()} of them before the first that is under way" if self.strict else ""

    def _describe_kept(self) -> str:
        text = "" if self.kept is None else self.kept.describe()
        return f"; {text}" if text else ""

    def expire(self) -> None:
        """Removes rows that are too old, before they are counted."""
        if self.expires:
            self._store.expire()

    def check_count(self) -> None:
        """Raises `NotEnoughRowsError` when the store has too few rows or steps."""
        if not self.has_enough():
            writers = self._store.writers
            if self.is_over():
                raise NoMoreRowsError(
                    f"finish() was called for the store {self._store.name!r}, and fewer rows are left than the "
                    f"{self.min_rows} that a batch needs; {len(self._store)} can be drawn"
                )
            lag = self.lag
            alone = _ALONE_WITH_TASKS.format(lag=lag) if lag else _ALONE
            why = writers.trouble or ("" if self.rows_may_come() else alone)
            raise NotEnoughRowsError(
                f"a batch needs {self.wanted}, the store {self._store.name!r} has {len(self._store)}"
                f"{f' and {self._store.num_steps}' if self.min_steps else ''}{self.describe_groups()}"
                f"{self._describe_order()}{why}"
            ) from writers.failure


def wait_together(samplers: Sequence[StoreWaits]) -> None:
    """Gives the stores of a batch that begins one deadline, for all of their waits."""
    until_s = time.monotonic() + samplers[0].timeout_s
    for sampler in samplers:
        sampler.until_s = until_s
