"""Records of rows and their parts, as journals and checkpoints of stores with axes, strings or tasks keep them.

A part is what one task, or the insert, has for one row (native/store/saved_records.h).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.errors import CheckpointError, JournalError, SchemaError

#: A row without its parts. `generation` is that of the key, which is odd, or an even one of a row that is not there.
ROW = np.dtype(
    [
        ("sequence", "<u8"),
        ("inserted_at_ns", "<u8"),
        ("row", "<u4"),
        ("generation", "<u4"),
        ("priority", "<u4"),  # fixed point
        ("times_sampled", "<u4"),
        ("state", "u1"),
        ("reserved", "u1", 7),
    ]
)
#: States of rows, as of native/segment/segment.h.
FREE, WRITING, COMMITTED, EXHAUSTED, UNDER_WAY, TAKEN = 0, 1, 2, 3, 5, 6

PART = np.dtype(
    [
        ("change", "<u8"),  # number of its last change
        ("version", "<i8"),  # of the policy that did the task
        ("bytes", "<u8"),
        ("span", "<u8"),  # where it lies in its segment
        ("step", "<u8"),  # of the batch that took the row
        ("place", "<u4"),  # in that batch
        ("row", "<u4"),
        ("generation", "<u4"),
        ("task", "<u2"),  # 0: the insert
        ("state", "u1"),
        ("reserved", "u1"),
        ("lengths", "<u4", 8),  # items of each axis
    ]
)
#: States of parts. A claimed task is told as not done.
NOT_DONE, DONE, TAKEN_BY = 0, 2, 3

#: Names of what `_native.Store.task_state` counts, of the store and of each of its tasks.
TASK_COUNTERS = ("dropped", "given_up", "set_back", "revoked", "stale")
TASK_FIGURES = ("done", "released", "deaths", "set_back")


def as_bytes(records: NDArray[Any]) -> NDArray[np.uint8]:
    """Records (n,) as the native store takes them: bytes (n, size)."""
    return np.ascontiguousarray(records).view(np.uint8).reshape(len(records), records.dtype.itemsize)


def runs_of(ends: NDArray[Any], most: int) -> Iterator[tuple[slice, int]]:
    """Cuts pieces into runs of at most `most` bytes, or of one piece: each run, and where its bytes begin.

    Args:
        ends: (n,) bytes of all pieces up to each, itself included.
    """
    first = 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield slice(first, last), before
        first = last


def changed_parts(store: _native.Store, since: int) -> tuple[int, NDArray[Any], NDArray[Any]]:
    """What to ask for next, rows (n,) of ROW and parts (m,) of PART that have changed since; 0: all there is."""
    following, rows, parts = store.changed_parts(since)
    return following, rows.reshape(-1).view(ROW), parts.reshape(-1).view(PART)


def load_rows(
    store: _native.Store,
    rows: NDArray[Any],
    contents: Iterable[tuple[NDArray[Any], NDArray[np.uint8], NDArray[np.uint64]]],
    next_sequence: int,
    source: Path,
    damaged: type[CheckpointError] | type[JournalError],
) -> None:
    """Fills a new store with axes, strings or tasks.

    Args:
        rows: (n,) with the columns of ROW: those that are there in the order of their sequences, and free ones.
        contents: parts (m,) with the columns of PART but the span, their bytes one behind the other, and the bounds
            (m + 1,) of each.
        source, damaged: where they come from, and the error where the tables contradict themselves.

    Raises:
        NoSpaceError: the spans are too few.
    """
    try:
        store.begin_load()
        for saved, content, bounds in contents:
            parts = np.zeros(len(saved), PART)
            for name in set(PART.names or ()) - {"span"}:
                parts[name] = saved[name]
            store.load_parts(as_bytes(parts), content, bounds)
        saved_rows = np.zeros(len(rows), ROW)
        for name in set(ROW.names or ()) - {"reserved"}:
            saved_rows[name] = rows[name]
        store.finish_load(as_bytes(saved_rows), next_sequence)
    except SchemaError as error:
        raise damaged(f"{source} is damaged: {error}") from None


__all__ = [
    "COMMITTED",
    "DONE",
    "EXHAUSTED",
    "FREE",
    "NOT_DONE",
    "PART",
    "ROW",
    "TAKEN",
    "TAKEN_BY",
    "TASK_COUNTERS",
    "TASK_FIGURES",
    "UNDER_WAY",
    "WRITING",
    "as_bytes",
    "changed_parts",
    "load_rows",
    "runs_of",
]
