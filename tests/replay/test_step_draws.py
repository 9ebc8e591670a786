"""Draws of steps by their priorities: to the bit those of a slow reference, and as often as the priorities say."""

from __future__ import annotations

import numpy as np
import pytest
from replay_calls import replay_of
from scipy import stats
from selection_reference import ROW_STREAM, below, random_bits

import geartrain as gt
from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError, EmptyStoreError, FieldError
from geartrain.selection import Fifo, Limits, Mixture, Prioritized, TopK, Uniform
from geartrain.store.recorder import recorded_fields

LENGTH = 23
FIELDS = {"at": gt.Field((2,), "int32")}
SEED = 7


def make_store(capacity=30, **options):
    return gt.Store.create(FIELDS, max_length=LENGTH, capacity=capacity, priority_per="step", **options)


def fill(store, lengths, seed=0):
    """Rows whose steps say where they are, with priorities over three orders of magnitude; keys of all steps."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths)
    at = np.zeros((len(lengths), LENGTH, 2), np.int32)
    at[..., 0] = np.arange(len(lengths))[:, None]
    at[..., 1] = np.arange(LENGTH)
    keys = store.insert({"at": at}, lengths=lengths.astype(np.uint32), versions=np.arange(len(lengths)))
    steps = steps_of(keys, lengths)
    store.update_priorities(steps, np.exp(rng.uniform(-3, 4, len(steps))))
    return steps


def steps_of(keys, lengths):
    return keys[np.repeat(np.arange(len(lengths)), lengths)].of_steps(np.concatenate([np.arange(n) for n in lengths]))


class Reference:
    """The definition of native/selection/selection.h once more, slow and in whole numbers."""

    def __init__(self, store, steps, allowed):
        self.priority = np.zeros((store.capacity, LENGTH), np.int64)
        fixed = np.rint(store.status(steps)["priority"] * 2**16).astype(np.int64)
        self.priority[steps.row, steps.step] = fixed
        self.allowed = np.zeros_like(self.priority, bool)
        self.allowed[steps.row, steps.step] = allowed
        self.sums = np.cumsum(self.priority.ravel())

    def draw(self, step, n, strata=False):
        left, found = list(range(n)), [(0, 0)] * n
        for attempt in range(63):
            self._find(found, left, step, attempt, self.sums, strata)
            left = [i for i in left if not self.allowed[found[i]]]
        if left:
            sums = np.cumsum(np.where(self.allowed, self.priority, 0).ravel())
            self._find(found, left, step, 63, sums, strata)
        return np.array(found)

    def _find(self, found, left, step, attempt, sums, strata):
        n, total = len(found), int(sums[-1])
        for i, bits in zip(left, random_bits(SEED, step, ROW_STREAM, np.array(left, np.uint32), attempt), strict=True):
            target = below(bits, total)
            if strata:
                first, last = i * total // n, (i + 1) * total // n
                target = min(first + below(bits, max(last - first, 1)), total - 1)
            found[i] = divmod(int(np.searchsorted(sums, target, "right")), LENGTH)


@pytest.mark.parametrize("stratified", [False, True], ids=["plain", "strata"])
@pytest.mark.parametrize("limited", [False, True], ids=["all", "limits"])
def test_draws_are_those_of_the_reference_to_the_bit(stratified, limited):
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, LENGTH + 1, 30)
    limits = Limits(min_version=25, min_length=4) if limited else None
    with make_store() as store:
        steps = fill(store, lengths)
        of_row = np.repeat(np.arange(30), lengths)
        allowed = (of_row >= 25) & (lengths[of_row] >= 4) if limited else np.ones(len(steps), bool)
        reference = Reference(store, steps, allowed)
        strategy = Prioritized(seed=SEED, stratified=stratified, limits=limits)
        with gt.Replay(store, strategy, 40, window=3, prefetch=0, output="numpy") as replay:
            for step in range(6):
                batch = replay.sample()
                expected = reference.draw(step, 40, stratified)
                assert (batch.keys.row == expected[:, 0]).all()
                assert (batch.keys.step == expected[:, 1]).all()
                assert (batch["at"][:, -1, 1] == expected[:, 1]).all()  # the window ends at the step
                drawn = reference.priority[expected[:, 0], expected[:, 1]]
                assert (batch.probability == drawn / float(reference.sums[-1])).all()
                assert replay.stats()["path"] == "native"


def test_where_hardly_any_step_may_be_drawn_those_are_in_proportion_and_to_the_bit():
    lengths = np.full(30, LENGTH)
    with make_store() as store:
        steps = fill(store, lengths)
        given = np.where(steps.row == 4, 1.0 + steps.step, 60_000.0)
        store.update_priorities(steps, given)
        of_one = Limits(min_version=4)
        keys = store.keys()
        store.delete(keys[5:])
        steps = steps[: 5 * LENGTH]
        reference = Reference(store, steps, steps.row == 4)
        with gt.Replay(
            store, Prioritized(seed=SEED, limits=of_one), 50, window=1, prefetch=0, output="numpy"
        ) as replay:
            for step in range(5):
                batch = replay.sample()
                expected = reference.draw(step, 50)
                assert (np.stack([batch.keys.row, batch.keys.step], 1) == expected).all()
                assert (batch.keys.row == 4).all()


def recorded_store(lengths, capacity=64, max_length=40, **options):
    fields = recorded_fields({"obs": gt.Field((1,), "float32"), "reward": gt.Field((), "float32")})
    store = gt.Store.create(fields, max_length=max_length, capacity=capacity, priority_per="step", **options)
    recorder = store.recorder(autoreset="disabled")
    for length in lengths:
        recorder.reset(np.zeros(1))
        for t in range(length):
            recorder.step(np.full(1, t + 1), reward=float(t), terminated=t == length - 1, truncated=False)
    return store


def p_value(store, replay, batches, n_step_left):
    """Of the steps that were drawn, against priorities of those that have one behind them."""
    keys = store.keys()
    lengths = store.status(keys)["length"]
    expected = np.zeros((store.capacity, store.max_length))
    every = steps_of(keys, lengths)
    expected[every.row, every.step] = store.status(every)["priority"]
    for row, length in zip(keys.row, lengths, strict=True):
        expected[row, length - n_step_left :] = 0
    counts = np.zeros_like(expected)
    for _ in range(batches):
        batch = replay.sample()
        np.add.at(counts, (batch.keys.row, batch.keys.step), 1)
        assert (batch.start == batch.keys.step).all()
    assert (counts[expected == 0] == 0).all()
    there = expected > 0
    shares = expected[there] / expected[there].sum()
    return stats.chisquare(counts[there], shares * counts.sum()).pvalue


@pytest.mark.parametrize("off", [False, True], ids=["right", "wrong"])
def test_transitions_are_drawn_in_proportion_to_the_priorities_of_their_steps(off):
    rng = np.random.default_rng(11)
    lengths = rng.integers(1, 39, 40)
    with recorded_store(lengths) as store:
        keys = store.keys()
        steps = steps_of(keys, store.status(keys)["length"])
        given = np.exp(rng.uniform(-2, 2, len(steps)))
        store.update_priorities(steps, given)
        view = gt.Transitions(n_step=3, gamma=0.5, frame_stack=2)
        with gt.Replay(store, Prioritized(seed=2), 4096, view=view, prefetch=0, output="numpy") as replay:
            if off:  # the test has to see a bias
                replay.sample()
                store.update_priorities(steps[::2], given[::2] * 1.08)
                batches = [replay.sample() for _ in range(100)]
                store.update_priorities(steps[::2], given[::2])
                counts = iter(batches)
                replay.sample = lambda: next(counts)
                assert p_value(store, replay, 100, 1) < 1e-8
            else:
                assert p_value(store, replay, 100, 1) > 1e-4


def test_importance_weights_are_those_of_each_steps_probability():
    with recorded_store([30, 10, 20]) as store:
        keys = store.keys()
        steps = steps_of(keys, store.status(keys)["length"])
        store.update_priorities(steps, np.random.default_rng(0).random(len(steps)) + 0.1)
        strategy = Prioritized(seed=0, beta=0.7)
        with gt.Replay(store, strategy, 64, view=gt.Transitions(), prefetch=0, output="numpy") as replay:
            batch = replay.sample()
        total = store.native.total_priority() / 2**16
        assert np.allclose(batch.probability, store.status(batch.keys)["priority"] / total, rtol=1e-15)
        weights = batch.probability**-0.7
        assert np.allclose(batch.importance_weights, weights / weights.max())


def test_errors_given_back_move_the_draws_to_where_they_are_large():
    with recorded_store([39] * 20) as store:
        view = gt.Transitions(n_step=2)
        with gt.Replay(store, Prioritized(seed=0, alpha=0.5), 128, view=view, prefetch=0, output="numpy") as replay:
            for _ in range(200):
                batch = replay.sample()
                assert replay.update_priorities(batch.keys, np.where(batch.start == 5, -400.0, 0.0)) == 0
            found = store.status(batch.keys)["priority"]
            assert (found == np.where(batch.start == 5, 20, 0)).all()  # |-400| ** 0.5
            assert (np.bincount(replay.sample().start) == [0] * 5 + [128]).all()
        assert store.audit() == []


def test_updates_of_rows_that_are_gone_are_counted_and_change_nothing():
    with recorded_store([10] * 4, capacity=8) as store:
        with gt.Replay(store, Prioritized(seed=0), 32, view=gt.Transitions(), prefetch=0, output="numpy") as replay:
            batch = replay.sample()
            store.delete(store.keys()[:2])
            gone = ~np.isin(batch.keys.row, store.keys().row)
            assert replay.update_priorities(batch.keys, 3.0) == gone.sum() > 0
        assert store.audit() == []


def test_steps_can_be_drawn_as_soon_as_they_are_published():
    with gt.Store.create(FIELDS, max_length=LENGTH, capacity=4, priority_per="step") as store:
        row = store.row(priority=2.0)
        row["at"][:, 1] = np.arange(LENGTH)
        row.publish(length=1)
        with gt.Replay(store, Prioritized(seed=0), 200, window=1, prefetch=0, output="numpy") as replay:
            for length in range(2, LENGTH):
                row.extend(length)
                drawn = replay.sample()["at"][:, 0, 1]
                assert set(drawn) <= set(range(length))
                assert store.native.total_priority() == length * 2 * 2**16
            assert LENGTH - 2 in drawn
            store.update_priorities(row.key.of_steps(0), np.array([50.0]))
            row.commit()
            assert store.native.total_priority() == (50 + (LENGTH - 2) * 2) * 2**16


def test_uniform_and_ordered_draws_name_the_steps_that_they_placed_their_windows_by():
    with recorded_store([20, 10, 5]) as store:
        for strategy in (Uniform(seed=0, over="steps"), Uniform(seed=0), Fifo()):
            n = 3 if isinstance(strategy, Fifo) else 64
            with gt.Replay(store, strategy, n, view=gt.Transitions(), prefetch=0, output="numpy") as replay:
                batch = replay.sample()
                assert (batch.keys.step == batch.start).all()
                assert replay.update_priorities(batch.keys, 2.0) == 0
        with gt.Replay(store, Uniform(seed=0), 32, window=4, prefetch=0, output="numpy") as replay:
            batch = replay.sample()
            assert (batch.keys.step == batch.start + batch.mask.sum(1) - 1).all()
            again = gt.fetch(store, batch.keys, window=4, output="numpy")
            assert (again["obs"] == batch["obs"]).all()


def test_whole_rows_are_named_without_steps():
    with recorded_store([20, 10, 5]) as store:
        with gt.Replay(store, Uniform(seed=0), 8, prefetch=0, output="numpy") as replay:
            batch = replay.sample()
            assert batch.keys.step is None
            with pytest.raises(ArgumentError, match="these keys name rows"):
                replay.update_priorities(batch.keys, 2.0)
        tails = gt.fetch(store, batch.keys, window=1, output="numpy")
        assert (tails.start == batch.length - 1).all(), "and their windows end where they do"


def test_mixtures_draw_steps_from_each_of_their_stores():
    one, two = recorded_store([20, 10]), recorded_store([7] * 3)
    with one, two:
        mixture = Mixture([0.5, 0.5], [Prioritized(seed=0, beta=0.5), Prioritized(seed=1, beta=0.5)])
        with gt.Replay([one, two], mixture, 64, view=gt.Transitions(), prefetch=0, output="numpy") as replay:
            batch = replay.sample()
            assert replay.update_priorities(batch.keys, np.arange(64.0)) == 0
            for store in (one, two):
                mine = batch.keys[batch.keys.is_of(store.id)]
                assert len(mine) == 32
                assert store.status(mine)["priority"].max() > 20
                assert store.audit() == []


def test_a_resumed_replay_goes_on_with_the_steps_that_the_first_would_have_drawn(tmp_path, name):
    with recorded_store([20, 30, 10]) as store:
        view, strategy = gt.Transitions(), Prioritized(seed=3, beta=0.4)
        with gt.Replay(store, strategy, 32, view=view, prefetch=0, output="numpy") as replay:
            for _ in range(3):
                batch = replay.sample()
                replay.update_priorities(batch.keys, np.arange(32.0))
            state = replay.state_dict()
            store.save(tmp_path / "checkpoint")
            expected = [replay.sample() for _ in range(3)]
        with gt.Store.load(tmp_path / "checkpoint", name) as loaded:
            with gt.Replay(loaded, strategy, 32, view=view, prefetch=0, output="numpy") as replay:
                replay.load_state_dict(state)
                for batch in expected:
                    again = replay.sample()
                    assert again.keys == batch.keys
                    assert (again.importance_weights == batch.importance_weights).all()


# --- what is refused ------------------------------------------------------------------------------------------


def test_what_knows_no_steps_is_refused_when_the_replay_is_made():
    with recorded_store([20]) as store, gt.Store.create(store.fields, max_length=40, capacity=4) as rows:
        view = gt.Transitions()
        for selection, options, words in (
            (Prioritized(replacement=False), {"view": view}, "with replacement"),
            (Prioritized(), {}, "give window="),
            (TopK(), {"view": view}, "needs priorities of rows"),
            (Prioritized(), {"view": view, "device": "cuda"}, "leave out device"),
        ):
            with pytest.raises(ArgumentError, match=words):
                replay_of(store, selection, 4, **options)
        with pytest.raises(ArgumentError, match="all have priorities of steps, or all of rows"):
            gt.Replay([store, rows], Mixture([0.5, 0.5], [Prioritized(), Prioritized()]), 4, view=view)
        with pytest.raises(FieldError, match="transitions need"):
            with make_store() as bare:
                gt.Replay(bare, Prioritized(), 4, view=view)
        with pytest.raises(FieldError, match=r"transitions need 'obz'.*did you mean 'obs'"):
            gt.Replay(store, Prioritized(), 4, view=gt.Transitions(obs="obz"))


def test_stores_whose_steps_have_none_behind_them_or_no_priority_are_empty():
    view = gt.Transitions()
    with make_store() as store:
        fill(store, [4, 3])
        store.update_priorities(steps_of(store.keys(), [4, 3]), np.zeros(7))
        with (
            gt.Replay(store, Prioritized(), 4, window=2, prefetch=0, output="numpy") as replay,
            pytest.raises(EmptyStoreError),
        ):
            replay.sample()
    with recorded_store([3]) as store:
        steps = steps_of(store.keys(), [4])
        store.update_priorities(steps, np.array([0.0, 0, 0, 5]))  # the step that the last action led to
        with (
            gt.Replay(store, Prioritized(), 4, view=view, prefetch=0, output="numpy") as replay,
            pytest.raises(EmptyStoreError),
        ):
            replay.sample()


def test_keys_of_steps_are_indexed_joined_and_compared_as_keys_are():
    keys = Keys(np.array([1, 2, 3]), np.array([1, 1, 5]), step=np.array([7, 8, 9]))
    assert keys[1:].step.tolist() == [8, 9]
    assert (keys[:1] + keys[2:]).step.tolist() == [7, 9]
    assert keys == keys.of_store(5)
    assert keys != keys.without_steps()
    assert keys != keys.of_steps(1)
    assert repr(keys) == "Keys(3: 1@1[7], 2@1[8], 3@5[9])"
    assert keys.of_shard(4).step.tolist() == [7, 8, 9]
