"""Stable-Baselines3's hindsight buffer over a store: goals are what the same episode achieved."""

from __future__ import annotations

import pickle
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from geartrain.errors import (
    ArgumentError,
)
from geartrain.integrations.sb3 import (
    HerReplayBuffer,
)

pytestmark = pytest.mark.usefixtures("seeded")


class Line(gym.Env[Any, Any]):
    """A goal-conditioned line: the achieved goal is the number of the step, unique over all episodes."""

    def __init__(self, length: int = 8) -> None:
        box = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.observation_space = spaces.Dict(dict.fromkeys(("observation", "achieved_goal", "desired_goal"), box))
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self.length, self.t = length, -1000
        self.infos: list[Any] = []

    def _obs(self) -> dict[str, np.ndarray]:
        at = np.array([self.t], np.float32)
        return {"observation": at, "achieved_goal": at, "desired_goal": np.array([-1.0], np.float32)}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = (self.t // 1000 + 1) * 1000
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._obs(), -1.0, self.t % 1000 == self.length, False, {"t": self.t}

    def compute_reward(self, achieved: np.ndarray, desired: np.ndarray, infos: Any) -> np.ndarray:
        self.infos = list(infos)
        return (achieved[:, 0] * 10 + (achieved[:, 0] == desired[:, 0])).astype(np.float32)


def filled(strategy: str, steps: int = 100, **options: Any) -> tuple[HerReplayBuffer, Any]:
    env = DummyVecEnv([Line])
    buffer = HerReplayBuffer(
        200, env.observation_space, env.action_space, env, goal_selection_strategy=strategy, **options
    )
    obs = env.reset()
    for _ in range(steps):
        following, reward, done, infos = env.step(np.zeros((1, 2)))
        real = {name: value.copy() for name, value in following.items()}
        if done[0]:
            real = {name: infos[0]["terminal_observation"][name][None] for name in real}
        buffer.add(obs, real, np.zeros((1, 2)), reward, done, infos)
        obs = {name: value.copy() for name, value in following.items()}
    return buffer, env


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_goals_are_what_the_same_episode_achieved(strategy, no_stock_code):
    buffer, _ = filled(strategy, n_sampled_goal=3)
    batch = buffer.sample(800)
    at, goal = batch.observations["observation"][:, 0], batch.observations["desired_goal"][:, 0]
    assert torch.equal(batch.next_observations["observation"][:, 0], at + 1)
    assert torch.equal(goal, batch.next_observations["desired_goal"][:, 0])
    other = goal != -1
    assert other.sum() == 600
    assert torch.equal(batch.rewards[~other, 0], torch.full((200,), -1.0))
    at, goal, reward = at[other], goal[other], batch.rewards[other, 0]
    assert torch.equal(at // 1000, goal // 1000)
    assert torch.equal(reward, (at + 1) * 10 + (goal == at + 1))
    assert (at // 1000 < 12).all(), "the episode that goes on was drawn"
    if strategy == "future":
        assert (goal > at).all()
        assert set((goal - at).tolist()) == set(range(1, 9))
    elif strategy == "final":
        assert (goal % 1000 == 8).all()
    else:
        assert set((goal % 1000).tolist()) == set(range(1, 9))
    drawn = batch.observations["observation"][:, 0]
    assert len(torch.unique(drawn)) == 96


def test_infos_are_kept_for_the_rewards_of_other_goals(no_stock_code):
    buffer, env = filled("future", copy_info_dict=True, n_sampled_goal=3)
    batch = buffer.sample(400)
    given = [info["t"] for info in env.envs[0].unwrapped.infos]
    assert given == [int(t) + 1 for t in batch.observations["observation"][100:, 0]]
    assert buffer.infos[5, 0]["t"] == 6
    with pytest.raises(ArgumentError, match="info_bytes"):
        filled("future", copy_info_dict=True, info_bytes=4)


def test_episodes_that_are_truncated_can_be_drawn_and_those_that_go_on_cannot(no_stock_code):
    buffer, _ = filled("future", steps=5)
    with pytest.raises(RuntimeError, match="end of the first episode"):
        buffer.sample(10)
    with pytest.warns(UserWarning, match="will be truncated"):
        buffer.truncate_last_trajectory()
    assert buffer.dones[4, 0] == buffer.timeouts[4, 0] == 1
    assert buffer.ep_length[:5, 0].tolist() == [5] * 5
    batch = buffer.sample(200)
    assert set(batch.observations["observation"][:, 0].tolist()) == set(range(5))
    assert not batch.dones.any()


def test_episodes_that_cross_rows_are_whole(no_stock_code):
    env = DummyVecEnv([lambda: Line(70)])
    buffer = HerReplayBuffer(300, env.observation_space, env.action_space, env, goal_selection_strategy="final")
    obs = env.reset()
    for _ in range(300):  # rows of 18 transitions
        following, reward, done, infos = env.step(np.zeros((1, 2)))
        following = {name: value.copy() for name, value in following.items()}
        real = {
            name: infos[0]["terminal_observation"][name][None] if done[0] else following[name] for name in following
        }
        buffer.add(obs, real, np.zeros((1, 2)), reward, done, infos)
        obs = following
    goal = buffer.sample(500).observations["desired_goal"][:, 0]
    assert set((goal % 1000).tolist()) == {70.0, 999.0}  # -1 modulo 1000: as it was
    assert set(buffer.ep_length[:280, 0].tolist()) == {70}


def test_a_saved_hindsight_buffer_goes_on_with_its_episode(no_stock_code):
    buffer, _ = filled("future", steps=20)
    twin = pickle.loads(pickle.dumps(buffer))
    assert twin.env is None
    with pytest.raises(ArgumentError, match="set_env"):
        twin.sample(10)
    twin.set_env(buffer.env)
    assert np.array_equal(twin.ep_length, buffer.ep_length)
    twin.sample(10)
