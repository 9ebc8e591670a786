"""Row keys: (row index, generation). A key goes stale when its row is overwritten or removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class Keys:
    """Rows of a store, each with the generation it had: (n,) uint32 and (n,) uint32.

    A row's generation changes whenever it is overwritten or removed, so a key names one trajectory and never its
    successor. Functions that take keys skip and count stale ones.

    `shard` (n,) uint16 is the store or shard of each row, of several; None when there is only one. `draw` (n,)
    int64 is the row's number in a global batch, where it is part of one.

    Index with an integer, slice, mask or index array to get the keys of some; `+` joins.
    """

    row: NDArray[np.uint32]
    generation: NDArray[np.uint32]
    shard: NDArray[np.uint16] | None = None
    draw: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        row = np.ascontiguousarray(self.row, dtype=np.uint32)
        generation = np.ascontiguousarray(self.generation, dtype=np.uint32)
        if row.ndim != 1 or row.shape != generation.shape:
            raise ArgumentError(
                f"keys are two arrays (n,) of the same length, found {row.shape} and {generation.shape}"
            )
        object.__setattr__(self, "row", row)
        object.__setattr__(self, "generation", generation)

    @classmethod
    def packed(cls, raw: bytes | tuple[int, int]) -> Keys:
        """Keys of which the native layer gave the bytes (rows, then generations, uint32), or of one row the numbers.

        Their arrays are made when they are first looked at: writers often drop the keys of what they insert.
        """
        keys = cls.__new__(cls)
        keys.__dict__["_raw"] = raw
        return keys

    def __getattr__(self, name: str) -> Any:
        if name not in ("row", "generation") or "_raw" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raw = self.__dict__["_raw"]
        both = np.frombuffer(raw, np.uint32).copy() if isinstance(raw, bytes) else np.array(raw, np.uint32)
        both = both.reshape(2, -1)
        self.__dict__["row"], self.__dict__["generation"] = both[0], both[1]
        return self.__dict__[name]

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, index: Any) -> Keys:
        shard = None if self.shard is None else np.atleast_1d(self.shard[index])
        draw = None if self.draw is None else np.atleast_1d(self.draw[index])
        return Keys(np.atleast_1d(self.row[index]), np.atleast_1d(self.generation[index]), shard, draw)

    def __iter__(self) -> Iterator[Keys]:
        return (self[i] for i in range(len(self)))

    def __add__(self, other: Keys) -> Keys:
        return Keys.join([self, other])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Keys):
            return NotImplemented
        if (self.shard is None) != (other.shard is None):
            return False
        same_shard = self.shard is None or other.shard is None or np.array_equal(self.shard, other.shard)
        return same_shard and np.array_equal(self.row, other.row) and np.array_equal(self.generation, other.generation)

    def __repr__(self) -> str:
        shown = ", ".join(f"{r}@{g}" for r, g in zip(self.row[:4], self.generation[:4], strict=True))
        return f"Keys({len(self)}: {shown}{', ...' if len(self) > 4 else ''})"

    def of_shard(self, number: int) -> Keys:
        """The same keys with `number` as their shard."""
        return Keys(self.row, self.generation, np.full(len(self), number, np.uint16), self.draw)

    @staticmethod
    def join(parts: Sequence[Keys]) -> Keys:
        """The keys of all parts. Raises `ArgumentError` when only some of them have a shard."""
        shards = [part.shard for part in parts if part.shard is not None]
        if shards and len(shards) != len(parts):
            raise ArgumentError("keys with a shard cannot be joined with keys without one")
        draws = [part.draw for part in parts if part.draw is not None]
        return Keys(
            np.concatenate([part.row for part in parts]),
            np.concatenate([part.generation for part in parts]),
            np.concatenate(shards) if shards else None,
            np.concatenate(draws) if draws and len(draws) == len(parts) else None,
        )

    @staticmethod
    def empty() -> Keys:
        """No key at all."""
        return Keys(np.empty(0, np.uint32), np.empty(0, np.uint32))
