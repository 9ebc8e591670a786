"""What NumPy makes of a reduction: functions of two arrays, by geartrain's name of the operation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

NUMPYS = {
    "sum": np.add,
    "avg": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "product": np.multiply,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


def in_order(op: str, arrays: Sequence[Any]) -> Any:
    """One array after the other; an average is their sum, divided at the end, and complex numbers part by part."""
    total = functools.reduce(NUMPYS[op], arrays)
    if op == "avg":
        parts = total.view(total.real.dtype)
        total = (parts / np.asarray(len(arrays), parts.dtype)).astype(parts.dtype).view(total.dtype)
    return total
