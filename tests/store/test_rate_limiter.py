"""The rate limiter: who is ahead waits, by exactly the formula, over processes, and never for ever."""

import multiprocessing
import threading
import time

import numpy as np
import pytest
from deadlines import patience
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import ArgumentError, WaitTimeoutError
from geartrain.selection import Uniform
from geartrain.tools.testing import run_ranks


@pytest.fixture
def store(store_name):
    with gt.Store.create(store_name(), {"x": gt.Field((2,), "float32")}, max_length=4, capacity=1000) as made:
        yield made


def insert(store, n=1):
    return store.insert({"x": np.zeros((n, 4, 2), np.float32)})


def test_a_store_without_limits_makes_nobody_wait(store):
    insert(store, 5)
    assert not store.limiter.state().enabled
    assert str(store.limiter.state()) == "no limits"
    store.limiter.admit_samples(10**9, 0.0)


def test_inserts_wait_at_the_upper_edge_and_draws_at_the_lower(store):
    store.limiter.set(samples_per_insert=2, min_size_to_sample=10, error_buffer=8)
    insert(store, 10)  # up to the minimum nothing is compared
    insert(store, 4)  # 2 * 14 - 20 = 8: the edge
    with pytest.raises(WaitTimeoutError, match=r"14 inserted and 0 sampled, \+8 from the middle"):
        store.limiter.admit_inserts(1, 0.05)
    store.limiter.admit_samples(2, 0.0)
    store.limiter.admit_inserts(1, 0.0)
    store.limiter.give_back(inserts=1)
    store.limiter.admit_samples(14, 0.0)  # 28 - 16 - 20 = -8: the other edge
    with pytest.raises(WaitTimeoutError, match="-8 from the middle"):
        store.limiter.admit_samples(1, 0.05)
    state = store.limiter.state()
    assert (state.inserts, state.samples) == (14, 16)
    assert state.insert_wait_s >= 0.04
    assert state.sample_wait_s >= 0.04


def test_nothing_is_drawn_before_the_minimum_can_be_selected(store):
    store.limiter.set(min_size_to_sample=3)
    insert(store, 2)
    with replay_of(store, Uniform(seed=0), batch_size=2, prefetch=0, timeout_s=0.05, output="numpy") as replay:
        with pytest.raises(WaitTimeoutError, match=r"at least 3 rows.*2 rows selectable"):
            replay.sample()
        insert(store)
        assert replay.sample()["x"].shape == (2, 4, 2)


@pytest.mark.parametrize(("unit", "most"), [("rows", 1000), ("steps", 4000)])
def test_a_minimum_that_the_store_cannot_hold_is_refused_and_changes_nothing(store, unit, most):
    store.limiter.set(min_size_to_sample=most, unit=unit)
    with pytest.raises(ArgumentError, match=rf"min_size_to_sample={most + 1} .* at most {most} {unit}: .*capacity="):
        store.limiter.set(min_size_to_sample=most + 1, unit=unit)
    assert store.limiter.state().min_size_to_sample == most


@pytest.mark.parametrize(
    ("limit", "given", "says"),
    [
        (None, {"min_rows": 5}, "min_rows=5 .* at most 4 rows"),
        (None, {"min_steps": 9}, "min_steps=9 .* at most 8 steps"),
        (1, {}, "batch_size=6 .* at most 4 rows"),
    ],
)
def test_a_replay_that_would_wait_for_more_than_its_store_holds_is_refused(limit, given, says):
    fields = {"x": gt.Field((2,), "float32")}
    with gt.Store.create(fields, max_length=2, capacity=4, max_times_sampled=limit) as few:
        with pytest.raises(ArgumentError, match=says):
            replay_of(few, Uniform(seed=0), batch_size=6, **given)


def test_an_error_tells_slow_writers_from_none(store):
    """Whether a longer timeout helps: by what came while the wait lasted, and not before it."""
    store.limiter.set(samples_per_insert=2, min_size_to_sample=1000, error_buffer=8)
    insert(store, 2)
    with pytest.raises(WaitTimeoutError, match="too few rows are selectable; none was inserted meanwhile"):
        store.limiter.admit_samples(1, 0.01)

    waits = []

    def and_another_row_comes():
        if not waits:
            insert(store)
        waits.append(1)
        return False

    with pytest.raises(WaitTimeoutError, match="1 were inserted meanwhile, so that a longer timeout waits"):
        store.limiter.admit_samples(1, 0.3, and_another_row_comes)
    store.limiter.set(samples_per_insert=2, min_size_to_sample=1, error_buffer=3)
    with pytest.raises(WaitTimeoutError, match="inserts are ahead of samples; none was sampled meanwhile"):
        store.limiter.admit_inserts(1, 0.01)
    store.limiter.admit_samples(4, 0.0)
    store.limiter.admit_samples(3, 0.0)
    with pytest.raises(WaitTimeoutError, match="samples are ahead of inserts; none was inserted meanwhile"):
        store.limiter.admit_samples(1, 0.01)


def test_a_replay_that_is_ahead_goes_on_when_rows_come(store):
    store.limiter.set(samples_per_insert=4, min_size_to_sample=2, error_buffer=8)
    insert(store, 2)
    with replay_of(store, Uniform(seed=0), batch_size=4, prefetch=1, timeout_s=patience(20), output="numpy") as replay:
        replay.sample()
        writer = threading.Thread(target=lambda: [insert(store) for _ in range(20)])
        writer.start()
        for _ in range(20):
            replay.sample()
        writer.join(patience(20))
        assert not writer.is_alive()
    state = store.limiter.state()
    assert abs(state.lead) <= 8


def test_closing_a_replay_ends_its_wait(store):
    store.limiter.set(min_size_to_sample=100)
    replay = replay_of(store, Uniform(seed=0), batch_size=2, prefetch=1, timeout_s=patience(60), output="numpy")
    told = []

    def wait():
        try:
            replay.sample()
        except gt.errors.GeartrainError as error:
            told.append(error)

    waiter = threading.Thread(target=wait, daemon=True)
    waiter.start()
    time.sleep(0.1)
    began_s = time.monotonic()
    replay.close()
    assert time.monotonic() - began_s < patience(5)


def test_a_draw_that_failed_is_not_counted(store):
    store.limiter.set(samples_per_insert=1, min_size_to_sample=1, error_buffer=50)
    insert(store, 2)
    with replay_of(store, Uniform(seed=0), batch_size=2, prefetch=0, min_rows=5, output="numpy") as replay:
        with pytest.raises(gt.errors.NotEnoughRowsError):
            replay.sample()
    assert store.limiter.state().samples == 0


def test_a_commit_that_failed_is_not_counted(store):
    store.limiter.set(samples_per_insert=1, min_size_to_sample=1, error_buffer=50)
    row = store.row(zeros=["x"])
    row.length, row.priority = 4, -1.0
    with pytest.raises(ArgumentError):
        row.commit()
    rows = store.rows(2, zeros=["x"])
    rows.lengths, rows.priorities = 4, [1.0, -1.0]
    with pytest.raises(ArgumentError):
        rows.commit()
    assert store.limiter.state().inserts == 0
    with store.row(zeros=["x"]) as row:
        row.length = 4
    assert store.limiter.state().inserts == 1


def test_limits_can_be_changed_while_somebody_waits(store):
    store.limiter.set(samples_per_insert=1, min_size_to_sample=1, error_buffer=2)
    insert(store, 3)
    done = []
    waiter = threading.Thread(target=lambda: done.append(store.limiter.admit_inserts(1, 30)))
    waiter.start()
    time.sleep(0.1)
    assert not done
    store.limiter.set(samples_per_insert=1, min_size_to_sample=1, error_buffer=100)
    waiter.join(patience(5))
    assert done
    assert store.limiter.state().inserts == 4  # the counts go on when only the buffer changes
    waiter = threading.Thread(target=lambda: done.append(store.limiter.admit_samples(100, 30)))
    waiter.start()
    store.limiter.off()
    waiter.join(patience(5))
    assert len(done) == 2


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"samples_per_insert": 0}, "above 0"),
        ({"samples_per_insert": float("nan")}, "above 0"),
        ({"samples_per_insert": 8, "error_buffer": 7}, "at least 8"),
        ({"samples_per_insert": 0.5, "error_buffer": 0.5}, "at least 1"),
        ({"error_buffer": 5}, "without samples_per_insert"),
        ({"min_size_to_sample": 0}, "at least 1"),
    ],
)
def test_limits_in_which_nobody_could_move_are_refused(store, wrong, why):
    with pytest.raises(ArgumentError, match=why):
        store.limiter.set(**wrong)
    assert not store.limiter.state().enabled


def test_what_can_never_be_admitted_is_an_error_and_not_a_wait(store):
    store.limiter.set(samples_per_insert=2, min_size_to_sample=1, error_buffer=10)
    with pytest.raises(ArgumentError, match="must be at least 51"):
        store.limiter.admit_samples(100, 60)
    with pytest.raises(ArgumentError, match="insert fewer at a time"):
        insert(store, 100)


def test_ranks_wait_for_their_own_shards(store_name):
    stores = [
        gt.Store.create(store_name(), {"x": gt.Field((2,), "float32")}, max_length=4, capacity=100) for _ in range(2)
    ]
    for each in stores:
        each.limiter.set(samples_per_insert=2, min_size_to_sample=2, error_buffer=8)
        insert(each, 4)

    def body(rank):
        with replay_of(
            stores[rank.rank],
            Uniform(seed=0),
            batch_size=8,
            prefetch=0,
            group=rank,
            timeout_s=patience(20),
            output="numpy",
        ) as replay:
            for _ in range(3):
                replay.sample()
            if rank.rank == 0:  # the others wait for this one's shard
                threading.Timer(0.2, lambda: insert(stores[0], 6)).start()
            else:
                insert(stores[1], 6)
            for _ in range(3):
                replay.sample()

    run_ranks(2, body)
    assert [each.limiter.state().samples for each in stores] == [24, 24]
    for each in stores:
        each.close()


def _insert_forever(name):
    with gt.Store.open(name) as store:
        while True:
            insert(store)


def test_processes_keep_to_one_ratio_and_a_killed_one_holds_up_nobody(store):
    store.limiter.set(samples_per_insert=4, min_size_to_sample=10, error_buffer=40)
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_insert_forever, args=(store.name,), daemon=True) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        with replay_of(
            store, Uniform(seed=0), batch_size=8, prefetch=0, timeout_s=patience(60), output="numpy"
        ) as replay:
            for number in range(200):
                replay.sample()
                if number == 100:
                    writers[0].kill()
                assert abs(store.limiter.state().lead) <= 40 + 8
    finally:
        for writer in writers:
            writer.kill()
            writer.join()
    state = store.limiter.state()
    assert state.samples == 1600
    assert abs(state.samples / state.inserts - 4) < 0.5
    assert store.audit() == []
