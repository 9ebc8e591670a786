"""Indices of a storage's items: conversion of torchrl's index types, and their split into pieces of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
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


def is_number(index: Any) -> bool:
    """Whether an index is of one item."""
    if isinstance(index, torch.Tensor | np.ndarray):
        return index.ndim == 0 and index.dtype not in (torch.bool, np.bool_)
    return isinstance(index, int | np.integer) and not isinstance(index, bool)


def cells_of(index: Any, shape: tuple[int, ...]) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Cells (n,) of an array of this shape that an index of torch's chooses, and the shape of what is chosen.

    Raises:
        IndexError: there is no such cell.
    """
    parts = tuple(_plain(part) for part in (index if isinstance(index, tuple) else (index,)))
    if len(parts) == len(shape) and all(_is_numbers(part) for part in parts):
        wrapped = []
        for part, n in zip(parts, shape, strict=True):
            array = np.asarray(part, np.int64)
            array = np.where(array < 0, array + n, array)
            if array.size and not (array.min() >= 0 and array.max() < n):
                raise IndexError(f"there are {shape} items, found an index out of 0 to {n - 1}")
            wrapped.append(array)
        found = np.ravel_multi_index(np.broadcast_arrays(*wrapped), shape)
        return np.asarray(found, np.int64).reshape(-1), np.shape(found)
    if len(parts) == 1 and not (isinstance(parts[0], np.ndarray) and parts[0].dtype == bool and parts[0].ndim > 1):
        first = np.arange(shape[0])[parts[0]] if parts[0] is not Ellipsis else np.arange(shape[0])
        if parts[0] is None:
            return np.arange(np.prod(shape)), (1, *shape)
        size = int(np.prod(shape[1:]))
        cells = np.asarray(first)[..., None] * size + np.arange(size)
        return cells.reshape(-1), (*np.shape(first), *shape[1:])
    chosen = np.arange(np.prod(shape)).reshape(shape)[parts]
    return chosen.reshape(-1), chosen.shape


def cells_along(first: NDArray[np.int64], tail: Sequence[int]) -> NDArray[np.int64]:
    """Cells (n,) of entries along the first axis, where these axes follow it."""
    if not tail:
        return first
    size = prod(tail)
    return (first[:, None] * size + np.arange(size)).reshape(-1)


def folded(items: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Items (n, ...) as an array of this shape, of the same memory."""
    return items.view((*shape, *items.shape[1:]))


def _is_numbers(part: Any) -> bool:
    return isinstance(part, int | np.integer) or (isinstance(part, np.ndarray) and part.dtype.kind in "iu")


def _plain(part: Any) -> Any:
    """A part of an index as NumPy takes it."""
    if isinstance(part, torch.Tensor):
        part = part.cpu().numpy()
    if isinstance(part, list | range):
        part = np.asarray(part)
    if isinstance(part, np.ndarray) and part.dtype != bool and part.size == 0:
        part = part.astype(np.int64)
    return part
