"""Selection over the shards of many ranks: every rank computes the whole batch from a few numbers of each shard.

The rows of all shards form one population, one shard after the other. A draw gives the rows that a single store with
these rows would give (native/selection/selection.h). So the same rows in the same order give the same batch, however
they are split into shards.

Each shard contributes per batch:

| strategy | data that a shard sends | bytes |
|---|---|---|
| `Uniform`, `Prioritized`, stratified or not | the sum of its priorities, or the number of its rows | 8 |
| the same without replacement | the same, and one bit per draw: is the row new? | 16 + n/8, rarely more |
| `GroupSampling` | its groups: key, number of rows, priority | 16 or 24 a group of the largest shard |
| `TopK`, `Fifo`, `Lifo` | its first n + 16 rows: order and key | 16 or 24 a row |

A draw is a number below the sum of all totals. Every rank searches the W totals for the shard that owns it. Only the
ranks of that shard look up the row. GEAR (section 3.3) gathers all N priorities on one GPU instead and broadcasts the
result.

If several ranks share a shard, one of them leads it. Some draws need all ranks of a shard to see the same rows while
writers change them: draws without replacement, with limits, or with limited samples. Then the leader looks up the rows
and sends them to the other ranks, 12 bytes a draw within the host.

A custom strategy works over shards in one of two ways:

- it declares its traits (`geartrain.selection.Traits`), or
- it has a method `select_shards(shard, n, step, *, state) -> ShardedDraw`.

Some draws may be refused: with `Limits`, with `Uniform(over="steps")`, or by step priorities if the view cannot use
every step. A refused draw needs further attempts (sharded_attempts.py). Their cost per shard is:

- n/2 bytes for the batch, one bit for each draw and attempt;
- 16/8 bytes for each of the few draws that four attempts did not settle;
- in the end a total and a pass over the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import ArgumentError
from geartrain.selection.declared import check_n
from geartrain.selection.shard import NO_ROW, Shard, ShardedDraw, ShardedStrategy
from geartrain.selection.sharded_attempts import draw_in_attempts
from geartrain.selection.sharded_groups import draw_groups
from geartrain.selection.sharded_order import draw_first
from geartrain.selection.sharded_totals import RowSums, draw_distinct, draw_independent
from geartrain.selection.strategy import Candidates, Strategy, traits_of, with_min_length


def check_strategy(strategy: Strategy) -> None:
    """Raises `ArgumentError` unless the strategy can draw from several shards."""
    if traits_of(strategy).form == "custom" and not hasattr(strategy, "select_shards"):
        raise ArgumentError(
            f"{type(strategy).__name__} does not say how to choose over several ranks; declare a form in its traits "
            f"(geartrain.selection.Traits), or give it a method select_shards(shard, n, step, *, state) -> "
            f"geartrain.selection.sharded.ShardedDraw"
        )


def select_shards(strategy: Strategy, shard: Shard, n: int, step: int, state: Mapping[str, int] | None) -> ShardedDraw:
    """The batch of a step from all shards together.

    Raises:
        EmptyStoreError, NotEnoughRowsError: on all ranks alike.
    """
    if hasattr(strategy, "select_shards"):
        draw: ShardedDraw = strategy.select_shards(shard, n, step, state=state)
        return draw
    check_strategy(strategy)
    check_n(n)
    traits = with_min_length(traits_of(strategy), shard.min_length)
    if traits.order is not None:
        return draw_first(traits, shard, n, (state or {}) if traits.cursor and shard.moves_on else None)
    if traits.form == "groups":
        return draw_groups(strategy, traits.atom, shard, n, step)
    rows = RowSums(shard, strategy, traits, step)
    if not traits.replacement:
        return draw_distinct(rows, shard, n)
    draw_all = draw_in_attempts if rows.refuses else draw_independent
    return draw_all(rows, shard, np.arange(n, dtype=np.uint32), 0, n, traits)


def total_of(strategy: Strategy, candidates: Candidates) -> int | None:
    """What a shard contributes to draws that begin with no more than its total; None for other strategies."""
    if not is_independent(strategy):
        return None
    native = candidates.native
    return native.total_priority() if traits_of(strategy).by_priority else native.count()


def is_independent(strategy: Strategy) -> bool:
    """Whether the strategy's draws do not depend on each other, so that some can be made again on their own."""
    return traits_of(strategy).independent and not hasattr(strategy, "select_shards")


def begins_with_offers(strategy: Strategy) -> bool:
    """Whether draws begin with what `offer_of` says of each shard: rows in an order, unless it is strict."""
    traits = traits_of(strategy)
    return traits.order is not None and not traits.strict and not hasattr(strategy, "select_shards")


def redraw_shards(
    strategy: Strategy, shard: Shard, draw: ShardedDraw, refused: NDArray[np.intp], round: int, step: int
) -> ShardedDraw:
    """The same batch with some draws made again, from all shards, as one store would make them.

    The strategy's draws are independent.

    Raises:
        EmptyStoreError: on all ranks alike.
    """
    traits = with_min_length(traits_of(strategy), shard.min_length)
    rows = RowSums(shard, strategy, traits, step)
    draw_all = draw_in_attempts if rows.refuses else draw_independent
    other = draw_all(rows, shard, refused.astype(np.uint32), round, len(draw.shard), traits)
    merged = replace(
        draw,
        shard=draw.shard.copy(),
        rows=draw.rows.copy(),
        generations=draw.generations.copy(),
        probability=draw.probability.copy(),
        steps=None if draw.steps is None else draw.steps.copy(),
        rounds=np.zeros(len(draw.shard), np.int64) if draw.rounds is None else draw.rounds.copy(),
    )
    assert merged.rounds is not None
    merged.rounds[refused] = round
    for name in ("shard", "rows", "generations", "probability", "steps"):
        if getattr(merged, name) is not None:
            getattr(merged, name)[refused] = getattr(other, name)
    return merged


__all__ = [
    "NO_ROW",
    "Shard",
    "ShardedDraw",
    "ShardedStrategy",
    "begins_with_offers",
    "check_strategy",
    "is_independent",
    "redraw_shards",
    "select_shards",
    "total_of",
]
