"""Stable-Baselines3's replay buffers over a store: what was added is what is sampled, by whichever process."""

from __future__ import annotations

import os
import sys
import tracemalloc
from pathlib import Path

import gymnasium as gym
import numpy as np
import preloaded
import pytest
import torch
from deadlines import patience
from gymnasium import spaces
from sb3_streams import ACT, DICT, OBS, Stream, as_dict, check_sample
from stable_baselines3 import SAC
from stable_baselines3.common import buffers as stock
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from geartrain.errors import (
    ArgumentError,
    IncompatibleStoreError,
    NotEnoughRowsError,
    SchemaError,
    StaleKeyError,
    StoreClosedError,
)
from geartrain.integrations.sb3 import (
    DictReplayBuffer,
    NStepReplayBuffer,
    ReplayBuffer,
)

pytestmark = pytest.mark.usefixtures("seeded")


@pytest.mark.parametrize("n_envs", [1, 2, 5])
def test_transitions_are_those_that_were_added(n_envs, no_stock_code):
    buffer = ReplayBuffer(300, OBS, ACT, n_envs=n_envs)
    stream = Stream(n_envs)
    stream.add(buffer, 400 // n_envs)
    batch = buffer.sample(256)
    check_sample(batch)
    assert batch.observations.shape == (256, 3)
    assert batch.dones.shape == batch.rewards.shape == (256, 1)
    assert batch.discounts is None
    over = batch.dones[:, 0] == 1
    t = (batch.observations[:, 0] % 100_000).long()
    assert over.any()
    assert (t[over] % 2 == 1).all(), "an episode that was cut off counts as terminated"


def test_an_episode_that_was_cut_off_does_not_lead_into_the_next_one(no_stock_code):
    buffer = ReplayBuffer(1000, OBS, ACT, n_envs=1)
    Stream(1, lengths=(5,)).add(buffer, 300)
    batch = buffer.sample(4000)
    check_sample(batch)  # the next episode begins 50 further on
    assert len(torch.unique(batch.observations[:, 0])) == 300


def test_every_transition_is_equally_likely(no_stock_code):
    buffer = ReplayBuffer(64, OBS, ACT, n_envs=1)
    Stream(1, lengths=(6,)).add(buffer, 200)
    drawn = torch.cat([buffer.sample(500).observations[:, 0] for _ in range(40)])
    values, counts = torch.unique(drawn, return_counts=True)
    assert 64 <= len(values) <= 64 + 64 // 8 + 3 * 16
    expected = len(drawn) / len(values)
    assert ((counts - expected) ** 2 / expected).sum() < len(values) + 6 * (2 * len(values)) ** 0.5


@pytest.mark.parametrize("n_steps", [1, 3, 6])
def test_n_step_returns_end_with_the_episode(n_steps, no_stock_code):
    buffer = NStepReplayBuffer(400, OBS, ACT, n_envs=2, n_steps=n_steps, gamma=0.9)
    stream = Stream(2, lengths=(7, 50))
    stream.add(buffer, 150)
    batch = buffer.sample(512)
    check_sample(batch, gamma=0.9, n_steps=n_steps)
    count = (batch.next_observations - batch.observations)[:, :1]
    assert torch.allclose(batch.discounts, 0.9**count)
    first = batch.observations[:, 0] < 100_000
    if n_steps > 1:
        assert (count[first] < n_steps).any()
        assert (count[first] == n_steps).any()


def test_n_step_transitions_are_equally_likely_across_rows(no_stock_code):
    buffer = NStepReplayBuffer(200, OBS, ACT, n_envs=1, n_steps=4)
    Stream(1, lengths=(1000,)).add(buffer, 200)  # rows of 16 + 5 steps
    drawn = torch.cat([buffer.sample(500).observations[:, 0] for _ in range(40)])
    values, counts = torch.unique(drawn, return_counts=True)
    assert values.tolist() == list(range(197))  # the last three still lack steps
    expected = len(drawn) / len(values)
    assert ((counts - expected) ** 2 / expected).sum() < len(values) + 6 * (2 * len(values)) ** 0.5


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_few_transitions_can_be_sampled_at_once(steps, no_stock_code):
    for buffer in (ReplayBuffer(100, OBS, ACT), NStepReplayBuffer(100, OBS, ACT, n_steps=5)):
        Stream(1, lengths=(100,)).add(buffer, steps)
        seen = buffer.sample(200).observations[:, 0]
        assert set(seen.tolist()) == set(range(steps))


def test_a_dict_observation_is_kept_with_its_dtypes(no_stock_code):
    buffer = DictReplayBuffer(100, DICT, ACT, n_envs=2, optimize_memory_usage=True)
    Stream(2).add(buffer, 60, as_dict)
    batch = buffer.sample(64)
    assert batch.observations["picture"].dtype == torch.uint8
    assert torch.equal(batch.next_observations["position"], batch.observations["position"] + 1)
    assert torch.equal(batch.observations["picture"][:, 0, 0], batch.observations["position"][:, 0].to(torch.uint8))
    with pytest.raises(ArgumentError, match="Dict obs space"):
        DictReplayBuffer(100, OBS, ACT)


def test_positions_are_those_of_the_stock_class():
    mine, theirs = ReplayBuffer(60, OBS, ACT, n_envs=2), stock.ReplayBuffer(60, OBS, ACT, n_envs=2)
    Stream(2).add(mine, 47)
    Stream(2).add(theirs, 47)
    assert (mine.pos, mine.full, mine.size()) == (theirs.pos, theirs.full, theirs.size()) == (17, True, 30)
    for name in ("observations", "next_observations", "actions", "rewards", "dones", "timeouts"):
        assert np.array_equal(getattr(mine, name), getattr(theirs, name)), name
    batch = mine._get_samples(np.arange(30))
    rows = np.arange(30)
    first = (batch.observations[:, 0] >= 100_000).long().numpy()
    assert np.array_equal(batch.observations, theirs.observations[rows, first])


def test_a_flag_that_is_set_is_in_the_store(no_stock_code):
    buffer = ReplayBuffer(100, OBS, ACT, n_envs=2)
    Stream(2, lengths=(1000,)).add(buffer, 40)
    assert not np.asarray(buffer.dones).any()
    buffer.dones[buffer.pos - 1] = True
    buffer.dones[3, 1] = True
    buffer.timeouts[3, 1] = 1.0
    expected = np.zeros((50, 2), np.float32)
    expected[39] = 1
    expected[3, 1] = 1
    assert np.array_equal(buffer.dones, expected)
    assert buffer.timeouts[3, 1] == 1
    batch = buffer.sample(2000)
    assert set((batch.observations[:, 0][batch.dones[:, 0] == 1] % 100_000).tolist()) == {39}
    assert len(torch.unique(batch.observations[:, 0])) == 80
    with pytest.raises(ArgumentError, match="nothing was added"):
        buffer.dones[45] = True


def test_a_flag_of_transitions_that_are_gone_is_refused_and_none_is_set():
    buffer = ReplayBuffer(1000, OBS, ACT, n_envs=1)
    Stream(1, lengths=(10_000,)).add(buffer, 1000)
    oldest = buffer.store.keys()[:1]
    buffer.store.delete(oldest)
    for positions in (0, slice(None)):
        with pytest.raises(ArgumentError, match="position 0 was removed or evicted"):
            buffer.dones[positions] = True
    assert not np.asarray(buffer.dones).any()
    buffer.dones[999] = True
    assert np.flatnonzero(buffer.dones).tolist() == [999]


def test_no_array_of_the_buffers_size_is_outside_the_store(no_stock_code):
    space = spaces.Box(0, 255, (64, 64), np.uint8)
    tracemalloc.start()
    try:
        buffer = ReplayBuffer(1500, space, ACT)
        frame = np.zeros((1, 64, 64), np.uint8)
        for t in range(1500):
            following = np.full((1, 64, 64), (t + 1) % 250, np.uint8)
            buffer.add(frame, following, np.zeros((1, 2), np.float32), np.zeros(1), np.array([t % 100 == 99]), [{}])
            frame = following
        buffer.sample(8)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 1500 * 64 * 64 / 10
    assert kept < 1_000_000
    assert buffer.store.nbytes < 1.4 * 1500 * 64 * 64, "frames are stored more than once"


OTHER = """
import sys
import numpy as np
from gymnasium import spaces
from geartrain.integrations.sb3 import ReplayBuffer
OBS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
np.random.seed(0)
buffer = ReplayBuffer(500, OBS, spaces.Box(-1, 1, (2,), np.float32), store=sys.argv[1], writers=2)
batch = buffer.sample(3000)
assert (batch.next_observations == batch.observations + 1).all()
assert sorted(set(batch.observations[:, 0].tolist())) == list(range(100)), "not what the other process added"
assert (batch.dones[:, 0] == 1).sum() == (batch.observations[:, 0] == 99).sum()
for t in range(5000, 5100):
    buffer.add(np.full((1, 3), t), np.full((1, 3), t + 1), np.zeros((1, 2)), np.zeros(1), np.zeros(1, bool), [{}])
assert buffer.pos == 100
"""


def test_two_processes_add_to_one_buffer_and_read_the_same_transitions(tmp_path, no_stock_code):
    name = f"sb3-{tmp_path.name}-{id(tmp_path)}"
    buffer = ReplayBuffer(500, OBS, ACT, store=name, writers=2)
    try:
        for t in range(100):
            done = np.array([t == 99])
            buffer.add(np.full((1, 3), t), np.full((1, 3), t + 1), np.zeros((1, 2)), np.zeros(1), done, [{}])
        script = tmp_path / "other.py"
        script.write_text(OTHER)
        other = preloaded.run([sys.executable, str(script), name], timeout=patience(100))
        assert other.returncode == 0, other.stderr
        batch = buffer.sample(3000)
        assert torch.equal(batch.next_observations, batch.observations + 1)
        assert set(batch.observations[:, 0].tolist()) == {*range(100), *range(5000, 5100)}
        assert buffer.pos == 100
        assert np.array_equal(buffer.observations[:100, 0, 0], np.arange(100))
        with pytest.raises(IncompatibleStoreError):
            ReplayBuffer(500, spaces.Box(-1, 1, (4,)), ACT, store=name)
    finally:
        buffer.close()
    assert not buffer.store.path.exists()


def test_a_store_of_another_size_is_not_joined(tmp_path):
    name = f"sb3-size-{tmp_path.name}-{id(tmp_path)}"
    buffer = ReplayBuffer(20_000, OBS, ACT, store=name, reserve=False)
    for size, options in ((100_000, {}), (10_000, {}), (20_000, {"writers": 3}), (400, {})):
        with pytest.raises(IncompatibleStoreError):
            ReplayBuffer(size, OBS, ACT, store=name, **options)
        with pytest.raises(IncompatibleStoreError, match="another capacity"):
            ReplayBuffer(size, OBS, ACT, store=buffer.store, **options)
    beside = ReplayBuffer(20_000, OBS, ACT, store=name)
    assert beside.store.id == buffer.store.id
    beside.close()
    buffer.close()
    several = ReplayBuffer(400, OBS, ACT, n_envs=2, writers=4)
    ReplayBuffer(400, OBS, ACT, n_envs=2, store=several.store)
    several.close()


@pytest.mark.slow
def test_the_example_runs():
    script = Path(__file__).parents[2] / "examples" / "sb3_sac.py"
    done = preloaded.run([sys.executable, str(script), "--steps", "110", "--evaluations", "1"], timeout=patience(100))
    assert done.returncode == 0, done.stderr
    assert "mean return -" in done.stdout


@pytest.mark.slow
def test_the_same_seed_gives_the_same_training(no_stock_code):
    def weights() -> torch.Tensor:
        options = {"buffer_size": 300, "learning_starts": 20, "policy_kwargs": {"net_arch": [8]}, "seed": 3}
        model = SAC("MlpPolicy", "Pendulum-v1", replay_buffer_class=ReplayBuffer, **options)
        model.learn(40)
        return torch.cat([each.flatten() for each in model.policy.parameters()])

    assert torch.equal(weights(), weights())


def test_observations_and_rewards_are_normalized_as_by_the_stock_class():
    env = VecNormalize(DummyVecEnv([lambda: gym.make("Pendulum-v1")]))
    env.reset()
    for _ in range(20):
        env.step(np.array([env.action_space.sample()]))
    mine, theirs = (cls(50, env.observation_space, env.action_space) for cls in (ReplayBuffer, stock.ReplayBuffer))
    for t in range(50):
        given = np.full((1, 3), t, np.float32), np.full((1, 3), t + 1, np.float32)
        for buffer in (mine, theirs):
            buffer.add(*given, np.zeros((1, 1)), np.full(1, t), np.zeros(1, bool), [{}])
    ours, stocks = mine._get_samples(np.arange(50), env), theirs._get_samples(np.arange(50), env)
    for name in ("observations", "next_observations", "rewards", "dones", "actions"):
        assert torch.allclose(getattr(ours, name), getattr(stocks, name)), name
        assert getattr(ours, name).dtype == getattr(stocks, name).dtype
    drawn = mine.sample(64, env)
    assert drawn.rewards.abs().max() <= env.clip_reward


def test_an_empty_buffer_says_so_and_gives_zeros_where_it_was_told_to_be_full():
    buffer = ReplayBuffer(10, OBS, ACT)
    with pytest.raises(NotEnoughRowsError, match="empty"):
        buffer.sample(4)
    buffer.full = True
    batch = buffer.sample(4)
    assert not batch.observations.any()
    assert batch.observations.shape == (4, 3)
    buffer.full = False
    Stream(1).add(buffer, 5)
    buffer.reset()
    assert (buffer.pos, buffer.full, len(buffer.store)) == (0, False, 0)
    with pytest.raises(NotEnoughRowsError):
        buffer.sample(4)
    Stream(1).add(buffer, 5)
    check_sample(buffer.sample(4))


def test_a_forked_child_adds_transitions_of_its_own():
    buffer = ReplayBuffer(500, OBS, ACT, writers=2)
    Stream(1, lengths=(1000,)).add(buffer, 20)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            stream = Stream(1, lengths=(1000,))
            stream.t += 500
            stream.add(buffer, 20)
            code = 0 if buffer.pos == 20 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert buffer.pos == 20
    assert set(buffer.sample(1000).observations[:, 0].tolist()) == {*range(20), *range(500, 520)}


def test_a_transition_of_other_shapes_is_refused_and_nothing_is_added():
    buffer = ReplayBuffer(100, OBS, ACT, n_envs=2)
    given = {"obs": (2, 3), "next_obs": (2, 3), "action": (2, 2), "reward": (2,), "done": (2,)}
    for name, shape in (("obs", (2, 4)), ("next_obs", (3, 3)), ("action", (2, 3)), ("reward", (2, 2)), ("done", (3,))):
        with pytest.raises(SchemaError, match="shape"):
            buffer.add(**{each: np.zeros(shape if each == name else given[each]) for each in given}, infos=[{}, {}])
    assert buffer.pos == 0
    with pytest.raises(NotEnoughRowsError):
        buffer.sample(1)
    buffer.close()


def test_what_means_nothing_is_refused():
    for options in ({"buffer_size": 0}, {"buffer_size": 10, "writers": 0}, {"buffer_size": 10, "info_bytes": -1}):
        with pytest.raises(ArgumentError):
            ReplayBuffer(observation_space=OBS, action_space=ACT, **options)
    for options in ({"n_steps": 0}, {"gamma": 1.5}):
        with pytest.raises(ArgumentError):
            NStepReplayBuffer(10, OBS, ACT, **options)
    nested = spaces.Dict({"camera": OBS, "arm": spaces.Dict({"joints": OBS})})
    with pytest.raises(SchemaError, match=r"the observation 'arm' is a Dict space .* such as 'arm\.joints'"):
        DictReplayBuffer(10, nested, ACT)
    buffer = ReplayBuffer(10, OBS, ACT)
    with pytest.raises(ArgumentError):
        buffer.sample(0)
    with pytest.raises(SchemaError, match="shape"):
        buffer.add(np.zeros((1, 4)), np.zeros((1, 4)), np.zeros((1, 2)), np.zeros(1), np.zeros(1), [{}])
    Stream(1).add(buffer, 5)
    with pytest.raises(ArgumentError, match="nothing was added"):
        buffer._get_samples(np.array([7]))
    with pytest.raises(ArgumentError, match="other fields"):
        DictReplayBuffer(10, DICT, ACT, store=buffer.store)
    buffer.close()
    buffer.close()
    with pytest.raises(StoreClosedError):
        buffer.sample(2)
    with pytest.raises(StoreClosedError):
        Stream(1).add(buffer, 1)


def test_what_was_overwritten_is_no_longer_found():
    buffer = ReplayBuffer(16, OBS, ACT)
    Stream(1, lengths=(5,)).add(buffer, 200)
    with pytest.raises(StaleKeyError):
        buffer.index.refresh()
        buffer.index.find(np.array([buffer.index.runs().number[0] - 1]))
