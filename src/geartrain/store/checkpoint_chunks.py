"""Pieces of files, chunks and figures that checkpoints of all stores share.

checkpoint_format.py describes the format.
"""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native

# Dead rows that linked chunks may hold, as a share of the living ones.
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


def chunks_to_keep(total: NDArray[np.int64], live: NDArray[np.int64], rows: int, per_chunk: int) -> NDArray[np.bool_]:
    """The chunks to link, given the rows and living rows of each. The others are rewritten.

    Args:
        total, live: (chunks,) rows in each, and how many of them are to be saved.
        rows: rows to be saved in all.
        per_chunk: rows of a full chunk.
    """
    keep = live > 0
    dead = int((total - live)[keep].sum())
    for chunk in np.argsort(live / total, kind="stable"):
        if dead <= DEAD_SHARE * rows:
            break
        if keep[chunk]:
            keep[chunk] = False
            dead -= int(total[chunk] - live[chunk])
    small = keep & (total < SMALL_SHARE * per_chunk)
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


__all__ = ["DEAD_SHARE", "MAX_SMALL", "SMALL_SHARE", "PieceWriter", "Saved", "chunks_to_keep", "identity_of"]
