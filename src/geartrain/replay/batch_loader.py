"""Builds the batches of consecutive steps, on the consumer's thread or ahead of it on a prefetch thread.

Which thread builds a batch, and when, never changes its contents. They follow from three things: the step, the
strategies' state, and the priority updates submitted before the request.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import geartrain.core.trace as trace
from geartrain.core.threads import ReentrantEvent
from geartrain.errors import StoreClosedError, WaitTimeoutError
from geartrain.ranks.torch_rank_group import NOTE_S
from geartrain.replay.admission import Admission
from geartrain.replay.builder import (
    BatchBuilder,
    BuiltBatch,
    PriorityUpdate,
    StartedBatch,
    State,
    nothing,
)
from geartrain.replay.config import ReplayConfig
from geartrain.replay.prefetch import BuildPlacement, Prefetcher, StillBuildingError
from geartrain.store.store import Store

#: How long a rank that leaves waits for a batch that other ranks take part in, before it leaves them without it.
LEAVE_S = 0.5
_NO_UPDATES: list[PriorityUpdate] = []


class _Awaited:
    """The step whose batch the consumer waits for now; -1 if it does not wait."""

    def __init__(self) -> None:
        self.step = -1

    def is_of(self, step: int) -> bool:
        """Whether it is this step's."""
        return self.step == step


class BatchLoader:
    """Builds the batch of each step, up to `prefetch` of them ahead.

    One thread at a time calls it, apart from `submit_updates`, `take_updates`, `shut` and `interrupt`, which any thread
    may call meanwhile.

    Attributes:
        step: the number of the next batch.
        state: the strategies' state before it.
    """

    def __init__(self, builder: BatchBuilder, config: ReplayConfig, stores: Sequence[Store]) -> None:
        self.step = 0
        self.state: State = [{} for _ in stores]
        self._builder = builder
        self._stores = stores
        self._prefetch = config.prefetch
        self._timeout_s = config.timeout_s
        # Whichever thread costs less, unless other ranks or a device are waited for, or updates count requests.
        either = config.prefetch > 0 and not builder.overlaps and builder.update_lag is None
        self._placement = BuildPlacement(config.prefetch) if either else None
        self._updates: list[PriorityUpdate] = []
        self._newest = [Admission()]  # of the newest batch
        weakref.finalize(self, _finish_newest, self._newest)
        self._stop: int | None = None  # the step after the last one that is wanted
        self._asked = -1  # the last step that the thread has leave to build
        self._ahead: Prefetcher[BuiltBatch] | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._awaited = _Awaited()
        for sampler in builder.samplers:
            sampler.is_awaited = self._awaited.is_of  # knows no loader, as above all the thread should not
        self._make_locks()

    def _make_locks(self) -> None:
        self._updates_lock = threading.RLock()
        self._halt = halt = ReentrantEvent()  # ends a wait for rows and for the stores' rate limiters
        self._shut = shut = ReentrantEvent()  # the same, for good
        for sampler in self._builder.samplers:
            sampler.stopping = lambda: halt.is_set() or shut.is_set()

    def after_fork(self) -> None:
        """In a forked child: locks that threads of the parent held are free; those threads are not here."""
        was_shut = self._shut.is_set()
        self._make_locks()
        if was_shut:
            self._shut.set()
        self._newest[0] = Admission()  # the parent's

    # --- batches --------------------------------------------------------------------------------------------

    def begin(self, stop: int | None) -> None:
        """Begins an iteration that ends before step `stop` (None: it has no end)."""
        self._stop = stop
        if self._builder.update_lag is not None and self._prefetch and stop != self.step:
            # All ranks have to ask before any of them gets a batch, and engines may ask one after the other. A group of
            # one asks alike: which updates a batch sees is told by requests.
            self._ask(self.take_updates())

    def next(self, pause_s: float) -> BuiltBatch:
        """The batch of `step`, which moves on by one. `pause_s`: how long ago its consumer got the one before.

        Raises:
            WaitTimeoutError: not within the time; the next call may have it.
            StoreClosedError: `shut` was called. And what the builder raises.
        """
        self.finish_batch()
        placement = self._placement
        self._awaited.step = self.step
        try:
            built = self._build_here() if self._builds_here() else self._next_ahead()
        finally:
            self._awaited.step = -1
        if placement is not None:
            placement.note(built.make_s, pause_s)
        if built.deliver is not nothing:
            with built.admission:
                built.deliver()
        self.step += 1
        self.state = built.state
        self._newest[0] = built.admission
        return built

    def _build_here(self) -> BuiltBatch:
        updates = self.take_updates() if self._updates else _NO_UPDATES  # only what keeps them has any
        try:
            return _finish(self._builder, self._builder.start(self.step, self.state, updates))
        except BaseException:
            self._return_updates(updates)
            self._builder.restart()
            raise

    def finish_batch(self) -> None:
        """The consumer is through with the batch that it got last: its rows are in flight no more."""
        self._newest[0].finish()

    def put_back(self, step: int, state: State) -> None:
        """Goes back to a step, whose batch nobody gets: it is built again, from this state, when it is asked for."""
        self.restart()
        self._newest[0].give_back()
        self.step, self.state = step, state

    def _next_ahead(self) -> BuiltBatch:
        if self._ahead is not None and not self._ahead.is_mine():
            self.restart()  # a forked child has none of its parent's threads
        try:
            # Over ranks, and of a rate limiter, the thread has an answer in time, if only that there is none.
            told = self._builder.collective or any(
                each.plan.store.native.limited or each.rows_may_come() for each in self._builder.samplers
            )
            patience_s = self._timeout_s + (2 * NOTE_S if told else 0)
            ahead = self._ask(self.take_updates())
            if self._shut.is_set():  # `interrupt` is for the thread that it finds, and may have come before this one
                raise StoreClosedError("this replay was closed")
            return ahead.get(patience_s)
        except StillBuildingError:  # the next call may have it
            waits = "; ".join(sampler.describe_wait() for sampler in self._builder.samplers)
            raise WaitTimeoutError(f"no batch was ready within {patience_s:g} s: {waits}") from None
        except KeyboardInterrupt:
            self._give_up("interrupted")
            raise
        except BaseException as error:
            if self._builder.collective:
                if self._shut.is_set():  # whoever shuts ends the thread, after it has told the others
                    raise
                if self._ahead is not None and not self._ahead.has_raised(error):
                    self._give_up(f"{type(error).__name__} while a batch was waited for")  # which may never come
                    raise
            self.restart()
            raise

    def _builds_here(self) -> bool:
        """Whether this thread builds the next batch; the prefetch thread is ended once its batches are used up."""
        if self._placement is None:
            return self._prefetch == 0 and not self._builder.collective
        if not self._placement.here:
            return False
        if self._ahead is not None and self._ahead.is_mine() and self._asked >= self.step:
            return False
        if self._ahead is not None or self._finalizer is not None:
            self.restart()
        return True

    def _ask(self, updates: list[PriorityUpdate]) -> Prefetcher[BuiltBatch]:
        """The thread that makes batches, with leave to make the one that is `prefetch` ahead of the next."""
        last = self.step + self._prefetch
        if self._placement is not None and self._placement.here:
            last = self.step  # those that are ready already are used up
        if self._stop is not None and self.step < self._stop:
            last = min(last, self._stop - 1)  # nobody will ask for more
        ahead = self._ahead  # a signal's handler may close the replay in here
        if ahead is None:
            step, state, builder = self.step, self.state, self._builder

            def start_next(updates: list[PriorityUpdate]) -> Any:
                nonlocal step, state
                started = builder.start(step, state, updates)
                step, state = step + 1, started.state
                return started

            try:
                ahead = self._ahead = Prefetcher(
                    start_next,
                    "geartrain-prefetch",
                    functools.partial(_finish, builder),  # knows no loader, which the thread would keep alive
                    builder.enter,
                    builder.overlaps,
                    builder.ready,
                    _drop,
                )
            except BaseException as error:  # no more threads: other ranks do not wait for this one
                self._return_updates(updates)
                if builder.collective:
                    builder.abort(str(error))
                raise
            self._finalizer = weakref.finalize(self, _end, ahead, self._halt, self._timeout_s, builder)
            self._asked = self.step - 1
        while self._asked < last:
            self._asked += 1
            ahead.ask(updates)
            updates = []
        self._return_updates(updates)  # with the next request, when this one asked for nothing
        return ahead

    # --- priority updates -----------------------------------------------------------------------------------

    def submit_updates(self, update: PriorityUpdate) -> int:
        """Applies priorities, or keeps them for the next request; returns how many rows are known to be gone.

        Raises:
            ArgumentError: a priority that is not finite, or keys of other stores.
        """
        with self._updates_lock:  # alpha is followed, and used, by one thread at a time
            gone = self._builder.submit_updates(update, self.step)
            if gone is None:
                self._updates.append(update)
        return 0 if gone is None else gone

    def take_updates(self) -> list[PriorityUpdate]:
        """The updates that were kept; they are the caller's now."""
        with self._updates_lock:
            updates, self._updates = self._updates, []
        return updates

    def _return_updates(self, updates: list[PriorityUpdate]) -> None:
        with self._updates_lock:
            self._updates = [*updates, *self._updates]

    # --- leaving --------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Ends the prefetch thread. Batches that it has built are dropped, and built again when they are asked for."""
        ahead, finalizer = self._ahead, self._finalizer
        if ahead is not None:
            # Other ranks make what was asked for as well, and need this one for it.
            left = _stop(ahead, self._halt, self._timeout_s, self._builder.collective)
            self._return_updates([update for updates in left for update in updates])
            self._ahead = None
        if finalizer is not None:
            finalizer.detach()  # or it would keep every prefetcher there ever was
            self._finalizer = None
        self._builder.restart()

    def _give_up(self, reason: str) -> None:
        self._builder.abort(reason)
        if self._ahead is not None:
            _stop(self._ahead, self._halt, 0.5, False)  # a wait looks at it every 10 ms
            self._ahead = None

    def leave(self, reason: str) -> None:
        """Ends the prefetch thread, before `restart`; leaves the other ranks where it waits for them for longer."""
        ahead = self._ahead
        if ahead is None or not ahead.is_mine():
            return
        _stop(ahead, self._halt, LEAVE_S, True)
        if ahead.is_at_work():
            self._builder.abort(reason)

    def shut(self) -> None:
        """Ends waits for rows and limiters, for good."""
        self._shut.set()

    def interrupt(self, error: BaseException) -> None:
        """Has a `next` that waits for the prefetch thread raise this."""
        ahead = self._ahead  # its thread may drop it meanwhile
        if ahead is not None:
            ahead.interrupt(error)


def _finish_newest(newest: list[Admission]) -> None:
    newest[0].finish()


def _drop(batch: StartedBatch) -> None:
    """Gives back what rate limiters have admitted for a batch that nobody gets."""
    batch.admission.give_back()


def _finish(builder: BatchBuilder, started: Any) -> BuiltBatch:
    """The batch that was started, with a slice in the trace for what it took to make it."""
    began_s = time.perf_counter() if trace.on else 0.0
    built = builder.finish(started)
    if trace.on:
        built.flow = trace.new_flow()
        ended_s = time.perf_counter()
        if math.isfinite(built.make_s):  # from the draw on; else what is left after other ranks have sent theirs
            began_s = min(began_s, ended_s - built.make_s)
        trace.slice_of("make batch", "replay", began_s, ended_s, flow_out=built.flow, rows=len(built.batch))
    return built


def _end(ahead: Prefetcher[Any], halt: ReentrantEvent, timeout_s: float, builder: BatchBuilder) -> None:
    """Ends the thread of a loader that was dropped, or that the interpreter's end finds.

    Other ranks get their part of what was asked for, within the time. But a daemon thread that still waits for a batch
    at the interpreter's end may wait for ranks that never ask for it: those are left.
    """
    _stop(ahead, halt, timeout_s, builder.collective, LEAVE_S)
    if builder.collective and ahead.is_mine() and ahead.is_at_work() and ahead.is_awaited():
        builder.abort("its process ended while a batch was waited for")


def _stop(
    ahead: Prefetcher[Any], halt: ReentrantEvent, timeout_s: float, finish: bool, awaited_s: float | None = None
) -> list[Any]:
    if not ahead.is_mine():
        return []
    halt.set()
    try:
        return ahead.stop(timeout_s, finish=finish, awaited_s=awaited_s)
    finally:
        halt.clear()


def close_here(pid: int, close: Callable[[], object]) -> None:
    """Closes what belongs to a process, unless this is one that was forked from it."""
    if pid == os.getpid():
        close()
