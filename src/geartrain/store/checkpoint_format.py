"""Checkpoint format: manifest, checksums, row table, and writes that are complete or absent after a crash.

Stores without step priorities use version 2, stores with step priorities version 3. Stores with new_priority="max" use
version 4 in either case. Stores with axes, strings or tasks use version 5, see below. A checkpoint is a directory with
these files:

    manifest.json     the schema, options, counts, and for every other file its size and checksums;
                      itself checksummed ("checksum": crc32 of the JSON without that entry, sorted keys, no spaces)
    rows.bin          56 bytes a row, little-endian, see ROW_RECORD: committed rows in the order of their commits,
                      then free rows in the order they will be reused. Every row of the store is in it once.
    chunk-*.bin       blocks of rows, about 32 MB a file: for each field in the order of the schema, the blocks of
                      the chunk's rows, unpadded. A committed row says in rows.bin which chunk it is in, and where.
    steps.bin         only with step priorities: the priorities of each committed row's `length` steps, u32 fixed point,
                      row after row in the order of rows.bin, whose own priorities are then 0

Each checksum is a crc32 over a piece of 16 MiB, so an error can name the damaged file and place.

Chunks are shared between checkpoints. A committed row does not change until its generation does; only its priority may.
So a chunk is written once, and later checkpoints hard-link it. No two chunks ever have the same name.

A chunk may contain dead rows, which were removed from the store since. Nothing in rows.bin points to them. Rows enter
chunks in the order of their commits, so rows that a ring overwrites together lie in the same chunk. If rows die at
random, every chunk loses some. Once dead rows exceed half of the living rows, the save rewrites the living rows of the
chunks with the most dead ones. It also merges small chunks once there are many.

So n rows take at most 1.5 n rows of disk. A save writes about as many bytes as were inserted since the last one. If
rows die at random, it writes twice that in the long run.

Version 5 keeps parts: what one task, or the insert, has for one row (native/store/saved_records.h). The manifest also
has the numbers of the schema ("places", "axes", "tasks", as a segment's description has them), and "state": clock,
limits, counters of tasks. Its files are:

    rows.bin          40 bytes a row, saved_parts.ROW: the rows that are there in the order of their inserts, under way,
                      committed or taken by a batch; then rows that are free and were used before
    parts.bin         96 bytes a part, PART_RECORD: those of rows that are there, in any order
    chunk-*.bin       bytes of parts, one behind the other

A part is the same as long as its row's generation and its own change number are. So chunks are linked as above, and
rewritten once dead bytes exceed half of the living ones.

Version 1 is still read. It had one file per field (field-00.bin, ..., all rows in the order of rows.bin) and row
records of 48 bytes.

A save writes a sibling directory, flushes it to disk and exchanges it for the old one. A crash at any instant leaves
either the previous checkpoint or the new one. Readers of the old checkpoint can finish (checkpoint_directory.py). A
save never touches a directory that holds anything but a checkpoint.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.json_values import parse_json
from geartrain.core.schema import Field, stored_schema
from geartrain.core.shared_files import naming_errors
from geartrain.errors import CheckpointError
from geartrain.store.checkpoint_directory import HeldDirectory
from geartrain.store.checkpoint_manifest import check_manifest
from geartrain.store.saved_parts import PART

FORMAT = "geartrain-checkpoint"
VERSION = 2
#: With priorities of steps.
VERSION_STEPS = 3
#: With new_priority="max", whose largest priority the manifest has as "max_priority", and priorities of either.
VERSION_MAX = 4
#: With axes, strings or tasks, and either of `new_priority`.
VERSION_PARTS = 5
_VERSIONS = (1, VERSION, VERSION_STEPS, VERSION_MAX, VERSION_PARTS)

#: Columns of the row table that a store keeps for every row.
METADATA = ("row", "generation", "priority", "length", "times_sampled", "sequence", "inserted_at_ns", "version")

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

#: A part, and where its bytes lie: from the byte `at` of a chunk. A part without bytes lies in no chunk.
PART_RECORD = np.dtype(
    [
        *(("at" if name == "span" else name, *rest) for name, *rest in PART.descr),
        ("chunk", "<u4"),
        ("reserved_2", "<u4"),
    ]
)
NO_CHUNK = 2**32 - 1

#: Names of options, their values and counters in manifests, by their names in the API: the format keeps its own.
STORED_NAMES = {
    "exhausted": "spent",
    "priority_fraction_bits": "weight_fraction_bits",
    "lowest_priority": "lowest_weight",
    "priorities_updated": "weights_updated",
    "priorities_saturated": "weights_saturated",
    "priorities_rounded_up": "weights_rounded_up",
}
CURRENT_NAMES = {stored: current for current, stored in STORED_NAMES.items()}


def renamed(content: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Renames keys, and values that are names, by a table. Names missing from the table stay."""
    return {
        names.get(key, key): names.get(value, value) if isinstance(value, str) else value
        for key, value in content.items()
    }


def version_of(options: Mapping[str, Any]) -> int:
    """The version of a checkpoint of a store with these options."""
    if "span_bytes" in options:
        return VERSION_PARTS
    if options["new_priority"] == "max":
        return VERSION_MAX
    return VERSION_STEPS if options["priority_per"] == "step" else VERSION


def stored_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a store as manifests hold them: values that earlier versions imply are left out."""
    usual = {"priority_per": "row", "new_priority": "one"}
    return renamed({name: value for name, value in options.items() if usual.get(name) != value}, STORED_NAMES)


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
    if manifest.get("version") not in _VERSIONS:
        raise CheckpointError(
            f"{directory} has checkpoint version {manifest.get('version')}, but this build reads versions 1 to "
            f"{VERSION_PARTS}"
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
