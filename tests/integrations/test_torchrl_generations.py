"""Generations of items, updates of those that are still there, and state dicts and files of torchrl's."""

from __future__ import annotations

import os
import secrets
import sys
from typing import Any

import preloaded
import pytest
import torch
from deadlines import patience
from tensordict import TensorDict
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import RoundRobinWriter as StockWriter
from torchrl.data.replay_buffers import TensorDictRoundRobinWriter
from torchrl_buffers import items, make

from geartrain.errors import ArgumentError, IncompatibleStoreError
from geartrain.integrations.torchrl import (
    PrioritizedSampler,
    RoundRobinWriter,
    SharedStorage,
    SliceSampler,
    UniformSampler,
)


def tracking(size: int, *, axes: int = 1, track: bool = True, **options: Any) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=SharedStorage(size, ndim=axes, **options),
        sampler=UniformSampler(),
        writer=RoundRobinWriter(track_generations=track),
        batch_size=16,
        dim_extend=0,
    )


@pytest.mark.usefixtures("no_stock_torchrl_code")
def test_generations_count_the_writes_of_all_that_write():
    name = f"torchrl-{os.getpid()}-{secrets.token_hex(4)}"
    buffer, other = tracking(8, store=name), tracking(8, store=name, track=False)
    try:
        index = buffer.extend(items(0, 8))
        of = buffer.writer.generations_of
        assert of(index).tolist() == [0] * 8
        assert buffer.sample()["index_generation"].tolist() == [0] * 16
        assert of(torch.tensor([0, 8, -1])).tolist() == [0, -1, -1]
        other.extend(items(8, 3))  # its writer does not track, and counts
        assert of(index).tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
        assert "index_generation" not in other.sample()
        other[0] = items(50, 1)[0]  # the item changes, and stays the same one
        assert of(torch.tensor([0])).tolist() == [1]
        buffer.extend(items(0, 8 + 3))
        assert of(index).tolist() == [2, 2, 2, 2 - 0, 2 - 0, 2 - 0, 1, 1]
        before = of(index)
        other.empty()
        assert (of(index) == before + 1).all()
        assert of(torch.tensor(3)).shape == ()
    finally:
        other.storage.close()
        buffer.storage.close()


def test_an_update_reaches_items_that_are_still_there_and_no_others():
    buffer = tracking(8)
    index = buffer.extend(items(0, 8))
    generation = buffer.writer.generations_of(index)
    buffer.extend(items(8, 3))
    patch = {"obs": torch.full((8, 3), -1.0), ("next", "reward"): torch.arange(100, 108)}
    result = buffer.update_if_present(index=index, generation=generation, patch=patch)
    assert result.updated.tolist() == [False] * 3 + [True] * 5
    assert buffer[:]["next", "reward"].tolist() == [8, 9, 10, *range(103, 108)]
    assert buffer[:]["obs"][:, 0].tolist() == [8, 9, 10, -1, -1, -1, -1, -1]
    for wrong, error in (({"none": torch.zeros(8)}, KeyError), ({"obs": torch.zeros(8, 2)}, ValueError)):
        with pytest.raises(error):
            buffer.update_if_present(index=index, generation=generation, patch=wrong)
    twice = torch.tensor([3, 3])
    buffer.update_if_present(
        index=twice, generation=generation[twice], patch={("next", "reward"): torch.tensor([1, 2])}
    )
    assert buffer[3]["next", "reward"] == 2
    newer = {"index": torch.tensor([4]), "generation": generation[4:5], "version_key": ("next", "reward")}
    zeros = {"obs": torch.zeros(1, 3)}
    assert buffer.update_if_present(patch=zeros, version=50, require_newer=True, **newer).version_rejected.all()
    assert buffer.update_if_present(patch=zeros, version=200, **newer).updated.all()
    assert buffer[4]["next", "reward"] == 200
    assert buffer[4]["obs"].tolist() == [0, 0, 0]


def test_an_item_that_is_overwritten_between_the_look_and_the_write_keeps_what_it_got(monkeypatch):
    name = f"torchrl-{os.getpid()}-{secrets.token_hex(4)}"
    buffer, other = tracking(8, store=name), tracking(8, store=name)
    try:
        index = buffer.extend(items(0, 8))
        generation = buffer.writer.generations_of(index)
        apply = SharedStorage._apply_conditional_patch

        def late(storage: SharedStorage, *given: Any) -> None:
            if storage is buffer.storage:
                other.extend(items(8, 3))
            apply(storage, *given)

        monkeypatch.setattr(SharedStorage, "_apply_conditional_patch", late)
        buffer.update_if_present(index=index, generation=generation, patch={"obs": torch.full((8, 3), -1.0)})
        assert buffer[:]["obs"][:, 0].tolist() == [8, 9, 10, -1, -1, -1, -1, -1]
    finally:
        other.storage.close()
        buffer.storage.close()


def test_cells_of_several_axes_are_updated():
    buffer = tracking(12, axes=2)
    index = buffer.extend(TensorDict({"a": torch.zeros(4, 3)}, [4, 3]))
    generation = buffer.writer.generations_of(index)
    assert generation.tolist() == [0] * 12
    cells = torch.tensor([[1, 2], [3, 0]])
    buffer.update_if_present(index=cells, generation=generation[:2], patch={"a": torch.tensor([5.0, 6.0])})
    assert buffer[:]["a"].flatten().tolist() == [0, 0, 0, 0, 0, 5, 0, 0, 0, 6, 0, 0]
    buffer.update_if_present(
        index=torch.tensor([2]), generation=generation[:1], patch={"a": torch.tensor([[7.0, 8.0, 9.0]])}
    )
    assert buffer[2]["a"].tolist() == [7, 8, 9]


CHILD = """
import sys, torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer
from geartrain.integrations.torchrl import RoundRobinWriter, SharedStorage, UniformSampler
buffer = ReplayBuffer(storage=SharedStorage(8, store=sys.argv[1]), sampler=UniformSampler(), writer=RoundRobinWriter())
buffer.extend(TensorDict({"a": torch.arange(2) + 100}, [2]))
buffer.storage.close()
"""


def test_generations_revision_and_cursor_tell_of_another_processes_writes():
    name = f"torchrl-{os.getpid()}-{secrets.token_hex(4)}"
    buffer = tracking(8, store=name)
    try:
        index = buffer.extend(TensorDict({"a": torch.arange(8)}, [8]))
        generation, revision = buffer.writer.generations_of(index), buffer.storage._mutation_revision
        child = preloaded.Popen([sys.executable, "-c", CHILD, name])
        assert child.wait(patience(60)) == 0
        result = buffer.update_if_present(index=index, generation=generation, patch={"a": torch.zeros(8).long()})
        assert result.stale_count == 2
        assert buffer[:]["a"].tolist() == [100, 101, 0, 0, 0, 0, 0, 0]
        assert buffer.storage._mutation_revision > revision
        assert buffer.storage._last_cursor_index == 1
    finally:
        buffer.storage.close()


@pytest.mark.usefixtures("no_stock_torchrl_code")
def test_generations_have_to_be_there_from_the_first_item_on():
    name = f"torchrl-{os.getpid()}-{secrets.token_hex(4)}"
    plain = tracking(8, store=name, track=False)
    try:
        early = tracking(8, store=name)
        plain.extend(items(0, 2))
        with pytest.raises(IncompatibleStoreError, match="generations"):
            early.extend(items(0, 2))
        with pytest.raises(IncompatibleStoreError, match="generations"):
            tracking(8, store=name)
        assert plain.writer.generations_of(torch.arange(2)).tolist() == [-1, -1]
    finally:
        plain.storage.close()


def test_generations_are_in_a_state_dict_and_in_a_checkpoint(tmp_path):
    buffer = tracking(8)
    buffer.extend(items(0, 11))
    generation = buffer.writer.generations_of(torch.arange(8))
    again = tracking(8)
    again.load_state_dict(buffer.state_dict())
    assert torch.equal(again.writer.generations_of(torch.arange(8)), generation)
    buffer.dumps(tmp_path)
    again = tracking(8)
    again.loads(tmp_path)
    assert torch.equal(again.writer.generations_of(torch.arange(8)), generation)
    assert again.add(items(3, 1)[0]) == 3


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("full", [False, True])
def test_state_dicts_go_to_torchrls_storages_and_come_from_them(axes: int, full: bool):
    n = 8 if full else 5
    given = items(0, n) if axes == 1 else TensorDict({"a": torch.arange(3 * n).reshape(n, 3)}, [n, 3])
    stock = ReplayBuffer(storage=LazyTensorStorage(8 * 3 ** (axes - 1), ndim=axes), writer=StockWriter(), dim_extend=0)
    ours = tracking(8 * 3 ** (axes - 1), axes=axes, track=False)
    ours.extend(given.clone())
    stock.load_state_dict(ours.state_dict())
    assert (stock[:] == given).all()
    stock.extend(given.clone())
    back = tracking(8 * 3 ** (axes - 1), axes=axes, track=False)
    back.load_state_dict(stock.state_dict())
    assert (back[:] == stock[:]).all()
    assert len(back) == len(stock)
    assert back.writer._cursor == stock.writer._cursor


def test_items_and_cursor_that_torchrl_has_saved_are_loaded(tmp_path):
    for storage in (LazyTensorStorage(8), LazyMemmapStorage(8)):
        stock = TensorDictReplayBuffer(storage=storage, writer=TensorDictRoundRobinWriter(), batch_size=4)
        stock.extend(items(0, 11))
        folder = tmp_path / type(storage).__name__
        stock.dumps(folder)
        ours = tracking(8, track=False)
        ours.loads(folder)
        assert (ours[:] == stock[:].exclude("index")).all()
        assert ours.extend(items(11, 2)).tolist() == [3, 4]


def test_a_sampler_is_loaded_with_the_alpha_of_its_priorities(tmp_path):
    buffer = make(20, PrioritizedSampler(alpha=0.9, beta=0.3))
    buffer.extend(items(0, 20))
    buffer.dumps(tmp_path)
    again = make(20, PrioritizedSampler(alpha=0.6, beta=0.4))
    again.loads(tmp_path)
    assert (again.sampler.alpha, again.sampler.beta) == (0.9, 0.3)


def test_a_consuming_sampler_gives_each_item_once_and_its_places_are_used_again():
    buffer = ReplayBuffer(storage=SharedStorage(6), writer=RoundRobinWriter(), batch_size=3, consume_after_n_samples=1)
    buffer.extend(items(0, 6))
    seen = [*buffer.sample()["next", "reward"].tolist(), *buffer.sample()["next", "reward"].tolist()]
    assert sorted(seen) == list(range(6))
    assert len(buffer) == 0
    buffer.extend(items(20, 2))
    assert sorted(buffer.sample(2)["next", "reward"].tolist()) == [20, 21]


def test_a_generator_decides_each_prioritized_batch():
    buffer = make(100, PrioritizedSampler(alpha=1.0))
    buffer.extend(items(0, 100))
    generator = torch.Generator().manual_seed(3)
    buffer.set_rng(generator)
    state = generator.get_state()
    first = [buffer.sample()["next", "reward"] for _ in range(3)]
    generator.set_state(state)
    again = [buffer.sample()["next", "reward"] for _ in range(3)]
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[1])


def test_what_is_written_into_all_items_is_written_as_on_stock():
    for track in (False, True):
        buffer = tracking(20, track=track)
        buffer.extend(items(0, 12))
        read = SliceSampler(slice_len=3, end_key=("next", "done"))
        read.sample(buffer.storage, 9)
        buffer.set_(("next", "done"), torch.arange(12) % 3 == 2)
        index, _ = read.sample(buffer.storage, 300)
        assert (index[0].view(-1, 3)[:, 0] % 3 == 0).all()
        buffer["obs"][4:6] = 7.0
        assert buffer[5]["obs"].tolist() == [7, 7, 7]
        kept = buffer.storage.get(slice(None))
        buffer.set_at_("obs", torch.ones(3), 0)
        assert buffer[0]["obs"].tolist() == [1, 1, 1]
        assert kept["obs"][0].tolist() == [0, 0, 0]  # a copy
    buffer = tracking(12, axes=2)
    buffer.extend(TensorDict({"a": torch.zeros(4, 3)}, [4, 3]))
    buffer[:, 1:2] = TensorDict({"a": torch.ones(4, 1)}, [4, 1])
    assert buffer[2]["a"].tolist() == [0, 1, 0]


@pytest.mark.parametrize("alpha", [0.5, 0.0])
def test_a_new_alpha_is_that_of_the_stored_priorities_too(alpha: float):
    sampler = PrioritizedSampler(alpha=1.0, beta=0.0, eps=0.0)
    buffer = make(1000, sampler)
    buffer.extend(items(0, 1000))
    buffer.update_priority(torch.arange(1000), torch.where(torch.arange(1000) < 500, 100.0, 1.0))
    sampler.alpha = alpha
    share = (buffer.sample(20_000)["next", "reward"] < 500).float().mean()
    assert abs(share - 100**alpha / (100**alpha + 1)) < 0.02
    assert buffer.storage.highest == pytest.approx(100**alpha)
    if alpha == 0:
        with pytest.raises(ArgumentError, match="alpha=0"):
            sampler.alpha = 0.5
    with pytest.raises(ArgumentError):
        sampler.alpha = -1
