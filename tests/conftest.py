"""Fixtures for all tests: store names of their own, and nothing left behind in /dev/shm."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_numbers = itertools.count()


@pytest.fixture
def store_name() -> Iterator[Callable[[], str]]:
    """Makes names no other test has, and removes whatever is left under them."""
    prefix = f"test-{os.getpid()}-{secrets.token_hex(3)}-{next(_numbers)}"
    made = itertools.count()
    yield lambda: f"{prefix}.{next(made)}"
    for left in Path("/dev/shm").glob(f"geartrain.{prefix}.*"):
        left.unlink()
