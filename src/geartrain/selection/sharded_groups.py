"""Draws whole groups from several shards. Every rank draws from the list of all shards' groups."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.errors import ArgumentError, NotEnoughRowsError, SplitGroupError
from geartrain.selection.declared import DeclaredStrategy, WholeGroups, check_groups
from geartrain.selection.shard import NO_ROW, NO_ROWS, Shard, ShardedDraw
from geartrain.selection.strategy import Strategy, seed_of

# A group of one shard: its key, how many rows the shard has of it, and its priority if these are enough.
_GROUP = np.dtype([("key", "<u8"), ("count", "<u4"), ("priority", "<u4")])


def draw_groups(strategy: Strategy, size: int, shard: Shard, n: int, step: int) -> ShardedDraw:
    """Groups are drawn as one store draws them, by every rank, from the list of all shards' groups in their order."""
    if not isinstance(strategy, DeclaredStrategy):
        raise ArgumentError(f"{type(strategy).__name__} has the form 'groups' and is no DeclaredStrategy")
    check_groups(n, size)
    wanted = n // size
    groups = strategy.whole_groups(shard.candidates) if shard.leads else None
    every, owner = _every_group(strategy, size, shard, groups)
    first = np.flatnonzero(np.append(True, every["key"][1:] != every["key"][:-1])[: len(every)])
    parts = np.diff(np.append(first, len(every)))
    rows = np.add.reduceat(every["count"].astype(np.int64), first) if len(first) else parts
    if (split := np.flatnonzero((parts > 1) & (rows >= size))).size:
        at, count = int(first[split[0]]), int(parts[split[0]])
        shards = ", ".join(
            f"{has} in shard {of}" for has, of in zip(every["count"][at:], owner[at : at + count], strict=False)
        )
        raise SplitGroupError(
            f"{strategy.describe_group(shard.candidates, int(every['key'][at]))} has rows in {count} "
            f"shards ({shards}), but groups of {size} are drawn as a whole: keep the rows of a group in "
            "one shard"
        )
    whole = np.flatnonzero(every["count"] >= size)
    if len(whole) < wanted:
        raise NotEnoughRowsError(
            f"{wanted} groups of {size} were asked for, {len(whole)} are whole, each on one shard, of {len(every)}"
        )
    priorities, owner = np.ascontiguousarray(every["priority"][whole]), owner[whole]
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
    """The groups that all shards have rows of, by key, and the shard of each: twice in the list if in two shards."""
    mine = np.zeros(0, _GROUP)
    if groups is not None:
        if groups.seen_keys is None or groups.seen_counts is None:
            raise ArgumentError(
                f"{type(strategy).__name__}.whole_groups gives no keys of its groups, by which those of several shards "
                f"are drawn from"
            )
        mine = np.zeros(len(groups.seen_keys), _GROUP)
        mine["key"], mine["count"] = groups.seen_keys, groups.seen_counts
        mine["priority"][groups.seen_counts >= size] = groups.priorities
    counts = shard.gather(np.array([len(mine)], np.uint64))[:, 0].astype(np.int64)
    padded = np.zeros(int(counts.max()), _GROUP)
    if groups is not None:
        padded[: len(mine)] = mine
    gathered = shard.gather(padded.view(np.uint64)).view(_GROUP).reshape(len(counts), -1)
    every = np.concatenate([part[:count] for part, count in zip(gathered, counts, strict=True)])
    order = np.argsort(every["key"], kind="stable")
    return every[order], np.repeat(np.arange(len(counts)), counts)[order]
