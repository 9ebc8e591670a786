"""Draws whole groups from several shards. Every rank draws from the list of all shards' groups."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.errors import ArgumentError, NotEnoughRowsError, SplitGroupError
from geartrain.selection.declared import DeclaredStrategy, WholeGroups, check_groups, describe_incomplete
from geartrain.selection.shard import NO_ROW, NO_ROWS, Shard, ShardedDraw
from geartrain.selection.strategy import Strategy, seed_of


def draw_groups(strategy: Strategy, size: int, shard: Shard, n: int, step: int) -> ShardedDraw:
    """Groups are drawn as one store draws them, by every rank, from the list of all shards' groups in their order."""
    if not isinstance(strategy, DeclaredStrategy):
        raise ArgumentError(f"{type(strategy).__name__} has the form 'groups' and is no DeclaredStrategy")
    check_groups(n, size)
    wanted = n // size
    groups = strategy.whole_groups(shard.candidates) if shard.leads else None
    every, owner = _every_group(strategy, size, shard, groups)
    counts = every["count"].astype(np.int64)
    first = np.flatnonzero(np.append(True, (every["key"][1:] != every["key"][:-1]).any(1))[: len(every)])
    parts = np.diff(np.append(first, len(every)))
    rows = np.add.reduceat(counts, first) if len(first) else parts
    if (split := np.flatnonzero((parts > 1) & (rows >= size))).size:
        at, count = int(first[split[0]]), int(parts[split[0]])
        shards = ", ".join(f"{has} in shard {of}" for has, of in zip(counts[at:], owner[at : at + count], strict=False))
        raise SplitGroupError(
            f"the group {strategy.describe_group(shard.candidates, every['key'][at].tolist())} has rows in {count} "
            f"shards ({shards}), but groups of {size} are drawn as a whole: keep the rows of a group in "
            "one shard"
        )
    drawable = np.flatnonzero(counts >= size)
    if len(drawable) < wanted:
        incomplete = describe_incomplete(strategy, shard.candidates, every["key"][first], rows)
        raise NotEnoughRowsError(
            f"{wanted} groups of {size} were asked for, {len(drawable)} of {len(first)} are whole{incomplete}"
        )
    priorities, owner = np.ascontiguousarray(every["priority"][drawable]), owner[drawable]
    chosen, _, probability, _ = _native.Candidates(priorities).draw_distinct(
        True, seed_of(strategy), step, 0, wanted, NO_ROWS, None
    )
    members = np.full((wanted, size), NO_ROW)
    generations = np.zeros((wanted, size), np.uint32)
    mine = owner == shard.number
    here = np.flatnonzero(mine[chosen])
    if groups is not None:
        number = np.cumsum(mine)[chosen[here]] - 1  # among the whole groups of this shard, which are in the same order
        members[here], generations[here] = groups.rows[number], groups.generations[number]
    members, generations = shard.tell(np.stack([members, generations]))
    return ShardedDraw(
        np.repeat(owner[chosen], size).astype(np.int64),
        members.reshape(-1),
        generations.reshape(-1),
        np.repeat(np.where(mine[chosen], probability, 0.0), size),
        share=float(priorities[mine].sum(dtype=np.float64) / max(priorities.sum(dtype=np.float64), 1.0)),
    )


def _every_group(
    strategy: Strategy, size: int, shard: Shard, groups: WholeGroups | None
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """All groups that shards have rows of, by key, and the shard of each. A group in two shards is there twice."""
    told = np.zeros(2, np.uint64)
    keys, seen = np.zeros((0, 1), np.uint64), np.zeros(0, np.uint32)
    if groups is not None:
        if groups.seen_keys is None or groups.seen_counts is None or groups.seen_keys.ndim != 2:
            raise ArgumentError(
                f"{type(strategy).__name__}.whole_groups gives no keys (S, K) of its groups, by which those of several "
                f"shards are drawn"
            )
        keys, seen = groups.seen_keys, groups.seen_counts
        told[:] = keys.shape
    every_told = shard.gather(told)
    counts = every_told[:, 0].astype(np.int64)
    # A group of one shard: its key, how many rows the shard has of it, and its priority if it can be drawn.
    group = np.dtype([("key", "<u8", (int(every_told[:, 1].max()),)), ("count", "<u4"), ("priority", "<u4")])
    padded = np.zeros(int(counts.max()), group)
    if groups is not None:
        mine = padded[: len(keys)]
        mine["key"] = keys
        mine["count"] = seen
        mine["priority"][seen >= size] = groups.priorities
    gathered = shard.gather(padded.view(np.uint64)).view(group).reshape(len(counts), -1)
    every = np.concatenate([part[:count] for part, count in zip(gathered, counts, strict=True)])
    order = np.lexsort(every["key"].T[::-1])
    owner = np.repeat(np.arange(len(counts)), counts)[order]
    return every[order], owner


__all__ = ["draw_groups"]
