"""RLinf's replay buffer of trajectories over a store: what was added is what is sampled, by whichever process."""

from __future__ import annotations

import sys
import tracemalloc
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import preloaded
import pytest
import torch
from deadlines import patience
from rlinf_trajectories import check, drawn, labels, trajectory

import geartrain as gt
from geartrain.errors import (
    ArgumentError,
    EmptyBufferError,
    IncompatibleStoreError,
    SchemaError,
    StoreClosedError,
)
from geartrain.integrations.rlinf import TrajectoryReplayBuffer


@pytest.mark.parametrize("epochs", [0, 1, 2])
def test_samples_are_those_of_the_newest_trajectories(epochs):
    with TrajectoryReplayBuffer(sample_window_size=4) as buffer:
        for number in range(7):
            buffer.add_trajectories([trajectory(number, epochs=epochs)])
        batch = buffer.sample(64)
        assert len(check(batch)) == 64
        assert batch["versions"].dtype == torch.bfloat16 and batch["dones"].dtype == torch.bool
        assert list(batch) == [
            "actions", "rewards", "dones", "terminations", "truncations", "versions", "curr_obs", "next_obs",
            "forward_inputs",
        ]  # fmt: skip
        assert "text" not in batch["forward_inputs"]
        assert drawn(buffer, 30) == labels(range(3, 7))
        assert len(buffer) == buffer.size == 7 and buffer.total_samples == 7 * 24
        assert buffer.get_stats() == {"num_trajectories": 7, "total_samples": 168, "cache_size": 4}
        assert buffer.is_ready(7) and not buffer.is_ready(8)


def test_every_sample_is_equally_likely():
    with TrajectoryReplayBuffer(sample_window_size=4, max_samples=24) as buffer:
        buffer.add_trajectories([trajectory(0, steps=3), trajectory(1, steps=9, environments=1), trajectory(2)])
        found = torch.cat([check(buffer.sample(40)) for _ in range(150)])
        values, counts = torch.unique(found, return_counts=True)
        assert len(values) == 9 + 9 + 24
        expected = len(found) / len(values)
        assert ((counts - expected) ** 2 / expected).sum() < len(values) + 6 * (2 * len(values)) ** 0.5


def test_the_same_seed_draws_the_same_samples():
    found = []
    for _ in range(2):
        with TrajectoryReplayBuffer(seed=7) as buffer:
            buffer.add_trajectories([trajectory(number) for number in range(3)])
            found.append([check(buffer.sample(20)), check(buffer.sample(9))])
    assert all(map(torch.equal, *found))
    with TrajectoryReplayBuffer(seed=8) as other:
        other.add_trajectories([trajectory(number) for number in range(3)])
        assert not torch.equal(check(other.sample(20)), found[0][0])


def test_observations_are_stored_once():
    steps, environments = 64, 2
    whole = trajectory(0, steps, environments, length=64)
    with TrajectoryReplayBuffer(sample_window_size=2) as buffer:
        buffer.add_trajectories([whole])
        assert set(buffer.store.fields) >= {"obs.states", "obs.images"}
        assert int(buffer.store.status()["length"][0]) == steps * environments + environments
        assert buffer.sample(8)["next_obs"]["images"].data_ptr() != 0


def test_next_observations_that_lead_nowhere_are_stored_as_they_are():
    given = trajectory(0, length=1)  # every step is an episode
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([given])
        assert {"curr_obs.states", "next_obs.states"} <= set(buffer.store.fields)
        check(buffer.sample(24), length=1)
        assert {float(x) for _ in range(12) for x in check(buffer.sample(24), length=1)} == labels([0])


def test_trajectories_without_observations_and_without_rewards():
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([SimpleNamespace(rewards=None, prev_logprobs=None, curr_obs={})])
        assert len(buffer) == 0
        values = torch.arange(6.0).view(3, 2, 1)
        buffer.add_trajectories(
            [SimpleNamespace(prev_logprobs=values, rewards=None, forward_inputs={"x": values + 1}, notes=[1])]
        )
        batch = buffer.sample(6)
        assert set(batch) == {"prev_logprobs", "forward_inputs"}
        assert torch.equal(batch["forward_inputs"]["x"], batch["prev_logprobs"] + 1)
        assert batch["prev_logprobs"].is_contiguous()


def test_values_after_an_epoch_are_left_out():
    """prev_values has one more entry an epoch, behind its last step."""
    values = torch.cat([torch.arange(4.0), torch.tensor([-1.0]), torch.arange(4.0, 8.0), torch.tensor([-1.0])])
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories(
            [SimpleNamespace(rewards=torch.arange(8.0).view(8, 1, 1), prev_values=values.view(10, 1, 1))]
        )
        batch = buffer.sample(8)
        assert torch.equal(batch["prev_values"], batch["rewards"])


def test_a_batch_is_as_large_as_the_window_at_most():
    with TrajectoryReplayBuffer() as buffer:
        with pytest.raises(RuntimeError, match="Cannot sample from an empty buffer"):
            buffer.sample(4)
        buffer.add_trajectories([trajectory(0, steps=2, environments=1)])
        assert len(check(buffer.sample(100))) == 2
        with pytest.raises(ArgumentError, match="num_chunks must be at least 1"):
            buffer.sample()
        buffer.clear()
        assert len(buffer) == buffer.total_samples == 0
        with pytest.raises(EmptyBufferError):
            buffer.sample(4)
        buffer.add_trajectories([trajectory(3, steps=2, environments=1)])
        assert drawn(buffer, 9, 2) == labels([3], 2, 1) and len(buffer) == 1


def test_trajectories_that_are_longer_than_a_row_take_several():
    with TrajectoryReplayBuffer(sample_window_size=9, max_samples=6) as buffer:
        buffer.add_trajectories([trajectory(0, steps=6, environments=1)])
        with pytest.warns(UserWarning, match="max_samples"):
            buffer.add_trajectories([trajectory(1, steps=20, environments=2, length=7)])
        found = {float(x) for _ in range(40) for x in _labels(buffer.sample(46))}
        assert found == labels([0], 6, 1) | labels([1], 20, 2)
        assert len(buffer) == 2 and buffer.total_samples == 46 and buffer.get_stats()["cache_size"] == 2
        with pytest.raises(SchemaError, match="max_samples=400"):
            buffer.add_trajectories([trajectory(2, steps=200, environments=2)])
    with TrajectoryReplayBuffer(sample_window_size=3, max_samples=60) as roomy, warnings.catch_warnings():
        warnings.simplefilter("error")
        roomy.add_trajectories([trajectory(0, steps=1, environments=1), trajectory(1, steps=20)])


def _labels(batch: Any) -> torch.Tensor:
    """Of trajectories whose episodes are not all of one length."""
    label = batch["actions"][:, 0]
    led = batch["next_obs"]["states"][:, 0] - batch["curr_obs"]["states"][:, 0]
    assert torch.equal(led, torch.ones_like(led))
    assert torch.equal(batch["rewards"][:, 0], label / 2)
    assert ((batch["curr_obs"]["states"][:, 0] - label) < 3).all()
    return label


def test_another_process_adds_and_samples(name):
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
from rlinf_trajectories import check, trajectory
from geartrain.integrations.rlinf import TrajectoryReplayBuffer
buffer = TrajectoryReplayBuffer(sample_window_size=6, store={name!r})
label = check(buffer.sample(48))
assert len(buffer) == 2 and len(label) == 48 and label.max() < 13_000, label
buffer.add_trajectories([trajectory(5)])
"""
    with TrajectoryReplayBuffer(sample_window_size=6, store=name) as buffer:
        buffer.add_trajectories([trajectory(0), trajectory(1)])
        other = preloaded.run([sys.executable, "-c", script], timeout=patience(60))
        assert other.returncode == 0, other.stderr
        assert len(buffer) == 3 and buffer.total_samples == 72
        assert drawn(buffer, 30) == labels([0, 1, 5])


def test_a_store_of_another_window_is_not_joined(name):
    with TrajectoryReplayBuffer(sample_window_size=6, store=name) as buffer:
        buffer.add_trajectories([trajectory(0)])
        with pytest.raises(IncompatibleStoreError, match="another window"):
            len(TrajectoryReplayBuffer(sample_window_size=60, store=name))
    with gt.Store.create(name, {"x": gt.Field((), "float32")}, max_length=2, capacity=108):
        with pytest.raises(IncompatibleStoreError, match="no replay buffer of trajectories"):
            len(TrajectoryReplayBuffer(store=name))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"actions": torch.zeros(8, 3, 7)}, "actions of a trajectory is torch.float32 .7,."),
        ({"actions": torch.zeros(8, 3, 2, dtype=torch.float64)}, "torch.float64"),
        ({"actions": None}, "actions of a trajectory is absent"),
        ({"actions": torch.zeros(7, 3, 2)}, r"has shape \(7, 3, 2\)"),
        ({"dones": torch.zeros(11, 3, 1, dtype=torch.bool)}, "dones of a trajectory of 8 steps has 11 entries"),
        ({"rewards": torch.zeros(8)}, "rewards and prev_logprobs of a trajectory are tensors"),
        ({"curr_obs": [1]}, "curr_obs of a trajectory is a dict"),
    ],
)
def test_a_trajectory_that_does_not_fit_is_one_error_and_adds_nothing(change, message):
    with TrajectoryReplayBuffer() as buffer:
        buffer.add_trajectories([trajectory(0)])
        bad = trajectory(1)
        vars(bad).update(change)
        with pytest.raises(SchemaError, match=message):
            buffer.add_trajectories([trajectory(2), bad])
        assert len(buffer) == 1 and drawn(buffer) == labels([0])


def test_arguments_that_make_no_buffer():
    for options, message in (
        ({"sample_window_size": 0}, "give capacity="),
        ({"capacity": 5}, "unless sample_window_size=0"),
        ({"trajectory_format": "npz"}, "trajectory_format"),
        ({"auto_save": True}, "auto_save_path"),
        ({"seed": -1}, "seed"),
        ({"timeout_s": "soon"}, "timeout_s"),
    ):
        with pytest.raises(ArgumentError, match=message):
            TrajectoryReplayBuffer(**options)
    with TrajectoryReplayBuffer() as buffer:
        with pytest.raises(ArgumentError, match="tensors as attributes"):
            buffer.add_trajectories([3])
        with pytest.raises(ArgumentError, match="cannot be copied or pickled"):
            __import__("copy").copy(buffer)
    with pytest.raises(StoreClosedError):
        buffer.sample(1)
    with pytest.raises(StoreClosedError):
        buffer.add_trajectories([trajectory(0)])


def test_nothing_of_the_size_of_the_window_lies_outside_the_store():
    with TrajectoryReplayBuffer(sample_window_size=30) as buffer:
        buffer.add_trajectories([trajectory(0, 40, 10)])
        buffer.sample(64)
        tracemalloc.start()
        try:
            for number in range(40):
                buffer.add_trajectories([trajectory(number, 40, 10)])
                buffer.sample(64)
            held = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert held < buffer.store.nbytes / 8, (held, buffer.store.nbytes)
