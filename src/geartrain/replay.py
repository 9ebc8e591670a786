"""Batches for training, selected and fetched while the model works on the ones before.

`Replay` is where everything meets: a strategy draws rows, their windows are placed, the bytes are gathered, and
a row that was lost meanwhile is drawn again. All of it happens on a thread of its own, ahead of the consumer.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from geartrain import _native
from geartrain.batch import Batch
from geartrain.errors import (
    CorruptStoreError,
    NotEnoughRowsError,
    SchemaError,
    StoreClosedError,
    WaitTimeoutError,
)
from geartrain.fetch import As, Pad, Plan, Raw
from geartrain.keys import Keys
from geartrain.selection import Candidates, Drawn, Strategy
from geartrain.store import Store

# A draw that loses its row this often in a row is drawing from a store that turns over faster than it can be read.
MAX_ATTEMPTS = 64


class Replay:
    """An endless (or `steps` long) sequence of batches drawn from a store.

    Batches are a function of the store's contents, the strategy's seed and the step number. `state_dict` holds
    the step, so a resumed run goes on with the batches that the uninterrupted one would have drawn.

    Args:
        store: where the rows are.
        selection: the strategy, e.g. `geartrain.selection.Weighted(seed=0)`.
        batch_size: rows per batch, drawn with replacement.
        fields: names of the fields wanted; all by default.
        window: steps per row. Each window ends at a step drawn uniformly from the row's steps and holds nothing
            later. Whole rows by default.
        pad: side on which windows are padded at the start of a row.
        prefetch: batches prepared ahead. With 0 each batch is made when it is asked for, and sees every weight
            updated before; with more, a batch may have been drawn up to so many steps earlier.
        as_: "torch" tensors or "numpy" arrays.
        steps: batches per iteration; endless by default.
        min_rows: fewer selectable rows than this are an error, not a batch of near-copies. 1 by default; for a store
            with `max_times_sampled` the batch size, lest half a batch use up rows that nobody gets to see.
        threads: threads that copy; up to 4 of the process's cores by default.
        timeout_s: longest wait for a batch.

    Raises:
        FieldError, SchemaError: what was asked for does not fit the store.

    Example:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> store = gt.Store.create("doc-replay", {"x": gt.Field((10, 2), "float32")}, capacity=4)
        >>> _ = store.insert({"x": np.zeros((4, 10, 2), np.float32)})
        >>> with gt.Replay(store, gt.selection.Uniform(seed=0), batch_size=3, window=5, steps=2) as replay:
        ...     [tuple(batch["x"].shape) for batch in replay]
        [(3, 5, 2), (3, 5, 2)]
        >>> store.close()
    """

    def __init__(
        self,
        store: Store,
        selection: Strategy,
        batch_size: int,
        *,
        fields: Sequence[str] | None = None,
        window: int | None = None,
        pad: Pad = "left",
        prefetch: int = 2,
        as_: As = "torch",
        steps: int | None = None,
        min_rows: int | None = None,
        threads: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if not isinstance(selection, Strategy):
            raise SchemaError(f"selection must be a strategy such as Uniform(seed=0), found {selection!r}")
        for what, value, least in (
            ("batch_size", batch_size, 1),
            ("prefetch", prefetch, 0),
            ("min_rows", 1 if min_rows is None else min_rows, 1),
        ):
            if value < least:
                raise SchemaError(f"{what} must be at least {least}, found {value}")
        if steps is not None and steps < 0:
            raise SchemaError(f"steps must be at least 0, found {steps}")
        if not 0 <= timeout_s <= 1e9:
            raise SchemaError(f"timeout_s must be from 0 to 1e9 seconds, found {timeout_s}")
        self.store = store
        self.selection = selection
        self.batch_size = batch_size
        self.steps = steps
        self._plan = Plan.make(store, fields, window, pad, as_, threads)
        if min_rows is None:
            min_rows = 1 if store.options["max_times_sampled"] is None else batch_size
        self._maker = _BatchMaker(self._plan, selection, batch_size, min_rows)
        self._prefetch = prefetch
        self._timeout_s = timeout_s
        self._step = 0
        self._iteration = 0
        self._ahead: _Prefetcher | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._closed = False
        self._batches = 0
        self._bytes = 0
        self._wait_s = 0.0
        self._started_s: float | None = None
        self._last_s = 0.0

    # --- batches --------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        """Batches from the current step on. One iteration at a time: a new one ends the one before."""
        self._restart()
        self._iteration += 1
        return self._iterate(self._iteration, None if self.steps is None else self._step + self.steps)

    def _iterate(self, iteration: int, stop: int | None) -> Iterator[Batch]:
        while iteration == self._iteration and (stop is None or self._step < stop):
            yield self.sample()

    def sample(self) -> Batch:
        """The next batch.

        Raises:
            EmptyStoreError, NotEnoughRowsError: too few rows are selectable.
            WaitTimeoutError: no batch within `timeout_s`.
        """
        if self._closed:
            raise StoreClosedError("this replay was closed")
        asked_s = time.perf_counter()
        if self._started_s is None:
            self._started_s = asked_s
        if self._prefetch == 0:
            batch = self._maker.make(self._step)
        else:
            if self._ahead is not None and not self._ahead.is_mine():
                self._restart()  # a forked child has none of its parent's threads
            if self._ahead is None:
                self._ahead = _Prefetcher(self._maker, self._step, self._prefetch)
                self._finalizer = weakref.finalize(self, self._ahead.stop, self._timeout_s)
            try:
                batch = self._ahead.get(self._timeout_s)
            except WaitTimeoutError:
                raise  # the batch is still being made: the next call may have it
            except BaseException:
                self._restart()
                raise
        self._last_s = time.perf_counter()
        self._wait_s += self._last_s - asked_s
        self._batches += 1
        self._bytes += batch.nbytes
        self._step += 1
        return batch

    def __len__(self) -> int:
        """Batches per iteration. Raises TypeError for an endless replay."""
        if self.steps is None:
            raise TypeError("this replay is endless and has no length; give it steps=...")
        return self.steps

    def update_weights(self, rows: Keys, weights: ArrayLike) -> int:
        """Sets the weights of rows of earlier batches; returns how many were gone. See `Store.update_weights`."""
        return self.store.update_weights(rows, weights)

    # --- state and figures ----------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of the next batch."""
        return self._step

    def state_dict(self) -> dict[str, int]:
        """All that is needed to go on with the same batches, given the same rows: seed and step."""
        return {"seed": self.selection.seed, "step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on where `state_dict` was taken. Raises `SchemaError` when the strategy has another seed."""
        if state["seed"] != self.selection.seed:
            raise SchemaError(f"the state was taken with seed {state['seed']}, the strategy has {self.selection.seed}")
        self._restart()
        self._step = int(state["step"])

    def stats(self) -> dict[str, float]:
        """Figures since the first batch.

        batches, rows, bytes (delivered); wait_s (the consumer's), elapsed_s, wait_share; make_s (the time spent
        selecting and fetching, on whichever thread), gb_per_s and samples_per_s of that time; redrawn (rows
        lost between their draw and their copy).
        """
        elapsed_s = 0.0 if self._started_s is None else self._last_s - self._started_s
        make_s = self._maker.make_s
        made = self._maker.made
        bytes_per_batch = self._bytes / self._batches if self._batches else 0.0
        return {
            "batches": self._batches,
            "rows": self._batches * self.batch_size,
            "bytes": self._bytes,
            "wait_s": self._wait_s,
            "elapsed_s": elapsed_s,
            "wait_share": self._wait_s / elapsed_s if elapsed_s else 0.0,
            "make_s": make_s,
            "gb_per_s": made * bytes_per_batch / make_s / 1e9 if make_s else 0.0,
            "samples_per_s": made * self.batch_size / make_s if make_s else 0.0,
            "redrawn": self._maker.redrawn,
        }

    # --- leaving --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stops preparing batches. The store stays open; it is the caller's."""
        self._restart()
        self._closed = True

    def _restart(self) -> None:
        if self._ahead is not None:
            self._ahead.stop(self._timeout_s)
            self._ahead = None
        if self._finalizer is not None:
            self._finalizer.detach()  # or it would keep every prefetcher there ever was
            self._finalizer = None

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Replay({self.store!r}, {self.selection!r}, batch_size={self.batch_size}, step={self._step})"


class _BatchMaker:
    """Makes the batch of a given step: draw, count, place windows, copy; again for what was lost."""

    def __init__(self, plan: Plan, selection: Strategy, batch_size: int, min_rows: int) -> None:
        self.plan = plan
        self.selection = selection
        self.batch_size = batch_size
        self.min_rows = min_rows
        self.candidates = Candidates(plan.store.native)
        self.expires = plan.store.options["max_age_s"] is not None
        self.limited = plan.store.options["max_times_sampled"] is not None
        self.make_s = 0.0
        self.made = 0
        self.redrawn = 0

    def make(self, step: int) -> Batch:
        began_s = time.perf_counter()
        store = self.plan.store
        if self.expires:
            store.expire()
        if len(store) < self.min_rows:
            raise NotEnoughRowsError(
                f"{self.min_rows} selectable rows are asked for, the store {store.name!r} has {len(store)}"
            )
        numbers = np.arange(self.batch_size, dtype=np.uint32)
        drawn, raw = self._draw_and_fetch(step, 0, numbers)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            lost = np.flatnonzero(raw.torn)
            if lost.size == 0:
                break
            if attempt == MAX_ATTEMPTS:
                raise CorruptStoreError(
                    f"{lost.size} rows were overwritten before they could be copied, {MAX_ATTEMPTS} times in a "
                    f"row; the store of {store.capacity} rows is too small for the rate of inserts"
                )
            self.redrawn += int(lost.size)
            again, fetched = self._draw_and_fetch(step, attempt, numbers[lost])
            raw.put(lost, fetched)
            drawn.rows[lost] = again.rows
            drawn.generations[lost] = again.generations
            drawn.probability[lost] = again.probability
        batch = self.plan.batch(raw, Keys(drawn.rows, drawn.generations), drawn.probability, step)
        self.make_s += time.perf_counter() - began_s
        self.made += 1
        return batch

    def _draw_and_fetch(self, step: int, attempt: int, numbers: NDArray[np.uint32]) -> tuple[Drawn, Raw]:
        store, seed = self.plan.store, self.selection.seed
        drawn = self.selection.select(self.candidates, len(numbers), step, attempt=attempt, numbers=numbers)
        if drawn.failed:
            # Sums that disagree with their leaves: somebody died in the middle of an update. Repair, then redraw.
            store.reap()
            drawn = self.selection.select(self.candidates, len(numbers), step, attempt=attempt, numbers=numbers)
            if drawn.failed:
                store.native.rebuild()  # or somebody living is in the middle of one: this waits for them
                drawn = self.selection.select(self.candidates, len(numbers), step, attempt=attempt, numbers=numbers)
            if drawn.failed:
                raise CorruptStoreError(f"{drawn.failed} draws found no row; store.audit() tells what is wrong")
        taken = store.native.count_samples(drawn.rows, drawn.generations)
        ends = None
        if self.plan.window:
            lengths = store.native.lengths(drawn.rows)
            ends = _native.window_ends(seed, step, attempt, numbers, lengths)
        raw = self.plan.fetch(drawn.rows, drawn.generations, ends)
        if self.limited:
            store.native.release_spent(drawn.rows, drawn.generations)
            raw.torn[taken == 0] = 1  # somebody else drew its last allowed sample first
        return drawn, raw


class _Prefetcher:
    """A thread that makes batches ahead of their use, in step order, at most `depth` of them."""

    def __init__(self, maker: _BatchMaker, step: int, depth: int) -> None:
        self._maker = maker
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=depth)
        self._pid = os.getpid()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(step,), name="geartrain-prefetch", daemon=True)
        self._thread.start()

    def get(self, timeout_s: float) -> Batch:
        try:
            item = self._ready.get(timeout=timeout_s)
        except queue.Empty:
            raise WaitTimeoutError(f"no batch was ready within {timeout_s} s") from None
        if isinstance(item, BaseException):
            raise item
        return item

    def is_mine(self) -> bool:
        """Whether the thread belongs to this process, and not to the one it was forked from."""
        return self._pid == os.getpid()

    def stop(self, timeout_s: float) -> None:
        if not self.is_mine():
            return
        self._stopping.set()
        deadline_s = time.monotonic() + timeout_s
        # A thread stuck in a strategy that never returns is left behind; it ends when it comes back. The collector
        # may call this on the thread itself.
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            with suppress(queue.Empty):  # room for the put it may be waiting in
                self._ready.get_nowait()
            if self._thread is threading.current_thread():
                return
            self._thread.join(timeout=0.01)
        with suppress(queue.Empty):
            while True:
                self._ready.get_nowait()

    def _run(self, step: int) -> None:
        while not self._stopping.is_set():
            item: Batch | BaseException
            try:
                item = self._maker.make(step)
            except BaseException as error:
                item = error
            self._ready.put(item)
            if isinstance(item, BaseException):
                return
            step += 1
