"""LeRobot's replay buffer and its datasets: one becomes the other."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from lerobot_transitions import IMAGE, STATE, fill, make

from geartrain.errors import ArgumentError, MissingDependencyError, SchemaError
from geartrain.integrations.lerobot import ReplayBuffer


class Frames(list):
    """A dataset as LeRobot's is read: frames by number."""


def frames(ends: bool) -> Frames:
    found = Frames()
    for episode in range(3):
        for step in range(5):
            t = float(episode * 100 + step)
            frame = {STATE: torch.tensor([t]), "action": torch.tensor([t]), "next.reward": torch.tensor([t])}
            frame |= {"episode_index": torch.tensor(episode), "complementary_info.p": torch.tensor([2 * t])}
            if ends:
                frame["next.done"] = torch.tensor([step == 4 and episode != 1])
            found.append(frame)
    return found


@pytest.mark.parametrize("ends", [True, False])
def test_a_dataset_becomes_a_buffer(ends):
    with ReplayBuffer.from_lerobot_dataset(frames(ends), "cpu", [STATE], capacity=40) as buffer:
        t = torch.tensor([episode * 100 + step for episode in range(3) for step in range(5)], dtype=torch.float32)
        last = t % 100 == 4
        second = last & (t == 104) if ends else torch.zeros(15, dtype=torch.bool)  # cut off
        assert torch.equal(buffer.states[STATE][:15, 0], t)
        assert torch.equal(buffer.next_states[STATE][:15, 0], t + 1 - last.float())
        assert torch.equal(buffer.actions[:15, 0], t)
        assert torch.equal(buffer.complementary_info["p"][:15, 0], 2 * t)
        assert torch.equal(buffer.dones[:15], last & ~second)
        assert torch.equal(buffer.truncateds[:15], second)
    with pytest.raises(ValueError, match="capacity"):
        ReplayBuffer.from_lerobot_dataset(frames(ends), "cpu", [STATE], capacity=3)
    with pytest.raises(ValueError, match="State keys"):
        ReplayBuffer.from_lerobot_dataset(frames(ends), "cpu")
    with pytest.raises(SchemaError, match="frame 0 of the dataset lacks 'other'"):
        ReplayBuffer.from_lerobot_dataset(frames(ends), "cpu", ["other"])


class Written:
    """What LeRobot's dataset is asked for while it is written."""

    def __init__(self, **options: Any) -> None:
        self.options, self.writer = options, self
        self.episodes: list[list[dict[str, Any]]] = []
        self.pending: list[dict[str, Any]] = []
        self.finalized = self.stopped = False

    create = classmethod(lambda cls, **options: cls(**options))

    def start_image_writer(self, num_processes: int, num_threads: int) -> None:
        assert num_threads

    def stop_image_writer(self) -> None:
        self.stopped = True

    def add_frame(self, frame: dict[str, Any]) -> None:
        self.pending.append(frame)

    def has_pending_frames(self) -> bool:
        return bool(self.pending)

    def save_episode(self) -> None:
        self.episodes.append(self.pending)
        self.pending = []

    def finalize(self) -> None:
        self.finalized = True


@pytest.fixture
def written_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """LeRobot's dataset class as far as it is written: the real one is in `make upstream`."""
    lerobot, datasets = type(sys)("lerobot"), type(sys)("lerobot.datasets")
    datasets.LeRobotDataset = Written
    monkeypatch.setitem(sys.modules, "lerobot", lerobot)
    monkeypatch.setitem(sys.modules, "lerobot.datasets", datasets)


def test_the_newest_transitions_become_a_dataset(written_datasets):
    with make(64) as buffer:
        with pytest.raises(ValueError, match="The replay buffer is empty"):
            buffer.to_lerobot_dataset("a/b")
        fill(buffer, 205, length=10, cut=True, p=torch.tensor([1.5]))
        dataset = buffer.to_lerobot_dataset("a/b", fps=5, root="somewhere")
        assert (dataset.options["repo_id"], dataset.options["fps"]) == ("a/b", 5)
        assert dataset.options["features"][IMAGE] == {"dtype": "image", "shape": (3, 4, 4)}
        assert dataset.options["features"]["complementary_info.p"] == {"dtype": "float32", "shape": (1,)}
        assert dataset.finalized
        assert dataset.stopped
        assert [len(each) for each in dataset.episodes] == [9, 10, 10, 10, 10, 10, 5]
        steps = [frame for episode in dataset.episodes for frame in episode]
        expected = [float(at // 10 * 59 + at % 10) for at in range(141, 205)]
        assert [float(frame[STATE][0]) for frame in steps] == expected
        assert [float(frame["next.reward"][0]) for frame in steps] == [each / 2 for each in expected]
        assert not any(frame["next.done"][0] for frame in steps)
        assert {tuple(frame["complementary_info.p"].tolist()) for frame in steps} == {(1.5,)}


def test_a_dataset_has_the_episodes_of_each_process_apart(written_datasets):
    with make(200, writers=2) as first, make(200, store=None) as _:
        fill(first, 12, length=1000)
        with make(200, store=first.store, writers=2) as second:
            fill(second, 8, length=1000, first=500)
            fill(first, 3, length=1000, first=12)
            dataset = second.to_lerobot_dataset("a/b")
        found = sorted([int(frame[STATE][0]) for frame in episode] for episode in dataset.episodes)
        assert found == [list(range(15)), list(range(500, 508))]


def test_without_lerobot_a_dataset_cannot_be_written(monkeypatch):
    monkeypatch.setitem(sys.modules, "lerobot.datasets", None)
    with make() as buffer:
        fill(buffer, 3)
        with pytest.raises(MissingDependencyError, match="LeRobot"):
            buffer.to_lerobot_dataset("a/b")


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        ([], {"capacity": "x"}),
        ([], {"capacity": 2.5}),
        ([], {"capacity": None}),
        ([], {"capacity": 4, "state_keys": STATE}),
        (3, {}),
    ],
)
def test_arguments_that_make_no_buffer_of_a_dataset_are_refused(dataset, options):
    with pytest.raises(ArgumentError):
        ReplayBuffer.from_lerobot_dataset(dataset, "cpu", **{"state_keys": [STATE], **options})
