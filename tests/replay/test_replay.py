"""Replay: the same batches for the same seed, errors and ends that reach the consumer, and no thread left behind."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time

import numpy as np
import pytest
import torch
from deadlines import patience
from replay_calls import replay_of
from torch.utils.data import DataLoader

import geartrain as gt
from geartrain import _native
from geartrain.errors import (
    ArgumentError,
    EmptyStoreError,
    NotEnoughRowsError,
    StoreClosedError,
    WaitTimeoutError,
)
from geartrain.selection import Prioritized, Uniform

ROWS, STEPS = 200, 12


@pytest.fixture
def store(name):
    """200 rows of 1 to 12 steps; row i holds i * 100 + t at step t."""
    with gt.Store.create(
        name, {"x": gt.Field((), "int64"), "id": gt.Field((), "int32", per_row=True)}, max_length=STEPS, capacity=ROWS
    ) as made:
        values = np.arange(ROWS)[:, None] * 100 + np.arange(STEPS)
        priorities = np.arange(ROWS) % 5
        made.insert({"x": values, "id": np.arange(ROWS, dtype=np.int32)}, lengths=_lengths(), priorities=priorities)
        yield made
    assert not prefetching(), "a prefetching thread was left behind"


def _lengths() -> np.ndarray:
    return 1 + np.arange(ROWS) % STEPS


def prefetching() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("geartrain-prefetch")]


def fingerprint(batch: gt.Batch) -> tuple:
    parts = (*batch.fields.values(), batch.mask, batch.start, batch.length, batch.version, batch.probability)
    return (batch.step, batch.keys.row.tobytes(), *(np.asarray(part).tobytes() for part in parts))


def batches(replay: gt.Replay, n: int) -> list[tuple]:
    return [fingerprint(replay.sample()) for _ in range(n)]


STRATEGIES = [Uniform(seed=3), Prioritized(seed=3)]


# --- the same batches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: type(strategy).__name__)
def test_the_same_seed_gives_the_same_batches_whatever_is_prefetched_and_by_how_many_threads(store, strategy):
    expected = None
    for prefetch, threads in ((0, 1), (1, 1), (2, 2), (5, 3)):
        with replay_of(store, strategy, 16, window=5, prefetch=prefetch, threads=threads) as replay:
            found = batches(replay, 12)
        expected = expected or found
        assert found == expected
    assert len(set(expected)) == 12
    with gt.Replay(store, type(strategy)(seed=4), 16, window=5, prefetch=0) as replay:
        assert not set(batches(replay, 12)) & set(expected)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_resumed_run_goes_on_with_the_batches_of_the_uninterrupted_one(store, prefetch):
    with gt.Replay(store, Prioritized(seed=9), 8, window=4, prefetch=prefetch) as replay:
        expected = batches(replay, 10)
    with gt.Replay(store, Prioritized(seed=9), 8, window=4, prefetch=prefetch) as replay:
        first = batches(replay, 4)
        state = replay.state_dict()
    with gt.Replay(store, Prioritized(seed=9), 8, window=4, prefetch=prefetch) as replay:
        replay.sample()  # what it did before is forgotten
        replay.load_state_dict(state)
        assert replay.step == 4
        assert first + batches(replay, 6) == expected
    with gt.Replay(store, Prioritized(seed=8), 8, prefetch=0) as replay, pytest.raises(ArgumentError, match="seed 9"):
        replay.load_state_dict(state)


def test_an_iteration_that_was_left_early_goes_on_at_the_next_batch(store):
    with gt.Replay(store, Uniform(seed=1), 4, prefetch=3) as replay:
        expected = batches(replay, 9)
    with gt.Replay(store, Uniform(seed=1), 4, prefetch=3) as replay:
        found = []
        for _ in range(3):
            for batch in replay:
                found.append(fingerprint(batch))
                if len(found) in (2, 5, 9):
                    break
        assert found == expected


def test_batches_tell_the_truth_about_their_rows(store):
    with gt.Replay(store, Prioritized(seed=2), 64, window=5, output="numpy", prefetch=0) as replay:
        for batch in (replay.sample() for _ in range(20)):
            row, lengths = batch["id"], _lengths()[batch["id"]]
            assert batch.length.tolist() == lengths.tolist()
            assert (row % 5 != 0).all()  # priority 0
            assert np.allclose(batch.probability, (row % 5) / (np.arange(ROWS) % 5).sum())
            real = batch.mask.sum(1)
            ends = batch.start + real - 1
            assert (ends < lengths).all()
            assert (real == np.minimum(5, ends + 1)).all()
            assert batch.mask[:, -1].all()  # padded on the left
            for i in range(64):
                steps = np.arange(batch.start[i], ends[i] + 1)
                assert batch["x"][i][batch.mask[i]].tolist() == (row[i] * 100 + steps).tolist()
                assert not batch["x"][i][~batch.mask[i]].any()


def test_new_priorities_count_from_the_next_batch_on_without_prefetching(store):
    with gt.Replay(store, Prioritized(seed=2), 32, prefetch=0) as replay:
        keys = store.keys()
        replay.update_priorities(keys, 0)
        with pytest.raises(EmptyStoreError):
            replay.sample()
        assert replay.update_priorities(keys[7], 1.0) == 0
        batch = replay.sample()
        assert set(batch["id"].tolist()) == {7}
        assert replay.update_priorities(batch.keys, torch.full((32,), 0.5, dtype=torch.bfloat16).float()) == 0
        assert store.status(keys[7])["priority"].tolist() == [0.5]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
def test_priorities_of_any_finite_size_are_taken_without_a_warning(store, alpha):
    largest = np.finfo(np.float64).max
    with gt.Replay(store, Prioritized(seed=2, alpha=alpha), 4, prefetch=0) as replay:
        keys = store.keys()[:4]
        for large in (1e155, largest, -largest):  # whose squares are beyond all numbers
            assert replay.update_priorities(keys, [large, 1.0, 2.0, 5e-324]) == 0
            assert store.status(keys)["priority"][0] == store.status(keys)["priority"].max() > 2
        for bad in (np.inf, -np.inf, np.nan, np.longdouble("1e4000")):
            with pytest.raises(ArgumentError, match="priority 1 is not finite"):
                replay.update_priorities(keys, np.array([largest, bad, -np.inf, 1.0], np.longdouble))


def test_priorities_that_are_no_numbers_are_refused_with_their_dtype(store):
    with gt.Replay(store, Prioritized(seed=2), 4, prefetch=0) as replay:
        keys = store.keys()[:2]
        for given, found in ((["a", "b"], "<U1"), (np.ones(2, complex), "complex128"), ([[1.0], [1.0, 2.0]], "list")):
            with pytest.raises(ArgumentError, match=f"priorities are numbers, found {found}$"):
                replay.update_priorities(keys, given)


# --- iterating ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_iteration_has_as_many_batches_as_asked_and_the_next_one_goes_on(store, prefetch):
    with gt.Replay(store, Uniform(), 4, num_batches=3, prefetch=prefetch) as replay:
        assert len(replay) == 3
        assert [batch.step for batch in replay] == [0, 1, 2]
        assert [batch.step for batch in replay] == [3, 4, 5]
    with gt.Replay(store, Uniform(), 4, num_batches=0) as replay:
        assert list(replay) == []
    with gt.Replay(store, Uniform(), 4) as replay, pytest.raises(TypeError, match="endless"):
        len(replay)


def test_a_new_iteration_ends_the_one_before(store):
    with gt.Replay(store, Uniform(), 4, prefetch=2) as replay:
        first = iter(replay)
        assert next(first).step == 0
        second = iter(replay)
        assert next(second).step == 1
        assert next(first, None) is None
        assert next(second).step == 2


def test_too_few_rows_are_told_with_why_nothing_is_waited_for(store):
    store.delete(store.keys()[:1])
    with replay_of(store, Uniform(), 4, min_rows=ROWS, timeout_s=0.2) as replay:
        with pytest.raises(
            NotEnoughRowsError, match=r"no other process has it open, so nothing is waited for.*expect_writers.*limiter"
        ):
            replay.sample()
        with gt.Store.open(store.name), pytest.raises(WaitTimeoutError, match=r"too few rows within 0\.2 s"):
            replay.sample()


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("num_batches", [None, 3])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_data_loader_of_a_bare_replay_says_what_to_give_it(store, batch_size, num_batches, shuffle):
    with gt.Replay(store, Uniform(), 4, num_batches=num_batches) as replay:
        with pytest.raises(TypeError, match=r"DataLoader\(geartrain.ReplayDataset\(replay\), batch_size=None\)"):
            next(iter(DataLoader(replay, batch_size=batch_size, shuffle=shuffle)))


@pytest.mark.parametrize("fetched", [False, True])
def test_a_batch_has_the_items_of_a_dict_and_says_how_to_make_one(store, fetched):
    with gt.Replay(store, Uniform(), 4) as replay:
        batch = gt.fetch(store, store.keys()[:4]) if fetched else replay.sample()
    assert dict(batch.items()).keys() == dict(batch.fields).keys() == set(batch)
    assert all(array is batch[name] for name, array in batch.items())
    assert [id(array) for array in batch.values()] == [id(array) for array in batch.fields.values()]
    for make in (lambda: dict(batch), lambda: {**batch}, lambda: dict(**batch)):
        with pytest.raises(TypeError, match=r"dict\(batch.fields\) or batch.items\(\)"):
            make()


def test_the_figures_add_up(store):
    with gt.Replay(store, Uniform(), 10, window=4, prefetch=2, num_batches=5) as replay:
        size = sum(batch.nbytes for batch in replay)
        stats = replay.stats()
    assert (stats["batches"], stats["rows"], stats["bytes"]) == (5, 50, size)
    assert size == 5 * 10 * (4 * 8 + 4)
    assert 0 <= stats["wait_share"] <= 1
    assert stats["make_s"] > 0
    assert stats["redrawn"] == 0


# --- errors ---------------------------------------------------------------------------------------------------------


class Faulty:
    """A strategy that fails, or waits for ever, at a step."""

    def __init__(self, at_step: int, fault) -> None:
        self.seed = 0
        self.at_step = at_step
        self.fault = fault

    def select(self, candidates, n, step, *, state=None, redraw=None):
        if step == self.at_step:
            self.fault()
        return Uniform().select(candidates, n, step, state=state, redraw=redraw)


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_error_reaches_the_consumer_at_its_own_step_and_the_next_call_tries_again(store, prefetch):
    def fault() -> None:
        faults.append(1)
        if len(faults) == 1:
            raise RuntimeError("broken strategy")

    faults: list[int] = []
    with gt.Replay(store, Faulty(2, fault), 4, prefetch=prefetch) as replay:
        assert [replay.sample().step for _ in range(2)] == [0, 1]
        with pytest.raises(RuntimeError, match="broken strategy"):
            replay.sample()
        assert replay.sample().step == 2


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_empty_store_is_an_error_and_not_a_wait(name, prefetch):
    with gt.Store.create(name, {"x": gt.Field((), "int64", per_row=True)}, capacity=9) as store:
        with replay_of(store, Uniform(), 4, prefetch=prefetch, min_rows=3) as replay:
            for n in (0, 1, 1):
                store.insert({"x": np.zeros(n, np.int64)})
                with pytest.raises(NotEnoughRowsError, match=f"3 selectable rows.* has {len(store)}"):
                    replay.sample()
            store.insert({"x": np.zeros(1, np.int64)})
            assert len(replay.sample().keys) == 4


def test_too_few_rows_are_waited_for_where_another_process_may_insert_some(name):
    with (
        gt.Store.create(name, {"x": gt.Field((), "int64", per_row=True)}, capacity=9) as store,
        gt.Store.open(name) as actors,
    ):
        with replay_of(store, Uniform(seed=0), 4, prefetch=0, min_rows=3, timeout_s=60) as replay:
            inserted = threading.Timer(0.3, lambda: actors.insert({"x": np.zeros(3, np.int64)}))
            inserted.start()
            assert len(replay.sample().keys) == 4
            inserted.join()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_wait_for_rows_ends_in_time_and_says_what_is_missing(name, prefetch):
    with gt.Store.create(name, {"x": gt.Field((), "int64", per_row=True)}, capacity=9) as store, gt.Store.open(name):
        store.insert({"x": np.zeros(2, np.int64)})
        store.limiter.set(samples_per_insert=8, min_size_to_sample=1, error_buffer=100)
        with replay_of(store, Uniform(seed=0), 4, prefetch=prefetch, min_rows=3, timeout_s=0.2) as replay:
            with pytest.raises(WaitTimeoutError) as caught:
                replay.sample()
    for said in ("2 selectable rows of 3 wanted", "8 samples per insert", "waiting for rows"):
        assert said in str(caught.value)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("limited", [False, True])
def test_rows_of_writers_that_are_starting_are_waited_for_until_they_give_up(name, prefetch, limited):
    with gt.Store.create(name, {"x": gt.Field((), "int64", per_row=True)}, capacity=9) as store:
        if limited:
            store.limiter.set(min_size_to_sample=3)
        with replay_of(
            store, Uniform(seed=0), 4, prefetch=prefetch, min_rows=3, timeout_s=60, output="numpy"
        ) as replay:
            with store.expect_writers() as writers:
                started = threading.Timer(0.2, lambda: gt.Store.open(name).insert({"x": np.zeros(3, np.int64)}))
                started.start()
                assert len(replay.sample().keys) == 4
                started.join()
            store.delete(store.keys())
            writers = store.expect_writers()
            failure = OSError("no simulator")
            failed = threading.Timer(0.2, lambda: writers.give_up(failure, "the writers found no simulator"))
            failed.start()
            with pytest.raises(NotEnoughRowsError, match="the writers found no simulator") as caught:
                while True:
                    replay.sample()
            assert caught.value.__cause__ is failure
            failed.join()


def test_closing_ends_a_wait_for_rows(name):
    with gt.Store.create(name, {"x": gt.Field((), "int64", per_row=True)}, capacity=9) as store, gt.Store.open(name):
        replay = replay_of(store, Uniform(seed=0), 4, prefetch=1, min_rows=3, timeout_s=1000)
        closing = threading.Timer(0.2, replay.close)
        closing.start()
        with pytest.raises((gt.errors.CallCancelledError, StoreClosedError)):
            replay.sample()
        closing.join()


def test_a_field_named_like_a_batchs_own_entry_is_refused_in_a_dict(name):
    from geartrain.replay.iterable_dataset import ReplayDataset

    with gt.Store.create(
        name, {"mask": gt.Field((), "int64", per_row=True), "x": gt.Field((), "int64", per_row=True)}, capacity=9
    ) as store:
        store.insert({"mask": np.arange(4), "x": np.arange(4)})
        with gt.Replay(store, Uniform(seed=0), 4, prefetch=0) as replay:
            batch = replay.sample()
            assert batch["mask"].shape == (4,)
            with pytest.raises(ArgumentError, match="fields named 'mask' cannot"):
                batch.as_dict()
            with pytest.raises(ArgumentError, match="fields named 'mask' cannot"):
                ReplayDataset(replay)


def test_a_batch_that_takes_too_long_is_an_error_in_time_and_is_still_there_later(store):
    go = threading.Event()
    with replay_of(store, Faulty(1, go.wait), 4, prefetch=2, timeout_s=0.1) as replay:
        assert replay.sample().step == 0
        for _ in range(2):
            began_s = time.monotonic()
            with pytest.raises(WaitTimeoutError, match=r"0\.1 s"):
                replay.sample()
            assert time.monotonic() - began_s < patience(5)
        go.set()
        replay._loader._timeout_s = patience(20)
        assert replay.sample().step == 1


def test_closing_does_not_wait_for_ever_for_a_strategy_that_never_returns(store):
    go = threading.Event()
    replay = replay_of(store, Faulty(1, go.wait), 4, prefetch=2, timeout_s=0.2)
    replay.sample()
    began_s = time.monotonic()
    replay.close()
    assert time.monotonic() - began_s < patience(5)
    left = prefetching()
    go.set()
    for thread in left:
        thread.join(timeout=patience(20))


def test_a_store_closed_under_a_prefetching_replay_is_an_error_and_not_a_crash(name):
    store = gt.Store.create(name, {"x": gt.Field((), "int64", per_row=True)}, capacity=9)
    store.insert({"x": np.zeros(9, np.int64)})
    with replay_of(store, Uniform(), 4, prefetch=2, timeout_s=patience(20)) as replay:
        replay.sample()
        store.close()
        with pytest.raises(StoreClosedError):
            for _ in range(10):
                replay.sample()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, found 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, found 2.5"),
        ({"batch_size": float("nan")}, "batch_size must be a whole number, found nan"),
        ({"batch_size": True}, "batch_size must be a whole number, found True"),
        ({"batch_size": "3"}, "batch_size must be a whole number, found '3'"),
        ({"window": 1.5}, "window must be a whole number, found 1.5"),
        ({"threads": 1.5}, "threads must be a whole number, found 1.5"),
        ({"num_batches": 2.5}, "num_batches must be a whole number, found 2.5"),
        ({"prefetch": -1}, "prefetch must be from 0 to 1024, found -1"),
        ({"min_rows": 0}, "min_rows must be at least 1, found 0"),
        ({"num_batches": -1}, "num_batches must be at least 0, found -1"),
        ({"selection": "uniform"}, "found 'uniform'"),
        ({"fields": ["y"]}, "no field 'y'"),
        ({"window": 0}, "window must be at least 1, found 0"),
        ({"pad": "both"}, "'both'"),
        ({"threads": 0}, "threads must be from 1 to 4096, found 0"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"min_steps": 0}, "min_steps must be at least 1, found 0"),
    ],
)
def test_a_replay_that_makes_no_sense_is_refused(store, options, message):
    with pytest.raises(ArgumentError, match=message):
        replay_of(store, **{"selection": Uniform(), "batch_size": 4, **options})


# --- leaving --------------------------------------------------------------------------------------------------------


def test_a_closed_replay_leaves_no_thread_and_refuses_more(store):
    replay = gt.Replay(store, Uniform(), 4, prefetch=4)
    replay.sample()
    assert prefetching()
    replay.close()
    replay.close()
    assert not prefetching()
    for refused in (replay.sample, lambda: next(iter(replay))):
        with pytest.raises(StoreClosedError, match="replay was closed"):
            refused()


def test_a_forgotten_replay_is_collected_with_its_thread(store):
    replay = gt.Replay(store, Uniform(), 4, prefetch=4)
    replay.sample()
    (thread,) = prefetching()
    del replay
    gc.collect()
    thread.join(timeout=patience(20))
    assert not thread.is_alive()


def test_a_replay_collected_on_its_own_prefetching_thread_ends_quietly(store, monkeypatch):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    dropped = threading.Event()

    def drop() -> None:
        dropped.wait(patience(20))
        holder.clear()  # the last reference goes on this thread
        gc.collect()

    holder = [gt.Replay(store, Faulty(1, drop), 4, prefetch=3)]
    holder[0].sample()
    (thread,) = prefetching()
    dropped.set()
    thread.join(timeout=patience(20))
    assert not thread.is_alive()
    assert not unraisable


def test_iterating_again_and_again_keeps_no_batch_of_the_iterations_before(store):
    gc.collect()
    before = _native.pool_counts()["bytes_in_use"]
    with gt.Replay(store, Uniform(), 64, prefetch=3, num_batches=2) as replay:
        for _ in range(25):
            for batch in replay:
                size = batch.nbytes
        del batch
        gc.collect()
        # What was prepared ahead may lie there (fields and keys, a buffer each), what earlier iterations prepared not.
        assert _native.pool_counts()["bytes_in_use"] - before <= 2 * 6 * max(size, 1 << 16)
    gc.collect()
    assert _native.pool_counts()["bytes_in_use"] == before


def test_a_forked_child_goes_on_with_the_same_batches_on_a_thread_of_its_own(store, fork):
    with replay_of(store, Uniform(seed=6), 4, prefetch=3, timeout_s=patience(20)) as replay:
        expected = batches(replay, 6)
    with replay_of(store, Uniform(seed=6), 4, prefetch=3, timeout_s=patience(20)) as replay:
        first = batches(replay, 2)
        child = fork(lambda: 0 if first + batches(replay, 4) == expected else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert first + batches(replay, 4) == expected


# --- while rows change ----------------------------------------------------------------------------------------------


def test_batches_are_full_and_whole_while_rows_turn_over(name):
    with gt.Store.create(name, {"x": gt.Field((), "int64")}, max_length=400, capacity=6) as store:
        store.insert({"x": np.zeros((3, 400), np.int64)})
        stop = threading.Event()

        def write() -> None:
            for value in range(10**9):
                store.insert({"x": np.full((1, 400), value)}, lengths=[1 + value % 400], versions=[value])
                if stop.is_set():
                    return

        writer = threading.Thread(target=write)
        writer.start()
        try:
            with gt.Replay(store, Prioritized(seed=1), 32, output="numpy", prefetch=2, window=50) as replay:
                for _ in range(300):
                    batch = replay.sample()
                    expected = np.where(batch.mask, batch.version[:, None], 0)
                    assert np.array_equal(batch["x"], expected)
                    assert (batch.mask.sum(1) >= 1).all()
                    assert len(batch.keys) == 32
        finally:
            stop.set()
            writer.join()
        assert store.audit() == []
