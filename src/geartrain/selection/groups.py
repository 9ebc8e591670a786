"""`GroupSampling`: draws whole groups of rows, such as all answers to one prompt (GRPO)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from geartrain.errors import ArgumentError
from geartrain.selection.arguments import check_flag, check_whole
from geartrain.selection.declared import DeclaredStrategy, WholeGroups, first_rows
from geartrain.selection.strategy import ORDERS, Candidates, Limits, Traits, check_limits, check_seed

_NO_ROWS = np.empty(0, np.uint32)
_SIGN = np.uint64(1 << 63)  # numbers with a sign, in their order, as numbers without


@dataclass(frozen=True)
class GroupSampling(DeclaredStrategy):
    """Draws whole groups: rows that share the value of a field, such as the answers to one prompt (GRPO).

    A group can be drawn once it has `size` rows; the oldest `size` of a larger one are used. A batch of n rows holds n
    / size different groups. The members of a group stand side by side, the oldest first. The batch does not depend on
    where the rows lie in the store.

    Over several ranks all rows of a group must be in one shard: insert them on one host, and reshard with
    `load_checkpoint(together=...)`. `SplitGroupError` names a group that is spread over shards.

    Args:
        by: the field whose values group the rows: a `per_row` field of whole numbers.
        size: rows of a group.
        seed: seed of the random numbers, 0 to 2**64 - 1; by default `Replay` derives it from its own.
        prioritized: draw groups in proportion to the sum of their rows' priorities, instead of uniformly.
        limits: rows that may be chosen.

    Cost: a scan of the rows and a sort of the available ones; over several ranks 16 bytes a group and batch.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> store = gt.Store.create({"prompt": gt.Field((), "int64", per_row=True)}, capacity=8)
        >>> _ = store.insert({"prompt": np.array([7, 8, 7, 8])})
        >>> groups = gt.selection.GroupSampling("prompt", size=2, seed=0)
        >>> with gt.Replay(store, groups, batch_size=4, output="numpy") as replay:
        ...     sorted(replay.sample()["prompt"].reshape(2, 2).tolist())
        [[7, 7], [8, 8]]
        >>> store.close()
    """

    by: str
    size: int
    seed: int | None = None
    prioritized: bool = False
    limits: Limits | None = None

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_limits(self.limits)
        check_flag("prioritized", self.prioritized)
        check_whole("size", self.size, 1, 2**31 - 1)
        if not isinstance(self.by, str):
            raise ArgumentError(f"`by` is the name of a field, found {self.by!r}")

    @cached_property
    def traits(self) -> Traits:
        return Traits("groups", atom=self.size, by_priority=self.prioritized, limits=self.limits)

    def whole_groups(self, candidates: Candidates, kept: ArrayLike = ()) -> WholeGroups:
        ids = candidates.column(self.by)
        if ids.ndim != 1 or ids.dtype.kind not in "iub":
            raise ArgumentError(
                f"groups need a column of one whole number a row, {self.by!r} is {ids.dtype} {ids.shape}"
            )
        rows, generations, *_ = first_rows(
            candidates, ORDERS["oldest"], max(len(candidates), 1), 0, self.limits, _NO_ROWS
        )
        order = np.argsort(ids[rows], kind="stable")
        values, starts, counts = np.unique(ids[rows][order], return_index=True, return_counts=True)
        # A group that lost a row is no longer whole; its place goes to one that nothing was taken from.
        kept = np.asarray(kept, np.uint32)
        whole = np.flatnonzero((counts >= self.size) & ~np.isin(values, ids[kept]))
        members = order[starts[whole][:, None] + np.arange(self.size)]
        if self.prioritized:
            # So many 32-bit priorities fit into 32 bits when the sum's last bits are dropped; what is above 0 stays so.
            sums = candidates.native.priorities(rows)[members].sum(1, dtype=np.uint64)
            shifted = sums >> np.uint64((self.size - 1).bit_length())
            priorities = np.maximum(shifted, np.minimum(sums, 1)).astype(np.uint32)
        else:
            priorities = np.ones(len(members), np.uint32)
        seen = values.astype(np.int64).view(np.uint64) ^ _SIGN if values.dtype.kind == "i" else values.astype(np.uint64)
        return WholeGroups(rows[members], generations[members], priorities, len(values), seen, counts.astype(np.uint32))

    def describe_group(self, candidates: Candidates, key: int) -> str:
        signed = candidates.column(self.by).dtype.kind == "i"
        return f"the group {key - 2**63 if signed else key} of {self.by!r}"


__all__ = ["GroupSampling"]
