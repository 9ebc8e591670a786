"""Fixtures for the tests of weights."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from weights_processes import SHM

from geartrain import weights


@pytest.fixture
def host() -> Iterator[Path]:
    """A directory in memory, as one host's processes would share it; fails a test that leaves a segment."""
    with tempfile.TemporaryDirectory(prefix="geartrain-test-", dir=SHM) as made:
        yield Path(made)
        gc.collect()
        assert weights.reap(made) == [], "segments were left that only reap removes"
        assert list(Path(made).iterdir()) == []


@pytest.fixture
def other_host() -> Iterator[Path]:
    """Another one."""
    with tempfile.TemporaryDirectory(prefix="geartrain-test-", dir=SHM) as made:
        yield Path(made)
        gc.collect()
        assert list(Path(made).iterdir()) == []
