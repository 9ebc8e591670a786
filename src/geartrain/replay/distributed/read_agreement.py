"""Agreement on a read: every rank tells all others whether it has lost rows for good.

A shard may be emptied between the draw and the read. So no rank finishes a batch before it knows that all ranks have
their rows. The ranks send this with the rows in step 6 (rank_rows.py), so it takes no extra round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import EmptyStoreError, NotEnoughRowsError
from geartrain.ranks.rank_collectives import DIRECT_RANKS, RADIX
from geartrain.ranks.rank_group import Message
from geartrain.replay.distributed.members import Members
from geartrain.replay.distributed.messages import flat_bytes
from geartrain.replay.distributed.sharded_sampler import CommonError, DrawAgainError


class RowsLostError(DrawAgainError):
    """A shard had no other row for one that was lost. All ranks know, and can draw the batch again."""


class ReadOutcome(NamedTuple):
    """Outcome of a rank's read: the lowest probability of each store, and the error if a shard was empty."""

    lowest: list[float]
    failed: EmptyStoreError | None


class ReadAgreement:
    """Exchanges the rows of one batch, and with them the outcome of every rank's read.

    Args:
        members: the ranks.
        outcome: outcome of this rank's read.
        with_lowest: whether the lowest probabilities of all ranks are needed.
        can_redraw: whether all ranks can repeat the draws, because the draws have used nothing up.

    Attributes:
        lowest: after the exchange, (stores,) float64: for each store the lowest probability that any rank read; None
            without `with_lowest`.
    """

    def __init__(self, members: Members, outcome: ReadOutcome, *, with_lowest: bool, can_redraw: bool) -> None:
        self.members = members
        self.lowest: NDArray[np.float64] | None = None
        self._outcome = outcome
        self._with_lowest = with_lowest
        self._can_redraw = can_redraw

    @property
    def told(self) -> NDArray[Any]:
        """The message to all others: whether this rank has lost rows, and its lowest probabilities if wanted."""
        failed, lowest = self._outcome.failed is not None, self._outcome.lowest
        return np.array([failed, *lowest] if self._with_lowest else [failed])

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], *, idle: bool) -> None:
        """Sends and receives rows as `RankGroup.exchange` does. Collective.

        Args:
            sends, receives: the rows.
            idle: no row moves between any two ranks, which all of them know. Then there are no `sends` and no
                `receives`.

        Raises:
            RowsLostError: a rank lost rows, and its shard has no others; on all ranks, which can make the draws again.
            CommonError: the same, where they cannot.
        """
        group, mine = self.members.group, self.told
        if idle and group.size <= RADIX:  # an all-gather of one round
            self.take(self.members.all_gather(mine))
            return
        if group.size > DIRECT_RANKS:  # to tell each of the others would take longer than the rounds of an all-gather
            self.take(self.members.all_gather(mine))
            group.exchange(sends, receives)
            return
        others = [peer for peer in range(group.size) if peer != group.rank]
        every = np.empty((group.size, mine.size), mine.dtype)
        every[group.rank] = mine
        told = flat_bytes(mine)
        group.exchange(
            [*((peer, told) for peer in others), *sends],
            [*((peer, flat_bytes(every[peer])) for peer in others), *receives],
        )
        self.take(every)

    def take(self, every: NDArray[Any]) -> None:
        """Takes what every rank tells, (ranks, 1), with lowest probabilities (ranks, 1 + stores); as `exchange`."""
        self.check(every[:, 0])
        if self._with_lowest:
            self.lowest = every[:, 1:].min(0)

    def check(self, failed: Sequence[Any] | NDArray[Any]) -> None:
        """Raises what `exchange` raises, where a rank, by number, has lost rows."""
        if any(failed):
            rank = next(other for other, lost in enumerate(failed) if lost)
            error = self._outcome.failed or NotEnoughRowsError(
                f"rank {rank} found no other rows in its shard to replace those that were overwritten"
            )
            raise RowsLostError(error) if self._can_redraw else CommonError(error)


__all__ = ["ReadAgreement", "ReadOutcome", "RowsLostError"]
