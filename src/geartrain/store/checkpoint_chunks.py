"""The files of a checkpoint that is being saved, of any store: chunks that are linked or written, tables, manifest.

checkpoint_format.py describes the format. Which rows and parts are saved, and how they are copied, is for
checkpoint_rows.py and checkpoint_parts.py.
"""

from __future__ import annotations

import os
import secrets
import time
import zlib
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.store.checkpoint_format import FORMAT, VERSION, write_json
from geartrain.store.checkpoint_reader import Checkpoint
from geartrain.store.segment import stored_schema_of

PIECE_BYTES = 16 << 20
#: A save has memory for two chunks.
CHUNK_BYTES = 32 << 20
# Dead bytes that linked chunks may hold, as a share of the living ones.
DEAD_SHARE = 0.5
# A chunk of less than a quarter of the usual size is small; more of them than this are written anew as larger ones.
SMALL_SHARE = 0.25
MAX_SMALL = 16


@dataclass(frozen=True)
class Saved:
    """Figures of a checkpoint that was written.

    Attributes:
        path: the directory.
        rows: committed rows in it.
        bytes_written, bytes_linked: bytes of the files written, and of the files linked from the previous checkpoint.
        seconds: the time it took.
        left_out: rows that were overwritten while they were saved.
        not_linked: why files of the previous checkpoint were written again instead of linked. For example, it is of
            another store, or the file system refuses links. None if they were linked.
    """

    path: Path
    rows: int
    bytes_written: int
    bytes_linked: int
    seconds: float
    left_out: int = 0
    not_linked: str | None = None


class PieceWriter:
    """Writer of one file, with a checksum for every piece."""

    def __init__(self, path: Path, piece_bytes: int) -> None:
        self._file: IO[bytes] = path.open("wb", buffering=0)
        self._piece_bytes = piece_bytes
        self._in_piece = 0
        self._crc = 0
        self.crcs: list[int] = []
        self.bytes = 0

    def write(self, array: NDArray[Any]) -> None:
        """Appends an array's bytes."""
        if array.size == 0:
            return
        data = memoryview(array.reshape(-1).view(np.uint8).data)
        self.bytes += len(data)
        while data:
            part = data[: self._piece_bytes - self._in_piece]
            self._crc = zlib.crc32(part, self._crc)
            self._in_piece += len(part)
            data = data[len(part) :]
            while part:  # an unbuffered write may take less than it is given
                part = part[self._file.write(part) :]
            if self._in_piece == self._piece_bytes:
                self._end_piece()

    def finish(self) -> dict[str, Any]:
        """Flushes the file to disk and closes it; returns its entry of a manifest."""
        if self._in_piece:
            self._end_piece()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self.bytes, "piece_bytes": self._piece_bytes, "crc32": self.crcs}

    def close(self) -> None:
        """Closes the file as it is."""
        self._file.close()

    def _end_piece(self) -> None:
        self.crcs.append(self._crc)
        self._crc = self._in_piece = 0


class Base(NamedTuple):
    """A checkpoint whose chunks can be linked: of the same store, or the one that the store was loaded from."""

    checkpoint: Checkpoint  # open
    table: NDArray[Any]  # of its rows; with axes, strings or tasks of its parts


class NewCheckpoint(AbstractContextManager["NewCheckpoint"]):
    """The files of a save in a directory. As a context manager it ends the threads that write.

    Attributes:
        base: what can be linked, if anything.
        not_linked: why chunks of a base were not linked, once that is known.
    """

    def __init__(self, store: _native.Store, options: dict[str, Any], directory: Path, base: Base | None) -> None:
        self.base = base
        self.not_linked: str | None = None
        self._store, self._options, self._directory = store, options, directory
        self._id = secrets.token_hex(16)
        self._chunks: list[dict[str, Any]] = []
        self._files: dict[str, dict[str, Any]] = {}
        self._linked = 0
        self._threads = ThreadPoolExecutor(2, "geartrain-save")
        self._writing: deque[tuple[str, Future[dict[str, Any]]]] = deque()

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def link(self, chunk: NDArray[np.int64], nbytes: NDArray[Any]) -> None:
        """Links chunks of the base that are worth it.

        Args:
            chunk: the chunk of the base that has a row or part, -1 for none. It becomes the chunk here, -1 for what is
                to be written.
            nbytes: of each row or part.
        """
        assert self.base is not None
        base = self.base.checkpoint
        found, files = base.manifest["chunks"], base.manifest["files"]
        total = np.array([entry["bytes"] for entry in found], np.int64)
        live, placed = np.zeros(len(total), np.int64), chunk >= 0
        np.add.at(live, chunk[placed], nbytes[placed].astype(np.int64))
        numbers = np.full(len(total) + 1, -1, np.int64)  # the last stands for what is in no chunk
        for old in np.flatnonzero(chunks_to_keep(total, live, int(nbytes.sum()), CHUNK_BYTES)):
            file = found[old]["file"]
            try:
                base.link(file, self._directory / file)
            except OSError as error:
                self.not_linked = f"{base.directory / file} cannot be linked: {error.strerror}"
                break  # the next would not be either
            numbers[old] = len(self._chunks)
            self._chunks.append(found[old])
            self._files[file] = files[file]
            self._linked += files[file]["bytes"]
        chunk[:] = numbers[chunk]

    def wait(self, most: int = 0) -> None:
        """Waits until at most so many chunks are being written. What was given for the others may be used again."""
        while len(self._writing) > most:
            file, written = self._writing.popleft()
            self._files[file] = written.result()

    def write_chunk(self, pieces: Iterable[NDArray[Any]], nbytes: int) -> int:
        """Has a thread write a chunk of so many bytes; returns its number. A second thread flushes the one before."""
        file = f"chunk-{self._id[:16]}-{len(self._chunks):06d}.bin"
        self._writing.append((file, self._threads.submit(_write, self._directory / file, pieces)))
        self._chunks.append({"file": file, "bytes": nbytes})
        return len(self._chunks) - 1

    def write_table(self, file: str, table: NDArray[Any]) -> None:
        """Writes a table."""
        self._files[file] = _write(self._directory / file, [table])

    def finish(self, target: Path, *, rows: int, left_out: int, counters: dict[str, int], **more: Any) -> Saved:
        """Writes the manifest; `more` are its entries that only this kind of store has, or that were read before."""
        self.wait()
        write_json(
            self._directory / "manifest.json",
            {
                "format": FORMAT,
                "version": VERSION,
                "id": self._id,
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "store": identity_of(self._store),
                **stored_schema_of(self._store),
                "options": self._options,
                "rows": rows,
                "rows_left_out": left_out,
                "counters": {name: count for name, count in counters.items() if name in _native.COUNTERS},
                **more,
                "chunks": self._chunks,
                "files": self._files,
            },
        )
        written = sum(about["bytes"] for about in self._files.values()) - self._linked
        written += (self._directory / "manifest.json").stat().st_size
        return Saved(target, rows, written, self._linked, 0.0, left_out, self.not_linked)


def _write(path: Path, pieces: Iterable[NDArray[Any]]) -> dict[str, Any]:
    writer = PieceWriter(path, PIECE_BYTES)
    try:
        for piece in pieces:
            writer.write(piece)
        return writer.finish()
    finally:
        writer.close()


def whole_runs(whole: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Where runs of what is whole begin and end: each is written as it lies there."""
    edges = np.flatnonzero(np.diff(whole, prepend=False, append=False)).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def chunks_to_keep(
    total: NDArray[np.int64], live: NDArray[np.int64], nbytes: int, chunk_bytes: int
) -> NDArray[np.bool_]:
    """The chunks to link, given the bytes and living bytes of each. The others are rewritten.

    Args:
        total, live: (chunks,) bytes in each, and how many of them are to be saved.
        nbytes: bytes to be saved in all.
        chunk_bytes: of a full chunk.
    """
    keep = live > 0
    dead = int((total - live)[keep].sum())
    for chunk in np.argsort(live / total, kind="stable"):
        if dead <= DEAD_SHARE * nbytes:
            break
        if keep[chunk]:
            keep[chunk] = False
            dead -= int(total[chunk] - live[chunk])
    small = keep & (total < SMALL_SHARE * chunk_bytes)
    return keep & ~small if small.sum() > MAX_SMALL else keep


def identity_of(store: _native.Store) -> dict[str, Any]:
    """Identity of a store: its random number, and its file, which distinguishes copies of the file."""
    about = store.describe()
    try:
        file = Path(about["path"]).stat()
        place = [file.st_dev, file.st_ino]
    except FileNotFoundError:  # its name was removed
        place = []
    return {"id": f"{about['store_id']:016x}", "file": place}


__all__ = [
    "CHUNK_BYTES",
    "Base",
    "DEAD_SHARE",
    "MAX_SMALL",
    "PIECE_BYTES",
    "SMALL_SHARE",
    "NewCheckpoint",
    "PieceWriter",
    "Saved",
    "chunks_to_keep",
    "identity_of",
    "whole_runs",
]
