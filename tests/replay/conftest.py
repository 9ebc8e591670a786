"""Fixtures for the tests of replays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import rank_batches

import geartrain as gt


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
