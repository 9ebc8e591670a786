"""Fixtures for the tests of replays and job checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import placed_rows
import pytest
import rank_batches

import geartrain as gt
import geartrain.replay.distributed.checkpoint as shards
import geartrain.store.checkpoint_writer as saving


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of many small chunks, polled often and never flushed."""
    monkeypatch.setattr(saving, "CHUNK_BYTES", 600)  # ten rows
    monkeypatch.setattr(saving, "PIECE_BYTES", 250)
    monkeypatch.setattr(shards, "POLL_S", 0.02)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no test pulls the plug
    for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sharded_stores(store_name: Callable[[], str]) -> Iterator[Callable[..., list[gt.Store]]]:
    """The population, cut into shards of different sizes, the second of several empty."""
    made: list[gt.Store] = []

    def make(shards: int, **options: Any) -> list[gt.Store]:
        inner = np.sort(np.random.default_rng(shards).integers(0, rank_batches.N // 4, shards - 1)) * 4
        if shards > 2:
            inner[1] = inner[0]
        stores = []
        for first, last in zip([0, *inner.tolist()], [*inner.tolist(), rank_batches.N], strict=True):
            store = gt.Store.create(
                store_name(), rank_batches.FIELDS, max_length=rank_batches.STEPS, capacity=rank_batches.N, **options
            )
            rank_batches.insert(store, first, last)
            stores.append(store)
        made.extend(stores)
        return stores

    yield make
    for store in made:
        store.close()


@pytest.fixture
def empty_stores(store_name: Callable[[], str]) -> Iterator[placed_rows.Stores]:
    """Empty stores, one for each capacity."""
    made: list[gt.Store] = []

    def make(*capacities: int, fields: dict[str, gt.Field] = placed_rows.FIELDS, **options: Any) -> list[gt.Store]:
        stores = [
            gt.Store.create(store_name(), fields, max_length=placed_rows.STEPS, capacity=each, **options)
            for each in capacities
        ]
        made.extend(stores)
        return stores

    yield make
    for store in made:
        store.close()
