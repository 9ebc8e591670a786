"""Writes a checkpoint: hard-links chunks of the previous one and copies new rows out of the store.

checkpoint_format.py describes the format.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.arguments import check_path
from geartrain.core.json_values import parse_json
from geartrain.core.progress import Progress
from geartrain.core.schema import Field
from geartrain.core.shared_files import naming_errors
from geartrain.errors import ArgumentError, CheckpointError
from geartrain.store.checkpoint_chunks import PieceWriter, Saved, chunks_to_keep, identity_of
from geartrain.store.checkpoint_directory import (
    HeldDirectory,
    lock_shared,
    put_in_place,
    remove_replaced,
    remove_unheld,
    resolved,
)
from geartrain.store.checkpoint_format import (
    FORMAT,
    ROW_RECORD,
    STORED_NAMES,
    VERSION_MAX,
    VERSION_PARTS,
    make_directory,
    renamed,
    schema_of,
    stored_options,
    sync_directory,
    version_of,
    write_json,
)
from geartrain.store.checkpoint_parts import PartsBase, PartsSaving
from geartrain.store.checkpoint_reader import Checkpoint

PIECE_BYTES = 16 << 20
# A save has memory for two chunks. Earlier builds wrote chunks of 64 MB.
CHUNK_BYTES = 32 << 20

_HUGE_PAGE = 2 << 20


def save(
    store: _native.Store,
    fields: dict[str, Field],
    max_length: int,
    options: dict[str, Any],
    directory: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    incremental: bool = True,
    origin: str | None = None,
    progress: bool = False,
    locks: bool = True,
) -> Saved:
    """Writes the store's committed rows to `directory`, complete or not at all. See `Store.save`.

    `origin` is the id of the checkpoint that the store was made from, if it was; `locks`: the handle may lock it.
    """
    of_parts = "axes" in store.describe()
    if of_parts and not locks:
        raise ArgumentError(
            "a store with axes, strings or tasks was opened for reading and cannot be saved: open it for writing"
        )
    began_s = time.monotonic()
    if base is not None:
        base = check_path("base", base)
        Checkpoint(base).close()  # a base that was named must be whole; one that was found may be damaged
    directory = check_path("directory", directory).absolute()
    found, not_linked = None, None  # what to link to, or why not
    with _naming_errors(directory):
        directory = resolved(directory)
        if directory.exists():
            _check_replaceable(directory)
        make_directory(directory.parent)
        if incremental:
            found, not_linked = _find_base(store, base, directory, origin)
    try:
        with _naming_errors(directory), _sibling(directory) as fresh:
            saving: _Saving | PartsSaving
            if of_parts:
                assert not isinstance(found, _Base)
                saving = PartsSaving(store, options, fresh, found, progress, CHUNK_BYTES, PIECE_BYTES)
            else:
                assert not isinstance(found, PartsBase)
                saving = _Saving(store, fields, max_length, options, fresh, found, progress, locks)
            saved = saving.run(directory, not_linked)
            if found is not None:
                found.checkpoint.close()  # it may be what is replaced
            put_in_place(fresh, directory)
            sync_directory(directory.parent)
    finally:
        if found is not None:
            found.checkpoint.close()
    return Saved(**{**vars(saved), "seconds": time.monotonic() - began_s})


class _Base:
    """A checkpoint whose chunks can be linked. It is of the same store, or the one that the store was loaded from."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint  # open
        self.chunks: list[dict[str, Any]] = checkpoint.manifest["chunks"]
        self.files: dict[str, dict[str, Any]] = checkpoint.manifest["files"]
        records = checkpoint.records()
        self._committed = records[: checkpoint.rows]
        self._place = np.full(len(records), -1, np.int32 if len(records) < 2**31 else np.int64)
        self._place[self._committed["row"]] = np.arange(len(self._committed))

    def places(
        self, rows: NDArray[np.uint32], metadata: dict[str, NDArray[Any]], generations: NDArray[np.uint32]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        """The chunk and slot of each row that is the same here; chunk -1 for the others."""
        chunk = np.full(len(rows), -1, np.int64)
        slot = np.zeros(len(rows), np.uint32)
        place = self._place[rows]
        known = np.flatnonzero(place >= 0)
        place = place[known]
        # One store's sequence numbers are never given twice.
        same = self._committed["sequence"][place] == metadata["sequence"][known]
        same &= self._committed["generation"][place] == generations[known]
        same &= self._committed["length"][place] == metadata["length"][known]  # it may have grown
        same &= self._committed["inserted_at_ns"][place] == metadata["inserted_at_ns"][known]
        known, place = known[same], place[same]
        chunk[known] = self._committed["chunk"][place]
        slot[known] = self._committed["slot"][place]
        return chunk, slot


def _find_base(
    store: _native.Store, base: Path | None, directory: Path, origin: str | None
) -> tuple[_Base | PartsBase | None, str | None]:
    """The checkpoint to link to, or the reason why the existing one cannot be used."""
    place = directory if base is None else base.absolute()
    if base is None and not (place / "manifest.json").exists():
        return None, None
    with ExitStack() as unless_found:
        try:
            found = unless_found.enter_context(Checkpoint(place))
            if found.manifest["version"] == 1:  # one file a field
                return None, f"{place} has format version {found.manifest['version']}"
            if found.manifest["store"] != identity_of(store) and found.id != origin:
                return None, f"{place} is not of this store"
            if found.manifest["options"]["capacity"] != store.describe()["capacity"]:
                return None, f"{place} is of a store of another capacity"
            if (found.manifest["version"] == VERSION_PARTS) != ("axes" in store.describe()):
                return None, f"{place} has format version {found.manifest['version']}"
            base_found = PartsBase(found) if found.manifest["version"] == VERSION_PARTS else _Base(found)
        except CheckpointError as error:
            return None, str(error)  # damage there must not keep a whole checkpoint from being made
        unless_found.pop_all()
        return base_found, None


class _Saving:
    """One save: the chunks linked and written so far, and the manifest about them."""

    def __init__(
        self,
        store: _native.Store,
        fields: dict[str, Field],
        max_length: int,
        options: dict[str, Any],
        directory: Path,
        base: _Base | None,
        progress: bool,
        locks: bool,
    ) -> None:
        self._store = store
        self._fields = fields
        self._max_length = max_length
        self._options = options
        self._per_step = options["priority_per"] == "step"
        self._directory = directory
        self._base = base
        self._progress = progress
        self._locks = locks
        self._id = secrets.token_hex(16)
        self._row_bytes = sum(field.block_nbytes(max_length) for field in fields.values())
        self._per_chunk = max(1, CHUNK_BYTES // self._row_bytes)
        self._chunks: list[dict[str, Any]] = []
        self._files: dict[str, dict[str, Any]] = {}
        self._linked = 0

    def run(self, target: Path, not_linked: str | None) -> Saved:
        store = self._store
        end = store.next_sequence()
        rows, generations = store.keys()
        metadata = store.infos(rows)
        if not self._locks:  # rows are looked at one by one: a later one may be here without those before it
            known = metadata["sequence"] < end
            rows, generations = rows[known], generations[known]
            metadata = {name: values[known] for name, values in metadata.items()}
        free = store.free_rows() if self._locks else np.zeros(0, np.uint32)
        next_sequence = store.next_sequence()
        # A row whose generation moved between the two looks is another trajectory by now.
        usable = metadata["generation"] == generations
        step_priorities = None
        if self._per_step:
            step_priorities, whole = store.copy_step_priorities(rows, generations, metadata["length"])
            usable &= whole != 0
        largest_priority = store.max_priority  # after the priorities: none of them is above it
        chunk = np.full(len(rows), -1, np.int64)
        slot = np.zeros(len(rows), np.uint32)
        with Progress(f"saving {target.name}", int(usable.sum()), unit="rows", enabled=self._progress) as bar:
            if self._base is not None:
                chunk, slot = self._base.places(rows, metadata, generations)
                chunk[~usable] = -1
                not_linked = self._link(chunk, int(usable.sum()))
                bar.advance(0, int((chunk >= 0).sum()))
            self._write_chunks(rows, generations, np.flatnonzero(usable & (chunk < 0)), chunk, slot, bar)
        order = np.flatnonzero(chunk >= 0)
        records = _row_records(store, rows, generations, metadata, order, free)
        records["chunk"][: len(order)] = chunk[order]
        records["slot"][: len(order)] = slot[order]
        written = PieceWriter(self._directory / "rows.bin", PIECE_BYTES)
        written.write(records)
        self._files["rows.bin"] = written.finish()
        if step_priorities is not None:
            written = PieceWriter(self._directory / "steps.bin", PIECE_BYTES)
            written.write(step_priorities[np.repeat(chunk >= 0, metadata["length"])].astype("<u4", copy=False))
            self._files["steps.bin"] = written.finish()
        largest = {"max_priority": largest_priority} if version_of(self._options) == VERSION_MAX else {}
        manifest = {
            "format": FORMAT,
            "version": version_of(self._options),
            "id": self._id,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "store": identity_of(store),
            "fields": schema_of(self._fields, self._max_length),
            "options": stored_options(self._options),
            **largest,
            "rows": len(order),
            "rows_left_out": len(rows) - len(order),
            "next_sequence": next_sequence,
            "counters": renamed(
                {name: count for name, count in store.counters().items() if name in _native.COUNTERS}, STORED_NAMES
            ),
            "chunks": self._chunks,
            "files": self._files,
        }
        write_json(self._directory / "manifest.json", manifest)
        all_bytes = sum(about["bytes"] for about in self._files.values())
        all_bytes += (self._directory / "manifest.json").stat().st_size
        return Saved(
            target, len(order), all_bytes - self._linked, self._linked, 0.0, len(rows) - len(order), not_linked
        )

    def _link(self, chunk: NDArray[np.int64], rows: int) -> str | None:
        """Links what is worth it and numbers the chunks anew, -1 for rows that must be written; why not all, if so."""
        base = self._base
        assert base is not None
        total = np.array([entry["rows"] for entry in base.chunks], np.int64)
        live = np.bincount(chunk[chunk >= 0], minlength=len(total))
        numbers = np.full(len(total) + 1, -1, np.int64)  # the last stands for rows in no chunk
        refused = None
        for old in np.flatnonzero(chunks_to_keep(total, live, rows, self._per_chunk)):
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
        chunk[:] = numbers[chunk]
        return refused

    def _write_chunks(
        self,
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        wanted: NDArray[np.intp],
        chunk: NDArray[np.int64],
        slot: NDArray[np.uint32],
        bar: Progress,
    ) -> None:
        """Copies rows into new chunks and notes where; rows that were overwritten meanwhile stay in none.

        There is memory for two chunks, and a thread that writes and flushes each. One is written while the other is
        flushed, or copied out of the store.
        """
        if not len(wanted):
            return
        numbers = list(range(len(self._fields)))
        # Not of the pool that batches share, which would keep them after the save.
        most = min(len(wanted), self._per_chunk)
        free = [_ChunkBuffer(self._store, numbers, most) for _ in range(1 + (len(wanted) > most))]
        writing: deque[tuple[str, _ChunkBuffer, Future[dict[str, Any]]]] = deque()
        with ThreadPoolExecutor(2, "geartrain-save") as writers:
            for at in range(0, len(wanted), self._per_chunk):
                if not free:
                    file, buffer, written = writing.popleft()
                    self._files[file] = written.result()
                    free.append(buffer)
                part = wanted[at : at + self._per_chunk]
                arrays = free[-1].arrays(len(part))
                _, torn, *_ = _native.fetch(
                    self._store,
                    rows[part],
                    generations[part],
                    numbers,
                    0,
                    False,
                    None,
                    _native.available_cores(),
                    arrays,
                )
                whole = torn == 0
                kept = part[whole]
                bar.advance(len(part) * self._row_bytes, len(part))
                if not len(kept):
                    continue
                file = f"chunk-{self._id[:16]}-{at // self._per_chunk:06d}.bin"
                written = writers.submit(_write_chunk, self._directory / file, arrays, None if whole.all() else whole)
                writing.append((file, free.pop(), written))
                chunk[kept] = len(self._chunks)
                slot[kept] = np.arange(len(kept))
                self._chunks.append({"file": file, "rows": len(kept)})
            for file, _, written in writing:
                self._files[file] = written.result()


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


def _write_chunk(path: Path, arrays: list[NDArray[Any]], whole: NDArray[np.bool_] | None) -> dict[str, Any]:
    writer = PieceWriter(path, PIECE_BYTES)
    edges = [0, len(arrays[0])]
    if whole is not None:  # runs of rows that are whole, each written as it lies there
        edges = np.flatnonzero(np.diff(whole, prepend=False, append=False)).tolist()
    try:
        for array in arrays:
            for begin, end in zip(edges[::2], edges[1::2], strict=True):
                writer.write(array[begin:end])
        return writer.finish()
    finally:
        writer.close()


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


@contextmanager
def _sibling(directory: Path) -> Iterator[Path]:
    """A new directory beside another, gone afterwards; takes away what nobody reads or writes any more there.

    A lock on it, which the kernel drops when its holder dies, tells (checkpoint_directory.py). Afterwards it is the
    old checkpoint if the two were exchanged, and the unfinished new one if something failed.
    """
    remove_replaced(directory)
    name = f".{directory.name}.{secrets.token_hex(6)}"
    unlocked, fresh = directory.with_name(f"{name}.making"), directory.with_name(f"{name}.saving")
    unlocked.mkdir()
    held = -1
    try:
        held = lock_shared(unlocked)
        unlocked.rename(fresh)  # others see it only when it is locked
        yield fresh
    finally:
        if held >= 0:
            os.close(held)
        for left in (unlocked, fresh):
            remove_unheld(left)
        remove_replaced(directory)  # by others, who left it to us because we held it


def _naming_errors(directory: Path) -> AbstractContextManager[None]:
    kept = "What was saved before stays as it is: make room and save again"
    return naming_errors("cannot save the checkpoint", directory, CheckpointError, if_full=kept)


def _check_replaceable(directory: Path) -> None:
    """Refuses a directory that holds anything that no checkpoint put there."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} exists and is not a directory: choose another one")
    with HeldDirectory(directory) as held:
        found, ours = held.names(), set()
        if "manifest.json" in found:
            content = held.read("manifest.json")
            with suppress(ValueError, KeyError, TypeError):
                manifest = parse_json(content)
                ours = {"manifest.json", *manifest["files"]} if manifest["format"] == FORMAT else set()
    if not found <= ours:
        raise CheckpointError(
            f"{directory} has files that are not of a checkpoint ({', '.join(sorted(found - ours)[:3])}), so it is "
            "not replaced: choose another directory"
        )


__all__ = ["Saved", "save"]
