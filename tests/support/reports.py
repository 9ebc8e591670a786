"""A folder of segments and reports of its own, for tests of process reports and of those who read them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import patience

import geartrain as gt
from geartrain.core import process_report

X = {"x": gt.Field((2,), "float32")}


@pytest.fixture
def reporting_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of segments that no other test and no other program uses, reports too: a host of its own."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setenv("GEARTRAIN_DIR", str(folder))
    monkeypatch.setenv(process_report.PERIOD_VARIABLE, "0.1")
    reporter = process_report._Reporter()
    monkeypatch.setattr(process_report, "_reporter", reporter)
    yield folder
    reporter.close()


def until(look: Any, seconds: float = 30.0) -> Any:
    """What `look` returns, once it is true."""
    until_s = time.monotonic() + patience(seconds)
    while not (found := look()):
        assert time.monotonic() < until_s, found
        time.sleep(0.02)
    return found


def make(name: str = "rows", n: int = 5, **options: Any) -> gt.Store:
    store = gt.Store.create(name, X, max_length=1, capacity=100, **options)
    if n:
        store.insert({"x": np.zeros((n, 1, 2), np.float32)})
    return store


class Owner:
    """Something that has figures."""
