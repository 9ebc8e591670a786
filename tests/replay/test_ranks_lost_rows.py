"""A shard that loses all its rows between a draw and its read: all ranks draw the batch again, from what is left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from rank_batches import B, as_record, join, same

import geartrain as gt
from geartrain.errors import EmptyStoreError
from geartrain.replay.distributed.read import ShardReader
from geartrain.selection import Prioritized, Uniform
from geartrain.tools.testing import ThreadRankGroup, run_ranks

STRATEGIES = {
    "uniform": Uniform(seed=1),
    "stratified": Uniform(seed=1, stratified=True),
    "prioritized": Prioritized(seed=1),
    "importance weights": Prioritized(seed=1, beta=0.5),
}


def lose_rows(monkeypatch: pytest.MonkeyPatch, store: gt.Store, step: int) -> threading.Event:
    """Removes all rows of a store once, after they were drawn for a step and before they are read."""
    read, lost = ShardReader.read, threading.Event()

    def loses_rows(self: ShardReader, at: int, *rest: Any) -> Any:
        if at == step and self.samplers[0].plan.store is store and not lost.is_set():
            lost.set()
            store.delete(store.keys())
        return read(self, at, *rest)

    monkeypatch.setattr(ShardReader, "read", loses_rows)
    return lost


@pytest.mark.parametrize("selection", STRATEGIES.values(), ids=STRATEGIES.keys())
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_batch_is_drawn_again_where_a_shard_loses_its_only_row(
    sharded_stores: Callable[..., list[gt.Store]], monkeypatch: pytest.MonkeyPatch, selection: Any, ranks: int
) -> None:
    first, last = stores = sharded_stores(2)
    first.delete(first.keys()[8:])
    last.delete(last.keys()[1:])
    last.update_priorities(last.keys(), [5.0])
    lost = lose_rows(monkeypatch, last, step=1)
    settings: dict[str, Any] = {"window": 4, "output": "numpy", "num_batches": 3, "prefetch": 0}

    def body(rank: ThreadRankGroup) -> list[gt.Batch]:
        with gt.Replay(stores[rank.rank % 2], selection, B, group=rank, **settings) as replay:
            return list(replay)

    parts = run_ranks(ranks, body)
    assert lost.is_set()
    assert any((part[0].keys.shard == 1).any() for part in parts)
    made = [join([part[step] for part in parts]) for step in range(3)]
    with gt.Replay(first, selection, B, **settings) as replay:  # one process that never had that row
        expected = [as_record(batch) for batch in replay]
    assert same(made[1:], expected[1:])


@pytest.mark.parametrize("selection", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_the_last_row_of_all_shards_is_the_same_error_on_all_ranks_and_not_the_end(
    sharded_stores: Callable[..., list[gt.Store]], monkeypatch: pytest.MonkeyPatch, selection: Any
) -> None:
    first, last = stores = sharded_stores(2)
    first.delete(first.keys())
    last.delete(last.keys()[:-1])
    last.update_priorities(last.keys(), [5.0])
    lost = lose_rows(monkeypatch, last, step=1)

    def body(rank: ThreadRankGroup) -> None:
        with gt.Replay(stores[rank.rank], selection, B, group=rank, prefetch=0, output="numpy") as replay:
            replay.sample()
            for _ in range(2):
                with pytest.raises(EmptyStoreError):
                    replay.sample()
            assert lost.is_set() and replay.step == 1

    run_ranks(2, body)
