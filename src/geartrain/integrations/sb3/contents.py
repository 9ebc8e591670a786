"""Contents of a replay buffer: arrays by position, flags that can be set, and the state that a pickle holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError
from geartrain.integrations.transitions.index import TransitionIndex
from geartrain.integrations.transitions.layout import FLAGS, count_of, environment_of, numbers, writer_of
from geartrain.integrations.transitions.writer import TransitionWriter
from geartrain.replay.fetch import fetch
from geartrain.store.store import Store

#: Rows that are read at once.
_ROWS_AT_ONCE = 64


@dataclass
class Contents:
    """All rows of a store, oldest first."""

    fields: dict[str, NDArray[Any]]
    lengths: NDArray[np.uint32]
    priorities: NDArray[np.float64] | None = None  # (rows, steps), where the store keeps those of steps

    @staticmethod
    def of(store: Store) -> Contents:
        """A copy of what is in a store. Rows that go meanwhile are left out."""
        keys = store.keys()
        if not len(keys):
            return Contents({}, np.empty(0, np.uint32))
        return Contents.of_rows(store, keys, on_stale="drop")

    @staticmethod
    def of_rows(store: Store, keys: Keys, on_stale: Literal["raise", "drop"] = "raise") -> Contents:
        """A copy of some rows."""
        batch: Any = fetch(store, keys, output="numpy", pad="right", on_stale=on_stale)
        lengths = np.asarray(batch.length).astype(np.uint32)
        priorities = None
        if store.per_step:
            rows, steps = _steps_of(lengths)
            priorities = np.zeros((len(lengths), store.max_length))
            priorities[rows, steps] = store.status(batch.keys[rows].of_steps(steps))["priority"]
        return Contents(dict(batch.fields), lengths, priorities)

    def part(self, begin: int, end: int) -> Contents:
        """Some of the rows, without a copy."""
        priorities = None if self.priorities is None else self.priorities[begin:end]
        fields = {name: values[begin:end] for name, values in self.fields.items()}
        return Contents(fields, self.lengths[begin:end], priorities)

    def put(self, store: Store) -> None:
        """Inserts the rows; their steps can be drawn once they have their priorities."""
        if not len(self.lengths):
            return
        if self.priorities is None:
            store.insert(self.fields, lengths=self.lengths)
            return
        keys = store.insert(self.fields, lengths=self.lengths, priorities=np.zeros(len(self.lengths)))
        rows, steps = _steps_of(self.lengths)
        store.update_priorities(keys[rows].of_steps(steps), self.priorities[rows, steps])


def _steps_of(lengths: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and step of every step of rows."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    first = np.cumsum(lengths, dtype=np.int64) - lengths
    return rows, np.arange(len(rows)) - first[rows]


class Positions:
    """Transitions of one writer, by position in a ring of `size` and by environment, as in Stable-Baselines3.

    For inspection only: each access makes a new array from the rows.

    Args:
        store: store with the transitions.
        index: index of the store.
        writer: the writer of the transitions.
        n_envs, size: number of environments, and of positions of each.
    """

    def __init__(self, store: Store, index: TransitionIndex, writer: TransitionWriter, n_envs: int, size: int) -> None:
        self._store = store
        self._index = index
        self._writer = writer
        self._n_envs = n_envs
        self._size = size

    def numbers_at(self, positions: NDArray[Any], environments: NDArray[Any]) -> NDArray[np.int64]:
        """Numbers of the transitions at positions.

        Raises:
            ArgumentError: nothing was added there yet.
        """
        newest = self._writer.count - 1
        counts = newest - (newest - positions) % self._size
        if (counts < 0).any():
            raise ArgumentError(f"nothing was added at position {positions[counts < 0][0]} yet")
        found: NDArray[np.int64] = numbers(self._writer.writer, self._n_envs, 0)[environments] + counts
        return found

    def read(self, field: str, step: int = 0) -> NDArray[Any]:
        """A field, (size, n_envs, ...), zeros where nothing is; with step=-1 of the steps before the transitions'."""
        schema = self._store.fields[field]
        size, count = self._size, self._writer.count
        found = np.zeros((size, self._n_envs, *schema.shape), schema.numpy_dtype)
        self._index.refresh()
        runs = self._index.runs()
        mine = (writer_of(runs.number) == self._writer.writer) & (count_of(runs.number) + runs.length > count - size)
        which = np.flatnonzero(mine)
        for begin in range(0, len(which), _ROWS_AT_ONCE):
            some = which[begin : begin + _ROWS_AT_ONCE]
            keys = Keys.of_rows(runs.row[some], runs.generation[some], self._store.id)
            rows: Any = fetch(self._store, keys, fields=[field], output="numpy", pad="right")[field]
            for place, run in enumerate(some):
                first, steps = int(runs.step[run]), int(runs.length[run])
                counts = int(count_of(runs.number[run])) + np.arange(steps)
                kept = counts >= count - size
                environment = int(environment_of(runs.number[run]))
                found[counts[kept] % size, environment] = rows[place, first + step : first + step + steps][kept]
        return found

    def set_flags(self, bit: int, positions: NDArray[Any], environments: NDArray[Any], values: NDArray[Any]) -> None:
        """Sets a flag of transitions: their rows are written anew, with it, and removed.

        Raises:
            ArgumentError: nothing was added there yet, or what was is gone. No flag is set.
        """
        changed = dict(zip(self.numbers_at(positions, environments).tolist(), values.tolist(), strict=True))
        if not changed:
            return
        self._writer.cut()
        self._index.refresh()
        runs = self._index.runs()
        places: dict[tuple[int, int], list[tuple[int, bool]]] = {}  # several rows may hold one: n-step repeats steps
        for number, value in changed.items():
            holding = np.flatnonzero((runs.number <= number) & (number < runs.number + runs.length))
            if not len(holding):
                position = int(count_of(np.array(number))) % self._size
                raise ArgumentError(f"the transition at position {position} was removed or evicted")
            for run in holding:
                step = int(runs.step[run] + number - runs.number[run])
                places.setdefault((int(runs.row[run]), int(runs.generation[run])), []).append((step, value))
        rows = np.array(list(places), np.uint32)
        keys = Keys.of_rows(rows[:, 0], rows[:, 1], self._store.id)
        contents = Contents.of_rows(self._store, keys)
        fields = contents.fields
        for row, steps in enumerate(places.values()):
            for step, value in steps:
                flags = fields[FLAGS][row, step]
                fields[FLAGS][row, step] = flags | bit if value else flags & ~np.uint8(bit)
        contents.put(self._store)
        self._store.delete(keys)


class FlagArray:
    """A flag by position and environment: float32 (size, n_envs). It is read on access and can be set."""

    def __init__(self, positions: Positions, bit: int) -> None:
        self._positions = positions
        self._bit = bit

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        flags = self._positions.read(FLAGS) & self._bit
        found: NDArray[Any] = (flags != 0).astype(np.float32 if dtype is None else dtype)
        return found

    def __getitem__(self, index: Any) -> Any:
        return self.__array__()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        before = self.__array__()
        after = before.copy()
        after[index] = np.asarray(value) != 0
        at = np.nonzero(before != after)
        self._positions.set_flags(self._bit, at[0], at[1], after[at] != 0)

    def __len__(self) -> int:
        return len(self.__array__())

    @property
    def shape(self) -> tuple[int, ...]:
        """(size, n_envs)"""
        return self.__array__().shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """float32"""
        return np.dtype(np.float32)

    def __repr__(self) -> str:
        return f"FlagArray({self.__array__()!r})"


__all__ = ["Contents", "FlagArray", "Positions"]
