"""Rate limiter: bounds the ratio of samples to inserts over all processes of a store.

    store = gt.Store.create("episodes", fields, capacity=100_000)
    store.limiter.set(samples_per_insert=8, min_size_to_sample=1_000, error_buffer=2_000)

Afterwards commits wait while the learners are behind, and every `Replay` of the store waits while the actors are
behind. The settings have Reverb's names. native/segment/rate_limiter.h has the formula.

With `unit="steps"` the ratio is samples per step instead of per row, as for DQN and SAC:

    store.limiter.set(samples_per_insert=4, min_size_to_sample=10_000, unit="steps")

A store with tasks also limits the rows in flight, and how far rows may be behind its clock (docs/tasks.md):

    store.limiter.set(in_flight=512, max_stale=4)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import geartrain._native as _native
from geartrain.core.arguments import (
    check_choice,
    check_flag,
    check_function,
    check_real,
    check_whole,
    leave_out,
    optional,
    timeout,
)
from geartrain.core.lifetime import Uncopied
from geartrain.errors import ArgumentError, CallCancelledError, WaitTimeoutError

#: Interval at which a waiter checks for signals and for `stopping`; a wake-up does not wait for it.
LOOK_EVERY_S = 0.25
#: Default timeout of a commit: an actor has nothing else to do.
INSERT_TIMEOUT_S = 600.0
_RATIO = "a finite number above zero"

#: What a limiter counts as an insert.
Unit = Literal["rows", "steps"]
UNITS = ("rows", "steps")
#: A limit of stores with tasks; None: no limit, "keep": as it is.
Limit = int | Literal["keep"] | None


@dataclass(frozen=True)
class LimiterState:
    """Settings and counters of a rate limiter.

    Attributes:
        enabled: whether inserts and samples may have to wait.
        unit, samples_per_insert, min_size_to_sample, error_buffer: as in `RateLimiter.set`; 0 for no ratio.
        inserts, samples: rows or steps inserted, and rows of batches sampled, since it was set.
        insert_wait_s, sample_wait_s: seconds that threads of all processes have waited, together.
        in_flight: rows of a store with tasks whose batch the training loop has not finished. They are being inserted,
            under way, to be drawn, or in a batch.
        most_in_flight: the limit of `in_flight`; None for no limit.
        max_stale: versions that a row may be behind the store's clock; None for any number.
    """

    enabled: bool
    unit: Unit
    samples_per_insert: float
    min_size_to_sample: int
    error_buffer: float
    inserts: int
    samples: int
    insert_wait_s: float
    sample_wait_s: float
    in_flight: int | None = None
    most_in_flight: int | None = None
    max_stale: int | None = None

    @property
    def lead(self) -> float:
        """Distance in samples from the middle of the allowed range; positive if learners are behind the inserts."""
        return self.samples_per_insert * (self.inserts - self.min_size_to_sample) - self.samples

    def __str__(self) -> str:
        limits = [self._ratio()] if self.enabled else []
        if self.most_in_flight is not None:
            limits.append(f"{self.in_flight} rows in flight of at most {self.most_in_flight}")
        if self.max_stale is not None:
            limits.append(f"rows at most {self.max_stale} versions old")
        return "; ".join(limits) or "no limits"

    def _ratio(self) -> str:
        of = "insert" if self.unit == "rows" else "step"
        ratio = f"{self.samples_per_insert:g} samples per {of}" if self.samples_per_insert else "no ratio"
        return (
            f"{ratio}, at least {self.min_size_to_sample} {self.unit}, error buffer {self.error_buffer:g}; so far "
            f"{self.inserts} inserted and {self.samples} sampled, {self.lead:+g} from the middle"
        )


class RateLimiter(Uncopied, elsewhere="its store can be pickled, and has it"):
    """Keeps a ratio between samples and inserts of one store, over all processes. It is off until you call `set`.

    With tasks it also limits the rows in flight, and their age.

    Args:
        native: set by the store; use `store.limiter`.

    Attributes:
        stopping: a function that is called while rows of this process wait to be inserted. Once it returns True, the
            rows are abandoned and the commit raises `CallCancelledError`.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> store = gt.Store.create("doc-limiter", {"x": gt.Field((2,), "float32")}, max_length=1, capacity=100)
        >>> store.limiter.set(samples_per_insert=2, min_size_to_sample=10, error_buffer=8)
        >>> _ = store.insert({"x": np.zeros((12, 1, 2), np.float32)})
        >>> replay = gt.Replay(store, gt.selection.Uniform(seed=0), batch_size=4, prefetch=0)
        >>> _ = [replay.sample() for _ in range(3)]  # d: 2 * 12 - 12 - 2 * 10 = -8, the least that is allowed
        >>> print(store.limiter.state())
        2 samples per insert, at least 10 rows, error buffer 8; so far 12 inserted and 12 sampled, -8 from the middle
        >>> store.close()
    """

    __slots__ = ("_native", "stopping")

    def __init__(self, native: _native.Store) -> None:
        self._native = native
        self.stopping: Callable[[], bool] | None = None

    def set(
        self,
        *,
        samples_per_insert: float | None = None,
        min_size_to_sample: int | None = None,
        error_buffer: float | None = None,
        unit: Unit = "rows",
        afresh: bool | None = None,
        in_flight: Limit = "keep",
        max_stale: Limit = "keep",
    ) -> None:
        """Sets or changes the limits. Processes that wait check the new ones at once.

        Args:
            samples_per_insert: samples for each row inserted, on average; with `unit="steps"` for each step. A sample
                is one row of a batch, whatever the batch shows of it: a transition is one sample. None enforces only
                `min_size_to_sample`.
            min_size_to_sample: samples wait until this many rows, or steps, are available; 1 by default, and at most as
                many as the store holds.
            error_buffer: how far either side may run ahead, in samples. A batch may have at most `2 * error_buffer -
                samples_per_insert` rows. By default `min_size_to_sample * samples_per_insert`, plus ten inserts' worth;
                with `unit="steps"`, plus that of ten of the longest rows.
            unit: what counts as an insert: "rows", or "steps" as `Store.num_steps` counts them. Steps count when they
                can be sampled: those of a recorder when their row is published (`publish_every`) or completed.
            afresh: count inserts and samples from zero. By default True if the limiter was off, or the ratio or the
                unit changes.
            in_flight: most rows in flight, of a store with tasks: inserts wait for others to be finished. A row is in
                flight from its insert until the training loop asks for the batch after its own. Rows in prefetched
                batches are in flight; rows that were dropped, given up or too old are not. None takes the limit off.
            max_stale: most versions that a row may be behind `Store.clock`, of a store with tasks. Older rows are
                removed unless a process holds them; `Claim.stale` tells those that do. None takes the limit off.

        `in_flight` and `max_stale` stay as they are unless you pass them, and so does the ratio if you pass nothing
        else.

        Raises:
            ArgumentError: with these limits a side could never move, a value is out of range, or the store has no tasks
                and `in_flight` or `max_stale` is given.
        """
        of_tasks = self._limits_of_tasks(in_flight, max_stale)
        alone = samples_per_insert is None and min_size_to_sample is None and error_buffer is None and afresh is None
        if of_tasks is not None and alone and check_choice("unit", unit, UNITS) == "rows":
            self._native.limit_tasks(*of_tasks)
            return
        if min_size_to_sample is None:
            min_size_to_sample = 1
        ratio = optional(check_real, "samples_per_insert", samples_per_insert, above=0) or 0.0
        check_whole("min_size_to_sample", min_size_to_sample, 1, 2**32)
        steps = check_choice("unit", unit, UNITS) == "steps"
        about = self._native.describe()
        rows_worth = int(about["max_length"]) if steps else 1
        check_reachable("min_size_to_sample", min_size_to_sample, unit, int(about["capacity"]) * rows_worth)
        if error_buffer is None:
            error_buffer = max(1.0, ratio) * (min_size_to_sample + 10 * rows_worth)
        elif samples_per_insert is None:
            leave_out("without samples_per_insert there is no lead to buffer", error_buffer=error_buffer)
        check_real("error_buffer, so that inserts and samples can both move,", error_buffer, max(1.0, ratio))
        before = self.state()
        if afresh is not None:
            afresh = check_flag("afresh", afresh)
        else:
            afresh = not before.enabled or before.samples_per_insert != ratio or before.unit != unit
        self._native.limit(True, ratio, int(min_size_to_sample), float(error_buffer), afresh, steps)
        if of_tasks is not None:
            self._native.limit_tasks(*of_tasks)

    def _limits_of_tasks(self, in_flight: Limit, max_stale: Limit) -> tuple[int | None, int | None] | None:
        """Both limits of stores with tasks as they are to be; None where they stay."""
        keeps = [isinstance(each, str) and each == "keep" for each in (in_flight, max_stale)]
        if all(keeps):
            return None
        now = self.state()
        if now.in_flight is None:
            raise ArgumentError(
                "in_flight= and max_stale= limit rows that pass through tasks, and this store has none: limit it by "
                "samples_per_insert=, or create it with tasks="
            )
        most, stale = now.most_in_flight, now.max_stale
        if not keeps[0]:
            most = optional(check_whole, "in_flight", in_flight, 1, 2**32)
        if not keeps[1]:
            stale = optional(check_whole, "max_stale", max_stale, 0, 2**62)
        return most, stale

    def off(self) -> None:
        """Turns the limiter off, `in_flight` and `max_stale` included. Calls that wait continue."""
        now = self.state()
        if now.in_flight is not None:
            self._native.limit_tasks(None, None)
        steps = now.unit == "steps"
        self._native.limit(False, now.samples_per_insert, now.min_size_to_sample, now.error_buffer, False, steps)

    def state(self) -> LimiterState:
        """Settings and counters."""
        return LimiterState(**self._native.limiter())

    def admit_inserts(self, n: int, timeout_s: float = INSERT_TIMEOUT_S) -> None:
        """Waits until `n` rows, or steps, may be inserted, and counts them. Every commit calls this.

        Args:
            n: rows; steps if these are the limiter's unit.
            timeout_s: longest wait, in seconds.

        Raises:
            ArgumentError: the limits never admit so many at once.
            WaitTimeoutError: not admitted within `timeout_s`. The message has the limiter's state.
            CallCancelledError: `stopping` returned True.
        """
        n, timeout_s = _checked(n, timeout_s)
        if not self._native.limited:
            return
        state = self.state()
        worth = state.samples_per_insert * n
        start = state.inserts + n <= state.min_size_to_sample or state.lead + worth <= state.error_buffer
        if worth > 2 * state.error_buffer and not start:
            raise ArgumentError(
                f"{n} {state.unit} at once are worth {worth:g} samples, and the error buffer lets the "
                f"lead change by {2 * state.error_buffer:g} at most: insert fewer at a time, or set a larger one"
            )
        self._wait(self._native.admit_inserts, n, timeout_s, self.stopping, state, "inserted")

    def admit_samples(self, n: int, timeout_s: float, stopping: Callable[[], bool] | None = None) -> None:
        """Waits until `n` rows may be sampled, and counts them. `Replay` calls this for every batch.

        Args:
            n: rows.
            timeout_s: longest wait, in seconds.
            stopping: called while waiting; True ends the wait.

        Raises:
            ArgumentError: the limits never admit `n` rows at once.
            WaitTimeoutError: not admitted within `timeout_s`. The message has the limiter's state.
            CallCancelledError: `stopping` returned True.
        """
        n, timeout_s = _checked(n, timeout_s)
        if not self._native.limited:
            return
        state = self.state()
        if state.samples_per_insert and n > 2 * state.error_buffer - state.samples_per_insert:
            raise ArgumentError(
                f"{n} rows can never be sampled at once with {state.samples_per_insert:g} samples per insert and an "
                f"error buffer of {state.error_buffer:g}: it must be at least {(n + state.samples_per_insert) / 2:g}"
            )
        self._wait(self._native.admit_samples, n, timeout_s, stopping, state, "sampled")

    def give_back(self, *, inserts: int = 0, samples: int = 0) -> None:
        """Uncounts what was admitted, but then neither inserted nor sampled.

        Args:
            inserts: rows or steps admitted by `admit_inserts`.
            samples: rows admitted by `admit_samples`.
        """
        inserts, samples = _checked(inserts)[0], _checked(samples)[0]
        if inserts or samples:
            self._native.give_back(inserts, samples)

    def _wait(
        self,
        admit: Callable[[int, float], bool],
        n: int,
        timeout_s: float,
        stopping: Callable[[], bool] | None,
        before: LimiterState,
        what: str,
    ) -> None:
        if stopping is not None:
            check_function("stopping", stopping)
        until_s = time.monotonic() + timeout_s
        counted = f"{n} {before.unit if what == 'inserted' else 'rows'}"
        while not admit(n, max(0.0, min(LOOK_EVERY_S, until_s - time.monotonic()))):
            if stopping is not None and stopping():
                raise CallCancelledError(f"cancelled while {counted} waited to be {what}")
            if time.monotonic() >= until_s:
                raise WaitTimeoutError(
                    f"{counted} could not be {what} within {timeout_s:g} s: {self._why_not(before, what)}"
                )

    def _why_not(self, before: LimiterState, what: str) -> str:
        """What a wait that began at a state was for, whether the other side moved meanwhile, and the limits."""
        now, rows = self.state(), self._native.committed_count()
        selectable = rows if now.unit == "rows" else self._native.step_count()
        if what == "inserted":
            reason, moved, others = "inserts are ahead of samples", now.samples - before.samples, "sampled"
        else:
            reason, moved, others = "samples are ahead of inserts", now.inserts - before.inserts, "inserted"
            if selectable < now.min_size_to_sample:
                reason = f"too few {now.unit} are selectable"
        if moved > 0:
            meanwhile = f"{moved} were {others} meanwhile, so that a longer timeout waits for the rest"
        else:
            meanwhile = f"none was {others} meanwhile"
        return f"{reason}; {meanwhile}. The store's rate limiter has {now}, {selectable} {now.unit} selectable"


def check_reachable(name: str, least: int, unit: Unit, most: int) -> None:
    """Raises `ArgumentError` if a store holds at most `most` rows or steps, and `least` are waited for."""
    if least > most:
        raise ArgumentError(
            f"{name}={least} can never be reached, because the store holds at most {most} {unit}: give at most that, "
            "or create the store with a larger capacity="
        )


def _checked(n: int, timeout_s: float = 0.0) -> tuple[int, float]:
    """How many rows, and for how long they wait."""
    if n.__class__ is int and 0 <= n <= 2**32 and timeout_s.__class__ is float and 0 <= timeout_s <= 1e9:
        return n, timeout_s
    return check_whole("the number of rows", n, 0, 2**32), timeout(timeout_s)


__all__ = ["UNITS", "Limit", "LimiterState", "RateLimiter", "Unit", "check_reachable"]
