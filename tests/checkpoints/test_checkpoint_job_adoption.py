"""Shards that survived in shared memory are adopted in place of being loaded."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from job_checkpoints import FIELDS, close, load_all, put, records, save_all, steps, stores_of

import geartrain as gt
from geartrain.checkpoints.job import load_checkpoint, save_checkpoint
from geartrain.errors import CheckpointError, StoreExistsError
from geartrain.tools.testing import ThreadRankGroup, run_ranks

pytestmark = pytest.mark.usefixtures("small_chunks")


def train_and_die(name: str, directory: Path, *, load: bool) -> None:
    """A run: priorities change with every batch. It saves at step 5, goes on for 3 steps and is killed."""
    if load:
        store, _, _ = load_checkpoint(directory, name)
        replay = gt.Replay(store, gt.selection.Prioritized(seed=2), 8, prefetch=0, output="numpy")
    else:
        store = gt.Store.create(name, FIELDS, max_length=4, capacity=60)
        put(store, 0, 40)
        replay = gt.Replay(store, gt.selection.Prioritized(seed=2), 8, prefetch=0, output="numpy")
        steps(replay, 5)
        save_checkpoint(store, directory, state=replay.state_dict())
    steps(replay, 3)
    put(store, 500, 2)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_shard_that_survived_is_adopted_and_the_batches_are_those_of_the_uninterrupted_run(
    store_name: Any, tmp_path: Path, fork: Callable[[Callable[[], object]], int]
) -> None:
    with gt.Store.create(store_name(), FIELDS, max_length=4, capacity=60) as store:
        put(store, 0, 40)
        replay = gt.Replay(store, gt.selection.Prioritized(seed=2), 8, prefetch=0, output="numpy")
        steps(replay, 5)
        uninterrupted = steps(replay, 6)
    name = store_name()
    os.waitpid(fork(lambda: train_and_die(name, tmp_path, load=False)), 0)
    with pytest.raises(StoreExistsError):
        load_checkpoint(tmp_path, name)
    store, state, report = load_checkpoint(tmp_path, name, adopt=True)
    assert state is not None
    assert (report.adopted, report.newer, report.gone, report.rows) == (40, 2, 0, 42)
    assert store.audit() == []
    store.delete(store.keys()[40:])  # what came after the checkpoint; the uninterrupted run had not got it
    replay = gt.Replay(store, gt.selection.Prioritized(seed=2), 8, prefetch=0, output="numpy")
    replay.load_state_dict(state)
    assert steps(replay, 6) == uninterrupted
    store.close()


def test_a_store_that_was_loaded_and_not_yet_saved_is_adopted_as_well(
    store_name: Any, tmp_path: Path, fork: Callable[[Callable[[], object]], int]
) -> None:
    first, name = store_name(), store_name()
    os.waitpid(fork(lambda: train_and_die(first, tmp_path, load=False)), 0)
    os.waitpid(fork(lambda: train_and_die(name, tmp_path, load=True)), 0)
    store, _, report = load_checkpoint(tmp_path, name, adopt=True)
    assert (report.adopted, report.newer, report.gone) == (40, 2, 0)
    with gt.Store.load(tmp_path / "step-00000005" / "shard-00000-of-00001", store_name()) as saved:
        assert records(store)[:40] == records(saved), "counts of samples included"
    store.close()


def test_a_cut_shard_is_adopted_and_rows_that_are_gone_are_counted(
    store_name: Any, tmp_path: Path, fork: Callable[[Callable[[], object]], int]
) -> None:
    with stores_of(store_name, [20, 30]) as stores:
        save_all(stores, tmp_path, step=1)
    names = [store_name() for _ in range(3)]

    def load_and_die() -> None:
        loaded = run_ranks(3, lambda r: load_checkpoint(tmp_path, names[r.rank], r, shard=(r.rank, 3), reshard=True))
        loaded[1][0].delete(loaded[1][0].keys()[:4])
        loaded[1][0].update_priorities(loaded[1][0].keys(), np.full(len(loaded[1][0]), 3.0))
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(fork(load_and_die), 0)

    def load(ranks: ThreadRankGroup) -> Any:
        return load_checkpoint(tmp_path, names[ranks.rank], ranks, shard=(ranks.rank, 3), reshard=True, adopt=True)

    loaded = run_ranks(3, load)
    counts = [(report.adopted, report.newer, report.gone) for _, _, report in loaded]
    sizes = [len(store) for store, _, _ in loaded]
    assert counts == [(sizes[0], 0, 0), (sizes[1], 0, 4), (sizes[2], 0, 0)] and sizes[1] == sizes[0] - 4
    fresh = load_all(store_name, tmp_path, 3, reshard=True)
    assert records(loaded[1][0]) == [row for row in records(fresh[1][0]) if row in records(loaded[1][0])]
    close(loaded + fresh)


def test_a_strangers_segment_is_not_adopted(store_name: Any, tmp_path: Path) -> None:
    with stores_of(store_name, [20, 20]) as stores:
        save_checkpoint(stores[0], tmp_path, step=1)
        with pytest.raises(CheckpointError, match="geartrain remove"):
            load_checkpoint(tmp_path, stores[1].name, adopt=True)
        assert len(stores[1]), "and it is as it was"
        store, _, report = load_checkpoint(tmp_path, store_name(), adopt=True)  # nothing there: it is read
        assert report.adopted == 0 and records(store) == records(stores[0])
        store.close()
