"""What the exporters' tests share: stores of random bits, the formats with their paths, and equality of stores."""

from __future__ import annotations

import numpy as np
from imports import rows

import geartrain as gt

FIELDS = {
    "obs": gt.Field((3,), "float32"),
    "action": gt.Field((), "int64"),
    "goal": gt.Field((2,), "float16", per_row=True),
}
PATHS = {"npz": "rows.npz", "npy": "rows", "parquet": "rows.parquet"}


def values(field: gt.Field, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Any bits of the dtype, NaNs and negative zeros among them."""
    if field.dtype == "bool":
        return rng.random((*shape, *field.shape)) < 0.5
    raw = rng.integers(0, 256, (int(np.prod((*shape, *field.shape))) * field.itemsize,), np.uint8)
    return raw.view(field.numpy_dtype).reshape(*shape, *field.shape)


def fill(store: gt.Store, n: int, seed: int = 0) -> np.ndarray:
    """Inserts n ragged rows of random bits; returns their lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, store.max_length + 1, n)
    data = {
        name: values(field, (n,) if field.per_row else (n, store.max_length), rng)
        for name, field in store.fields.items()
    }
    store.insert(data, lengths=lengths)
    return lengths


def same(found: gt.Store, expected: gt.Store) -> None:
    """Both hold the same rows in the same order: lengths, dtypes, shapes and bytes."""
    assert found.fields == expected.fields
    mine, theirs = rows(found), rows(expected)
    assert len(mine) == len(theirs)
    for row, other in zip(mine, theirs, strict=True):
        for name, array in other.items():
            assert row[name].shape == array.shape
            assert row[name].tobytes() == array.tobytes(), name
