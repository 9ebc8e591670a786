"""Checks at construction that a replay can draw `GroupSampling` groups from its stores."""

from __future__ import annotations

from collections.abc import Sequence

from geartrain.errors import ArgumentError
from geartrain.selection.declared import check_groups
from geartrain.selection.groups import GroupSampling
from geartrain.selection.mixture import Selection, strategies_of
from geartrain.store.store import Store


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
    column = store.column(name)
    field = store.fields[name]
    if field.per_row and column.ndim == 1 and column.dtype.kind in "iub":
        return
    found = f"{field.dtype} {field.shape}" if field.per_row else f"{field.dtype} and has a value for each step"
    raise ArgumentError(
        f"groups are told by a per_row field of one whole number, {name!r} of the store {store.name!r} is {found}"
    )


__all__ = ["check_grouping"]
