"""States of a replay over ranks: a run that is resumed goes on with the batches of the run that was not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rank_batches import B, as_record, join, same
from replay_calls import replay_of

import geartrain as gt
from geartrain.selection import Fifo, Linear, Prioritized
from geartrain.tools.testing import ThreadRankGroup, run_ranks


def test_a_resumed_run_goes_on_with_the_batches_it_would_have_drawn(
    sharded_stores: Callable[..., list[gt.Store]],
) -> None:
    stores = sharded_stores(3)
    states: dict[int, Any] = {}

    def body(rank: ThreadRankGroup) -> None:
        options = {"window": 4, "output": "numpy", "group": rank}
        with replay_of(stores[rank.rank], Fifo(), 24, **options) as replay:
            for _ in range(3):
                replay.sample()
            states[rank.rank] = state = replay.state_dict()
            expected = [as_record(replay.sample()) for _ in range(3)]
            replay.load_state_dict(state)
            assert same([as_record(replay.sample()) for _ in range(3)], expected)

    run_ranks(3, body)
    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize(
    ("prefetch", "lag"), [(0, None), (2, None), (0, 2), (2, 3)], ids=["", "ahead", "lagged", "lagged, ahead"]
)
def test_a_settled_run_is_the_run_that_is_resumed_from_it(
    sharded_stores: Callable[..., list[gt.Store]], prefetch: int, lag: int | None
) -> None:
    selection = Prioritized(seed=5, alpha=Linear(0.5, 1.0, 12), beta=0.4)
    stores = sharded_stores(2)
    saved: dict[int, Any] = {}

    def run(rank: ThreadRankGroup, resume: bool) -> list[Any]:
        options: dict[str, Any] = {"window": 4, "output": "numpy", "prefetch": prefetch, "update_lag": lag}
        store = stores[rank.rank]
        with replay_of(store, selection, B, group=rank, **options) as replay:
            if resume:
                state, keys, priorities = saved[rank.rank]
                store.update_priorities(keys, priorities)
                replay.load_state_dict(state)
            made = []
            for step in range(replay.step, 9):
                batch = replay.sample()
                # Windows of a row that was drawn twice are different: the later draw's priority holds.
                replay.update_priorities(batch.keys, batch["action"][:, -1] % 13 + batch.start)
                made.append(as_record(batch))
                if step == 4 and not resume:
                    replay.settle()
                    keys = store.keys()
                    saved[rank.rank] = (replay.state_dict(), keys, store.status(keys)["priority"])
            return made

    first = run_ranks(2, lambda rank: run(rank, False))
    again = run_ranks(2, lambda rank: run(rank, True))
    for one, other in zip(first, again, strict=True):
        assert same(one[5:], other)


def test_one_process_and_a_group_take_up_each_others_state(sharded_stores: Callable[..., list[gt.Store]]) -> None:
    (store,) = sharded_stores(1)
    with gt.Replay(store, Fifo(), 24, output="numpy", prefetch=0) as replay:
        replay.sample()
        state, expected = replay.state_dict(), replay.sample().keys.row
    (rank,) = ThreadRankGroup.make(1)
    with gt.Replay(store, Fifo(), 24, output="numpy", prefetch=0, group=rank) as replay:
        replay.load_state_dict(state)
        assert np.array_equal(replay.sample().keys.row, expected)
        state, expected = replay.state_dict(), replay.sample().keys.row
    with gt.Replay(store, Fifo(), 24, output="numpy", prefetch=0) as replay:
        replay.load_state_dict(state)
        assert np.array_equal(replay.sample().keys.row, expected)


@pytest.mark.parametrize("first", [None, 1, 2], ids=["no group", "one rank", "two ranks"])
def test_any_number_of_ranks_of_a_shard_takes_up_the_state_of_fifo(
    sharded_stores: Callable[..., list[gt.Store]], first: int | None
) -> None:
    (store,) = sharded_stores(1)

    def run(ranks: int | None, state: Any) -> tuple[Any, Any]:
        def body(rank: ThreadRankGroup | None) -> tuple[Any, gt.Batch]:
            with gt.Replay(store, Fifo(), 24, output="numpy", prefetch=0, group=rank) as replay:
                if state is not None:
                    replay.load_state_dict(state)
                batch = replay.sample()
                return replay.state_dict(), batch

        if ranks is None:
            after, batch = body(None)
            assert list(after["state"][0]) == ["after"]
            return after, batch["number"]
        results = run_ranks(ranks, body)
        assert all(list(after["state"][0]) == ["after/0"] for after, _ in results)
        return results[0][0], join([batch for _, batch in results])["number"]

    state, number = run(first, None)
    for ranks in (None, 1, 2):
        again, after = run(ranks, state)
        assert np.array_equal(after, number + 24)
        assert again["state"][0].popitem()[1] > state["state"][0].copy().popitem()[1]
