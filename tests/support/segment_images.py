"""Images of real segments, and what a damaged or hostile one is made from: the header's bytes, and its fingerprint."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

import geartrain as gt

# native/segment/segment.h
CONTROL, FIELD_RECORDS, CLIENTS, REGIONS, STATUS = 4096, 8192, 16384, 112, 32768
MUTEX_BYTES, RECORD_BYTES, HEADER_BYTES, ROW_STATUS_BYTES = 40, 128, 112 + 16 * 16, 48
SEGMENT_BYTES, FIELD_COUNT = 32, 68
FIELDS = {"x": gt.Field((3,), "float32"), "id": gt.Field((), "int64", per_row=True)}
# Header, Control, its mutex, FieldRecord, Client, RowStatus: the sizes of x86-64 that a fingerprint begins with.
STRUCTS = (HEADER_BYTES, 336, MUTEX_BYTES, RECORD_BYTES, 64, ROW_STATUS_BYTES)


def fingerprint(image: bytes) -> int:
    """What the header must say for the layout to be believed: FNV-1a of what a stranger can compute as well."""
    header = bytearray(image[:HEADER_BYTES])
    header[16:24] = bytes(8)
    header[96:112] = bytes(16)
    (fields,) = struct.unpack_from("<I", header, FIELD_COUNT)
    records = image[FIELD_RECORDS : FIELD_RECORDS + min(fields, 64) * RECORD_BYTES]
    value = 0xCBF29CE484222325
    for byte in struct.pack("<6Q", *STRUCTS) + bytes(header) + records:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def refit(image: bytearray) -> bytearray:
    """Makes a changed header consistent with itself, and with the size of the file, as a hostile creator would."""
    struct.pack_into("<Q", image, SEGMENT_BYTES, len(image))
    struct.pack_into("<Q", image, 16, fingerprint(image))
    return image


def images(directory: Path, capacity: int = 16) -> list[bytes]:
    """Segments with rows in them: closed in an orderly way, and copied while a process was writing to them."""
    made = []
    for remover in ("fifo", "lifo", "lowest_priority"):
        path = directory / f"seed-{remover}"
        limit = 2 if remover == "lifo" else None
        store = gt.Store.create(path, FIELDS, max_length=4, capacity=capacity, remover=remover, max_times_sampled=limit)
        store.insert({"x": np.ones((6, 4, 3), "float32"), "id": np.arange(6)}, priorities=np.arange(6))
        row = store.row(zeros=FIELDS)
        row.length = 4
        if limit is None:
            row.publish(length=2)
        made.append(path.read_bytes())
        row.commit()
        store.close()
        made.append(path.read_bytes())
        path.unlink()
    return made
