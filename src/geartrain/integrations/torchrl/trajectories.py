"""Trajectories of a `SharedStorage`: finds where they begin, by reading the items written since the last call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import SchemaError
from geartrain.integrations.torchrl.storage import SharedStorage
from geartrain.integrations.torchrl.stored_items import ADDED, CURSOR, LENGTH, REWRITES

# Items that are looked at in one piece.
_PIECE = 1 << 20
#: Entries that name trajectories, in the order in which they are looked for.
TRAJECTORY_KEYS = ("collector.traj_ids", "episode")
#: The entry that says where a trajectory ends.
END_KEY = "next.done"


@dataclass
class Held:
    """Items of a storage, oldest first, numbered `first` to `end` - 1 by the count of all items ever added."""

    first: int
    end: int
    head: int
    size: int

    def place(self, number: int) -> int:
        """An index of the storage."""
        return (number - self.end + self.head) % self.size

    def places(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Indices of the storage."""
        return (numbers - self.end + self.head) % self.size

    def numbers(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Numbers of items, by their indices."""
        return self.end - 1 - (self.head - 1 - places) % self.size


class Trajectories:
    """Finds where the trajectories of a storage begin.

    They are found by the entry that names them, or by those that mark their ends. Memory is 8 bytes for each
    trajectory. The first call reads every item, and later calls only items added since. If existing items were set
    again, the next call reads all of them.

    Args:
        trajectory_key: dotted name of an entry that is another one for each trajectory. Without it and `end_keys`:
            `TRAJECTORY_KEYS` where there is one, then `END_KEY`.
        end_keys: dotted names of entries, of which any that is not 0 ends a trajectory; those that are not there are
            left out.
    """

    def __init__(self, trajectory_key: str | None, end_keys: Sequence[str] | None) -> None:
        self._trajectory_key, self._end_keys = trajectory_key, end_keys
        self._store: Any = None
        self._names: list[str] = []
        self._by_name = False
        self._rewrites = self._seen = -1
        self._last: Any = None  # the name of the newest item's trajectory, or whether it ends there
        self._begins = np.zeros(16, np.int64)
        self._from = self._to = 0

    def look(self, storage: SharedStorage) -> Held:
        """The items that there are now; the other methods speak of these. The storage has items.

        Raises:
            SchemaError: no such entry. RuntimeError: an entry has several numbers for an item.
            WaitTimeoutError: another process writes for too long.
        """
        with storage.locked():
            if storage.store is not self._store:
                self._choose(storage)
            length, added = storage.shared(LENGTH), storage.shared(ADDED)
            head = storage.shared(CURSOR) if length == storage.max_size else length
            window = Held(added - length, added, head, storage.max_size)
            rewrites = storage.shared(REWRITES)
            if rewrites != self._rewrites or self._seen < window.first:
                self._from = self._to = 0
                self._seen, self._last = window.first, None
            self._rewrites = -1  # of a look that does not end
            begin = self._seen
            while begin < added:  # neighbours, up to the storage's end
                place = window.place(begin)
                n = min(added - begin, _PIECE, window.size - place)
                starts = self._starts(self._read(storage.store, storage.keys, (place, place + n)))
                self._append(begin + np.flatnonzero(starts))
                begin += n
            self._seen, self._rewrites = added, rewrites
        found = np.searchsorted(self._begins[self._from : self._to], window.first, "right")
        self._from += int(found)
        return window

    def _choose(self, storage: SharedStorage) -> None:
        """The fields that tell trajectories apart."""
        there = storage.names
        if self._trajectory_key is None and self._end_keys is None:
            named = [name for name in TRAJECTORY_KEYS if name in there]
            wanted = named[:1] or [END_KEY]
            self._by_name = bool(named)
        else:
            self._by_name = self._trajectory_key is not None
            wanted = [self._trajectory_key] if self._trajectory_key is not None else list(self._end_keys or ())
        self._names = [name for name in wanted if name in there]
        if not self._names:
            raise SchemaError(
                f"no entry {' or '.join(map(repr, wanted))} tells where trajectories end; items have "
                f"{', '.join(there)}: give traj_key or end_key"
            )
        self._rewrites, self._store = -1, storage.store

    def _read(self, store: Any, keys: Any, places: tuple[int, int]) -> list[NDArray[Any]]:
        """The entries (n,) of items at neighbouring indices, of which nobody writes any: the storage is locked."""
        begin, end = places
        length = store.max_length
        rows = keys.row[begin // length : -(-end // length)]
        found = []
        for name in self._names:
            column = store.column(name)
            if int(np.prod(column.shape[2:])) != 1:
                raise RuntimeError(  # as torchrl
                    f"Expected the end-of-trajectory signal to be 1-dimensional. Got {name!r}, of shape "
                    f"{column.shape[2:]}"
                )
            found.append(column[rows].reshape(-1)[begin % length :][: end - begin])
        return found

    def _starts(self, entries: list[NDArray[Any]]) -> NDArray[np.bool_]:
        """Which of these items, the next ones, begin a trajectory."""
        begins = np.ones(len(entries[0]), bool)
        if self._by_name:
            names = entries[0]
            begins[0] = self._last is None or names[0] != self._last
            begins[1:] = names[1:] != names[:-1]
            self._last = names[-1]
        else:
            ends = np.any([entry.astype(bool) for entry in entries], axis=0)
            begins[0] = self._last is None or self._last
            begins[1:] = ends[:-1]
            self._last = bool(ends[-1])
        return begins

    def _append(self, numbers: NDArray[np.int64]) -> None:
        if self._to + len(numbers) > len(self._begins):
            kept = self._begins[self._from : self._to]
            self._begins = np.zeros(2 * (len(kept) + len(numbers)), np.int64)
            self._begins[: len(kept)] = kept
            self._from, self._to = 0, len(kept)
        self._begins[self._to : self._to + len(numbers)] = numbers
        self._to += len(numbers)

    def without(self, window: Held, oldest: int) -> Held:
        """The window without its oldest items."""
        first = min(window.first + oldest, window.end - 1)
        self._from += int(np.searchsorted(self._begins[self._from : self._to], first, "right"))
        return replace(window, first=first)

    # --- of the window that `look` returned ------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Trajectories, the oldest of which may lack its beginning and the newest its end."""
        return self._to - self._from + 1

    def spans(self, window: Held, which: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First items and lengths of trajectories, from 0 for the oldest."""
        begins = self._begins[self._from : self._to]
        last = len(begins)
        first = np.where(which == 0, window.first, begins[np.maximum(which, 1) - 1] if last else window.first)
        end = np.where(which == last, window.end, begins[np.minimum(which, last - 1)] if last else window.end)
        return first, end - first

    def of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The trajectories that items belong to."""
        return np.searchsorted(self._begins[self._from : self._to], numbers, "right").astype(np.int64)


__all__ = ["END_KEY", "TRAJECTORY_KEYS", "Held", "Trajectories"]
