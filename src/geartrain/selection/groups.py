"""`GroupSampling`: draws whole groups of rows, such as all answers to one prompt (GRPO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from geartrain.core.arguments import FLAG, SEED, check_text, check_whole, checked
from geartrain.errors import ArgumentError
from geartrain.selection.declared import DeclaredStrategy, WholeGroups, first_rows
from geartrain.selection.strategy import LIMITS, ORDERS, Candidates, Limits, Traits

_NO_ROWS = np.empty(0, np.uint32)
_SIGN = np.uint64(1 << 63)  # numbers with a sign, in their order, as numbers without


@dataclass(frozen=True)
class GroupSampling(DeclaredStrategy):
    """Draws whole groups: rows that share the value of a field, such as the answers to one prompt (GRPO).

    A group can be drawn once it has `size` rows; the oldest `size` of a larger one are used. A batch of n rows holds n
    / size different groups. The members of a group stand side by side, the oldest first. The batch does not depend on
    where the rows lie in the store.

    A group of which some rows never come is never drawn. If answers may be lost with their process, keep a prompt with
    all its answers as one row of a store with tasks: the claim of a dead process is due again (docs/tasks.md).

    Over several ranks all rows of a group must be in one shard: insert them on one host, and reshard with
    `load_checkpoint(together=...)`. `SplitGroupError` names a group that is spread over shards.

    Args:
        by: the field whose values group the rows: a `per_row` field of one whole number.
        size: rows of a group.
        seed: seed of the random numbers, 0 to 2**64 - 1; by default `Replay` derives it from its own.
        prioritized: draw groups in proportion to the sum of their rows' priorities, instead of uniformly.
        limits: rows that may be chosen.
        attempt: a second such field. Rows are of one group if both values are equal, so that answers to a prompt do not
            join those of an epoch before. None: `by` alone.

    Raises:
        ArgumentError: a value out of range.

    Cost: a scan of the rows and a sort of the available ones; over several ranks 16 bytes a group and batch, or 24 with
    `attempt`.

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

    by: str = field(metadata=checked(check_text))
    size: int = field(metadata=checked(check_whole, 1, 2**31 - 1))
    seed: int | None = field(default=None, metadata=SEED)
    prioritized: bool = field(default=False, metadata=FLAG)
    limits: Limits | None = field(default=None, metadata=LIMITS)
    _: KW_ONLY
    attempt: str | None = field(default=None, metadata=checked(check_text))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by == self.attempt:
            raise ArgumentError(f"`by` and `attempt` are different fields, found {self.by!r} for both")

    @cached_property
    def traits(self) -> Traits:
        return Traits("groups", atom=self.size, by_priority=self.prioritized, limits=self.limits)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields whose values group the rows."""
        return (self.by,) if self.attempt is None else (self.by, self.attempt)

    def whole_groups(self, candidates: Candidates, kept: ArrayLike = ()) -> WholeGroups:
        columns = [_column_of(candidates, name) for name in self.names]
        rows, generations, *_ = first_rows(
            candidates, ORDERS["oldest"], max(len(candidates), 1), 0, self.limits, _NO_ROWS
        )
        ids = [column[rows] for column in columns]
        order = np.lexsort(ids[::-1])  # stable, so that the rows of a group stay in their order
        begins = np.zeros(len(order), bool)
        begins[:1] = True
        for each in ids:
            begins[1:] |= each[order[1:]] != each[order[:-1]]
        starts = np.flatnonzero(begins)
        counts = np.diff(starts, append=len(order))
        keys = _keys_of([each[order[starts]] for each in ids])
        # A group that lost a row is no longer whole; its place goes to one that nothing was taken from.
        kept = np.asarray(kept, np.uint32)
        drawn = _as_records(keys)
        taken = np.isin(drawn, _as_records(_keys_of([column[kept] for column in columns]))) if len(kept) else False
        there = np.flatnonzero((counts >= self.size) & ~taken)
        members = order[starts[there][:, None] + np.arange(self.size)]
        if self.prioritized:
            # So many 32-bit priorities fit into 32 bits when the sum's last bits are dropped; what is above 0 stays so.
            each = candidates.native.priorities(rows)[members]
            sums = each.sum(1, dtype=np.uint64)
            shifted = sums >> np.uint64((self.size - 1).bit_length())
            priorities = np.maximum(shifted, np.minimum(sums, 1)).astype(np.uint32)
        else:
            priorities = np.ones(len(members), np.uint32)
        return WholeGroups(rows[members], generations[members], priorities, len(keys), keys, counts.astype(np.uint32))

    def describe_group(self, candidates: Candidates, key: Sequence[int]) -> str:
        return ", ".join(
            f"{name}={number - 2**63 if candidates.column(name).dtype.kind == 'i' else number}"
            for name, number in zip(self.names, key, strict=True)
        )


def _column_of(candidates: Candidates, name: str) -> NDArray[Any]:
    ids = candidates.column(name)
    if ids.ndim != 1 or ids.dtype.kind not in "iub":
        raise ArgumentError(f"groups need a column of one whole number a row, {name!r} is {ids.dtype} {ids.shape}")
    return ids


def _keys_of(ids: Sequence[NDArray[Any]]) -> NDArray[np.uint64]:
    """The values (S,) of each field as keys (S, fields), in the same order."""
    columns = [
        each.astype(np.int64).view(np.uint64) ^ _SIGN if each.dtype.kind == "i" else each.astype(np.uint64)
        for each in ids
    ]
    return np.ascontiguousarray(np.stack(columns, 1))


def _as_records(keys: NDArray[np.uint64]) -> NDArray[Any]:
    """Keys (S, K) as (S,) values that can be compared; one number as itself, which is compared sooner."""
    if keys.shape[1] == 1:
        return keys[:, 0]
    return keys.view([(f"number{at}", "<u8") for at in range(keys.shape[1])])[:, 0]


__all__ = ["GroupSampling"]
