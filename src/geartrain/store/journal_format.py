"""Journal format: frames of rows, removals and priorities in segment files, each with checksums.

A journal is a directory with these files:

    journal.json          schema, limits, the journal's id, and "extent"; replaced as a whole, with its checksum
    segment-00000001.bin  frames, one after the other, each at a multiple of 64 bytes; a new file about every 64 MB
    journal.lock          locked by the process that writes here (store/journal.py)

A frame is a header of 64 bytes (HEADER), then a table. A frame of rows continues with their blocks.

    begin       the first of each segment file. Table: JSON with the journal's id, the segment's number, and the store.
                "origin" is the id of the checkpoint that the store was loaded from, once the journal has all of it
    rows        table: a ROW_RECORD (checkpoint_format.py) for each row. Then the rows' blocks, unpadded, for each field
                in the order of the schema. Fields with time have the header's `steps` steps
    gone        table: a GONE_RECORD for each row that is no longer in the store
    priorities  table: a PRIORITY_RECORD for each row whose priority or count of samples has changed
    steps       with step priorities. Table: a STEPS_RECORD for each row whose steps have new priorities. Then the
                priorities, u32 fixed point, of each row's `length` steps, one row after the other
    largest     Table: one LARGEST_RECORD, the largest priority ever given. It precedes any frame with a priority that
                large. A begin frame has it as well ("max_priority")
    parts       with axes, strings or tasks, in place of rows. Table: `count` ROW records (saved_parts.py), then
                `steps` PART records of these rows, each as of one instant. Then the bytes of the parts, one after the
                other
    state       with axes, strings or tasks. Table: JSON with the clock, the limits and the counters of tasks ("tasks"),
                and the store's counters ("counters"). It follows the parts of its pass. A begin frame has the last one
                ("state")

With step priorities, a frame of rows ends with them: u32 for each of the header's `steps`, row after row.

The last frame about a row holds, of parts the last one about a row's task. A part that is not done removes the one
before it, and parts of another generation remove all of the row's. All parts of a row that changed together are in one
frame, so a cut never leaves a row with tasks that do not fit together. What was only appended is not there.

With axes, strings or tasks, rows are in the order of their inserts. `next_sequence` of their frames says which inserts
are whole: those with lower numbers are there, unless they were removed.

Frames are numbered without a gap.

A frame's `synced` is the number of the first frame that was not yet on disk when this frame was written. It separates
power cuts from damage. An unreadable frame normally ends the journal, as after a power cut. If a later frame says that
the unreadable frame had reached the disk, the journal is damaged, and reading raises an error. The manifest records
the same for the whole journal: "extent" has the numbers of the oldest and the newest segment file, and of the first
frame that may not be on disk ("synced"). It is written when segments come and go, once a minute, and at the close.

Segments are removed from the oldest on, so a row's removal never disappears before the row itself.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.arguments import check_text
from geartrain.core.json_values import entry, parse_json, whole_entry
from geartrain.core.schema import Field
from geartrain.errors import JournalError
from geartrain.store.checkpoint_format import ROW_RECORD, read_into
from geartrain.store.saved_parts import PART, ROW

FORMAT = "geartrain-journal"
VERSION = 6
MAGIC = int.from_bytes(b"GTJRNL\x01\n", "little")
ALIGNMENT = 64

BEGIN, ROWS, GONE, PRIORITIES, STEPS, LARGEST, PARTS, STATE = 1, 2, 3, 4, 5, 6, 7, 8
#: Kinds whose table is JSON.
_JSON = (BEGIN, STATE)

HEADER = np.dtype(
    [
        ("magic", "<u8"),
        ("kind", "<u4"),
        ("count", "<u4"),
        ("steps", "<u4"),  # of a frame of parts how many there are
        ("header_crc", "<u4"),  # crc32 of the header with this 0
        ("number", "<u8"),
        ("synced", "<u8"),
        ("next_sequence", "<u8"),  # the store's, when the frame was made
        ("payload_bytes", "<u8"),  # of table and blocks
        ("table_crc", "<u4"),
        ("payload_crc", "<u4"),
    ]
)
GONE_RECORD = np.dtype([("row", "<u4"), ("generation", "<u4")])
PRIORITY_RECORD = np.dtype([("row", "<u4"), ("generation", "<u4"), ("priority", "<u4"), ("times_sampled", "<u4")])
STEPS_RECORD = np.dtype([("row", "<u4"), ("generation", "<u4"), ("length", "<u4"), ("reserved", "<u4")])
LARGEST_RECORD = np.dtype([("priority", "<u4"), ("reserved", "<u4")])
_RECORD_OF = {
    ROWS: ROW_RECORD,
    GONE: GONE_RECORD,
    PRIORITIES: PRIORITY_RECORD,
    STEPS: STEPS_RECORD,
    LARGEST: LARGEST_RECORD,
    PARTS: ROW,
}


@dataclass(frozen=True)
class Frame:
    """One frame of a segment file.

    Attributes:
        kind, count, steps, number, synced, next_sequence: as in HEADER.
        offset, nbytes: its place in the file, and its size with padding.
        table: the bytes of its table.
        block_bytes: how many bytes come behind the table.
        blocks: the blocks of its rows, or the priorities of their steps; None if they were not read.
    """

    kind: int
    count: int
    steps: int
    number: int
    synced: int
    next_sequence: int
    offset: int
    nbytes: int
    table: bytes
    block_bytes: int
    blocks: memoryview | None

    def records(self) -> NDArray[Any]:
        """The table's records, of a frame of parts those of the rows."""
        return np.frombuffer(self.table, _RECORD_OF[self.kind], self.count)

    def parts(self) -> NDArray[Any]:
        """The records of the parts in a frame of parts."""
        return np.frombuffer(self.table, PART, self.steps, self.count * ROW.itemsize)

    @property
    def blocks_at(self) -> int:
        """Place in the file of what comes behind the table."""
        return self.offset + HEADER.itemsize + len(self.table)


def frame_parts(
    kind: int,
    table: bytes,
    arrays: Sequence[NDArray[Any]] = (),
    *,
    number: int,
    synced: int,
    next_sequence: int,
    count: int = 0,
    steps: int = 0,
) -> list[memoryview]:
    """A frame as parts to be written one after the other."""
    header = np.zeros(1, HEADER)
    parts = [memoryview(table)]
    parts += [memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data) for array in arrays if array.size]
    payload = sum(part.nbytes for part in parts)
    header["magic"], header["kind"], header["count"], header["steps"] = MAGIC, kind, count, steps
    header["number"], header["synced"], header["next_sequence"] = number, synced, next_sequence
    header["payload_bytes"] = payload
    header["table_crc"] = crc = zlib.crc32(table)
    for part in parts[1:]:
        crc = zlib.crc32(part, crc)
    header["payload_crc"] = crc
    header["header_crc"] = zlib.crc32(header.tobytes())
    padding = -payload % ALIGNMENT
    return [memoryview(header.tobytes()), *parts, memoryview(bytes(padding))]


def frames(fd: int, *, blocks: bool, verify: bool, first: int | None) -> Iterator[Frame]:
    """The frames of a segment file, up to the first that is not whole.

    Args:
        fd: of the file.
        blocks: read the rows' blocks as well.
        verify: compare the blocks' checksum, also where they are not returned.
        first: number that the first frame must have; None: any.
    """
    size, offset, number = os.fstat(fd).st_size, 0, first
    while (header := _header_at(fd, offset, size)) is not None:
        if number is not None and int(header["number"]) != number:
            return
        kind, count, payload = int(header["kind"]), int(header["count"]), int(header["payload_bytes"])
        table_bytes = _table_bytes(header)
        start = offset + HEADER.itemsize
        table = os.pread(fd, table_bytes, start)
        if len(table) != table_bytes or zlib.crc32(table) != int(header["table_crc"]):
            return
        data: memoryview | None = None
        if (blocks or verify) and payload > table_bytes:
            data = memoryview(bytearray(payload - table_bytes))
            if read_into(fd, data, start + table_bytes) != len(data):
                return
            if zlib.crc32(data, int(header["table_crc"])) != int(header["payload_crc"]):
                return
        number = int(header["number"]) + 1
        nbytes = HEADER.itemsize + payload + -payload % ALIGNMENT
        yield Frame(
            kind,
            count,
            int(header["steps"]),
            number - 1,
            int(header["synced"]),
            int(header["next_sequence"]),
            offset,
            nbytes,
            table,
            payload - table_bytes,
            data if blocks else None,
        )
        offset += nbytes


def first_number(fd: int) -> int:
    """The number of a segment file's first frame; 0 if its header is not whole."""
    header = _header_at(fd, 0, os.fstat(fd).st_size)
    return 0 if header is None else int(header["number"])


def synced_later(fd: int, offset: int) -> int:
    """The largest `synced` of all intact headers from an offset on; 0 if there are none."""
    size, most = os.fstat(fd).st_size, 0
    words = np.zeros(0, "<u8")
    piece = 16 << 20
    for at in range(offset, size, piece):
        data = os.pread(fd, min(piece, size - at), at)
        words = np.frombuffer(data[: len(data) - len(data) % ALIGNMENT], "<u8")[:: ALIGNMENT // 8]
        for place in np.flatnonzero(words == MAGIC):
            header = _header_at(fd, at + int(place) * ALIGNMENT, size)
            if header is not None:
                most = max(most, int(header["synced"]))
    return most


def begin_of(frame: Frame, path: Path) -> dict[str, Any]:
    """Contents of a segment's begin frame. Raises `JournalError` if the frame is not one."""
    try:
        content = parse_json(frame.table) if frame.kind == BEGIN else None
        if not isinstance(content, dict):
            raise ValueError("no object")
        return {
            "journal": entry(content, "journal", str),
            "segment": whole_entry(content, "segment", 0, 2**63),
            "store": whole_entry(content, "store", 0, 2**64 - 1),
            "path": check_text("path", content.get("path")),
            "origin": None if content.get("origin") is None else entry(content, "origin", str),
            "max_priority": whole_entry(content, "max_priority", 0, 2**32 - 1),
            "state": None if content.get("state") is None else _checked_state(content["state"]),
        }
    except ValueError:
        raise JournalError(f"{path} is damaged: it does not begin like a journal segment") from None


def state_of(frame: Frame, path: Path) -> dict[str, Any]:
    """Contents of a frame of state. Raises `JournalError` if they are not."""
    try:
        return _checked_state(parse_json(frame.table))
    except ValueError as error:
        raise JournalError(f"{path} is damaged at byte {frame.offset}: {error}") from None


def _checked_state(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError("the state of tasks is no object")
    counters = entry(content, "counters", dict)
    return {
        "tasks": entry(content, "tasks", dict),
        "counters": {name: whole_entry(counters, name, 0, 2**64 - 1) for name in counters},
    }


def block_shapes(fields: dict[str, Field], max_length: int, steps: int) -> list[tuple[int, ...]]:
    """The shape of each field's block in a frame of so many steps."""
    shapes = []
    for field in fields.values():
        shape = field.block_shape(max_length)
        shapes.append(shape if field.per_row else (steps, *shape[1:]))
    return shapes


def _header_at(fd: int, offset: int, size: int) -> Any:
    """A whole header whose frame fits into the file; else None."""
    data = os.pread(fd, HEADER.itemsize, offset)
    if len(data) != HEADER.itemsize:
        return None
    header = np.frombuffer(data, HEADER).copy()
    crc = int(header["header_crc"][0])
    header["header_crc"] = 0
    one = header[0]
    if int(one["magic"]) != MAGIC or zlib.crc32(header.tobytes()) != crc:
        return None
    payload = int(one["payload_bytes"])
    if int(one["kind"]) not in (*_JSON, *_RECORD_OF) or offset + HEADER.itemsize + payload > size:
        return None
    return one if _table_bytes(one) <= payload else None


def _table_bytes(header: Any) -> int:
    kind = int(header["kind"])
    if kind in _JSON:
        return int(header["payload_bytes"])
    parts = int(header["steps"]) if kind == PARTS else 0
    return int(int(header["count"]) * _RECORD_OF[kind].itemsize + parts * PART.itemsize)


__all__ = [
    "BEGIN",
    "FORMAT",
    "GONE",
    "GONE_RECORD",
    "LARGEST",
    "LARGEST_RECORD",
    "PARTS",
    "PRIORITIES",
    "PRIORITY_RECORD",
    "ROWS",
    "STATE",
    "STEPS",
    "STEPS_RECORD",
    "VERSION",
    "Frame",
    "begin_of",
    "block_shapes",
    "first_number",
    "frame_parts",
    "frames",
    "state_of",
    "synced_later",
]
