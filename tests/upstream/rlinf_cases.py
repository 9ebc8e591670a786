"""Calls of RLinf's replay buffer, on its own class and on geartrain's: what each is to do, checked by what was added.

RLinf has no tests of this class. A case takes a way to make a buffer, and fails by an assertion or any other error.
Trajectories are RLinf's own, with numbered samples (tests/support/rlinf_trajectories.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rlinf_source import RLinf
from rlinf_trajectories import STRIDE, check, drawn, labels, trajectory


class Setting(NamedTuple):
    """What a case is given: RLinf's classes, a way to make the buffer that is tried and one for RLinf's, a folder."""

    rlinf: RLinf
    make: Callable[..., Any]
    stock: Callable[..., Any]
    folder: Path

    def trajectory(self, number: int, *args: Any, **options: Any) -> Any:
        return trajectory(number, *args, **options, kind=self.rlinf.trajectory)

    def filled(self, count: int, make: Callable[..., Any] | None = None, **options: Any) -> Any:
        buffer = (make or self.make)(**options)
        for number in range(count):
            buffer.add_trajectories([self.trajectory(number)])
        return buffer


def whole_samples(setting: Setting) -> None:
    buffer = setting.filled(3)
    assert drawn(buffer, 40) == labels(range(3))


def the_batches_form(setting: Setting) -> None:
    """Entries, their order, shapes and dtypes are those of RLinf's batch."""

    def form(batch: Any) -> Any:
        if isinstance(batch, dict):
            return {name: form(each) for name, each in batch.items()}
        return batch.dtype, tuple(batch.shape), batch.device.type

    found, wanted = (form(setting.filled(2, make).sample(5)) for make in (setting.make, setting.stock))
    assert found == wanted and list(found) == list(wanted), (found, wanted)


def a_flag_before_each_epoch(setting: Setting) -> None:
    for epochs in (0, 1, 2, 4):
        buffer = setting.make()
        buffer.add_trajectories([setting.trajectory(0, 8, 3, epochs=epochs)])
        assert drawn(buffer, 30) == labels([0])


def the_newest_trajectories(setting: Setting) -> None:
    buffer = setting.filled(7, sample_window_size=4)
    assert drawn(buffer, 40) == labels(range(3, 7))
    buffer.add_trajectories([setting.trajectory(7), setting.trajectory(8)])
    assert drawn(buffer, 40) == labels(range(5, 9))


def uniform_over_samples(setting: Setting) -> None:
    buffer = setting.make(sample_window_size=6)
    buffer.add_trajectories([setting.trajectory(0, 3), setting.trajectory(1, 9, 1), setting.trajectory(2)])
    found = torch.cat([check(buffer.sample(40)) for _ in range(150)])
    values, counts = torch.unique(found, return_counts=True)
    expected = len(found) / len(values)
    assert len(values) == 42
    assert ((counts - expected) ** 2 / expected).sum() < len(values) + 6 * (2 * len(values)) ** 0.5


def sizes(setting: Setting) -> None:
    buffer = setting.filled(7, sample_window_size=4)
    assert len(buffer) == buffer.size == 7 and buffer.total_samples == 7 * 24
    assert buffer.get_stats() == {"num_trajectories": 7, "total_samples": 168, "cache_size": 4}
    assert buffer.is_ready(7) and not buffer.is_ready(8)
    assert asyncio.run(buffer.is_ready_async(7)) and not asyncio.run(buffer.is_ready_async(8))


def at_most_the_window(setting: Setting) -> None:
    assert len(check(setting.filled(2).sample(1000))) == 48


def empty_buffers(setting: Setting) -> None:
    buffer = setting.make()
    buffer.add_trajectories([])
    buffer.add_trajectories([setting.rlinf.trajectory()])  # one without rewards
    assert len(buffer) == 0
    try:
        buffer.sample(4)
    except RuntimeError:
        return
    raise AssertionError("a batch of an empty buffer")


def seeds(setting: Setting) -> None:
    found = [check(setting.filled(3, seed=seed).sample(24)) for seed in (5, 5, 6)]
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def clearing(setting: Setting) -> None:
    buffer = setting.filled(3)
    buffer.clear()
    assert len(buffer) == buffer.total_samples == 0
    buffer.add_trajectories([setting.trajectory(5)])
    assert len(buffer) == 1 and drawn(buffer, 20) == labels([5])


def what_humans_did(setting: Setting) -> None:
    """`extract_intervene_traj` of RLinf's trajectories: parts of several lengths."""
    given = setting.trajectory(0, 12, 3, length=12)
    given.versions, given.forward_inputs = None, {}
    flags = torch.zeros(12, 3, 2, dtype=torch.bool)
    flags[2, 0], flags[3:9, 1], flags[::2, 2] = True, True, True
    given.intervene_flags = flags
    parts = given.extract_intervene_traj()
    assert [len(part.rewards) for part in parts] == [1, 6, 6]
    buffer = setting.make()
    buffer.add_trajectories(parts)
    wanted = {float(b * STRIDE + t) for t, b in flags.any(2).nonzero().tolist()}
    found = set()
    for _ in range(20):
        batch = buffer.sample(13)
        label = batch["actions"][:, 0]
        assert torch.equal(batch["curr_obs"]["states"][:, 0], label)
        assert torch.equal(batch["next_obs"]["states"][:, 0], label + 1)
        assert torch.equal(batch["rewards"][:, 0], label / 2) and batch["intervene_flags"].all()
        found |= set(label.tolist())
    assert found == wanted and buffer.total_samples == 13


def what_workers_collect(setting: Setting) -> None:
    """Trajectories of RLinf's builder, split for two actors."""
    builder = setting.rlinf.builder(max_episode_length=50)
    generator = torch.Generator().manual_seed(0)
    observations = torch.rand(7, 4, 5, generator=generator)  # T + 1, B, ...
    for t in range(6):
        result = setting.rlinf.step_result(
            actions=observations[t] * 2,
            prev_logprobs=observations[t, :, :1],
            rewards=observations[t].sum(1, keepdim=True),
            dones=torch.zeros(4, 1, dtype=torch.bool),
            terminations=torch.zeros(4, 1, dtype=torch.bool),
            truncations=torch.zeros(4, 1, dtype=torch.bool),
            forward_inputs={"action": observations[t] * 2},
        )
        builder.append_step_result(result)
        builder.append_transitions({"states": observations[t].clone()}, {"states": observations[t + 1].clone()})
    parts = builder.to_splited_trajectories(2)
    buffer = setting.make()
    buffer.add_trajectories(parts)
    batch = buffer.sample(24)
    assert len(batch["actions"]) == 24 and len(buffer) == 2 and buffer.total_samples == 24
    here = batch["curr_obs"]["states"]
    assert torch.equal(batch["actions"], here * 2) and torch.equal(batch["forward_inputs"]["action"], here * 2)
    for state, led_to in zip(here, batch["next_obs"]["states"], strict=True):
        t, b = (observations == state).all(2).nonzero()[0].tolist()
        assert torch.equal(observations[t + 1, b], led_to)


def datasets(setting: Setting) -> None:
    """RLinf's datasets over a buffer and one of demonstrations."""
    for kind in (setting.rlinf.dataset, setting.rlinf.preload_dataset):
        online, demonstrations = setting.filled(3), setting.make()
        demonstrations.add_trajectories([setting.trajectory(9)])
        dataset = kind(online, demonstrations, 16, 2, 1)
        batches = iter(dataset)
        for _ in range(3):
            label = check(next(batches))
            assert set(label[:8].tolist()) <= labels(range(3)) and set(label[8:].tolist()) <= labels([9])
        batches.close()
        if kind is setting.rlinf.preload_dataset:
            dataset.close()  # the other closes itself when it is dropped, and raises where it was closed before


def checkpoints(setting: Setting) -> None:
    buffer = setting.filled(7, sample_window_size=4)
    drawn(buffer, 2)
    buffer.save_checkpoint(str(setting.folder / "saved"))
    other = setting.make(sample_window_size=4)
    other.load_checkpoint(str(setting.folder / "saved"))
    assert len(other) == 7 and other.total_samples == 168
    assert drawn(other, 40) == labels(range(3, 7))
    other.add_trajectories([setting.trajectory(7)])
    assert len(other) == 8 and drawn(other, 40) == labels(range(4, 8))


def checkpoints_for_ranks(setting: Setting) -> None:
    setting.filled(7).save_checkpoint(str(setting.folder))
    found = []
    for rank in range(3):
        part = setting.make()
        part.load_checkpoint(str(setting.folder), is_distributed=True, local_rank=rank, world_size=3)
        assert len(part) == (3, 2, 2)[rank] and part.total_samples == 24 * len(part)
        found.append(drawn(part, 40))
    assert found == [labels([0, 1, 2]), labels([3, 4]), labels([5, 6])]


def absent_checkpoints(setting: Setting) -> None:
    try:
        setting.make().load_checkpoint(str(setting.folder / "absent"))
    except FileNotFoundError:
        return
    raise AssertionError("a checkpoint that is not there was loaded")


def files(setting: Setting) -> None:
    """Files of `auto_save` are read by RLinf's class, and RLinf's by this one."""
    for number, (writes, reads) in enumerate([(setting.make, setting.stock), (setting.stock, setting.make)]):
        folder = str(setting.folder / str(number))
        buffer = setting.filled(5, writes, auto_save=True, auto_save_path=folder, cache_size=2, sample_window_size=4)
        drawn(buffer, 2)
        buffer.close()
        other = reads(sample_window_size=4)
        other.load_checkpoint(folder)
        assert len(other) == 5 and other.total_samples == 120
        assert drawn(other, 40) == labels(range(1, 5))


def values_after_epochs(setting: Setting) -> None:
    """`prev_values` has one more entry an epoch, behind its last step: a sample's is the one of its step."""
    given = setting.trajectory(0, 8, 2)
    by_step = given.rewards.reshape(2, 4, 2, 1)
    given.prev_values = torch.cat([by_step, torch.full((2, 1, 2, 1), -1.0)], 1).flatten(0, 1)
    buffer = setting.make()
    buffer.add_trajectories([given])
    for _ in range(10):
        batch = buffer.sample(16)
        assert torch.equal(batch["prev_values"], batch["rewards"])


def loading_after_sampling(setting: Setting) -> None:
    setting.filled(3).save_checkpoint(str(setting.folder))
    buffer = setting.make()
    buffer.add_trajectories([setting.trajectory(9)])
    drawn(buffer, 1)
    buffer.load_checkpoint(str(setting.folder))
    assert drawn(buffer, 30) == labels(range(3))


def ranks_of_a_long_run(setting: Setting) -> None:
    """A checkpoint without files has the trajectories of the window: ranks share these."""
    buffer = setting.filled(9, sample_window_size=4)
    drawn(buffer, 1)
    buffer.save_checkpoint(str(setting.folder))
    found = set()
    for rank in range(2):
        part = setting.make(sample_window_size=4)
        part.load_checkpoint(str(setting.folder), is_distributed=True, local_rank=rank, world_size=2)
        found |= drawn(part, 30)
    assert found == labels(range(5, 9))


CASES: dict[str, Callable[[Setting], None]] = {
    case.__name__: case
    for case in (
        whole_samples,
        the_batches_form,
        a_flag_before_each_epoch,
        the_newest_trajectories,
        uniform_over_samples,
        sizes,
        at_most_the_window,
        empty_buffers,
        seeds,
        clearing,
        what_humans_did,
        what_workers_collect,
        datasets,
        checkpoints,
        checkpoints_for_ranks,
        absent_checkpoints,
        files,
        values_after_epochs,
        loading_after_sampling,
        ranks_of_a_long_run,
    )
}

__all__ = ["CASES", "Setting"]
