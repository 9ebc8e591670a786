"""Stable-Baselines3's replay buffers over a store: what was added is what is sampled, by whichever process."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import preloaded
import pytest
import torch
from deadlines import patience
from gymnasium import spaces
from stable_baselines3 import SAC
from stable_baselines3.common import buffers as stock
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
from stable_baselines3.her import her_replay_buffer

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
    HerReplayBuffer,
    NStepReplayBuffer,
    PrioritizedReplayBuffer,
    ReplayBuffer,
)

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


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Draws are seeded from NumPy's global generator."""
    np.random.seed(0)


@pytest.fixture
def no_stock_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the stock classes make arrays, add and sample with raises."""
    classes = [stock.ReplayBuffer, stock.DictReplayBuffer, stock.NStepReplayBuffer, her_replay_buffer.HerReplayBuffer]
    names = ("__init__", "add", "sample", "_get_samples", "_get_real_samples", "_get_virtual_samples", "_sample_goals")

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("code of the stock class ran")

    for cls in classes:
        for name in (*names, "truncate_last_trajectory", "_compute_episode_length"):
            if name in vars(cls):
                monkeypatch.setattr(cls, name, refused)
    for name in ("sample", "add", "reset"):
        monkeypatch.setattr(stock.BaseBuffer, name, refused)


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
        with pytest.raises(ArgumentError, match="position 0 is gone"):
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
        buffer.max_priority = 1e-6
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


@pytest.mark.slow
def test_the_example_runs():
    script = Path(__file__).parents[2] / "examples" / "sb3_sac.py"
    done = preloaded.run([sys.executable, str(script), "--steps", "110"], timeout=patience(100))
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


# --- hindsight ---------------------------------------------------------------------------------------------------


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


def test_what_was_overwritten_is_no_longer_found():
    buffer = ReplayBuffer(16, OBS, ACT)
    Stream(1, lengths=(5,)).add(buffer, 200)
    with pytest.raises(StaleKeyError):
        buffer.index.refresh()
        buffer.index.find(np.array([buffer.index.runs().number[0] - 1]))
