"""Stable-Baselines3's replay buffers over a store, saved and loaded: nothing is lost, and rows stay few."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from sb3_streams import ACT, OBS, Stream, check_sample
from stable_baselines3 import SAC

from geartrain.integrations.sb3 import (
    NStepReplayBuffer,
    PrioritizedReplayBuffer,
    ReplayBuffer,
)

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda buffer: pickle.loads(pickle.dumps(buffer))])
def test_a_copy_holds_the_same_and_is_a_buffer_of_its_own(copied, no_stock_code):
    buffer = ReplayBuffer(60, OBS, ACT, n_envs=2)
    stream = Stream(2)
    stream.add(buffer, 47)
    twin = copied(buffer)
    assert (twin.pos, twin.full) == (buffer.pos, buffer.full)
    before = np.array(buffer.observations)
    assert np.array_equal(twin.observations, before)
    stream.add(twin, 5)
    assert np.array_equal(buffer.observations, before)
    assert not np.array_equal(twin.observations, before)
    check_sample(twin.sample(100))


@pytest.mark.parametrize("kind", ["plain", "n-step", "prioritized"])
def test_a_buffer_that_is_saved_after_every_few_additions_keeps_its_transitions(kind, no_stock_code):
    if kind == "plain":
        buffer: Any = ReplayBuffer(200, OBS, ACT, n_envs=2)
    elif kind == "n-step":
        buffer = NStepReplayBuffer(200, OBS, ACT, n_envs=2, n_steps=3, gamma=0.9)
    else:
        buffer = PrioritizedReplayBuffer(200, OBS, ACT, n_envs=2, n_steps=2, gamma=0.9)
    whole = ReplayBuffer(200, OBS, ACT, n_envs=2)
    streams = Stream(2, lengths=(9, 14)), Stream(2, lengths=(9, 14))
    for turn in range(36):
        for stream, each in zip(streams, (buffer, whole), strict=True):
            stream.add(each, 40 if turn in (5, 6) else 3 + turn % 5)
        buffer = pickle.loads(pickle.dumps(buffer))
        if turn == 25:
            buffer.sample(50)
    assert (buffer.pos, buffer.full) == (whole.pos, True)
    for name in ("observations", "next_observations", "actions", "rewards", "dones"):
        assert np.array_equal(getattr(buffer, name), getattr(whole, name)), name
    n_steps = {"plain": 1, "n-step": 3, "prioritized": 2}[kind]
    drawn = []
    for _ in range(20):
        batch = buffer.sample(300)
        check_sample(batch, 1.0 if n_steps == 1 else 0.9, n_steps)
        drawn.append(batch.observations[:, 0])
    there = np.array(whole.observations)[:, :, 0].reshape(-1)
    assert len(np.setdiff1d(there, torch.cat(drawn).numpy())) <= 2 * n_steps
    assert not buffer.store.audit()


@pytest.mark.parametrize("saved_at", [(62,), (41, 77), (29, 46, 76)])
def test_rows_of_all_environments_are_as_old_after_a_load_as_before(saved_at, no_stock_code):
    buffer, whole = (ReplayBuffer(2 * 25, OBS, ACT, n_envs=2) for _ in range(2))
    streams = Stream(2, lengths=(19, 23)), Stream(2, lengths=(19, 23))
    for turn in range(110):
        for stream, each in zip(streams, (buffer, whole), strict=True):
            stream.add(each, 1)
        if turn in saved_at:
            buffer = pickle.loads(pickle.dumps(buffer))
        if turn >= min(saved_at) and turn % 3 == 0:
            assert np.array_equal(buffer.observations, whole.observations), turn


def test_rows_that_are_joined_keep_priorities_and_goals():
    buffer: Any = PrioritizedReplayBuffer(200, OBS, ACT, alpha=1.0, min_priority=1e-9)
    stream = Stream(1)
    for _ in range(12):
        stream.add(buffer, 5)
        batch = buffer.sample(100)
        buffer.update_priorities(batch.keys, torch.where(batch.observations[:, 0] % 10 == 3, 50.0, 1e-6))
        buffer = pickle.loads(pickle.dumps(buffer))
        buffer.store.native.restore_max_priority(1)  # the least there is
    assert len(buffer.store) == 5  # of 60 transitions and 9 beginnings, 16 a row
    batch = buffer.sample(400)
    check_sample(batch)
    assert (batch.observations[:, 0] % 10 == 3).float().mean() > 0.95


@pytest.mark.slow
def test_a_model_saves_and_loads_its_buffer(tmp_path, no_stock_code):
    options = {"buffer_size": 300, "learning_starts": 20, "policy_kwargs": {"net_arch": [8]}, "seed": 0}
    model = SAC("MlpPolicy", "Pendulum-v1", replay_buffer_class=ReplayBuffer, **options)
    model.learn(40)
    kept = np.array(model.replay_buffer.observations)
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    model.replay_buffer.close()
    model.load_replay_buffer(tmp_path / "buffer.pkl")
    assert isinstance(model.replay_buffer, ReplayBuffer)
    assert np.array_equal(model.replay_buffer.observations, kept)
    model.learn(10)
    assert model.replay_buffer.pos == 50
