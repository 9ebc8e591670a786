"""Transforms: a function of the user's on the thread that builds batches."""

from __future__ import annotations

import threading
import traceback
from typing import Any

import numpy as np
import pytest
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import ArgumentError, PeerLostError, WaitTimeoutError
from geartrain.selection import Fifo, Uniform
from geartrain.tools.testing import ThreadRankGroup, run_ranks


def make_store(rows: int = 20) -> gt.Store:
    store = gt.Store.create({"x": gt.Field((3,), "float32", per_row=True)}, capacity=rows)
    store.insert({"x": np.arange(3 * rows, dtype=np.float32).reshape(rows, 3)})
    return store


def by_hand(batch: gt.Batch) -> tuple[Any, Any]:
    return batch["x"].sum(1), batch.keys


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_replay_gives_what_the_transform_returns(prefetch: int) -> None:
    with make_store() as store:
        options: dict[str, Any] = {"output": "numpy", "prefetch": prefetch, "num_batches": 12}
        with (
            replay_of(store, Uniform(seed=0), 4, **options) as plain,
            replay_of(store, Uniform(seed=0), 4, transform=by_hand, **options) as replay,
        ):
            for batch, (sums, keys) in zip(plain, replay, strict=True):
                assert np.array_equal(sums, batch["x"].sum(1))
                assert np.array_equal(keys.row, batch.keys.row)
            assert replay.stats()["bytes"] == plain.stats()["bytes"] == 12 * 4 * 12


def test_a_transform_that_takes_long_runs_on_the_prefetch_thread() -> None:
    seen: list[threading.Thread] = []
    waits = threading.Event()

    def slow(batch: gt.Batch) -> gt.Batch:
        seen.append(threading.current_thread())
        waits.wait(2e-3)  # far more than it costs to change the thread
        return batch

    with make_store() as store, replay_of(store, Uniform(seed=0), 2, transform=slow, num_batches=12) as replay:
        assert len(list(replay)) == 12
        assert {thread.name for thread in seen} == {"geartrain-prefetch"}
    with make_store() as store, replay_of(store, Uniform(seed=0), 2, transform=slow, prefetch=0) as replay:
        seen.clear()
        replay.sample()
        assert seen == [threading.current_thread()]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_what_it_raises_reaches_the_consumer_with_its_traceback_and_the_batch_is_built_again(prefetch: int) -> None:
    failing = True

    def picky(batch: gt.Batch) -> list[float]:
        if batch.step == 2 and failing:
            raise KeyError("no such thing in this batch")
        return [float(value) for value in batch["x"][:, 0]]

    with make_store() as store:
        options: dict[str, Any] = {"output": "numpy", "prefetch": prefetch, "transform": picky}
        with replay_of(store, Fifo(), 4, **options) as replay:
            first = [replay.sample(), replay.sample()]
            for _ in range(2):
                with pytest.raises(KeyError, match="no such thing") as caught:
                    replay.sample()
                assert "picky" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
                assert replay.step == 2
            failing = False
            rest = [replay.sample(), replay.sample(), replay.sample()]
    assert np.array_equal(np.concatenate([*first, *rest]), np.arange(20) * 3)


def test_a_replay_with_a_transform_resumes() -> None:
    with make_store() as store:
        with replay_of(store, Fifo(), 5, transform=by_hand, output="numpy") as replay:
            replay.sample()
            state = replay.state_dict()
            wanted = replay.sample()[1].row
        with replay_of(store, Fifo(), 5, transform=by_hand, output="numpy") as other:
            other.load_state_dict(state)
            assert np.array_equal(other.sample()[1].row, wanted)


def test_what_is_no_transform_is_refused() -> None:
    with make_store() as store:
        with pytest.raises(ArgumentError, match="transform is a function of a batch"):
            replay_of(store, Uniform(), 2, transform="shuffle")  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="in host memory: leave out device"):
            replay_of(store, Uniform(), 2, transform=by_hand, device="cuda")


@pytest.mark.parametrize("lag", [None, 3])
def test_over_ranks_it_gets_the_part_of_its_rank(lag: int | None) -> None:
    options: dict[str, Any] = {"output": "numpy", "num_batches": 6, "update_lag": lag}
    with make_store() as store, replay_of(store, Uniform(seed=0), 4, **options) as replay:
        expected = [batch["x"].sum(1) for batch in replay]
        for ranks in (1, 2):

            def body(rank: ThreadRankGroup) -> list[Any]:
                with replay_of(store, Uniform(seed=0), 4, group=rank, transform=by_hand, **options) as replay:
                    made = list(replay)
                    assert replay.stats()["path"].endswith("transform")
                    return made

            parts = zip(*run_ranks(ranks, body), strict=True)
            for part, wanted in zip(parts, expected, strict=True):
                draws = np.concatenate([keys.draw for _, keys in part])
                sums = np.concatenate([sums for sums, _ in part])
                assert np.array_equal(sums[np.argsort(draws)], wanted)


def test_a_rank_whose_transform_raises_ends_the_job() -> None:
    def picky(batch: gt.Batch) -> gt.Batch:
        raise KeyError("no such thing in this batch")

    with make_store() as store:

        def body(rank: ThreadRankGroup) -> None:
            options: dict[str, Any] = {"output": "numpy", "transform": picky} if rank.rank else {"output": "numpy"}
            with replay_of(store, Uniform(seed=0), 4, group=rank, **options) as replay:
                if rank.rank:
                    with pytest.raises(KeyError, match="no such thing"):
                        replay.sample()
                    return
                with pytest.raises(PeerLostError, match="its transform raised KeyError"):
                    for _ in range(8):
                        replay.sample()

        run_ranks(2, body)


def test_a_timeout_says_that_the_transform_is_at_it() -> None:
    go_on = threading.Event()

    def stuck(batch: gt.Batch) -> gt.Batch:
        assert go_on.wait(60)
        return batch

    with make_store() as store, replay_of(store, Uniform(seed=0), 2, transform=stuck, timeout_s=0.2) as replay:
        for _ in range(100):  # the first may find the thread not there yet
            with pytest.raises(WaitTimeoutError) as caught:
                replay.sample()
            if "the replay is in `transform`" in str(caught.value):
                break
        else:
            raise AssertionError(str(caught.value))
        go_on.set()
