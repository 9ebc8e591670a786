"""Reads a checkpoint's schema, row table and blocks, and fills a new store with them.

checkpoint_format.py describes the format.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.arguments import check_path
from geartrain.core.lifetime import Closing
from geartrain.core.progress import Progress
from geartrain.errors import CheckpointError
from geartrain.store.checkpoint_directory import HeldDirectory, SupersededError
from geartrain.store.checkpoint_format import (
    METADATA,
    NO_CHUNK,
    PART_RECORD,
    ROW_RECORD,
    manifest_of,
    read_into,
)
from geartrain.store.checkpoint_manifest import schema_of_manifest
from geartrain.store.saved_parts import COMMITTED, FREE, TAKEN, UNDER_WAY, load_rows

_MOST_TRIES = 20

T = TypeVar("T")


class Checkpoint(Closing, elsewhere="it has a directory open; Checkpoint(directory) opens it again"):
    """An open checkpoint. Opening checks its manifest and file sizes; reading compares checksums.

    It stays readable until `close`, even if a save replaces or removes it meanwhile (checkpoint_directory.py). After
    `close` every other method raises `CheckpointError`. Use it from one thread at a time.

    Attributes:
        fields, max_length: the schema.
        plan: axes and tasks; None of a store with neither.
        options: the limits that the store was created with.
        rows: committed rows in it; of a store with axes, strings or tasks all rows, in whichever state.
        id: unique id of this checkpoint.
        store_id: id of the segment that was saved, as in `describe`.
        next_sequence, counters: of the store.
        max_priority: the largest priority ever given in the store, fixed point; 0 if none was given or the store does
            not keep it.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = check_path("the directory of a checkpoint", directory)
        self._held = HeldDirectory(self.directory)
        try:
            self._manifest = manifest_of(self._held)
        except BaseException:
            self._held.close()
            raise
        self.fields, self.max_length, self.plan = schema_of_manifest(self._manifest)
        self._block_nbytes = (
            {name: field.block_nbytes(self.max_length) for name, field in self.fields.items()} if not self.plan else {}
        )
        self.options: dict[str, Any] = self._manifest["options"]
        self.rows = int(self._manifest["rows"])
        self.id: str = self._manifest["id"]
        self.store_id = int(self._manifest["store"]["id"], 16)
        self.next_sequence = int(self._manifest["next_sequence"])
        self.max_priority = int(self._manifest["max_priority"])
        self.counters: dict[str, int] = self._manifest["counters"]

    @property
    def manifest(self) -> dict[str, Any]:
        """The content of manifest.json."""
        return self._manifest

    @property
    def shared_nbytes(self) -> int:
        """Bytes of the files that are shared with other checkpoints."""
        return sum(
            about["bytes"] for file, about in self._manifest["files"].items() if self._held.status(file).st_nlink > 1
        )

    def link(self, file: str, target: Path) -> None:
        """Hard-links one of its files to a new path. Raises `OSError`."""
        self._held.link(file, target)

    def close(self) -> None:
        """Lets it be removed, once it was replaced."""
        self._held.close()

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(about["bytes"] for about in self._manifest["files"].values())

    def records(self) -> NDArray[Any]:
        """The row table, (n,) of ROW_RECORD: the rows that are there in the order of their sequences, then the others.

        Raises:
            CheckpointError: damage; names the file and its first bad block.
        """
        records = self._table("rows.bin", ROW_RECORD, self._manifest["listed_rows"])
        capacity, there = self.options["capacity"], records["generation"] % 2 == 1
        known = np.bincount(records["row"][records["row"] < capacity], minlength=1)
        states = (COMMITTED,) if self.plan is None else (COMMITTED, UNDER_WAY, TAKEN)
        places = records[: self.rows]
        rows_of = np.array([*self._chunk_rows(), 0], np.uint64)
        wrong = {
            "does not have the rows that the manifest lists": int(there.sum()) != self.rows
            or not there[: self.rows].all()
            or not np.isin(places["state"], states).all()
            or (records["state"][self.rows :] != FREE).any(),
            "has one row twice, or a row of no store": known.max() > 1 or int(known.sum()) != len(records),
            "places rows where no chunk has any": self.plan is None
            and bool((places["slot"] >= rows_of[np.minimum(places["chunk"], len(rows_of) - 1)]).any()),
        }
        for what, is_so in wrong.items():
            if is_so:
                raise CheckpointError(f"{self.directory / 'rows.bin'} is damaged: it {what}")
        return records

    def _chunk_rows(self) -> list[int]:
        """The rows in each chunk, where these are of fixed size."""
        nbytes = sum(self._block_nbytes.values())
        return [chunk["bytes"] // nbytes for chunk in self._manifest["chunks"]] if nbytes else []

    def blocks(
        self, records: NDArray[Any], wanted: NDArray[np.bool_] | None = None
    ) -> Iterator[tuple[int, NDArray[np.intp], NDArray[np.uint8]]]:
        """The bytes of committed rows, piece by piece: a field's number, places in `records`, blocks (n, bytes).

        Every piece was compared with its checksum. `wanted` (rows,) leaves out rows; files that hold no other row
        are not read. Each array is good until the next is asked for. Memory: one chunk.

        Raises:
            CheckpointError: damage; names the file and its first bad block.
        """
        committed = records[: self.rows]
        places = np.arange(self.rows) if wanted is None else np.flatnonzero(wanted)
        places = places[np.argsort(committed["chunk"][places], kind="stable")]
        of_chunk = committed["chunk"][places]
        bounds = np.searchsorted(of_chunk, np.arange(len(self._manifest["chunks"]) + 1))
        memory = np.empty(0, np.uint8)
        for number, (chunk, n) in enumerate(zip(self._manifest["chunks"], self._chunk_rows(), strict=True)):
            mine = places[bounds[number] : bounds[number + 1]]
            if not len(mine):
                continue
            about = self._manifest["files"][chunk["file"]]
            if memory.size < about["bytes"]:
                memory = np.empty(about["bytes"], np.uint8)
            self._read_file(chunk["file"], about, memoryview(memory[: about["bytes"]].data))
            slots = committed["slot"][mine]
            whole = len(slots) == n and bool((slots == np.arange(n)).all())
            at = 0
            for field, nbytes in enumerate(self._block_nbytes.values()):
                blocks = memory[at : at + n * nbytes].reshape(n, nbytes)
                at += blocks.size
                yield field, mine, blocks if whole else blocks[slots]

    def values(self, records: NDArray[Any], name: str) -> NDArray[Any]:
        """A field's blocks of all committed rows, in the order of `records`, read without a look at checksums.

        For fields of a few bytes, by whom every row's bytes are checked elsewhere. The field has a NumPy dtype.
        """
        spec = self.fields[name]
        dtype, shape = spec.numpy_dtype, spec.block_shape(self.max_length)
        out = np.empty((self.rows, *shape), dtype)
        before = sum(list(self._block_nbytes.values())[: list(self.fields).index(name)])
        committed = records[: self.rows]
        for number, (chunk, n) in enumerate(zip(self._manifest["chunks"], self._chunk_rows(), strict=True)):
            mine = np.flatnonzero(committed["chunk"] == number)
            if len(mine):
                data = np.empty(n * self._block_nbytes[name], np.uint8)
                self._read_at(chunk["file"], n * before, data)
                out[mine] = data.view(dtype).reshape(n, *shape)[committed["slot"][mine]]
        return out

    def verify(self) -> None:
        """Compares every file with its checksums. Raises `CheckpointError`: the file and its first bad block."""
        for name, about in self._manifest["files"].items():
            for _ in self._pieces(name, about):
                pass

    def row_blocks(self, records: NDArray[Any], first: int, last: int, name: str) -> NDArray[np.uint8]:
        """A field's blocks (n, bytes) of the rows `first` to `last`, in the order of `records`, not checked (`verify`).

        For whoever wants rows in their order, a few at a time; `blocks` reads each file once.
        """
        nbytes = self._block_nbytes[name]
        out = np.empty((last - first, nbytes), np.uint8)
        number = list(self.fields).index(name)
        wanted = records[first:last]
        before = sum(list(self._block_nbytes.values())[:number])
        # Rows that lie behind each other in one chunk are read at once.
        apart = (np.diff(wanted["chunk"].astype(np.int64)) != 0) | (np.diff(wanted["slot"].astype(np.int64)) != 1)
        rows_of = self._chunk_rows()
        edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(wanted)]
        for begin, end in itertools.pairwise(edges):
            if begin < end:
                of = int(wanted["chunk"][begin])
                chunk = self._manifest["chunks"][of]
                at = rows_of[of] * before + int(wanted["slot"][begin]) * nbytes
                self._read_at(chunk["file"], at, out[begin:end])
        return out

    def _read_at(self, name: str, at: int, out: NDArray[np.uint8]) -> None:
        with self._held.reading(name) as file:
            got = read_into(file.fileno(), memoryview(out.reshape(-1).view(np.uint8).data), at)
        if got != out.nbytes:
            raise CheckpointError(f"{self.directory / name} is truncated: {out.nbytes - got} bytes are missing")

    @property
    def per_step(self) -> bool:
        """Whether the store kept a priority for every step."""
        return bool(self.options["priority_per"] == "step")

    def step_priorities(self, records: NDArray[Any]) -> NDArray[np.uint32] | None:
        """The fixed-point priorities of all committed rows' steps, row after row; None in a store without.

        Raises:
            CheckpointError: damage; names the file and its first bad block.
        """
        if not self.per_step:
            return None
        about = self._manifest["files"]["steps.bin"]
        priorities = np.empty(int(records["length"][: self.rows].sum(dtype=np.uint64)), "<u4")
        if about["bytes"] != priorities.nbytes:
            raise CheckpointError(
                f"{self.directory / 'steps.bin'} is damaged: it does not have the steps that rows.bin lists"
            )
        if priorities.size:
            self._read_file("steps.bin", about, memoryview(priorities.view(np.uint8).data))
        return priorities

    def parts(self) -> NDArray[Any]:
        """Of a store with axes, strings or tasks: the table (n,) of its parts, of PART_RECORD.

        Raises:
            CheckpointError: damage; names the file and its first bad block.
        """
        parts = self._table("parts.bin", PART_RECORD, self._manifest["parts"])
        chunks = self._manifest["chunks"]
        sizes = np.array([*(chunk["bytes"] for chunk in chunks), 0], np.uint64)
        known = parts["chunk"] < len(chunks)
        ends = sizes[np.where(known, parts["chunk"], len(chunks))]
        fits = (parts["at"] <= ends) & (parts["bytes"] <= ends - np.minimum(parts["at"], ends))
        if not (fits & (known | (parts["chunk"] == NO_CHUNK))).all():
            raise CheckpointError(f"{self.directory / 'parts.bin'} is damaged: it places parts where no chunk has any")
        return parts

    def contents(self, parts: NDArray[Any]) -> Iterator[tuple[NDArray[np.intp], NDArray[np.uint8], NDArray[np.uint64]]]:
        """The bytes of parts, chunk by chunk: places in `parts`, their bytes one behind the other, bounds of each.

        Every piece was compared with its checksum. Each array is good until the next is asked for. Memory: two chunks.

        Raises:
            CheckpointError: damage; names the file and its first bad block.
        """
        order = np.lexsort((parts["at"], parts["chunk"]))
        of_chunk = parts["chunk"][order]
        memory = np.empty(0, np.uint8)
        for number in np.unique(of_chunk).tolist():
            mine = order[np.searchsorted(of_chunk, number) : np.searchsorted(of_chunk, number, "right")]
            bounds = np.zeros(len(mine) + 1, np.uint64)
            np.cumsum(parts["bytes"][mine], out=bounds[1:])
            if number == NO_CHUNK:
                yield mine, np.empty(0, np.uint8), bounds
                continue
            chunk = self._manifest["chunks"][number]
            about = self._manifest["files"][chunk["file"]]
            if memory.size < about["bytes"]:
                memory = np.empty(about["bytes"], np.uint8)
            content = memory[: about["bytes"]]
            self._read_file(chunk["file"], about, memoryview(content.data))
            begins = parts["at"][mine].astype(np.int64)
            sizes = parts["bytes"][mine].astype(np.int64)
            if bounds[-1] != len(content) or (begins != bounds[:-1].astype(np.int64)).any():  # others died between
                pieces = [content[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
                content = np.concatenate(pieces)
            yield mine, content, bounds

    def _table(self, name: str, dtype: np.dtype[Any], n: int) -> NDArray[Any]:
        records = np.empty(n, dtype)
        if n:
            self._read_file(name, self._manifest["files"][name], memoryview(records.view(np.uint8).data))
        return records

    def fill(self, store: _native.Store, *, progress: bool = False) -> None:
        """Puts every row back in its place, into a new store of the same schema and capacity.

        Raises:
            CheckpointError: damage; names the file and its first bad block.
        """
        records = self.records()
        if self.plan is None:
            self._fill_blocks(store, records, progress)
        else:
            self._fill_parts(store, records, progress)
        store.restore_max_priority(self.max_priority)
        store.set_counters(self.counters)

    def _fill_blocks(self, store: _native.Store, records: NDArray[Any], progress: bool) -> None:
        committed = records[: self.rows]
        store.allocate(len(records))
        columns = [store.column(number) for number in range(len(self.fields))]
        with Progress(f"loading {self.directory.name}", self.rows, unit="rows", enabled=progress) as bar:
            for number, places, blocks in self.blocks(records):
                put_blocks(columns[number], committed["row"][places], blocks)
                bar.advance(blocks.size, len(blocks) if number == 0 else 0)
        restore(store, records, self.next_sequence, self.step_priorities(records))

    def _fill_parts(self, store: _native.Store, records: NDArray[Any], progress: bool) -> None:
        parts = self.parts()
        total = int(parts["bytes"].sum())
        with Progress(f"loading {self.directory.name}", total, unit="bytes", enabled=progress) as bar:

            def contents() -> Iterator[tuple[NDArray[Any], NDArray[np.uint8], NDArray[np.uint64]]]:
                for mine, content, bounds in self.contents(parts):
                    yield parts[mine], content, bounds
                    bar.advance(len(content), len(content))

            load_rows(store, records, contents(), self.next_sequence, self.directory / "parts.bin", CheckpointError)
        store.restore_task_state(self._manifest["state"])

    def _pieces(self, name: str, about: dict[str, Any], memory: memoryview | None = None) -> Iterator[memoryview]:
        """A file's pieces, each checked before it is yielded; contiguous in `memory` where that is given."""
        with self._held.reading(name) as stream:
            at = 0
            for number, crc in enumerate(about["crc32"]):
                size = min(about["bytes"] - at, about["piece_bytes"])
                piece = memoryview(bytearray(size)) if memory is None else memory[at : at + size]
                if read_into(stream.fileno(), piece, at) != size or zlib.crc32(piece) != crc:
                    raise CheckpointError(
                        f"{self.directory / name} is damaged: "
                        f"block {number} (bytes {at} to {at + size - 1}) is the first bad one. "
                        f"Load an older checkpoint"
                    )
                at += size
                yield piece
        if at != about["bytes"]:
            raise CheckpointError(
                f"{self.directory / name} is damaged: it has {about['bytes'] - at} bytes more than its checksums cover"
            )

    def _read_file(self, name: str, about: dict[str, Any], memory: memoryview) -> None:
        for _ in self._pieces(name, about, memory):
            pass


def read_newest(directory: str | os.PathLike[str], read: Callable[[Checkpoint], T]) -> T:
    """Calls `read` with the checkpoint in a directory, and returns its result.

    Where the file system has no locks and it was replaced meanwhile, it is read again; after `_MOST_TRIES` times
    `SupersededError` is raised.
    """
    for left in reversed(range(_MOST_TRIES)):
        try:
            with Checkpoint(directory) as found:
                return read(found)
        except SupersededError:
            if left == 0:
                raise
    raise AssertionError("unreachable")


def put_blocks(column: NDArray[Any], rows: NDArray[Any], blocks: NDArray[np.uint8]) -> None:
    """Writes blocks (n, bytes) to rows (n,) of a store's column."""
    column[rows] = blocks.reshape(-1).view(column.dtype).reshape(-1, *column.shape[1:])


def restore(
    store: _native.Store, records: NDArray[Any], next_sequence: int, steps: NDArray[np.uint32] | None = None
) -> None:
    """Sets the metadata of a new store's rows, all allocated and filled, from a row table."""
    columns = [np.ascontiguousarray(records[column]) for column in METADATA]
    store.restore(*columns, next_sequence, steps)  # type: ignore[call-arg, arg-type]


__all__ = ["Checkpoint", "put_blocks", "read_newest", "restore"]
