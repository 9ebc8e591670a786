"""Reports of a placement: status and shares of the shards, the local share of batches, the result of a rebalance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

By = Literal["priority", "rows"]


@dataclass(frozen=True)
class ShardStatus:
    """A shard's status at the last all-gather.

    Attributes:
        ranks: that have it attached; the first is its leader.
        rows: selectable ones.
        free: rows that can be inserted before one is evicted.
        bytes: of the fields of its rows.
        amount: the sum of its priorities, or the number of its rows.
        share: its part of the amounts of all shards; 0 where there is none.
        reader_share: the part of the replicas whose first reader has it locally.
        reads: the part of a batch's bytes that its ranks read.
    """

    ranks: tuple[int, ...]
    rows: int
    free: int
    bytes: int
    amount: float
    share: float
    reader_share: float
    reads: float


@dataclass(frozen=True)
class PlacementReport:
    """Placement of the rows over the shards; `print` shows it as a table.

    Attributes:
        shards: in the order of their numbers.
        by: whether shares are of priorities or of rows.
        batch_size: of the expectation.
        expected_local_share: part of the delivered bytes that come from the host's own shard, for independent draws and
            `assignment="local_first"`; None without a batch size, or without rows.
        method: "exact", by the binomial distribution of each shard's draws; "simulated" from 64 batches, where ranks of
            a replica read from different shards.
        measured_local_share: over all ranks, since their replays were made; None without a replay, or before its
            first batch.
    """

    shards: tuple[ShardStatus, ...]
    by: By
    batch_size: int | None
    expected_local_share: float | None
    method: Literal["exact", "simulated"] | None
    measured_local_share: float | None

    def __str__(self) -> str:
        lines = [f"shard      ranks        rows        free         MB  {self.by + ' share':>12}  reader share"]
        for number, shard in enumerate(self.shards):
            lines.append(
                f"{number:5}  {_ranks_text(shard.ranks):>9}  {shard.rows:10,}  {shard.free:10,}  "
                f"{shard.bytes / 1e6:9,.1f}  {shard.share:12.1%}  {shard.reader_share:12.1%}"
            )
        if self.expected_local_share is not None:
            lines.append(
                f"expected local share of a batch of {self.batch_size}: {self.expected_local_share:.1%} ({self.method})"
            )
        if self.measured_local_share is not None:
            lines.append(f"measured local share: {self.measured_local_share:.1%}")
        return "\n".join(lines)


@dataclass(frozen=True)
class RebalanceResult:
    """Result of a rebalance, over all ranks.

    Attributes:
        rows: that were moved to another shard.
        bytes: of their fields.
        shares_before, shares_after: each shard's share of the priorities, or of the rows.
    """

    rows: int
    bytes: int
    shares_before: tuple[float, ...]
    shares_after: tuple[float, ...]


def _ranks_text(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks)) if len(ranks) <= 3 else f"{ranks[0]}, ... ({len(ranks)})"


__all__ = ["By", "PlacementReport", "RebalanceResult", "ShardStatus"]
