"""A storage of torchrl's replay buffer shared by processes and threads: by name, by fork and by pickle."""

from __future__ import annotations

import os
import pickle
import secrets
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from deadlines import patience
from torchrl.data import ReplayBuffer
from torchrl_buffers import in_child, items, make

import geartrain.integrations.torchrl.stored_items as storage_module
from geartrain.errors import ArgumentError, IncompatibleStoreError
from geartrain.integrations.torchrl import PrioritizedSampler, RoundRobinWriter, SharedStorage, UniformSampler
from geartrain.store.store import Store

pytestmark = pytest.mark.usefixtures("no_stock_torchrl_code")


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


def test_a_storage_that_holds_nothing_yet_is_shared_by_its_pickle():
    buffer = make(100)
    twin = pickle.loads(pickle.dumps(buffer.storage))
    assert len(twin) == 0
    other = ReplayBuffer(storage=twin, sampler=UniformSampler(), writer=RoundRobinWriter())
    other.extend(items(0, 30))
    assert len(buffer) == 30
    buffer.extend(items(30, 5))
    assert other[:]["next", "reward"].tolist() == list(range(35))


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
