"""Ordered strategies: highest priority, newest and oldest first."""

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
    """The rows with the largest priorities, highest first; the older of equals.

    Cost: a pass over the rows.
    """

    @cached_property
    def traits(self) -> Traits:
        """See `DeclaredStrategy`."""
        return Traits("highest_priority", limits=self.limits)


@dataclass(frozen=True)
class Lifo(_Ordered):
    """The rows committed last, newest first. Cost: a pass over the rows."""

    @cached_property
    def traits(self) -> Traits:
        """See `DeclaredStrategy`."""
        return Traits("newest", limits=self.limits)


@dataclass(frozen=True)
class Fifo(_Ordered):
    """The oldest rows that it has not chosen yet: every row once, in the order of their commits.

    Its state is the sequence number of the last row it chose. Cost: a pass over the rows.
    """

    @cached_property
    def traits(self) -> Traits:
        """See `DeclaredStrategy`."""
        return Traits("oldest", cursor=True, limits=self.limits)


__all__ = ["Fifo", "Lifo", "TopK"]
