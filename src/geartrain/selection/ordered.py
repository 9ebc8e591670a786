"""Strategies that take rows in an order: highest priority first, newest first or oldest first."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from geartrain.core.arguments import FLAG, SEED, leave_out
from geartrain.selection.declared import DeclaredStrategy
from geartrain.selection.strategy import LIMITS, Limits, Traits


@dataclass(frozen=True)
class _Ordered(DeclaredStrategy):
    """Rows in an order of theirs, within limits; nothing is drawn by chance."""

    limits: Limits | None = field(default=None, metadata=LIMITS)
    seed: int | None = field(default=None, metadata=SEED)


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

    In a store with tasks it draws the oldest rows that are finished, and passes over none for good. With `strict=True`
    it draws rows in the order of their inserts, and waits while an older row is under way. So the batches do not depend
    on which row is finished first. The training loop then waits for the slowest rows: simulated runs took 1.9 to 5
    times as long. Rows that are dropped are left out.

    Args:
        limits: rows that may be chosen; not with `strict`.
        seed: has no effect: nothing is random.
        strict: draw rows of a store with tasks in the order of their inserts.

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

    strict: bool = field(default=False, metadata=FLAG)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.strict:
            leave_out("Fifo(strict=True) passes over no row", limits=self.limits)

    @cached_property
    def traits(self) -> Traits:
        return Traits("oldest", cursor=True, strict=self.strict, limits=self.limits)


__all__ = ["Fifo", "Lifo", "TopK"]
