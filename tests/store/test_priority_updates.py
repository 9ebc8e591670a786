"""Updates of batches' rows: in the order of their draws, and counted as stale where the store cannot have a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.errors import ArgumentError, SchemaError
from geartrain.selection import Candidates
from geartrain.store.priorities import set_in_draw_order

FIELDS = {"x": gt.Field((), "int64")}


@pytest.mark.parametrize("per", ["row", "step"])
def test_the_later_draws_priority_holds_and_what_the_store_cannot_have_is_stale(per: Any) -> None:
    steps = None if per == "row" else np.array([1, 1, 0, 1, 9, 0], np.uint32)
    with gt.Store.create(FIELDS, max_length=2, capacity=8, priority_per=per) as store:
        inserted = store.insert({"x": np.zeros((8, 2), np.int64)})
        rows = np.array([3, 3, 5, 3, 5, 99], np.uint32)
        keys = gt.Keys(rows, np.full(6, inserted.generation[0]), step=steps, draw=np.array([7, 9, 1, 8, 2, 3]))
        stale = set_in_draw_order(store, keys, np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
        assert stale == (1 if per == "row" else 2)  # row 99, and step 9
        of = store.native
        if per == "row":
            candidates = Candidates.of_store(of, store.column)
            assert (candidates.native.priorities(np.arange(8, dtype=np.uint32)) >> 16).tolist() == [
                1,
                1,
                1,
                2,
                1,
                5,
                1,
                1,
            ]
        else:
            rows, generations = np.arange(8, dtype=np.uint32), np.full(8, inserted.generation[0])
            first, second = (of.step_priorities(rows, generations, np.full(8, step, np.uint32)) for step in (0, 1))
            assert (first >> 16).tolist() == [1, 1, 1, 1, 1, 3, 1, 1]
            assert (second >> 16).tolist() == [1, 1, 1, 2, 1, 1, 1, 1]


def test_a_priority_that_is_none_sets_none_of_them() -> None:
    with gt.Store.create(FIELDS, max_length=1, capacity=4) as store:
        keys = store.insert({"x": np.zeros((4, 1), np.int64)})
        for wrong in (-1.0, np.nan, np.inf):
            with pytest.raises((SchemaError, ArgumentError)):
                set_in_draw_order(store, keys, np.array([2.0, 2.0, 2.0, wrong]))
        assert store.native.total_priority() == 4 << 16
