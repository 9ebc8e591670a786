"""Shared counters: a file in shared memory with one slot of named counters for each process of a job.

    counters = SharedCounters.create("job-actors", slots=8, columns=("steps", "episodes"))   # in the supervisor
    slot = SharedCounters.open("job-actors").slot(3)                                         # in process 3
    slot["steps"] += 1
    counters.column("steps").sum()

A slot has one writer and any number of readers. A value has eight bytes, which are written at once. A reader therefore
sees the old value or the new one. The values of a dead process stay.

The creator holds a lock on the file, which the kernel releases when the process ends. If the creator is killed, the
file stays. It is removed by the next `create` on the host, by `remove_stale()`, or by `geartrain remove`. Processes
that have mapped the file keep the memory.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

import geartrain.core.locks as locks
from geartrain.core.arguments import check_whole, did_you_mean, some_of
from geartrain.core.lifetime import Closing, Uncopied, on_error
from geartrain.core.shared_files import (
    cannot_make,
    leftovers,
    naming_errors,
    open_shared,
    segments_directory,
    shared_files,
)
from geartrain.errors import (
    ArgumentError,
    GeartrainError,
    IncompatibleStoreError,
    StoreExistsError,
    StoreMissingError,
)

#: Header: one page with a line of JSON, padded with zeros. Then the slots, a row of doubles each, 64-byte aligned.
_HEADER_BYTES = 4096
_FORMAT = "geartrain-board-1"
_PREFIX = "geartrain-board-"
#: Columns with a meaningful sum over processes, if they exist.
COUNTED = ("steps", "episodes", "rows", "samples", "restarts")
#: A file without its final name yet; `remove_stale` must not take it for one that was left behind.
_UNNAMED = "geartrain-unborn-board-"


class CounterSlot(Uncopied, MutableMapping[str, float], elsewhere="open the counters there, and take the slot"):
    """The counters of one process, by name. Only its one writer may use it."""

    def __init__(self, columns: Sequence[str], row: NDArray[np.float64]) -> None:
        self._index = {name: at for at, name in enumerate(columns)}
        self._row = row

    def __getitem__(self, name: str) -> float:
        return float(self._row[self._index[name]])

    def __setitem__(self, name: str, value: float) -> None:
        self._row[self._index[name]] = value

    def __delitem__(self, name: str) -> None:
        raise ArgumentError("the columns of shared counters are fixed")

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


class SharedCounters(Closing, elsewhere="SharedCounters.open(name) joins them there"):
    """Counters in shared memory, one row for each process.

    `create` makes the file, and `open` attaches to it. The creator's `close` removes it.

    Attributes:
        path: of the file, in /dev/shm or GEARTRAIN_DIR.
        slots, columns: number of processes, names of their counters.
    """

    def __init__(
        self, path: Path, memory: mmap.mmap, slots: int, columns: Sequence[str], *, lock: int | None = None
    ) -> None:
        self.path, self.columns, self.slots = path, tuple(columns), slots
        width = -(-len(self.columns) // 8) * 8
        values = np.frombuffer(memory, np.float64, slots * width, _HEADER_BYTES).reshape(slots, width)
        self._values = values[:, : len(self.columns)]
        # Removes the file once: by `close`, or at the interpreter's exit. Only the creator does.
        self._remove = None if lock is None else weakref.finalize(self, _remove, path, lock, os.getpid())

    @classmethod
    def create(cls, name: str, slots: int, columns: Sequence[str]) -> SharedCounters:
        """New counters, all zeros.

        Raises:
            StoreExistsError: the name is taken. ArgumentError: no slots, or no columns. NoSpaceError: no room for them.
        """
        if slots < 1 or not columns or len(set(columns)) != len(columns):
            raise ArgumentError(
                f"counters need slots and columns of different names, found {slots} and {list(columns)}"
            )
        header = json.dumps({"format": _FORMAT, "slots": slots, "columns": list(columns)}).encode()
        if len(header) > _HEADER_BYTES:
            raise ArgumentError(
                f"the names of {len(columns)} columns are too long: they must fit into {_HEADER_BYTES} bytes"
            )
        path = _path(name)
        remove_stale()
        unnamed = path.with_name(f"{_UNNAMED}{os.getpid()}-{secrets.token_hex(4)}")
        nbytes = _file_bytes(slots, len(columns))
        try:
            fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with on_error(os.close, fd):
                locks.take(fd, locks.EXCLUSIVE, 0)
                # Allocated now: on a full file system a write to a mapping without memory behind it is SIGBUS.
                os.posix_fallocate(fd, 0, nbytes)
                memory = mmap.mmap(fd, 0)
                memory[: len(header)] = header
                os.link(unnamed, path)  # locked and with its header, or not at all
        except FileExistsError:
            raise StoreExistsError(f"counters named {name!r} exist already ({path})") from None
        except GeartrainError:
            raise
        except OSError as error:
            raise cannot_make(path, error, nbytes) from None
        finally:
            with suppress(OSError):
                unnamed.unlink(missing_ok=True)
        return cls(path, memory, slots, columns, lock=fd)

    @classmethod
    def open(cls, name: str) -> SharedCounters:
        """The counters of that name, to read all and to write one slot.

        Raises:
            StoreMissingError: there are none. IncompatibleStoreError: the file is something else. UntrustedStoreError:
                another user's.
        """
        path = _path(name)
        try:
            fd = open_shared(path)
        except FileNotFoundError:
            there = _named(leftovers(f"{_PREFIX}*"))
            raise StoreMissingError(
                f"there are no counters named {name!r} ({path}); existing ones are "
                f"{some_of(there)}{did_you_mean(name, there)}"
            ) from None
        try:
            with naming_errors("cannot read the counters", path):
                slots, columns = _read_header(fd)
                memory = mmap.mmap(fd, _file_bytes(slots, len(columns)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise IncompatibleStoreError(f"{path} does not have the counter format of this build: {error!r}") from None
        finally:
            os.close(fd)
        return cls(path, memory, slots, columns)

    @property
    def name(self) -> str:
        """Name for `open`."""
        return self.path.name.removeprefix(_PREFIX)

    def slot(self, number: int) -> CounterSlot:
        """The counters of one process, by name; for its one writer."""
        check_whole("the slot of counters", number, 0, self.slots - 1)
        return CounterSlot(self.columns, self._values[number])

    def column(self, name: str) -> NDArray[np.float64]:
        """A copy of one counter of all slots, (slots,)."""
        copied: NDArray[np.float64] = self._values[:, self.columns.index(name)].copy()
        return copied

    def close(self) -> None:
        """Removes the file, if this process created it; so does its end. Slots stay usable."""
        if self._remove is not None:
            self._remove()


class CountersInfo(NamedTuple):
    """Counters as they are now."""

    name: str
    slots: int
    columns: list[str]
    in_use: bool  # whether their creator is alive
    totals: dict[str, float]  # of each column, over all slots


def names() -> list[str]:
    """Names of the counters on this host."""
    return _named(shared_files(f"{_PREFIX}*"))


def _named(paths: list[Path]) -> list[str]:
    return [path.name.removeprefix(_PREFIX) for path in paths]


def describe(name: str) -> CountersInfo:
    """Totals of counters, without attaching. Raises as `SharedCounters.open`."""
    counters = SharedCounters.open(name)
    in_use = not _is_stale(counters.path)
    totals = {column: float(counters.column(column).sum()) for column in counters.columns}
    return CountersInfo(name, counters.slots, list(counters.columns), in_use, totals)


def unlink(name: str) -> bool:
    """Removes the file of counters; False if there is none. Processes that have it mapped keep the memory."""
    try:
        _path(name).unlink()
    except FileNotFoundError:
        return False
    return True


def remove_stale() -> list[str]:
    """Removes counters whose creators are gone; returns their names."""
    removed = []
    for name in _named(leftovers(f"{_PREFIX}*")):
        path = _path(name)
        with suppress(OSError):
            if _is_stale(path):
                path.unlink(missing_ok=True)
                removed.append(name)
    return removed


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child's exit removes nothing
        with suppress(OSError):  # without its lock, the next `create` removes it
            path.unlink(missing_ok=True)
        os.close(lock)


def _is_stale(path: Path) -> bool:
    try:
        fd = open_shared(path)
    except (GeartrainError, OSError):  # gone, or somebody else's
        return False
    try:
        return not locks.is_taken(fd, 0)
    finally:
        os.close(fd)


def _file_bytes(slots: int, columns: int) -> int:
    return _HEADER_BYTES + slots * -(-columns // 8) * 64


def _read_header(fd: int) -> tuple[int, list[str]]:
    """Slots and columns, if they match the file's size. Raises `ValueError`, `KeyError`, `TypeError`."""
    header = json.loads(os.pread(fd, _HEADER_BYTES, 0).rstrip(b"\0"))
    slots, columns = header["slots"], header["columns"]
    if header["format"] != _FORMAT or type(slots) is not int or slots < 1:
        raise ValueError(header["format"])
    if not isinstance(columns, list) or not columns or not all(isinstance(name, str) for name in columns):
        raise ValueError("columns without names")
    if os.fstat(fd).st_size != _file_bytes(slots, len(columns)):
        raise ValueError(f"{os.fstat(fd).st_size} bytes for {slots} slots of {len(columns)} columns")
    return slots, columns


def _path(name: str) -> Path:
    if not name or "/" in name or name.startswith("."):
        raise ArgumentError(f"the name of counters is a plain word, found {name!r}")
    return segments_directory() / f"{_PREFIX}{name}"


__all__ = ["COUNTED", "CounterSlot", "CountersInfo", "SharedCounters", "describe", "names", "remove_stale", "unlink"]
