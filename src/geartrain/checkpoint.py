"""Saving a store to a directory and bringing it back: complete or absent, checksummed, larger than memory.

The format, version 1. A directory with

    manifest.json     what is here: schema, options, counts, and for every other file its size and checksums;
                      itself checksummed ("checksum": crc32 of the JSON without that entry, sorted keys, no spaces)
    rows.bin          48 bytes a row, little-endian, see ROW_RECORD: committed rows in the order of their commits,
                      then free rows in the order they will be reused. Every row of the store is in it once.
    field-00.bin ...  the blocks of the committed rows in that order, unpadded, one file per field

Checksums are crc32 over pieces of whole rows (about 16 MiB each), so that damage is reported by file and rows.

Saving writes a sibling directory, flushes it to disk and then exchanges it for the old one, so a crash at any
instant leaves the previous checkpoint or the new one, never a mixture. A directory that holds anything but a
checkpoint is never touched.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from geartrain import _native
from geartrain.errors import CheckpointError
from geartrain.progress import Progress
from geartrain.schema import Field

FORMAT = "geartrain-checkpoint"
VERSION = 1
PIECE_BYTES = 16 << 20

ROW_RECORD = np.dtype(
    [
        ("sequence", "<u8"),
        ("inserted_at_ns", "<u8"),
        ("version", "<i8"),
        ("row", "<u4"),
        ("generation", "<u4"),  # odd: committed; even: free
        ("weight", "<u4"),  # fixed point, as in the segment
        ("length", "<u4"),
        ("times_sampled", "<u4"),
        ("reserved", "<u4"),
    ]
)


def save(
    store: _native.Store,
    fields: dict[str, Field],
    options: dict[str, Any],
    directory: Path,
    *,
    progress: bool = False,
) -> None:
    """Writes the store's committed rows to `directory`, complete or not at all. See `Store.save`."""
    directory = directory.absolute()
    if directory.exists():
        _check_replaceable(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh = directory.with_name(f".{directory.name}.{secrets.token_hex(6)}.saving")
    fresh.mkdir()
    try:
        _write(store, fields, options, fresh, progress)
        if directory.exists():
            _native.exchange_paths(str(fresh), str(directory))
        else:
            fresh.rename(directory)
        _sync(directory.parent)
    finally:
        # After the exchange this is the old checkpoint; after a failure, the unfinished new one.
        shutil.rmtree(fresh, ignore_errors=True)


class Checkpoint:
    """A checkpoint that was found whole as far as names and sizes go; checksums are compared while filling.

    Attributes:
        fields: the schema.
        options: the limits that the store was created with.
        rows: committed rows in it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._manifest = read_manifest(directory)
        self.fields = {
            entry["name"]: Field(entry["shape"], entry["dtype"], timed=entry["timed"])
            for entry in self._manifest["fields"]
        }
        self.options: dict[str, Any] = self._manifest["options"]
        self.rows = int(self._manifest["rows"])

    def fill(self, store: _native.Store, *, progress: bool = False) -> None:
        """Puts every row back in its place, into a new store of the same schema and capacity.

        Raises:
            CheckpointError: damage; names the file and its first bad block.
        """
        records = np.concatenate([np.frombuffer(piece, ROW_RECORD) for piece in self._pieces("rows.bin")])
        committed = records[records["generation"] % 2 == 1]
        if len(records) != self.options["capacity"] or len(committed) != self.rows:
            raise CheckpointError(f"{self._directory / 'rows.bin'} does not have the rows that the manifest promises")
        store.allocate(len(records))
        with Progress(f"loading {self._directory.name}", self.rows, unit="rows", enabled=progress) as bar:
            for number, spec in enumerate(self.fields.values()):
                column = store.column(number)
                at = 0
                for piece in self._pieces(_field_file(number)):
                    blocks = np.frombuffer(piece, column.dtype).reshape(-1, *spec.shape)
                    column[committed["row"][at : at + len(blocks)]] = blocks
                    at += len(blocks)
                    bar.advance(len(piece), len(blocks) if number == 0 else 0)
                if at != self.rows:
                    raise CheckpointError(
                        f"{self._directory / _field_file(number)} has {at} rows, the manifest {self.rows}"
                    )
        books = (
            "row",
            "generation",
            "weight",
            "length",
            "times_sampled",
            "sequence",
            "inserted_at_ns",
            "version",
        )
        columns = [np.ascontiguousarray(records[book]) for book in books]
        store.restore(*columns, self._manifest["next_sequence"])  # type: ignore[call-arg, arg-type]
        store.set_counters(self._manifest["counters"])

    def _pieces(self, file: str) -> Iterator[bytearray]:
        """The file's pieces, each checked before it is handed out."""
        about = self._manifest["files"][file]
        path = self._directory / file
        with path.open("rb") as stream:
            left = about["bytes"]
            for number, crc in enumerate(about["crc32"]):
                piece = bytearray(min(left, about["piece_bytes"]))
                got = stream.readinto(piece)
                if got != len(piece) or zlib.crc32(piece) != crc:
                    first = number * about["piece_bytes"]
                    raise CheckpointError(
                        f"{path} is damaged: block {number} (bytes {first} to {first + len(piece) - 1}) "
                        f"is the first bad one"
                    )
                left -= len(piece)
                yield piece
        if left:
            raise CheckpointError(f"{path} has {left} bytes more than its checksums cover")


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest, once it is known to be whole and every file it names is there in its size.

    Raises:
        CheckpointError: with the file that is missing, short or damaged.
    """
    path = directory / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        checksum = manifest.pop("checksum")
    except FileNotFoundError:
        raise CheckpointError(f"{directory} is not a checkpoint: it has no manifest.json") from None
    except (ValueError, KeyError, AttributeError):
        raise CheckpointError(f"{path} is damaged: it is not the JSON that was written") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a geartrain checkpoint's manifest")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{directory} has checkpoint version {manifest.get('version')}, this build reads version {VERSION}"
        )
    if checksum != _manifest_checksum(manifest):
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    for file, about in manifest["files"].items():
        try:
            size = (directory / file).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{directory / file} is missing") from None
        if size != about["bytes"]:
            raise CheckpointError(
                f"{directory / file} has {size} bytes, {about['bytes']} were written: "
                f"block {min(size, about['bytes']) // about['piece_bytes']} is the first bad one"
            )
    return dict(manifest)


# --- writing ----------------------------------------------------------------------------------------------------


class _Writer:
    """A file in the making, with a checksum for every piece."""

    def __init__(self, path: Path, piece_bytes: int) -> None:
        self._file: IO[bytes] = path.open("wb")
        self._piece_bytes = piece_bytes
        self._in_piece = 0
        self._crc = 0
        self.crcs: list[int] = []
        self.bytes = 0

    def write(self, array: NDArray[Any]) -> None:
        if array.size == 0:
            return
        data = memoryview(array.reshape(-1).view(np.uint8).data)
        self._file.write(data)
        self.bytes += len(data)
        while data:
            part = data[: self._piece_bytes - self._in_piece]
            self._crc = zlib.crc32(part, self._crc)
            self._in_piece += len(part)
            data = data[len(part) :]
            if self._in_piece == self._piece_bytes:
                self._end_piece()

    def finish(self) -> dict[str, Any]:
        if self._in_piece:
            self._end_piece()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"bytes": self.bytes, "piece_bytes": self._piece_bytes, "crc32": self.crcs}

    def _end_piece(self) -> None:
        self.crcs.append(self._crc)
        self._crc = self._in_piece = 0


def _write(
    store: _native.Store, fields: dict[str, Field], options: dict[str, Any], directory: Path, progress: bool
) -> None:
    rows, generations = store.keys()
    books = store.infos(rows)
    free = store.free_rows()
    next_sequence = store.next_sequence()
    # A row whose generation moved between the two looks is another trajectory by now.
    usable = np.flatnonzero(books["generation"] == generations)
    writers = [
        _Writer(directory / _field_file(number), _piece_bytes(spec)) for number, spec in enumerate(fields.values())
    ]
    row_bytes = sum(spec.nbytes for spec in fields.values())
    per_chunk = max(1, 2 * PIECE_BYTES // row_bytes)
    numbers = list(range(len(fields)))
    kept: list[NDArray[Any]] = []
    with Progress(f"saving {directory.name}", len(usable), unit="rows", enabled=progress) as bar:
        for at in range(0, len(usable), per_chunk):
            chunk = usable[at : at + per_chunk]
            arrays, torn, *_ = _native.fetch(
                store,
                rows[chunk],
                generations[chunk],
                numbers,
                0,
                False,
                None,
                _native.available_cores(),
                None,
            )
            whole = torn == 0
            for writer, array in zip(writers, arrays, strict=True):
                writer.write(np.ascontiguousarray(array if whole.all() else array[whole]))
            kept.append(chunk[whole])
            bar.advance(len(chunk) * row_bytes, len(chunk))
    order = np.concatenate(kept) if kept else np.empty(0, np.int64)
    records = _row_records(store, rows, generations, books, order, free)
    row_writer = _Writer(directory / "rows.bin", PIECE_BYTES // ROW_RECORD.itemsize * ROW_RECORD.itemsize)
    row_writer.write(records)
    files = {_field_file(number): writer.finish() for number, writer in enumerate(writers)}
    files["rows.bin"] = row_writer.finish()
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "fields": [
            {"name": name, "shape": list(spec.shape), "dtype": spec.dtype, "timed": spec.timed}
            for name, spec in fields.items()
        ],
        "options": options,
        "rows": len(order),
        "rows_left_out": len(rows) - len(order),
        "next_sequence": next_sequence,
        "counters": {name: count for name, count in store.counters().items() if name in _native.COUNTERS},
        "files": files,
    }
    manifest["checksum"] = _manifest_checksum(manifest)
    with (directory / "manifest.json").open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(directory)


def _row_records(
    store: _native.Store,
    rows: NDArray[np.uint32],
    generations: NDArray[np.uint32],
    books: dict[str, NDArray[Any]],
    order: NDArray[Any],
    free: NDArray[np.uint32],
) -> NDArray[Any]:
    """The row table: committed rows in order, then all others as free, those of the free queue first."""
    capacity = store.describe()["capacity"]
    records = np.zeros(capacity, ROW_RECORD)
    committed = records[: len(order)]
    committed["row"] = rows[order]
    committed["generation"] = generations[order]
    for book in ("sequence", "inserted_at_ns", "version", "weight", "length", "times_sampled"):
        committed[book] = books[book][order]
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


def _field_file(number: int) -> str:
    return f"field-{number:02d}.bin"


def _piece_bytes(spec: Field) -> int:
    return max(1, PIECE_BYTES // spec.nbytes) * spec.nbytes


def _manifest_checksum(manifest: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_replaceable(directory: Path) -> None:
    """Refuses a directory that holds anything that no checkpoint put there."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory} exists and is not a directory")
    found = {entry.name for entry in directory.iterdir()}
    if not found:
        return
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
        ours = {"manifest.json", *manifest["files"]} if manifest["format"] == FORMAT else set()
    except (OSError, ValueError, KeyError, TypeError):
        ours = set()
    if not found <= ours:
        raise CheckpointError(
            f"{directory} holds files that are not a checkpoint's ({', '.join(sorted(found - ours)[:3])}); "
            f"it will not be replaced"
        )
