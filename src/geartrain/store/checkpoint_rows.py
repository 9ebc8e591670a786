"""Saves the committed rows of a store whose rows are of fixed size: which are new, copied a chunk at a time.

checkpoint_format.py describes the format. Rows that are overwritten while they are copied are left out.
"""

from __future__ import annotations

import itertools
import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
import geartrain.store.checkpoint_chunks as chunks
from geartrain.core.progress import Progress
from geartrain.core.schema import Field
from geartrain.store.checkpoint_chunks import Base, NewCheckpoint, Saved, whole_runs
from geartrain.store.checkpoint_format import ROW_RECORD
from geartrain.store.saved_parts import COMMITTED

_HUGE_PAGE = 2 << 20


def save_rows(
    store: _native.Store,
    fields: dict[str, Field],
    max_length: int,
    new: NewCheckpoint,
    target: Path,
    *,
    locks: bool,
    progress: bool,
) -> Saved:
    """Saves the rows into `new`, which becomes `target`; `locks`: the handle may lock the store."""
    end = store.next_sequence()
    rows, generations = store.keys()
    metadata = store.infos(rows)
    if not locks:  # rows are looked at one by one: a later one may be here without those before it
        known = metadata["sequence"] < end
        rows, generations = rows[known], generations[known]
        metadata = {name: values[known] for name, values in metadata.items()}
    free = store.free_rows() if locks else np.zeros(0, np.uint32)
    next_sequence = store.next_sequence()
    # A row whose generation moved between the two looks is another trajectory by now.
    usable = metadata["generation"] == generations
    step_priorities = None
    if store.describe()["step_priorities"]:
        step_priorities, whole = store.copy_step_priorities(rows, generations, metadata["length"])
        usable &= whole != 0
    largest_priority = store.max_priority  # after the priorities: none of them is above it
    chunk, slot = np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.uint32)
    row_bytes = sum(field.block_nbytes(max_length) for field in fields.values())
    with Progress(f"saving {target.name}", int(usable.sum()), unit="rows", enabled=progress) as bar:
        if new.base is not None:
            chunk, slot = _places(new.base, rows, metadata, generations)
            chunk[~usable] = -1
            new.link(chunk, np.full(len(rows), row_bytes) * usable)
            bar.advance(0, int((chunk >= 0).sum()))
        _write(store, new, rows, generations, np.flatnonzero(usable & (chunk < 0)), chunk, slot, row_bytes, bar)
    order = np.flatnonzero(chunk >= 0)
    records = _row_records(store, rows, generations, metadata, order, free)
    records["chunk"][: len(order)] = chunk[order]
    records["slot"][: len(order)] = slot[order]
    new.write_table("rows.bin", records)
    if step_priorities is not None:
        kept = np.repeat(chunk >= 0, metadata["length"])
        new.write_table("steps.bin", step_priorities[kept].astype("<u4", copy=False))
    return new.finish(
        target,
        rows=len(order),
        left_out=len(rows) - len(order),
        counters=store.counters(),
        listed_rows=len(records),
        next_sequence=next_sequence,
        max_priority=largest_priority,
    )


def _places(
    base: Base, rows: NDArray[np.uint32], metadata: dict[str, NDArray[Any]], generations: NDArray[np.uint32]
) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """The chunk and slot of each row that is the same in the base; chunk -1 for the others."""
    records = base.table
    committed = records[: base.checkpoint.rows]
    place_of = np.full(len(records), -1, np.int32 if len(records) < 2**31 else np.int64)
    place_of[committed["row"]] = np.arange(len(committed))
    chunk, slot = np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.uint32)
    place = place_of[rows]
    known = np.flatnonzero(place >= 0)
    place = place[known]
    # One store's sequence numbers are never given twice.
    same = committed["sequence"][place] == metadata["sequence"][known]
    same &= committed["generation"][place] == generations[known]
    same &= committed["length"][place] == metadata["length"][known]  # it may have grown
    same &= committed["inserted_at_ns"][place] == metadata["inserted_at_ns"][known]
    known, place = known[same], place[same]
    chunk[known], slot[known] = committed["chunk"][place], committed["slot"][place]
    return chunk, slot


def _write(
    store: _native.Store,
    new: NewCheckpoint,
    rows: NDArray[np.uint32],
    generations: NDArray[np.uint32],
    wanted: NDArray[np.intp],
    chunk: NDArray[np.int64],
    slot: NDArray[np.uint32],
    row_bytes: int,
    bar: Progress,
) -> None:
    """Copies rows into new chunks and notes where; rows that were overwritten meanwhile stay in none."""
    if not len(wanted):
        return
    numbers = list(range(len(store.describe()["fields"])))
    per_chunk = max(1, chunks.CHUNK_BYTES // row_bytes)
    # Not of the pool that batches share, which would keep them after the save.
    most = min(len(wanted), per_chunk)
    buffers = [_ChunkBuffer(store, numbers, most) for _ in range(1 + (len(wanted) > most))]
    for number, at in enumerate(range(0, len(wanted), per_chunk)):
        part = wanted[at : at + per_chunk]
        new.wait(len(buffers) - 1)
        arrays = buffers[number % len(buffers)].arrays(len(part))
        cores = _native.available_cores()
        _, torn, *_ = _native.fetch(store, rows[part], generations[part], numbers, 0, False, None, cores, arrays)
        kept = part[torn == 0]
        bar.advance(len(part) * row_bytes, len(part))
        if not len(kept):
            continue
        pieces = [array[begin:end] for array in arrays for begin, end in whole_runs(torn == 0)]
        chunk[kept] = new.write_chunk(pieces, len(kept) * row_bytes)
        slot[kept] = np.arange(len(kept))
    new.wait()


class _ChunkBuffer:
    """Memory for the blocks of `rows` rows, given back to the system when its last array is dropped."""

    def __init__(self, store: _native.Store, fields: list[int], rows: int) -> None:
        columns = [store.column(field) for field in fields]
        self._blocks = [(column.dtype, column[0].size) for column in columns]
        sizes = [-(-rows * size * dtype.itemsize // 64) * 64 for dtype, size in self._blocks]
        # In whole huge pages: 32 MB are first written in 2.4 ms there, in 12 with small pages.
        total = -(-sum(sizes) // _HUGE_PAGE) * _HUGE_PAGE
        self._memory = mmap.mmap(-1, total + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        first = -np.frombuffer(self._memory, np.uint8).ctypes.data % _HUGE_PAGE
        self._begins = [first + begin for begin in itertools.accumulate(sizes[:-1], initial=0)]

    def arrays(self, rows: int) -> list[NDArray[Any]]:
        """Of each field the blocks of so many rows, (rows, elements)."""
        return [
            np.frombuffer(self._memory, dtype, rows * size, begin).reshape(rows, size)
            for (dtype, size), begin in zip(self._blocks, self._begins, strict=True)
        ]


def _row_records(
    store: _native.Store,
    rows: NDArray[np.uint32],
    generations: NDArray[np.uint32],
    metadata: dict[str, NDArray[Any]],
    order: NDArray[Any],
    free: NDArray[np.uint32],
) -> NDArray[Any]:
    """The row table: committed rows in order, then all others as free, those of the free queue first."""
    capacity = store.describe()["capacity"]
    records = np.zeros(capacity, ROW_RECORD)
    committed = records[: len(order)]
    committed["row"] = rows[order]
    committed["generation"] = generations[order]
    for column in ("sequence", "inserted_at_ns", "version", "priority", "length", "times_sampled"):
        committed[column] = metadata[column][order]
    committed["state"] = COMMITTED
    taken = np.zeros(capacity, bool)
    taken[committed["row"]] = True
    queued = free[~taken[free]]
    taken[queued] = True
    rest = records[len(order) :]
    rest["row"] = np.concatenate([queued, np.flatnonzero(~taken).astype(np.uint32)])
    # One generation on from a key somebody may hold, so that it stays stale after the restore.
    current = store.infos(np.ascontiguousarray(rest["row"]))["generation"]
    rest["generation"] = current + (current & 1)
    return records


__all__ = ["save_rows"]
