"""torchrl's replay buffer over a storage in shared memory: items of any shape, in place, saved and loaded."""

from __future__ import annotations

import dataclasses
import pickle
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
import torch
from deadlines import patience
from tensordict import TensorDict, tensorclass
from torch.utils._pytree import tree_flatten
from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl_buffers import items, make

from geartrain.core.schema import Field
from geartrain.errors import ArgumentError, IncompatibleStoreError, SchemaError, StoreClosedError
from geartrain.integrations.torchrl import PrioritizedSampler, RoundRobinWriter, SharedStorage
from geartrain.replay.fetch import fetch
from geartrain.replay.replay import Replay
from geartrain.selection.random import Prioritized
from geartrain.store.store import Store

pytestmark = [
    pytest.mark.usefixtures("no_stock_torchrl_code"),
    pytest.mark.filterwarnings("ignore:Got conflicting batch_sizes"),
    pytest.mark.filterwarnings("ignore:Using `add"),
]


def test_items_are_those_that_were_added_and_the_oldest_go_first():
    buffer = make(700)
    assert len(buffer) == 0
    assert buffer.extend(items(0, 600)).tolist() == list(range(600))
    assert buffer.add(items(600, 1)[0]) == 600
    batch, info = buffer.sample(256, return_info=True)
    assert batch.batch_size == torch.Size([256])
    assert torch.equal(batch["next", "reward"], info["index"])
    assert torch.equal(batch["obs"][:, 2].long(), info["index"])
    assert torch.equal(batch["next", "done"], info["index"] % 7 == 6)
    assert buffer.extend(items(601, 300)).tolist() == [*range(601, 700), *range(201)]
    assert len(buffer) == 700
    assert buffer[:]["next", "reward"].tolist() == [*range(700, 901), *range(201, 700)]
    assert buffer[5]["obs"].tolist() == [705.0] * 3
    assert buffer[-1]["next", "reward"] == 699
    square = torch.tensor([[0, 201], [202, 3]])
    for found in (buffer[square], buffer[square.numpy()], buffer.storage.get(square)):
        assert found.batch_size == (2, 2)
        assert found["obs"].shape == (2, 2, 3)
        assert found["next", "reward"].tolist() == [[700, 201], [202, 703]]
    assert buffer[torch.arange(700) % 350 == 1]["next", "reward"].tolist() == [701, 351]
    assert torch.equal(buffer[...]["obs"], buffer[:]["obs"])
    assert buffer[None].batch_size == (1, 700)
    assert torch.equal(buffer.storage[None]["next", "reward"][0], buffer[:]["next", "reward"])
    buffer.extend(items(5000, 1500))  # more than there is room for: the last ones stay
    assert sorted(buffer[:]["next", "reward"].tolist()) == list(range(5800, 6500))
    buffer.empty()
    assert len(buffer) == 0
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample()
    assert buffer.extend(items(0, 3)).tolist() == [0, 1, 2]


def test_no_array_of_the_buffers_size_is_outside_the_store():
    small = make(10, PrioritizedSampler())  # modules that are imported with the first buffer are not counted
    small.extend(items(0, 10))
    small.sample(8)
    tracemalloc.start()
    try:
        buffer = make(1200, PrioritizedSampler())
        frame = torch.zeros(20, 64, 64, dtype=torch.uint8)
        for turn in range(60):
            buffer.extend(TensorDict({"frame": frame + turn}, [20]))
        assert buffer.sample(8)["frame"].shape == (8, 64, 64)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1_000_000
    assert 1200 * 4096 < buffer.storage.store.nbytes < 1.2 * 1536 * 4096


def test_tensors_and_tensorclasses_are_items_too():
    buffer = make(50)
    buffer.extend(torch.arange(30).reshape(10, 3))
    batch, info = buffer.sample(20, return_info=True)
    assert torch.equal(batch[:, 0], 3 * info["index"])
    assert buffer[4].tolist() == [12, 13, 14]
    buffer = make(50)
    buffer.extend(Step(torch.zeros(4, 3), torch.arange(4), batch_size=[4]))
    assert isinstance(buffer.sample(5), Step)
    buffer = make(50)
    buffer.add(TensorDict({"a": torch.zeros(5, 2)}, [5]))  # an item that has a batch of its own
    assert buffer[0].batch_size == (5,)
    assert buffer.sample(3).batch_size == (3, 5)
    buffer = make(50)
    buffer.extend([items(t, 1)[0] for t in range(5)])
    assert buffer[:]["next", "reward"].tolist() == list(range(5))


@tensorclass
class Step:
    obs: torch.Tensor
    reward: torch.Tensor


def test_items_can_be_set_in_place_and_keep_their_priorities():
    buffer = make(2000, PrioritizedSampler(alpha=1.0), batch_size=300)
    buffer.extend(items(0, 1500))
    buffer.update_priority(torch.arange(1500), 1e-3)
    buffer.update_priority(torch.tensor([600]), torch.tensor([1000.0]))
    chosen = torch.tensor([3, 600, 601, 1499])
    changed = items(0, 1500)[chosen]
    changed["obs"] += 0.5
    buffer[chosen] = changed
    assert buffer[chosen]["obs"][:, 0].tolist() == [3.5, 600.5, 601.5, 1499.5]
    assert buffer[4]["obs"][0] == 4
    assert (buffer.sample()["obs"][:, 0] == 600.5).sum() > 290
    buffer[...] = items(7000, 1500)
    assert buffer[[0, 1499]]["next", "reward"].tolist() == [7000, 8499]
    assert len(buffer) == 1500


@pytest.mark.parametrize("output", ["torch", "numpy"])
def test_a_batch_of_a_store_becomes_a_tensordict_over_the_same_memory(output: Any):
    fields = {"obs": Field((3,), "float32"), "next.reward": Field((), "int64")}
    with Store.create(fields, max_length=6, capacity=8) as store:
        store.insert({"obs": np.zeros((8, 6, 3), np.float32), "next.reward": np.arange(48).reshape(8, 6)})
        with Replay(store, Prioritized(seed=0, beta=0.5), 4, window=5, prefetch=0, output=output) as replay:
            batch = replay.sample()
            found = batch.to_tensordict()
    assert found.batch_size == (4,)
    assert found["obs"].shape == (4, 5, 3)
    assert torch.equal(found["next", "reward"], torch.as_tensor(batch["next.reward"]))
    found["obs"][0, 0, 0] = 7
    assert batch["obs"][0, 0, 0] == 7
    assert set(found.keys()) == {"obs", "next", *batch.as_dict()} - {"next.reward"}
    assert torch.equal(found["mask"], torch.as_tensor(batch.mask))


def test_a_batch_that_is_no_tensordict_is_refused():
    names = ("a", "a.b"), ("a.b", "a"), ("mask",)
    for chosen in names:
        with Store.create({name: Field((), "int64") for name in chosen}, max_length=2, capacity=2) as store:
            keys = store.insert({name: np.zeros((2, 2), np.int64) for name in chosen})
            with pytest.raises(ArgumentError):
                fetch(store, keys).to_tensordict()
            if chosen == ("mask",):
                continue
            with pytest.raises(ArgumentError, match="packed"):
                dataclasses.replace(fetch(store, keys), cu_seqlens=torch.zeros(3)).to_tensordict()


def test_a_pickle_is_the_same_storage_and_a_checkpoint_another(tmp_path):
    buffer = make(100, PrioritizedSampler(alpha=1.0))
    buffer.extend(items(0, 40))
    buffer.update_priority(torch.arange(40), 1e-3)
    buffer.update_priority(torch.tensor([9]), torch.tensor([1e3]))
    twin = pickle.loads(pickle.dumps(buffer.storage))
    assert twin.store.name == buffer.storage.store.name
    twin.set(0, items(77, 1)[0], set_cursor=False)
    assert buffer[0]["next", "reward"] == 77
    buffer.dumps(tmp_path / "saved")
    loaded = make(100, PrioritizedSampler(alpha=1.0))
    loaded.loads(tmp_path / "saved")
    assert len(loaded) == 40
    assert (loaded.sample(200)["next", "reward"] == 9).sum() > 180
    assert loaded.add(items(40, 1)[0]) == 40
    again = make(100)
    again.load_state_dict(buffer.state_dict())
    assert torch.equal(again[:]["obs"], buffer[:]["obs"])
    assert again.add(items(40, 1)[0]) == 40


def test_items_may_be_trees_of_tensors():
    def tree(t: torch.Tensor) -> dict[Any, Any]:
        return {"a": t, "b": {"c": [t[..., None] + 1, (t + 2,)]}, 30: t.float(), "d": ({"e": t + 3}, [t + 4])}

    buffer = make(10)
    assert buffer.extend(tree(torch.arange(7))).tolist() == list(range(7))
    assert buffer.add(tree(torch.tensor(7))) == 7
    buffer.extend([tree(torch.tensor(t)) for t in (8, 9, 10)])
    found = buffer[:]
    assert list(found) == ["a", "b", 30, "d"]
    expected = tree(torch.tensor([10, *range(1, 10)]))
    leaves, spec = tree_flatten(found)
    wanted, wanted_spec = tree_flatten(expected)
    assert spec == wanted_spec
    assert all(torch.equal(*pair) for pair in zip(leaves, wanted, strict=True))
    assert buffer[3]["b"]["c"][1][0] == 5
    batch, info = buffer.sample(return_info=True)
    assert torch.equal(batch["d"][0]["e"] - 3, torch.where(info["index"] == 0, 10, info["index"]))
    twin = pickle.loads(pickle.dumps(buffer.storage))
    assert tree_flatten(twin.get(4))[1] == wanted_spec
    pairs = make(10)
    pairs.extend([(torch.tensor([t]), torch.tensor(t)) for t in range(3)])
    assert pairs[:][0].tolist() == [[0], [1], [2]]
    for wrong in ([torch.zeros(2), torch.zeros(3)], [(torch.zeros(1),), [torch.zeros(1)]]):
        with pytest.raises(RuntimeError, match="Stacking"):
            pairs.extend(wrong)


def test_a_checkpoint_takes_the_place_of_what_is_there(tmp_path):
    saved = make(100, PrioritizedSampler(alpha=1.0))
    saved.extend(items(0, 120))
    saved.update_priority(torch.arange(100), 1e-3)
    saved.update_priority(torch.tensor([9]), torch.tensor([1e3]))
    saved.dumps(tmp_path)
    buffer = make(100, PrioritizedSampler(alpha=1.0))
    buffer.extend(items(500, 77))
    buffer.loads(tmp_path)
    assert torch.equal(buffer[:]["next", "reward"], saved[:]["next", "reward"])
    assert (buffer.sample(200)["next", "reward"] == 109).sum() > 180
    assert buffer.add(items(7, 1)[0]) == 20
    with pytest.raises(IncompatibleStoreError):
        make(50).storage.loads(tmp_path / "storage")
    of_others = make(100)
    of_others.extend(torch.arange(5))
    with pytest.raises(SchemaError):
        of_others.storage.loads(tmp_path / "storage")


def test_what_means_nothing_is_refused():
    for size in (0, 1.5):
        with pytest.raises(ArgumentError):
            SharedStorage(size)
    for options in ({"alpha": -1}, {"beta": -1}, {"eps": float("nan")}):
        with pytest.raises(ArgumentError):
            PrioritizedSampler(**options)
    buffer = make(20)
    with pytest.raises(SchemaError):
        buffer.add(TensorDict({"text": "no tensor"}, []))
    for item in ({"obs": "text"}, {"a.b": torch.zeros(1)}, {"(a": torch.zeros(1)}, {"a": []}, {1.5: torch.zeros(1)}):
        with pytest.raises(SchemaError):
            buffer.add(item)
    buffer.extend(items(0, 5))
    for wrong in (items(0, 2).exclude("obs"), items(0, 2).double(), TensorDict({"obs": torch.zeros(2, 4)}, [2])):
        with pytest.raises(SchemaError):
            buffer.extend(wrong)
    assert len(buffer) == 5
    for index in (5, -6, torch.tensor([0, 9])):
        with pytest.raises(IndexError):
            buffer.storage.get(index)
    with pytest.raises(ArgumentError):
        buffer.update_priority(torch.tensor([0]), torch.tensor([1.0]))
    with pytest.raises(ArgumentError):
        ReplayBuffer(storage=LazyTensorStorage.__new__(LazyTensorStorage), writer=RoundRobinWriter())
    buffer = make(20, PrioritizedSampler())
    buffer.extend(items(0, 5))
    with pytest.raises(ArgumentError):
        buffer.update_priority(torch.tensor([20]), torch.tensor([1.0]))
    with pytest.raises(RuntimeError):
        buffer.update_priority(torch.tensor([1, 2]), torch.tensor([1.0, 2.0, 3.0]))
    with pytest.raises(SchemaError):
        buffer.update_priority(torch.tensor([1]), torch.tensor([float("nan")]))
    buffer.storage.close()
    for call in (buffer.sample, lambda: buffer.add(items(0, 1)[0]), lambda: buffer[0], lambda: len(buffer)):
        with pytest.raises(StoreClosedError):
            call()


@pytest.mark.slow
def test_the_example_runs():
    script = Path(__file__).parents[2] / "examples" / "torchrl_shared_buffer.py"
    arguments = ["--steps", "300", "--batches", "300"]
    done = preloaded.run([sys.executable, str(script), *arguments], timeout=patience(100))
    assert done.returncode == 0, done.stderr
    found = re.match(r"301 items of two processes; squared TD error (\S+) at first, (\S+) at the end", done.stdout)
    assert found is not None, done.stdout
    assert float(found[2]) < float(found[1]) / 2
