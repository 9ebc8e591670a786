"""Rows that hold a buffer's trajectories: numbered in the order of additions, and removed from the oldest on."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import IncompatibleStoreError, SchemaError
from geartrain.integrations.rlinf.layout import COUNT, NUMBER, TOTAL, SampleLayout
from geartrain.integrations.rlinf.samples import TrajectorySamples
from geartrain.store.store import Store


class TrajectoryRows:
    """Trajectories of a store, which keeps the newest. A caller that adds or removes must hold the buffer's lock.

    Args:
        store: store made with `rows_of(kept)` rows and the layout's fields.
        kept: number of trajectories to keep.

    Raises:
        IncompatibleStoreError: the store is of other fields, or of another number of trajectories.
    """

    def __init__(self, store: Store, kept: int) -> None:
        self.layout = SampleLayout.of_fields(store.name, store.fields)
        if store.capacity != rows_of(kept):
            raise IncompatibleStoreError(
                f"the store {store.name!r} is of a buffer with another window: it has {store.capacity} rows, "
                f"but {kept} trajectories need {rows_of(kept)}. Give the same sample_window_size in all "
                "processes"
            )
        self._store, self._kept = store, kept

    def counted(self) -> tuple[int, int]:
        """Trajectories and samples that were added, by all processes."""
        found = self.now()
        return found.newest, found.total

    def now(self) -> RowsNow:
        """The rows that are there."""
        row, generation = self._store.native.keys()
        if not len(row):
            return RowsNow(row, generation, row, 0, 0)
        number = self._store.column(NUMBER)[row].reshape(-1)
        newest = number.argmax()
        return RowsNow(row, generation, number, int(number[newest]), int(self._store.column(TOTAL)[row[newest]].item()))

    def there(self) -> int:
        """Trajectories that are there."""
        # Not np.unique: it imports numpy.ma, and a forked child could wait for a thread that it does not have.
        return len(set(self._store.column(NUMBER)[self._store.keys().row].reshape(-1).tolist()))

    def samples(self) -> int:
        """Samples that are there."""
        return int(self._store.column(COUNT)[self._store.keys().row].sum())

    def insert(self, samples: TrajectorySamples, number: int, total: int) -> None:
        """Inserts a trajectory's rows.

        Args:
            number: of the trajectory, from 1.
            total: samples up to its last one.
        """
        store, layout = self._store, self.layout
        parts = layout.parts(samples, store.max_length)
        if len(parts) == 1:
            with store.row() as row:
                row.length = parts[0].length
                layout.write(row, samples, parts[0])
                row[NUMBER], row[TOTAL] = number, total
            return
        if len(parts) > self._kept:
            raise SchemaError(
                f"a trajectory of {samples.total} samples takes {len(parts)} rows of {store.max_length} steps, and the "
                f"buffer has {self._kept}: give max_samples={samples.total} before the first trajectory is added"
            )
        warnings.warn(
            f"a trajectory of {samples.total} samples takes {len(parts)} rows of {store.max_length} steps; where "
            f"many do, fewer than {self._kept} trajectories fit: give max_samples, the samples of a long one",
            stacklevel=4,
        )
        with store.rows(len(parts)) as rows:
            rows.lengths = [part.length for part in parts]
            for block, part in zip(rows, parts, strict=True):
                layout.write(block, samples, part)
                block[NUMBER], block[TOTAL] = number, total

    def trim(self, before: RowsNow, newest: int) -> None:
        """Removes the oldest trajectories if there are too many.

        Args:
            before: the rows before the last insertions.
            newest: number of the newest trajectory.
        """
        if newest - before.newest > self._kept:
            before = self.now()
        gone = before.number <= newest - self._kept
        if gone.any():
            self._store.native.remove(before.row[gone], before.generation[gone])

    def clear(self) -> None:
        """Removes all."""
        self._store.delete(self._store.keys())


class RowsNow(NamedTuple):
    """Rows of trajectories with their trajectories' numbers, the newest number, and the count of samples up to it."""

    row: NDArray[np.uint32]
    generation: NDArray[np.uint32]
    number: NDArray[Any]
    newest: int
    total: int


def rows_of(kept: int) -> int:
    """Rows of a store for so many trajectories, with a few more for trajectories being written."""
    return kept + 2 + kept // 16


__all__ = ["TrajectoryRows", "rows_of"]
