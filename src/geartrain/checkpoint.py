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
from geartrain.fetch import Plan
from geartrain.keys import Keys
from geartrain.progress import Progress
from geartrain.schema import Field
from geartrain.store import Store, default_threads

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


def save(store: Store, directory: Path, *, progress: bool = False) -> None:
    """Writes the store's committed rows to `directory`. See `Store.save`."""
    directory = directory.absolute()
    if directory.exists():
        _check_replaceable(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh = directory.with_name(f".{directory.name}.{secrets.token_hex(6)}.saving")
    fresh.mkdir()
    try:
        _write(store, fresh, progress)
        if directory.exists():
            _native.exchange_paths(str(fresh), str(directory))
        else:
            fresh.rename(directory)
        _sync(directory.parent)
    finally:
        # After the exchange this is the old checkpoint; after a failure, the unfinished new one.
        shutil.rmtree(fresh, ignore_errors=True)


def load(directory: Path, name: str, *, progress: bool = False, **options: Any) -> Store:
    """A new store with the rows of the checkpoint. See `Store.load`."""
    manifest = read_manifest(directory)
    unknown = set(options) - {"persist", "reserve", "timeout_s"}
    if unknown:
        raise CheckpointError(f"a loaded store takes its limits from the checkpoint; {sorted(unknown)} cannot be set")
    fields = {
        entry["name"]: Field(entry["shape"], entry["dtype"], timed=entry["timed"]) for entry in manifest["fields"]
    }
    records = np.concatenate(
        [np.frombuffer(piece, ROW_RECORD) for piece in _pieces(directory, manifest, "rows.bin")]
    )
    committed = records[records["generation"] % 2 == 1]
    if len(records) != manifest["options"]["capacity"] or len(committed) != manifest["rows"]:
        raise CheckpointError(f"{directory / 'rows.bin'} does not have the rows that the manifest promises")
    limits = {key: value for key, value in manifest["options"].items() if key != "persist"}
    store = Store.create(name, fields, **{**limits, **options})
    try:
        store.native.allocate(store.capacity)
        with Progress(f"loading {directory.name}", len(committed), unit="blocks", enabled=progress) as bar:
            for number, (field, spec) in enumerate(fields.items()):
                at = 0
                column = store.column(field)
                for piece in _pieces(directory, manifest, f"field-{number:02d}.bin"):
                    blocks = np.frombuffer(piece, column.dtype).reshape(-1, *spec.shape)
                    column[committed["row"][at : at + len(blocks)]] = blocks
                    at += len(blocks)
                    bar.advance(len(piece), len(blocks) if number == 0 else 0)
                if at != len(committed):
                    raise CheckpointError(f"{directory}: field {field!r} has {at} rows, the manifest {len(committed)}")
        books = ("row", "generation", "weight", "length", "times_sampled", "sequence", "inserted_at_ns", "version")
        store.native.restore(*(np.ascontiguousarray(records[book]) for book in books), manifest["next_sequence"])
        store.native.set_counters(manifest["counters"])
    except BaseException:
        store.unlink()
        store.close()
        raise
    return store


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

    def write(self, data: memoryview) -> None:
        self._file.write(data)
        self.bytes += len(data)
        while len(data):
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


def _write(store: Store, directory: Path, progress: bool) -> None:
    fields = store.fields
    keys = store.keys()
    books = store.native.infos(keys.row)
    free = store.native.free_rows()
    next_sequence = store.native.next_sequence()
    # A row whose generation moved between the two looks is another trajectory by now.
    usable = np.flatnonzero(books["generation"] == keys.generation)
    writers = [
        _Writer(directory / f"field-{number:02d}.bin", _piece_bytes(spec)) for number, spec in enumerate(fields.values())
    ]
    row_bytes = sum(spec.nbytes for spec in fields.values())
    per_chunk = max(1, 2 * PIECE_BYTES // row_bytes)
    plan = Plan(store, list(fields), 0, True, "numpy", default_threads(None))
    kept: list[NDArray[Any]] = []
    with Progress(f"saving {directory.name}", len(usable), unit="rows", enabled=progress) as bar:
        for at in range(0, len(usable), per_chunk):
            chunk = usable[at : at + per_chunk]
            raw = plan.fetch(keys.row[chunk], keys.generation[chunk], None)
            if raw.torn_count:
                whole = np.flatnonzero(raw.torn == 0)
                chunk, raw = chunk[whole], raw.take(whole)
            for writer, array in zip(writers, raw.arrays, strict=True):
                writer.write(memoryview(np.ascontiguousarray(array)).cast("B") if array.size else memoryview(b""))
            kept.append(chunk)
            bar.advance(len(chunk) * row_bytes, len(chunk))
    order = np.concatenate(kept) if kept else np.empty(0, np.int64)
    records = _row_records(store, keys, books, order, free)
    rows = _Writer(directory / "rows.bin", PIECE_BYTES // ROW_RECORD.itemsize * ROW_RECORD.itemsize)
    rows.write(memoryview(records).cast("B"))
    files = {f"field-{number:02d}.bin": writer.finish() for number, writer in enumerate(writers)}
    files["rows.bin"] = rows.finish()
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "fields": [
            {"name": name, "shape": list(spec.shape), "dtype": spec.dtype, "timed": spec.timed}
            for name, spec in fields.items()
        ],
        "options": store.options,
        "rows": len(order),
        "rows_left_out": len(keys) - len(order),
        "next_sequence": next_sequence,
        "counters": {name: count for name, count in store.stats().items() if name in _native.COUNTERS},
        "files": files,
    }
    manifest["checksum"] = _manifest_checksum(manifest)
    with (directory / "manifest.json").open("w") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync(directory)


def _row_records(
    store: Store, keys: Keys, books: dict[str, NDArray[Any]], order: NDArray[Any], free: NDArray[np.uint32]
) -> NDArray[Any]:
    """The row table: committed rows in order, then all others as free, those of the free queue first."""
    capacity = store.capacity
    records = np.zeros(capacity, ROW_RECORD)
    committed = records[: len(order)]
    committed["row"] = keys.row[order]
    committed["generation"] = keys.generation[order]
    for book in ("sequence", "inserted_at_ns", "version", "weight", "length", "times_sampled"):
        committed[book] = books[book][order]
    taken = np.zeros(capacity, bool)
    taken[committed["row"]] = True
    queued = free[~taken[free]]
    taken[queued] = True
    rest = records[len(order) :]
    rest["row"] = np.concatenate([queued, np.flatnonzero(~taken).astype(np.uint32)])
    # One generation on from a key somebody may hold, so that it stays stale after the restore.
    generations = store.native.infos(np.ascontiguousarray(rest["row"]))["generation"]
    rest["generation"] = generations + (generations & 1)
    return records


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


# --- reading ----------------------------------------------------------------------------------------------------


def _pieces(directory: Path, manifest: dict[str, Any], file: str) -> Iterator[bytearray]:
    """The file's pieces, each checked before it is handed out."""
    about = manifest["files"][file]
    path = directory / file
    with path.open("rb") as stream:
        left = about["bytes"]
        for number, crc in enumerate(about["crc32"]):
            piece = bytearray(min(left, about["piece_bytes"]))
            got = stream.readinto(piece)
            if got != len(piece) or zlib.crc32(piece) != crc:
                raise CheckpointError(
                    f"{path} is damaged: block {number} (bytes {number * about['piece_bytes']} to "
                    f"{number * about['piece_bytes'] + len(piece) - 1}) is the first bad one"
                )
            left -= len(piece)
            yield piece
    if left:
        raise CheckpointError(f"{path} has {left} bytes more than its checksums cover")


__all__ = ["ROW_RECORD", "load", "read_manifest", "save"]
