"""Stores with a journal, what is in them, and disks that are slow or fail."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tagged
from deadlines import patience
from journal_disk import RecordingDisk

import geartrain as gt
import geartrain.store.journal as journal_module

CAPACITY = 16


def create(path: Path, name: str | None = None, **options: Any) -> gt.Store:
    options = {"journal_sync_s": 30.0, **options}
    where = () if name is None else (name,)
    return gt.Store.create(*where, tagged.FIELDS, max_length=tagged.STEPS, capacity=CAPACITY, journal=path, **options)


def content(store: gt.Store) -> dict[str, np.ndarray[Any, Any]]:
    """Everything about the rows."""
    keys = store.keys()
    batch = gt.fetch(store, keys, output="numpy", threads=1)
    assert tagged.mixed(batch) == []
    return {"row": keys.row, **store.status(keys), **{name: batch[name] for name in tagged.FIELDS}}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name, values in one.items():
        assert np.array_equal(values, other[name]), name


def tags(store: gt.Store) -> list[int]:
    return sorted(int(tag) for tag in store.column("tag")[store.keys().row])


def lose_power(store_name: str) -> None:
    """Shared memory is empty after a power cut; the processes are killed before."""
    (Path("/dev/shm") / f"geartrain.{store_name}").unlink()


class SlowDisk(RecordingDisk):
    """A disk whose flushes wait for `go`, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.go.set()
        self.error: OSError | None = None

    def sync(self, fd: int) -> None:
        assert self.go.wait(patience(60))
        if self.error is not None:
            raise self.error
        super().sync(fd)


def slow_disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    """The disk of all journals that stores begin during the test."""
    slow = SlowDisk()
    options = journal_module.JournalOptions.__init__

    def with_disk(self: Any, *given: Any) -> None:
        options(self, *given, slow)

    monkeypatch.setattr(journal_module.JournalOptions, "__init__", with_disk)
    return slow


class KillingDisk(RecordingDisk):
    """Ends the process before its nth operation."""

    def __init__(self, operations: int) -> None:
        super().__init__()
        self.left = operations
        self.before = self.count

    def count(self, operation: str) -> None:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
