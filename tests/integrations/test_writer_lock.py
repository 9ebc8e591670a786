"""Lock of buffers that processes share: closed, as by a signal's handler, before any line of taking and dropping it."""

from __future__ import annotations

import contextlib
import os

from hostile.instants import Interruption

import geartrain as gt
from geartrain.errors import StoreClosedError
from geartrain.integrations.transitions.writer_lock import WriterLock

FIELDS = {"x": gt.Field((), "float32")}


def locked_once(lock: WriterLock, store: gt.Store, inside: list[bool]) -> None:
    with lock.locked(store):
        inside.append(True)


def descriptors_of(path: str) -> list[str]:
    opened = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            opened.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in opened if name.startswith(str(path))]


def closed_at(line: int | None) -> int:
    """Closes lock and store before a line; returns how many lines there are."""
    store, lock, inside = gt.Store.create(FIELDS, max_length=2, capacity=2), WriterLock(5.0), []

    def close() -> None:
        lock.close()
        store.close()

    one = Interruption(line, close)
    try:
        one.during(lambda: locked_once(lock, store, inside))
    except StoreClosedError:
        assert line is not None and not inside
    close()
    assert not descriptors_of(store.path), f"line {line}: the file stays open"
    return one.lines


def test_a_lock_that_is_closed_before_any_of_its_lines_ends_its_call_and_its_file() -> None:
    closed_at(None)  # imports
    lines = closed_at(None)
    assert lines > 20
    for line in range(lines):
        closed_at(line)
