"""Directory of a journal: its manifest, segment files and lock, and the contents that a reader finds in them.

A process must hold the lock of `journal.lock` to write a journal or to restore from it. The kernel drops the lock when
the process dies. `contents` combines all frames into one result. A power cut can leave an incomplete frame at the end
of the last segment. The next writer cuts it off before it appends anything. The manifest says which segments and frames
are on the disk (`JournalExtent`), so what is missing of them is damage.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
import geartrain.core.locks as locks
from geartrain.core.arguments import shown
from geartrain.core.json_values import entry, read_object, whole_entry
from geartrain.core.schema import Field
from geartrain.core.shared_files import listed, naming_errors
from geartrain.core.tasks import RowPlan, plan_difference
from geartrain.errors import JournalError
from geartrain.store.checkpoint_format import (
    ROW_RECORD,
    json_checksum,
    make_directory,
    put_json,
    read_into,
    sync_directory,
)
from geartrain.store.checkpoint_manifest import (
    check_stored_options,
    check_stored_plan,
    check_stored_schema,
    check_task_state,
    schema_of_manifest,
)
from geartrain.store.journal_format import (
    BEGIN,
    FORMAT,
    GONE,
    LARGEST,
    PARTS,
    PRIORITIES,
    ROWS,
    STATE,
    STEPS,
    VERSION,
    Frame,
    begin_of,
    first_number,
    frames,
    state_of,
    synced_later,
)
from geartrain.store.saved_parts import DONE, FREE, NOT_DONE, PART, ROW, TAKEN_BY, runs_of
from geartrain.store.segment import plan_of_segment, schema_of_segment, stored_schema_of

MANIFEST = "journal.json"
LOCK = "journal.lock"
#: While a store is filled from a journal or its checkpoint: the store's id.
FILLING = "journal.filling"
#: What a store must have to take a journal's rows into their places.
_SAME = ("capacity", "priority_fraction_bits", "priority_per", "new_priority")
_MOST_SEQUENCES = 2**63
#: Bytes of parts that are read at once, unless one has more.
_READ_BYTES = 32 << 20
_REMEDY = "Put the file back from a copy, or load a checkpoint with Store.load, and give it a new directory as journal="
_log = logging.getLogger(__name__)


class Disk:
    """The file system as a journal's writer uses it: what a test records, or lets fail."""

    def create(self, path: Path) -> int:
        """A descriptor of a new file."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, fd: int, parts: Sequence[memoryview], offset: int) -> None:
        """Writes parts one after the other."""
        left = [part for part in parts if part.nbytes]
        while left:
            written = os.pwritev(fd, left[:64], offset)
            offset += written
            while left and written >= left[0].nbytes:
                written -= left.pop(0).nbytes
            if written:
                left[0] = left[0][written:]

    def sync(self, fd: int) -> None:
        """Flushes a file to disk."""
        os.fdatasync(fd)

    def truncate(self, fd: int, size: int) -> None:
        """Cuts a file, on the disk as well."""
        os.ftruncate(fd, size)
        os.fsync(fd)

    def remove(self, path: Path) -> None:
        """Removes a file."""
        path.unlink(missing_ok=True)

    def sync_directory(self, path: Path) -> None:
        """Flushes the names in a directory to disk."""
        sync_directory(path)

    def put_manifest(self, path: Path, content: dict[str, Any]) -> None:
        """Replaces a journal's manifest at once, on the disk as well."""
        put_json(path, content, path.with_name(f".{path.name}"))


#: Of a frame's rows, and of rows whose steps have other priorities.
_Readers = tuple[
    Callable[[NDArray[Any], Frame], None] | None,
    Callable[[NDArray[Any], NDArray[Any], NDArray[np.uint32]], None] | None,
]


@dataclass
class Segment:
    """One segment file: its number, bytes, and how many rows' records are in it."""

    number: int
    nbytes: int = 0
    rows: int = 0


@dataclass(frozen=True)
class JournalExtent:
    """What the manifest says is on the disk; there may be more.

    Attributes:
        oldest, newest: numbers of the first and the last segment file.
        synced: number of the first frame that may be missing.
    """

    oldest: int
    newest: int
    synced: int


@dataclass
class JournalContents:
    """Contents of a journal: the combined result of all its frames.

    Attributes:
        records: (capacity,) the newest ROW_RECORD of each row, with parts a ROW; `generation` is 0 if the row is free.
        highest: (capacity,) uint32, the highest recorded generation of each row.
        segment_of: (capacity,) int64, the segment that holds each row; of parts (capacity, tasks + 1).
        parts: (capacity, tasks + 1) the newest PART record of each task of a row; None in a store without parts.
        places: where the bytes of each part begin in the file of its segment.
        state: the last state of the tasks; None before the first.
        segments: the segment files, oldest first.
        next_number, next_sequence: number of the next frame, and sequence of the store's next row.
        store, store_path: the last journaled store, and its segment; None for an empty journal.
        origin: the checkpoint that the first store was loaded from, once the journal has all of it.
        max_priority: the largest priority ever given in the store, fixed point; 0 for none.
        cut_bytes: bytes of incomplete frames at the end.
    """

    records: NDArray[Any]
    highest: NDArray[np.uint32]
    segment_of: NDArray[np.int64]
    parts: NDArray[Any] | None = None
    places: NDArray[np.int64] | None = None
    state: dict[str, Any] | None = None
    segments: list[Segment] = field(default_factory=list)
    next_number: int = 1
    next_sequence: int = 1
    store: int | None = None
    store_path: str | None = None
    origin: str | None = None
    max_priority: int = 0
    cut_bytes: int = 0

    @property
    def rows(self) -> int:
        """Rows it holds."""
        return int(np.count_nonzero(self.records["generation"]))

    def table(self) -> NDArray[Any]:
        """All rows as a new store takes them: those that are there by their sequence, then free ones.

        `next_sequence` is behind all of them.
        """
        living = self.records["generation"] != 0
        rows, free = self.records[living], self.records[~living]
        free["generation"] = (self.highest[~living] + 1) & ~np.uint32(1)  # one on from a key that was recorded
        free["state"] = FREE
        rows = rows[np.argsort(rows["sequence"], kind="stable")]
        if len(rows):
            self.next_sequence = max(self.next_sequence, int(rows["sequence"][-1]) + 1)
        return np.concatenate([rows, free])


class JournalDirectory:
    """A journal's directory; `lock` before anything is written to it, or cut off."""

    def __init__(self, path: str | os.PathLike[str], disk: Disk | None = None) -> None:
        """Opens a journal. Raises `JournalError` where there is none, or its manifest is damaged."""
        self.path = Path(path)
        self.disk = disk or Disk()
        self._lock_fd = -1
        manifest = _read_manifest(self.path)
        self.id = str(manifest["id"])
        #: Schema of the store; its plan is None if it has neither axes nor tasks.
        self.fields, self.max_length, self.plan = schema_of_manifest(manifest)
        self.options: dict[str, Any] = manifest["options"]
        self.capacity = int(self.options["capacity"])
        self.per_step = self.options["priority_per"] == "step"
        #: The checkpoint whose rows are, or were to be, the first here.
        self.origin: str | None = manifest.get("origin")
        #: Later checkpoints, of stores that were journaled here, with which it was restored.
        self.later: list[str] = [str(each) for each in manifest.get("later", [])]
        #: The fields as the manifest has them.
        self.stored_fields: list[dict[str, Any]] = manifest["fields"]
        self._manifest = manifest

    # --- the lock -------------------------------------------------------------------------------------------

    def lock(self) -> bool:
        """Takes the journal's lock; False where another process has it. Raises `OSError`."""
        if self._lock_fd >= 0:
            return True
        _locked.add(self)
        self._lock_fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        taken = False
        try:
            taken = locks.take(self._lock_fd, locks.EXCLUSIVE, 0)
            if taken:  # the process that had it may have noted something
                self._manifest = _read_manifest(self.path)
        except BaseException:
            taken = False
            raise
        finally:
            if not taken:
                self.unlock()
        return taken

    def unlock(self) -> None:
        """Drops the lock."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)

    def note_later(self, checkpoint: str) -> None:
        """Notes a checkpoint as one whose rows the journal has. The caller holds the lock. Raises `OSError`."""
        self.later.append(checkpoint)
        self._note(later=self.later)

    def note_span_bytes(self, options: dict[str, Any]) -> None:
        """Notes that a store with more `span_bytes` is journaled from here on. As `note_later`."""
        if options.get("span_bytes", 0) > self.options.get("span_bytes", 0):
            self.options["span_bytes"] = options["span_bytes"]
            self._note(options={**self._manifest["options"], "span_bytes": options["span_bytes"]})

    def note_extent(self, extent: JournalExtent | None) -> None:
        """Notes what is on the disk, before a segment is removed and after one was added. As `note_later`."""
        self._note(extent=None if extent is None else asdict(extent))

    def _note(self, **entries: Any) -> None:
        manifest = {**self._manifest, **entries}
        self.disk.put_manifest(self.path / MANIFEST, manifest)
        self._manifest = manifest

    @contextmanager
    def filling(self, store: int) -> Iterator[None]:
        """Says which store is being filled, so that one that a killed process leaves half filled is known."""
        note = self.path / FILLING
        try:
            note.write_text(str(store))
            yield
        finally:
            note.unlink(missing_ok=True)

    # --- reading --------------------------------------------------------------------------------------------

    def check_matches(
        self, fields: dict[str, Field], max_length: int, options: dict[str, Any], plan: RowPlan | None = None
    ) -> None:
        """Raises `JournalError` where a store of these cannot take the journal's rows."""
        if fields != self.fields or max_length != self.max_length:
            raise JournalError(
                f"{self.path} is the journal of a store of {self.fields} with max_length={self.max_length}, but "
                f"{fields} with max_length={max_length} was given: use the same, or another directory"
            )
        if plan is not None and self.plan is not None and (difference := plan_difference(plan, self.plan)):
            raise JournalError(
                f"{self.path} is the journal of a store with other tasks: {difference}. Use the same, or another "
                "directory"
            )
        for name in _SAME:
            if options[name] != self.options[name]:
                raise JournalError(
                    f"{self.path} is the journal of a store with {name}={self.options[name]!r}, but "
                    f"{options[name]!r} was given: use the same, because rows return as they were, or another directory"
                )
        if options.get("span_bytes", 0) < (least := self.options.get("span_bytes", 0)):
            raise JournalError(
                f"{self.path} is the journal of a store with span_bytes={least}, but {options['span_bytes']} was "
                "given: use at least as many, because its rows return into them"
            )

    def segment_path(self, number: int) -> Path:
        """The file of a segment."""
        return self.path / f"segment-{number:08d}.bin"

    def clear(self) -> None:
        """Removes all segments, oldest first; the lock is held. Raises `OSError`."""
        self.note_extent(None)
        for number in self.numbers():
            self.disk.remove(self.segment_path(number))
            self.disk.sync_directory(self.path)

    def numbers(self) -> list[int]:
        """The numbers of the segment files there are.

        Raises:
            JournalError: one between them is missing, or the directory cannot be read.
        """
        found = []
        with naming_errors("cannot read the journal", self.path, JournalError):
            paths = listed(self.path, "segment-*.bin")
        for path in paths:
            digits = path.name.removeprefix("segment-").removesuffix(".bin")
            if digits.isdigit():
                found.append(int(digits))
        found.sort()
        for before, after in itertools.pairwise(found):
            if after != before + 1:
                raise JournalError(
                    f"{self.segment_path(before + 1)} is missing, although segments {before} and {after} exist. "
                    f"{_REMEDY}"
                )
        return found

    def contents(
        self,
        *,
        verify: bool = True,
        on_rows: Callable[[NDArray[Any], Frame], None] | None = None,
        on_steps: Callable[[NDArray[Any], NDArray[Any], NDArray[np.uint32]], None] | None = None,
        repair: bool = False,
    ) -> JournalContents:
        """The combined result of all frames, each of which is checked.

        Args:
            verify: compare the checksums of rows' blocks in all segments, and not in the last alone.
            on_rows: called with each frame of rows, its blocks included.
            on_steps: called with rows (n,), their lengths, and new priorities of their steps, one row after the other;
                not without `on_rows`.
            repair: cut off what is not whole at the end, and flush the rest to disk; the lock is held.

        Raises:
            JournalError: damage; names the file and the place.
        """
        try:
            shape = (self.capacity,) if self.plan is None else (self.capacity, len(self.plan.tasks) + 1)
            found = JournalContents(
                np.zeros(self.capacity, ROW_RECORD if self.plan is None else ROW),
                np.zeros(self.capacity, np.uint32),
                np.zeros(shape, np.int64),
            )
            if self.plan is not None:
                found.parts, found.places = np.zeros(shape, PART), np.zeros(shape, np.int64)
            found.records["row"] = np.arange(self.capacity)
        except MemoryError:
            raise JournalError(
                f"{self.path} has a capacity of {self.capacity:,} rows, which does not fit into memory"
            ) from None
        numbers, synced = self._numbers_there()
        for number in numbers:
            self._read_segment(
                found, number, synced if number == numbers[-1] else None, verify, (on_rows, on_steps), repair
            )
        return found

    def _numbers_there(self) -> tuple[list[int], int]:
        """The numbers of the segment files, and that of the first frame that may be missing.

        The journal's writer may add and remove segments meanwhile. It notes the end of the journal after it has added
        one, and the beginning before it removes one.

        Raises:
            JournalError: a file is missing at the beginning or at the end.
        """
        before = _extent_of(_read_manifest(self.path))
        numbers = self.numbers()
        after = _extent_of(_read_manifest(self.path))
        if before is None or after is None:
            return numbers, 0
        missing = None
        if not numbers or numbers[-1] < before.newest:
            missing = before.newest
        elif numbers[0] > after.oldest:
            missing = after.oldest
        if missing is not None:
            raise JournalError(
                f"{self.segment_path(missing)} is missing: segments {after.oldest} to {before.newest} of the journal "
                f"were on the disk. {_REMEDY}"
            )
        return numbers, before.synced

    def _read_segment(
        self,
        found: JournalContents,
        number: int,
        synced: int | None,
        verify: bool,
        on: _Readers,
        repair: bool,
    ) -> None:
        with naming_errors("cannot read the journal's file", self.segment_path(number), JournalError):
            self._read_named_segment(found, number, synced, verify, on, repair)

    def _read_named_segment(
        self,
        found: JournalContents,
        number: int,
        synced: int | None,
        verify: bool,
        on: _Readers,
        repair: bool,
    ) -> None:
        """Reads a segment file; `synced` of the last one: all frames with lower numbers were on the disk."""
        path = self.segment_path(number)
        segment = Segment(number)
        # Its writer may have removed it meanwhile.
        fd = os.open(path, (os.O_RDWR if repair else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            size = os.fstat(fd).st_size
            first = found.next_number if found.segments else None
            for frame in frames(fd, blocks=on[0] is not None, verify=verify or synced is not None, first=first):
                if (frame.offset == 0) != (frame.kind == BEGIN):
                    raise JournalError(f"{path} is damaged at byte {frame.offset}: a frame is out of order")
                self._apply(found, frame, path, number, on)
                segment.nbytes = frame.offset + frame.nbytes
                segment.rows += frame.count if frame.kind == ROWS else 0
                segment.rows += int(np.count_nonzero(frame.parts()["state"])) if frame.kind == PARTS else 0
                found.next_number = frame.number + 1
                found.next_sequence = max(found.next_sequence, frame.next_sequence)
            if segment.nbytes < size or synced is not None:
                self._check_end(found, segment, fd, first, synced)
            if segment.nbytes < size:
                found.cut_bytes = size - segment.nbytes
                if repair:
                    _log.warning(
                        "%s ends with %d bytes of an unfinished write, from byte %d on. They are dropped. A crash "
                        "leaves such an end, but damage to the last write looks the same",
                        path,
                        found.cut_bytes,
                        segment.nbytes,
                    )
            if repair and synced is not None and segment.nbytes:
                # Also where nothing is cut off: a killed writer's last frames may be in memory alone.
                self.disk.truncate(fd, segment.nbytes)
        finally:
            os.close(fd)
        if segment.nbytes:
            found.segments.append(segment)
        elif repair:  # its first frame was being written
            self.disk.remove(path)
            self.disk.sync_directory(self.path)

    def _check_end(
        self, found: JournalContents, segment: Segment, fd: int, first: int | None, synced: int | None
    ) -> None:
        """Raises `JournalError` if frames are missing that were on the disk. Arguments as of `_read_named_segment`."""
        if first is not None and not segment.nbytes and (begins := first_number(fd)) > first:
            before = found.segments[-1]
            raise JournalError(
                f"{self.segment_path(before.number)} is damaged at byte {before.nbytes}: it ends with frame "
                f"{first - 1}, but the next file begins with frame {begins}. {_REMEDY}"
            )
        if synced is None or max(synced, synced_later(fd, segment.nbytes)) > found.next_number:
            raise JournalError(
                f"{self.segment_path(segment.number)} is damaged at byte {segment.nbytes}: a frame that was on the "
                f"disk is broken or missing there. {_REMEDY}"
            )

    def _apply(
        self,
        found: JournalContents,
        frame: Frame,
        path: Path,
        number: int,
        on: _Readers,
    ) -> None:
        on_rows, on_steps = on
        damaged = f"{path} is damaged at byte {frame.offset}"
        if max(frame.number, frame.synced, frame.next_sequence) >= _MOST_SEQUENCES:
            raise JournalError(f"{damaged}: its number, or the next sequence number of the store, is out of range")
        if frame.kind == BEGIN:
            begin = begin_of(frame, path)
            if begin["journal"] != self.id or begin["segment"] != number:
                raise JournalError(f"{path} is not segment {number} of this journal")
            found.store, found.store_path, found.origin = begin["store"], begin["path"], begin["origin"]
            found.max_priority = begin["max_priority"]
            found.state = self._checked_state(begin["state"], path, frame) or found.state
            return
        if frame.kind in ((PARTS, STATE) if self.plan is None else (ROWS, STEPS)):
            raise JournalError(f"{damaged}: a frame is of another kind of store")
        if frame.kind == STATE:
            found.state = self._checked_state(state_of(frame, path), path, frame)
            return
        records = frame.records()
        if frame.kind == LARGEST:
            found.max_priority = int(records["priority"].max(initial=0))
            return
        rows = records["row"]
        if len(rows) and int(rows.max()) >= self.capacity:
            raise JournalError(f"{damaged}: it has a row that is outside of the store")
        if frame.kind == PARTS:
            self._apply_parts(found, frame, damaged, number)
            return
        steps = max(frame.steps, int(records["length"].max(initial=0))) if frame.kind in (ROWS, STEPS) else 0
        if steps > self.max_length:
            raise JournalError(f"{damaged}: a row has more steps than max_length")
        if frame.kind == ROWS and int(records["sequence"].max(initial=0)) >= _MOST_SEQUENCES:
            raise JournalError(f"{damaged}: the sequence number of a row is out of range")
        if frame.kind == ROWS:
            found.records[rows] = records
            found.segment_of[rows] = number
            found.highest[rows] = np.maximum(found.highest[rows], records["generation"])
            if on_rows is not None:
                on_rows(records, frame)
            return
        known = found.records["generation"][rows] == records["generation"]
        if frame.kind == STEPS:
            known &= found.records["length"][rows] == records["length"]
            if frame.blocks is not None and on_steps is not None:
                lengths = records["length"].astype(np.int64)
                if len(frame.blocks) != 4 * lengths.sum():
                    raise JournalError(f"{damaged}: steps without a priority")
                values = np.frombuffer(frame.blocks, "<u4")
                on_steps(rows[known], lengths[known], values[np.repeat(known, lengths)])
            return
        rows, records = rows[known], records[known]
        if frame.kind == GONE:
            found.records["generation"][rows] = 0
            if found.parts is not None:
                found.parts[rows] = 0
                found.segment_of[rows] = 0
        elif frame.kind == PRIORITIES:
            found.records["priority"][rows] = records["priority"]
            found.records["times_sampled"][rows] = records["times_sampled"]

    def _checked_state(self, state: dict[str, Any] | None, path: Path, frame: Frame) -> dict[str, Any] | None:
        try:
            if state is not None:
                check_task_state(state["tasks"], 0 if self.plan is None else len(self.plan.tasks))
        except ValueError as error:
            raise JournalError(f"{path} is damaged at byte {frame.offset}: {error}") from None
        return state

    def _apply_parts(self, found: JournalContents, frame: Frame, damaged: str, number: int) -> None:
        """Takes over a frame of parts, once everything in it that is followed later is within its bounds."""
        assert self.plan is not None
        assert found.parts is not None
        assert found.places is not None
        rows, parts = frame.records(), frame.parts()
        order = np.argsort(rows["row"], kind="stable")
        at = order[np.minimum(np.searchsorted(rows["row"], parts["row"], sorter=order), len(rows) - 1)]
        tasks = len(self.plan.tasks)
        nbytes = parts["bytes"]
        wrong = {
            "a row is there twice": len(np.unique(rows["row"])) != len(rows),
            "the sequence number of a row is out of range": int(rows["sequence"].max(initial=0)) >= _MOST_SEQUENCES,
            "the generation of a row is none of a key": bool(np.any(rows["generation"] & 1 == 0)),
            "a part is of a row that is not there": len(parts) > 0
            and (
                len(rows) == 0
                or bool(np.any((rows["row"][at] != parts["row"]) | (rows["generation"][at] != parts["generation"])))
            ),
            "a part is of no task, or in no state": int(parts["task"].max(initial=0)) > tasks
            or not np.isin(parts["state"], (NOT_DONE, DONE, TAKEN_BY)).all(),
            "a part is there twice": len(np.unique(parts[["row", "task"]])) != len(parts),
            "the change number of a part is out of range": int(parts["change"].max(initial=0)) >= _MOST_SEQUENCES,
            "its parts have other lengths": int(nbytes.max(initial=0)) > frame.block_bytes
            or int(nbytes.sum()) != frame.block_bytes
            or bool(np.any(nbytes[parts["state"] != DONE])),
        }
        for what, is_so in wrong.items():
            if is_so:
                raise JournalError(f"{damaged}: {what}")
        row = rows["row"]
        others = row[found.records["generation"][row] != rows["generation"]]
        found.parts[others] = 0
        found.segment_of[others] = 0
        found.records[row] = rows
        found.highest[row] = np.maximum(found.highest[row], rows["generation"])
        place = (parts["row"], parts["task"])
        found.parts[place] = parts
        found.places[place] = frame.blocks_at + np.cumsum(nbytes, dtype=np.int64) - nbytes.astype(np.int64)
        done = parts["state"] != NOT_DONE
        found.segment_of[place] = np.where(done, number, 0)
        gone = (parts["row"][~done], parts["task"][~done])
        found.parts[gone] = 0

    def read_parts(
        self, contents: JournalContents
    ) -> Iterator[tuple[NDArray[Any], NDArray[np.uint8], NDArray[np.uint64]]]:
        """The newest parts of all rows, some at a time: PART records (n,), their bytes, and offsets (n + 1,) in these.

        Raises:
            JournalError: a file cannot be read, or was cut meanwhile.
        """
        assert contents.parts is not None
        assert contents.places is not None
        for segment in contents.segments:
            path = self.segment_path(segment.number)
            here = np.nonzero(contents.segment_of == segment.number)
            order = np.argsort(contents.places[here], kind="stable")
            parts, places = contents.parts[here][order], contents.places[here][order]
            ends = np.cumsum(parts["bytes"], dtype=np.int64)
            with naming_errors("cannot read the journal's file", path, JournalError):
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    for some, before in runs_of(ends, _READ_BYTES):
                        offsets = np.concatenate([[0], ends[some] - before]).astype(np.uint64)
                        data = np.empty(int(offsets[-1]), np.uint8)
                        _read_pieces(fd, path, data, places[some], parts["bytes"][some].astype(np.int64))
                        yield parts[some], data, offsets
                finally:
                    os.close(fd)


def _read_pieces(
    fd: int, path: Path, data: NDArray[np.uint8], places: NDArray[np.int64], nbytes: NDArray[np.int64]
) -> None:
    """Reads pieces of a file one behind the other; those that touch in the file are read together."""
    if not len(data):
        return
    places, nbytes = places[nbytes > 0], nbytes[nbytes > 0]
    starts = np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1] + nbytes[:-1]]))
    to = 0
    for begin, end in itertools.pairwise([*starts.tolist(), len(places)]):
        size = int(nbytes[begin:end].sum())
        if read_into(fd, memoryview(data[to : to + size].data), int(places[begin])) != size:
            raise JournalError(f"{path} was cut while it was read")
        to += size


def make_journal(
    path: Path, native: _native.Store, options: dict[str, Any], disk: Disk | None = None, origin: str | None = None
) -> JournalDirectory:
    """A store's journal in a directory, which is made where there is none: to begin with a checkpoint `origin`, if any.

    Raises:
        JournalError: the directory holds other files, or the journal is one of another schema.
    """
    make_directory(path)
    if not (path / MANIFEST).exists():
        foreign = {entry.name for entry in path.iterdir()} - {LOCK, f".{MANIFEST}"}
        if any(name.startswith("segment-") for name in foreign):
            raise JournalError(f"{path / MANIFEST} is missing, although the journal's segments are there. {_REMEDY}")
        if "manifest.json" in foreign:
            raise JournalError(f"{path} is a checkpoint: Store.load restores it, also with a new directory as journal=")
        if foreign:
            raise JournalError(
                f"{path} has files that are not of a journal ({', '.join(sorted(foreign)[:3])}): choose another "
                "directory"
            )
        put_json(
            path / MANIFEST,
            {
                "format": FORMAT,
                "version": VERSION,
                "id": secrets.token_hex(16),
                **stored_schema_of(native),
                "options": options,
                **({} if origin is None else {"origin": origin}),
            },
            path / f".{MANIFEST}",
        )
    journal = JournalDirectory(path, disk)
    journal.check_matches(*schema_of_segment(native), options, plan_of_segment(native))
    return journal


def is_journal_of(path: Path, native: _native.Store) -> bool:
    """Whether a store has its rows from, or in, the journal of a directory."""
    state = native.journal_state()
    if state is not None and Path(os.fsdecode(state["path"])) == path:
        return True
    try:
        return (path / FILLING).read_text() == str(native.describe()["store_id"])
    except (OSError, ValueError):
        return False


def is_journal(path: Path) -> bool:
    """Whether a directory holds a journal."""
    return (path / MANIFEST).is_file()


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        manifest = read_object(path)
        checksum = manifest.pop("checksum", None)
        if manifest.get("format") != FORMAT:
            raise JournalError(f"{path} is not the manifest of a geartrain journal")
        version = manifest.get("version")
        if version != VERSION:
            raise JournalError(
                f"{directory} has journal version {shown(version)}, but this build reads version {VERSION}"
            )
        if checksum != json_checksum(manifest):
            raise JournalError(f"{path} is damaged: its checksum does not match")
        entry(manifest, "id", str)
        fields = check_stored_schema(manifest)
        check_stored_options(manifest)
        if "places" in manifest:
            check_stored_plan(manifest, len(fields))
        entry({"origin": "", **manifest}, "origin", str)
        if not all(isinstance(each, str) for each in entry({"later": [], **manifest}, "later", list)):
            raise ValueError("later has an entry that is no text")
        _extent_of(manifest)
        return manifest
    except (FileNotFoundError, NotADirectoryError) as error:
        raise JournalError(f"{directory} is not a journal: {error.strerror}") from None
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise JournalError(f"{path} is damaged: {error}") from None


def _extent_of(manifest: dict[str, Any]) -> JournalExtent | None:
    """What a manifest says is on the disk; None before the first pass. Raises `ValueError`."""
    if manifest.get("extent") is None:
        return None
    extent = entry(manifest, "extent", dict)
    names = ("oldest", "newest", "synced")
    return JournalExtent(*(whole_entry(extent, name, 1, _MOST_SEQUENCES) for name in names))


_locked: weakref.WeakSet[JournalDirectory] = weakref.WeakSet()


def _after_fork() -> None:
    for directory in list(_locked):
        directory.unlock()  # a forked child's copy, which would keep the lock from others when the parent dies


os.register_at_fork(after_in_child=_after_fork)

__all__ = [
    "Disk",
    "JournalExtent",
    "JournalContents",
    "JournalDirectory",
    "Segment",
    "is_journal",
    "is_journal_of",
    "make_journal",
]
