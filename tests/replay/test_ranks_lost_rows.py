"""A shard that loses all its rows between a draw and its read: all ranks draw the batch again, from what is left."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from deadlines import patience
from rank_batches import B, N, as_record, insert, join, rows, same
from replay_calls import replay_of

import geartrain as gt
import geartrain.replay.distributed.members as members
import geartrain.replay.distributed.read_agreement as read_agreement
import geartrain.replay.distributed.sharded_sampler as sharded_sampler
from geartrain.errors import EmptyStoreError
from geartrain.ranks.rank_collectives import DIRECT_RANKS
from geartrain.replay.distributed.rank_reader import RankReader
from geartrain.replay.distributed.sharded_sampler import ShardedSampler
from geartrain.selection import Draw, Fifo, GroupSampling, Lifo, Prioritized, TopK, Uniform
from geartrain.tools.testing import ThreadRankGroup, run_ranks

STRATEGIES = {
    "uniform": Uniform(seed=1),
    "stratified": Uniform(seed=1, stratified=True),
    "prioritized": Prioritized(seed=1),
    "importance weights": Prioritized(seed=1, beta=0.5),
}


def lose_rows(
    monkeypatch: pytest.MonkeyPatch, store: gt.Store, step: int, which: slice = slice(None)
) -> threading.Event:
    """Removes rows of a store once, after they were drawn for a step and before they are read.

    Where a batch is one native call, once all ranks have told their totals, which decide what is drawn.
    """
    lost, building, one_at_a_time = threading.Event(), threading.local(), threading.Lock()
    read, build, send_parts = RankReader.read, RankReader.build, ShardedSampler.send_parts

    def lose(at: int | None, samplers: Sequence[Any]) -> None:
        with one_at_a_time:
            if at == step and samplers[0].plan.store is store and not lost.is_set():
                store.delete(store.keys()[which])
                lost.set()

    def loses_and_reads(self: Any, at: int, *rest: Any, **options: Any) -> Any:
        lose(at, self.samplers)
        return read(self, at, *rest, **options)

    def builds(self: Any, at: int, *rest: Any) -> Any:
        building.at = at
        try:
            return build(self, at, *rest)
        finally:
            building.at = None

    def sends_and_loses(self: Any, *parts: Any) -> Any:
        received = send_parts(self, *parts)
        at = getattr(building, "at", None)
        lose(at, self.samplers)
        # No rank reads them before: a batch that is read by then has them by right.
        assert at != step or lost.wait(patience(30))
        return received

    monkeypatch.setattr(RankReader, "read", loses_and_reads)
    monkeypatch.setattr(RankReader, "build", builds)
    monkeypatch.setattr(ShardedSampler, "send_parts", sends_and_loses)
    return lost


@pytest.mark.parametrize("selection", STRATEGIES.values(), ids=STRATEGIES.keys())
@pytest.mark.parametrize(("ranks", "rows"), [(2, 1), (4, 1), (2, 40)])
def test_a_batch_is_drawn_again_where_a_shard_loses_all_its_rows(
    sharded_stores: Callable[..., list[gt.Store]],
    monkeypatch: pytest.MonkeyPatch,
    selection: Any,
    ranks: int,
    rows: int,
) -> None:
    first, last = stores = sharded_stores(2)
    first.delete(first.keys()[8:])
    last.delete(last.keys()[rows:])
    last.update_priorities(last.keys(), [5.0] * rows)
    lost = lose_rows(monkeypatch, last, step=1)
    settings: dict[str, Any] = {"window": 4, "output": "numpy", "num_batches": 3, "prefetch": 0}

    def body(rank: ThreadRankGroup) -> list[gt.Batch]:
        with replay_of(stores[rank.rank % 2], selection, B, group=rank, **settings) as replay:
            return list(replay)

    parts = run_ranks(ranks, body)
    assert lost.is_set()
    assert any((part[0].keys.shard == 1).any() for part in parts)
    made = [join([part[step] for part in parts]) for step in range(3)]
    with replay_of(first, selection, B, **settings) as replay:  # one process that never had that row
        expected = [as_record(batch) for batch in replay]
    assert same(made[1:], expected[1:])


@pytest.mark.parametrize("selection", [Fifo(), Lifo(), TopK()], ids=["fifo", "lifo", "top-k"])
@pytest.mark.parametrize("direct", [DIRECT_RANKS, 1], ids=["", "relayed"])
def test_rows_in_order_are_drawn_again_and_none_is_left_out(
    sharded_stores: Callable[..., list[gt.Store]], monkeypatch: pytest.MonkeyPatch, selection: Any, direct: int
) -> None:
    for module in (sharded_sampler, members, read_agreement):
        monkeypatch.setattr(module, "DIRECT_RANKS", direct)
    first, last = stores = sharded_stores(2)
    first.delete(first.keys())
    last.delete(last.keys())
    for number in range(0, N, 2):  # in turn, so that every batch has rows of both
        for at, store in enumerate(stores):
            store.native.advance_sequence(2 * N + number + at)
            insert(store, number + at, number + at + 1)
    for store in stores:
        store.update_priorities(store.keys(), [5.0] * len(store))
    lost = lose_rows(monkeypatch, last, step=1)
    # Rank 0 redraws some rows of its shard for the batch that is then given up: none of them may be left out later.
    few = slice(B // 2, B // 2 + 4)
    lost_too = lose_rows(monkeypatch, first, 1, few)

    def body(rank: ThreadRankGroup) -> list[gt.Batch]:
        with gt.Replay(stores[rank.rank], selection, B, group=rank, output="numpy", prefetch=0) as replay:
            return [replay.sample(), replay.sample()]

    parts = run_ranks(2, body)
    assert lost.is_set() and lost_too.is_set()
    before, after = (join([part[step] for part in parts])["number"].tolist() for step in range(2))
    every, left = list(range(N)), [*range(0, N, 2)]
    del left[few]
    if isinstance(selection, Lifo):
        assert (before, after) == (every[: -B - 1 : -1], left[: -B - 1 : -1])
    else:
        assert before == every[:B]
        used = before if isinstance(selection, Fifo) else []
        assert after == [number for number in left if number not in used][:B]


class OwnFifo(Fifo):
    """The rows that its traits say, by code of its own."""

    def select(self, *given: Any, **options: Any) -> Draw:
        return super().select(*given, **options)


@pytest.mark.parametrize("selection", [Fifo(), OwnFifo()], ids=["declared", "own"])
def test_an_order_that_moves_on_gives_no_row_twice_where_some_are_lost(
    sharded_stores: Callable[..., list[gt.Store]], monkeypatch: pytest.MonkeyPatch, selection: Any
) -> None:
    stores = sharded_stores(2)
    for store in stores:
        store.delete(store.keys())
    for number in range(0, N, 2):  # in turn, so that every batch has rows of both
        for at, store in enumerate(stores):
            store.native.advance_sequence(2 * N + number + at)
            insert(store, number + at, number + at + 1)
    few = slice(B // 2, B // 2 + 4)
    lost = lose_rows(monkeypatch, stores[0], step=1, which=few)

    def body(rank: ThreadRankGroup) -> list[gt.Batch]:
        with gt.Replay(stores[rank.rank], selection, B, group=rank, output="numpy", prefetch=0) as replay:
            return [replay.sample() for _ in range(3)]

    parts = run_ranks(2, body)
    assert lost.is_set()
    made = [number for step in range(3) for number in join([part[step] for part in parts])["number"].tolist()]
    left = [number for number in range(N) if number not in range(0, N, 2)[few]]
    assert sorted(made) == left[: 3 * B]


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


@pytest.mark.parametrize(
    ("selection", "limits"),
    [
        (Uniform(seed=1, replacement=False), {}),
        (GroupSampling(by="group", size=4, seed=1), {}),
        (Uniform(seed=1), {"max_times_sampled": 100}),
    ],
    ids=["without replacement", "groups", "limited"],
)
def test_draws_that_cannot_be_made_again_are_the_same_error_on_all_ranks_for_one_batch(
    sharded_stores: Callable[..., list[gt.Store]],
    monkeypatch: pytest.MonkeyPatch,
    selection: Any,
    limits: dict[str, Any],
) -> None:
    stores = sharded_stores(2, **limits)
    count = len(stores[0])  # most of them
    lost = lose_rows(monkeypatch, stores[0], step=1)

    def body(rank: ThreadRankGroup) -> None:
        with gt.Replay(stores[rank.rank], selection, B, group=rank, prefetch=0, output="numpy") as replay:
            replay.sample()
            with pytest.raises(EmptyStoreError):
                replay.sample()
            assert lost.is_set() and replay.step == 1
            if rank.rank == 0:
                stores[0].insert(rows(0, count))
            assert len(replay.sample()["number"]) == B // 2

    run_ranks(2, body)
