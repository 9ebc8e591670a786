"""Samplers of torchrl's replay buffer: uniform and prioritized draws, and whose priorities items have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl_buffers import items, make

from geartrain.integrations.torchrl import PrioritizedSampler, RoundRobinWriter, SharedStorage

pytestmark = [
    pytest.mark.usefixtures("no_stock_torchrl_code"),
    pytest.mark.filterwarnings("ignore:Got conflicting batch_sizes"),
    pytest.mark.filterwarnings("ignore:Using `add"),
]


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


def test_small_priorities_make_new_items_as_small():
    buffer = make(1000, PrioritizedSampler(alpha=1.0, beta=1.0), batch_size=2000)
    buffer.extend(items(0, 500))
    buffer.update_priority(torch.arange(500), 1e-3)
    buffer.extend(items(500, 1))
    counts = np.bincount(buffer.sample()["next", "reward"].numpy(), minlength=501)
    assert counts[500] < 50


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
    assert buffer.storage.highest == pytest.approx(1e-3, rel=1e-3)
    # What torchrl does over a storage that another process writes to meanwhile: it asks twice how long that is.
    none = torch.full((5,), buffer.sampler.default_priority)
    buffer.sampler.update_priority(torch.arange(2), none, storage=buffer.storage)
    assert buffer.storage.highest == pytest.approx(1e-3, rel=1e-3)
