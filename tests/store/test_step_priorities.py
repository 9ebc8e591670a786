"""Priorities of steps: every sum is that of its steps to the bit, keys of steps go stale with their rows, and the death
of a process costs no other anything."""

from __future__ import annotations

import functools
import os
import time

import numpy as np
import pytest
from deadlines import patience
from segments import kill

import geartrain as gt
from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError, CheckpointError, SchemaError
from geartrain.store.recorder import recorded_fields

LENGTH = 37
SCALE = 2.0**16
FIELDS = {"x": gt.Field((), "float32")}


def make_store(name=None, capacity=24, max_length=LENGTH, **options):
    given = (FIELDS,) if name is None else (name, FIELDS)
    return gt.Store.create(*given, max_length=max_length, capacity=capacity, priority_per="step", **options)


def insert(store, lengths, priorities=None):
    values = np.zeros((len(lengths), store.max_length), np.float32)
    return store.insert({"x": values}, lengths=np.array(lengths, np.uint32), priorities=priorities)


def fixed(priority):
    """As a store keeps it: 16 bits behind the point, and above zero where it was."""
    scaled = int(np.rint(priority * SCALE))
    return 1 if scaled == 0 and priority > 0 else scaled


class Model:
    """What each step's priority must be, by (row, generation)."""

    def __init__(self):
        self.rows = {}

    def add(self, key, length, priority):
        self.rows[(int(key.row[0]), int(key.generation[0]))] = [fixed(priority)] * length

    def grow(self, key, length, priority):
        steps = self.rows[(int(key.row[0]), int(key.generation[0]))]
        steps += [fixed(priority)] * (length - len(steps))

    def keep(self, keys):
        alive = set(zip(keys.row.tolist(), keys.generation.tolist(), strict=True))
        self.rows = {key: steps for key, steps in self.rows.items() if key in alive}

    def check(self, store):
        keys = store.keys()
        self.keep(keys)
        assert len(self.rows) == len(keys)
        assert store.native.total_priority() == sum(sum(steps) for steps in self.rows.values())
        sums = store.status(keys)["priority"] * SCALE
        for i, (row, generation) in enumerate(zip(keys.row.tolist(), keys.generation.tolist(), strict=True)):
            steps = self.rows[(row, generation)]
            found = store.status(keys[i].of_steps(0)[[0] * len(steps)].of_steps(np.arange(len(steps))))["priority"]
            assert (found * SCALE).tolist() == steps
            assert sums[i] == sum(steps)


@pytest.mark.parametrize("seed", range(3))
def test_thousands_of_random_operations_leave_the_priorities_that_a_slow_model_has(seed):
    rng = np.random.default_rng(seed)
    model, known, growing = Model(), [], []
    with make_store() as store:
        for operation in range(1500):
            what = rng.choice(["insert", "update", "update", "delete", "begin", "grow", "grow", "end"])
            priority = float(rng.choice([0, 1e-9, 0.5, 1, 3.25, 65535]))
            if what == "insert":
                length = int(rng.integers(1, LENGTH + 1))
                known.append((insert(store, [length], np.array([priority])), length))
                model.add(*known[-1], priority)
            elif what == "update" and known:
                some = [known[i] for i in rng.integers(0, len(known), 20)]
                keys = Keys.join([key for key, _ in some]).of_steps([int(rng.integers(0, n)) for _, n in some])
                given = rng.choice([0, 1e-9, 0.25, 2, 1000.5], 20)
                now = store.keys()
                alive = set(zip(now.row.tolist(), now.generation.tolist(), strict=True))
                stale = store.update_priorities(keys, given)
                expected = 0
                for row, generation, step, value in zip(
                    keys.row.tolist(), keys.generation.tolist(), keys.step.tolist(), given, strict=True
                ):
                    if (row, generation) in alive:
                        model.rows[(row, generation)][step] = fixed(value)
                    else:
                        expected += 1
                assert stale == expected
            elif what == "delete" and known:
                store.delete(known.pop(int(rng.integers(len(known))))[0])
            elif what == "begin" and len(growing) < 5:
                row = store.row(priority=priority, zeros=FIELDS)
                key = row.publish(length=1)
                model.add(key, 1, priority)
                growing.append((row, key))
            elif what == "grow" and growing:
                row, key = growing[int(rng.integers(len(growing)))]
                row.priority = priority
                row.extend(min(LENGTH, row.length + int(rng.integers(1, 6))))
                model.grow(key, row.length, priority)
            elif what == "end" and growing:
                row, key = growing.pop()
                row.commit()
                known.append((key, row.length))
            if operation % 100 == 99:
                model.check(store)
                assert store.audit() == []
        for row, _ in growing:
            row.abandon()
        store.native.rebuild()
        model.check(store)
        assert store.audit() == []


def test_a_key_of_a_step_goes_stale_with_its_row_and_never_changes_the_next_one():
    with make_store(capacity=1) as store:
        before = insert(store, [5]).of_steps(3)
        assert store.update_priorities(before, np.array([7.0])) == 0
        assert store.status(before)["priority"][0] == 7
        after = insert(store, [5]).of_steps(3)  # in the same row
        assert after.row[0] == before.row[0]
        assert store.update_priorities(before, np.array([9.0])) == 1
        assert store.status(after)["priority"][0] == 1
        assert store.status(before)["priority"][0] == 0
        assert store.update_priorities(after.of_steps(5), np.array([9.0])) == 1  # it has no such step
        assert store.native.total_priority() == 5 * SCALE
        assert store.stats()["stale_keys"] == 2


def test_of_a_key_that_is_given_twice_the_last_priority_stays():
    with make_store() as store:
        key = insert(store, [3]).of_steps(1)
        store.update_priorities(key + key + key, np.array([5.0, 0.0, 2.0]))
        assert store.status(key)["priority"][0] == 2
        assert store.native.total_priority() == 4 * SCALE


def test_more_keys_than_a_journal_has_room_for_are_updated_in_one_call():
    with make_store(capacity=100) as store:
        keys = insert(store, [LENGTH] * 100)
        every = Keys.join([keys.of_steps(step) for step in range(LENGTH)])
        given = np.random.default_rng(0).integers(0, 1000, len(every)).astype(float)
        assert store.update_priorities(every, given) == 0
        assert store.native.total_priority() == given.sum() * SCALE
        assert store.audit() == []


def test_of_a_batch_that_is_ordered_by_step_the_last_priority_of_each_stays():
    with make_store(capacity=1000) as store:
        keys = insert(store, [LENGTH] * 1000)
        every = Keys.join([keys.of_steps(step) for step in range(LENGTH)])
        random = np.random.default_rng(1)
        order = random.integers(0, len(every), 40_000)  # some steps several times, others never
        given = random.integers(0, 1000, len(order)).astype(float)
        assert store.update_priorities(every[order], given) == 0
        expected = np.ones(len(every))
        expected[order] = given  # the last one, where an index is there twice
        assert (store.status(every)["priority"] == expected).all()
        assert store.native.total_priority() == expected.sum() * SCALE
        assert store.audit() == []


@pytest.mark.parametrize("publish_every", [None, 1, 3])
def test_a_recorders_priority_is_that_of_every_step(publish_every):
    fields = recorded_fields({"obs": gt.Field((), "float32")})
    with gt.Store.create(fields, max_length=8, capacity=8, priority_per="step") as store:
        with store.recorder(2, priority=2.5, publish_every=publish_every, autoreset="disabled") as recorder:
            recorder.reset(np.zeros(2))
            for _ in range(10):
                recorder.step(np.ones(2), terminated=np.zeros(2, bool), truncated=np.zeros(2, bool))
        status = store.status()
        assert len(status["length"]) == 4 and (status["priority"] == 2.5 * status["length"]).all(), status
        assert store.audit() == []


def test_a_recorders_priority_that_is_set_is_that_of_what_is_published_from_then_on():
    fields = recorded_fields({"obs": gt.Field((), "float32")})
    with gt.Store.create(fields, max_length=20, capacity=8, priority_per="step") as store:
        with store.recorder(1, priority=2.5, publish_every=1, autoreset="disabled") as recorder:
            recorder.reset(np.zeros(1))
            for t in range(9):
                recorder.priority = t
                assert recorder.priority == t
                recorder.step(np.ones(1), terminated=[t == 8], truncated=[False])
            for wrong in (-1, float("nan"), float("inf"), "1", True):
                with pytest.raises(ArgumentError, match="priority"):
                    recorder.priority = wrong
        steps = store.keys()[np.zeros(10, int)].of_steps(np.arange(10))
        assert store.status(steps)["priority"].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 8]  # the last two at once
        assert store.audit() == []


def test_raised_priorities_are_those_of_the_steps():
    with make_store() as store:
        keys = insert(store, [4, 2])
        steps = keys[[0, 0, 0, 0]].of_steps(np.arange(4))
        store.update_priorities(steps, np.array([4.0, 9.0, 0.0, 16.0]))
        store.raise_priorities(0.5)
        assert store.status(steps)["priority"].tolist() == [2, 3, 0, 4]
        assert store.native.total_priority() == (9 + 2) * SCALE
        assert store.audit() == []


def test_rows_whose_last_sample_was_drawn_lose_the_priorities_of_their_steps():
    with make_store(max_times_sampled=1) as store:
        keys = insert(store, [4, 6])
        store.native.count_samples(keys.row[:1], keys.generation[:1])
        assert store.native.total_priority() == 6 * SCALE
        assert store.update_priorities(keys[:1].of_steps(0), np.array([3.0])) == 1
        store.native.release_exhausted(keys.row[:1], keys.generation[:1])
        assert store.native.total_priority() == 6 * SCALE
        assert store.audit() == []


# --- bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"priority_per": "episode"}, "priority_per is one of 'row', 'step'"),
        ({"priority_per": ["step"]}, "priority_per is one of 'row', 'step'"),
        ({"priority_per": "step", "remover": "lowest_priority"}, "leave out remover='lowest_priority'"),
        ({"priority_per": "step", "capacity": 2**20, "max_length": 2**13}, "is exact in 64"),
    ],
    ids=["unknown", "list", "remover", "too-many-steps"],
)
def test_what_makes_no_store_with_priorities_of_steps_is_refused_by_name(options, words):
    with pytest.raises(ArgumentError, match=words):
        gt.Store.create(FIELDS, **{"max_length": 10, "capacity": 4, **options})


def test_keys_of_rows_and_of_steps_are_told_apart_and_bad_priorities_change_nothing():
    rows = gt.Store.create(FIELDS, max_length=10, capacity=4)
    with make_store() as store, rows:
        keys = insert(store, [10, 10])
        of_rows = rows.insert({"x": np.zeros((2, 10), np.float32)})
        with pytest.raises(ArgumentError, match="keeps a priority for every step, and these keys name rows"):
            store.update_priorities(keys, np.ones(2))
        with pytest.raises(ArgumentError, match="these keys name steps, and the store"):
            rows.update_priorities(of_rows.of_steps(1), np.ones(2))
        assert rows.update_priorities(of_rows.of_steps(1).without_steps(), np.ones(2)) == 0
        for bad in (-1.0, float("nan"), float("inf")):
            with pytest.raises(SchemaError, match="a priority is a finite number >= 0"):
                store.update_priorities(keys.of_steps(1), np.array([2.0, bad]))
        with pytest.raises(SchemaError, match="step 37 is beyond the 37 steps"):
            store.update_priorities(keys.of_steps([1, LENGTH]), np.ones(2))
        with pytest.raises(SchemaError, match="step 37 is beyond the 37 steps"):
            store.status(keys.of_steps([1, LENGTH]))
        with pytest.raises(ArgumentError, match="found float64"):
            keys.of_steps([0.5, 1.0])
        with pytest.raises(ArgumentError, match="2 keys have steps of shape"):
            keys.of_steps([0, 1, 2])
        with pytest.raises(ArgumentError, match="steps of keys must be from 0"):
            keys.of_steps(-1)
        with pytest.raises(ArgumentError, match="cannot be joined with keys of rows"):
            _ = keys + keys.of_steps(1)
        with pytest.raises(SchemaError):
            store.update_priorities(keys.of_steps(1), np.ones(3))
        assert store.native.total_priority() == 20 * SCALE


def test_rows_cannot_be_chosen_by_priorities_that_a_store_has_for_steps():
    with make_store() as store:
        insert(store, [10])
        candidates = gt.selection.Candidates.of_store(store.native, store.column)
        for strategy in (gt.selection.Prioritized(seed=0), gt.selection.TopK()):
            with pytest.raises(SchemaError, match="keeps priorities of steps and none of rows"):
                strategy.select(candidates, 1, 0)
        assert len(gt.selection.Uniform(seed=0).select(candidates, 3, 0).rows) == 3


# --- checkpoints ----------------------------------------------------------------------------------------------


def test_a_checkpoint_keeps_every_steps_priority_and_an_incremental_one_those_of_now(tmp_path):
    rng = np.random.default_rng(5)
    with make_store() as store:
        lengths = rng.integers(1, LENGTH, 40)
        keys = insert(store, lengths)[-24:]
        lengths = lengths[-24:]
        for _ in range(2):
            steps = keys.of_steps(rng.integers(0, lengths))
            store.update_priorities(steps, rng.random(24) * 100)
            saved = store.save(tmp_path / "checkpoint")
            loaded = gt.Store.load(tmp_path / "checkpoint", f"steps-{os.getpid()}")
            with loaded:
                assert loaded.options == store.options
                assert loaded.audit() == []
                assert loaded.native.total_priority() == store.native.total_priority()
                for step in range(LENGTH):
                    here, there = keys.of_steps(step), keys.of_steps(step).of_store(loaded.id)
                    assert (store.status(here)["priority"] == loaded.status(there)["priority"]).all()
        assert saved.bytes_linked > 0


def test_a_checkpoint_without_all_of_its_steps_is_refused(tmp_path):
    with make_store() as store:
        insert(store, [10, 20])
        store.save(tmp_path / "checkpoint")
    steps = tmp_path / "checkpoint" / "steps.bin"
    steps.write_bytes(steps.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=r"steps\.bin"):
        gt.Store.load(tmp_path / "checkpoint", f"steps-{os.getpid()}")
    damaged = bytearray(steps.read_bytes() + b"\0\0\0\1")
    steps.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"steps\.bin is damaged"):
        gt.Store.load(tmp_path / "checkpoint", f"steps-{os.getpid()}")


def test_stores_with_priorities_of_rows_write_the_checkpoints_they_always_did(tmp_path):
    with gt.Store.create(FIELDS, max_length=10, capacity=4) as store:
        store.insert({"x": np.zeros((2, 10), np.float32)})
        store.save(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint" / "steps.bin").exists()
    with gt.Store.load(tmp_path / "checkpoint", f"steps-{os.getpid()}") as loaded:
        assert loaded.options["priority_per"] == "row"


# --- deaths ---------------------------------------------------------------------------------------------------


def _update_for_ever(name, seed):
    rng = np.random.default_rng(seed)
    with gt.Store.open(name) as store:
        while True:
            keys = store.keys()
            lengths = store.status(keys.of_steps(0))["length"]
            some = rng.integers(0, len(keys), 300)
            steps = keys[some].of_steps((rng.random(300) * lengths[some]).astype(np.uint32))
            store.update_priorities(steps, rng.random(300) * 50)


def _insert_for_ever(name, seed):
    rng = np.random.default_rng(seed)
    with gt.Store.open(name) as store:
        while True:
            insert(store, rng.integers(1, LENGTH, 3), rng.random(3))
            row = store.row(priority=float(rng.random()), zeros=FIELDS)
            row.publish(length=1)
            row.extend(int(rng.integers(2, LENGTH)))
            row.commit()


def _kill_them(name, fork, seconds, rounds):
    """Writers and updaters are killed again and again while this process updates, samples and audits."""
    rng = np.random.default_rng(0)
    with make_store(name, capacity=64) as store:
        insert(store, [LENGTH] * 64)
        strategy = gt.selection.Prioritized(seed=1, beta=0.5)
        with gt.Replay(store, strategy, 64, window=2, prefetch=0, output="numpy") as replay:
            for number in range(rounds):
                work = (_update_for_ever, _insert_for_ever)
                crew = [fork(functools.partial(work[i % 2], name, number * 4 + i)) for i in range(3)]
                ends = time.monotonic() + rng.uniform(0.3, 1.0) * seconds
                done = 0
                while time.monotonic() < ends or done < 3:
                    batch = replay.sample()
                    replay.update_priorities(batch.keys, rng.random(64))
                    done += 1
                for each in crew:
                    kill(each)
                began = time.monotonic()
                replay.sample()
                assert time.monotonic() - began < patience(10)
                store.reap()
                assert store.audit() == []
                assert store.native.live_clients() == 1
                sums = store.status(store.keys())["priority"]
                assert store.native.total_priority() == sums.sum() * SCALE


def test_writers_and_updaters_killed_at_random_leave_sums_that_are_those_of_the_steps(name, fork):
    _kill_them(name, fork, 0.3, 3)


@pytest.mark.slow
def test_dozens_of_kills_leave_sums_that_are_those_of_the_steps(name, fork):
    _kill_them(name, fork, 0.4, 40)


def _insert_short_rows(name, seed):
    rng = np.random.default_rng(seed)
    with gt.Store.open(name) as store:
        values = np.zeros((1024, 8), np.float32)
        while True:
            store.insert({"x": values}, lengths=rng.integers(1, 9, 1024).astype(np.uint32))


@pytest.mark.slow
def test_of_1e8_steps_the_sums_are_right_again_within_a_second_of_a_death(name, fork):
    steps = 10_000
    with make_store(name, capacity=10_000, max_length=steps, max_rows=200, reserve=False) as store:
        assert store.capacity * store.max_length == 10**8
        long_rows = store.insert({"x": np.zeros((3, steps), np.float32)})
        strategy = gt.selection.Prioritized(seed=1)
        with gt.Replay(store, strategy, 64, window=1, prefetch=0, output="numpy") as replay:
            deadline = time.monotonic() + patience(10)
            kills, repairs = 0, 0
            while (kills < 6 or repairs == 0) and time.monotonic() < deadline:
                crew = [fork(functools.partial(work, name, kills)) for work in (_update_for_ever, _insert_short_rows)]
                before = store.stats()
                while time.monotonic() < deadline:  # until both are at work
                    replay.sample()
                    now = store.stats()
                    if all(now[what] > before[what] + 3000 for what in ("inserted", "priorities_updated")):
                        break
                for each in crew:
                    kill(each)
                began = time.process_time()
                replay.sample()
                store.reap()
                assert time.process_time() - began < 1
                kills, repairs = kills + 1, store.stats()["repairs"]
                keys = store.keys()
                words, whole = store.native.copy_step_priorities(
                    keys.row, keys.generation, store.status(keys.of_steps(0))["length"]
                )
                assert whole.all()
                assert store.native.total_priority() == words.sum(dtype=np.uint64)
            assert repairs > 0, "no process died with the lock: this test has shown half of what it is to show"
        assert len(long_rows) == 3
