"""Reads rows of a store or checkpoint for export: group by group, in commit order, in bounded memory.

A row with several episodes is split, so that each episode becomes a trajectory of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from geartrain.core.lifetime import Closing, on_error
from geartrain.core.schema import Field
from geartrain.core.shared_files import Trust
from geartrain.errors import ArgumentError, SourceError, StoreClosedError
from geartrain.integrations.datasets.episode import Array
from geartrain.replay.fetch import fetch
from geartrain.store.checkpoint_reader import Checkpoint
from geartrain.store.recorder import EPISODES, GOES_ON_HERE, GOES_ON_THERE, REPEATS, shares_rows
from geartrain.store.row import OPEN
from geartrain.store.store import Store

#: Bytes of all fields in one group of rows, unless one row is larger.
GROUP_BYTES = 16 << 20
#: Rows whose metadata is looked at together.
_ROWS_AT_ONCE = 1 << 16
#: Metadata that `metadata=True` adds: the name it is written under, and its field.
METADATA = {
    "row.sequence": Field((), "uint64", per_row=True),
    "row.version": Field((), "int64", per_row=True),
    "row.priority": Field((), "float64", per_row=True),
    "row.times_sampled": Field((), "uint32", per_row=True),
    "row.inserted_at_ns": Field((), "uint64", per_row=True),
}


@dataclass(frozen=True)
class RowGroup:
    """Several whole trajectories. Each is a row, or one episode of a row that holds several.

    Attributes:
        first: number of the group's first trajectory among all that are read.
        lengths: (n,) steps of each trajectory.
        values: by field, (rows, max_length, *shape), or (n, *shape) for fields with one value for each row. Valid until
            the next group is read.
        parts: the row (n,) and the first step (n,) of each trajectory, and the lengths (rows,) of the rows. None if
            each trajectory is a row.
    """

    first: int
    lengths: Array
    values: Mapping[str, Array]
    parts: tuple[Array, Array, Array] | None = None

    @property
    def rows(self) -> int:
        """Rows that they are of."""
        return len(self.lengths if self.parts is None else self.parts[2])

    def steps(self, name: str) -> Array:
        """A timed field's steps of all trajectories behind each other, (sum of lengths, *shape)."""
        values, lengths = self.values[name], self.lengths if self.parts is None else self.parts[2]
        if len(lengths) and (lengths == values.shape[1]).all():
            return values.reshape(-1, *values.shape[2:])
        return values[np.arange(values.shape[1]) < lengths[:, None]]

    def trajectory(self, name: str, index: int) -> Array:
        """A timed field's steps of one of them, (length, *shape)."""
        row, first = (index, 0) if self.parts is None else (self.parts[0][index], self.parts[1][index])
        return self.values[name][row, first : first + self.lengths[index]]


class StoredRows(Closing, elsewhere="open the store there"):
    """Rows of a store or checkpoint at the time when this object was made, oldest first.

    The store may be in use. Rows that are overwritten before they are read are left out and counted.

    Args:
        source: an open store or checkpoint, the name or path of a store, or the directory of a checkpoint. Names and
            paths are opened here, stores with mode="r", and closed by `close`.
        trust: as in `Store.open`.

    Attributes:
        name: name for messages.
        fields, max_length: of the store. If rows hold several episodes, the field with their number is left out.
        split: whether rows hold several episodes, each of which is a trajectory of its own.
        count: number of rows.
        overwritten: rows that the last iteration left out.
        still_open: rows of the last iteration that their writers were extending. Their steps so far are included.

    Raises:
        StoreMissingError, IncompatibleStoreError, UntrustedStoreError, CheckpointError: as of opening it.
        ArgumentError: something else, or a store with axes, strings or tasks.
    """

    def __init__(self, source: Store | Checkpoint | str | os.PathLike[str], *, trust: Trust = "user") -> None:
        self._mine: Store | Checkpoint | None = None
        if isinstance(source, str | os.PathLike):
            self.name = os.fspath(source)
            if not isinstance(self.name, str) or not self.name or not _is_text(self.name):
                raise ArgumentError(f"a store has a name or path, found {source!r}")
            source = self._mine = _opened(self.name, trust)
        elif isinstance(source, Store):
            self.name = source.name
        elif isinstance(source, Checkpoint):
            self.name = str(source.directory)
        else:
            raise ArgumentError(f"rows come from a Store, a checkpoint or the name of either, found {source!r}")
        if source.plan is not None:
            self.close()
            kind = "tasks" if source.plan.tasks else "axes"
            raise ArgumentError(f"the store {self.name!r} has {kind}: it cannot be exported yet")
        self.split = shares_rows(source.fields)
        self.fields = {name: field for name, field in source.fields.items() if not (self.split and name == EPISODES)}
        self.max_length = source.max_length
        self.overwritten = self.still_open = 0
        self._source = source
        with on_error(self.close):
            if isinstance(source, Store):
                if source.closed:
                    raise StoreClosedError(f"the store {source.name!r} was closed")
                self._keys = source.keys()
                self.count = len(self._keys)
            else:
                self._records = source.records()[: source.rows]
                self.count = source.rows

    def steps(self) -> tuple[int, int]:
        """Steps of all rows, and of the longest."""
        total = longest = 0
        for at in range(0, self.count, _ROWS_AT_ONCE):
            if isinstance(self._source, Store):
                lengths = self._source.status(self._keys[at : at + _ROWS_AT_ONCE])["length"]
            else:
                lengths = self._records["length"][at : at + _ROWS_AT_ONCE]
            total += int(lengths.sum(dtype=np.uint64))
            longest = max(longest, int(lengths.max(initial=0)))
        return total, longest

    def episodes(self) -> int:
        """Number of trajectories: rows, or the episodes of rows that hold several."""
        if not self.split:
            return self.count
        read = self._from_store if isinstance(self._source, Store) else self._from_checkpoint
        total = 0
        for at in range(0, self.count, _ROWS_AT_ONCE):
            _, found, _ = read(at, min(at + _ROWS_AT_ONCE, self.count), [EPISODES])
            total += int(found[EPISODES].sum(dtype=np.uint64))
        return max(total, self.count)  # rows that were inserted whole may have no number

    def verify(self) -> None:
        """Compares a checkpoint with its checksums. Raises `CheckpointError`: the file and its first bad block."""
        if isinstance(self._source, Checkpoint):
            self._source.verify()

    def groups(self, chosen: Mapping[str, str], dtypes: Mapping[str, str], *, metadata: bool) -> Iterator[RowGroup]:
        """All rows, a group at a time.

        Args:
            chosen: {name in the group: the store's field}.
            dtypes: {name in the group: dtype to convert to}, for those that are converted.
            metadata: with the fields of `METADATA` besides.
        """
        self.overwritten = self.still_open = 0
        row_bytes = sum(self.fields[name].block_nbytes(self.max_length) for name in chosen.values())
        size = max(1, min(_ROWS_AT_ONCE, GROUP_BYTES // max(1, row_bytes)))
        first = 0
        for at in range(0, self.count, size):
            read = self._from_store if isinstance(self._source, Store) else self._from_checkpoint
            names = [*dict.fromkeys([*chosen.values(), *(["last"] if self.split else [])])]
            lengths, found, about = read(at, min(at + size, self.count), names)
            values = {name: found[stored] for name, stored in chosen.items()}
            for name, dtype in dtypes.items():
                values[name] = values[name].astype(Field((), dtype).numpy_dtype)
            if metadata:
                values |= {f"row.{name}": about[name] for name in (each.removeprefix("row.") for each in METADATA)}
            group = RowGroup(first, lengths.astype(np.int64), values)
            if self.split:
                once = {name for name, stored in chosen.items() if self.fields[stored].per_row} | METADATA.keys()
                repeats = {name for name in once if chosen.get(name, "").startswith(REPEATS)}
                group = _split(group, found["last"], once, repeats)
            yield group
            first += len(group.lengths)

    def _from_store(self, first: int, last: int, names: list[str]) -> tuple[Array, dict[str, Array], Mapping[str, Any]]:
        store, keys = self._source, self._keys[first:last]
        assert isinstance(store, Store)
        about = store.status(keys)
        batch = fetch(store, keys, fields=names, pad="right", output="numpy", on_stale="drop")
        self.overwritten += len(keys) - len(batch)
        if len(batch) < len(keys):
            kept = np.isin(keys.row, batch.keys.row)
            about = {name: values[kept] for name, values in about.items()}
        self.still_open += int((about["state"] == OPEN).sum())
        return np.asarray(batch.length), {name: np.asarray(batch[name]) for name in names}, about

    def _from_checkpoint(
        self, first: int, last: int, names: list[str]
    ) -> tuple[Array, dict[str, Array], Mapping[str, Any]]:
        checkpoint = self._source
        assert isinstance(checkpoint, Checkpoint)
        found = {}
        for name in names:
            field = checkpoint.fields[name]
            blocks = checkpoint.row_blocks(self._records, first, last, name)
            found[name] = (
                blocks.reshape(-1).view(field.numpy_dtype).reshape(last - first, *field.block_shape(self.max_length))
            )
        records = self._records[first:last]
        about = {name: np.ascontiguousarray(records[name]) for name in records.dtype.names or ()}
        about["priority"] = about["priority"] / 2.0 ** checkpoint.options["priority_fraction_bits"]
        return about["length"], found, about

    def close(self) -> None:
        """Closes what this has opened."""
        if self._mine is not None:
            self._mine.close()


def _split(group: RowGroup, marks: Array, once: Set[str], repeats: Set[str]) -> RowGroup:
    """The episodes of some rows, which marked steps end and a row's last one.

    Args:
        group: the rows.
        marks: (n, max_length), True where an episode ends.
        once: fields without time.
        repeats: those of them that are `REPEATS`: the first episode of a row alone may repeat steps of the row before,
            and the last one alone may go on in the next.
    """
    ends = np.not_equal(marks, 0) & (np.arange(marks.shape[1]) < group.lengths[:, None])
    rows = np.flatnonzero(group.lengths)
    ends[rows, group.lengths[rows] - 1] = True
    row, last = np.nonzero(ends)
    begins = np.append(True, row[1:] != row[:-1])[: len(row)]
    first = np.where(begins, 0, np.append(0, last[:-1] + 1)[: len(row)])
    values = {name: array[row] if name in once else array for name, array in group.values.items()}
    for name in repeats:
        ends_row = np.append(begins[1:], True)[: len(row)]
        values[name][~begins, 0] = values[name][~ends_row, 1] = 0
        values[name][:, 2] &= np.where(begins, GOES_ON_HERE, 0) | np.where(ends_row, GOES_ON_THERE, 0)
    return RowGroup(group.first, last + 1 - first, values, (row, first, group.lengths))


def _opened(name: str, trust: Trust) -> Store | Checkpoint:
    path = Path(name)
    if max(map(len, os.fsencode(name).split(b"/"))) > 255:  # what no file system has
        return Store.open(name, mode="r", adopt=True, trust=trust)  # which says so
    if ("/" in name and path.is_dir()) or (path / "manifest.json").is_file():
        if (path / "journal.json").is_file():
            raise SourceError(
                f"{name} is a journal: rows are exported from the store that Store.create(..., journal={name!r}) "
                f"restores"
            )
        return Checkpoint(path)
    return Store.open(name, mode="r", adopt=True, trust=trust)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in name


__all__ = ["GROUP_BYTES", "METADATA", "RowGroup", "StoredRows"]
