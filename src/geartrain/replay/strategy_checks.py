"""Checks at construction that a replay can draw from its stores by its strategies."""

from __future__ import annotations

from collections.abc import Sequence

from geartrain.errors import ArgumentError
from geartrain.selection.declared import check_groups
from geartrain.selection.epochs import Epochs
from geartrain.selection.groups import GroupSampling
from geartrain.selection.mixture import Selection, strategies_of
from geartrain.selection.strategy import traits_of
from geartrain.store.recorder import repeats_field, shares_rows
from geartrain.store.store import Store


def check_epochs(stores: Sequence[Store], selection: Selection, *, device: bool, windows: bool) -> None:
    """Raises `ArgumentError` where a replay could not make passes over its stores.

    Args:
        device: batches go to the devices of several ranks.
        windows: they are of some steps, and not of whole rows.
    """
    for store, strategy in zip(stores, strategies_of(selection), strict=True):
        if not isinstance(strategy, Epochs):
            continue
        if device:
            raise ArgumentError(
                "over several ranks passes are built in host memory: leave out device, and move batches with batch.to()"
            )
        if store.options["max_times_sampled"] is not None:
            raise ArgumentError(
                "a store with max_times_sampled removes rows that were sampled: use Fifo, which draws each row once"
            )
        if strategy.over == "steps" and not windows and not shares_rows(store.fields):  # whose episodes it has once
            raise ArgumentError("a pass over steps needs windows or transitions: give window= or view=")


def check_grouping(stores: Sequence[Store], selection: Selection, batch_size: int) -> None:
    """Raises `ArgumentError` or `FieldError` where a replay could not draw groups from its stores.

    Args:
        stores, selection: one store and strategy, or those of a mixture.
        batch_size: rows of a batch.
    """
    for store, strategy in zip(stores, strategies_of(selection), strict=True):
        if not isinstance(strategy, GroupSampling):
            continue
        for name in strategy.names:
            _check_field(store, name)
        if strategy is selection:  # what a mixture takes of a store changes from batch to batch
            check_groups(batch_size, strategy.size)


def _check_field(store: Store, name: str) -> None:
    field = store.fields.get(name)
    if field is not None and (field.kind != "array" or field.axis is not None):
        found = field.kind if field.kind != "array" else f"{field.dtype} with the axis {field.axis!r}"
        raise ArgumentError(
            f"groups are told by a field of one whole number a row, {name!r} of the store {store.name!r} is {found}: "
            "insert a number with each row, such as that of its prompt, and group by it"
        )
    column = store.column(name)
    field = store.fields[name]
    if field.per_row and column.ndim == 1 and column.dtype.kind in "iub":
        return
    found = f"{field.dtype} {field.shape}" if field.per_row else f"{field.dtype} and has a value for each step"
    raise ArgumentError(
        f"groups are told by a per_row field of one whole number, {name!r} of the store {store.name!r} is {found}"
    )


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


__all__ = ["check_epochs", "check_grouping", "check_step_priorities"]
