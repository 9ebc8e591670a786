"""Counters of a job's processes, in one small file of shared memory that anybody can read.

    board = Board.create("job-actors", slots=8, columns=("steps", "episodes"))     # in whoever starts the others
    mine = Board.open("job-actors").slot(3)                                        # in process 3
    mine["steps"] += 1
    board.column("steps").sum()

A slot has one writer and any number of readers; a value is eight bytes that are written at once, so a reader sees the
old one or the new one. What a dead process has written stays.

The maker holds a lock on the file, which the kernel undoes with the process. What a killed maker leaves is removed when
the next board of the host is made, by `remove_stale()` and by `geartrain remove`; who still reads it keeps the memory.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import geartrain.core.locks as locks
from geartrain.errors import ArgumentError, GeartrainError, StoreExistsError, StoreMissingError

#: One page: a line of JSON, padded with zeros; then the slots, a row of doubles each, 64-byte aligned.
_HEAD_BYTES = 4096
_FORMAT = "geartrain-board-1"
_DIRECTORY = Path("/dev/shm")
_PREFIX = "geartrain-board-"
#: Columns whose sum over processes means something, where a board has them.
COUNTED = ("steps", "episodes", "rows", "samples", "restarts")
#: A board that has no name yet. Nobody takes it for one that was left behind.
_UNBORN = "geartrain-unborn-board-"


class Slot(MutableMapping[str, float]):
    """One process's counters, by name."""

    def __init__(self, columns: Sequence[str], row: NDArray[np.float64]) -> None:
        self._places = {name: at for at, name in enumerate(columns)}
        self._row = row

    def __getitem__(self, name: str) -> float:
        return float(self._row[self._places[name]])

    def __setitem__(self, name: str, value: float) -> None:
        self._row[self._places[name]] = value

    def __delitem__(self, name: str) -> None:
        raise ArgumentError("a board's columns are fixed")

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class Board:
    """See the module. Made by `create`, joined by `open`; the maker's `close` removes it."""

    def __init__(
        self, path: Path, memory: mmap.mmap, slots: int, columns: Sequence[str], *, lock: int | None = None
    ) -> None:
        self.path, self.columns, self.slots = path, tuple(columns), slots
        self._lock = lock  # the maker's descriptor
        width = -(-len(self.columns) // 8) * 8
        values = np.frombuffer(memory, np.float64, slots * width, _HEAD_BYTES).reshape(slots, width)
        self._values = values[:, : len(self.columns)]
        self._owner_pid = None if lock is None else os.getpid()

    @classmethod
    def create(cls, name: str, slots: int, columns: Sequence[str]) -> Board:
        """A new board, all zeros.

        Raises:
            StoreExistsError: the name is taken. ArgumentError: nothing to count.
        """
        if slots < 1 or not columns or len(set(columns)) != len(columns):
            raise ArgumentError(
                f"a board needs slots and columns of different names, found {slots} and {list(columns)}"
            )
        head = json.dumps({"format": _FORMAT, "slots": slots, "columns": list(columns)}).encode()
        if len(head) > _HEAD_BYTES:
            raise ArgumentError(f"the names of {len(columns)} columns do not fit into {_HEAD_BYTES} bytes")
        path = _path(name)
        remove_stale()
        unborn = path.with_name(f"{_UNBORN}{os.getpid()}-{secrets.token_hex(4)}")
        fd = os.open(unborn, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            locks.take(fd, locks.EXCLUSIVE, 0)
            os.truncate(fd, _HEAD_BYTES + slots * -(-len(columns) // 8) * 64)
            memory = mmap.mmap(fd, 0)
            memory[: len(head)] = head
            os.link(unborn, path)  # with its lock and its first line, or not at all
        except FileExistsError:
            os.close(fd)
            raise StoreExistsError(f"a board named {name!r} exists already ({path})") from None
        except BaseException:
            os.close(fd)
            raise
        finally:
            unborn.unlink(missing_ok=True)
        return cls(path, memory, slots, columns, lock=fd)

    @classmethod
    def open(cls, name: str) -> Board:
        """The board of that name, to read it and to write to one's own slot.

        Raises:
            StoreMissingError: there is none. GeartrainError: the file is something else.
        """
        path = _path(name)
        try:
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
            head: dict[str, Any] = json.loads(memory[:_HEAD_BYTES].rstrip(b"\0"))
            if head["format"] != _FORMAT:
                raise KeyError(head["format"])
        except FileNotFoundError:
            raise StoreMissingError(f"there is no board named {name!r} ({path})") from None
        except (ValueError, KeyError, TypeError) as error:
            raise GeartrainError(f"{path} is not a board of this build: {error!r}") from None
        return cls(path, memory, head["slots"], head["columns"])

    @property
    def name(self) -> str:
        """What `open` finds it by."""
        return self.path.name.removeprefix(_PREFIX)

    def slot(self, number: int) -> Slot:
        """The counters of one process, by name; for its one writer."""
        if not 0 <= number < self.slots:
            raise ArgumentError(f"the board has slots 0 to {self.slots - 1}, found {number}")
        return Slot(self.columns, self._values[number])

    def column(self, name: str) -> NDArray[np.float64]:
        """A copy of one counter of all slots, (slots,)."""
        copied: NDArray[np.float64] = self._values[:, self.columns.index(name)].copy()
        return copied

    def close(self) -> None:
        """Removes the file, if this process made it. Slots stay usable."""
        if self._owner_pid == os.getpid() and self._lock is not None:
            self._owner_pid = None
            self.path.unlink(missing_ok=True)
            os.close(self._lock)

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Described(NamedTuple):
    """A board as it is now."""

    name: str
    slots: int
    columns: list[str]
    in_use: bool  # whether its maker lives
    totals: dict[str, float]  # of each column, over all slots


def names() -> list[str]:
    """The boards of this host."""
    return sorted(path.name.removeprefix(_PREFIX) for path in _DIRECTORY.glob(f"{_PREFIX}*"))


def describe(name: str) -> Described:
    """A board, without a trace. Raises `StoreMissingError`, or `GeartrainError` for something else."""
    board = Board.open(name)
    in_use = not _is_stale(board.path)
    totals = {column: float(board.column(column).sum()) for column in board.columns}
    return Described(name, board.slots, list(board.columns), in_use, totals)


def unlink(name: str) -> bool:
    """Removes a board's file; False if there is none. Who uses it keeps the memory."""
    try:
        _path(name).unlink()
    except FileNotFoundError:
        return False
    return True


def remove_stale() -> list[str]:
    """Removes the boards whose makers are gone; returns their names."""
    removed = []
    for name in names():
        path = _path(name)
        if _is_stale(path):
            path.unlink(missing_ok=True)
            removed.append(name)
    return removed


def _is_stale(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # gone, or somebody else's
        return False
    try:
        return not locks.is_taken(fd, 0)
    finally:
        os.close(fd)


def _path(name: str) -> Path:
    if not name or "/" in name or name.startswith("."):
        raise ArgumentError(f"a board's name is a plain word, found {name!r}")
    return _DIRECTORY / f"{_PREFIX}{name}"


__all__ = ["COUNTED", "Board", "Described", "Slot", "describe", "names", "remove_stale", "unlink"]
