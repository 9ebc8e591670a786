"""Slices of trajectories from a storage in shared memory: whole, of one trajectory, and as likely as they should be."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer

import geartrain.integrations.torchrl.trajectories as trajectories_module
from geartrain.errors import ArgumentError, SchemaError
from geartrain.integrations.torchrl import PrioritizedSliceSampler, RoundRobinWriter, SharedStorage, SliceSampler

pytestmark = pytest.mark.usefixtures("no_stock_slices")


class Episodes:
    """Steps of episodes of random lengths, each step with its episode's number and its own."""

    def __init__(self, shortest: int = 1, longest: int = 30) -> None:
        lengths = np.random.default_rng(0).integers(shortest, longest + 1, 500)
        self.ep = torch.from_numpy(np.repeat(np.arange(500), lengths))
        self.t = torch.from_numpy(np.concatenate([np.arange(n) for n in lengths]))
        self.ends = torch.cat([self.t[1:] == 0, torch.tensor([True])])[:, None]
        self.given = 0

    def steps(self, n: int) -> TensorDict:
        part = slice(self.given, self.given + n)
        self.given += n
        t, ends = self.t[part], self.ends[part]
        data = {"ep": self.ep[part], "t": t, "is_init": t[:, None] == 0}
        return TensorDict({**data, "next": {"done": ends, "terminated": ends & False}}, [n])


def make(sampler: Any, size: int = 1000, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(storage=SharedStorage(size, **options), sampler=sampler, writer=RoundRobinWriter())


def check(batch: TensorDict, info: dict[Any, Any], slice_len: int) -> None:
    """Whole slices of one episode each, marked as they should be."""
    ep, t = batch["ep"].view(-1, slice_len), batch["t"].view(-1, slice_len)
    assert (ep == ep[:, :1]).all()
    assert (t == t[:, :1] + torch.arange(slice_len)).all()
    truncated = info["next", "truncated"].view(-1, slice_len)
    assert truncated[:, -1].all()
    assert not truncated[:, :-1].any()
    assert torch.equal(info["next", "done"], batch["next", "done"] | info["next", "truncated"])
    assert torch.equal(info["next", "terminated"], batch["next", "terminated"])
    init = info["is_init"].view(-1, slice_len)
    assert init[:, 0].all()
    assert torch.equal(init[:, 1:], (t == 0)[:, 1:])


@pytest.mark.parametrize("options", [{}, {"traj_key": "ep"}, {"end_keys": [("next", "terminated"), ("next", "done")]}])
@pytest.mark.parametrize("prioritized", [False, True])
def test_no_slice_runs_over_an_end_or_the_cursor(options: dict[str, Any], prioritized: bool):
    make_sampler = PrioritizedSliceSampler if prioritized else SliceSampler
    buffer = make(make_sampler(slice_len=6, **options), size=1300)
    episodes = Episodes(longest=30)
    sizes = np.random.default_rng(1)
    seen = set()
    for _ in range(60):  # the ring goes around more than twice
        buffer.extend(episodes.steps(int(sizes.integers(1, 110))))
        if len(buffer) < 40:
            continue
        batch, info = buffer.sample(120, return_info=True)
        check(batch, info, 6)
        seen |= set(batch["ep"].tolist())
    assert len(seen) > 100


def test_trajectories_are_equally_likely_and_in_them_every_beginning(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trajectories_module, "_PIECE", 7)
    buffer = make(SliceSampler(slice_len=4), size=24)
    lengths = [3, 4, 5, 2, 10]
    t = torch.cat([torch.arange(n) for n in lengths])
    done = torch.cat([torch.arange(n) == n - 1 for n in lengths])
    buffer.extend(TensorDict({"t": t, "next": {"done": done}}, [24]))
    buffer.set_rng(torch.Generator().manual_seed(0))
    batch, info = buffer.sample(4 * 30_000, return_info=True)
    first = info["index"][0].view(-1, 4)[:, 0]
    counts = np.bincount(first.numpy(), minlength=24)
    expected = np.zeros(24)
    expected[3] = 1 / 3
    expected[7:9] = 1 / 6
    expected[14:21] = 1 / 21
    assert counts[expected == 0].sum() == 0
    of = expected > 0
    assert ((counts[of] - 30_000 * expected[of]) ** 2 / (30_000 * expected[of])).sum() < 9 + 5 * 18**0.5
    buffer.set_rng(torch.Generator().manual_seed(0))
    assert torch.equal(buffer.sample(4 * 30_000)["t"], batch["t"])


def test_slices_begin_in_proportion_to_priorities_where_they_fit():
    buffer = make(PrioritizedSliceSampler(alpha=1.0, beta=1.0, eps=0, slice_len=3), size=30)
    done = torch.arange(30) % 10 == 9
    buffer.extend(TensorDict({"at": torch.arange(30), "next": {"done": done}}, [30]))
    priority = torch.arange(30) % 5 + 1.0
    buffer.update_priority(torch.arange(30), priority)
    counts = np.zeros(30)
    for _ in range(4):
        batch, info = buffer.sample(3 * 5000, return_info=True)
        first = batch["at"].view(-1, 3)[:, 0].numpy()
        counts += np.bincount(first, minlength=30)
        weight = info["priority_weight"].view(-1, 3)
        assert (weight == weight[:, :1]).all()
        assert np.allclose(weight[:, 0].numpy(), priority[first].min().item() / priority[first].numpy(), rtol=1e-3)
    expected = np.where(np.arange(30) % 10 < 8, priority.numpy(), 0)
    expected *= 20_000 / expected.sum()
    assert counts[expected == 0].sum() == 0
    of = expected > 0
    assert ((counts[of] - expected[of]) ** 2 / expected[of]).sum() < 24 + 5 * 48**0.5
    buffer.update_priority(torch.arange(30), torch.where(torch.arange(30) % 10 == 9, 1e9, 1e-9))
    with pytest.raises(RuntimeError, match="strict_length=False"):
        buffer.sample(300)


def test_short_trajectories_are_left_out_or_taken_as_they_are():
    lengths = [2, 7, 1, 4]
    t = torch.cat([torch.arange(n) for n in lengths])
    ep = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    data = TensorDict({"t": t, "episode": ep}, [14])
    strict = make(SliceSampler(slice_len=5), size=50)
    strict.extend(data)
    assert set(strict.sample(100)["episode"].tolist()) == {1}
    with pytest.raises(RuntimeError, match="sufficient length"):
        make_longer = make(SliceSampler(slice_len=8), size=50)
        make_longer.extend(data)
        make_longer.sample(80)
    for sampler in (SliceSampler, PrioritizedSliceSampler):
        buffer = make(sampler(slice_len=5, strict_length=False), size=50)
        buffer.extend(data)
        batch, info = buffer.sample(1000, return_info=True)
        ends = info["next", "truncated"][:, 0].nonzero()[:, 0]
        begins = torch.cat([torch.zeros(1, dtype=torch.long), ends[:-1] + 1])
        assert len(ends) == 200
        assert set(batch["episode"].tolist()) == {0, 1, 2, 3}
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            of = batch["episode"][begin]
            assert (batch["episode"][begin : end + 1] == of).all()
            assert end + 1 - begin == min(5, lengths[of])
            assert (batch["t"][begin : end + 1] == batch["t"][begin] + torch.arange(end + 1 - begin)).all()


@pytest.mark.parametrize(("span", "least"), [(True, 1), (2, 3), ((False, 2), 3), ((1, False), 4)])
def test_slices_may_stick_out_of_their_trajectory(span: Any, least: int):
    buffer = make(SliceSampler(slice_len=5, span=span), size=100)
    buffer.extend(TensorDict({"t": torch.arange(100) % 10, "episode": torch.arange(100) // 10}, [100]))
    batch, info = buffer.sample(5 * 2000, return_info=True)
    ends = info["next", "truncated"][:, 0].nonzero()[:, 0].numpy()
    lengths = np.diff(ends, prepend=-1)
    assert lengths.min() == least
    assert lengths.max() == 5
    first, last = batch["t"].numpy()[ends - lengths + 1], batch["t"].numpy()[ends]
    assert (last - first == lengths - 1).all()
    left, right = span if isinstance(span, tuple) else (span, span)
    assert ((first == 0) & (lengths < 5)).any() == bool(left)
    assert ((last == 9) & (lengths < 5)).any() == bool(right)


@pytest.mark.parametrize("span", [True, (True, False), (False, True), 2])
def test_slices_that_stick_out_of_short_trajectories_have_an_item_inside(span: Any):
    buffer = make(SliceSampler(slice_len=5, strict_length=False, span=span), size=100)
    buffer.extend(TensorDict({"t": torch.arange(40) % 2, "episode": torch.arange(40) // 2}, [40]))
    batch, info = buffer.sample(5 * 200, return_info=True)
    ends = info["next", "truncated"][:, 0].nonzero()[:, 0].numpy()
    lengths = np.diff(ends, prepend=-1)
    assert len(lengths) == 200 and set(lengths) == {1, 2}
    assert (batch["episode"].numpy()[ends - lengths + 1] == batch["episode"].numpy()[ends]).all()


def test_an_interrupted_write_leaves_no_hole(monkeypatch: pytest.MonkeyPatch):
    buffer = make(SliceSampler(slice_len=5), size=15)
    items = TensorDict({"t": torch.arange(10), "episode": torch.arange(10) // 5}, [10])
    buffer.extend(items)
    for fails_at in (10, 0):  # behind the others, and over them
        buffer.sample(10)
        store = type(buffer.storage.store)
        write = store.write

        def interrupted(self: Any, *given: Any, write: Any = write, **options: Any) -> int:
            write(self, *given, **options)
            raise KeyboardInterrupt

        before = len(buffer)
        with monkeypatch.context() as patched:
            patched.setattr(store, "write", interrupted)
            with pytest.raises(KeyboardInterrupt):
                buffer.extend(items[:5] + 100)
        assert len(buffer) == before
        buffer.extend(items[:5] + 200)
        assert buffer[:]["t"][fails_at : fails_at + 5].tolist() == [200, 201, 202, 203, 204]
        episodes = buffer.sample(5 * 50)["episode"].reshape(50, 5)
        assert (episodes == episodes[:, :1]).all() and 200 in episodes


def test_what_is_set_or_written_elsewhere_moves_the_ends():
    sampler = SliceSampler(slice_len=3)
    buffer = make(sampler, size=60)
    ends = torch.arange(20) % 10 == 9
    buffer.extend(TensorDict({"at": torch.arange(20), "next": {"done": ends}}, [20]))
    assert 8 in buffer.sample(3000)["at"].view(-1, 3)[:, 1]
    patch = buffer[5]
    patch["next", "done"] = torch.tensor(True)
    buffer[5] = patch
    found = buffer.sample(3000)["at"].view(-1, 3)[:, 0]
    assert set(found.tolist()) == {0, 1, 2, 3, 6, 7, *range(10, 18)}
    twin = pickle.loads(pickle.dumps(buffer.storage))  # as another process has it
    other = ReplayBuffer(storage=twin, sampler=pickle.loads(pickle.dumps(sampler)), writer=RoundRobinWriter())
    other.extend(TensorDict({"at": torch.arange(20, 60), "next": {"done": torch.arange(20, 60) == 39}}, [40]))
    found = buffer.sample(30_000)["at"].view(-1, 3)[:, 0]
    assert set(found.tolist()) == {0, 1, 2, 3, 6, 7, *range(10, 18), *range(20, 38), *range(40, 58)}
    buffer.empty()
    other.extend(TensorDict({"at": torch.arange(5), "next": {"done": torch.zeros(5, dtype=torch.bool)}}, [5]))
    assert set(buffer.sample(600)["at"].view(-1, 3)[:, 0].tolist()) == {0, 1, 2}


def test_a_look_reads_what_is_new_and_a_margin_keeps_off_the_oldest(monkeypatch: pytest.MonkeyPatch):
    looked: list[int] = []
    read = trajectories_module.Trajectories._read
    monkeypatch.setattr(
        trajectories_module.Trajectories,
        "_read",
        lambda self, store, keys, places: looked.append(places[1] - places[0]) or read(self, store, keys, places),
    )
    buffer = make(SliceSampler(slice_len=4, margin=300), size=2000)
    episodes = Episodes(shortest=10)
    buffer.extend(episodes.steps(1900))
    buffer.sample(40)
    buffer.sample(40)
    buffer.extend(episodes.steps(150))
    _, info = buffer.sample(4000, return_info=True)
    assert looked == [1900, 100, 50]
    age = (info["index"][0] - 50) % 2000
    assert 300 <= age.min() < 330


def test_a_tensordict_buffer_trains_on_slices_by_priority():
    buffer = TensorDictReplayBuffer(
        storage=SharedStorage(500),
        sampler=PrioritizedSliceSampler(alpha=1.0, slice_len=4),
        writer=RoundRobinWriter(),
        batch_size=1024,
        priority_key="td_error",
    )
    buffer.extend(Episodes(shortest=10).steps(400))
    batch = buffer.sample()
    assert batch.batch_size == (1024,)
    assert batch["next", "truncated"].view(256, 4)[:, -1].all()
    assert batch["priority_weight"].shape == (1024,)
    for _ in range(3):
        batch["td_error"] = torch.where(batch["t"] == 2, 100.0, 1e-4)
        buffer.update_tensordict_priority(batch)
        batch = buffer.sample()
    assert (batch["t"].view(-1, 4)[:, 0] == 2).float().mean() > 0.8


def test_slices_that_mean_nothing_are_refused():
    for options in ({}, {"num_slices": 2, "slice_len": 2}):
        with pytest.raises(TypeError):
            SliceSampler(**options)
    for options in (
        {"slice_len": 0},
        {"margin": -1},
        {"span": -1},
        {"traj_key": 3},
        {"end_key": "a", "end_keys": ["b"]},
    ):
        with pytest.raises(ArgumentError):
            SliceSampler(**{"slice_len": 3, **options})
    with pytest.raises(ArgumentError):
        PrioritizedSliceSampler(slice_len=3, span=True)
    buffer = make(SliceSampler(slice_len=3), size=30)
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample(6)
    buffer.extend(TensorDict({"at": torch.arange(9)}, [9]))
    with pytest.raises(SchemaError, match=r"next\.done"):
        buffer.sample(6)
    with pytest.raises(RuntimeError, match="divisible"):
        buffer.sample(7)
    for wrong in (SliceSampler(slice_len=3, span=3, traj_key="at"), SliceSampler(slice_len=3, traj_key="at", margin=9)):
        full = make(wrong, size=9)
        full.extend(TensorDict({"at": torch.arange(9)}, [9]))
        with pytest.raises(ArgumentError):
            full.sample(6)
    with pytest.raises(ArgumentError):
        buffer.update_priority(torch.tensor([0]), torch.tensor([1.0]))
