"""Steps as a unit: `num_steps`, `min_steps` and a rate limiter of steps count what can be drawn, each step once."""

from __future__ import annotations

import numpy as np
import pytest
from replay_calls import replay_of

import geartrain as gt
from geartrain.errors import ArgumentError, NotEnoughRowsError, WaitTimeoutError
from geartrain.selection import Epochs, Uniform
from geartrain.store.recorder import recorded_fields

FIELDS = {"obs": gt.Field((), "int64"), "action": gt.Field((), "int64"), "reward": gt.Field((), "float32")}
PLAIN = {"x": gt.Field((), "int64")}


def recorded(n=60, *, envs=2, overlap=0, share_rows=False, publish_every=None, limit=None, capacity=200):
    """A store in which environments have recorded `n` steps each, and its recorder."""
    fields = recorded_fields(FIELDS, overlap=overlap > 0, share_rows=share_rows)
    store = gt.Store.create(fields, max_length=6, capacity=capacity)
    if limit is not None:
        store.limiter.set(unit="steps", **limit)
    recorder = store.recorder(
        envs, autoreset="same_step", overlap=overlap, share_rows=share_rows, publish_every=publish_every
    )
    recorder.reset(np.zeros(envs, np.int64))
    rng = np.random.default_rng(1)
    for _ in range(n):
        step(recorder, rng.random(envs) < 0.1)
    return store, recorder


def step(recorder, ends):
    none = np.zeros(len(ends), np.int64)
    recorder.step(
        none, action=none, reward=none.astype(np.float32), terminated=ends, truncated=np.zeros(len(ends), bool),
        final_obs=none,
    )  # fmt: skip


KINDS = [{}, {"overlap": 2}, {"share_rows": True}, {"publish_every": 2}, {"overlap": 2, "publish_every": 1}]


@pytest.mark.parametrize("kind", KINDS)
def test_the_steps_of_recorders_are_their_actions_and_those_of_a_pass(kind):
    store, recorder = recorded(**kind)
    if kind.get("publish_every") == 1:
        assert store.num_steps == 120
    recorder.cut()
    assert store.num_steps == 120
    with gt.Replay(
        store, Epochs(over="steps", seed=0, drop_last=False), 7, view=gt.Transitions(), output="numpy"
    ) as all:
        assert sum(len(batch.keys) for batch in all) == 120
    store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rate_limiter_of_steps_counts_each_step_once_when_it_can_be_drawn(kind):
    store, recorder = recorded(0, **kind, limit={"samples_per_insert": 1, "error_buffer": 1e6})
    rng = np.random.default_rng(2)
    for _ in range(60):
        step(recorder, rng.random(2) < 0.1)
        assert store.limiter.state().inserts == store.num_steps
    recorder.cut()
    assert store.limiter.state().inserts == store.num_steps == 120
    store.close()


def test_rows_that_are_inserted_count_with_their_steps():
    fields = recorded_fields(FIELDS, overlap=True)
    store, _ = recorded(60, overlap=2)
    rows = gt.fetch(store, store.keys(), output="numpy")
    lengths, steps = store.status()["length"], store.num_steps
    other = gt.Store.create(fields, max_length=6, capacity=200)
    other.limiter.set(samples_per_insert=1, error_buffer=1e6, unit="steps")
    other.insert(dict(rows.fields), lengths=lengths)
    assert other.limiter.state().inserts == other.num_steps == steps
    plain = gt.Store.create(PLAIN, max_length=5, capacity=50)
    plain.limiter.set(samples_per_insert=1, error_buffer=1e6, unit="steps")
    plain.insert({"x": np.zeros((3, 5), np.int64)})
    plain.insert({"x": np.zeros((3, 4), np.int64)}, lengths=[1, 2, 4])
    with plain.rows(2) as some:
        for row in some:
            row["x"][:] = 0
        some.lengths = [2, 3]
    with plain.row() as row:
        row["x"][:] = 0
        row.publish(length=1)
        for length in (2, 4):
            row.extend(length)
            assert plain.limiter.state().inserts == plain.num_steps
    assert plain.limiter.state().inserts == plain.num_steps == 15 + 7 + 5 + 4
    with pytest.raises(WaitTimeoutError, match=r"39 steps could not be inserted|1 samples per step"):
        plain.limiter.set(samples_per_insert=1, min_size_to_sample=1, error_buffer=30, unit="steps", afresh=False)
        plain.limiter.admit_inserts(1, 0.01)
    for each in (store, other, plain):
        each.close()


def test_four_samples_per_step_of_the_environments():
    """A batch of 8 becomes due with every second step, and only once 20 steps are there."""
    limit = {"samples_per_insert": 4, "min_size_to_sample": 20, "error_buffer": 8}
    store, recorder = recorded(19, envs=1, publish_every=1, limit=limit)
    options = {"view": gt.Transitions(), "prefetch": 0, "timeout_s": 0.02, "output": "numpy"}
    with replay_of(store, Uniform(over="steps", seed=0), 8, **options) as replay:
        with pytest.raises(WaitTimeoutError, match=r"too few steps are selectable.*at least 20 steps.*19 steps sel"):
            replay.sample()
        step(recorder, np.zeros(1, bool))
        assert len(replay.sample().keys) == 8
        for _ in range(5):
            with pytest.raises(WaitTimeoutError, match="samples are ahead of inserts"):
                replay.sample()
            for _ in range(2):
                step(recorder, np.zeros(1, bool))
            assert len(replay.sample().keys) == 8
    assert str(store.limiter.state()).startswith("4 samples per step, at least 20 steps")
    store.close()


def test_a_change_of_the_unit_counts_from_zero_and_a_wrong_one_is_refused():
    store, _ = recorded(10, limit={"samples_per_insert": 1})
    assert store.limiter.state().error_buffer == 1 + 10 * store.max_length
    store.limiter.set(samples_per_insert=1)
    assert (store.limiter.state().unit, store.limiter.state().inserts) == ("rows", 0)
    with pytest.raises(ArgumentError, match="unit"):
        store.limiter.set(samples_per_insert=1, unit="episodes")
    store.limiter.set(samples_per_insert=1, unit="steps")
    store.limiter.off()
    assert store.limiter.state().unit == "steps"
    store.close()


def test_a_batch_needs_min_steps_also_after_rows_have_gone():
    """Whatever is known of the steps of before: rows come, others are evicted, and some are deleted."""
    store = gt.Store.create(PLAIN, max_length=5, capacity=10)
    rng = np.random.default_rng(3)
    with replay_of(store, Uniform(seed=0), 2, min_steps=25, prefetch=0, output="numpy") as replay:
        for _ in range(200):
            if rng.random() < 0.7:
                store.insert({"x": np.zeros((1, 5), np.int64)}, lengths=rng.integers(1, 6, 1))
            elif len(store):
                store.delete(store.keys()[: rng.integers(1, 3)])
            assert store.num_steps == store.status()["length"].sum()
            if store.num_steps >= 25:
                replay.sample()
                continue
            with pytest.raises(NotEnoughRowsError, match=f"25 steps, the store .* has .* and {store.num_steps};"):
                replay.sample()
    store.close()
