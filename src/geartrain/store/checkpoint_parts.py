"""Saves a store with axes, strings or tasks: its rows in all states, part by part.

checkpoint_format.py describes the format. Processes may work on the rows meanwhile. Each row is saved as it was at one
instant: parts that change while they are copied are asked for again, until a whole round finds none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
import geartrain.store.checkpoint_chunks as chunks
from geartrain.core.progress import Progress
from geartrain.store.checkpoint_chunks import NewCheckpoint, Saved, whole_runs
from geartrain.store.checkpoint_format import NO_CHUNK, PART_RECORD, ROW_RECORD
from geartrain.store.saved_parts import (
    COMMITTED,
    FREE,
    NOT_DONE,
    PART,
    ROW,
    TAKEN,
    UNDER_WAY,
    as_bytes,
    changed_parts,
    runs_of,
)

#: Rounds of copies. Rows with parts that are not whole after these are left out: somebody rewrites them all the time.
MOST_ROUNDS = 10


def _places(saved: NDArray[Any], parts: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """The chunk of each part that is the same in the base, and where it begins there; chunk -1 for the others."""
    chunk, at = np.full(len(parts), -1, np.int64), np.zeros(len(parts), np.uint64)
    tasks = 1 + int(max(parts["task"].max(initial=0), saved["task"].max(initial=0)))
    theirs = _numbers(saved, tasks)
    order = np.argsort(theirs)
    if len(order):
        found = np.searchsorted(theirs, _numbers(parts, tasks), sorter=order).clip(0, len(order) - 1)
        its = saved[order[found]]
        same = its["chunk"] != NO_CHUNK
        for name in ("row", "task", "generation", "change", "bytes"):
            same &= its[name] == parts[name]
        chunk[same], at[same] = its["chunk"][same], its["at"][same]
    return chunk, at


def _numbers(parts: NDArray[Any], tasks: int) -> NDArray[np.int64]:
    numbers: NDArray[np.int64] = parts["row"].astype(np.int64) * tasks + parts["task"]
    return numbers


class PartsSaving:
    """One save: rows and parts as they were told last, and where the bytes of parts lie."""

    def __init__(self, store: _native.Store, new: NewCheckpoint, progress: bool) -> None:
        self._store = store
        self._new = new
        self._progress = progress
        self._next_sequence = 0  # rows of lower ones are saved
        self._rows = np.zeros(0, ROW)
        self._parts = np.zeros(0, PART)
        self._chunk = np.zeros(0, np.int64)
        self._at = np.zeros(0, np.uint64)

    def run(self, target: Path) -> Saved:
        """Saves the store into the new checkpoint, which becomes `target`."""
        store, new = self._store, self._new
        finished = store.task_state()["finished"]  # before the first look: all rows are there then
        self._next_sequence = store.next_sequence()  # so are all rows that were inserted before
        since = self._look(0, None)
        if new.base is not None:
            self._chunk, self._at = _places(new.base.table, self._parts)
            new.link(self._chunk, self._parts["bytes"])
        total = int(self._parts["bytes"][self._chunk < 0].sum())
        with Progress(f"saving {target.name}", total, unit="bytes", enabled=self._progress) as bar:
            for _ in range(MOST_ROUNDS):
                if self._write_chunks(bar):
                    break
                since = self._look(since, self._torn_rows())
            else:
                self._write_chunks(bar)
        left_out = self._torn_rows()
        rows = self._row_records(left_out)
        parts = self._part_records(~np.isin(self._parts["row"], left_out))
        new.write_table("rows.bin", rows)
        new.write_table("parts.bin", parts)
        return new.finish(
            target,
            rows=int((rows["state"] != FREE).sum()),
            left_out=len(left_out),
            # A loader goes on behind what is saved.
            counters={**store.counters(), "inserted": self._next_sequence - 1},
            listed_rows=len(rows),
            parts=len(parts),
            next_sequence=self._next_sequence,
            max_priority=store.max_priority,
            state={**store.task_state(), "finished": finished},
        )

    def _torn_rows(self) -> NDArray[np.uint32]:
        """Rows of which a part changed before it was copied."""
        torn: NDArray[np.uint32] = np.unique(self._parts["row"][(self._chunk < 0) & (self._parts["bytes"] > 0)])
        return torn

    def _look(self, since: int, torn: NDArray[np.uint32] | None) -> int:
        """Takes up what has changed since; returns what to ask for next.

        Rows that were copied whole stay as they were then, whatever happens to them meanwhile. So each look has fewer
        rows than the one before. What is inserted after the first look is not saved.

        Args:
            since: the change to begin at.
            torn: rows to look at; all by default.
        """
        following, rows, parts = changed_parts(self._store, since)
        if torn is not None:
            rows, parts = rows[np.isin(rows["row"], torn)], parts[np.isin(parts["row"], torn)]
        rows["state"][rows["sequence"] >= self._next_sequence] = FREE
        capacity = int(self._store.describe()["capacity"])
        told = np.zeros(capacity, np.uint32)
        told[rows["row"]] = rows["generation"]
        known = np.zeros(capacity, bool)
        known[rows["row"]] = True
        self._rows = np.concatenate([self._rows[~known[self._rows["row"]]], rows])
        mine = self._parts["row"]
        gone = known[mine] & (told[mine] != self._parts["generation"])
        tasks = 1 + int(max(self._parts["task"].max(initial=0), parts["task"].max(initial=0)))
        gone |= np.isin(_numbers(self._parts, tasks), _numbers(parts, tasks))
        self._keep(~gone)
        there = self._rows["row"][_is_there(self._rows)]
        parts = parts[(parts["state"] != NOT_DONE) & np.isin(parts["row"], there)]
        self._parts = np.concatenate([self._parts, parts])
        self._chunk = np.concatenate([self._chunk, np.full(len(parts), -1, np.int64)])
        self._at = np.concatenate([self._at, np.zeros(len(parts), np.uint64)])
        # A row that a batch has read for the last time is gone.
        self._keep(np.isin(self._parts["row"], there))
        return following

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        self._parts, self._chunk, self._at = self._parts[kept], self._chunk[kept], self._at[kept]

    def _write_chunks(self, bar: Progress) -> bool:
        """Copies parts that lie in no chunk yet into new ones; False where some changed meanwhile."""
        wanted = np.flatnonzero((self._chunk < 0) & (self._parts["bytes"] > 0))
        # What is written, put and freed together lies together.
        wanted = wanted[np.argsort(self._parts["change"][wanted], kind="stable")]
        ends = np.cumsum(self._parts["bytes"][wanted], dtype=np.uint64)
        whole = True
        for run, _ in runs_of(ends, chunks.CHUNK_BYTES):
            mine = wanted[run]
            self._new.wait(1)
            content, offsets, ok = self._store.copy_parts(as_bytes(self._parts[mine]))
            good = ok != 0
            whole &= bool(good.all())
            bar.advance(len(content), len(content))
            kept = mine[good]
            if not len(kept):
                continue
            sizes = np.diff(offsets)[good]
            pieces = [content[int(offsets[begin]) : int(offsets[end])] for begin, end in whole_runs(good)]
            self._at[kept] = np.cumsum(sizes) - sizes
            self._chunk[kept] = self._new.write_chunk(pieces, int(sizes.sum()))
        return whole

    def _row_records(self, left_out: NDArray[np.uint32]) -> NDArray[Any]:
        """The row table: those that are there by their sequence, then free ones. Keys of others are stale."""
        rows = self._rows
        there = _is_there(rows) & ~np.isin(rows["row"], left_out)
        rows = rows[np.lexsort((rows["row"], rows["sequence"] * there, ~there))]
        n = int(there.sum())
        table = np.zeros(len(rows), ROW_RECORD)
        for name in ("row", "generation"):
            table[name] = rows[name]
        for name in ("sequence", "inserted_at_ns", "priority", "times_sampled", "state"):
            table[name][:n] = rows[name][:n]
        table["generation"][n:] += table["generation"][n:] & 1
        return table

    def _part_records(self, kept: NDArray[np.bool_]) -> NDArray[Any]:
        parts = np.zeros(int(kept.sum()), PART_RECORD)
        for name in set(PART.names or ()) - {"span"}:
            parts[name] = self._parts[name][kept]
        chunk = self._chunk[kept]
        parts["chunk"] = np.where(chunk < 0, NO_CHUNK, chunk)
        parts["at"] = np.where(chunk < 0, 0, self._at[kept])
        order = np.lexsort((parts["task"], parts["row"]))
        return parts[order]


def _is_there(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Rows that a checkpoint keeps."""
    return np.isin(rows["state"], (COMMITTED, UNDER_WAY, TAKEN))


__all__ = ["MOST_ROUNDS", "PartsSaving"]
