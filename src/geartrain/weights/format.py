"""Byte format of a segment of weights: records, checksums and lock numbers.

    offset 0       HEADER         what the file is; written once, before the file has a name
           64      LAYOUT         size of a version, place of the buffers; zeros until the first version
           128     HEAD [2]       the newest version and the one before it, in turns
           256     SIGNALS        futex words
           320     SLOT [64]      the version in each buffer
           4096    schema         JSON: names, dtypes, shapes and offsets (layout.py)
    data_offset    buffer 0, buffer 1, ...   one version each, `stride` bytes apart, page-aligned

Publication. Writing a HEAD publishes a version. The publisher writes the two HEADs in turns, each with a checksum. If
it is killed while it writes one, the other stays valid. The checksum reveals a HEAD that is half written. The publisher
never writes to the buffer of the newest version, nor to a buffer that a reader holds.

Locks. The kernel records who owns what, through file locks on bytes far beyond the end of the file. A lock belongs to
an open file. It ends with the file's last descriptor, however the process ends (native/base/file_lock.h):

    PUBLISHER  exclusive   the publisher
    GATE       exclusive   while a process detaches, or replaces the file
    MEMBERS    shared      every attached process; the last one can get it exclusively, and removes the name
    BUFFER + i shared      a snapshot of buffer i, on an open file of its own; exclusive: the publisher writes to it

Reading. A reader locks the buffer that the newest HEAD names, and then compares the sequence number in the buffer's
SLOT. If the publisher was faster, the lock is taken or the SLOT has changed, and the reader retries with the next HEAD.
The locks also order memory: the publisher releases the buffer's lock after the last byte, and then writes the HEAD.

Waiting. Processes that wait sleep on a futex in SIGNALS. `published` changes with every version. `released` changes
when a snapshot is released.

New schema. If the names or shapes of the weights differ from the file's, the publisher makes a new file. The new file
gets the name once its first version is in it. The old file's `replaced` signal makes readers open the new file.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from geartrain.core.arguments import check_path, check_text, shown
from geartrain.core.shared_files import segments_directory
from geartrain.errors import ArgumentError

MAGIC = b"GEARWGT\n"
FORMAT_VERSION = 1
MAX_BUFFERS = 64

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("format_version", "<u4"),
        ("header_bytes", "<u4"),
        ("segment_id", "V16"),  # random, to tell this file from others of the same name, and hosts from each other
        ("created_ns", "<u8"),  # wall clock
        ("reserved", "V20"),
        ("checksum", "<u4"),  # CRC-32 of the record up to here; the same in all of them
    ]
)
LAYOUT = np.dtype(
    [
        ("buffers", "<u4"),
        ("schema_checksum", "<u4"),
        ("schema_bytes", "<u8"),
        ("version_bytes", "<u8"),
        ("data_offset", "<u8"),
        ("stride", "<u8"),
        ("reserved", "V20"),
        ("checksum", "<u4"),
    ]
)
HEAD = np.dtype(
    [
        ("sequence", "<u8"),  # 1, 2, 3, ... in this file
        ("version", "<i8"),
        ("published_ns", "<u8"),  # wall clock
        ("buffer", "<u4"),
        ("reserved", "V32"),
        ("checksum", "<u4"),
    ]
)
SIGNALS = np.dtype([("published", "<u4"), ("released", "<u4"), ("replaced", "<u4"), ("reserved", "V52")])
SLOT = np.dtype([("sequence", "<u8"), ("version", "<i8"), ("reserved", "V12"), ("checksum", "<u4")])

LAYOUT_AT, HEADS_AT, SIGNALS_AT, SLOTS_AT, SCHEMA_AT = 64, 128, 256, 320, 4096
assert HEADER.itemsize == LAYOUT.itemsize == HEAD.itemsize == SIGNALS.itemsize == 64
assert SLOT.itemsize == 32
assert SLOTS_AT + MAX_BUFFERS * SLOT.itemsize <= SCHEMA_AT

PUBLISHER, GATE, MEMBERS, BUFFER = 0, 1, 2, 16
PREFIX = "geartrain-weights."


class Head(NamedTuple):
    """The HEAD record: a version, and the buffer that has it."""

    sequence: int
    version: int
    published_ns: int
    buffer: int


def directory_of(directory: str | Path | None) -> Path:
    """The directory that was asked for, or that of all segments (GEARTRAIN_DIR, or /dev/shm)."""
    return segments_directory() if directory is None else check_path("directory", directory)


def path_of(name: str, directory: Path) -> Path:
    """Path of the weights of that name. Raises `ArgumentError` for a name that cannot be one."""
    check_text("the name of weights", name)
    if len(name.encode()) > 200 or "/" in name:
        raise ArgumentError(f"the name of weights has 1 to 200 bytes and no slash, found {shown(name)}")
    return directory / f"{PREFIX}{name}"


def seal(record: Any) -> bytes:
    """A record's bytes, with its checksum in the last four."""
    raw: bytes = record.tobytes()[:-4]
    return raw + struct.pack("<I", zlib.crc32(raw))


def unseal(raw: bytes, dtype: np.dtype[Any]) -> Any:
    """The record in `raw`; None when its checksum is wrong, or when it is all zeros."""
    (checksum,) = struct.unpack_from("<I", raw, len(raw) - 4)
    if zlib.crc32(raw[:-4]) != checksum or not any(raw):
        return None
    return np.frombuffer(raw, dtype)[0]
