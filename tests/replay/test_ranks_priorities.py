"""Priorities over ranks: updates and exponents change the next batches alike on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rank_batches import B, as_record, join, same
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import ArgumentError, NotEnoughRowsError
from geartrain.selection import Fifo, Limits, Linear, Prioritized, Uniform
from geartrain.tools.testing import ThreadRankGroup, run_ranks


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_updated_priorities_change_the_next_batches_alike_on_any_number_of_ranks(
    sharded_stores: Callable[..., list[gt.Store]], prefetch: int
) -> None:
    selection = Prioritized(seed=2, alpha=0.6, beta=0.4)

    def run(shards: int, ranks: int) -> list[dict[str, np.ndarray]]:
        stores = sharded_stores(shards)

        def body(rank: ThreadRankGroup) -> list[gt.Batch]:
            options = {"window": 4, "output": "numpy", "num_batches": 8, "prefetch": prefetch, "group": rank}
            with replay_of(stores[rank.rank % shards], selection, B, **options) as replay:
                made = []
                for batch in replay:
                    replay.update_priorities(batch.keys, batch["number"] % 13 + batch.step)
                    made.append(batch)
                return made

        results = run_ranks(ranks, body)
        return [join([result[step] for result in results]) for step in range(8)]

    expected = run(1, 1)
    priorities = np.unique(np.round(expected[-1]["probability"], 12))
    assert len(priorities) > 5
    for shards, ranks in ((2, 2), (3, 3), (1, 2), (2, 4), (4, 8)):
        assert same(run(shards, ranks), expected), (shards, ranks)
    if prefetch == 0:  # and as a single process draws that sets priorities at once
        (store,) = sharded_stores(1)
        with gt.Replay(store, selection, B, window=4, output="numpy", num_batches=8, prefetch=0) as replay:
            alone = []
            for batch in replay:
                replay.update_priorities(batch.keys, batch["number"] % 13 + batch.step)
                alone.append(as_record(batch))
        assert same(alone, expected)


def test_keys_with_the_draws_of_a_batch_and_an_array_of_stores_are_taken_or_refused_as_any(
    sharded_stores: Callable[..., list[gt.Store]],
) -> None:
    (store,) = sharded_stores(1)

    def body(rank: ThreadRankGroup) -> None:
        with gt.Replay(store, Prioritized(seed=2), B, group=rank, output="numpy", prefetch=0) as replay:
            keys = replay.sample().keys
            of_each = gt.Keys(keys.row, keys.generation, draw=keys.draw, store=np.full(B, store.id, np.uint64))
            assert of_each.draw is keys.draw
            replay.update_priorities(of_each, np.full(B, 7.0))
            foreign = gt.Keys(keys.row, keys.generation, draw=keys.draw, store=np.full(B, store.id ^ 1, np.uint64))
            with pytest.raises(ArgumentError, match="store"):
                replay.update_priorities(foreign, np.full(B, 9.0))
            replay.sample()  # updates are applied with the next request
            assert (store.status(keys)["priority"] == 7).all()

    run_ranks(1, body)


@pytest.mark.parametrize("limits", [None, Limits(min_length=1)], ids=["one native call", "limits"])
def test_priorities_of_a_row_drawn_twice_are_set_in_the_order_of_calls_and_draws(
    sharded_stores: Callable[..., list[gt.Store]], limits: Limits | None
) -> None:
    def loop(replay: gt.Replay) -> list[gt.Batch]:
        made = []
        for batch in replay:
            draw = np.arange(B) if batch.draw is None else batch.draw
            replay.update_priorities(batch.keys, 1.0 + draw % 5)
            later = draw < B // 2  # of a row that is drawn later as well this call holds all the same
            replay.update_priorities(batch.keys[later], 6.0 + draw[later] % 5)
            made.append(batch)
        return made

    settings: dict[str, Any] = {"window": 4, "output": "numpy", "num_batches": 6, "prefetch": 0}

    def run(shards: int, ranks: int) -> list[dict[str, np.ndarray]]:
        stores = sharded_stores(shards)

        def body(rank: ThreadRankGroup) -> list[gt.Batch]:
            selection = Prioritized(seed=3, limits=limits)
            with replay_of(stores[rank.rank % shards], selection, B, group=rank, **settings) as replay:
                return loop(replay)

        results = run_ranks(ranks, body)
        return [join([result[step] for result in results]) for step in range(6)]

    with replay_of(sharded_stores(1)[0], Prioritized(seed=3, limits=limits), B, **settings) as replay:
        expected = [as_record(batch) for batch in loop(replay)]
    for shards, ranks in ((1, 1), (2, 2), (3, 3), (4, 8)):
        assert same(run(shards, ranks), expected), (shards, ranks)


def test_draws_that_are_named_by_hand_are_the_nearest_that_there_can_be(
    sharded_stores: Callable[..., list[gt.Store]],
) -> None:
    for ranks in (None, 1, 2):
        (store,) = sharded_stores(1)
        key = store.keys()[:1]
        draws = np.array([2**40, -5, 2**32 - 1, 0])  # the last of the largest holds
        keys = gt.Keys(np.repeat(key.row, 4), np.repeat(key.generation, 4), draw=draws, store=store.id)

        def body(rank: ThreadRankGroup | None, store: Any = store, keys: Any = keys) -> None:
            with gt.Replay(store, Uniform(seed=1), B, group=rank, output="numpy", prefetch=0) as replay:
                if rank is None or rank.rank == 0:
                    replay.update_priorities(keys, np.array([1.0, 2.0, 3.0, 4.0]))
                replay.settle()

        body(None) if ranks is None else run_ranks(ranks, body)
        assert store.status(key)["priority"].tolist() == [3.0], ranks


def test_limits_hold_their_promise_with_updates_and_shared_shards(
    sharded_stores: Callable[..., list[gt.Store]],
) -> None:
    for selection in (
        Prioritized(seed=1, limits=Limits(min_version=lambda: 100)),
        Prioritized(seed=2, replacement=False),
    ):
        runs = []
        for shards, ranks in ((1, 1), (1, 3), (2, 4)):
            stores = sharded_stores(shards)

            def body(rank: ThreadRankGroup, stores: Any = stores, selection: Any = selection) -> list[gt.Batch]:
                options = {"window": 4, "output": "numpy", "num_batches": 5, "group": rank}
                with replay_of(stores[rank.rank % len(stores)], selection, B, **options) as replay:
                    made = []
                    for batch in replay:
                        replay.update_priorities(batch.keys, batch["number"] % 11 + 1)
                        made.append(batch)
                    return made

            results = run_ranks(ranks, body)
            runs.append([join([result[step] for result in results]) for step in range(5)])
        assert all(same(run, runs[0]) for run in runs)


def test_priorities_given_before_an_error_all_agree_on_are_not_lost(
    sharded_stores: Callable[..., list[gt.Store]],
) -> None:
    stores = sharded_stores(2)

    def body(rank: ThreadRankGroup) -> None:
        with gt.Replay(stores[rank.rank], Fifo(), 120, output="numpy", group=rank) as replay:
            batches = [replay.sample(), replay.sample()]
            replay.update_priorities(batches[1].keys, 900.0)
            with pytest.raises(NotEnoughRowsError):
                replay.sample()
            replay.settle()

    run_ranks(2, body)
    priorities = np.concatenate([store.status()["priority"] for store in stores])
    assert (priorities == 900.0).sum() == 120


def test_an_exponent_that_follows_a_schedule_is_applied_once_a_shard(
    sharded_stores: Callable[..., list[gt.Store]],
) -> None:
    selection = Prioritized(seed=2, alpha=Linear(0.5, 1.0, 6))
    runs = []
    for shards, ranks in ((1, 1), (2, 4), (3, 3)):
        stores = sharded_stores(shards)

        def body(rank: ThreadRankGroup, stores: Any = stores) -> list[gt.Batch]:
            options = {"window": 4, "output": "numpy", "num_batches": 8, "group": rank}
            with replay_of(stores[rank.rank % len(stores)], selection, B, **options) as replay:
                made = []
                for batch in replay:
                    replay.update_priorities(batch.keys, batch["number"] % 11 + 1)  # the exponent moves with updates
                    made.append(batch)
                return made

        results = run_ranks(ranks, body)
        runs.append([join([result[step] for result in results]) for step in range(8)])
    assert all(same(run, runs[0]) for run in runs)


def test_an_exponent_follows_its_schedule_with_updates_of_no_rows(
    sharded_stores: Callable[..., list[gt.Store]],
) -> None:
    selection = Prioritized(seed=2, alpha=Linear(0.5, 1.0, 6))

    def loop(replay: gt.Replay) -> list[gt.Batch]:
        made = []
        for _ in range(6):
            made.append(replay.sample())
            replay.update_priorities(made[-1].keys[np.zeros(len(made[-1].keys), bool)], np.zeros(0))
        return made

    with gt.Replay(sharded_stores(1)[0], selection, B, output="numpy", prefetch=0) as replay:
        alone = [as_record(batch) for batch in loop(replay)]
    for ranks in (1, 2, 3):
        stores = sharded_stores(ranks)

        def body(rank: ThreadRankGroup, stores: Any = stores) -> list[gt.Batch]:
            with gt.Replay(stores[rank.rank], selection, B, output="numpy", prefetch=0, group=rank) as replay:
                return loop(replay)

        parts = run_ranks(ranks, body)
        assert same([join([each[step] for each in parts]) for step in range(6)], alone)
