"""Journals: what a process is about to do and has done, in a file that outlives its death.

An entry is written before the call it is about, and its state changed after it. A process that is killed leaves the
entry of the call it was in; the pages of a mapped file are the kernel's, and none is lost with the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CAPACITY = 1 << 16
#: States of an entry.
INTENDED, COMMITTED, DELETING, DELETED, DELIVERED = range(1, 6)
#: Kinds of rows: of an insert or commit; or published while it grows.
WHOLE, OPEN = 0, 1
_ENTRY = np.dtype([("tag", "<u8"), ("state", "u1"), ("kind", "u1"), ("steps", "<u2"), ("pad", "V4")])
_HEADER = 64


class Entry(NamedTuple):
    """One tag of a journal, and of an episode how many of its actions are in the store for certain."""

    tag: int
    state: int
    kind: int
    steps: int = 0


class Journal:
    """One process's journal. Entries are in the order of its calls.

    Args:
        path: of the file, which is created.
        number: of the process; the upper bits of its tags.
    """

    def __init__(self, path: Path, number: int) -> None:
        self.path, self.number = path, number
        memory = np.memmap(path, np.uint8, "w+", shape=(_HEADER + CAPACITY * _ENTRY.itemsize,))
        self._header = memory[:_HEADER].view(np.uint64)
        self._entries = memory[_HEADER:].view(_ENTRY)

    def beat(self) -> None:
        """One more call was made."""
        self._header[1] += np.uint64(1)

    @property
    def full(self) -> bool:
        """Whether there is hardly room for another call's entries."""
        return int(self._header[0]) > CAPACITY - 64

    def intend(self, n: int, kind: int = WHOLE) -> tuple[slice, NDArray[np.uint64]]:
        """Entries and tags for the rows of one call."""
        at = int(self._header[0])
        tags = np.uint64(self.number << 24) + np.arange(at, at + n, dtype=np.uint64)
        return self.note(tags, INTENDED, kind), tags

    def note(self, tags: NDArray[np.uint64], state: int, kind: int = WHOLE) -> slice:
        """Adds entries of one call."""
        at = int(self._header[0])
        entries = slice(at, at + len(tags))
        self._entries["tag"][entries] = tags
        self._entries["kind"][entries] = kind
        self._entries["state"][entries] = state
        self._header[0] = at + len(tags)
        return entries

    def set(self, entries: slice | NDArray[np.int64], state: int) -> None:
        """The state of entries from now on."""
        self._entries["state"][entries] = state

    def published(self, entries: slice, steps: int) -> None:
        """That many actions of an episode are in the store from now on."""
        self._entries["steps"][entries] = steps

    def of(self, tags: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Entries of tags of this process's."""
        return (tags & np.uint64((1 << 24) - 1)).astype(np.int64)

    def mine(self, tags: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which tags are this process's."""
        return (tags >> np.uint64(24)) == np.uint64(self.number)


def beats_of(path: Path) -> int:
    """How many calls a process has made."""
    return int(np.fromfile(path, np.uint64, 2)[1])


def read(path: Path) -> Iterator[Entry]:
    """The entries of a journal."""
    if path.stat().st_size < _HEADER:
        return  # it was killed before it had one
    count = int(np.fromfile(path, np.uint64, 1)[0])
    for entry in np.fromfile(path, _ENTRY, count, offset=_HEADER).tolist():
        yield Entry(*entry[:4])
