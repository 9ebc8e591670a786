"""The protocol of selection strategies, the traits that a strategy declares, and the inputs and results of a draw.

A strategy holds settings and no other state. Random numbers come from Philox counters with the key (seed, step, draw
number) (Salmon et al., 2011; GEAR, section 3.3). So the same candidates, seed and step give the same rows on any
machine. A resumed run draws the same rows as an uninterrupted one.

native/selection/selection.h defines every draw to the bit. Priorities are fixed-point integers that are summed in 64
bits. Their sums are exact, whatever their number and order.

| strategy | file | chooses |
|---|---|---|
| `Uniform` | random | each selectable row with the same probability |
| `Prioritized` | random | rows in proportion to their priorities (prioritized replay), with importance weights |
| `TopK`, `Lifo` | ordered | the rows of highest priority; the newest rows |
| `Fifo` | ordered | the oldest rows it has not chosen yet, each once |
| `GroupSampling` | groups | whole groups of rows, such as all answers to one prompt |
| `Mixture` | mixture | from several stores at once, in fixed shares |

No strategy chooses free, half-written, removed or exhausted rows. All of them accept `Limits` on version, age and
length.

Example:
    >>> import numpy as np
    >>> from geartrain.selection import Candidates, Prioritized
    >>> draw = Prioritized(seed=7).select(Candidates(np.array([0, 1, 3], np.uint32)), n=1000, step=0)
    >>> sorted(set(draw.rows.tolist()))
    [1, 2]
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

import geartrain._native as _native
from geartrain.core.arguments import (
    FLAG,
    Options,
    check_choice,
    check_real,
    check_type,
    check_whole,
    checked,
)
from geartrain.errors import ArgumentError, FieldError
from geartrain.selection.schedule import Schedule, check_schedule

# How a strategy finds its rows. "custom": by code of its own, which only its `select` knows.
Form = Literal["random", "oldest", "newest", "highest_priority", "groups", "custom"]
# Of the ordered forms: native/selection/selection.h, Order.
ORDERS: dict[str, int] = {"oldest": 0, "newest": 1, "highest_priority": 2}


@runtime_checkable
class Strategy(Protocol):
    """What `Replay` needs of a selection strategy: `seed` and `select`. Subclassing is optional.

    A strategy may also have `traits`, and a method `importance_weights(draw, count, step)`; see `DeclaredStrategy`.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> class FirstRows:
        ...     seed = None
        ...     def select(self, candidates, n, *, step, state=None, redraw=None):
        ...         rows, ones = np.arange(n, dtype=np.uint32), np.ones(n, np.uint32)
        ...         return gt.selection.Draw(rows, ones, np.ones(n))
        >>> FirstRows().select(gt.selection.Candidates(np.ones(5, np.uint32)), 2, step=0).rows.tolist()
        [0, 1]
    """

    @property
    def seed(self) -> int | None:
        """Seed of all draws, 0 to 2**64 - 1. None: `Replay` derives one from its own seed."""
        ...

    def select(
        self,
        candidates: Candidates,
        n: int,
        step: int,
        *,
        state: Mapping[str, int] | None = None,
        redraw: Redraw | None = None,
    ) -> Draw:
        """Chooses the `n` rows of a step, or replaces those that `redraw` names.

        Args:
            candidates: the rows to choose from.
            n: rows to choose.
            step: number of the batch.
            state: `Draw.state` of the step before; None at the first.
            redraw: draws of this step to make again, because their rows were overwritten.
        """
        ...


def check_limits(what: str, limits: Any) -> Limits | None:
    """The limits, which are `Limits` or None."""
    return check_type(f"{what} are geartrain.selection.Limits", limits, Limits | None)  # type: ignore[no-any-return]


def _check_version(what: str, version: Any) -> Any:
    return version if callable(version) else check_whole(what, version, -(2**63), 2**63 - 1)


LIMITS = checked(check_limits)


@dataclass(frozen=True)
class Traits(Options):
    """What a strategy declares about its draws. Hosts, devices and ranks go by it.

    A strategy without traits is "custom". One host draws it by `select`, one batch after the other. Several ranks need
    its method `select_shards` (geartrain.selection.sharded).

    Attributes:
        form: how rows are found: "random"; "oldest", "newest" or "highest_priority" for the first rows of an order;
            "groups" for random ones of `whole_groups`; or "custom" for `select`. All but "custom" work over several
            ranks; "random" and orders also on a device.
        atom: rows that belong together. If one is overwritten before it was read, all are drawn again.
        by_priority: random forms: draw in proportion to priorities, not uniformly.
        over_steps: random rows with replacement: draw in proportion to their steps.
        replacement: random rows: whether a row may be in a batch twice.
        stratified: random rows with replacement: one draw from each n-th of the total.
        cursor: "oldest": each row once. The state is the last row's sequence number.
        strict: "oldest", in a store with tasks: no row is drawn before one that was inserted earlier.
        stateless: custom forms: a draw depends only on candidates, seed and step, so the next batch may begin before
            this one is finished. Other forms are stateless unless they have a cursor.
        importance: whether batches have importance weights.
        alpha: exponent that `Replay.update_priorities` applies to priorities.
        limits: rows that may be chosen.
    """

    form: Form = field(default="custom", metadata=checked(check_choice, ("random", *ORDERS, "groups", "custom")))
    atom: int = field(default=1, metadata=checked(check_whole, 1, 2**31 - 1))
    by_priority: bool = field(default=False, metadata=FLAG)
    over_steps: bool = field(default=False, metadata=FLAG)
    replacement: bool = field(default=True, metadata=FLAG)
    stratified: bool = field(default=False, metadata=FLAG)
    cursor: bool = field(default=False, metadata=FLAG)
    strict: bool = field(default=False, metadata=FLAG)
    stateless: bool = field(default=False, metadata=FLAG)
    importance: bool = field(default=False, metadata=FLAG)
    alpha: Schedule = field(default=1.0, metadata=checked(check_schedule, above=0))
    limits: Limits | None = field(default=None, metadata=LIMITS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stratified and not self.replacement:
            raise ArgumentError("stratified draws are with replacement: choose one of the two")
        if self.over_steps and (
            self.form != "random" or self.by_priority or self.stratified or not self.replacement or self.limits
        ):
            raise ArgumentError("draws over steps are plain uniform ones: with replacement, without strata and limits")
        if self.cursor and self.form != "oldest":
            raise ArgumentError(f"a cursor goes from the oldest row on, found form={self.form!r}")
        if self.strict and (self.form != "oldest" or self.limits is not None):
            raise ArgumentError("a strict order is that of the oldest rows, and passes over none: it takes no limits")

    @property
    def order(self) -> int | None:
        """Internal: the native layer's number of the order; None for other forms."""
        return ORDERS.get(self.form)

    @property
    def independent(self) -> bool:
        """Whether draws are independent, so that some can be made again on their own."""
        return self.form == "random" and self.replacement

    @property
    def stateful(self) -> bool:
        """Whether a batch may depend on the batch before."""
        return self.cursor or (self.form == "custom" and not self.stateless)

    @property
    def why_host(self) -> str | None:
        """Why a device cannot choose rows of this form; None if it can."""
        if self.form in ("groups", "custom") or self.cursor:
            return "chooses on the host"
        if self.over_steps:
            return "draws over steps, whose number in a row is looked up on the host"
        if self.limits is not None:
            return "has limits on version, age or length, which are looked up on the host"
        return None


def traits_of(strategy: Strategy) -> Traits:
    """What a strategy declares; raises `ArgumentError` where `traits` is something else."""
    traits = getattr(strategy, "traits", CUSTOM)
    check_type(f"{type(strategy).__name__}.traits is a geartrain.selection.Traits", traits, Traits)
    return traits


def with_min_length(traits: Traits, least: int) -> Traits:
    """The traits of a strategy that chooses no rows of fewer steps."""
    limits = traits.limits or Limits()
    if limits.min_length >= least:
        return traits
    return replace(traits, limits=replace(limits, min_length=least))


def seed_of(strategy: Strategy) -> int:
    """A strategy's seed; 0 for one that is to have its replay's and is used without."""
    return 0 if strategy.seed is None else strategy.seed


def importance_of(strategy: Strategy, draw: Draw, count: int, step: int) -> NDArray[np.float64] | None:
    """Importance weights of a draw from `count` selectable rows: the strategy's, or those its draw was filled with.

    Raises:
        ArgumentError: they are not (n,), or missing where the traits say that there are some.
    """
    method = getattr(strategy, "importance_weights", None)
    weights = draw.importance_weights if method is None else method(draw, count, step)
    if weights is None:
        if traits_of(strategy).importance:
            raise ArgumentError(f"{type(strategy).__name__} declares importance weights and returned none")
        return None
    array = np.asarray(weights, np.float64)
    if array.shape != draw.rows.shape:
        raise ArgumentError(
            f"importance weights of {type(strategy).__name__} have shape {array.shape}, the draw {draw.rows.shape}"
        )
    return array


class Candidates:
    """Rows to choose from: priorities, and further columns by name.

    A store's own candidates (`Candidates.of_store`) follow the store as it changes.

    Args:
        priorities: (N,) unsigned integers below 2**32, one a row. All rows are available and have generation 1.
        columns: further values of the rows, (N,) each, for strategies such as `GroupSampling`.

    Examples:
        >>> import numpy as np
        >>> candidates = Candidates(np.array([1, 2, 3], np.uint32), {"prompt": np.array([7, 7, 8])})
        >>> len(candidates), candidates.column("prompt").tolist()
        (3, [7, 7, 8])
    """

    def __init__(self, priorities: ArrayLike, columns: Mapping[str, NDArray[Any]] | None = None) -> None:
        array = np.asarray(priorities)
        if (
            array.ndim != 1
            or array.dtype.kind not in "iu"
            or (array.size and (array.min() < 0 or array.max() >= 2**32))
        ):
            raise ArgumentError(
                f"priorities are whole numbers (N,) from 0 to 2**32 - 1, found {array.dtype} {array.shape}"
            )
        self.native = _native.Candidates(np.ascontiguousarray(array, np.uint32))
        check_type("columns are a dict of arrays by name", columns, Mapping | None)
        self._columns: Mapping[str, NDArray[Any]] = columns or {}
        self._column_of: Callable[[str], NDArray[Any]] | None = None

    @classmethod
    def of_store(cls, store: _native.Store, column_of: Callable[[str], NDArray[Any]]) -> Candidates:
        """Internal: a store's rows; `column_of` gives a field's column by name."""
        made = cls.__new__(cls)
        made.native = _native.Candidates(store)
        made._columns = {}
        made._column_of = column_of
        return made

    def with_native(self, native: Any) -> Candidates:
        """Internal: the same columns, with what has the methods of `_native.Candidates` that draws over shards call."""
        made = copy.copy(self)
        made.native = native
        return made

    def __len__(self) -> int:
        """Number of rows that can be chosen now."""
        return int(self.native.count())

    def column(self, name: str) -> NDArray[Any]:
        """Values of a column, indexed by row. Raises `FieldError` if there is no such column.

        Args:
            name: the column.
        """
        if self._column_of is not None:
            return self._column_of(name)
        if name not in self._columns:
            raise FieldError(f"the candidates have no column {name!r}; they have {', '.join(self._columns) or 'none'}")
        return self._columns[name]


@dataclass(frozen=True)
class Draw:
    """Rows that a strategy chose, as arrays (n,).

    Attributes:
        rows: uint32, row numbers.
        generations: uint32, their generations.
        probability: float64, probability of each row in one draw with replacement and without limits; 1 if nothing was
            random.
        importance_weights: float64, if `select` computes them itself; otherwise None. Prefer a method
            `importance_weights` on the strategy: it is called when all rows are final, and works over several ranks.
        failed: draws that found priorities and their sums inconsistent. Only a store in need of repair has them.
        state: what the strategy must know at its next step, as a few numbers, such as a cursor.
        lowest: lowest probability of the whole batch, if these rows are a part of it, as on one of several ranks;
            otherwise None.
        steps: uint32, step of each row, if steps were drawn; None if rows were.
    """

    rows: NDArray[np.uint32]
    generations: NDArray[np.uint32]
    probability: NDArray[np.float64]
    importance_weights: NDArray[np.float64] | None = None
    failed: int = 0
    state: dict[str, int] = field(default_factory=dict)
    lowest: float | None = None
    steps: NDArray[np.uint32] | None = None

    def with_redrawn(self, index: NDArray[Any], other: Draw) -> Draw:
        """This draw with some rows replaced. Its own arrays are overwritten.

        Args:
            index: places of the rows to replace.
            other: the rows that replace them.

        Raises:
            ArgumentError: only one of the two has importance weights.
        """
        if (self.importance_weights is None) != (other.importance_weights is None):
            raise ArgumentError("a strategy must give importance weights for all draws of a batch, or for none")
        self.rows[index] = other.rows
        self.generations[index] = other.generations
        self.probability[index] = other.probability
        if self.importance_weights is not None:
            self.importance_weights[index] = other.importance_weights
        if self.steps is not None and other.steps is not None:
            self.steps[index] = other.steps
        weights, steps = self.importance_weights, self.steps
        return Draw(self.rows, self.generations, self.probability, weights, state=other.state, steps=steps)


@dataclass(frozen=True)
class Redraw:
    """A request to draw some rows of a step again, because they were overwritten before they could be read.

    Attributes:
        attempt: 1 for the first replacement, and so on.
        numbers: (k,) uint32, draws to make again.
        kept: (n - k,) uint32, other rows of the batch.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> rows = gt.selection.Candidates(np.ones(5, np.uint32))
        >>> again = Redraw(attempt=1, numbers=np.array([0], np.uint32), kept=np.array([3, 4], np.uint32))
        >>> len(gt.selection.Uniform(seed=0).select(rows, n=1, step=0, redraw=again).rows)
        1
    """

    attempt: int
    numbers: NDArray[np.uint32]
    kept: NDArray[np.uint32]


@dataclass(frozen=True)
class Limits(Options):
    """Limits on the rows that may be chosen: model version, age and length.

    Args:
        min_version: lowest model version; a number, or a function that is called at every step.
        max_age_s: greatest age since the commit, in seconds.
        min_length: least length, in steps.

    Examples:
        >>> import geartrain as gt
        >>> fresh = gt.selection.Uniform(limits=gt.selection.Limits(max_age_s=60.0, min_length=20))
    """

    min_version: int | Callable[[], int] | None = field(default=None, metadata=checked(_check_version))
    max_age_s: float | None = field(default=None, metadata=checked(check_real, above=0))
    min_length: int = field(default=0, metadata=checked(check_whole, 0, 2**32 - 1))

    def now(self) -> tuple[int, int, int]:
        """Internal: the limits as the native layer takes them: least version, least commit time in ns, least length."""
        version = self.min_version
        if callable(version):
            version = check_whole("what min_version returns", version(), -(2**63), 2**63 - 1)
        from_ns = 0 if self.max_age_s is None else max(0, time.time_ns() - int(self.max_age_s * 1e9))
        return (-(2**63) if version is None else int(version), from_ns, self.min_length)


# Of a strategy that declares none.
CUSTOM = Traits()

__all__ = [
    "CUSTOM",
    "LIMITS",
    "ORDERS",
    "Candidates",
    "Draw",
    "Form",
    "Limits",
    "Redraw",
    "Strategy",
    "Traits",
    "importance_of",
    "seed_of",
    "traits_of",
    "with_min_length",
]
