"""Which rows make a batch: strategies that are plain functions of arrays, a seed and a step.

A strategy holds settings and nothing else. Everything random comes from Philox counters keyed by (seed, step, draw
number), so the same candidates, seed and step give the same rows on any machine, and a resumed run draws what the
uninterrupted one would have (Salmon et al., 2011; GEAR, section 3.3). What a draw is, to the bit, stands in
native/selection/selection.h; priorities are fixed-point integers summed in 64 bits, exact whatever their number and order.

| strategy | chooses |
|---|---|
| `Uniform` | each selectable row with the same probability |
| `Prioritized` | rows in proportion to their priorities: prioritized replay, with alpha and importance weights |
| `TopK`, `Lifo` | the heaviest rows; the newest rows |
| `Fifo` | the oldest rows it has not yet chosen, each once |
| `Group` | whole groups of rows, such as all answers to one prompt |
| `Mixture` | from several stores at once, in fixed shares |

All of them leave out rows that are free, half-written, removed or exhausted, and take `Limits` on version, age and length.

Example:
    >>> import numpy as np
    >>> from geartrain.selection.strategy import Candidates, Prioritized
    >>> drawn = Prioritized(seed=7).select(Candidates(np.array([0, 1, 3], np.uint32)), n=1000, step=0)
    >>> sorted(set(drawn.rows.tolist()))
    [1, 2]
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

import geartrain._native as _native
from geartrain.errors import ArgumentError, FieldError, NotEnoughRowsError

MAX_DRAWS = 2**31 - 1
OLDEST, NEWEST, HEAVIEST = range(3)  # native/selection/selection.h: Order
_NO_ROWS = np.empty(0, np.uint32)


class Candidates:
    """What can be chosen: priorities, selectable bits and columns, as arrays.

    Args:
        priorities: (N,) unsigned integers below 2**32, one a row. All rows are selectable and have generation 1.
        columns: further values of the rows, (N,) each, for strategies that ask for them by name (`Group`).

    A store's own candidates are made with `Candidates.of_store` and follow the store as it changes.
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
        self._columns: Mapping[str, NDArray[Any]] = columns or {}
        self._column_of: Callable[[str], NDArray[Any]] | None = None

    @classmethod
    def of_store(cls, store: _native.Store, column_of: Callable[[str], NDArray[Any]]) -> Candidates:
        """A store's rows; `column_of` gives a field's column by name."""
        made = cls.__new__(cls)
        made.native = _native.Candidates(store)
        made._columns = {}
        made._column_of = column_of
        return made

    def __len__(self) -> int:
        """Rows that can be chosen now."""
        return int(self.native.count())

    def column(self, name: str) -> NDArray[Any]:
        """A column's values, indexed by row. Raises `FieldError` when there is none of that name."""
        if self._column_of is not None:
            return self._column_of(name)
        if name not in self._columns:
            raise FieldError(f"the candidates have no column {name!r}; they have {', '.join(self._columns) or 'none'}")
        return self._columns[name]


@dataclass(frozen=True)
class Drawn:
    """What a strategy chose: arrays (n,).

    Attributes:
        rows, generations: uint32, the keys.
        probability: float64, of the row in one draw with replacement, limits aside; 1 where nothing was random.
        importance_weights: float64, importance weights, for `Prioritized(beta=...)`; None otherwise.
        failed: draws that found sums and priorities at odds, which only a store in need of repair causes.
        state: what the strategy has to know at its next step (a FIFO's cursor), as a few numbers.
    """

    rows: NDArray[np.uint32]
    generations: NDArray[np.uint32]
    probability: NDArray[np.float64]
    importance_weights: NDArray[np.float64] | None = None
    failed: int = 0
    state: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Again:
    """A request to replace the rows of some draws of a step, which were lost before they could be read.

    Attributes:
        attempt: 1 for the first replacement, and so on.
        numbers: (k,) uint32, the draws to be made again.
        kept: (n - k,) uint32, the batch's other rows.
    """

    attempt: int
    numbers: NDArray[np.uint32]
    kept: NDArray[np.uint32]


@runtime_checkable
class Strategy(Protocol):
    """What `Replay` asks of a selection strategy. Anything with these two members is one."""

    @property
    def seed(self) -> int:
        """Of everything it draws."""
        ...

    def select(
        self,
        candidates: Candidates,
        n: int,
        step: int,
        *,
        state: Mapping[str, int] | None = None,
        again: Again | None = None,
    ) -> Drawn:
        """Chooses the `n` rows of a step, or replaces those that `again` names.

        `state` is what the step before returned in `Drawn.state`, None at the first.
        """
        ...


@dataclass(frozen=True)
class Limits:
    """Rows that do not meet these are not chosen.

    Args:
        min_version: least model version; a number, or a function that is asked at every step.
        max_age_s: greatest age in seconds since the row's commit.
        min_length: least length in steps.
    """

    min_version: int | Callable[[], int] | None = None
    max_age_s: float | None = None
    min_length: int = 0

    def __post_init__(self) -> None:
        if self.max_age_s is not None and not self.max_age_s > 0:
            raise ArgumentError(f"max_age_s must be above zero, found {self.max_age_s}")
        if not 0 <= self.min_length < 2**32:
            raise ArgumentError(f"min_length must be 0 or more, found {self.min_length}")

    def now(self) -> tuple[int, int, int]:
        """The limits as the native layer takes them: least version, least commit time in ns, least length."""
        version = self.min_version() if callable(self.min_version) else self.min_version
        from_ns = 0 if self.max_age_s is None else max(0, time.time_ns() - int(self.max_age_s * 1e9))
        return (-(2**63) if version is None else int(version), from_ns, self.min_length)


@dataclass(frozen=True)
class Linear:
    """A schedule from `start` to `end` over `steps` steps, constant afterwards.

    Example:
        >>> Linear(0.4, 1.0, steps=100)(50)
        0.7
    """

    start: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        """The schedule's value at a step."""
        if step >= self.steps:
            return self.end
        return self.start + (self.end - self.start) * step / self.steps


Schedule = float | Callable[[int], float]


def at_step(schedule: Schedule, step: int) -> float:
    """A schedule's value: the number itself, or what the function says."""
    return float(schedule(step)) if callable(schedule) else float(schedule)


_State = Mapping[str, int] | None


class _BuiltIn(ABC):
    """What the strategies here have in common: the way they are asked."""

    def select(
        self,
        candidates: Candidates,
        n: int,
        step: int,
        *,
        state: Mapping[str, int] | None = None,
        again: Again | None = None,
    ) -> Drawn:
        """Chooses; see `Strategy.select`.

        Raises:
            EmptyStoreError: there is nothing to choose from, or all priorities are 0.
            NotEnoughRowsError: fewer rows, or whole groups, than were asked for.
        """
        return self._select(candidates, n, step, state, again)

    @abstractmethod
    def _select(self, candidates: Candidates, n: int, step: int, state: _State, again: Again | None) -> Drawn: ...


# --- random ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Uniform(_BuiltIn):
    """Every selectable row with the same probability.

    Args:
        seed: of the random numbers, 0 to 2**64 - 1.
        replacement: whether a row may be in a batch twice.
        stratified: spread the draws of a batch evenly over the rows: one from each n-th of them.
        limits: rows that may be chosen.

    Cost: a cache miss per level of a tree over one bit a row.
    """

    seed: int = 0
    replacement: bool = True
    stratified: bool = False
    limits: Limits | None = None

    def __post_init__(self) -> None:
        _check_random(self)

    def _select(self, candidates: Candidates, n: int, step: int, state: _State, again: Again | None) -> Drawn:
        return _draw(self, False, candidates, n, step, again)


@dataclass(frozen=True)
class Prioritized(_BuiltIn):
    """Rows in proportion to their priorities; a row with priority 0 is never drawn.

    Without replacement rows are drawn one after the other, each in proportion to its priority among those left.

    Args:
        seed: of the random numbers, 0 to 2**64 - 1.
        replacement: whether a row may be in a batch twice.
        stratified: one draw from each n-th of the total priority, which lowers the variance.
        alpha: alpha of prioritized replay (Schaul et al., 2016): `Replay.update_priorities` stores
            |priority| ** alpha. A number or a schedule of the step. A schedule is followed in steps of 1 % of its
            value: each rewrites all priorities once, no batch does.
        beta: of the importance weights (N * probability) ** -beta, scaled so that a batch's largest is 1. A number
            or a schedule of the step. None for no importance weights.
        limits: rows that may be chosen.

    Cost: a cache miss per level of the sum tree.
    """

    seed: int = 0
    replacement: bool = True
    stratified: bool = False
    alpha: Schedule = 1.0
    beta: Schedule | None = None
    limits: Limits | None = None

    def __post_init__(self) -> None:
        _check_random(self)

    def _select(self, candidates: Candidates, n: int, step: int, state: _State, again: Again | None) -> Drawn:
        return _draw(self, True, candidates, n, step, again)

    def importance_weights(self, probability: NDArray[np.float64], count: int, step: int) -> NDArray[np.float64] | None:
        """Importance weights of a whole batch drawn from `count` rows."""
        if self.beta is None:
            return None
        return importance_weights(probability, count, at_step(self.beta, step))


def importance_weights(probability: NDArray[np.float64], count: int, beta: float) -> NDArray[np.float64]:
    """(count * probability) ** -beta, scaled so that the largest is 1.

    Raises:
        ArgumentError: beta is negative or not finite.
    """
    priorities = (np.maximum(probability, np.finfo(np.float64).tiny) * count) ** -check_beta(beta)
    return np.asarray(priorities / priorities.max())


def check_beta(beta: float) -> float:
    """Beta itself; raises `ArgumentError` when it is negative or not finite."""
    if not 0 <= beta < float("inf"):
        raise ArgumentError(f"beta is a finite number >= 0, found {beta}")
    return beta


def _check_random(strategy: Uniform | Prioritized) -> None:
    _check_seed(strategy.seed)
    if strategy.stratified and not strategy.replacement:
        raise ArgumentError("stratified draws are with replacement; choose one of the two")


def _draw(
    strategy: Uniform | Prioritized, by_priority: bool, candidates: Candidates, n: int, step: int, again: Again | None
) -> Drawn:
    _check_n(n)
    limits = None if strategy.limits is None else strategy.limits.now()
    attempt = 0 if again is None else again.attempt
    numbers = np.arange(n, dtype=np.uint32) if again is None else again.numbers
    native = candidates.native
    if strategy.replacement:
        strata = n if strategy.stratified else 0
        rows, generations, probability, failed = native.draw(
            by_priority, strategy.seed, step, attempt, numbers, strata, limits
        )
    else:
        kept = _NO_ROWS if again is None else again.kept
        rows, generations, probability, failed = native.draw_distinct(
            by_priority, strategy.seed, step, attempt, len(numbers), kept, limits
        )
    return Drawn(rows, generations, probability, failed=failed)


# --- in order --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TopK(_BuiltIn):
    """The rows with the largest priorities, heaviest first; the older of equals.

    Cost: a pass over the rows.
    """

    limits: Limits | None = None
    seed: int = 0

    def _select(self, candidates: Candidates, n: int, step: int, state: _State, again: Again | None) -> Drawn:
        return _stateless(_first(candidates, HEAVIEST, n, 0, self.limits, again))


@dataclass(frozen=True)
class Lifo(_BuiltIn):
    """The rows committed last, newest first. Cost: a pass over the rows."""

    limits: Limits | None = None
    seed: int = 0

    def _select(self, candidates: Candidates, n: int, step: int, state: _State, again: Again | None) -> Drawn:
        return _stateless(_first(candidates, NEWEST, n, 0, self.limits, again))


@dataclass(frozen=True)
class Fifo(_BuiltIn):
    """The oldest rows that it has not chosen yet: every row once, in the order of their commits.

    Its state is the sequence number of the last row it chose. Cost: a pass over the rows.
    """

    limits: Limits | None = None
    seed: int = 0

    def _select(self, candidates: Candidates, n: int, step: int, state: _State, again: Again | None) -> Drawn:
        after = 0 if state is None else int(state.get("after", state.get("after/0", 0)))
        return _first(candidates, OLDEST, n, after, self.limits, again)


def _stateless(drawn: Drawn) -> Drawn:
    return Drawn(drawn.rows, drawn.generations, drawn.probability)


def _first(candidates: Candidates, order: int, n: int, after: int, limits: Limits | None, again: Again | None) -> Drawn:
    _check_n(n)
    wanted = n if again is None else len(again.numbers)
    kept = _NO_ROWS if again is None else again.kept
    rows, generations, sequences, _ = first_rows(candidates, order, wanted, after, limits, kept)
    if len(rows) < wanted:
        raise NotEnoughRowsError(f"{n} rows were asked for, {len(rows) + len(kept)} can be chosen")
    # The sequence that a row was chosen by: by now another may stand in its place.
    return Drawn(rows, generations, np.ones(wanted), state={"after": max(int(sequences.max(initial=0)), after)})


def first_rows(
    candidates: Candidates, order: int, n: int, after: int, limits: Limits | None, excluded: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint32]]:
    """The first rows in an order, at most n: rows, generations, sequence numbers and fixed-point priorities.

    Args:
        after: the sequence number up to which rows are passed over.
    """
    return candidates.native.first_ranked(order, n, after, excluded, None if limits is None else limits.now())


# --- groups ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group(_BuiltIn):
    """Whole groups of rows: rows that share the value of a column, such as the answers to one prompt (GRPO).

    A group counts once it has `size` selectable rows; of a larger one the oldest `size` are taken. A batch of n rows
    holds n / size different groups, members of a group side by side, the oldest first.

    Args:
        by: the column, a field of whole numbers without time.
        size: rows of a group.
        seed: of the random numbers, 0 to 2**64 - 1.
        prioritized: draw groups in proportion to the sum of their rows' priorities, instead of uniformly.
        limits: rows that may be chosen.

    Cost: a pass over the rows and a sort of the selectable ones.
    """

    by: str
    size: int
    seed: int = 0
    prioritized: bool = False
    limits: Limits | None = None

    @property
    def atom(self) -> int:
        """Rows that stand or fall together: when one is lost before it was read, its group is replaced."""
        return self.size

    def __post_init__(self) -> None:
        _check_seed(self.seed)
        if self.size < 1:
            raise ArgumentError(f"a group has at least one row, found size={self.size}")

    def _select(self, candidates: Candidates, n: int, step: int, state: _State, again: Again | None) -> Drawn:
        groups = whole_groups(self, candidates, n, () if again is None else again.kept)
        wanted = (n if again is None else len(again.numbers)) // self.size
        if len(groups.priorities) < wanted:
            raise NotEnoughRowsError(
                f"{wanted} groups of {self.size} were asked for, {len(groups.priorities)} of {groups.seen} are whole"
            )
        attempt = 0 if again is None else again.attempt
        chosen, _, probability, _ = _native.Candidates(groups.priorities).draw_distinct(
            True, self.seed, step, attempt, wanted, _NO_ROWS, None
        )
        return Drawn(
            groups.rows[chosen].reshape(-1),
            groups.generations[chosen].reshape(-1),
            np.repeat(probability, self.size),
        )


class Groups(NamedTuple):
    """Whole groups, in the order of the first row number of each: rows and generations (G, size), priorities (G,)."""

    rows: NDArray[np.uint32]
    generations: NDArray[np.uint32]
    priorities: NDArray[np.uint32]
    seen: int  # groups, whole or not


def check_groups(strategy: Group, n: int) -> None:
    """Raises `ArgumentError` unless a batch of n rows holds whole groups."""
    _check_n(n)
    if n % strategy.size:
        raise ArgumentError(f"a batch of {n} rows does not hold whole groups of {strategy.size}")


def whole_groups(strategy: Group, candidates: Candidates, n: int, kept: ArrayLike = ()) -> Groups:
    """The groups that a batch of n rows can be drawn from; not those that rows in `kept` belong to."""
    check_groups(strategy, n)
    ids = candidates.column(strategy.by)
    if ids.ndim != 1 or ids.dtype.kind not in "iub":
        raise ArgumentError(
            f"groups need a column of one whole number a row, {strategy.by!r} is {ids.dtype} {ids.shape}"
        )
    rows, generations, *_ = first_rows(candidates, OLDEST, max(len(candidates), 1), 0, strategy.limits, _NO_ROWS)
    order = np.argsort(ids[rows], kind="stable")
    values, starts, counts = np.unique(ids[rows][order], return_index=True, return_counts=True)
    # A group that lost a row is no longer whole; its place goes to one that nothing was taken from.
    kept = np.asarray(kept, np.uint32)
    whole = np.flatnonzero((counts >= strategy.size) & ~np.isin(values, ids[kept]))
    members = order[starts[whole][:, None] + np.arange(strategy.size)]
    members = members[np.argsort(rows[members].min(1), kind="stable")] if len(members) else members
    if strategy.prioritized:
        # So many 32-bit priorities fit into 32 bits when the sum's last bits are dropped; what is above 0 stays so.
        sums = candidates.native.priorities(rows)[members].sum(1, dtype=np.uint64)
        priorities = np.maximum(sums >> np.uint64((strategy.size - 1).bit_length()), np.minimum(sums, 1)).astype(
            np.uint32
        )
    else:
        priorities = np.ones(len(members), np.uint32)
    return Groups(rows[members], generations[members], priorities, len(values))


# --- several stores --------------------------------------------------------------------------------------------


class Mixture:
    """Batches from several stores in fixed shares, such as 75 % offline and 25 % online.

    Give it to `Replay` together with a list of as many stores. The quotas of a batch add up to its size, differ from
    share times size by less than one row, and are right on average to the last digit.

    Args:
        shares: of each store; they are scaled to add up to 1.
        strategies: one for each store.
        seed: of the rounding.

    Example:
        >>> mixture = Mixture([0.75, 0.25], [Uniform(seed=0), Prioritized(seed=1)])
        >>> mixture.quotas(256, step=0)
        [192, 64]
    """

    def __init__(self, shares: Sequence[float], strategies: Sequence[Strategy], seed: int = 0) -> None:
        _check_seed(seed)
        if len(shares) != len(strategies) or not shares:
            raise ArgumentError(f"a mixture needs a strategy for each share, found {len(shares)} and {len(strategies)}")
        if any(not 0 <= share < float("inf") for share in shares) or not sum(shares) > 0:
            raise ArgumentError(f"shares are finite numbers >= 0 and not all 0, found {list(shares)}")
        exact = [Fraction(share).limit_denominator(1_000_000) for share in shares]
        self.shares = [share / sum(exact) for share in exact]
        self.strategies = list(strategies)
        self.seed = seed

    def quotas(self, n: int, step: int) -> list[int]:
        """Rows from each store in the batch of a step."""
        # Whole parts first. What is left goes to stores by systematic sampling of the fractions: with one random
        # offset, a store gets one more row with exactly the probability of its fraction.
        offset = Fraction(int(_native.window_ends(self.seed, step, 0, np.zeros(1, np.uint32), _MILLION)[0]), 10**6)
        quotas, run = [], offset
        for share in self.shares:
            whole, part = divmod(share * n, 1)
            before, run = run, run + part
            quotas.append(int(whole) + int(run // 1 - before // 1))
        return quotas

    def __repr__(self) -> str:
        return f"Mixture({[float(share) for share in self.shares]}, {self.strategies}, seed={self.seed})"


_MILLION = np.array([10**6], np.int32)


def _check_n(n: int) -> None:
    if not 0 < n <= MAX_DRAWS:
        raise ArgumentError(f"1 to {MAX_DRAWS} rows can be chosen at once, found {n}")


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**64:
        raise ArgumentError(f"a seed is a whole number from 0 to 2**64 - 1, found {seed}")


__all__ = [
    "Again",
    "Candidates",
    "Drawn",
    "Fifo",
    "Group",
    "Lifo",
    "Limits",
    "Linear",
    "Mixture",
    "Schedule",
    "Strategy",
    "TopK",
    "Uniform",
    "Prioritized",
    "at_step",
    "importance_weights",
]
