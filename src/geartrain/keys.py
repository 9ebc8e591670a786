"""Names of rows that cannot be mistaken for their successors'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import SchemaError


@dataclass(frozen=True, eq=False)
class Keys:
    """Rows of one store, each with the generation it had: (n,) uint32 and (n,) uint32.

    A row's generation changes whenever it is overwritten or removed, so a key names one trajectory, not
    whatever stands in that place later. Stale keys are skipped and counted by whoever takes keys.

    Index with an integer, slice, mask or index array to get the keys of some; `+` joins.
    """

    row: NDArray[np.uint32]
    generation: NDArray[np.uint32]

    def __post_init__(self) -> None:
        row = np.ascontiguousarray(self.row, dtype=np.uint32)
        generation = np.ascontiguousarray(self.generation, dtype=np.uint32)
        if row.ndim != 1 or row.shape != generation.shape:
            raise SchemaError(f"keys are two arrays (n,) of the same length, found {row.shape} and {generation.shape}")
        object.__setattr__(self, "row", row)
        object.__setattr__(self, "generation", generation)

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, index: Any) -> Keys:
        return Keys(np.atleast_1d(self.row[index]), np.atleast_1d(self.generation[index]))

    def __iter__(self) -> Iterator[Keys]:
        return (self[i] for i in range(len(self)))

    def __add__(self, other: Keys) -> Keys:
        return Keys(np.concatenate([self.row, other.row]), np.concatenate([self.generation, other.generation]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Keys):
            return NotImplemented
        return np.array_equal(self.row, other.row) and np.array_equal(self.generation, other.generation)

    def __repr__(self) -> str:
        shown = ", ".join(f"{r}@{g}" for r, g in zip(self.row[:4], self.generation[:4], strict=True))
        return f"Keys({len(self)}: {shown}{', ...' if len(self) > 4 else ''})"

    @staticmethod
    def empty() -> Keys:
        """No key at all."""
        return Keys(np.empty(0, np.uint32), np.empty(0, np.uint32))
