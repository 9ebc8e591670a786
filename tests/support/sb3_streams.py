"""What tests of Stable-Baselines3's buffers add and look for: transitions whose every number says where it is from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

OBS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACT = spaces.Box(-1, 1, (2,), np.float32)
DICT = spaces.Dict({"position": OBS, "picture": spaces.Box(0, 255, (4, 4), np.uint8)})


class Stream:
    """Episodes whose every number follows from (environment, t): obs = t + 1000 * environment, and so on."""

    def __init__(self, n_envs: int = 2, lengths: tuple[int, ...] = (7, 10), seed: int = 0) -> None:
        self.n_envs, self.lengths = n_envs, lengths
        self.t = np.zeros(n_envs, np.int64)  # of the observation that is acted on
        self.age = np.zeros(n_envs, np.int64)
        self.added = 0

    def observation(self, t: np.ndarray) -> np.ndarray:
        values = t + 100_000 * np.arange(self.n_envs)
        return np.repeat(values[:, None], 3, 1).astype(np.float32)

    def add(self, buffer: Any, steps: int, shape: Any = None) -> None:
        shape = shape or (lambda obs: obs)
        for _ in range(steps):
            following = self.t + 1
            self.age += 1
            over = self.age == np.array([self.lengths[e % len(self.lengths)] for e in range(self.n_envs)])
            cut = over & (self.t % 2 == 0)  # about half of the episodes end by the time limit
            obs, next_obs = self.observation(self.t), self.observation(following)
            action, reward = obs[:, :2] / 1e6, self.t.astype(np.float32)
            infos = [{"TimeLimit.truncated": bool(each)} for each in cut]
            buffer.add(shape(obs), shape(next_obs), action, reward, over, infos)
            self.t = np.where(over, following + 50, following)  # the next episode begins elsewhere
            self.age[over] = 0
            self.added += 1


def as_dict(obs: np.ndarray) -> dict[str, np.ndarray]:
    return {"position": obs, "picture": np.repeat(obs[:, :1], 16, 1).reshape(-1, 4, 4).astype(np.uint8)}


def check_sample(batch: Any, gamma: float = 1.0, n_steps: int = 1) -> None:
    obs, next_obs = batch.observations[:, 0], batch.next_observations[:, 0]
    t = obs % 100_000
    assert torch.allclose(batch.actions, batch.observations[:, :2] / 1e6)
    count = (next_obs - obs).to(torch.int64)
    assert (count >= 1).all()
    assert (count <= n_steps).all()
    for each in range(len(t)):
        rewards = [gamma**k * (float(t[each]) + k) for k in range(int(count[each]))]
        assert batch.rewards[each, 0] == pytest.approx(sum(rewards), rel=1e-5)
