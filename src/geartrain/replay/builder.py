"""`BatchBuilder`: builds the batches of a replay, from a `RowSource`; and the priority updates that come back."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from geartrain.core.keys import Keys, check_keys
from geartrain.errors import ArgumentError
from geartrain.replay.admission import Admission
from geartrain.replay.batch import Batch
from geartrain.replay.sampler import StoreSampler
from geartrain.store.priorities import set_in_draw_order

_LARGEST = np.finfo(np.float64).max
# What every strategy has to know at its next step.
State = list[dict[str, int]]


@dataclass(frozen=True)
class PriorityUpdate:
    """Priorities (n,) that a consumer has given to rows of its batches."""

    keys: Keys
    priorities: NDArray[np.float64]


def given_priorities(rows: Keys | ArrayLike, priorities: ArrayLike) -> PriorityUpdate:
    """The update of rows (n,) by an array, a tensor on any device or a list of (n,) numbers, copied; or by one number.

    Raises:
        ArgumentError: these are no keys, no numbers, or not as many.
    """
    rows = check_keys(rows)
    given: Any = priorities
    if hasattr(given, "detach"):
        given = given.detach().cpu()
        if given.dtype.itemsize >= 4:
            given = given.numpy()  # sooner done than what NumPy asks of a tensor; it lacks some of the small types
    try:
        if given.__class__ is not np.ndarray and not hasattr(given, "detach"):
            given = np.asarray(given)
        if getattr(given.dtype, "kind", "f") in "SUcmM":  # which NumPy may read as numbers, or cut
            raise TypeError
        values = np.array(given, np.float64) if given.dtype.itemsize <= 8 else _narrowed(given)
    except (TypeError, ValueError, OverflowError):
        found = getattr(given, "dtype", type(given).__name__)
        raise ArgumentError(f"priorities are numbers, found {found}") from None
    if values.ndim == 0:
        values = np.full(len(rows), values)
    if values.shape != (len(rows),):
        raise ArgumentError(f"{len(rows)} rows were given with priorities of shape {values.shape}")
    return PriorityUpdate(rows, values)


def _narrowed(wide: NDArray[np.longdouble]) -> NDArray[np.float64]:
    """Numbers of more than 64 bits; those beyond all of 64 bits are infinite, which is refused, without a warning."""
    with np.errstate(over="ignore"):
        return np.array(wide, np.float64)


def nothing() -> None:
    """Done."""


@dataclass(slots=True)  # not frozen, which takes as long again as all else that is done for a batch here
class BuiltBatch:
    """A batch that is built and ready for the consumer.

    Attributes:
        batch: the batch.
        state: the strategies' state after it.
        deliver: called on the consumer's thread when it takes the batch.
        make_s: how long building took; inf if the batch also depends on other work, such as other ranks or a device.
        transformed: result of the transform, in a tuple; None if there is no transform.
        flow: the trace's arrow from the building of the batch to its consumer.
        admission: rows that rate limiters admitted for the batch. They are given back if the consumer does not get it.
    """

    batch: Batch
    state: State
    deliver: Callable[[], None] = nothing
    make_s: float = float("inf")
    transformed: tuple[Any] | None = None
    flow: str | None = None
    admission: Admission = field(default_factory=Admission)


class StartedBatch(Protocol):
    """A batch that was started and may have to be finished."""

    @property
    def state(self) -> State:
        """The strategies' state after it."""
        ...

    @property
    def admission(self) -> Admission:
        """Rows that rate limiters have admitted for the batch so far."""
        ...


class RowSource(ABC):
    """Source of the batches of a `BatchBuilder`.

    `start` and `finish` are called on one thread at a time, the prefetch thread if there is one. The consumer's thread
    calls the other methods while no batch is being built. It may call `submit_updates`, `stats`, `describe`, `abort`
    and `close` at any time.

    Attributes:
        samplers: one for each store.
        store_ids: ids of the stores, in their order; over several ranks, of all shards of all stores.
        rows: rows of a batch, as this process gets it.
        update_lag: number of batches after which priority updates take effect; None: at once. With a number, updates
            come with requests. So every batch has to be requested `prefetch` batches ahead, on the prefetch thread.
        overlaps: whether the next batch should be started before this one is finished, because `finish` waits for
            others.
        collective: whether a batch takes rounds of messages among ranks. Such a batch is built on the prefetch thread
            even with prefetch=0, because other ranks need this rank's part while its consumer is at work.
    """

    samplers: list[StoreSampler]
    store_ids: list[int]
    rows: int
    update_lag: int | None = None
    overlaps = False
    collective = False

    @property
    @abstractmethod
    def callbacks(self) -> list[str]:
        """The parts of a batch that Python code is called for, by name."""

    def enter(self) -> None:
        """Called first on a prefetch thread."""
        return

    @abstractmethod
    def start(self, step: int, state: State, updates: list[PriorityUpdate], admission: Admission) -> Any:
        """Applies the updates that are due, and draws and reads the batch of a step.

        Updates that have reached their stores, or wait there, are taken out of the list: they are not given again when
        the batch fails.

        Args:
            admission: to which what rate limiters admit is added, by now or by the end of `finish`.

        Returns:
            A `BuiltBatch`; where the source `overlaps`, a `StartedBatch`.
        """

    def ready(self, started: Any) -> bool:
        """Whether `finish` would not wait for other ranks; waits a little for them. What it raises `finish` raises."""
        return True

    def finish(self, started: Any) -> BuiltBatch:
        """The batch, once all of its rows are known to be whole. Called where `overlaps`."""
        built: BuiltBatch = started
        return built

    @abstractmethod
    def submit_updates(self, update: PriorityUpdate, step: int) -> int | None:
        """Applies priorities and returns how many rows were gone; None where `start` or `settle` is to get them.

        Raises:
            ArgumentError: a priority that is not finite, or keys of other stores.
        """

    def settle(self, step: int, updates: list[PriorityUpdate]) -> None:
        """Applies all updates that wait, and these. Collective where `start` is."""
        return

    def restart(self) -> None:
        """The next batch is the first one of a new run: it sees all updates that were given by then."""
        return

    def rewind(self) -> None:
        """Forgets what later batches have used, and updates that wait, before the state of an earlier one is loaded."""
        return

    def stats(self, make_s: float) -> dict[str, Any]:
        """Figures beside those of all sources, whose batches took so many seconds."""
        return {}

    def describe(self) -> list[dict[str, Any]]:
        """For each store, how its rows come to a device; empty for host memory."""
        return []

    def abort(self, reason: str) -> None:
        """Leaves at once, and tells other ranks why."""
        return

    @abstractmethod
    def close(self) -> None:
        """Releases devices and segments, and leaves other ranks in good order."""


class BatchBuilder:
    """Builds the batch of each step: waits for the rate limiters, has the source draw and read its rows, transforms it.

    Methods and attributes that a `RowSource` also has are those of the source. If `start` or `finish` raises, it gives
    back the rows that rate limiters admitted for the batch. If a batch is dropped after that and before it reaches the
    consumer, the code that drops it gives them back.

    Args:
        source: source of the rows.
        transform: called with each batch; its result is delivered.
    """

    def __init__(self, source: RowSource, transform: Callable[[Batch], Any] | None = None) -> None:
        self.source = source
        self.samplers = source.samplers
        self.store_ids = source.store_ids
        self.rows = source.rows
        self.update_lag = source.update_lag
        self.overlaps = source.overlaps
        self.collective = source.collective
        # The source's own.
        self.submit_updates, self.settle = source.submit_updates, source.settle
        self.enter, self.restart, self.rewind = source.enter, source.restart, source.rewind
        self.describe, self.abort, self.close = source.describe, source.abort, source.close
        self._transform = transform
        self._make_s = 0.0
        self._built = 0

    def start(self, step: int, state: State, updates: list[PriorityUpdate]) -> Any:
        """Starts the batch of a step. All but the transform is done when this returns, unless `overlaps`."""
        began_s = time.perf_counter()
        with Admission() as admission:
            started = self.source.start(step, state, updates, admission)
        if not self.overlaps:
            started.make_s = time.perf_counter() - began_s
            self._built += 1
        self._make_s += time.perf_counter() - began_s
        return started

    def ready(self, started: Any) -> bool:
        """Whether `finish` would not wait for other ranks."""
        return not self.overlaps or self.source.ready(started)

    def finish(self, started: Any) -> BuiltBatch:
        """The batch, transformed."""
        built: BuiltBatch = started
        if self.overlaps:
            began_s = time.perf_counter()
            with started.admission:
                built = self.source.finish(started)
            self._make_s += time.perf_counter() - began_s
            self._built += 1
        if self._transform is not None:
            self._apply(self._transform, built)
        return built

    def _apply(self, transform: Callable[[Batch], Any], built: BuiltBatch) -> None:
        began_s = time.perf_counter()
        for sampler in self.samplers:
            sampler.stage = "in `transform`"
        try:
            with built.admission:
                built.transformed = (transform(built.batch),)
        except BaseException as error:
            if self.collective:  # the other ranks have their parts of the batch, and do not build it again
                self.abort(f"its transform raised {type(error).__name__}: {error}")
            raise
        finally:
            for sampler in self.samplers:
                sampler.stage = "idle"
        built.make_s += time.perf_counter() - began_s

    def stats(self) -> dict[str, Any]:
        callbacks = [*self.source.callbacks, *([] if self._transform is None else ["transform"])]
        return {
            "built": self._built,
            "make_s": self._make_s,
            "redrawn": sum(sampler.redrawn for sampler in self.samplers),
            **self.source.stats(self._make_s),
            "path": f"native, calls {', '.join(dict.fromkeys(callbacks))}" if callbacks else "native",
        }


def apply_updates(samplers: Sequence[StoreSampler], update: PriorityUpdate, step: int) -> int:
    """Sets finite priorities in this process's stores, and returns how many rows were gone.

    Raises:
        ArgumentError: keys of other stores. None of the priorities is set.
    """
    keys, priorities = update.keys, update.priorities
    if len(samplers) == 1:
        sampler = samplers[0]
        if type(keys.store) is not int or keys.store != sampler.plan.store.id:
            places_of(samplers, keys)
        sampler.follow_alpha(step)
        return _set(sampler, keys, priorities) if len(priorities) else 0
    places, gone = places_of(samplers, keys), 0
    for number, sampler in enumerate(samplers):
        sampler.follow_alpha(step)
        mine = np.flatnonzero(places == number)
        if len(mine):
            gone += _set(sampler, keys[mine], priorities[mine])
    return gone


def places_of(samplers: Sequence[StoreSampler], keys: Keys) -> NDArray[np.int64]:
    """(n,) which store each key is of. Raises `ArgumentError` for keys of other stores."""
    ids = np.array([sampler.plan.store.id for sampler in samplers], np.uint64)
    return keys.places_among(ids, "stores of this replay")


def _set(sampler: StoreSampler, keys: Keys, priorities: NDArray[np.float64]) -> int:
    store, given = sampler.plan.store, raised(priorities, sampler.alpha)
    if sampler.priority_copy is None:
        return set_in_draw_order(store, keys, given)
    return sampler.change_priorities(keys.row, lambda: set_in_draw_order(store, keys, given))


def check_priorities(priorities: NDArray[np.float64]) -> None:
    """Raises `ArgumentError` unless all priorities are finite."""
    # Of large ones the sum may not be finite, and they are: `vdot` does not warn of that overflow, as `dot` does.
    if math.isfinite(np.vdot(priorities, priorities)):
        return
    bad = np.flatnonzero(~np.isfinite(priorities))
    if bad.size:
        raise ArgumentError(f"priority {bad[0]} is not finite: {priorities[bad[0]]}")


def raised(priorities: NDArray[np.float64], alpha: float) -> NDArray[np.float64]:
    """|priority| ** alpha, as a store takes it: finite."""
    if alpha == 1:
        return np.abs(priorities)
    if alpha < 1:  # which makes no finite number infinite
        lower: NDArray[np.float64] = np.abs(priorities) ** alpha
        return lower
    with np.errstate(over="ignore"):
        powers: NDArray[np.float64] = np.minimum(np.abs(priorities) ** alpha, _LARGEST)
        return powers


__all__ = [
    "BatchBuilder",
    "BuiltBatch",
    "PriorityUpdate",
    "RowSource",
    "StartedBatch",
    "State",
    "apply_updates",
    "check_priorities",
    "given_priorities",
    "nothing",
    "places_of",
    "raised",
]
