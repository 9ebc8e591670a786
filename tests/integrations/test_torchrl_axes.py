"""Storages of several axes: entries along the first one are steps of several environments, items are cells."""

from __future__ import annotations

import os
import pickle
import secrets
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler, SamplerWithoutReplacement, Sequence
from torchrl.data.replay_buffers import SliceSampler as StockSlices

from geartrain.errors import ArgumentError, IncompatibleStoreError, SchemaError
from geartrain.integrations.torchrl import (
    PrioritizedSampler,
    RoundRobinWriter,
    SharedStorage,
    SliceSampler,
    UniformSampler,
)


def steps(first: int, n: int, environments: int = 3) -> TensorDict:
    """n steps of some environments: the value of a cell is 100 t + its environment."""
    value = 100 * torch.arange(first, first + n)[:, None] + torch.arange(environments)
    done = (torch.arange(first, first + n) % 5 == 4)[:, None, None].repeat(1, environments, 1)
    return TensorDict({"obs": value[..., None].repeat(1, 1, 2).float(), "next": {"done": done}}, [n, environments])


def make(size: int, sampler: Any = None, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=SharedStorage(size, ndim=2, **options),
        sampler=UniformSampler() if sampler is None else sampler,
        writer=RoundRobinWriter(),
        batch_size=32,
        dim_extend=0,
    )


@pytest.mark.usefixtures("no_stock_torchrl_code")
def test_cells_are_found_by_time_and_environment_and_the_oldest_times_go_first():
    buffer = make(30)
    index = buffer.extend(steps(0, 7))
    assert index.shape == (21, 2)
    assert index[4].tolist() == [1, 1]
    assert len(buffer) == 21
    assert tuple(buffer.storage.shape) == (7, 3)
    cells = buffer.storage.get((torch.tensor([2, 6]), torch.tensor([1, 2])))
    assert cells["obs"][:, 0].tolist() == [201, 602]
    assert buffer[3]["obs"][:, 0].tolist() == [300, 301, 302]
    assert buffer.storage.get((slice(1, 3), 2))["obs"][:, 0].tolist() == [102, 202]
    assert buffer.storage.get(torch.tensor([[0, 1], [2, 3]])).batch_size == (2, 2, 3)
    assert buffer.storage.get((torch.tensor([True, False] * 3 + [True]),))["obs"][:, 0, 0].tolist() == [
        0,
        200,
        400,
        600,
    ]
    assert buffer.add(steps(7, 1)[0])[:, 0].tolist() == [7, 7, 7]
    buffer.extend(steps(8, 4))  # two more than there is room for
    assert len(buffer) == buffer.storage.max_size == 30
    assert buffer[:]["obs"][:, 1, 0].tolist() == [1001, 1101, *range(201, 1000, 100)]
    batch, info = buffer.sample(return_info=True)
    at, environment = info["index"]
    assert batch["obs"].shape == (32, 2)
    assert torch.equal(batch["obs"][:, 0].long() % 100, environment)
    assert torch.equal(batch["obs"], buffer[:]["obs"][at, environment])
    buffer[4] = steps(50, 1)[0]
    assert buffer[4]["obs"][2, 1] == 5002
    for wrong in (10, (torch.tensor([1]), torch.tensor([3])), (torch.tensor([10]), torch.tensor([0]))):
        with pytest.raises(IndexError):
            buffer.storage.get(wrong)
    with pytest.raises(SchemaError):
        buffer.extend(steps(0, 2, environments=4))


@pytest.mark.usefixtures("no_stock_torchrl_code")
def test_each_cell_has_a_priority():
    buffer = make(30, PrioritizedSampler(alpha=1.0, eps=0))
    buffer.extend(steps(0, 10))
    buffer.update_priority((torch.arange(10).repeat_interleave(3), torch.arange(3).repeat(10)), torch.full((30,), 1e-3))
    buffer.update_priority(torch.tensor([[4, 2]]), torch.tensor([1e3]))
    assert (buffer.sample(300)["obs"][:, 0] == 402).sum() > 290


@pytest.mark.usefixtures("no_stock_torchrl_code")
def test_a_size_is_rounded_up_to_whole_entries_and_processes_agree_on_it(tmp_path):
    name = f"torchrl-{os.getpid()}-{secrets.token_hex(4)}"
    buffer, other = make(20, store=name), make(20, store=name)
    try:
        buffer.extend(steps(0, 4))
        assert buffer.storage.max_size == 21
        assert len(other) == 12
        assert other.storage.max_size == 21
        other.extend(steps(4, 4))
        assert buffer[0]["obs"][:, 0].tolist() == [700, 701, 702]
        twin = pickle.loads(pickle.dumps(buffer.storage))
        assert torch.equal(twin.get(...)["obs"], other.storage.get(...)["obs"])
        with pytest.raises(IncompatibleStoreError, match="ndim=2"):
            len(SharedStorage(21, store=name))
        with pytest.raises(IncompatibleStoreError, match="21 items"):
            len(SharedStorage(22, ndim=2, store=name))
        buffer.dumps(tmp_path)
        for loaded in (make(20), make(20)):
            if len(loaded) == 0:
                loaded.extend(steps(70, 1))
            loaded.loads(tmp_path)
            assert torch.equal(loaded[:]["obs"], buffer[:]["obs"])
            assert loaded.add(steps(9, 1)[0])[0, 0] == 1
    finally:
        other.storage.close()
        buffer.storage.close()
    for wrong in (0, 1.5):
        with pytest.raises(ArgumentError):
            SharedStorage(10, ndim=wrong)
    with pytest.raises(SchemaError, match="ndim=3"):
        SharedStorage(10, ndim=3).set(torch.arange(2), {"a": torch.zeros(2, 3, 4), "b": torch.zeros(2, 3, 5)})
    buffer = make(30, SliceSampler(slice_len=4))
    buffer.extend(steps(0, 10))
    with pytest.raises(ArgumentError, match="one axis"):
        buffer.sample()


@pytest.mark.parametrize("sampler", [lambda: StockSlices(slice_len=4), SamplerWithoutReplacement, RandomSampler])
def test_torchrls_own_samplers_draw_from_it(sampler: Any):
    buffer = make(36, sampler())
    buffer.extend(steps(0, 15))
    batch, info = buffer.sample(12, return_info=True)
    at, environment = info["index"]
    assert torch.equal(batch["obs"][:, 0].long() % 100, environment)
    assert torch.equal(batch["obs"], buffer[:]["obs"][at, environment])
    flat = buffer.storage.flatten()
    assert torch.equal(flat[4]["obs"], buffer[1]["obs"][1])
    assert len(flat) == 36
    if isinstance(buffer.sampler, StockSlices):
        times = batch["obs"][:, 0].view(-1, 4)
        assert (times[:, 1:] == times[:, :-1] + 100).all()
        assert (times[:, :1] // 500 == times // 500).all()  # an episode has five steps
    if isinstance(buffer.sampler, SamplerWithoutReplacement):
        seen = [tuple(pair) for pair in torch.stack(info["index"], -1).tolist()]
        for _ in range(2):
            seen += [tuple(pair) for pair in torch.stack(buffer.sample(12, return_info=True)[1]["index"], -1).tolist()]
        assert len(set(seen)) == 36


@pytest.mark.parametrize("axes", [1, 2])
def test_sequences_stay_in_their_episodes_as_on_stock(axes: int):
    given = steps(0, 20)
    found = []
    for storage in (
        SharedStorage(45 if axes == 2 else 15, ndim=axes),
        LazyTensorStorage(45 if axes == 2 else 15, ndim=axes),
    ):
        ours = isinstance(storage, SharedStorage)
        buffer = TensorDictReplayBuffer(
            storage=storage,
            sampler=RandomSampler(),
            writer=RoundRobinWriter() if ours else None,
            batch_size=16,
            dim_extend=0,
            sample_unit=Sequence(length=3, burn_in=1, bootstrap=1),
        )
        buffer.extend((given if axes == 2 else given[:, 1]).clone())
        anchors = (torch.tensor([0, 3, 4, 7]), torch.tensor([0, 2, 1, 1]))
        index, info = buffer._sample_unit.expand(anchors if axes == 2 else anchors[0], {}, buffer.storage)
        found.append((buffer.storage.get(index)["obs"], info["validity_mask"], info["learning_mask"]))
        assert buffer.sample().batch_size == (16 * 5,)
    for ours_, stock in zip(*found, strict=True):
        assert torch.equal(ours_, stock)
