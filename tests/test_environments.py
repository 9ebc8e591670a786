"""Environments of each family: really stepped, and what an actor records of them is what happened."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import geartrain as gt
from geartrain.actors import Actor, RandomPolicy, recorded_fields
from geartrain.errors import MissingDependencyError, SchemaError
from geartrain.integrations import environments


def test_a_name_without_a_family_is_an_error_that_lists_them():
    for name in ("Hopper-v5", "nothing/Hopper-v5", "mujoco/", ""):
        with pytest.raises(SchemaError, match="mujoco"):
            environments.make(name)
    with pytest.raises(SchemaError, match="at least 1"):
        environments.make("mujoco/Hopper-v5", 0)


@pytest.mark.parametrize("family", environments.FAMILIES)
def test_what_is_missing_is_an_error_with_the_line_that_installs_it(family, monkeypatch):
    monkeypatch.setitem(sys.modules, environments.FAMILIES[family], None)  # an import of it fails
    with pytest.raises(MissingDependencyError, match=rf"pip install 'geartrain\[{family}\]'"):
        environments.make(f"{family}/anything")


def test_hopper_episodes_are_recorded_whole(store_name):
    pytest.importorskip("mujoco", reason="MuJoCo is an extra: pip install 'geartrain[mujoco]'")
    made = environments.make("mujoco/Hopper-v5", n=3)
    import gymnasium

    space = gymnasium.make("Hopper-v5", disable_env_checker=True).action_space
    with gt.Store.create(store_name(), recorded_fields(made.fields(200), 200), capacity=50) as store:
        assert store.fields["observation"] == gt.Field((200, 11), "float64")
        actor = Actor(made, RandomPolicy(space), store, seed=3)
        stats = actor.run(episodes=6)
        assert stats.rows >= 6
        batch = gt.fetch(store, store.keys(), as_="numpy")
        assert np.isfinite(batch["observation"]).all()
        ends = batch["terminated"].sum(1)
        assert (ends == 1).all(), "a random policy falls within 200 steps, once an episode"
        actor.close()


def test_an_unknown_task_is_an_error():
    pytest.importorskip("mujoco", reason="MuJoCo is an extra: pip install 'geartrain[mujoco]'")
    with pytest.raises(SchemaError, match="Hoppper"):
        environments.make("mujoco/Hoppper-v5")


def test_atari_keeps_each_frame_once_and_the_last_one_of_an_episode(store_name):
    pytest.importorskip("ale_py", reason="ALE is an extra: pip install 'geartrain[atari]'")
    made = environments.make("atari/breakout", n=3, size=42)
    with gt.Store.create(store_name(), recorded_fields(made.fields(400), 400), capacity=20) as store:
        assert store.fields["observation.frame"] == gt.Field((400, 42, 42), "uint8")
        actor = Actor(made, RandomPolicy(made.action_space), store, seed=3)
        actor.run(episodes=4)
        batch = gt.fetch(store, store.keys(), as_="numpy")
        for row, length in enumerate(batch.length):
            ages = batch["observation.age"][row, :length]
            assert ages.tolist() == list(range(length)), "a row is one episode from its first frame to its last"
            frames = batch["observation.frame"][row, :length].reshape(length, -1).astype(int)
            moved = np.abs(np.diff(frames, axis=0)).max(1) > 0
            assert moved.mean() > 0.5, "frames follow one another"
            assert batch["terminated"][row].sum() == 1
            assert batch["terminated"][row, length - 2]
        actor.close()


def test_atari_episodes_repeat_with_their_seed():
    pytest.importorskip("ale_py", reason="ALE is an extra: pip install 'geartrain[atari]'")
    rng = np.random.default_rng(0)
    actions = rng.integers(6, size=(150, 2))
    seen = []
    for _ in range(2):
        games = environments.make("atari/pong", n=2, size=42, sign_rewards=False)
        games.reset(seed=2**31 - 1)  # one past the largest that ALE takes, for the second game
        seen.append([games.step(each) for each in actions])
        games.close()
    for first, second in zip(*seen, strict=True):
        assert (first.observation["frame"] == second.observation["frame"]).all()
        assert (first.reward == second.reward).all()
    assert sum(each.reward.sum() for each in seen[0]) < 0, "a random player loses points"
    with pytest.raises(SchemaError, match="no ROM named 'Pong'"):
        environments.make("atari/Pong")
