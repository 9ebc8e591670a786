"""A job's checkpoint of stores with tasks: store, replay, limiter and clock are of one step."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_checkpoints import load_all, save_all
from tasked_stores import everything

import geartrain as gt
from geartrain.errors import ArgumentError
from geartrain.replay.distributed.checkpoint import load_checkpoint, save_checkpoint
from geartrain.store.saved_parts import PART
from geartrain.tools.testing import run_ranks

PART_NAMES = [name for name in PART.names or () if name != "span"]

TASKS = {"answer": gt.Task({"ids": gt.Field(("tokens",), "int32")}), "train": gt.Task(after="answer")}


def make_store(name: str, first: int = 0, rows: int = 40) -> gt.Store:
    store = gt.Store.create(
        name, {"x": gt.Field((), "int64")}, tasks=TASKS, capacity=64, span_bytes=1 << 16, persist=True
    )
    store.insert({"x": np.arange(first, first + rows)})
    return store


def answer(store: gt.Store, rows: int) -> None:
    claim = store.claim("answer", rows)
    claim.put(ids=[[n] * 3 for n in claim["x"].tolist()])


def make_replay(store: gt.Store, **options: Any) -> gt.Replay:
    return gt.Replay(
        store, gt.selection.Uniform(seed=0), batch_size=4, options=gt.ReplayOptions(keep="saved"), **options
    )


def test_a_job_goes_on_from_one_step_of_store_replay_limiter_and_clock(names: Any, tmp_path: Path) -> None:
    store = make_store(names())
    store.limiter.set(in_flight=60, max_stale=9)
    answer(store, 30)
    store.advance(2)
    with make_replay(store) as replay:
        drawn = [replay.sample()["x"].tolist() for _ in range(3)]
        save_checkpoint(store, tmp_path, replay=replay)
        assert store.native.saved_before() == 3  # the rows of its batches are freed
        store.advance(5)
        after = [replay.sample()["x"].tolist() for _ in range(2)]
    store.unlink()
    store.close()
    name = names()
    store, state, report = load_checkpoint(tmp_path, name)
    assert report.step == 3 and state is not None
    assert store.native.task_state()["in_flight"] == 60
    with make_replay(store) as replay:
        replay.load_state_dict(state)
        assert store.clock == 2
        again = [replay.sample()["x"].tolist() for _ in range(2)]
        assert again == after  # the prefetched batches were taken when the store was saved, others follow from the seed
        answer(store, 40)
        drawn += again + [replay.sample()["x"].tolist() for _ in range(5)]
    assert sorted(x for batch in drawn for x in batch) == list(range(40))  # each row once
    assert store.audit() == []
    store.unlink()
    store.close()


def test_an_adopted_store_goes_on_from_the_step(names: Any, tmp_path: Path) -> None:
    name = names()
    store = make_store(name)
    answer(store, 30)
    with make_replay(store) as replay:
        replay.sample()
        save_checkpoint(store, tmp_path, replay=replay)
        after = replay.sample()["x"].tolist()
    answer(store, 2)
    now = everything(store)["parts"]
    store.close(keep=True)
    store, state, report = load_checkpoint(tmp_path, name, adopt=True)
    assert everything(store)["parts"] == now
    assert report.adopted == 36 and report.newer == 0
    with make_replay(store) as replay:
        replay.load_state_dict(state)
        assert replay.sample()["x"].tolist() == after
    store.unlink()
    store.close()


def test_a_state_that_meets_a_new_store_is_a_warning(names: Any, caplog: pytest.LogCaptureFixture) -> None:
    with make_store(names()) as store:
        answer(store, 20)
        with make_replay(store) as replay:
            replay.sample()
            state = replay.state_dict()
            replay.saved(0)
        with make_replay(store) as replay, caplog.at_level(logging.WARNING):
            replay.load_state_dict(state)
            assert not caplog.records
        store.unlink()
    with make_store(names()) as store, make_replay(store) as replay:
        replay.load_state_dict(state)
        assert "it is a new one" in caplog.text
        store.unlink()


def test_the_replay_and_its_state_are_not_given_together(names: Any, tmp_path: Path) -> None:
    with make_store(names()) as store, make_replay(store) as replay:
        with pytest.raises(ArgumentError, match="not both"):
            save_checkpoint(store, tmp_path, replay=replay, state=replay.state_dict())
        store.unlink()


@pytest.mark.parametrize("n", [1, 3])
def test_rows_in_all_states_are_dealt_to_another_number_of_hosts(names: Any, tmp_path: Path, n: int) -> None:
    stores = [make_store(names(), first, rows=12) for first in (0, 100)]
    for store in stores:
        store.limiter.set(in_flight=60, max_stale=9)
        store.advance(4)
        answer(store, 6)
        rows, generations = store.native.keys()
        places = np.arange(2, dtype=np.uint32) + 2 * stores.index(store)
        store.native.count_samples(rows[:2], generations[:2], 7, places)
    save_all(stores, tmp_path, step=7)
    with stores[0].claim("answer", 1):
        pass
    before = sorted(values for store in stores for values in rows_of(store))
    loaded = load_all(names, tmp_path, n, reshard=True)
    after = sorted(values for store, _, _ in loaded for values in rows_of(store))
    assert after == before
    places = sorted(place for store, _, _ in loaded for place in store.native.taken(7)[2].tolist())
    assert places == [0, 1, 2, 3]
    for store, _, _ in loaded:
        assert store.audit() == []
        assert store.clock == 4
        assert abs(store.stats()["in_flight"] + store.stats()["kept"] - 24 // n) <= 1
        assert store.native.task_state()["in_flight"] == 120 // n
    for store in [*stores, *(store for store, _, _ in loaded)]:
        store.unlink()
        store.close()


def rows_of(store: gt.Store) -> list[Any]:
    """Of each row its values, and what a batch has noted of it, whatever its place in the store."""
    found = everything(store)
    rows: dict[int, list[Any]] = {}
    for (row, task), (numbers, content) in found["parts"].items():
        part = dict(zip(PART_NAMES, numbers, strict=True))
        kept = [part[name] for name in ("version", "step", "place", "state", "lengths")]
        rows.setdefault(row, []).append((task, kept, content))
    return [sorted(parts) for parts in rows.values()]


def test_a_batch_that_two_ranks_had_drawn_is_drawn_again_by_one(names: Any, tmp_path: Path) -> None:
    stores = [make_store(names(), first, rows=12) for first in (0, 100)]
    for store in stores:
        answer(store, 12)

    def train(ranks: Any) -> tuple[list[int], list[int]]:
        store = stores[ranks.rank]
        with make_replay(store, group=ranks, prefetch=0) as replay:
            first = replay.sample()["x"].tolist()
            state = replay.state_dict()
            second = replay.sample()["x"].tolist()
            save_checkpoint(store, tmp_path, ranks, state=state)
        return first, second

    drawn = run_ranks(2, train)
    store, state, _ = load_checkpoint(tmp_path, names(), reshard=True, shard=(0, 1))
    assert len(store) + store.stats()["kept"] == 24 - 4  # what was trained is gone
    with make_replay(store) as replay:
        replay.load_state_dict(state)
        assert sorted(replay.sample()["x"].tolist()) == sorted(x for _, second in drawn for x in second)
    for each in [*stores, store]:
        each.unlink()
        each.close()


def test_ranks_free_the_rows_of_a_step_that_is_complete(names: Any, tmp_path: Path) -> None:
    stores = [make_store(names(), first, rows=12) for first in (0, 100)]
    for store in stores:
        answer(store, 12)

    def train(ranks: Any) -> int:
        store = stores[ranks.rank]
        with make_replay(store, group=ranks, prefetch=0) as replay:
            replay.sample()
            save_checkpoint(store, tmp_path, ranks, replay=replay)
            replay.sample()
            replay.settle()
            return store.native.saved_before()

    assert run_ranks(2, train) == [1, 1]
    for each in stores:
        each.unlink()
        each.close()
