"""Checkpoint format: manifest, checksums, tables, and writes that are complete or absent after a crash.

A checkpoint is a directory with these files:

    manifest.json     the schema, options, counts, and for every other file its size and checksums;
                      itself checksummed ("checksum": crc32 of the JSON without that entry, sorted keys, no spaces)
    rows.bin          56 bytes a row, little-endian, see ROW_RECORD: the rows that are there by their sequence, then
                      free rows in the order they will be reused. No row is in it twice.
    chunk-*.bin       what the rows hold, about 32 MB a file
    steps.bin         only with step priorities: the priorities of each committed row's `length` steps, u32 fixed point,
                      row after row in the order of rows.bin, whose own priorities are then 0
    parts.bin         only with axes, strings or tasks: 96 bytes a part, PART_RECORD, in any order

Rows of fixed size are one part each, that of their insert. rows.bin says in which chunk it is, and at which place. A
chunk has, for each field in the order of the schema, the blocks of its rows, unpadded. rows.bin lists every row.

With axes, strings or tasks a row has a part for its insert and for each task that is done
(native/store/saved_records.h). parts.bin says in which chunk each is, and from which byte on. A chunk has the parts one
behind the other. Rows may also be under way, or taken by a batch. Free rows are listed if they were used before. The
manifest also has the numbers of the schema ("places", "axes", "tasks", as a segment's description has them), and
"state": clock, limits, counters of tasks.

Each checksum is a crc32 over a piece of 16 MiB, so an error can name the damaged file and place.

Chunks are shared between checkpoints. A row of fixed size is the same as long as its generation, sequence and time are,
and a part as long as its row's generation and its own change number are. So a chunk is written once, and later
checkpoints hard-link it. No two chunks ever have the same name.

A chunk may contain dead bytes: of rows and parts that were removed since. No table points to them. What is inserted
together enters chunks together, so rows that a ring overwrites together lie in the same chunk. If rows die at random,
every chunk loses some. Once dead bytes exceed half of the living ones, the save rewrites what lives in the chunks with
the most dead ones. It also merges small chunks once there are many.

So n bytes take at most 1.5 n bytes of disk. A save writes about as many bytes as were inserted since the last one. If
rows die at random, it writes twice that in the long run.

A save writes a sibling directory, flushes it to disk and exchanges it for the old one. A crash at any instant leaves
either the previous checkpoint or the new one. Readers of the old checkpoint can finish (checkpoint_directory.py). A
save never touches a directory that holds anything but a checkpoint.
"""

from __future__ import annotations

import json
import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.json_values import parse_json
from geartrain.core.shared_files import naming_errors
from geartrain.errors import CheckpointError
from geartrain.store.checkpoint_directory import HeldDirectory
from geartrain.store.checkpoint_manifest import check_manifest
from geartrain.store.saved_parts import PART

FORMAT = "geartrain-checkpoint"
VERSION = 6

#: Columns of the row table that a store keeps for every row.
METADATA = ("row", "generation", "priority", "length", "times_sampled", "sequence", "inserted_at_ns", "version")

ROW_RECORD = np.dtype(
    [
        ("sequence", "<u8"),
        ("inserted_at_ns", "<u8"),
        ("version", "<i8"),
        ("row", "<u4"),
        ("generation", "<u4"),  # of the key, odd; even: free
        ("priority", "<u4"),  # fixed point, as in the segment
        ("length", "<u4"),
        ("times_sampled", "<u4"),
        ("chunk", "<u4"),  # its number among the manifest's chunks; 0 for free rows, and for those with parts
        ("slot", "<u4"),  # the row's place among the chunk's
        ("state", "<u4"),  # saved_parts.COMMITTED, UNDER_WAY, TAKEN or FREE
    ]
)

#: A part, and where its bytes lie: from the byte `at` of a chunk. A part without bytes lies in no chunk.
PART_RECORD = np.dtype(
    [
        *(("at" if name == "span" else name, *rest) for name, *rest in PART.descr),
        ("chunk", "<u4"),
        ("reserved_2", "<u4"),
    ]
)
NO_CHUNK = 2**32 - 1


def manifest_of(held: HeldDirectory) -> dict[str, Any]:
    """The manifest, once it is known to be whole and every file it names is there in its size.

    Raises:
        CheckpointError: with the file that is missing, short or damaged.
    """
    directory = held.path
    path = directory / "manifest.json"
    if "manifest.json" not in held.names() and not held.superseded:
        raise CheckpointError(f"{directory} is not a checkpoint: {_what_it_is(held)}")
    try:
        manifest: dict[str, Any] = parse_json(held.read("manifest.json"))
        checksum = manifest.pop("checksum")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{path} is damaged: it is not the JSON that was written") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a geartrain checkpoint")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{directory} has checkpoint version {manifest.get('version')}, but this build reads version {VERSION}"
        )
    if checksum != json_checksum(manifest):
        raise CheckpointError(f"{path} is damaged: its checksum does not match")
    check_manifest(manifest, path)
    for file, about in manifest["files"].items():
        size = held.status(file).st_size
        if size != about["bytes"]:
            raise CheckpointError(
                f"{directory / file} has {size} bytes instead of {about['bytes']}: block "
                f"{min(size, about['bytes']) // about['piece_bytes']} is the first bad one. Load an older checkpoint"
            )
    return manifest


def _what_it_is(held: HeldDirectory) -> str:
    """What a directory without a manifest is, and what restores that."""
    found = held.names()
    for name, what in (
        ("journal.json", "it is a journal, which Store.create(..., journal=) restores"),
        ("replay.json", "it is a step of a job, which gt.load_checkpoint restores from the directory above"),
        ("latest", "it has a series of checkpoints, of which latest is the newest"),
    ):
        if name in found:
            return what
    if any(name.startswith("step-") for name in found):
        return "it has the steps of a job, which gt.load_checkpoint restores"
    return "it has no manifest.json"


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


def put_json(path: Path, content: dict[str, Any], unfinished: Path) -> None:
    """Writes content as `write_json` does, under another name first: the file is whole, old or new, at any time.

    Raises:
        OSError: it cannot be written. The unfinished file is removed.
    """
    try:
        write_json(unfinished, content)
        unfinished.replace(path)
        sync_directory(path.parent)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def make_directory(directory: Path) -> None:
    """Makes a directory and its missing parents, each flushed to disk.

    Raises:
        CheckpointError, NoSpaceError: it cannot be made.
    """
    if directory.is_dir():
        return
    make_directory(directory.parent)
    with naming_errors("cannot create the directory", directory, CheckpointError):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def sync_directory(directory: Path) -> None:
    """Flushes the names in a directory to disk."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_into(fd: int, memory: memoryview, offset: int) -> int:
    """Reads a file from an offset on until the memory is full or the file ends; returns how many bytes it read."""
    got = 0
    while got < len(memory) and (more := os.preadv(fd, [memory[got:]], offset + got)):
        got += more
    return got
