"""Writes the checkpoint of a store with axes, strings or tasks: its rows in all states, part by part.

checkpoint_format.py describes the format. Processes may work on the rows meanwhile. Each row is saved as it was at one
instant: parts that change while they are copied are asked for again, until a whole round finds none.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.progress import Progress
from geartrain.store.checkpoint_chunks import PieceWriter, Saved, chunks_to_keep, identity_of
from geartrain.store.checkpoint_format import (
    FORMAT,
    NO_CHUNK,
    PART_RECORD,
    STORED_NAMES,
    VERSION_PARTS,
    renamed,
    stored_options,
    write_json,
)
from geartrain.store.checkpoint_reader import Checkpoint
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
)
from geartrain.store.segment import stored_plan

#: Rounds of copies. Rows with parts that are not whole after these are left out: somebody rewrites them all the time.
MOST_ROUNDS = 10


class PartsBase:
    """A checkpoint whose chunks can be linked. It is of the same store, or the one that the store was loaded from."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint  # open
        self.chunks: list[dict[str, Any]] = checkpoint.manifest["chunks"]
        self.files: dict[str, dict[str, Any]] = checkpoint.manifest["files"]
        self._parts = checkpoint.parts()

    def places(self, parts: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """The chunk of each part that is the same here, and where it begins there; chunk -1 for the others."""
        chunk, at = np.full(len(parts), -1, np.int64), np.zeros(len(parts), np.uint64)
        tasks = 1 + int(max(parts["task"].max(initial=0), self._parts["task"].max(initial=0)))
        theirs = _numbers(self._parts, tasks)
        order = np.argsort(theirs)
        if len(order):
            found = np.searchsorted(theirs, _numbers(parts, tasks), sorter=order).clip(0, len(order) - 1)
            saved = self._parts[order[found]]
            same = saved["chunk"] != NO_CHUNK
            for name in ("row", "task", "generation", "change", "bytes"):
                same &= saved[name] == parts[name]
            chunk[same], at[same] = saved["chunk"][same], saved["at"][same]
        return chunk, at


def _numbers(parts: NDArray[Any], tasks: int) -> NDArray[np.int64]:
    numbers: NDArray[np.int64] = parts["row"].astype(np.int64) * tasks + parts["task"]
    return numbers


class PartsSaving:
    """One save: rows and parts as they were told last, where the bytes of parts lie, and the manifest about them."""

    def __init__(
        self,
        store: _native.Store,
        options: dict[str, Any],
        directory: Path,
        base: PartsBase | None,
        progress: bool,
        chunk_bytes: int,
        piece_bytes: int,
    ) -> None:
        self._store = store
        self._options = options
        self._directory = directory
        self._base = base
        self._progress = progress
        self._chunk_bytes = chunk_bytes
        self._piece_bytes = piece_bytes
        self._id = secrets.token_hex(16)
        self._chunks: list[dict[str, Any]] = []
        self._files: dict[str, dict[str, Any]] = {}
        self._linked = 0
        self._next_sequence = 0  # rows of lower ones are saved
        self._rows = np.zeros(0, ROW)
        self._parts = np.zeros(0, PART)
        self._chunk = np.zeros(0, np.int64)
        self._at = np.zeros(0, np.uint64)

    def run(self, target: Path, not_linked: str | None) -> Saved:
        """Saves the store; `not_linked` is why there is no base, if there should be one."""
        store = self._store
        finished = store.task_state()["finished"]  # before the first look: all rows are there then
        self._next_sequence = store.next_sequence()  # so are all rows that were inserted before
        since = self._look(0, None)
        if self._base is not None:
            self._chunk, self._at = self._base.places(self._parts)
            not_linked = self._link()
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
        there = rows["state"] != FREE
        parts = self._part_records(~np.isin(self._parts["row"], left_out))
        for name, records in (("rows.bin", rows), ("parts.bin", parts)):
            written = PieceWriter(self._directory / name, self._piece_bytes)
            written.write(records)
            self._files[name] = written.finish()
        manifest = {
            "format": FORMAT,
            "version": VERSION_PARTS,
            "id": self._id,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "store": identity_of(store),
            **(stored_plan(store) or {}),
            "options": stored_options(self._options),
            "max_priority": store.max_priority,
            "rows": int(there.sum()),
            "rows_left_out": len(left_out),
            "listed_rows": len(rows),
            "parts": len(parts),
            "next_sequence": self._next_sequence,
            "counters": renamed(
                {
                    **{name: count for name, count in store.counters().items() if name in _native.COUNTERS},
                    "inserted": self._next_sequence - 1,  # a loader goes on behind what is saved
                },
                STORED_NAMES,
            ),
            "state": {**store.task_state(), "finished": finished},
            "chunks": self._chunks,
            "files": self._files,
        }
        write_json(self._directory / "manifest.json", manifest)
        all_bytes = sum(each["bytes"] for each in self._files.values())
        all_bytes += (self._directory / "manifest.json").stat().st_size
        return Saved(target, int(there.sum()), all_bytes - self._linked, self._linked, 0.0, len(left_out), not_linked)

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

    def _link(self) -> str | None:
        """Links what is worth it and numbers the chunks anew, -1 for what must be written; why not all, if so."""
        base = self._base
        assert base is not None
        total = np.array([entry["bytes"] for entry in base.chunks], np.int64)
        placed = self._chunk >= 0
        live = np.zeros(len(total), np.int64)
        np.add.at(live, self._chunk[placed], self._parts["bytes"][placed].astype(np.int64))
        numbers = np.full(len(total) + 1, -1, np.int64)  # the last stands for what is in no chunk
        refused = None
        for old in np.flatnonzero(chunks_to_keep(total, live, int(self._parts["bytes"].sum()), self._chunk_bytes)):
            file = base.chunks[old]["file"]
            try:
                base.checkpoint.link(file, self._directory / file)
            except OSError as error:
                refused = f"{base.checkpoint.directory / file} cannot be linked: {error.strerror}"
                break  # the next would not be either
            numbers[old] = len(self._chunks)
            self._chunks.append(base.chunks[old])
            self._files[file] = base.files[file]
            self._linked += base.files[file]["bytes"]
        self._chunk = numbers[self._chunk]
        return refused

    def _write_chunks(self, bar: Progress) -> bool:
        """Copies parts that lie in no chunk yet into new ones; False where some changed meanwhile.

        One chunk is written and flushed by a thread while the next is copied out of the store.
        """
        wanted = np.flatnonzero((self._chunk < 0) & (self._parts["bytes"] > 0))
        # What is written, put and freed together lies together.
        wanted = wanted[np.argsort(self._parts["change"][wanted], kind="stable")]
        ends = np.cumsum(self._parts["bytes"][wanted], dtype=np.uint64)
        whole = True
        writing: deque[tuple[str, Future[dict[str, Any]]]] = deque()
        with ThreadPoolExecutor(1, "geartrain-save") as writer:
            at = 0
            while at < len(wanted):
                before = int(ends[at - 1]) if at else 0
                until = max(at + 1, int(np.searchsorted(ends, before + self._chunk_bytes, "right")))
                mine = wanted[at:until]
                at = until
                content, offsets, ok = self._store.copy_parts(as_bytes(self._parts[mine]))
                good = ok != 0
                whole &= bool(good.all())
                bar.advance(len(content), len(content))
                kept = mine[good]
                if not len(kept):
                    continue
                sizes = np.diff(offsets)[good]
                file = f"chunk-{self._id[:16]}-{len(self._chunks):06d}.bin"
                if len(writing) > 1:
                    self._end(*writing.popleft())
                writing.append((file, writer.submit(self._write_chunk, file, content, offsets, good)))
                self._at[kept] = np.cumsum(sizes) - sizes
                self._chunk[kept] = len(self._chunks)
                self._chunks.append({"file": file, "bytes": int(sizes.sum())})
            while writing:
                self._end(*writing.popleft())
        return whole

    def _end(self, file: str, written: Future[dict[str, Any]]) -> None:
        self._files[file] = written.result()

    def _write_chunk(
        self, file: str, content: NDArray[np.uint8], offsets: NDArray[np.uint64], good: NDArray[np.bool_]
    ) -> dict[str, Any]:
        writer = PieceWriter(self._directory / file, self._piece_bytes)
        edges = np.flatnonzero(np.diff(good, prepend=False, append=False)).tolist()  # runs of parts that are whole
        try:
            for begin, end in zip(edges[::2], edges[1::2], strict=True):
                writer.write(content[int(offsets[begin]) : int(offsets[end])])
            return writer.finish()
        finally:
            writer.close()

    def _row_records(self, left_out: NDArray[np.uint32]) -> NDArray[Any]:
        """The row table: those that are there by their sequence, then free ones. Keys of others are stale."""
        rows = self._rows.copy()
        there = _is_there(rows) & ~np.isin(rows["row"], left_out)
        rows["generation"][~there] += rows["generation"][~there] & 1
        rows["state"][~there] = FREE
        for name in ("sequence", "inserted_at_ns", "priority", "times_sampled"):
            rows[name][~there] = 0
        order = np.lexsort((rows["row"], rows["sequence"], ~there))
        ordered: NDArray[Any] = rows[order]
        return ordered

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


__all__ = ["MOST_ROUNDS", "PartsBase", "PartsSaving"]
