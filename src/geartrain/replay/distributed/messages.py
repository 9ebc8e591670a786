"""Layout of the messages between ranks: row messages, shard status and priority updates.

A row message holds n rows of one fetch plan. The arrays of the fields come one after the other, each padded to 64
bytes. One `ROW_HEADER` per row follows. Rows that move to another shard for good (placement/moves.py) also have one
`STORED_ROW` each at the end.

    | field 0 (n, ...) | pad | field 1 (n, ...) | pad | ... | ROW_HEADER (n,) | STORED_ROW (n,) |

Sender and receiver know the plan and n, so a message has no header of its own. All records are packed and
little-endian. If you change a record, raise `PROTOCOL`. It is part of the fingerprint that ranks compare
(fingerprint.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.schema import round_up
from geartrain.ranks.rank_group import Bytes
from geartrain.replay.fetch_plan import FetchPlan

#: Version of the messages between ranks; ranks of different versions refuse each other.
PROTOCOL = 7

_RECORDS = _native.wire_records()

#: Metadata of a row of a batch (native/fetch/rank_reader.h, RowHeader).
ROW_HEADER: np.dtype[Any] = np.dtype(_RECORDS["row_header"])

# What a store keeps of a row beside fields and metadata.
STORED_ROW = np.dtype([("priority", "<f8"), ("times_sampled", "<u4"), ("reserved", "<u4")])

#: A rank's shard of one store, in the all-gather that begins every batch (native/fetch/rank_steps.h, ShardStatus).
SHARD_STATUS: np.dtype[Any] = np.dtype(_RECORDS["shard_status"])


def rank_status(stores: int) -> np.dtype[Any]:
    """The record of a rank in the all-gather that begins every batch, for a job with this number of stores."""
    return np.dtype([*np.dtype(_RECORDS["rank_status"]).descr, ("stores", SHARD_STATUS, (stores,))])


class RowLayout(NamedTuple):
    """Offsets within a row message, and its size, in bytes."""

    fields: list[int]
    headers: int
    stored: int
    nbytes: int

    @staticmethod
    def of(plan: FetchPlan, n: int, *, with_stored: bool = False) -> RowLayout:
        """The layout of a message of n rows."""
        fields, at = [], 0
        for name in plan.names:
            fields.append(at)
            at += round_up(int(np.prod(plan.shape(name, n))) * plan.raw_dtype(name).itemsize)
        stored = at + n * ROW_HEADER.itemsize
        return RowLayout(fields, at, stored, stored + n * STORED_ROW.itemsize * with_stored)


class RowMessage:
    """A row message and views of its parts.

    Args:
        plan: of the rows; their fields are raw and padded.
        n: rows.
        data: memory of the message, (nbytes,) uint8; recycled memory by default.
        with_stored: whether rows carry a `STORED_ROW`.

    Attributes:
        data: the message as it is sent.
        arrays: views of the fields.
        headers: view of (n,) `ROW_HEADER`.
        stored: view of (n,) `STORED_ROW`, or of none.
    """

    def __init__(self, plan: FetchPlan, n: int, data: Bytes | None = None, *, with_stored: bool = False) -> None:
        layout = RowLayout.of(plan, n, with_stored=with_stored)
        self.data: Bytes = _native.pooled_bytes(layout.nbytes) if data is None else data
        self.arrays: list[NDArray[Any]] = []
        for name, at in zip(plan.names, layout.fields, strict=True):
            shape, dtype = plan.shape(name, n), plan.raw_dtype(name)
            size = int(np.prod(shape)) * dtype.itemsize
            self.arrays.append(self.data[at : at + size].view(dtype).reshape(shape))
        self.headers: NDArray[Any] = self.data[layout.headers : layout.stored].view(ROW_HEADER)
        self.stored: NDArray[Any] = self.data[layout.stored : layout.nbytes].view(STORED_ROW)

    @property
    def field_bytes(self) -> int:
        """Bytes of the fields, without padding."""
        return sum(int(array.nbytes) for array in self.arrays)


def flat_bytes(array: NDArray[Any]) -> Bytes:
    """A contiguous array as bytes, without a copy."""
    flat: Bytes = array.reshape(-1).view(np.uint8)
    return flat


__all__ = [
    "PROTOCOL",
    "ROW_HEADER",
    "SHARD_STATUS",
    "STORED_ROW",
    "RowLayout",
    "RowMessage",
    "flat_bytes",
    "rank_status",
]
