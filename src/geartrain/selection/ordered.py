"""Strategies that take rows in an order: highest priority first, newest first or oldest first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from geartrain.selection.declared import DeclaredStrategy
from geartrain.selection.strategy import Limits, Traits, check_limits, check_seed


@dataclass(frozen=True)
class _Ordered(DeclaredStrategy):
    """Rows in an order of theirs, within limits; nothing is drawn by chance."""

    limits: Limits | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_limits(self.limits)


@dataclass(frozen=True)
class TopK(_Ordered):
    """Draws the rows with the highest priorities, the highest first; among equal ones the oldest.

    Cost: a scan of the rows.

    Args:
        limits: rows that may be chosen.
        seed: has no effect: nothing is random.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> store = gt.Store.create({"x": gt.Field((), "int64", per_row=True)}, capacity=8)
        >>> _ = store.insert({"x": np.arange(4)}, priorities=np.array([1.0, 4.0, 3.0, 2.0]))
        >>> with gt.Replay(store, gt.selection.TopK(), batch_size=2, output="numpy") as replay:
        ...     replay.sample()["x"].tolist()
        [1, 2]
        >>> store.close()
    """

    @cached_property
    def traits(self) -> Traits:
        return Traits("highest_priority", limits=self.limits)


@dataclass(frozen=True)
class Lifo(_Ordered):
    """Draws the newest rows, the last committed first. Cost: a scan of the rows.

    Args:
        limits: rows that may be chosen.
        seed: has no effect: nothing is random.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> store = gt.Store.create({"x": gt.Field((), "int64", per_row=True)}, capacity=8)
        >>> _ = store.insert({"x": np.arange(6)})
        >>> with gt.Replay(store, gt.selection.Lifo(), batch_size=3, output="numpy") as replay:
        ...     replay.sample()["x"].tolist()
        [5, 4, 3]
        >>> store.close()
    """

    @cached_property
    def traits(self) -> Traits:
        return Traits("newest", limits=self.limits)


@dataclass(frozen=True)
class Fifo(_Ordered):
    """Draws the oldest rows that were not drawn before: every row once, in the order of commits.

    Its state is the sequence number of the last row that it drew. Cost: a scan of the rows.

    Args:
        limits: rows that may be chosen.
        seed: has no effect: nothing is random.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> store = gt.Store.create({"x": gt.Field((), "int64", per_row=True)}, capacity=8)
        >>> _ = store.insert({"x": np.arange(6)})
        >>> with gt.Replay(store, gt.selection.Fifo(), batch_size=3, output="numpy") as replay:
        ...     replay.sample()["x"].tolist(), replay.sample()["x"].tolist()
        ([0, 1, 2], [3, 4, 5])
        >>> store.close()
    """

    @cached_property
    def traits(self) -> Traits:
        return Traits("oldest", cursor=True, limits=self.limits)


__all__ = ["Fifo", "Lifo", "TopK"]
