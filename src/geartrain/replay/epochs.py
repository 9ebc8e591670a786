"""Passes over stores: what a replay with `Epochs` can do, checked when it is made."""

from __future__ import annotations

from collections.abc import Sequence

from geartrain.errors import ArgumentError
from geartrain.selection.epochs import Epochs
from geartrain.selection.mixture import Mixture, Selection, strategies_of
from geartrain.store.store import Store


def check_epochs(stores: Sequence[Store], selection: Selection, *, alone: bool, device: bool, windows: bool) -> None:
    """Raises `ArgumentError` where a replay could not make passes over its stores.

    Args:
        alone: batches are of one process's store.
        device: they go to a device.
        windows: they are of some steps, and not of whole rows.
    """
    found = [each for each in strategies_of(selection) if isinstance(each, Epochs)]
    if not found:
        return
    if isinstance(selection, Mixture):
        raise ArgumentError("passes over several stores end at different batches: Epochs is no part of a Mixture")
    if device:
        raise ArgumentError("passes are made in host memory: leave out device, and move batches with batch.to()")
    if stores[0].options["max_times_sampled"] is not None:
        raise ArgumentError(
            "a store with max_times_sampled removes what was sampled: use Fifo, which gives each row once"
        )
    epochs = found[0]
    if epochs.over == "steps" and not windows:
        raise ArgumentError("a pass over steps was asked for with whole rows: give window= or view=")
    if not alone and (epochs.over == "steps" or not epochs.drop_last):
        raise ArgumentError(
            f"over several ranks passes are over rows, in batches of one size: give drop_last=True and over='rows', "
            f"found {epochs}"
        )


__all__ = ["check_epochs"]
