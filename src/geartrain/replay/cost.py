"""`Cost`: what a row of a packed batch costs to train on, for balance among ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from geartrain.core.arguments import Options, check_text, check_type, check_whole, checked
from geartrain.errors import ArgumentError
from geartrain.replay.batch_lengths import BatchLengths

_MOST = 2**31 - 1


@dataclass(frozen=True)
class Cost(Options):
    """The cost of a row: `per_item` * s + `per_square` * s * s, added up over its sequences of s items.

    A sequence is a row's part of the axis, or, if a field divides the axis, each part of it. `per_square` stands for
    attention, whose work grows with the square of a sequence.

    Args:
        axis: name of an axis of the store.
        per_item, per_square: whole numbers from 0 to 2**31 - 1, of which one is above 0.

    Raises:
        ArgumentError: an argument is none of these.

    Examples:
        >>> import geartrain as gt
        >>> gt.Cost("tokens", per_item=12_288, per_square=2)  # a layer of width 1,024, in the same unit
        Cost(axis='tokens', per_item=12288, per_square=2)
    """

    axis: str = field(metadata=checked(check_text))
    per_item: int = field(default=1, metadata=checked(check_whole, 0, _MOST))
    per_square: int = field(default=0, metadata=checked(check_whole, 0, _MOST))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_item == self.per_square == 0:
            raise ArgumentError("per_item or per_square must be above 0: else all rows cost nothing")

    def of_rows(self, lengths: BatchLengths) -> list[int]:
        """Internal: the cost of each row of a global batch, (B,)."""
        whole = lengths.lengths[self.axis]
        counts, items = lengths.parts.get(self.axis, (np.ones(len(whole), np.int64), whole))
        longest = int(items.max()) if len(items) else 0
        if (self.per_item + self.per_square * longest) * max(int(whole.max(initial=0)), 1) >= 2**62:
            items = items.astype(object)  # numbers of any size
        each = items * self.per_item + items * items * self.per_square
        ends = np.cumsum(counts)
        sums = np.concatenate([np.zeros(1, each.dtype), np.cumsum(each)])
        costs: list[int] = (sums[ends] - sums[ends - counts]).tolist()
        return costs


def as_cost(balance: object) -> Cost | None:
    """The cost that `RankOptions(balance=...)` names; raises `ArgumentError` for what is none."""
    if balance is None or isinstance(balance, Cost):
        return balance
    return Cost(check_type("balance is the name of an axis, such as 'tokens', or a Cost", balance, str))


__all__ = ["Cost", "as_cost"]
