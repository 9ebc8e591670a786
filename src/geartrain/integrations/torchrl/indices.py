"""Indices of a storage's items, and the pieces of rows that they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from geartrain.errors import ArgumentError


def indices_of(index: Any, count: int) -> NDArray[np.int64]:
    """Indices (n,) below a count, from what torchrl gives: numbers, tensors, slices, ranges, masks."""
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if index is Ellipsis:
        index = slice(None)
    if isinstance(index, slice):
        return np.arange(*index.indices(count))
    if isinstance(index, torch.Tensor):
        index = index.cpu().numpy()
    array = np.asarray(index)
    if array.dtype == bool and array.ndim == 1:
        array = np.flatnonzero(array)
    if array.dtype.kind not in "iu" and array.size:
        raise ArgumentError(f"items are chosen by whole numbers, found {array.dtype}")
    array = array.reshape(-1).astype(np.int64)
    array = np.where(array < 0, array + count, array)
    if array.size and not (array.min() >= 0 and array.max() < count):
        raise IndexError(f"there are {count} items, from 0 to {count - 1}")
    return array


def pieces_of(
    index: NDArray[np.int64], arrays: dict[str, Any], length: int
) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """What is written at once, in rows of that length: rows, first steps and tensors (rows, steps, ...)."""
    row, step = index // length, index % length
    ends = np.flatnonzero((np.diff(index) != 1) | (np.diff(row) != 0)) + 1
    if len(index) < 4 * (len(ends) + 1):  # here and there
        yield row, step, {name: array[:, None] for name, array in arrays.items()}
        return
    begin = 0
    for end in [*ends.tolist(), len(index)]:
        yield row[begin : begin + 1], step[begin : begin + 1], {n: a[None, begin:end] for n, a in arrays.items()}
        begin = end
