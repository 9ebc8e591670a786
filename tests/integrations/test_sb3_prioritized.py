"""Prioritized replay for Stable-Baselines3: transitions are drawn by their TD errors, and DQN learns from that."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
import torch
from deadlines import patience
from gymnasium import spaces

from geartrain.errors import ArgumentError, IncompatibleStoreError, NotEnoughRowsError, SchemaError
from geartrain.integrations.sb3 import PrioritizedDQN, PrioritizedReplayBuffer, ReplayBuffer

OBS = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACT = spaces.Box(-1, 1, (2,), np.float32)
DICT = spaces.Dict({"position": OBS})

pytestmark = pytest.mark.usefixtures("seeded")


def add(buffer: Any, ts: Any, episode: int = 7) -> None:
    """Transitions from t to t + 1; one of two environments is 1000 ahead, and every seventh ends an episode."""
    ahead = 1000 * np.arange(buffer.n_envs)
    for t in ts:
        obs = np.repeat((t + ahead)[:, None], 3, 1).astype(np.float32)
        done = np.full(buffer.n_envs, t % episode == episode - 1)
        given, following = ({"position": o} if buffer._is_dict else o for o in (obs, obs + 1))
        buffer.add(given, following, obs[:, :2], obs[:, 0], done, [{} for _ in range(buffer.n_envs)])


def drawn(batch: Any) -> np.ndarray:
    return batch.observations[:, 0].numpy().astype(np.int64)


def set_errors(buffer: Any, error: Any, n: int = 2000) -> None:
    """The TD error of every transition, as a function of the observation; those that are rarely drawn too."""
    for _ in range(3):
        batch = buffer.sample(n)
        assert buffer.update_priorities(batch.keys, error(batch.observations[:, :1])) == 0


@pytest.mark.parametrize("n_envs", [1, 2])
def test_transitions_are_drawn_in_proportion_to_their_errors(n_envs):
    buffer = PrioritizedReplayBuffer(200, OBS, ACT, n_envs=n_envs, alpha=0.5, beta=0.7, min_priority=1e-3)
    add(buffer, range(60))
    set_errors(buffer, lambda t: -((t % 10) ** 2) / 20)
    counts: dict[int, int] = {}
    n = 0
    for _ in range(20):
        batch = buffer.sample(1000)
        assert torch.equal(batch.next_observations, batch.observations + 1)
        assert torch.equal(batch.rewards, batch.observations[:, :1])
        assert batch.discounts is None
        for t in drawn(batch):
            counts[int(t)] = counts.get(int(t), 0) + 1
        n += 1000
    every = [t + 1000 * e for e in range(n_envs) for t in range(60)]
    share = {t: ((t % 10) ** 2 / 20 + 1e-3) ** 0.5 for t in every}
    expected = {t: n * each / sum(share.values()) for t, each in share.items()}
    distance = sum((counts.get(t, 0) - expected[t]) ** 2 / expected[t] for t in every)
    assert distance < len(every) + 5 * (2 * len(every)) ** 0.5, "not in proportion"
    weights = np.array([(share[int(t)]) ** -0.7 for t in drawn(batch)])
    assert batch.weights.shape == (1000, 1)
    assert np.allclose(batch.weights[:, 0], weights / weights.max(), rtol=0.02)


def test_a_new_transition_has_the_priority_of_the_largest_error():
    buffer = PrioritizedReplayBuffer(400, OBS, ACT, alpha=1.0)
    add(buffer, range(100))
    set_errors(buffer, lambda t: torch.where(t == 50, 40.0, 1e-3))
    assert buffer.max_priority == pytest.approx(40)
    add(buffer, [100])
    found = np.bincount(drawn(buffer.sample(4000)), minlength=101)
    assert found[50] + found[100] > 3900
    assert abs(found[50] - found[100]) < 400
    set_errors(buffer, lambda t: torch.full_like(t, 1e-3))
    buffer.store.reset_max_priority()
    assert buffer.max_priority == pytest.approx(1e-3, rel=0.02)
    add(buffer, [101])
    assert np.count_nonzero(drawn(buffer.sample(4000)) == 101) < 200


def test_small_errors_make_new_transitions_as_small():
    buffer = PrioritizedReplayBuffer(400, OBS, ACT, alpha=1.0)
    add(buffer, range(100))
    assert buffer.max_priority == pytest.approx(1, rel=1e-4)
    set_errors(buffer, lambda t: torch.where(t == 50, 2e-3, 1e-3))
    add(buffer, [100])
    assert np.count_nonzero(drawn(buffer.sample(4000)) == 100) < 200


@pytest.mark.parametrize("n_steps", [1, 3])
def test_an_error_goes_to_the_transition_that_it_is_of(n_steps):
    buffer = PrioritizedReplayBuffer(300, OBS, ACT, n_steps=n_steps, gamma=0.5, alpha=1.0)
    add(buffer, range(100))
    for chosen in (3, 40, 69, 90):
        for _ in range(3):
            batch = buffer.sample(3000)
            buffer.update_priorities(batch.keys, torch.where(batch.observations[:, 0] == chosen, 1000.0, 1e-2))
        batch = buffer.sample(500)
        assert np.count_nonzero(drawn(batch) == chosen) > 490, chosen
        count = min(n_steps, 7 - chosen % 7)
        at = int(np.flatnonzero(drawn(batch) == chosen)[0])
        assert batch.next_observations[at, 0] == chosen + count
        assert batch.rewards[at, 0] == sum(0.5**k * (chosen + k) for k in range(count))
        if n_steps > 1:
            assert batch.discounts[at, 0] == 0.5**count
        buffer.update_priorities(batch.keys, np.full(500, 1e-2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int32])
def test_errors_are_tensors_of_any_type_of_numbers(dtype):
    buffer = PrioritizedReplayBuffer(50, OBS, ACT, alpha=1.0, min_priority=1e-3)
    add(buffer, range(5))
    keys = buffer.sample(4).keys
    assert (
        buffer.update_priorities(keys, torch.full((4, 1), -3, dtype=dtype, requires_grad=dtype.is_floating_point)) == 0
    )
    assert np.allclose(buffer.store.status(keys)["priority"], 3.001, atol=1e-4)


def test_errors_of_transitions_that_are_gone_are_counted_and_change_nothing():
    buffer = PrioritizedReplayBuffer(50, OBS, ACT)
    add(buffer, range(50))
    batch = buffer.sample(64)
    add(buffer, range(1000, 1400))
    assert buffer.update_priorities(batch.keys, np.full(64, 1e6)) == 64
    counts = np.bincount(drawn(buffer.sample(4000)) - 1000)
    assert counts.max() < 0.1 * counts.sum()
    assert not buffer.store.audit()


@pytest.mark.parametrize("uneven", [False, True])
def test_weights_of_a_batch_go_by_one_total_while_steps_without_a_transition_are_found(uneven):
    buffer = PrioritizedReplayBuffer(1000, OBS, ACT, alpha=1.0, beta=1.0, min_priority=1e-3)
    for t in range(200):  # every other step only has the observation that the next one begins with
        buffer.writer.priority = 2.001 if uneven and t % 2 else 1.001
        add(buffer, [2 * t], episode=1)
    for _ in range(4):
        batch = buffer.sample(256)
        share = np.where(uneven & (drawn(batch) % 4 == 2), 2.001, 1.001)
        assert np.allclose(batch.weights[:, 0], share.min() / share, rtol=1e-5)


def test_few_transitions_can_be_drawn_and_an_empty_buffer_says_so():
    buffer = PrioritizedReplayBuffer(50, OBS, ACT)
    with pytest.raises(NotEnoughRowsError):
        buffer.sample(4)
    add(buffer, [7])
    assert set(drawn(buffer.sample(64)).tolist()) == {7}
    waits = PrioritizedReplayBuffer(50, OBS, ACT, n_steps=3)
    add(waits, [7])  # its third step is to come
    for _ in range(3):
        with pytest.raises(NotEnoughRowsError):
            waits.sample(4)
    add(waits, [8, 9])
    assert set(drawn(waits.sample(64)).tolist()) == {7}


def test_a_pickle_and_a_flag_that_is_set_keep_priorities():
    buffer = PrioritizedReplayBuffer(300, OBS, ACT, alpha=1.0, n_envs=2)
    add(buffer, range(50))
    set_errors(buffer, lambda t: torch.where(t == 1020, 1000.0, 1e-2))
    twin = pickle.loads(pickle.dumps(buffer))
    assert twin.max_priority == buffer.max_priority == pytest.approx(1000)
    assert np.count_nonzero(drawn(twin.sample(500)) == 1020) > 480
    add(twin, [50])  # with the largest error so far
    assert set(drawn(twin.sample(500)).tolist()) >= {50, 1020, 1050}
    buffer.dones[20] = True
    batch = buffer.sample(500)
    assert np.count_nonzero(drawn(batch) == 1020) > 480
    assert batch.dones[drawn(batch) == 1020].all()


def test_beta_follows_the_progress_and_dict_observations_are_drawn():
    buffer = PrioritizedReplayBuffer(100, DICT, ACT, beta=0.4, final_beta=1.0)
    add(buffer, range(20))
    batch = buffer.sample(32)
    assert torch.equal(batch.next_observations["position"], batch.observations["position"] + 1)
    errors = 1 + batch.observations["position"][:, :1]
    for remaining, beta in ((1, 0.4), (0.5, 0.7), (0, 1.0)):
        buffer.update_priorities(batch.keys, errors, remaining)
        assert buffer.beta == pytest.approx(beta)
    buffer.beta = 0.0
    assert (buffer.sample(32).weights == 1).all()


def test_what_means_nothing_is_refused():
    for options in ({"alpha": -1}, {"beta": float("nan")}, {"final_beta": -1}, {"min_priority": 0}, {"n_steps": 0}):
        with pytest.raises(ArgumentError):
            PrioritizedReplayBuffer(10, OBS, ACT, **options)
    buffer, plain = PrioritizedReplayBuffer(50, OBS, ACT), ReplayBuffer(50, OBS, ACT)
    for cls, store in ((PrioritizedReplayBuffer, plain.store), (ReplayBuffer, buffer.store)):
        with pytest.raises(IncompatibleStoreError, match="priorities"):
            cls(50, OBS, ACT, store=store)
    add(buffer, range(20))
    batch = buffer.sample(4)
    before = buffer.store.status(batch.keys)["priority"]
    with pytest.raises(ArgumentError):
        buffer.update_priorities(batch.keys, np.ones(3))
    with pytest.raises(ArgumentError):
        buffer.update_priorities(batch.keys, np.ones(4), progress_remaining=2)
    with pytest.raises(SchemaError):
        buffer.update_priorities(batch.keys, [1, 2, 3, np.nan])
    assert np.array_equal(buffer.store.status(batch.keys)["priority"], before)
    assert buffer.max_priority == pytest.approx(1, rel=1e-4)
    with pytest.raises(ArgumentError, match="PrioritizedReplayBuffer"):
        PrioritizedDQN("MlpPolicy", "CartPole-v1", replay_buffer_class=ReplayBuffer)


class Weightless(PrioritizedReplayBuffer):
    """Importance weights of zero."""

    def samples_of(self, windows: Any, env: Any) -> Any:
        batch = super().samples_of(windows, env)
        return batch._replace(weights=torch.zeros_like(batch.weights))


def dqn(**options: Any) -> PrioritizedDQN:
    small = {"learning_starts": 32, "policy_kwargs": {"net_arch": [16]}, "buffer_size": 500, "seed": 0}
    return PrioritizedDQN("MlpPolicy", "CartPole-v1", 1e-3, **{**small, **options})


def test_the_loss_is_weighted_and_errors_become_priorities():
    torch.set_num_threads(1)
    model = dqn(n_steps=2)
    before = [each.clone() for each in model.q_net.parameters()]
    model.learn(120)
    assert model.replay_buffer.n_steps == 2
    assert model.replay_buffer.beta > 0.9
    keys = model.replay_buffer.sample(200).keys
    assert np.ptp(model.replay_buffer.store.status(keys)["priority"]) > 0.1
    assert not torch.equal(before[0], model.q_net.state_dict()["q_net.0.weight"])
    model = dqn(replay_buffer_class=Weightless)
    before = [each.clone() for each in model.q_net.parameters()]
    model.learn(60)
    assert all(map(torch.equal, before, model.q_net.parameters())), "the loss goes by something else than the weights"


@pytest.mark.slow
def test_prioritized_dqn_learns_cartpole_as_the_example_has_it():
    script = Path(__file__).parents[2] / "examples" / "sb3_prioritized_dqn.py"
    done = preloaded.run([sys.executable, str(script)], timeout=patience(200))
    assert done.returncode == 0, done.stderr
    found = re.search(r"mean return (\d+\.\d)", done.stdout)
    assert found is not None, done.stdout
    assert float(found[1]) > 100  # a random policy's is 22
