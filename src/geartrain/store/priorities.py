"""Sets priorities by key: priorities of rows, or of steps if the store keeps those."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError


class PrioritizedStore(Protocol):
    """What setting priorities needs of a `Store`."""

    native: _native.Store

    @property
    def name(self) -> str:
        """Name of the store."""

    @property
    def per_step(self) -> bool:
        """Whether every step has a priority of its own."""


def set_priorities(store: PrioritizedStore, keys: Keys, priorities: NDArray[np.float64]) -> int:
    """Sets the priorities (n,) of rows or steps of a store, by keys of it; returns how many keys were stale.

    Raises:
        ArgumentError: the keys name steps and the store keeps priorities of rows, or the other way round.
        SchemaError: a priority that is none. None is set.
    """
    if store.per_step != (keys.step is not None):
        check_keys_of(keys, per_step=store.per_step, whose=f"the store {store.name!r}")
    if keys.step is not None:
        return store.native.update_step_priorities(keys.row, keys.generation, keys.step, priorities)
    return store.native.update_priorities(keys.row, keys.generation, priorities)


def check_keys_of(keys: Keys, *, per_step: bool, whose: str) -> None:
    """Raises `ArgumentError` unless keys name steps where a store keeps priorities of steps, and rows where of rows."""
    if per_step and keys.step is None:
        raise ArgumentError(
            f"{whose} keeps a priority for every step, and these keys name rows; those of its batches name steps, and "
            f"`keys.of_steps(step)` makes such keys of others"
        )
    if not per_step and keys.step is not None:
        raise ArgumentError(
            f"these keys name steps, and {whose} keeps priorities of rows (priority_per='row'); "
            f"`keys.without_steps()` are those of their rows"
        )


def set_in_draw_order(store: PrioritizedStore, keys: Keys, priorities: NDArray[np.float64]) -> int:
    """Sets priorities of rows or steps of batches, in the order of their draws.

    If a row or step was drawn twice, the later draw's priority holds. A key that cannot be in the store counts as
    stale.
    """
    if store.per_step != (keys.step is not None):
        check_keys_of(keys, per_step=store.per_step, whose=f"the store {store.name!r}")
    return store.native.apply_updates(keys.row, keys.generation, keys.step, keys.draw, priorities)


__all__ = ["check_keys_of", "set_in_draw_order", "set_priorities"]
