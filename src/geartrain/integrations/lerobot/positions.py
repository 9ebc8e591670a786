"""Columns of a replay buffer by position in a ring: what one process has added, read when it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from geartrain.integrations.transitions.draws import DrawnWindows
from geartrain.integrations.transitions.index import TransitionIndex
from geartrain.integrations.transitions.layout import numbers
from geartrain.integrations.transitions.writer import TransitionWriter
from geartrain.store.store import Store

#: Bytes that are read at once.
_BYTES_AT_ONCE = 16 << 20


class PositionColumn:
    """One field of the newest `capacity` transitions that this process has added; indexed as a tensor (capacity, ...).

    `column[3]`, `column[:100]` and `column[positions]` are tensors: copies, of what was asked for alone. Positions that
    nothing was added to yet are zeros.

    Raises:
        StaleKeyError: when it is indexed, and what was added there is gone: it was evicted by what others added, or
            episodes of fewer than eight steps fill the store earlier.
    """

    def __init__(
        self,
        store: Store,
        index: TransitionIndex,
        writer: TransitionWriter,
        locked: Callable[[], threading.Lock],
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
        rest: tuple[Any, ...] = ()
        if isinstance(index, tuple):
            index, rest = (index[0], index[1:]) if index else (..., ())
        if isinstance(index, torch.Tensor):
            index = index.cpu().numpy()
        positions = np.asarray(np.arange(self._capacity)[index])
        found = self._as_tensor(self._read(positions.reshape(-1))).reshape((*positions.shape, *self.shape[1:]))
        return found[(slice(None),) * positions.ndim + rest] if rest else found

    def _read(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        schema = self._store.fields[self._field]
        found = np.zeros((len(positions), *schema.shape), schema.numpy_dtype)
        with self._locked():
            newest = self._writer.count - 1
            counts = newest - (newest - positions) % self._capacity
            there = np.flatnonzero(counts >= 0)
            self._index.refresh()
            keys, step = self._index.find(counts[there] + numbers(self._writer.writer, 1, 0)[0])
            at_once = max(1, _BYTES_AT_ONCE // max(1, found.itemsize * int(np.prod(schema.shape))))
            for begin in range(0, len(there), at_once):
                part = slice(begin, begin + at_once)
                windows = DrawnWindows.at(self._store, keys[part], step[part], [self._field], 1)
                found[there[part]] = windows.fields[self._field][:, self._step]
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return np.asarray(self[:].numpy(), dtype)

    def __repr__(self) -> str:
        return f"PositionColumn({self._field!r}, {tuple(self.shape)})"


__all__ = ["PositionColumn"]
