"""Stores that are saved, and what is in them and in their checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt
import geartrain.store.checkpoint_chunks as saving

FIELDS = {
    "obs": gt.Field((3,), "float32"),
    "half": gt.Field((2,), "bfloat16"),
    "id": gt.Field((), "int64", per_row=True),
}


def fill(store: gt.Store, n: int, seed: int = 0) -> gt.Keys:
    rng = np.random.default_rng(seed)
    return store.insert(
        {
            "obs": rng.normal(size=(n, 15, 3)).astype("float32"),
            "half": rng.integers(0, 2**16, (n, 15, 2), np.uint16).view(bfloat16()),
            "id": np.arange(n) + 1000 * seed,
        },
        lengths=rng.integers(1, 16, n),
        priorities=rng.random(n) * 10,
        versions=rng.integers(0, 9, n),
    )


def bfloat16() -> Any:
    return pytest.importorskip("ml_dtypes").bfloat16


def contents(store: gt.Store) -> tuple[Any, ...]:
    batch = gt.fetch(store, store.keys(), output="numpy")
    status = store.status()
    return (
        {name: batch[name].view(np.uint8).tolist() if name == "half" else batch[name].tolist() for name in batch},
        {name: status[name].tolist() for name in status},
    )


def small_files(monkeypatch: pytest.MonkeyPatch, *, chunk_bytes: int, piece_bytes: int = 1000) -> None:
    monkeypatch.setattr(saving, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(saving, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thousands of files; no test pulls the plug


def chunks(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("chunk-*.bin"))
