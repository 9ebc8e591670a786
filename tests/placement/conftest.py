"""Fixtures for the tests of placement."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import placed_rows
import pytest

import geartrain as gt


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
