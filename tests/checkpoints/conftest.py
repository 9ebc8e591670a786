"""Fixtures for the tests of job checkpoints."""

from __future__ import annotations

import os

import pytest

import geartrain.checkpoints.job as shards
import geartrain.store.checkpoint_chunks as saving


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of many small chunks, polled often and never flushed."""
    monkeypatch.setattr(saving, "CHUNK_BYTES", 600)  # ten rows
    monkeypatch.setattr(saving, "PIECE_BYTES", 250)
    monkeypatch.setattr(shards, "POLL_S", 0.02)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no test pulls the plug
    for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
