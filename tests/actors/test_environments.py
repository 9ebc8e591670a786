"""Environments of each family: really stepped, and what an actor records of them is what happened."""

from __future__ import annotations

import importlib
import sys

import gymnasium as gym
import numpy as np
import pytest

import geartrain as gt
import geartrain.actors.envs as environments
from geartrain.actors import Actor, RandomPolicy, recorded_fields
from geartrain.actors.envs.adapters import space_fields
from geartrain.errors import ArgumentError, MissingDependencyError, SchemaError


def test_a_name_without_a_family_is_an_error_that_lists_them():
    for name in ("Hopper-v5", "nothing/Hopper-v5", "mujoco/", ""):
        with pytest.raises(ArgumentError, match="mujoco"):
            environments.make(name)
    with pytest.raises(ArgumentError, match="at least 1"):
        environments.make("mujoco/Hopper-v5", 0)


@pytest.mark.parametrize("family", environments.FAMILIES)
def test_each_family_has_its_module(family):
    module = importlib.import_module(f"geartrain.actors.envs.{environments.module_of(family)}")
    assert callable(module.make)


@pytest.mark.parametrize("family", environments.FAMILIES)
def test_what_is_missing_is_an_error_with_the_line_that_installs_it(family, monkeypatch):
    monkeypatch.setitem(sys.modules, environments.FAMILIES[family], None)  # an import of it fails
    with pytest.raises(MissingDependencyError, match=rf"pip install 'geartrain\[{family}\]'"):
        environments.make(f"{family}/anything")


@pytest.mark.parametrize(
    ("part", "error", "told"),
    [
        (gym.spaces.Text(3), ArgumentError, "'obs.arm.x' is a Text space, which has no fixed shape"),
        (gym.spaces.Box(0, 1, (3,), np.dtype(">f4")), SchemaError, "field 'obs.arm.x': dtype .*byte order"),
    ],
)
def test_a_part_of_a_space_that_cannot_be_stored_is_named(part, error, told):
    space = gym.spaces.Dict({"camera": gym.spaces.Box(0, 1, (3,)), "arm": gym.spaces.Dict({"x": part})})
    with pytest.raises(error, match=told):
        space_fields("obs", space)


def test_hopper_episodes_are_recorded_whole(store_name):
    pytest.importorskip("mujoco", reason="MuJoCo is an extra: pip install 'geartrain[mujoco]'")
    made = environments.make("mujoco/Hopper-v5", n=3)
    space = gym.make("Hopper-v5", disable_env_checker=True).action_space
    with gt.Store.create(store_name(), recorded_fields(made.fields()), max_length=200, capacity=50) as store:
        assert store.fields["obs"] == gt.Field((11,), "float64")
        actor = Actor(made, RandomPolicy(space), store, seed=3)
        stats = actor.run(episodes=6)
        assert stats.rows >= 6
        batch = gt.fetch(store, store.keys(), output="numpy")
        assert np.isfinite(batch["obs"]).all()
        ends = batch["terminated"].sum(1)
        assert (ends == 1).all(), "a random policy falls within 200 steps, once an episode"
        actor.close()


def test_robot_arms_keep_both_goals(store_name):
    mujoco = pytest.importorskip("mujoco", reason="robot arms are an extra: pip install 'geartrain[fetch]'")
    pytest.importorskip("gymnasium_robotics", reason="robot arms are an extra: pip install 'geartrain[fetch]'")
    fetch = importlib.import_module("geartrain.actors.envs.robotics")
    if tuple(int(part) for part in mujoco.__version__.split(".")[:2]) >= fetch.TOO_NEW:
        with pytest.raises(MissingDependencyError, match=r"found \d.*geartrain\[fetch\]"):
            environments.make("fetch/FetchReach-v4")
        return
    made = environments.make("fetch/FetchReach-v4", n=2)
    space = gym.spaces.Box(-1, 1, (4,), np.float32)
    with gt.Store.create(store_name(), recorded_fields(made.fields()), max_length=51, capacity=20) as store:
        stats = Actor(made, RandomPolicy(space), store, seed=3).run(episodes=4)
        assert stats.rows == 4
        batch = gt.fetch(store, store.keys(), output="numpy")
        assert batch.length.tolist() == [51] * 4
        assert not batch["terminated"].any(), "50 steps are a limit of time"
        apart = np.linalg.norm(batch["obs.achieved_goal"] - batch["obs.desired_goal"], axis=-1)
        assert np.array_equal(batch["reward"][:, :50], -(apart[:, 1:] > 0.05).astype("float32"))


class Possible:
    """Draws from the actions that are possible."""

    version = 0

    def __init__(self):
        self._rng = np.random.default_rng(0)

    def act(self, obs):
        return (self._rng.random(obs["available"].shape) * obs["available"]).argmax(-1), {}


@pytest.mark.slow  # JAX compiles for many seconds
@pytest.mark.timeout(300)
def test_battles_end_with_the_damage_that_was_done(store_name):
    pytest.importorskip("jaxmarl", reason="SMAX is an extra: pip install 'geartrain[smax]'")
    made = environments.make("smax/3m", n=8)
    assert (made.agents, made.actions) == (3, 8)
    with gt.Store.create(store_name(), recorded_fields(made.fields()), max_length=101, capacity=100) as store:
        actor = Actor(made, Possible(), store, seed=5)
        stats = actor.run(episodes=24)
        batch = gt.fetch(store, store.keys(), output="numpy")
        returns = batch["reward"].sum(1)
        assert sorted(returns)[-24:] == pytest.approx(sorted(stats.returns)[-24:], abs=1e-5)
        assert ((returns > 0) & (returns < 2.001)).all()
        assert batch["terminated"].sum(1).tolist() == [1] * len(returns), "on 3m somebody dies within 100 steps"
        living = batch["obs.available"].any(-1)
        assert living[batch.mask].all(), "there is always something to do, if only to stop"
        first = gt.fetch(store, store.keys(), output="numpy", window=1, ends=np.zeros(len(returns), int))
        assert len(np.unique(first["obs.state"][:, 0], axis=0)) == len(returns), "every battle begins elsewhere"
    seen: list[list[dict[str, np.ndarray]]] = []
    for _ in range(2):
        seen.append([made.reset(7)])
        for _ in range(3):
            seen[-1].append(made.step(np.argmax(seen[-1][-1]["available"], -1)).next)
    for one, other in zip(*seen, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one), "a seed repeats its battles"
    with pytest.raises(ArgumentError, match="2s3z"):
        environments.make("smax/4m")


def test_worlds_of_bodies_begin_anew_alone_and_together(store_name):
    pytest.importorskip("vmas", reason="VMAS is an extra: pip install 'geartrain[vmas]'")
    made = environments.make("vmas/balance", n=6, max_steps=40)
    first = made.reset(1)
    assert np.array_equal(first, made.reset(1)) and not np.array_equal(first, made.reset(2))
    rng = np.random.default_rng(0)
    obs, fell, cut = made.reset(1), 0, 0
    for _ in range(60):
        stepped = made.step(rng.uniform(-1, 1, (6, made.agents, made.actions)))
        over = stepped.terminated | stepped.truncated
        same = (stepped.next == stepped.obs).all((1, 2))
        assert (same == ~over).all(), "where an episode ended, another has begun"
        assert stepped.reward.shape == (6, made.agents)
        fell, cut = fell + stepped.terminated.sum(), cut + stepped.truncated.sum()
    assert fell + cut >= 6
    assert obs.dtype == np.float32
    with pytest.raises(ArgumentError, match="navigation"):
        environments.make("vmas/nothing")


def test_an_unknown_task_is_an_error():
    pytest.importorskip("mujoco", reason="MuJoCo is an extra: pip install 'geartrain[mujoco]'")
    with pytest.raises(ArgumentError, match="Hoppper"):
        environments.make("mujoco/Hoppper-v5")


def test_atari_keeps_each_frame_once_and_the_last_one_of_an_episode(store_name):
    pytest.importorskip("ale_py", reason="ALE is an extra: pip install 'geartrain[atari]'")
    from gymnasium.spaces import Discrete

    made = environments.make("atari/breakout", n=3)
    with gt.Store.create(store_name(), recorded_fields(made.fields()), max_length=400, capacity=20) as store:
        assert store.fields["obs.frame"] == gt.Field((42, 40), "uint8")
        actor = Actor(made, RandomPolicy(Discrete(made.actions)), store, seed=3)
        actor.run(episodes=4)
        batch = gt.fetch(store, store.keys(), output="numpy")
        for row, length in enumerate(batch.length):
            ages = batch["obs.age"][row, :length]
            assert ages.tolist() == list(range(length)), "a row is one episode from its first frame to its last"
            frames = batch["obs.frame"][row, :length].reshape(length, -1).astype(int)
            moved = np.abs(np.diff(frames, axis=0)).max(1) > 0
            assert moved.mean() > 0.5, "frames follow one another"
            assert batch["terminated"][row].sum() == 1
            assert batch["terminated"][row, length - 2]
        actor.close()


def test_a_small_atari_frame_has_the_means_of_the_large_ones_pixels():
    pytest.importorskip("ale_py", reason="ALE is an extra: pip install 'geartrain[atari]'")
    large, small = (environments.make("atari/pong", shrink=shrink) for shrink in ((1, 1), (5, 4)))
    seen = [(large.reset(seed=1), small.reset(seed=1))]
    for action in range(6):
        pair = (games.step(np.array([action])) for games in (large, small))
        seen.append(tuple(each.obs for each in pair))
    for one, other in seen:
        means = one["frame"][0].reshape(42, 5, 40, 4).mean((1, 3))
        assert (other["frame"][0] == np.floor(means)).all()


def test_atari_episodes_repeat_with_their_seed():
    pytest.importorskip("ale_py", reason="ALE is an extra: pip install 'geartrain[atari]'")
    rng = np.random.default_rng(0)
    actions = rng.integers(6, size=(150, 2))
    seen = []
    for _ in range(2):
        games = environments.make("atari/pong", n=2, shrink=(2, 2), sign_rewards=False)
        assert games.reset(seed=2**31)["frame"].shape == (2, 105, 80)
        seen.append([games.step(each) for each in actions])
        games.close()
    for first, second in zip(*seen, strict=True):
        assert (first.obs["frame"] == second.obs["frame"]).all()
        assert (first.reward == second.reward).all()
    assert sum(each.reward.sum() for each in seen[0]) < 0, "a random player loses points"
    other = environments.make("atari/pong", n=2, shrink=(2, 2))
    other.reset(seed=5)
    assert any((other.step(a).obs["frame"] != s.obs["frame"]).any() for a, s in zip(actions, seen[0], strict=True))
    with pytest.raises(ArgumentError, match="no ROM named 'Pong'"):
        environments.make("atari/Pong")
    with pytest.raises(ArgumentError, match="210 lines"):
        environments.make("atari/pong", shrink=(4, 4))
