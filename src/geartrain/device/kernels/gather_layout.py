"""Layout of a gather: the columns of the segment, their conversions, and their offsets in the batch's arena."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import triton.language as tl

GROUP = 16  # the widest load of a thread

#: Fields that can be converted, and what they can become.
CONVERTED_FROM = ("bool", "uint8", "int8", "int16", "int32", "float16", "bfloat16", "float32", "float64")
CONVERTED_TO = ("float16", "bfloat16", "float32")

_RAW = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
_TYPED = {
    "bool": tl.uint8,
    "uint8": tl.uint8,
    "int8": tl.int8,
    "int16": tl.int16,
    "int32": tl.int32,
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "float32": tl.float32,
    "float64": tl.float64,
}

_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "float64": 8,
}


@dataclass(frozen=True)
class GatherField:
    """One column of a segment, and its conversion in a batch.

    Attributes:
        name: name of the field.
        dtype: as `geartrain.core.schema.DTYPES` names it.
        itemsize: bytes of one element.
        offset, stride: offset of the column's first block in the segment, and distance between blocks; multiples of 64.
        block_bytes, step_bytes: bytes of a block and of one step; the same for a field without time.
        timed: whether its first axis is time.
        result: dtype to convert to; None to keep bytes as they are.
        scale, shift: result = float32(x) * scale + shift.
        places: of a block that is some steps of a window, which steps these are; such a field is staged.
    """

    name: str
    dtype: str
    itemsize: int
    offset: int
    stride: int
    block_bytes: int
    step_bytes: int
    timed: bool
    result: str | None = None
    scale: float = 1.0
    shift: float = 0.0
    places: tuple[int, ...] | None = None

    @property
    def result_bytes(self) -> int:
        """Bytes of one step in the batch."""
        return self.step_bytes if self.result is None else self.step_bytes // self.itemsize * _BYTES[self.result]

    @property
    def kind(self) -> tuple[Any, int, Any, int, int, bool]:
        """The element a thread moves and what it becomes, with their bytes; by which arithmetic; are stores wide."""
        if self.result is None:
            unit = math.gcd(self.step_bytes, 8)
            return (_RAW[unit], unit, _RAW[unit], unit, 0, self.step_bytes % GROUP == 0)
        out = _BYTES[self.result]
        wide = self.step_bytes % (GROUP * max(1, self.itemsize // out)) == 0
        how = 2 if self.result == "bfloat16" else 1
        return (_TYPED[self.dtype], self.itemsize, tl.uint16 if how == 2 else _TYPED[self.result], out, how, wide)


@dataclass(frozen=True)
class SegmentLayout:
    """Offsets of row metadata in a segment: `_native.Store.layout`."""

    words: int
    status: int
    status_stride: int
    rows: int
    max_length: int
    content_numbers: bool = False


@dataclass(frozen=True)
class Arena:
    """Layout of the buffer that holds a batch of n rows: offsets in bytes, all aligned to 256.

    The host sends probabilities and importance weights. Kernels do not touch them.
    """

    n: int
    fields: tuple[int, ...]
    mask: int
    starts: int
    lengths: int
    versions: int
    torn: int
    probability: int
    importance_weights: int
    nbytes: int


__all__ = ["CONVERTED_FROM", "CONVERTED_TO", "GROUP", "Arena", "GatherField", "SegmentLayout"]
