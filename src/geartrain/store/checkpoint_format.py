"""Checkpoint format: manifest, checksums, row table, and files that appear complete or not at all.

Version 2, 3 for a store with priorities of steps, or 4 for one with new_priority="max". A directory with

    manifest.json     what is here: schema, options, counts, and for every other file its size and checksums;
                      itself checksummed ("checksum": crc32 of the JSON without that entry, sorted keys, no spaces)
    rows.bin          56 bytes a row, little-endian, see ROW_RECORD: committed rows in the order of their commits,
                      then free rows in the order they will be reused. Every row of the store is in it once.
    chunk-*.bin       blocks of rows, about 32 MB a file: for each field in the order of the schema, the blocks of
                      the chunk's rows, unpadded. A committed row says in rows.bin which chunk it is in, and where.
    steps.bin         with priorities of steps: those of each committed row's `length` steps, u32 fixed point, one row
                      after the other in the order of rows.bin, where priorities are 0

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
instant leaves the previous checkpoint or the new one, never a mixture. Whoever reads the old one meanwhile reads it to
its end (checkpoint_directory.py). A directory that holds anything but a checkpoint is never touched.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.json_values import parse_json
from geartrain.core.schema import Field, stored_schema
from geartrain.core.shared_files import FULL
from geartrain.errors import CheckpointError
from geartrain.store.checkpoint_directory import HeldDirectory
from geartrain.store.checkpoint_manifest import check_manifest

FORMAT = "geartrain-checkpoint"
VERSION = 2
#: With priorities of steps.
VERSION_STEPS = 3
#: With new_priority="max", whose largest priority the manifest has as "max_priority", and priorities of either.
VERSION_MAX = 4


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
    """The content with keys, and values that are names, under other names; what the table does not have stays."""
    return {
        names.get(key, key): names.get(value, value) if isinstance(value, str) else value
        for key, value in content.items()
    }


def version_of(options: Mapping[str, Any]) -> int:
    """The version of a checkpoint of a store with these options."""
    if options["new_priority"] == "max":
        return VERSION_MAX
    return VERSION_STEPS if options["priority_per"] == "step" else VERSION


def stored_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a store as manifests have them: without those that earlier versions do not know, and have."""
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
        raise CheckpointError(f"{directory} is not a checkpoint: it has no manifest.json")
    try:
        manifest: dict[str, Any] = parse_json(held.read("manifest.json"))
        checksum = manifest.pop("checksum")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{path} is damaged: it is not the JSON that was written") from None
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a geartrain checkpoint")
    if manifest.get("version") not in (1, VERSION, VERSION_STEPS, VERSION_MAX):
        raise CheckpointError(
            f"{directory} has checkpoint version {manifest.get('version')}, but this build reads versions 1 to "
            f"{VERSION_MAX}"
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
    """Makes a directory and what is missing above it, each flushed to disk.

    Raises:
        CheckpointError: it cannot be made, but for a full disk, which is an `OSError`.
    """
    if directory.is_dir():
        return
    make_directory(directory.parent)
    try:
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)
    except OSError as error:
        if error.errno in FULL:
            raise
        raise CheckpointError(f"cannot create the directory {directory}: {error.strerror}") from error


def sync_directory(directory: Path) -> None:
    """Flushes the names in a directory to disk."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
