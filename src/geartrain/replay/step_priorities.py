"""Checks at construction that a replay can sample stores that keep one priority for each step."""

from __future__ import annotations

from collections.abc import Sequence

from geartrain.errors import ArgumentError
from geartrain.selection.mixture import Selection, strategies_of
from geartrain.selection.strategy import traits_of
from geartrain.store.recorder import repeats_field
from geartrain.store.store import Store


def check_step_priorities(stores: Sequence[Store], selection: Selection, *, windows: bool, after: int) -> None:
    """Raises `ArgumentError` where a store keeps priorities of steps and a replay could not follow them.

    Args:
        windows: of some steps, and not of whole rows.
        after: steps that a drawn step needs, itself included: `n_step` of transitions; 0 where rows repeat no steps.
    """
    if not any(store.per_step for store in stores):
        return
    if not all(store.per_step for store in stores):
        raise ArgumentError("the stores of a mixture must all have priorities of steps, or all of rows")
    for store, strategy in zip(stores, strategies_of(selection), strict=True):
        traits, name = traits_of(strategy), type(strategy).__name__
        if not traits.by_priority and traits.form != "highest_priority":
            continue
        if traits.form != "random":
            raise ArgumentError(
                f"{name} needs priorities of rows, but a store with priority_per='step' has priorities of "
                "steps: use Prioritized"
            )
        if not traits.replacement:
            raise ArgumentError("steps are drawn by priority with replacement: leave out replacement=False")
        if not windows:
            raise ArgumentError(
                "a store with priority_per='step' draws steps, not whole rows: give window= or "
                "view=geartrain.Transitions(...)"
            )
        repeats = repeats_field(store.fields)
        if repeats is not None and after not in (0, repeats[1]):
            raise ArgumentError(
                f"the rows of {store.name!r} repeat steps, and have their priorities for n_step={repeats[1]}, but this "
                f"replay needs n_step={after}: create the store with recorded_fields(..., overlap=True, n_step={after})"
            )


__all__ = ["check_step_priorities"]
