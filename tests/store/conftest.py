"""Fixtures for the tests of stores."""

from __future__ import annotations

from typing import Any

import pytest
from journals import SlowDisk

import geartrain.store.journal as journal_module


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    slow = SlowDisk()
    options = journal_module.JournalOptions.__init__

    def with_disk(self: Any, *given: Any) -> None:
        options(self, *given, slow)

    monkeypatch.setattr(journal_module.JournalOptions, "__init__", with_disk)
    return slow
