"""Fixtures for the tests of stores."""

from __future__ import annotations

import pytest
from journals import SlowDisk, slow_disk


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return slow_disk(monkeypatch)
