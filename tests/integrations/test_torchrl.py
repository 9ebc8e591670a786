"""torchrl's replay buffer over a storage in shared memory: items, cursor and priorities are those of all processes."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import secrets
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
import torch
from deadlines import patience
from tensordict import TensorDict, tensorclass
from torchrl.data import LazyTensorStorage, ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import samplers as stock_samplers
from torchrl.data.replay_buffers import storages as stock_storages
from torchrl.data.replay_buffers import writers as stock_writers

import geartrain.integrations.torchrl.storage as storage_module
from geartrain.core.schema import Field
from geartrain.errors import ArgumentError, IncompatibleStoreError, SchemaError, StoreClosedError
from geartrain.integrations.torchrl import PrioritizedSampler, RoundRobinWriter, SharedStorage, UniformSampler
from geartrain.replay.fetch import fetch
from geartrain.replay.replay import Replay
from geartrain.selection.random import Prioritized
from geartrain.store.store import Store

pytestmark = [
    pytest.mark.filterwarnings("ignore:Got conflicting batch_sizes"),
    pytest.mark.filterwarnings("ignore:Using `add"),
]


@pytest.fixture(autouse=True)
def no_stock_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrl's own storages, samplers and writers add and sample with raises."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("code of the stock class ran")

    for cls in (stock_storages.TensorStorage, stock_storages.LazyTensorStorage, stock_storages.StoreStorage):
        for name in ("__init__", "_init", "set", "get", "_get_new_len", "__len__", "_empty"):
            if name in vars(cls):
                monkeypatch.setattr(cls, name, refused)
    for cls in (stock_samplers.RandomSampler, stock_samplers.PrioritizedSampler):
        for name in ("__init__", "sample", "update_priority", "add", "extend"):
            if name in vars(cls):
                monkeypatch.setattr(cls, name, refused)
    for cls in (stock_writers.RoundRobinWriter, stock_writers.TensorDictRoundRobinWriter):
        for name in ("__init__", "add", "extend"):
            monkeypatch.setattr(cls, name, refused)


def items(first: int, n: int) -> TensorDict:
    t = torch.arange(first, first + n)
    return TensorDict({"obs": t[:, None].repeat(1, 3).float(), "next": {"reward": t, "done": t % 7 == 6}}, [n])


def make(size: int = 1000, sampler: Any = None, batch_size: int = 64, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=SharedStorage(size, **options),
        sampler=UniformSampler() if sampler is None else sampler,
        writer=RoundRobinWriter(),
        batch_size=batch_size,
    )


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


def test_every_item_is_equally_likely_and_a_generator_decides():
    buffer = make(100)
    buffer.extend(items(0, 50))
    counts = np.bincount(buffer.sample(20_000)["next", "reward"].numpy(), minlength=50)
    assert ((counts - 400) ** 2 / 400).sum() < 50 + 5 * 10
    drawn = []
    for _ in range(2):
        buffer.set_rng(torch.Generator().manual_seed(3))
        drawn.append(buffer.sample()["next", "reward"])
    assert torch.equal(*drawn)


def test_items_are_drawn_in_proportion_to_their_priorities():
    buffer = make(1000, PrioritizedSampler(alpha=0.5, beta=0.7, eps=1e-3), batch_size=1000)
    buffer.extend(items(0, 600))
    index = torch.arange(600)
    priority = ((index % 10) ** 2).float()
    buffer.update_priority(index, priority)
    counts = np.zeros(600)
    for _ in range(40):
        batch, info = buffer.sample(return_info=True)
        assert torch.equal(batch["next", "reward"], info["index"])
        counts += np.bincount(info["index"].numpy(), minlength=600)
    share = (priority.numpy() + 1e-3) ** 0.5
    expected = 40_000 * share / share.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 600 + 5 * 1200**0.5
    weights = share[info["index"].numpy()] ** -0.7
    assert np.allclose(info["priority_weight"].numpy(), weights / weights.max(), rtol=1e-2)


def test_new_items_have_the_highest_priority():
    buffer = make(1000, PrioritizedSampler(alpha=1.0, beta=1.0), batch_size=2000)
    buffer.extend(items(0, 500))
    buffer.update_priority(torch.arange(500), 1e-3)
    buffer.update_priority(torch.tensor([7, -1]), torch.tensor([50.0, 900.0]))
    buffer.extend(items(500, 2))
    counts = np.bincount(buffer.sample()["next", "reward"].numpy(), minlength=502)
    assert counts[[7, 500, 501]].sum() > 1950
    assert counts[[7, 500, 501]].min() > 500
    assert not buffer.storage.store.audit()
    again = ReplayBuffer(
        storage=buffer.storage, sampler=PrioritizedSampler(alpha=1.0), writer=RoundRobinWriter(), batch_size=2000
    )
    counts = np.bincount(again.sample()["next", "reward"].numpy(), minlength=502)
    assert counts[[7, 500, 501]].sum() > 1950, "a buffer over a storage has undone its priorities"


def test_a_tensordict_buffer_reads_priorities_from_its_batches():
    buffer = TensorDictReplayBuffer(
        storage=SharedStorage(100),
        sampler=PrioritizedSampler(alpha=1.0),
        writer=RoundRobinWriter(),
        batch_size=500,
        priority_key="td_error",
    )
    given = items(0, 40)
    buffer.extend(given)
    buffer.extend(given)  # in which torchrl has put the index
    assert "index" not in buffer.storage.names
    for _ in range(3):
        batch = buffer.sample()
        batch["td_error"] = torch.where(batch["index"] == 33, 100.0, 1e-4)
        buffer.update_tensordict_priority(batch)
    assert (buffer.sample()["index"] == 33).sum() > 450


def test_an_update_that_comes_after_the_storage_was_emptied_makes_no_item():
    buffer = make(20, PrioritizedSampler(alpha=1.0), batch_size=50)
    buffer.update_priority(torch.tensor([3]), torch.tensor([50.0]))  # before the first item
    buffer.extend(items(0, 20))
    late = buffer.sample(return_info=True)[1]["index"]
    buffer.empty()
    buffer.update_priority(late, 50.0)
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample()
    buffer.extend(items(100, 2))
    buffer.update_priority(torch.tensor([1, 2, 19]), torch.tensor([1e-3, 50.0, 50.0]))
    found = buffer.sample()["next", "reward"]
    assert set(found.tolist()) <= {100, 101}
    assert (found == 100).sum() > 45
    assert buffer.storage.highest == pytest.approx(1)
    # What torchrl does over a storage that another process writes to meanwhile: it asks twice how long that is.
    none = torch.full((5,), buffer.sampler.default_priority)
    buffer.sampler.update_priority(torch.arange(2), none, storage=buffer.storage)
    assert buffer.storage.highest == pytest.approx(1)


def in_child(work: Any) -> int:
    """The exit status of a forked child that does this."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_another_process_writes_draws_and_sets_priorities():
    name = f"torchrl-{os.getpid()}-{secrets.token_hex(4)}"
    buffer = make(300, PrioritizedSampler(alpha=1.0), batch_size=500, store=name)

    def other() -> None:
        joined = make(300, PrioritizedSampler(alpha=1.0), batch_size=400, store=name)
        assert len(joined) == 200
        batch, info = joined.sample(return_info=True)
        assert torch.equal(batch["next", "reward"], info["index"])
        assert info["index"].max() < 200
        joined.update_priority(torch.arange(200), 1e-3)
        joined.update_priority(torch.tensor([17]), torch.tensor([1000.0]))
        index = joined.extend(items(200, 50))
        assert index.tolist() == list(range(200, 250))
        joined.update_priority(index, 1e-3)

    try:
        buffer.extend(items(0, 200))
        assert in_child(other) == 0
        assert len(buffer) == 250
        assert buffer[:]["next", "reward"].tolist() == list(range(250))
        assert (buffer.sample()["next", "reward"] == 17).sum() > 450
        assert buffer.add(items(250, 1)[0]) == 250
        with pytest.raises(IncompatibleStoreError):
            len(SharedStorage(301, store=name))
    finally:
        buffer.storage.close()
    assert not buffer.storage.store.path.exists()


def test_a_storage_that_was_shared_empty_and_without_a_name_says_so():
    buffer = make(300)

    def write() -> None:
        with pytest.raises(ArgumentError, match="share"):
            buffer.add(items(0, 1)[0])

    assert in_child(write) == 0


def test_who_joins_while_another_makes_the_storage_finds_it_empty_until_it_is_whole(monkeypatch):
    name = f"torchrl-{os.getpid()}-{secrets.token_hex(4)}"
    maker, joined = make(3000, store=name), make(3000, store=name)
    insert, seen = Store.insert, []

    def watched(store: Store, *given: Any, **options: Any) -> Any:
        keys = insert(store, *given, **options)
        seen.append((len(store), len(joined)))
        return keys

    monkeypatch.setattr(storage_module, "_BYTES_AT_ONCE", 1)
    monkeypatch.setattr(Store, "insert", watched)
    try:
        maker.extend(items(0, 10))
        assert seen == [(rows, 0) for rows in range(1, 7)]
        assert joined[:]["next", "reward"].tolist() == list(range(10))
    finally:
        joined.storage.close()
        maker.storage.close()


def test_threads_that_look_while_another_makes_the_storage_find_it_empty_or_whole():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(4):
            storage, made = SharedStorage(600), threading.Event()

            def look(storage: SharedStorage = storage, made: threading.Event = made) -> set[int]:
                seen = {len(storage)}
                while not made.is_set():
                    seen.add(len(storage))
                return seen

            with ThreadPoolExecutor(2) as threads:
                looks = [threads.submit(look) for _ in range(2)]
                try:
                    storage.set(torch.arange(10), items(0, 10))
                finally:
                    made.set()
                assert set().union(*(each.result(patience(30)) for each in looks)) <= {0, 10}
            storage.close()
    finally:
        sys.setswitchinterval(interval)


def test_forked_writers_get_places_of_their_own():
    buffer = make(2000)
    buffer.extend(items(0, 10))
    children = []
    for child in range(2):  # at the same time
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for turn in range(20):
                    buffer.extend(items(1000 * (child + 1) + 10 * turn, 10))
                code = 0
            finally:
                os._exit(code)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0]
    assert len(buffer) == 410
    found = sorted(buffer[:]["next", "reward"].tolist())
    assert found == [*range(10), *range(1000, 1200), *range(2000, 2200)]


def test_no_array_of_the_buffers_size_is_outside_the_store():
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


def test_what_means_nothing_is_refused():
    for size in (0, 1.5):
        with pytest.raises(ArgumentError):
            SharedStorage(size)
    for options in ({"alpha": -1}, {"beta": -1}, {"eps": float("nan")}):
        with pytest.raises(ArgumentError):
            PrioritizedSampler(**options)
    buffer = make(20)
    with pytest.raises(ArgumentError, match="share"):
        pickle.dumps(buffer.storage)
    with pytest.raises(SchemaError):
        buffer.add(TensorDict({"text": "no tensor"}, []))
    with pytest.raises(SchemaError):
        buffer.add({"obs": torch.zeros(3)})
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
