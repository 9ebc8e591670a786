"""`DeclaredStrategy`: base class of strategies that only declare traits, and the draw from one store by those traits.

Such a strategy has no drawing code of its own. So hosts, devices and ranks can draw for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

import geartrain._native as _native
from geartrain.core.arguments import Options, check_type, check_whole
from geartrain.errors import ArgumentError, NotEnoughRowsError
from geartrain.selection.shard import StepPlan
from geartrain.selection.strategy import Candidates, Draw, Limits, Redraw, Traits, seed_of

MAX_DRAWS = 2**31 - 1
# Incomplete groups that an error message names.
NAMED = 5
_NO_ROWS = np.empty(0, np.uint32)


class WholeGroups(NamedTuple):
    """Groups that can be drawn, in the order of their keys. `DeclaredStrategy.whole_groups` returns them.

    Attributes:
        rows: (G, size) uint32, the rows of each group.
        generations: (G, size) uint32, their generations.
        priorities: (G,), the groups' priorities.
        seen: S, the groups that any row was found of, whether they can be drawn or not.
        seen_keys: (S, K) uint64, their keys of K numbers, in rising order. They order the groups of all shards of a
            job: without them the strategy cannot draw from several shards.
        seen_counts: (S,) rows found of each of these groups.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> rows = gt.selection.Candidates(np.ones(5, np.uint32), {"prompt": np.array([7, 8, 7, 8, 9])})
        >>> gt.selection.GroupSampling("prompt", size=2).whole_groups(rows).rows.tolist()
        [[0, 2], [1, 3]]
    """

    rows: NDArray[np.uint32]
    generations: NDArray[np.uint32]
    priorities: NDArray[np.uint32]
    seen: int
    seen_keys: NDArray[np.uint64] | None = None
    seen_counts: NDArray[np.uint32] | None = None


class DeclaredStrategy(Options, ABC):
    """Base of strategies that declare what they draw, so that hosts, devices and ranks can draw for them.

    A subclass has `seed` and `traits`, and `whole_groups` if its form is "groups". If it overrides `select`, that must
    choose what the traits say; otherwise make the traits "custom".

    Examples:
        >>> from dataclasses import dataclass
        >>> import numpy as np
        >>> import geartrain as gt
        >>> @dataclass(frozen=True)
        ... class Newest(gt.selection.DeclaredStrategy):
        ...     seed: int | None = None
        ...     traits = gt.selection.Traits("newest")
        >>> draw = Newest().select(gt.selection.Candidates(np.ones(5, np.uint32)), n=2, step=0)  # a Draw
        >>> draw.probability.tolist()
        [1.0, 1.0]
    """

    seed: int | None

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """Traits of the strategy: its form, and what it depends on."""

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

        Raises:
            EmptyStoreError: there are no rows, or all priorities are 0.
            NotEnoughRowsError: there are fewer rows, or whole groups, than `n` needs.
        """
        if self.traits.form == "random" or self.traits.order is not None:
            return select_declared(self, self.traits, candidates, n, step, state=state, redraw=redraw)
        check_drawn(candidates, n, step, redraw)
        return self._draw_groups(candidates, n, step, redraw)

    def importance_weights(self, draw: Draw, count: int, step: int) -> NDArray[np.float64] | None:
        """Importance weights (n,) of drawn rows; None if the strategy has none.

        Called once the batch's rows are final: once a store in a mixture, and on every rank for its own rows.
        `traits.importance` says whether there are weights.

        Args:
            draw: the drawn rows.
            count: rows that could be drawn.
            step: number of the batch.
        """
        return draw.importance_weights

    def whole_groups(self, candidates: Candidates, kept: ArrayLike = ()) -> WholeGroups:
        """Groups that can be drawn, each of `traits.atom` rows.

        Args:
            candidates: the rows to choose from.
            kept: (k,) rows whose groups are in the batch already and are left out.

        Raises:
            ArgumentError: the strategy has no groups.
        """
        raise ArgumentError(f"{type(self).__name__} has the form {self.traits.form!r} but no method that chooses rows")

    def describe_group(self, candidates: Candidates, key: Sequence[int]) -> str:
        """Names a group for error messages, such as "prompt=7".

        Args:
            candidates: the rows to choose from.
            key: (K,), one of `WholeGroups.seen_keys`.
        """
        return "key=" + "-".join(f"{number:#x}" for number in key)

    def _draw_groups(self, candidates: Candidates, n: int, step: int, redraw: Redraw | None) -> Draw:
        size = self.traits.atom
        check_groups(n, size)
        groups = self.whole_groups(candidates, () if redraw is None else redraw.kept)
        wanted = (n if redraw is None else len(redraw.numbers)) // size
        if len(groups.priorities) < wanted:
            incomplete = describe_incomplete(self, candidates, groups.seen_keys, groups.seen_counts)
            raise NotEnoughRowsError(
                f"{wanted} groups of {size} were asked for, {len(groups.priorities)} of {groups.seen} are "
                f"whole{incomplete}"
            )
        attempt = 0 if redraw is None else redraw.attempt
        chosen, _, probability, _ = _native.Candidates(groups.priorities).draw_distinct(
            True, seed_of(self), step, attempt, wanted, _NO_ROWS, None
        )
        return Draw(
            groups.rows[chosen].reshape(-1), groups.generations[chosen].reshape(-1), np.repeat(probability, size)
        )


def describe_incomplete(
    strategy: DeclaredStrategy,
    candidates: Candidates,
    keys: NDArray[np.uint64] | None,
    counts: NDArray[np.integer[Any]] | None,
) -> str:
    """Names the first few groups that are not whole and how many rows each has, for the end of an error message.

    Args:
        keys: (S, K), see `WholeGroups.seen_keys`.
        counts: (S,) rows of each group.
    """
    size = strategy.traits.atom
    short = np.empty(0, np.intp) if keys is None or counts is None else np.flatnonzero(counts < size)
    if keys is None or counts is None or not len(short):
        return ""
    named = ", ".join(
        f"{strategy.describe_group(candidates, keys[at].tolist())} ({counts[at]} of {size} rows)"
        for at in short[:NAMED].tolist()
    )
    more = f" and {len(short) - NAMED} more" if len(short) > NAMED else ""
    return f"; {len(short)} {'is' if len(short) == 1 else 'are'} incomplete: {named}{more}"


def select_declared(
    strategy: DeclaredStrategy,
    traits: Traits,
    candidates: Candidates,
    n: int,
    step: int,
    *,
    state: Mapping[str, int] | None,
    redraw: Redraw | None,
    steps: StepPlan | None = None,
) -> Draw:
    """What a strategy of a random or ordered form chooses, with traits that may be narrower than its own.

    `steps` says which steps count where they are drawn, or rows in proportion to them; `Draw.steps` are those drawn.
    """
    check_drawn(candidates, n, step, redraw)
    if traits.form == "random":
        return _draw_random(traits, seed_of(strategy), candidates, n, step, redraw, steps)
    after = int((state or {}).get("after", (state or {}).get("after/0", 0))) if traits.cursor else 0
    return _draw_ordered(traits, candidates, n, after, redraw)


def first_rows(
    candidates: Candidates, order: int, n: int, after: int, limits: Limits | None, excluded: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint64], NDArray[np.uint32]]:
    """The first rows in an order, at most n: rows, generations, sequence numbers and fixed-point priorities.

    Args:
        order: of `ORDERS`.
        after: the sequence number up to which rows are passed over.
    """
    return candidates.native.first_ranked(order, n, after, excluded, None if limits is None else limits.now())


def check_drawn(candidates: Candidates, n: int, step: int, redraw: Redraw | None) -> None:
    """Raises `ArgumentError` unless these may be arguments of `select`."""
    check_type("select takes Candidates", candidates, Candidates)
    check_type("redraw is a Redraw, or None", redraw, Redraw | None)
    check_n(n)
    check_whole("step", step, 0, 2**64 - 1)


def check_n(n: int) -> None:
    """Raises `ArgumentError` unless so many rows can be drawn at once."""
    check_whole("n, the rows to choose,", n, 1, MAX_DRAWS)


def check_groups(n: int, size: int) -> None:
    """Raises `ArgumentError` unless a batch of n rows holds whole groups."""
    if n % size:
        raise ArgumentError(f"a batch of {n} rows is not a multiple of groups of {size}")


def _draw_random(
    traits: Traits,
    seed: int,
    candidates: Candidates,
    n: int,
    step: int,
    redraw: Redraw | None,
    steps: StepPlan | None,
) -> Draw:
    if traits.over_steps and steps is None:
        raise ArgumentError("only a Replay can draw over steps: it knows which steps of a row its view needs")
    limits = None if traits.limits is None else traits.limits.now()
    attempt = 0 if redraw is None else redraw.attempt
    numbers = np.arange(n, dtype=np.uint32) if redraw is None else redraw.numbers
    native = candidates.native
    strata = n if traits.stratified else 0
    if steps is not None:
        rows, generations, probability, found, failed = native.draw_steps(
            traits.by_priority, seed, step, attempt, numbers, strata, limits, steps
        )
        known = traits.by_priority or native.shares_rows or steps.after > 0
        return Draw(rows, generations, probability, failed=failed, steps=found if known else None)
    if traits.replacement:
        rows, generations, probability, failed = native.draw(
            traits.by_priority, seed, step, attempt, numbers, strata, limits
        )
    else:
        kept = _NO_ROWS if redraw is None else redraw.kept
        rows, generations, probability, failed = native.draw_distinct(
            traits.by_priority, seed, step, attempt, len(numbers), kept, limits
        )
    return Draw(rows, generations, probability, failed=failed)


def _draw_ordered(traits: Traits, candidates: Candidates, n: int, after: int, redraw: Redraw | None) -> Draw:
    wanted = n if redraw is None else len(redraw.numbers)
    kept = _NO_ROWS if redraw is None else redraw.kept
    assert traits.order is not None
    rows, generations, sequences, _ = first_rows(candidates, traits.order, wanted, after, traits.limits, kept)
    if len(rows) < wanted:
        raise NotEnoughRowsError(f"{n} rows were asked for, {len(rows) + len(kept)} can be chosen")
    # The sequence that a row was chosen by: by now another may stand in its place.
    state = {"after": max(int(sequences.max(initial=0)), after)} if traits.cursor else {}
    return Draw(rows, generations, np.ones(wanted), state=state)


__all__ = [
    "MAX_DRAWS",
    "DeclaredStrategy",
    "WholeGroups",
    "check_groups",
    "check_n",
    "describe_incomplete",
    "first_rows",
    "select_declared",
]
