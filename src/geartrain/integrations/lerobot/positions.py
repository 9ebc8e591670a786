"""Columns of a replay buffer by position in a ring: transitions that this process added, read on access."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from geartrain.errors import ArgumentError
from geartrain.integrations.transitions.draws import DrawnWindows
from geartrain.integrations.transitions.index import TransitionIndex
from geartrain.integrations.transitions.layout import numbers
from geartrain.integrations.transitions.writer import TransitionWriter
from geartrain.store.store import Store

#: Bytes that are read at once.
_BYTES_AT_ONCE = 16 << 20


class PositionColumn:
    """One field of the newest `capacity` transitions that this process added, indexed like a tensor (capacity, ...).

    `column[3]`, `column[:100]` and `column[positions]` return tensors, which are copies of these positions alone. Three
    operations read the whole column: an index that begins with `...` or None, a mask with several axes, and `==`. `==`
    compares with a tensor, an array, a number or another column. Positions without a transition yet are zeros.

    Raises:
        ArgumentError: an index that a tensor does not take, or a comparison with something else. IndexError: a position
            that there is not.
        StaleKeyError: when it is indexed, and what was added there is gone: it was evicted by what others added, or
            episodes of fewer than eight steps fill the store earlier.
    """

    def __init__(
        self,
        store: Store,
        index: TransitionIndex,
        writer: TransitionWriter,
        locked: Callable[[], Any],
        field: str,
        step: int,
        capacity: int,
        as_tensor: Callable[[NDArray[Any]], torch.Tensor],
    ) -> None:
        self._store, self._index, self._writer, self._locked = store, index, writer, locked
        self._field, self._step, self._capacity = field, step, capacity
        self._as_tensor = as_tensor

    def __len__(self) -> int:
        return self._capacity

    @property
    def shape(self) -> torch.Size:
        """(capacity, ...)"""
        return torch.Size((self._capacity, *self._store.fields[self._field].shape))

    def __getitem__(self, index: Any) -> torch.Tensor:
        first, *rest = (index or (...,)) if isinstance(index, tuple) else (index,)
        rest = [each.cpu() if isinstance(each, torch.Tensor) else each for each in rest]
        if isinstance(first, slice):
            found = self._at(np.arange(self._capacity)[first])
            return _indexed(found, (slice(None), *rest)) if rest else found
        positions = _positions(first, self._capacity)
        if positions is None:  # other axes than the first one may be meant
            return _indexed(self._at(np.arange(self._capacity)), (first, *rest))
        if not rest:
            return self._at(positions)
        read, place = np.unique(positions, return_inverse=True)
        return _indexed(self._at(read), (torch.from_numpy(place.reshape(positions.shape)), *rest))

    def _at(self, positions: NDArray[np.int64]) -> torch.Tensor:
        """Values at positions of any shape, (*positions.shape, ...)."""
        return self._as_tensor(self._read(positions.reshape(-1))).reshape((*positions.shape, *self.shape[1:]))

    def _read(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        schema = self._store.fields[self._field]
        found = np.zeros((len(positions), *schema.shape), schema.numpy_dtype)
        with self._locked():
            newest = self._writer.count - 1
            counts = newest - (newest - positions) % self._capacity
            there = np.flatnonzero(counts >= 0)
            self._index.refresh()
            keys, step = self._index.find(counts[there] + numbers(self._writer.writer, 1, 0)[0])
            at_once = max(1, _BYTES_AT_ONCE // max(1, schema.nbytes))
            for begin in range(0, len(there), at_once):
                part = slice(begin, begin + at_once)
                windows = DrawnWindows.at(self._store, keys[part], step[part], [self._field], 1)
                found[there[part]] = windows.fields[self._field][:, self._step]
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:].numpy(), dtype)

    def __eq__(self, other: object) -> torch.Tensor:  # type: ignore[override]
        """bool (capacity, ...), as of tensors; reads the whole column."""
        found: torch.Tensor = self[:] == _compared(other)
        return found

    def __ne__(self, other: object) -> torch.Tensor:  # type: ignore[override]
        """bool (capacity, ...), as of tensors; reads the whole column."""
        found: torch.Tensor = self[:] != _compared(other)
        return found

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PositionColumn({self._field!r}, {tuple(self.shape)})"


def _positions(index: Any, capacity: int) -> NDArray[np.int64] | None:
    """Positions along the first axis that an index other than a slice means; None: not of this axis alone."""
    if index is None or index is ... or isinstance(index, (bool, np.bool_)):
        return None
    try:
        array = np.asarray(index.detach().cpu() if isinstance(index, torch.Tensor) else index)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(f"a column is indexed as a tensor is, found {type(index).__name__}") from None
    if array.size == 0 and not isinstance(index, (torch.Tensor, np.ndarray)):
        array = array.astype(np.int64)
    if array.dtype == np.uint8:
        array = array.astype(np.bool_)  # which torch takes for a mask
    if array.dtype == np.bool_ and array.ndim != 1:
        return None
    if array.dtype.kind not in "iub":
        raise ArgumentError(f"a column is indexed as a tensor is, found {type(index).__name__} of {array.dtype}")
    return np.asarray(np.arange(capacity)[array])


def _indexed(tensor: torch.Tensor, index: tuple[Any, ...]) -> torch.Tensor:
    try:
        return tensor[index]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"a column is indexed as a tensor is: {error}") from None


def _compared(other: Any) -> Any:
    if isinstance(other, PositionColumn):
        return other[:]
    if isinstance(other, torch.Tensor):
        return other.cpu()
    if isinstance(other, (np.ndarray, np.generic)):
        return torch.as_tensor(other)
    if isinstance(other, (bool, int, float)):
        return other
    raise ArgumentError(
        f"a column is compared with a tensor, an array, a number or a column, found {type(other).__name__}"
    )


__all__ = ["PositionColumn"]
