"""Saving a store to a directory and bringing it back: complete or absent, checksummed, incremental, larger than memory.

The format, version 2. A directory with

    manifest.json     what is here: schema, options, counts, and for every other file its size and checksums;
                      itself checksummed ("checksum": crc32 of the JSON without that entry, sorted keys, no spaces)
    rows.bin          56 bytes a row, little-endian, see ROW_RECORD: committed rows in the order of their commits,
                      then free rows in the order they will be reused. Every row of the store is in it once.
    chunk-*.bin       blocks of rows, about 64 MB a file: for each field in the order of the schema, the blocks of
                      the chunk's rows, unpadded. A committed row says in rows.bin which chunk it is in, and where.

Checksums are crc32 over pieces of 16 MiB, so that damage is reported by file and place.

A committed row never changes, but for its priority, until its generation does. So a chunk is written once and then only
hard-linked from one checkpoint to the next, under a name that no other chunk ever has. It may hold rows that are gone
by now: nothing in rows.bin points to them. Rows are put into chunks in the order of their commits, so that those
which a ring overwrites together lie together. Where rows die at random every chunk loses some; once a checkpoint's
dead rows come to more than half its living ones, the chunks with the most dead are not linked and what lives in them
is written anew. The same happens to small chunks once there are many. So n rows take at most 1.5 n rows of disk, and
a save writes about as many bytes as were inserted since the last, twice that in the long run when rows die at random.

Version 1 had one file per field (field-00.bin, ..., all rows in the order of rows.bin, records of 48 bytes) and is
still read.

Saving writes a sibling directory, flushes it to disk and then exchanges it for the old one, so a crash at any
instant leaves the previous checkpoint or the new one, never a mixture. A directory that holds anything but a
checkpoint is never touched.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.progress import Progress
from geartrain.core.schema import Field, fields_of_stored, stored_schema
from geartrain.errors import CheckpointError

FORMAT = "geartrain-checkpoint"
VERSION = 2

BOOKS = ("row", "generation", "priority", "length", "times_sampled", "sequence", "inserted_at_ns", "version")

ROW_RECORD = np.dtype(
    [
        ("sequence", "<u8"),
        ("inserted_at_ns", "<u8"),
        ("version", "<i8"),
        ("row", "<u4"),
        ("generation", "<u4"),  # odd: committed; even: free
        ("priority", "<u4"),  # fixed point, as in the segment
        ("length", "<u4"),
        ("times_sampled", "<u4"),
        ("chunk", "<u4"),  # its number among the manifest's chunks; 0 for free rows
        ("slot", "<u4"),  # the row's place among the chunk's
        ("reserved", "<u4"),
    ]
)
ROW_RECORD_1 = np.dtype([*ROW_RECORD.descr[:8], ("reserved", "<u4")])


class Checkpoint:
    """A checkpoint that was found whole as far as names and sizes go; checksums are compared while reading.

    Attributes:
        directory: where it is.
        fields, max_length: the schema.
        options: the limits that the store was created with.
        rows: committed rows in it.
        id: of this checkpoint, no other has it; None in version 1.
        store_id: of the segment that was saved, as `describe` tells it; None in version 1.
        next_sequence, counters: of the store.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._manifest = read_manifest(directory)
        self.fields, self.max_length = fields_of_stored(
            (entry["name"], entry["dtype"], entry["timed"], entry["shape"]) for entry in self._manifest["fields"]
        )
        self._block_nbytes = {name: field.block_nbytes(self.max_length) for name, field in self.fields.items()}
        self.options: dict[str, Any] = renamed(self._manifest["options"], _CURRENT)
        self.rows = int(self._manifest["rows"])
        self.id: str | None = self._manifest.get("id")
        self.store_id: int | None = int(self._manifest["store"]["id"], 16) if self.id else None
        self.next_sequence = int(self._manifest["next_sequence"])
        self.counters: dict[str, int] = renamed(self._manifest["counters"], _CURRENT)

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(about["bytes"] for about in self._manifest["files"].values())

    def records(self) -> NDArray[Any]:
        """The row table, (capacity,) of ROW_RECORD: the committed rows in the order of their commits, then the others.

        Raises:
            CheckpointError: damage; names the file and its first bad block.
        """
        path = self.directory / "rows.bin"
        dtype = ROW_RECORD_1 if self._manifest["version"] == 1 else ROW_RECORD
        about = self._manifest["files"]["rows.bin"]
        if about["bytes"] != self.options["capacity"] * dtype.itemsize:
            raise CheckpointError(f"{path} does not have the rows that the manifest promises")
        records = np.empty(self.options["capacity"], dtype)
        _read_file(path, about, memoryview(records.view(np.uint8).data))
        committed = records["generation"] % 2 == 1
        if int(committed.sum()) != self.rows or not committed[: self.rows].all():
            raise CheckpointError(f"{path} does not have the rows that the manifest promises")
        if dtype == ROW_RECORD_1:
            widened = np.zeros(len(records), ROW_RECORD)
            for book in BOOKS:
                widened[book] = records[book]
            return widened
        chunks = self._manifest["chunks"]
        rows_of = np.array([chunk["rows"] for chunk in chunks], np.uint64)
        places = records[: self.rows]
        if self.rows and (places["chunk"].max() >= len(chunks) or (places["slot"] >= rows_of[places["chunk"]]).any()):
            raise CheckpointError(f"{path} contradicts itself: it places rows where no chunk has any")
        return records

    def blocks(
        self, records: NDArray[Any], wanted: NDArray[np.bool_] | None = None
    ) -> Iterator[tuple[int, NDArray[np.intp], NDArray[np.uint8]]]:
        """The bytes of committed rows, piece by piece: a field's number, places in `records`, blocks (n, bytes).

        Every piece was compared with its checksum. `wanted` (rows,) leaves out rows; files that hold no other row
        are not read. Each array is good until the next is asked for. Memory: one chunk.

        Raises:
            CheckpointError: damage; names the file and its first bad block.
        """
        if self._manifest["version"] == 1:
            yield from self._blocks_1(wanted)
            return
        committed = records[: self.rows]
        places = np.arange(self.rows) if wanted is None else np.flatnonzero(wanted)
        places = places[np.argsort(committed["chunk"][places], kind="stable")]
        of_chunk = committed["chunk"][places]
        bounds = np.searchsorted(of_chunk, np.arange(len(self._manifest["chunks"]) + 1))
        memory = np.empty(0, np.uint8)
        for number, chunk in enumerate(self._manifest["chunks"]):
            mine = places[bounds[number] : bounds[number + 1]]
            if not len(mine):
                continue
            about = self._manifest["files"][chunk["file"]]
            if memory.size < about["bytes"]:
                memory = np.empty(about["bytes"], np.uint8)
            _read_file(self.directory / chunk["file"], about, memoryview(memory[: about["bytes"]].data))
            slots = committed["slot"][mine]
            whole = len(slots) == chunk["rows"] and bool((slots == np.arange(chunk["rows"])).all())
            at = 0
            for field, nbytes in enumerate(self._block_nbytes.values()):
                blocks = memory[at : at + chunk["rows"] * nbytes].reshape(chunk["rows"], nbytes)
                at += blocks.size
                yield field, mine, blocks if whole else blocks[slots]

    def _blocks_1(self, wanted: NDArray[np.bool_] | None) -> Iterator[tuple[int, NDArray[np.intp], NDArray[np.uint8]]]:
        for field, nbytes in enumerate(self._block_nbytes.values()):
            file = f"field-{field:02d}.bin"
            about = self._manifest["files"][file]
            if about["bytes"] != self.rows * nbytes:
                raise CheckpointError(f"{self.directory / file} does not have the {self.rows} rows of the manifest")
            at = 0
            for piece in _pieces(self.directory / file, about):
                blocks = np.frombuffer(piece, np.uint8).reshape(-1, nbytes)
                places = np.arange(at, at + len(blocks))
                at += len(blocks)
                if wanted is not None:
                    blocks, places = blocks[wanted[places]], places[wanted[places]]
                yield field, places, blocks

    def values(self, records: NDArray[Any], name: str) -> NDArray[Any]:
        """A field's blocks of all committed rows, in the order of `records`, read without a look at checksums.

        For fields of a few bytes, by whom every row's bytes are checked elsewhere. The field has a NumPy dtype.
        """
        spec = self.fields[name]
        dtype, shape = spec.numpy_dtype, spec.block_shape(self.max_length)
        out = np.empty((self.rows, *shape), dtype)
        before = sum(list(self._block_nbytes.values())[: list(self.fields).index(name)])
        committed = records[: self.rows]
        for number, chunk in enumerate(self._manifest["chunks"]):
            mine = np.flatnonzero(committed["chunk"] == number)
            if len(mine):
                with (self.directory / chunk["file"]).open("rb") as file:
                    file.seek(chunk["rows"] * before)
                    data = file.read(chunk["rows"] * self._block_nbytes[name])
                blocks = np.frombuffer(data, dtype).reshape(chunk["rows"], *shape)
                out[mine] = blocks[committed["slot"][mine]]
        return out

    def fill(self, store: _native.Store, *, progress: bool = False) -> None:
        """Puts every row back in its place, into a new store of the same schema and capacity.

        Raises:
            CheckpointError: damage; names the file and its first bad block.
        """
        records = self.records()
        committed = records[: self.rows]
        store.allocate(len(records))
        columns = [store.column(number) for number in range(len(self.fields))]
        with Progress(f"loading {self.directory.name}", self.rows, unit="rows", enabled=progress) as bar:
            for number, places, blocks in self.blocks(records):
                put_blocks(columns[number], committed["row"][places], blocks)
                bar.advance(blocks.size, len(blocks) if number == 0 else 0)
        restore(store, records, self.next_sequence)
        store.set_counters(self.counters)


def put_blocks(column: NDArray[Any], rows: NDArray[Any], blocks: NDArray[np.uint8]) -> None:
    """Writes blocks (n, bytes) to rows (n,) of a store's column."""
    column[rows] = blocks.reshape(-1).view(column.dtype).reshape(-1, *column.shape[1:])


def restore(store: _native.Store, records: NDArray[Any], next_sequence: int) -> None:
    """Makes the rows of a new store, all of them allocated and filled, what a row table says they are."""
    columns = [np.ascontiguousarray(records[book]) for book in BOOKS]
    store.restore(*columns, next_sequence)  # type: ignore[call-arg, arg-type]


#: Names of options, their values and counters as manifests have them, by today's names: the format keeps its own.
STORED_NAMES = {
    "priority_fraction_bits": "weight_fraction_bits",
    "lowest_priority": "lowest_weight",
    "priorities_updated": "weights_updated",
    "priorities_saturated": "weights_saturated",
    "priorities_rounded_up": "weights_rounded_up",
}
_CURRENT = {stored: current for current, stored in STORED_NAMES.items()}


def renamed(content: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The content with keys, and values that are names, under other names; what the table does not have stays."""
    return {
        names.get(key, key): names.get(value, value) if isinstance(value, str) else value
        for key, value in content.items()
    }


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest, once it is known to be whole and every file it names is there in its size.

    Raises:
        CheckpointError: with the file that is missing, short or damaged.
    """
    path = directory / "manifest.json"
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
        checksum = manifest.pop("checksum")
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{directory} is not a checkpoint: it has no manifest.json") from None
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{path} is damaged: it is not the JSON that was written") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a geartrain checkpoint's manifest")
    if manifest.get("version") not in (1, VERSION):
        raise CheckpointError(
            f"{directory} has checkpoint version {manifest.get('version')}, this build reads versions 1 to {VERSION}"
        )
    if checksum != json_checksum(manifest):
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
    return manifest


def schema_of(fields: dict[str, Field], max_length: int) -> list[dict[str, Any]]:
    """The fields as JSON."""
    return [
        {"name": name, "shape": shape, "dtype": dtype.name, "timed": timed}
        for name, dtype, timed, shape in stored_schema(fields, max_length)
    ]


def json_checksum(content: dict[str, Any]) -> int:
    """The checksum of a JSON file's content, that entry aside."""
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes content with its checksum, flushed to disk together with its directory."""
    with path.open("w") as file:
        json.dump({**content, "checksum": json_checksum(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def make_directory(directory: Path) -> None:
    """Makes a directory and what is missing above it, each flushed to disk."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def sync_directory(directory: Path) -> None:
    """Flushes the names in a directory to disk."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _pieces(path: Path, about: dict[str, Any], memory: memoryview | None = None) -> Iterator[memoryview]:
    """The file's pieces, each checked before it is handed out; side by side in `memory` where that is given."""
    with path.open("rb", buffering=0) as stream:
        at = 0
        for number, crc in enumerate(about["crc32"]):
            size = min(about["bytes"] - at, about["piece_bytes"])
            piece = memoryview(bytearray(size)) if memory is None else memory[at : at + size]
            got = 0
            while got < size and (more := stream.readinto(piece[got:])):
                got += more
            if got != size or zlib.crc32(piece) != crc:
                raise CheckpointError(
                    f"{path} is damaged: block {number} (bytes {at} to {at + size - 1}) is the first bad one"
                )
            at += size
            yield piece
    if at != about["bytes"]:
        raise CheckpointError(f"{path} has {about['bytes'] - at} bytes more than its checksums cover")


def _read_file(path: Path, about: dict[str, Any], memory: memoryview) -> None:
    for _ in _pieces(path, about, memory):
        pass


__all__ = ["Checkpoint", "put_blocks", "read_manifest", "restore"]
