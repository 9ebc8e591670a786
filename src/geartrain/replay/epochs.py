"""Checks at construction that a replay can make `Epochs` passes over its stores."""

from __future__ import annotations

from collections.abc import Sequence

from geartrain.errors import ArgumentError
from geartrain.selection.epochs import Epochs
from geartrain.selection.mixture import Selection, strategies_of
from geartrain.store.recorder import shares_rows
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


__all__ = ["check_epochs"]
