"""Checks at construction that a replay can draw `GroupSampling` groups from its stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from geartrain.errors import ArgumentError
from geartrain.replay.device.options import DeviceOptions
from geartrain.selection.declared import check_groups
from geartrain.selection.groups import GroupSampling
from geartrain.selection.mixture import Selection, strategies_of
from geartrain.selection.strategy import Strategy
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


def device_for(selection: Selection, options: DeviceOptions | None, *, of_job: bool) -> DeviceOptions | None:
    """The options of a device that can have the batches of a selection: those of late groups are staged.

    Args:
        selection: the strategy, or the mixture.
        options: as `Replay` was given them; None for host memory.
        of_job: whether batches are made by ranks.

    Raises:
        ArgumentError: the options ask for something else.
    """
    late = any(isinstance(each, GroupSampling) and each.least is not None for each in strategies_of(selection))
    if options is None or not late:
        return options
    if of_job:
        raise ArgumentError(
            "late groups of several ranks are built in host memory: leave out device, and move batches with batch.to()"
        )
    if options.path not in ("auto", "staged"):
        raise ArgumentError(f"batches of late groups are staged: leave out path={options.path!r}")
    return replace(options, path="staged")


def rows_for(strategy: Strategy, batch_size: int) -> int:
    """Fewest rows that batches of `batch_size` places may have: late groups have fewer than others."""
    if isinstance(strategy, GroupSampling) and strategy.least is not None:
        return batch_size // strategy.size * strategy.least
    return batch_size


def _check_field(store: Store, name: str) -> None:
    column = store.column(name)
    field = store.fields[name]
    if field.per_row and column.ndim == 1 and column.dtype.kind in "iub":
        return
    found = f"{field.dtype} {field.shape}" if field.per_row else f"{field.dtype} and has a value for each step"
    raise ArgumentError(
        f"groups are told by a per_row field of one whole number, {name!r} of the store {store.name!r} is {found}"
    )


__all__ = ["check_grouping", "device_for", "rows_for"]
