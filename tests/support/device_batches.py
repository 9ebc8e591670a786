"""Rows for batches on devices, and the check that such a batch is the host's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import geartrain as gt
from geartrain.replay.device import Convert

FIELDS = {
    "x": gt.Field((11,), "float32"),
    "pixels": gt.Field((3, 5), "uint8"),
    "group": gt.Field((), "int64", per_row=True),
}


def filled_store(name: str, *, rows: int, capacity: int, max_length: int, **options: Any) -> gt.Store:
    """A store of rows of random values and lengths, in groups of four."""
    rng = np.random.default_rng(0)
    store = gt.Store.create(name, FIELDS, max_length=max_length, capacity=capacity, **options)
    store.insert(
        {
            "x": rng.normal(size=(rows, max_length, 11)).astype("f"),
            "pixels": rng.integers(0, 255, (rows, max_length, 3, 5), dtype=np.uint8),
            "group": np.arange(rows) // 4,
        },
        lengths=rng.integers(1, max_length + 1, rows),
        priorities=rng.random(rows),
    )
    return store


def check_same(host: gt.Batch, found: gt.Batch, convert: Mapping[str, Convert], packed: bool) -> None:
    """That a batch on a device holds what the host's does, converted and packed as asked."""
    import torch

    assert host.keys == found.keys
    assert host.step == found.step
    assert list(host) == list(found)
    for name, values in host.fields.items():
        timed = name != "group"
        expected = convert[name].apply(values, host.mask if timed else None) if name in convert else values
        assert torch.equal(expected[host.mask] if packed and timed else expected, found[name].cpu()), name
    for name in ("start", "length", "version", "probability", "importance_weights", "draw"):
        mine, theirs = getattr(host, name), getattr(found, name)
        assert (mine is None) == (theirs is None), name
        assert mine is None or np.array_equal(mine.numpy(), theirs.cpu().numpy(), equal_nan=name == "probability"), name
    if packed:
        boundaries: Any = found.cu_seqlens
        assert found.mask is None
        assert boundaries.diff().tolist() == host.mask.sum(1).tolist()
    else:
        assert torch.equal(host.mask, found.mask.cpu())
