"""Priorities of steps come back with a job's checkpoint: as saved, cut into other shards, or adopted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.checkpoints.job import load_checkpoint, save_checkpoint
from geartrain.errors import RanksDisagreeError
from geartrain.tools.testing import run_ranks

FIELDS = {"id": gt.Field((), "int64", per_row=True), "x": gt.Field((), "float32")}


def filled(name: str, first: int, n: int, priority_per: Any = "step") -> gt.Store:
    """A store of n rows of 2 to 4 steps, some places in it free, whose steps have priorities by `saved`."""
    store = gt.Store.create(name, FIELDS, max_length=4, capacity=30, priority_per=priority_per)
    ids = np.arange(first, first + n)
    keys = store.insert({"id": ids, "x": np.zeros((n, 4), np.float32)}, lengths=2 + ids % 3)
    if priority_per == "step":
        for key, number in zip(keys, ids.tolist(), strict=True):
            store.update_priorities(key[[0] * 2].of_steps([0, 1]), saved(number))
    store.delete(keys[::5])
    return store


def saved(number: int) -> list[float]:
    return [number / 4, 0.0 if number % 2 else 7.5]


def by_id(stores: list[gt.Store]) -> dict[int, list[float]]:
    """The priorities of all rows' steps."""
    found = {}
    for store in stores:
        assert store.per_step and not store.audit()
        status = store.status()
        for key, length in zip(store.keys(), status["length"].tolist(), strict=True):
            number = int(store.column("id")[key.row[0]])
            found[number] = store.status(key[[0] * length].of_steps(np.arange(length)))["priority"].tolist()
    return found


def test_resharding_keeps_priorities_of_steps(store_name: Any, tmp_path: Path) -> None:
    stores = [filled(store_name(), 100, 17), filled(store_name(), 200, 8)]
    before = by_id(stores)
    assert before[101] == [25.25, 0.0, 1.0, 1.0]
    run_ranks(2, lambda r: save_checkpoint(stores[r.rank], tmp_path, r, step=1))
    for store in stores:
        store.close()
    for n in (3, 2, 1):
        names = [store_name() for _ in range(n)]

        def load(ranks: Any, n: int = n, names: list[str] = names) -> Any:
            return load_checkpoint(tmp_path, names[ranks.rank], ranks, shard=(ranks.rank, n), reshard=True)[0]

        loaded = run_ranks(n, load)
        assert by_id(loaded) == before
        for store in loaded:
            store.close()


def test_resharding_keeps_the_priority_of_new_rows(store_name: Any, tmp_path: Path) -> None:
    stores = [gt.Store.create(store_name(), FIELDS, max_length=4, capacity=30, new_priority="max") for _ in range(2)]
    for store, priority in zip(stores, (0.5, 0.25), strict=True):
        store.update_priorities(store.insert({"id": np.arange(4), "x": np.zeros((4, 4), np.float32)}), [priority] * 4)
    run_ranks(2, lambda r: save_checkpoint(stores[r.rank], tmp_path, r, step=1))
    for store in stores:
        store.close()
    store, _, _ = load_checkpoint(tmp_path, store_name(), reshard=True)
    assert store.new_priority == 0.5
    assert store.options["new_priority"] == "max"
    store.close()


def test_an_adopted_store_gets_the_priorities_of_steps_that_were_saved(
    store_name: Any, tmp_path: Path, fork: Callable[[Callable[[], object]], int]
) -> None:
    name = store_name()

    def train_and_die() -> None:
        store = filled(name, 100, 10)
        save_checkpoint(store, tmp_path, step=1)
        keys = store.keys()
        store.update_priorities(keys.of_steps(0), np.full(len(keys), 99.0))
        store.delete(keys[:1])
        store.insert({"id": [500], "x": np.zeros((1, 2), np.float32)}, priorities=[3.0])
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(fork(train_and_die), 0)
    store, _, report = load_checkpoint(tmp_path, name, adopt=True)
    assert (report.adopted, report.newer, report.gone) == (7, 1, 1)
    found = by_id([store])
    assert found.pop(500) == [3.0, 3.0]
    assert len(found) == 7 and all(each[:2] == saved(number) for number, each in found.items())
    store.close()


def test_shards_keep_the_same_kind_of_priorities(store_name: Any, tmp_path: Path) -> None:
    stores = [filled(store_name(), 100, 5), filled(store_name(), 200, 5, "row")]
    with pytest.raises(RanksDisagreeError, match="priority_per"):
        run_ranks(2, lambda r: save_checkpoint(stores[r.rank], tmp_path, r, step=1))
    for store in stores:
        store.close()
