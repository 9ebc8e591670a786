"""Stores whose rows are one number each."""

from __future__ import annotations

import numpy as np

import geartrain as gt

X = {"x": gt.Field((), "int64", per_row=True)}

TIMED = {"obs": gt.Field((2,), "float32"), "act": gt.Field((), "int8"), "task": gt.Field((), "int64", per_row=True)}


def xs(store: gt.Store) -> list[int]:
    """The values of all rows, oldest first."""
    return gt.fetch(store, store.keys(), output="numpy")["x"].tolist()


def put(store: gt.Store, *values: int, **options) -> gt.Keys:
    return store.insert({"x": np.array(values, np.int64)}, **options)
