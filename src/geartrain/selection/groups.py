"""`GroupSampling`: draws whole groups of rows, such as all answers to one prompt (GRPO)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from geartrain.core.arguments import FLAG, SEED, check_real, check_text, check_whole, checked
from geartrain.errors import ArgumentError
from geartrain.selection.declared import DeclaredStrategy, WholeGroups, first_rows
from geartrain.selection.strategy import LIMITS, ORDERS, Candidates, Limits, Traits

_NO_ROWS = np.empty(0, np.uint32)
_SIGN = np.uint64(1 << 63)  # numbers with a sign, in their order, as numbers without
_MOST_S = 1e9  # 30 years; far below what nanoseconds in 64 bits can tell


@dataclass(frozen=True)
class GroupSampling(DeclaredStrategy):
    """Draws whole groups: rows that share the value of a field, such as the answers to one prompt (GRPO).

    A group can be drawn once it has `size` rows; the oldest `size` of a larger one are used. A batch of n rows holds n
    / size different groups. The members of a group stand side by side, the oldest first. The batch does not depend on
    where the rows lie in the store.

    A group of which some rows never come is never drawn, unless `least` and `deadline_s` are given. Then a group of
    `least` or more rows is late `deadline_s` seconds after its first row was committed, and is drawn with the rows it
    has, as likely as a whole group. A batch keeps its shape: the rows of a late group stand first, and each place
    without a row is zeros, with `batch.length` 0 and a `mask` of False. The keys of such places are stale.

    Over several ranks all rows of a group must be in one shard: insert them on one host, and reshard with
    `load_checkpoint(together=...)`. `SplitGroupError` names a group that is spread over shards. The leader of each
    shard decides once a batch which groups are late; no other rank looks at a clock.

    Args:
        by: the field whose values group the rows: a `per_row` field of one whole number.
        size: rows of a group.
        seed: seed of the random numbers, 0 to 2**64 - 1; by default `Replay` derives it from its own.
        prioritized: draw groups in proportion to the sum of their rows' priorities, instead of uniformly.
        limits: rows that may be chosen.
        attempt: a second such field. Rows are of one group if both values are equal, so that answers to a prompt do not
            join those of an epoch before. None: `by` alone.
        least: fewest rows that a late group may have, 1 to size - 1. None: only whole groups are drawn.
        deadline_s: time after which a group is late, in seconds since its oldest row in the store was committed.

    Raises:
        ArgumentError: a value out of range, or one of `least` and `deadline_s` without the other.

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
    least: int | None = field(default=None, metadata=checked(check_whole, 1))
    deadline_s: float | None = field(default=None, metadata=checked(check_real, None, _MOST_S, above=0))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by == self.attempt:
            raise ArgumentError(f"`by` and `attempt` are different fields, found {self.by!r} for both")
        if (self.least is None) != (self.deadline_s is None):
            raise ArgumentError(
                f"a late group needs both least and deadline_s, found least={self.least!r} and "
                f"deadline_s={self.deadline_s!r}"
            )
        if self.least is not None:
            if self.size == 1:
                raise ArgumentError("groups of one row are always whole: leave out least and deadline_s")
            check_whole("least", self.least, 1, self.size - 1)

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
        late, waiting = self._late(candidates, rows[order[starts]], counts)
        keys = _keys_of([each[order[starts]] for each in ids])
        # A group that lost a row is no longer whole; its place goes to one that nothing was taken from.
        kept = np.asarray(kept, np.uint32)
        drawn = _as_records(keys)
        taken = np.isin(drawn, _as_records(_keys_of([column[kept] for column in columns]))) if len(kept) else False
        there = np.flatnonzero(((counts >= self.size) | late) & ~taken)
        place = np.arange(self.size)
        absent = place >= counts[there][:, None]
        members = order[starts[there][:, None] + np.where(absent, 0, place)]
        if self.prioritized:
            # So many 32-bit priorities fit into 32 bits when the sum's last bits are dropped; what is above 0 stays so.
            each = candidates.native.priorities(rows)[members]
            sums = np.where(absent, 0, each).sum(1, dtype=np.uint64)
            shifted = sums >> np.uint64((self.size - 1).bit_length())
            priorities = np.maximum(shifted, np.minimum(sums, 1)).astype(np.uint32)
        else:
            priorities = np.ones(len(members), np.uint32)
        return WholeGroups(
            rows[members],
            np.where(absent, 0, generations[members]).astype(np.uint32),
            priorities,
            len(keys),
            keys,
            counts.astype(np.uint32),
            None if self.least is None else late,
            waiting,
        )

    def _late(
        self, candidates: Candidates, first: NDArray[np.uint32], counts: NDArray[np.intp]
    ) -> tuple[NDArray[np.bool_], int]:
        """Which groups of these counts are late, by their first rows (S,), and how many only wait until they are."""
        late = np.zeros(len(counts), bool)
        if self.least is None or self.deadline_s is None:
            return late, 0
        short = np.flatnonzero((counts >= self.least) & (counts < self.size))
        now_ns = time.time_ns() if candidates.now_ns is None else candidates.now_ns
        due_ns = max(0, now_ns - int(self.deadline_s * 1e9))
        late[short] = candidates.native.inserted_at(first[short]) <= due_ns
        return late, len(short) - int(late.sum())

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
