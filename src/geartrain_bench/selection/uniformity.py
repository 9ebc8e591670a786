"""Whether draws of equal priorities are equally likely: counts of the upper half, and the chance of such counts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOD = 8


def uniformity(counts: list[int]) -> float:
    """The probability of counts at least as uneven under equal probabilities: chi-square, 7 degrees of freedom."""
    if len(counts) != MOD or not sum(counts):
        raise ValueError(f"{MOD} counts that are not all zero are needed, found {counts}")
    mean = sum(counts) / MOD
    x = sum((count - mean) ** 2 for count in counts) / mean
    series = 1 + x / 3 + x * x / 15
    return math.erfc(math.sqrt(x / 2)) + math.sqrt(2 * x / math.pi) * math.exp(-x / 2) * series


def upper_half_counts(rows: NDArray[Any], n: int) -> NDArray[np.int64]:
    """How many of the drawn rows of the upper half of n have number mod 8 = 0, 1, ..., 7."""
    return np.bincount(rows[rows >= n // 2] % MOD, minlength=MOD)
