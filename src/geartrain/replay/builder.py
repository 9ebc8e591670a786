"""Batch builders: the protocol that `Replay` speaks, and batches built on the host from one store or several."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

import geartrain._native as _native
from geartrain.core.keys import Keys, check_keys
from geartrain.errors import ArgumentError
from geartrain.replay.admission import Admission
from geartrain.replay.batch import Batch
from geartrain.replay.native_batch import BatchPlan, native_batch
from geartrain.replay.sampler import StoreSampler
from geartrain.replay.store_waits import wait_together
from geartrain.selection.mixture import Selection, quotas_of
from geartrain.store.priorities import apply_updates as apply_to_store

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
    """A batch, the strategies' state after it, what the consumer's thread calls when it takes the batch, and how long
    it took to make where that is all there is to it (inf: there is more, such as other ranks or a device).

    `admission` is what rate limiters have admitted for the batch, to be given back where the consumer does not get it.
    `transformed` is what a transform made of the batch, in a tuple; None
    where there is no transform. `flow` is the arrow of a trace from its making to its consumer.
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
        """What rate limiters have admitted for the batch by now."""
        ...


Started = TypeVar("Started", bound=StartedBatch)


class BatchBuilder(Protocol[Started]):
    """Builds the batch of each step: on the host, on a device, or together with other ranks.

    `start` and `finish` are called on one thread at a time, the replay's own where it prefetches; the other methods on
    the consumer's while no batch is being built, apart from `submit_updates`, `stats`, `describe`, `abort` and `close`.
    Where `start` or `finish` raise they give back what rate limiters have admitted for the batch; of one that they
    return and nobody gets whoever drops it does.

    Attributes:
        samplers: of each store.
        store_ids: of the stores, in their order; over several ranks, of all shards of all stores.
        rows: of a batch, as this process gets it.
        builds_anywhere: whether a batch may as well be built on the consumer's thread: nothing but rows is waited for.
        own_thread: whether batches are built on the prefetch thread with prefetch=0 too: other ranks need this one's
            part of what was asked for while its consumer does something else.
        overlaps: whether the next batch should be started before this one is finished.
        collective: whether other ranks take part in each batch, and so have to be asked for it too.
    """

    samplers: list[StoreSampler]
    store_ids: list[int]
    rows: int
    builds_anywhere: bool
    own_thread: bool
    overlaps: bool
    collective: bool

    def enter(self) -> None:
        """Called first on a thread that builds batches."""
        ...

    def start(self, step: int, state: State, updates: list[PriorityUpdate]) -> Started:
        """Starts the batch of a step, after the priority updates that were kept for it."""
        ...

    def ready(self, started: Started) -> bool:
        """Whether `finish` would not wait for other ranks; waits a little for them. What it raises `finish` raises."""
        ...

    def finish(self, started: Started) -> BuiltBatch:
        """The batch, once all of its rows are known to be whole."""
        ...

    def submit_updates(self, update: PriorityUpdate, step: int) -> int | None:
        """Applies priorities and returns how many rows were gone; None where `start` or `settle` is to get them.

        Raises:
            ArgumentError: a priority that is not finite, or keys of other stores.
        """
        ...

    def settle(self, step: int, updates: list[PriorityUpdate]) -> None:
        """Applies the updates that were kept. Collective where `start` is."""
        ...

    def rewind(self) -> None:
        """Forgets what later batches have used, before the state of an earlier one is loaded."""
        ...

    def stats(self) -> dict[str, Any]:
        """`built` (batches), `make_s` and `redrawn`; and more where several ranks take part, or on the host `path`."""
        ...

    def describe(self) -> list[dict[str, Any]]:
        """For each store, how its rows come to a device; empty for host memory."""
        ...

    def abort(self, reason: str) -> None:
        """Leaves at once, and tells other ranks why."""
        ...

    def close(self) -> None:
        """Releases devices and segments, and leaves other ranks in good order."""
        ...


class HostBatchBuilder:
    """Builds batches in host memory; see `BatchBuilder`.

    Args:
        samplers: of each store.
        selection: the strategy, or the mixture.
        batch_size: rows of a batch.
        transform: called with each batch; what it returns is delivered.
    """

    builds_anywhere = True
    own_thread = False
    overlaps = False
    collective = False

    def __init__(
        self,
        samplers: list[StoreSampler],
        selection: Selection,
        batch_size: int,
        transform: Callable[[Batch], Any] | None = None,
    ) -> None:
        self.samplers = samplers
        self.rows = batch_size
        self.mixed = selection is not samplers[0].strategy
        self.store_ids = [sampler.plan.store.id for sampler in samplers]
        self._selection = selection
        self._transform = transform
        self._transitions = samplers[0].transitions
        self._shown: BatchPlan = self._transitions or samplers[0].plan
        self._make_s = 0.0
        self._built = 0

    def enter(self) -> None:
        """See `BatchBuilder`."""

    def start(self, step: int, state: State, updates: list[PriorityUpdate]) -> BuiltBatch:
        """See `BatchBuilder`. All but the transform is done when this returns."""
        began_s = time.perf_counter()
        with Admission() as admission:
            if self.mixed:
                native = self.samplers[0].empty_batch(self.rows, shards=True)
                after = self.sample_into(native, step, state, admission)
            else:
                native, last = self.samplers[0].sample(self.rows, step, state[0], admission)
                after = [last]
            if self._transitions is not None:
                self._transitions.settle(native)  # which asks functions of the user's
            batch = native_batch(native, self._shown, step, self.store_ids)
            make_s = time.perf_counter() - began_s
            self._make_s += make_s
            self._built += 1
            return BuiltBatch(batch, after, make_s=make_s, admission=admission)

    def note(self, make_s: float) -> None:
        """Counts a batch that took so long to make."""
        self._make_s += make_s
        self._built += 1

    def ready(self, started: BuiltBatch) -> bool:
        """See `BatchBuilder`."""
        return True

    def finish(self, started: BuiltBatch) -> BuiltBatch:
        """See `BatchBuilder`."""
        if self._transform is not None:
            self._apply(self._transform, started)
        return started

    def _apply(self, transform: Callable[[Batch], Any], built: BuiltBatch) -> None:
        began_s = time.perf_counter()
        for sampler in self.samplers:
            sampler.stage = "in `transform`"
        try:
            with built.admission:
                built.transformed = (transform(built.batch),)
        finally:
            for sampler in self.samplers:
                sampler.stage = "idle"
        built.make_s += time.perf_counter() - began_s

    def quotas(self, step: int) -> list[int]:
        """Rows from each store in the batch of a step."""
        return quotas_of(self._selection, self.rows, step)

    def sample_into(self, batch: _native.SampledBatch, step: int, state: State, admission: Admission) -> State:
        """Fills a batch with the rows of a step; returns the strategies' state after it."""
        state, first = list(state), 0
        wait_together(self.samplers)
        for number, (sampler, quota) in enumerate(zip(self.samplers, self.quotas(step), strict=True)):
            if quota:
                _, state[number] = sampler.sample(quota, step, state[number], admission, batch, first)
                batch.set_shard(first, quota, number)
                first += quota
        return state

    def submit_updates(self, update: PriorityUpdate, step: int) -> int | None:
        """See `BatchBuilder`."""
        return apply_updates(self.samplers, update, step)

    def settle(self, step: int, updates: list[PriorityUpdate]) -> None:
        """See `BatchBuilder`. None are kept."""

    def rewind(self) -> None:
        """See `BatchBuilder`. Nothing is kept but the state."""

    def stats(self) -> dict[str, Any]:
        """See `BatchBuilder`."""
        callbacks = [name for sampler in self.samplers for name in sampler.callbacks]
        callbacks += [] if self._transform is None else ["transform"]
        return {**build_stats(self._built, self._make_s, self.samplers), "path": path_of(callbacks)}

    def describe(self) -> list[dict[str, Any]]:
        """See `BatchBuilder`."""
        return []

    def abort(self, reason: str) -> None:
        """See `BatchBuilder`. No other rank waits."""

    def close(self) -> None:
        """See `BatchBuilder`. Host memory is recycled by itself."""


def apply_updates(samplers: Sequence[StoreSampler], update: PriorityUpdate, step: int) -> int:
    """Sets priorities in this process's stores, and returns how many rows were gone.

    Raises:
        ArgumentError: a priority that is not finite, or keys of other stores. None of the priorities is set.
    """
    keys, priorities = update.keys, update.priorities
    check_priorities(priorities)
    if len(samplers) == 1:
        sampler, store = samplers[0], samplers[0].plan.store
        if type(keys.store) is not int or keys.store != store.id:
            keys.places_among(np.array([store.id], np.uint64), "stores of this replay")
        sampler.follow_alpha(step)
        return _set(sampler, keys, priorities) if len(priorities) else 0
    place = keys.places_among(
        np.array([sampler.plan.store.id for sampler in samplers], np.uint64), "stores of this replay"
    )
    gone = 0
    for number, sampler in enumerate(samplers):
        sampler.follow_alpha(step)
        mine = np.flatnonzero(place == number)
        if len(mine):
            gone += _set(sampler, keys[mine], priorities[mine])
    return gone


def _set(sampler: StoreSampler, keys: Keys, priorities: NDArray[np.float64]) -> int:
    store, given = sampler.plan.store, raised(priorities, sampler.alpha)
    return sampler.change_priorities(keys.row, lambda: apply_to_store(store, keys, given))


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


def path_of(callbacks: Sequence[str]) -> str:
    """How a batch is made: by native code, but for what it asks of Python code."""
    return f"native, calls {', '.join(dict.fromkeys(callbacks))}" if callbacks else "native"


def build_stats(built: int, make_s: float, samplers: Sequence[StoreSampler]) -> dict[str, float]:
    """What every builder says in `stats`."""
    return {"built": built, "make_s": make_s, "redrawn": sum(sampler.redrawn for sampler in samplers)}


__all__ = [
    "BatchBuilder",
    "BuiltBatch",
    "HostBatchBuilder",
    "PriorityUpdate",
    "StartedBatch",
    "State",
    "apply_updates",
    "build_stats",
    "check_priorities",
    "given_priorities",
    "nothing",
    "path_of",
    "raised",
]
