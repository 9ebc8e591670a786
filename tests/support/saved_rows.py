"""What is saved of a store with tasks: of a living store, and of what a journal would restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import geartrain as gt
from geartrain.store.journal_directory import JournalContents, JournalDirectory
from geartrain.store.saved_parts import FREE, NOT_DONE, PART, ROW, WRITING

#: (row, task): generation of the key, version, lengths of axes, step and place of a row that is taken, bytes.
Pieces = dict[tuple[int, int], tuple[Any, ...]]


def _piece(part: Any, data: Any) -> tuple[Any, ...]:
    taken = int(part["step"]), int(part["place"])
    return int(part["generation"]), int(part["version"]), tuple(part["lengths"].tolist()), taken, bytes(data)


def _pieces(parts: Any, data: Any, offsets: Any) -> Pieces:
    found = {}
    for i, part in enumerate(parts):
        found[int(part["row"]), int(part["task"])] = _piece(part, data[int(offsets[i]) : int(offsets[i + 1])])
    return found


def pieces_of(store: gt.Store) -> tuple[Pieces, dict[int, int]]:
    """All parts of a store's rows, and the sequence of each row."""
    _, raw_rows, raw_parts = store.native.changed_parts(0)
    rows, parts = raw_rows.reshape(-1).view(ROW), raw_parts.reshape(-1).view(PART)
    data, offsets, ok = store.native.copy_parts(raw_parts)
    assert ok.all()
    assert not np.any(parts["state"] == NOT_DONE)
    there = (rows["state"] != FREE) & (rows["state"] != WRITING)
    return _pieces(parts, data, offsets), {int(each["row"]): int(each["sequence"]) for each in rows[there]}


def pieces_in(path: Path) -> tuple[Pieces, JournalContents]:
    """All parts that are restored from a journal."""
    directory = JournalDirectory(path)
    contents = directory.contents()
    found: Pieces = {}
    for parts, data, offsets in directory.read_parts(contents):
        found.update(_pieces(parts, data, offsets))
    rows = contents.records["generation"]
    assert {row for row, _ in found} == set(np.flatnonzero(rows).tolist())
    assert all(its[0] == rows[row] for (row, _), its in found.items())
    return found, contents
