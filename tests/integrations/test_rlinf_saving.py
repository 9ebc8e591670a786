"""Checkpoints of RLinf's replay buffer over a store, RLinf's files, and datasets of LeRobot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rlinf_trajectories import check, drawn, labels, trajectory

from geartrain.errors import ArgumentError, CheckpointError, EmptyBufferError, SchemaError
from geartrain.integrations.rlinf import TrajectoryReplayBuffer


def filled(count: int = 7, **options: Any) -> TrajectoryReplayBuffer:
    buffer = TrajectoryReplayBuffer(**{"sample_window_size": 4, **options})
    for number in range(count):
        buffer.add_trajectories([trajectory(number)])
    return buffer


def test_a_checkpoint_goes_on_where_it_was_saved(tmp_path, name):
    with filled(seed=5) as buffer:
        buffer.save_checkpoint(tmp_path / "step" / "rank_0")
        first = check(buffer.sample(16))
    for options in ({}, {"store": name}, {"sample_window_size": 9}, {"sample_window_size": 2}):
        with TrajectoryReplayBuffer(**{"seed": 1, "sample_window_size": 4, **options}) as other:
            other.load_checkpoint(str(tmp_path / "step" / "rank_0"))
            window = min(4, other.sample_window_size)
            assert len(other) == 7 and other.total_samples == 7 * 24
            assert other.get_stats()["cache_size"] == window and other.seed == 5
            if window == 4:
                assert other.sample_window_size == 9 or torch.equal(check(other.sample(16)), first)
            assert drawn(other, 30) == labels(range(7 - window, 7))
            other.add_trajectories([trajectory(7)])
            assert len(other) == 8 and labels([7]) <= drawn(other, 30)


def test_a_checkpoint_replaces_what_was_there_and_an_older_one(tmp_path):
    with filled(2) as buffer, filled(5) as later:
        buffer.save_checkpoint(tmp_path)
        later.save_checkpoint(tmp_path)
        buffer.load_checkpoint(tmp_path)
        assert len(buffer) == 5 and drawn(buffer, 30) == labels(range(1, 5))
    with TrajectoryReplayBuffer(sample_window_size=4) as empty:
        with pytest.raises(FileNotFoundError, match="Metadata not found"):
            empty.load_checkpoint(tmp_path / "absent")
        empty.save_checkpoint(tmp_path)
        with filled(2) as other:
            other.load_checkpoint(tmp_path)
            assert len(other) == 0
            with pytest.raises(EmptyBufferError):
                other.sample(1)


@pytest.mark.parametrize("kind", ["checkpoint", "files"])
def test_ranks_load_a_part_each(tmp_path, kind):
    with filled(7, sample_window_size=7, auto_save=kind == "files", auto_save_path=tmp_path) as buffer:
        if kind == "checkpoint":
            buffer.save_checkpoint(tmp_path)
    found, counts = [], []
    for rank in range(3):
        with TrajectoryReplayBuffer(sample_window_size=7) as part:
            part.load_checkpoint(tmp_path, is_distributed=True, local_rank=rank, world_size=3)
            counts.append((len(part), part.total_samples))
            found.append(drawn(part, 30))
    assert counts == [(3, 72), (2, 48), (2, 48)]
    assert found == [labels([0, 1, 2]), labels([3, 4]), labels([5, 6])]
    with TrajectoryReplayBuffer() as part, pytest.raises(ArgumentError, match=r"range \[0, 3\)"):
        part.load_checkpoint(tmp_path, is_distributed=True, local_rank=3, world_size=3)


def test_files_of_trajectories_are_rlinfs(tmp_path):
    with filled(3, auto_save=True, auto_save_path=tmp_path) as buffer:
        index = json.loads((tmp_path / "trajectory_index.json").read_text())
        assert index["trajectory_id_list"] == [0, 1, 2]
        assert index["trajectory_index"]["2"] == {
            "num_samples": 24,
            "trajectory_id": 2,
            "max_episode_length": 5,
            "shape": [8, 3],
            "model_weights_id": "weights-2",
        }
        saved = torch.load(tmp_path / "trajectory_2_weights-2.pt", weights_only=True)
        assert torch.equal(saved["dones"], trajectory(2).dones) and saved["forward_inputs"]["text"] == "not kept"
        bad = trajectory(3)
        bad.model_weights_id = "../outside"
        with pytest.raises(SchemaError, match="model_weights_id"):
            buffer.add_trajectories([bad])
        assert len(buffer) == 3
    with filled(0, auto_save=True, auto_save_path=tmp_path) as again:
        again.add_trajectories([trajectory(3)])
    with TrajectoryReplayBuffer(sample_window_size=2) as other:
        other.load_checkpoint(tmp_path)
        assert len(other) == 4 and other.total_samples == 96
        assert drawn(other, 20) == labels([2, 3])
    assert not list(tmp_path.glob("*.part"))


def test_what_is_no_checkpoint_is_one_error(tmp_path):
    with filled(2, auto_save=True, auto_save_path=tmp_path) as buffer:
        buffer.save_checkpoint(tmp_path / "ours")
    (tmp_path / "trajectory_1_weights-1.pt").write_bytes(b"no file of torch's")
    with TrajectoryReplayBuffer() as other:
        with pytest.raises(CheckpointError, match=r"trajectory_1_weights-1\.pt holds no trajectory"):
            other.load_checkpoint(tmp_path)
        metadata = json.loads((tmp_path / "metadata.json").read_text())
        (tmp_path / "metadata.json").write_text(json.dumps({**metadata, "trajectory_format": "pkl"}))
        with pytest.raises(CheckpointError, match="pickles"):
            other.load_checkpoint(tmp_path)
        (tmp_path / "metadata.json").write_text("[]")
        with pytest.raises(CheckpointError, match="not a JSON object"):
            other.load_checkpoint(tmp_path)
        next(Path(tmp_path / "ours" / "trajectories").glob("*.bin")).write_bytes(b"")
        with pytest.raises(CheckpointError):
            other.load_checkpoint(tmp_path / "ours")


class Frames:
    """A dataset as LeRobot has them: episodes of 4 and 3 frames."""

    def __init__(self, *, without: tuple[str, ...] = ()) -> None:
        self._without = without
        self.reads = 0

    def __len__(self) -> int:
        return 7

    def __getitem__(self, at: int) -> dict[str, Any]:
        self.reads += 1
        entries = {
            "observation.state": torch.tensor([float(at), 1.0]),
            "observation.images.front": torch.full((3, 4, 4), at / 10),
            "action": torch.tensor([float(at)]),
            "episode_index": torch.tensor(int(at >= 4)),
            "next.reward": torch.tensor(at / 2),
            "next.done": torch.tensor(at == 6),
        }
        return {name: value for name, value in entries.items() if name not in self._without}


def test_episodes_of_a_lerobot_dataset_are_trajectories():
    names = {"states": "observation.state", "main_images": "observation.images.front"}
    with TrajectoryReplayBuffer.from_lerobot_dataset(Frames(), names) as buffer:
        assert len(buffer) == 2 and buffer.total_samples == 7
        batch = buffer.sample(7)
        at = batch["actions"][:, 0]
        last = (at == 3) | (at == 6)
        assert torch.equal(batch["curr_obs"]["states"][:, 0], at)
        assert torch.equal(batch["next_obs"]["states"][:, 0], torch.where(last, at, at + 1))
        assert torch.equal(batch["rewards"], at[:, None] / 2) and batch["rewards"].shape == (7, 1)
        assert torch.equal(batch["terminations"][:, 0], at == 6)
        assert torch.equal(batch["truncations"][:, 0], at == 3)
        assert batch["curr_obs"]["main_images"].shape == (7, 3, 4, 4)
    columns = Frames()
    columns.hf_dataset = {"episode_index": [torch.tensor(int(at >= 4)) for at in range(7)]}
    with TrajectoryReplayBuffer.from_lerobot_dataset(columns, names) as buffer:
        assert len(buffer) == 2 and columns.reads == 7  # a LeRobotDataset has the column: each frame is read once
    without = Frames(without=("next.reward", "next.done"))
    with TrajectoryReplayBuffer.from_lerobot_dataset(without, names, success_reward=1.0) as buffer:
        batch = buffer.sample(7)
        at = batch["actions"][:, 0]
        assert torch.equal(batch["rewards"][:, 0], ((at == 3) | (at == 6)).float())
        assert torch.equal(batch["dones"], batch["terminations"]) and not batch["truncations"].any()
    with pytest.raises(SchemaError, match=r"lacks 'next.reward'; success_reward gives one"):
        TrajectoryReplayBuffer.from_lerobot_dataset(without, names)
    with pytest.raises(SchemaError, match=r"lacks 'observation\.other'"):
        TrajectoryReplayBuffer.from_lerobot_dataset(Frames(), {"states": "observation.other"})
    with pytest.raises(ArgumentError, match="observations are a dict"):
        TrajectoryReplayBuffer.from_lerobot_dataset(Frames(), ["observation.state"])
    with pytest.raises(ArgumentError, match="a dataset has a length"):
        TrajectoryReplayBuffer.from_lerobot_dataset(3, names)
