"""Hindsight: goals that the same row achieved, whatever grows or is replaced meanwhile."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats
from selection_reference import below, random_bits

import geartrain as gt
from geartrain.errors import ArgumentError, FieldError
from geartrain.selection import Mixture, Prioritized, Uniform
from geartrain.store.recorder import recorded_fields

GOAL_STREAM = 4


def make_store(max_length, capacity=200, **options):
    fields = recorded_fields(
        {
            "obs.achieved_goal": gt.Field((2,), "float32"),
            "obs.desired_goal": gt.Field((2,), "float32"),
            "action": gt.Field((), "int64"),
            "reward": gt.Field((), "float32"),
        }
    )
    return gt.Store.create(
        {**fields, "truncated": gt.Field((), "bool")}, max_length=max_length, capacity=capacity, **options
    )


def episode(number, t):
    """Achieved and desired goal: no other step has these."""
    return {
        "achieved_goal": np.array([[number, t]], np.float32),
        "desired_goal": np.array([[-number, -1000]], np.float32),
    }


def record(store, lengths, first=1):
    recorder = store.recorder(1, autoreset="disabled")
    for number, length in enumerate(lengths, first):
        recorder.reset(episode(number, 0))
        for t in range(1, length + 1):
            recorder.step(
                episode(number, t),
                action=t - 1,
                reward=-0.5,
                terminated=t == length and number % 2 == 0,
                truncated=False,
            )
        recorder.cut()


def reward_of(achieved, desired):
    return np.abs(achieved - desired).sum(-1) + 0.25


def wanted_goal(strategy, k, seed, step, number, t, last):
    """The slow reference: the step whose goal draw `number` gets, None for its own."""

    def bits(attempt):
        return random_bits(seed, step, GOAL_STREAM, np.array([number], np.uint32), attempt)[0]

    if below(bits(0), k + 1) == 0:
        return None
    return {"final": last, "future": t + 1 + below(bits(1), last - t), "episode": 1 + below(bits(1), last)}[strategy]


def check(batch, strategy, k, seeds, lengths, stack=1):
    shards = np.zeros(len(batch), int) if batch.keys.shard is None else batch.keys.shard.astype(int)
    first = {shard: int(np.flatnonzero(shards == shard)[0]) for shard in set(shards.tolist())}
    for i in range(len(batch)):
        t = int(batch.start[i])
        frames = {name: batch[f"obs.{name}"][i].reshape(stack, 2) for name in ("achieved_goal", "desired_goal")}
        nexts = {name: batch[f"next_obs.{name}"][i].reshape(stack, 2) for name in ("achieved_goal", "desired_goal")}
        number = frames["achieved_goal"][-1, 0]
        last = lengths[int(number)]
        goal = wanted_goal(strategy, k, seeds[shards[i]], batch.step, i - first[shards[i]], t, last)
        assert frames["achieved_goal"][-1, 1] == t == batch["action"][i] and nexts["achieved_goal"][-1, 1] == t + 1
        assert batch["relabelled"][i] == (goal is not None)
        desired = np.array([-number, -1000] if goal is None else [number, goal], np.float32)
        for at, stacked in ((t, frames), (t + 1, nexts)):
            real = min(at + 1, stack)
            assert (stacked["desired_goal"][stack - real :] == desired).all()
            assert (stacked["desired_goal"][: stack - real] == 0).all()
        wanted = -0.5 if goal is None else reward_of(np.array([number, t + 1]), desired)
        assert batch["reward"][i] == np.float32(wanted)
        assert batch["terminated"][i] == (t + 1 == last and number % 2 == 0)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=30),
    strategy=st.sampled_from(["future", "final", "episode"]),
    k=st.integers(0, 6),
    over=st.sampled_from(["rows", "steps"]),
    stack=st.sampled_from([1, 1, 3]),
    seed=st.integers(0, 2**64 - 1),
)
def test_every_goal_is_the_one_of_the_slow_reference(lengths, strategy, k, over, stack, seed):
    with make_store(10) as store:
        record(store, lengths)
        view = gt.Transitions(frame_stack=stack, hindsight=gt.Hindsight(strategy, k, reward=reward_of))
        with gt.Replay(store, Uniform(seed=seed, over=over), 70, view=view, output="numpy", prefetch=0) as replay:
            for _ in range(2):
                check(replay.sample(), strategy, k, [seed], dict(enumerate(lengths, 1)), stack)
            assert replay.stats()["path"] == ("native, calls Hindsight.reward" if k else "native")


def test_future_goals_are_uniform_over_the_steps_that_follow():
    with make_store(12) as store:
        record(store, [10])
        view = gt.Transitions(hindsight=gt.Hindsight(k=1, reward=reward_of))
        counts = np.zeros((10, 11), int)
        own = 0
        with gt.Replay(store, Uniform(seed=3, over="steps"), 4000, view=view, output="numpy", prefetch=0) as replay:
            for _ in range(5):
                batch = replay.sample()
                which = batch["relabelled"]
                own += int((~which).sum())
                np.add.at(counts, (batch.start[which], batch["obs.desired_goal"][which, 1].astype(int)), 1)
        for t in range(9):
            assert counts[t, : t + 1].sum() == 0
            assert stats.chisquare(counts[t, t + 1 :]).pvalue > 1e-4
        assert stats.binomtest(own, 20_000, 0.5).pvalue > 1e-4


def test_ends_of_relabelled_transitions_and_tensors():
    torch = pytest.importorskip("torch")
    with make_store(6) as store:
        record(store, [5, 5])
        reached = lambda achieved, desired: (achieved == desired).all(-1)  # noqa: E731
        hindsight = gt.Hindsight("final", 4, reward=lambda a, d: reached(a, d) - 1.0, terminated=reached)
        view = gt.Transitions(gamma=0.5, hindsight=hindsight)
        with gt.Replay(store, Uniform(seed=0, over="steps"), 200, view=view, prefetch=2) as replay:
            batch = replay.sample()
        assert batch["reward"].dtype == torch.float32 and batch["relabelled"].dtype == torch.bool
        other = batch["relabelled"]
        ended = batch.start == 4
        assert torch.equal(batch["terminated"][other], ended[other])
        assert torch.equal(batch["reward"][other], ended[other].float() - 1)
        assert torch.equal(batch["discount"], torch.where(batch["terminated"], 0.0, 0.5))


def test_over_mixtures_each_goal_is_of_its_own_store():
    with make_store(8) as one, make_store(12) as other:
        record(one, [7, 3, 5])
        record(other, [2, 11], first=100)
        lengths = {1: 7, 2: 3, 3: 5, 100: 2, 101: 11}
        mixture = Mixture([1, 1], [Uniform(seed=7, over="steps"), Prioritized(seed=8)])
        view = gt.Transitions(hindsight=gt.Hindsight("episode", 3, reward=reward_of))
        with gt.Replay([one, other], mixture, 64, view=view, output="numpy") as replay:
            for _ in range(3):
                check(replay.sample(), "episode", 3, [7, 8], lengths)


def test_goals_of_rows_that_grow_and_are_replaced_are_of_their_own_episode():
    """A small store whose rows grow and turn over while batches are drawn: nothing is of two episodes."""
    with make_store(40, capacity=6) as store:
        stop = threading.Event()

        def write():
            recorder = store.recorder(1, autoreset="disabled", publish_every=3)
            number = 1
            while not stop.is_set():
                recorder.reset(episode(number, 0))
                for t in range(1, 30):
                    recorder.step(episode(number, t), action=t - 1, reward=-0.5, terminated=False, truncated=t == 29)
                number += 1

        record(store, [5] * 4, first=100_000)
        writer = threading.Thread(target=write)
        writer.start()
        try:
            view = gt.Transitions(hindsight=gt.Hindsight("future", 9, reward=reward_of))
            with gt.Replay(store, Uniform(seed=1, over="steps"), 64, view=view, output="numpy", prefetch=0) as replay:
                for _ in range(150):
                    batch = replay.sample()
                    which = batch["relabelled"]
                    mine, goals = batch["obs.achieved_goal"][which], batch["obs.desired_goal"][which]
                    assert (mine[:, 0] == goals[:, 0]).all() and (goals[:, 1] > batch.start[which]).all()
                    assert (goals[:, 1] < batch.length[which]).all()
                    assert np.array_equal(batch["reward"][which], np.float32(goals[:, 1] - batch.start[which] - 0.75))
        finally:
            stop.set()
            writer.join()


def test_what_makes_no_goals_is_refused():
    for bad in ({"strategy": "past"}, {"k": -1}, {"k": 0.5}, {"reward": None}, {"terminated": 3}, {"desired_goal": 1}):
        with pytest.raises(ArgumentError):
            gt.Hindsight(**{"reward": reward_of, **bad})
    hindsight = gt.Hindsight(reward=reward_of)
    with pytest.raises(ArgumentError, match="single steps"):
        gt.Transitions(n_step=2, hindsight=hindsight)
    with pytest.raises(ArgumentError, match="hindsight is a"):
        gt.Transitions(hindsight="future")
    with make_store(5) as store:
        record(store, [4])
        for bad in ({"achieved_goal": "reward"}, {"desired_goal": "goal"}, {"achieved_goal": "obs.desired_goal"}):
            view = gt.Transitions(hindsight=gt.Hindsight(reward=reward_of, **bad))
            with pytest.raises(FieldError):
                gt.Replay(store, Uniform(), 2, view=view)
        for wrong in (lambda a, d: 1.0, lambda a, d: a, lambda a, d: ["x"] * len(a)):
            view = gt.Transitions(hindsight=gt.Hindsight(reward=wrong))
            with (
                gt.Replay(store, Uniform(seed=0), 8, view=view, prefetch=0) as replay,
                pytest.raises(ArgumentError, match="reward returns"),
            ):
                replay.sample()
    plain = recorded_fields({"obs": gt.Field((2,), "float32"), "reward": gt.Field((), "float32")})
    with (
        gt.Store.create(plain, max_length=5, capacity=2) as store,
        pytest.raises(FieldError, match="one observation field of achieved goals"),
    ):
        gt.Replay(store, Uniform(), 2, view=gt.Transitions(hindsight=hindsight))


def test_rewards_of_several_numbers_and_functions_that_return_no_numbers_are_refused():
    goal = gt.Hindsight("final", reward=lambda achieved, desired: np.zeros(len(achieved)))
    fields = {
        "obs": gt.Field((1,), "float32"),
        "achieved_goal": gt.Field((1,), "float32"),
        "desired_goal": gt.Field((1,), "float32"),
    }
    made = recorded_fields({**fields, "reward": gt.Field((2,), "float32")})
    with gt.Store.create(made, max_length=4, capacity=4) as store:
        with pytest.raises(FieldError, match="one reward a transition"):
            gt.Replay(store, gt.selection.Uniform(), 2, view=gt.Transitions(hindsight=goal))
