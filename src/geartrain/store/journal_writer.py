"""Journal writer: appends what the store committed and removed since the last pass, and compacts segments.

A pass compares the store with what the journal holds, so commits need not note anything. New rows are the end of the
store's order of commits. Removed rows are those whose generation has changed. A pass writes removals, then rows in the
order of their commits. It counts only after a flush. A pass that fails is undone, in the file too, and the next pass
starts at the same point.

Compaction removes the oldest segments. A segment can go once it holds no living row's newest record. If the files
exceed twice the bytes of living rows plus two segments, or are many, the writer appends the oldest segment's living
rows again. The next pass then removes that segment.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.schema import Field
from geartrain.store.checkpoint_format import ROW_RECORD
from geartrain.store.journal_directory import JournalContents, JournalDirectory, JournalExtent, Segment
from geartrain.store.journal_format import (
    BEGIN,
    GONE,
    GONE_RECORD,
    LARGEST,
    LARGEST_RECORD,
    PARTS,
    PRIORITIES,
    PRIORITY_RECORD,
    ROWS,
    STATE,
    STEPS,
    STEPS_RECORD,
    frame_parts,
)
from geartrain.store.saved_parts import COMMITTED, FREE, NOT_DONE, PART, ROW, WRITING, as_bytes, changed_parts, runs_of

SEGMENT_BYTES = 64 << 20
FRAME_BYTES = 8 << 20
#: Files that small segments, one for each start, may come to before they are compacted.
MOST_SMALL = 16
#: Segments compacted after one pass, at most.
_COMPACTED_A_PASS = 8
#: How often a pass looks at rows again that were being rewritten as it copied them, and the pause before each time.
_LOOKS = 5
_LOOK_PAUSE_S = 0.001

_REMOVALS = ("evicted", "expired", "exhausted", "deleted")


def _step_weights(max_length: int) -> NDArray[np.uint64]:
    """An odd number for each step, so that no change of a few priorities leaves the sum of all what it was."""
    drawn = np.random.default_rng(0x67656172).integers(0, 2**64, max_length, np.uint64)
    return np.asarray(drawn | np.uint64(1))


class JournalWriter:
    """Writes one store's journal. It holds the journal's lock until `close`. Use it from one thread."""

    def __init__(
        self,
        native: _native.Store,
        fields: dict[str, Field],
        max_length: int,
        directory: JournalDirectory,
        contents: JournalContents,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        frame_bytes: int = FRAME_BYTES,
    ) -> None:
        """Begins a segment of its own. Raises `OSError`."""
        self._native = native
        self._directory = directory
        self._disk = directory.disk
        self._segment_bytes, self._frame_bytes = segment_bytes, frame_bytes
        self._timed = any(not field.per_row for field in fields.values())
        self._numbers = list(range(len(fields)))
        about = native.describe()
        self._per_step = bool(about["step_priorities"])
        self._largest = 0  # priority that the journal says was given
        self._weights = _step_weights(max_length) if self._per_step else np.zeros(0, np.uint64)
        self._row_bytes = ROW_RECORD.itemsize + sum(field.block_nbytes(max_length) for field in fields.values())
        self._row_bytes += 4 * max_length if self._per_step else 0
        self._per_steps_frame = max(1, frame_bytes // (STEPS_RECORD.itemsize + 4 * max_length))
        self._per_frame = max(1, frame_bytes // self._row_bytes)
        self.segments_removed = 0
        self._store = {"store": int(about["store_id"]), "path": about["path"]}
        if contents.origin is not None:
            self._store["origin"] = contents.origin

        # What the journal holds of each row.
        self._generations = contents.records["generation"].copy()
        self._times = contents.records["inserted_at_ns"].copy()
        self._priorities = contents.records["priority"].copy()
        self._sampled = contents.records["times_sampled"].copy()
        self._steps = np.zeros(len(self._generations) if self._per_step else 0, np.uint64)  # sums; 0: not known
        self._segment_of = contents.segment_of
        self._segments = contents.segments
        self._dead: list[int] = []  # numbers of segments that have no living row, and are to be removed

        self._number = self._synced = contents.next_number
        self._sequence = contents.next_sequence
        self._next_sequence = contents.next_sequence
        self._undo: list[tuple[NDArray[np.uint32], list[NDArray[Any]]]] = []
        self._fd = -1
        self._extent: JournalExtent | None = None  # as the manifest has it
        self._end = self._synced_end = 0
        self._broken = False
        self._again = np.zeros(0, np.uint32)  # to be appended although nothing is new about them
        self._removals = -1
        self._rewrites = -1
        self._asked = -1  # how often priorities had been asked for at the last pass
        self._baseline: int | None = None  # rows committed before this writer, by the store's counters
        self._appended = self._appended_synced = self._missed = 0  # rows that are new
        self._totals = [0, 0, 0]  # rows, removals and pieces that are not flushed yet
        self._take_over(contents)
        self._living = self._count_living()
        self._began_at = self._position()
        self._begin_segment()

    # --- what the journal holds -----------------------------------------------------------------------------

    def _take_over(self, contents: JournalContents) -> None:
        """Takes over what `contents` has besides rows."""

    def _columns(self) -> list[NDArray[Any]]:
        """What is noted of each row, for a pass that is taken back."""
        held = [self._generations, self._times, self._segment_of, self._priorities, self._sampled]
        return [*held, self._steps] if self._per_step else held

    def _held(self) -> NDArray[np.bool_]:
        """The pieces that are living, one of them a row: of the shape of `_segment_of`."""
        return np.asarray(self._generations != 0)

    def _position(self) -> tuple[Any, ...]:
        """Where the next pass begins."""
        return self._sequence, self._rewrites

    def _go_back(self, position: tuple[Any, ...]) -> None:
        self._sequence, self._rewrites = position
        self._removals = -1

    def _count_living(self) -> dict[int, int]:
        """How many living pieces each segment has."""
        held = self._segment_of[self._held()]
        return {segment.number: int(np.count_nonzero(held == segment.number)) for segment in self._segments}

    # --- passes ---------------------------------------------------------------------------------------------

    def run_pass(self, ticket: int, *, priorities: bool = False) -> bool:
        """Appends and flushes all changes, then reports requests up to `ticket` as being on disk.

        With `priorities`, changed priorities are written as well, and the manifest says up to where frames are on disk.
        Returns False, and reports nothing, if rows were being rewritten at every attempt to read them. The next pass
        begins with these rows.

        Raises:
            OSError: the disk's; nothing of the pass counts.
        """
        began_ns = time.monotonic_ns()
        self._began_at = self._position()
        state = self._native.journal_state()
        asked = -1 if state is None else state["priorities"]
        priorities |= asked != self._asked
        try:
            self._mend()
            left = self._append_news(priorities)
            for _ in range(_LOOKS - 1):
                if left == 0:
                    break
                time.sleep(_LOOK_PAUSE_S)
                left = self._append_news(False)
            self._sync()
            self._note_extent(priorities)
            self._compact()
        except OSError:
            self._take_back()
            raise
        if left:
            return False
        self._asked = asked
        self._native.journal_passed(ticket, began_ns)
        return True

    def close(self) -> None:
        """Closes the file and drops the lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self._directory.unlock()

    def _append_news(self, priorities: bool) -> int:
        """Appends changes. Returns the number of new rows that could not be copied and must be tried again."""
        left = 0
        state = self._native.journal_state()
        # None: the store is being loaded, and gets its journal once all of the checkpoint is in it.
        rewrites = -2 if state is None else state["rewrites"]
        counters = self._native.counters()
        removals = sum(counters[name] for name in _REMOVALS)
        quiet = self._native.next_sequence() == self._sequence and removals == self._removals
        if not quiet or rewrites != self._rewrites or len(self._again):
            rows, generations, times, gone, next_sequence, inserted, still_open = self._native.journal_changes(
                self._sequence, self._generations, self._times, rewrites != self._rewrites
            )
            # A row that was left, and one behind it that was rewritten after it was appended: that one is here twice.
            once = np.sort(np.unique(rows, return_index=True)[1])
            rows, generations, times = rows[once], generations[once], times[once]
            new = generations != self._generations[rows]
            fresh = new | (times != self._times[rows])
            again = np.setdiff1d(self._again, rows)
            self._next_sequence = next_sequence
            if self._baseline is None:
                self._baseline = inserted - still_open - int(np.count_nonzero(new))
            self._append_gone(np.setdiff1d(gone, rows))
            replaced = np.intersect1d(gone, rows)
            before = self._generations[replaced]
            left = self._append_rows(rows[fresh], generations[fresh], times[fresh], new[fresh])
            # A new row stands for the removal of the one before it, but only where it could be copied.
            self._append_gone(replaced[self._generations[replaced] == before])
            again = again[self._generations[again] != 0]
            self._append_rows(again, self._generations[again], self._times[again], np.zeros(len(again), bool))
            self._again = np.zeros(0, np.uint32)
            if left == 0:
                self._sequence, self._removals, self._rewrites = next_sequence, removals, rewrites
                self._count_missed(inserted - still_open)
        if priorities:
            self._append_priorities()
            self._append_largest()
        return left

    def _append_gone(self, rows: NDArray[np.uint32]) -> None:
        if not len(rows):
            return
        table = np.zeros(len(rows), GONE_RECORD)
        table["row"], table["generation"] = rows, self._generations[rows]
        self._append(GONE, table)
        self._note_gone(rows)
        self._totals[1] += len(rows)

    def _note_gone(self, rows: NDArray[np.uint32]) -> None:
        self._note(rows, np.zeros(len(rows), np.uint32), self._times[rows], None)

    def _append_rows(
        self,
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        times: NDArray[np.uint64],
        new: NDArray[np.bool_],
    ) -> int:
        """Copies rows out of the store into frames; returns how many have to be looked at again."""
        left = 0
        for at in range(0, len(rows), self._per_frame):
            part = slice(at, at + self._per_frame)
            left += self._append_frame(rows[part], generations[part], times[part], new[part])
        return left

    def _append_frame(
        self,
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        times: NDArray[np.uint64],
        new: NDArray[np.bool_],
    ) -> int:
        infos = self._native.infos(rows)
        same = infos["generation"] == generations
        rows, generations, times, new = rows[same], generations[same], times[same], new[same]
        if not len(rows):
            return 0
        infos = {name: values[same] for name, values in infos.items()}
        lengths = infos["length"]
        steps = int(lengths.max()) if self._timed or self._per_step else 0
        ends = (lengths - 1).astype(np.int32) if self._timed else None
        arrays, torn, *_ = _native.fetch(self._native, rows, generations, self._numbers, steps, False, ends, 1, None)
        whole = torn == 0
        if self._per_step:
            values, there = self._native.copy_step_priorities(rows, generations, lengths)
            whole &= there != 0
        kept = np.flatnonzero(whole)
        # A row that was rewritten meanwhile has its generation still; others have gone.
        left = 0
        if not whole.all():
            left = int(np.count_nonzero(self._native.infos(rows[~whole])["generation"] == generations[~whole]))
        if not len(kept):
            return left
        table = np.zeros(len(kept), ROW_RECORD)
        for name in ("sequence", "version", "priority", "length", "times_sampled"):
            table[name] = infos[name][kept]
        table["row"], table["generation"], table["inserted_at_ns"] = rows[kept], generations[kept], times[kept]
        table["state"] = COMMITTED
        blocks = list(arrays) if whole.all() else [array[kept] for array in arrays]
        if self._per_step:
            padded = np.zeros((len(rows), steps), np.uint32)
            padded[np.arange(steps) < lengths[:, None]] = values
            blocks.append(padded[kept])
        self._append(ROWS, table, blocks, steps)
        self._note(rows[kept], generations[kept], times[kept], self._segments[-1])
        if self._per_step:
            self._steps[rows[kept]] = self._sums_of(values, lengths)[kept]
        self._priorities[rows[kept]], self._sampled[rows[kept]] = table["priority"], table["times_sampled"]
        self._appended += int(np.count_nonzero(new[kept]))
        self._totals[0] += len(kept)
        self._totals[2] += len(kept)
        return left

    def note_step_priorities(self) -> None:
        """Takes the steps' priorities of a store that was made from the journal for those that are in it."""
        for rows, _, values, lengths in self._step_priorities() if self._per_step else ():
            self._steps[rows] = self._sums_of(values, lengths)

    def mark(self, origin: str) -> None:
        """Says that all of a checkpoint is in the journal, in a segment that begins with that. Raises `OSError`."""
        self._store["origin"] = origin
        self._begin_segment()

    def _step_priorities(
        self,
    ) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]]:
        """Rows that the journal holds, generations, the priorities of their steps one after the other, lengths."""
        held = np.flatnonzero(self._generations).astype(np.uint32)
        for at in range(0, len(held), self._per_steps_frame):
            rows = held[at : at + self._per_steps_frame]
            generations, lengths = self._generations[rows], self._native.infos(rows)["length"]
            values, whole = self._native.copy_step_priorities(rows, generations, lengths)
            if not whole.all():  # gone, or another row by now
                there = whole != 0
                values = values[np.repeat(there, lengths)]
                rows, generations, lengths = rows[there], generations[there], lengths[there]
            yield rows, generations, values, lengths

    def _sums_of(self, values: NDArray[np.uint32], lengths: NDArray[np.uint32]) -> NDArray[np.uint64]:
        """A number of each row's priorities, which another one means that they have changed."""
        ends = np.cumsum(lengths, dtype=np.int64)
        places = np.arange(len(values)) - np.repeat(ends - lengths, lengths)
        total = np.zeros(len(values) + 1, np.uint64)
        np.cumsum((values.astype(np.uint64) + np.uint64(1)) * self._weights[places], out=total[1:])
        return np.asarray((total[ends] - total[ends - lengths]) | np.uint64(1))

    def _append_step_priorities(self) -> None:
        for rows, generations, values, lengths in self._step_priorities():
            sums = self._sums_of(values, lengths)
            changed = sums != self._steps[rows]
            if not changed.any():
                continue
            table = np.zeros(int(np.count_nonzero(changed)), STEPS_RECORD)
            table["row"], table["generation"], table["length"] = rows[changed], generations[changed], lengths[changed]
            self._append(STEPS, table, [values[np.repeat(changed, lengths)]])
            self._note_before(rows[changed])
            self._steps[rows[changed]] = sums[changed]

    def _append_priorities(self) -> None:
        if self._per_step:
            self._append_step_priorities()
        rows = np.flatnonzero(self._generations).astype(np.uint32)
        if not len(rows):
            return
        infos = self._native.infos(rows)
        changed = (infos["generation"] == self._generations[rows]) & self._has_priority(infos)
        changed &= (infos["priority"] != self._priorities[rows]) | (infos["times_sampled"] != self._sampled[rows])
        rows = rows[changed]
        if not len(rows):
            return
        table = np.zeros(len(rows), PRIORITY_RECORD)
        table["row"] = rows
        for name in ("generation", "priority", "times_sampled"):
            table[name] = infos[name][changed]
        self._append(PRIORITIES, table)
        self._note_before(rows)
        self._priorities[rows], self._sampled[rows] = table["priority"], table["times_sampled"]

    def _has_priority(self, infos: dict[str, NDArray[Any]]) -> NDArray[np.bool_]:
        """Whether rows have the priority that is to be restored."""
        return np.ones(len(infos["priority"]), bool)

    def _count_missed(self, committed: int) -> None:
        """Rows that were evicted before they were written: committed by the store's counters, and not appended."""
        assert self._baseline is not None
        missed = committed - self._baseline - self._appended
        if missed > self._missed:
            self._native.journal_count(0, 0, 0, missed - self._missed)
            self._missed = missed

    # --- frames and files -----------------------------------------------------------------------------------

    def _append(self, kind: int, table: NDArray[Any], arrays: Sequence[NDArray[Any]] = (), steps: int = 0) -> None:
        self._before_frame()
        self._write(kind, table.tobytes(), arrays, len(table), steps)

    def _before_frame(self) -> None:
        """Goes on in a new segment if this one is full. What is in the frame that follows was read before."""
        if self._end >= self._segment_bytes:
            self._sync()
            self._begin_segment()
        self._append_largest()

    def _append_largest(self) -> None:
        if (largest := self._native.max_priority) != self._largest:
            self._write(LARGEST, np.array([(largest, 0)], LARGEST_RECORD).tobytes(), count=1)
            self._largest = largest

    def _write(
        self, kind: int, table: bytes, arrays: Sequence[NDArray[Any]] = (), count: int = 0, steps: int = 0
    ) -> None:
        parts = frame_parts(
            kind,
            table,
            arrays,
            number=self._number,
            synced=self._synced,
            next_sequence=self._next_sequence,
            count=count,
            steps=steps,
        )
        self._disk.write(self._fd, parts, self._end)
        self._end += sum(part.nbytes for part in parts)
        self._number += 1

    def _begin_segment(self) -> None:
        """Begins the next segment file. If that fails, the last one is continued. All frames are on disk."""
        number = self._segments[-1].number + 1 if self._segments else 1
        path = self._directory.segment_path(number)
        before = (self._fd, self._end, self._number)
        largest = self._native.max_priority
        begin = {"journal": self._directory.id, "segment": number, **self._store, **self._begin_content()}
        begin["max_priority"] = largest
        self._fd, self._end = self._disk.create(path), 0
        try:
            self._write(BEGIN, json.dumps(begin).encode())
            self._disk.sync(self._fd)
            self._disk.sync_directory(self._directory.path)
        except OSError:
            os.close(self._fd)
            self._fd, self._end, self._number = before
            self._disk.remove(path)
            raise
        if before[0] >= 0:
            os.close(before[0])
        self._largest = largest
        self._segments.append(Segment(number, self._end))
        self._living[number] = 0
        self._synced, self._synced_end, self._largest_synced = self._number, self._end, largest

    def _begin_content(self) -> dict[str, Any]:
        """What a segment begins with besides its number, and the store's."""
        return {}

    def _note(
        self,
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        times: NDArray[np.uint64],
        segment: Segment | None,
    ) -> None:
        """Notes what the journal holds of rows now: in a segment, or nothing."""
        self._note_before(rows)
        self._count(self._segment_of[rows[self._generations[rows] != 0]], -1)
        self._generations[rows], self._times[rows] = generations, times
        if segment is not None:
            self._segment_of[rows] = segment.number
            self._living[segment.number] += len(rows)
            segment.rows += len(rows)

    def _note_before(self, rows: NDArray[np.uint32]) -> None:
        self._undo.append((rows, [column[rows] for column in self._columns()]))

    def _count(self, segments: NDArray[np.int64], by: int) -> None:
        """Counts pieces of segments as living, or as not living any more."""
        for number, count in zip(*np.unique(segments, return_counts=True), strict=True):
            self._living[int(number)] = self._living.get(int(number), 0) + by * int(count)

    def _sync(self) -> None:
        if self._end == self._synced_end:
            return
        self._disk.sync(self._fd)
        written = self._end - self._synced_end
        self._segments[-1].nbytes = self._synced_end = self._end
        self._synced = self._number
        self._largest_synced = self._largest
        self._undo.clear()
        self._appended_synced = self._appended
        rows, removals, _ = self._totals
        self._totals = [0, 0, 0]
        self._native.journal_count(rows, removals, written, 0)

    def _take_back(self) -> None:
        """After a failure: what is not on the disk for sure is not in the journal."""
        for rows, before in reversed(self._undo):
            for column, values in zip(self._columns(), before, strict=True):
                column[rows] = values
        self._living = self._count_living()
        self._segments[-1].rows -= self._totals[2]
        self._appended = self._appended_synced
        self._largest = self._largest_synced
        self._undo.clear()
        self._totals = [0, 0, 0]
        self._go_back(self._began_at)
        self._broken = True

    def _note_extent(self, frames: bool) -> None:
        """Notes in the manifest which segments there are and, with `frames`, up to where they are on disk."""
        segments = (self._segments[0].number, self._segments[-1].number)
        noted = self._extent
        if (
            noted is not None
            and (noted.oldest, noted.newest) == segments
            and not (frames and noted.synced < self._synced)
        ):
            return
        extent = JournalExtent(*segments, self._synced)
        self._directory.note_extent(extent)
        self._extent = extent

    def _mend(self) -> None:
        """Cuts off the rest of a failed pass. Raises `OSError`."""
        if not self._broken:
            return
        self._disk.truncate(self._fd, self._synced_end)
        self._end, self._number = self._synced_end, self._synced
        self._broken = False

    # --- compaction -----------------------------------------------------------------------------------------

    def _compact(self) -> None:
        """Compacts after a flushed pass: removes segments without living rows, and frees more segments."""
        self._remove_dead()
        for _ in range(_COMPACTED_A_PASS):
            if not self._too_large():
                return
            oldest = self._segments[0].number
            # Of rows that have several pieces, each row once.
            self._again = np.unique(np.nonzero((self._segment_of == oldest) & self._held())[0]).astype(np.uint32)
            self._append_news(False)
            self._sync()
            self._remove_dead()
            if self._segments[0].number == oldest:
                return  # some of it was being rewritten, and comes with the next pass

    def _too_large(self) -> bool:
        if len(self._segments) < 2:
            return False
        nbytes = sum(segment.nbytes for segment in self._segments)
        living = sum(
            segment.nbytes * self._living[segment.number] // segment.rows for segment in self._segments if segment.rows
        )
        many = MOST_SMALL + 4 * nbytes // self._segment_bytes
        return nbytes > 2 * living + 2 * self._segment_bytes or len(self._segments) > many

    def _remove_dead(self) -> None:
        while len(self._segments) > 1 and self._living[self._segments[0].number] == 0:
            gone = self._segments.pop(0)
            del self._living[gone.number]
            self._dead.append(gone.number)
        self._note_extent(False)
        while self._dead:
            self._disk.remove(self._directory.segment_path(self._dead[0]))
            self._disk.sync_directory(self._directory.path)  # one by one: no gap may be left
            self._dead.pop(0)
            self.segments_removed += 1


# --- stores with axes, strings or tasks -----------------------------------------------------------------------------


class PartsWriter(JournalWriter):
    """Writes the journal of a store with axes, strings or tasks.

    A part is what one task, or the insert, has for a row (saved_parts.py). The store numbers the changes of its parts.
    A pass asks for those since the last pass and writes what the journal lacks: rows in the order of their inserts, all
    parts of a row that changed together in one frame. A row that changes while it is copied is left out as a whole and
    comes with the next look.

    Nothing of a row is written before all rows that were inserted earlier are: after a power cut, whoever inserts rows
    continues behind the last one that is there.
    """

    def _take_over(self, contents: JournalContents) -> None:
        assert contents.parts is not None
        # What the journal holds of each part: the number of its last change, 0 where it has nothing.
        self._changes: NDArray[np.uint64] = contents.parts["change"].copy()
        self._state = self._state_synced = contents.state
        self._since = 0
        self._whole_synced = self._baseline = contents.next_sequence

    def _columns(self) -> list[NDArray[Any]]:
        return [*super()._columns(), self._changes]

    def _held(self) -> NDArray[np.bool_]:
        return np.asarray(self._changes != 0)

    def _position(self) -> tuple[Any, ...]:
        return (self._since,)

    def _go_back(self, position: tuple[Any, ...]) -> None:
        (self._since,) = position
        self._state, self._next_sequence = self._state_synced, self._whole_synced

    def _has_priority(self, infos: dict[str, NDArray[Any]]) -> NDArray[np.bool_]:
        # Rows that a batch has taken, or reads for the last time, have none.
        return np.asarray(infos["state"] == COMMITTED)

    def _begin_content(self) -> dict[str, Any]:
        return {} if self._state is None else {"state": self._state}

    def _sync(self) -> None:
        super()._sync()
        self._state_synced, self._whole_synced = self._state, self._next_sequence

    # --- passes ---------------------------------------------------------------------------------------------

    def _append_news(self, priorities: bool) -> int:
        # Read first: a state that is on the disk speaks of rows that are.
        counters = {name: count for name, count in self._native.counters().items() if name in _native.COUNTERS}
        state = {"tasks": self._native.task_state(), "counters": counters}
        whole = self._native.next_sequence()
        left = self._append_changed(whole)
        if left == 0:
            self._next_sequence = max(self._next_sequence, whole)
            if state != self._state:
                self._before_frame()
                self._write(STATE, json.dumps(state).encode())
                self._state = state
            self._count_missed(whole)
        if priorities:
            self._append_priorities()
            self._append_largest()
        return left

    def _append_changed(self, whole: int) -> int:
        """Appends what has changed of rows that were inserted before the sequence `whole`.

        Returns:
            How many rows could not be copied and must be looked at again.
        """
        again, self._again = self._again, np.zeros(0, np.uint32)
        since = 0 if len(again) else self._since
        following, rows, parts = changed_parts(self._native, since)
        there = (rows["state"] != FREE) & (rows["state"] != WRITING)
        held = self._generations[rows["row"]]
        self._append_gone(rows["row"][~there & (held != 0)])
        replaced = rows["row"][there & (held != 0) & (held != rows["generation"])]
        before = self._generations[replaced]
        rows = rows[there]
        if since == 0:
            parts = np.concatenate([parts, self._set_back(rows, parts)])
        rows, parts, of = self._news(rows, parts, again)
        left, unsaved, barrier = 0, following, whole
        for some_rows, some_parts, its in _frames(rows, parts, of, self._frame_bytes):
            new = self._generations[some_rows["row"]] != some_rows["generation"]
            data, kept = self._copied(some_rows, some_parts, its)
            if torn := some_rows["sequence"][~kept & new].tolist():
                barrier = min(barrier, *torn)
            kept &= ~new | (some_rows["sequence"] < barrier)
            skipped = ~kept[its] & (some_parts["change"] != 0)
            unsaved = min(unsaved, int(some_parts["change"][skipped].min(initial=unsaved)))
            left += int(np.count_nonzero(~kept & (~new | (some_rows["sequence"] < whole))))
            self._append_frame_of(some_rows[kept], some_parts, data, kept[its], new[kept])
        # A new row stands for the removal of the one before it, but only where it could be copied.
        self._append_gone(replaced[self._generations[replaced] == before])
        self._since = 0 if since == 0 and left else unsaved
        return left

    def _set_back(self, rows: NDArray[Any], parts: NDArray[Any]) -> NDArray[Any]:
        """Records of parts that the journal has and the store has not, as it does not tell them where all are asked."""
        gone = np.zeros(self._changes.shape, bool)
        same = rows["row"][self._generations[rows["row"]] == rows["generation"]]
        gone[same] = self._changes[same] != 0
        gone[parts["row"], parts["task"]] = False
        found = np.zeros(int(np.count_nonzero(gone)), PART)
        found["row"], found["task"] = np.nonzero(gone)
        found["generation"] = self._generations[found["row"]]
        return found

    def _news(
        self, rows: NDArray[Any], parts: NDArray[Any], again: NDArray[np.uint32]
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]:
        """Rows by their sequence, their parts that the journal lacks, and the place of each part's row among them."""
        of = np.searchsorted(rows["row"], parts["row"])
        same = (self._generations[rows["row"]] == rows["generation"])[of]
        place = (parts["row"], parts["task"])
        held = np.where(same, self._changes[place], 0)
        living = parts["state"] != NOT_DONE
        lacking = np.where(living, parts["change"] != held, held != 0)
        if len(again):
            oldest = self._segments[0].number
            lacking |= living & same & (self._segment_of[place] == oldest) & np.isin(parts["row"], again)
        parts, of = parts[lacking], of[lacking]
        order = np.argsort(rows["sequence"], kind="stable")
        order = order[np.isin(order, of)]
        ranks = np.zeros(len(rows), np.int64)
        ranks[order] = np.arange(len(order))
        by_row = np.argsort(ranks[of], kind="stable")
        return rows[order], parts[by_row], ranks[of[by_row]]

    def _copied(
        self, rows: NDArray[Any], parts: NDArray[Any], of: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
        """The bytes of parts, and of which rows they are whole."""
        has_bytes = parts["bytes"] != 0
        data, _, ok = self._native.copy_parts(as_bytes(parts[has_bytes]))
        whole = np.ones(len(rows), bool)
        whole[of[has_bytes][ok == 0]] = False
        return data, whole

    def _append_frame_of(
        self,
        rows: NDArray[Any],
        parts: NDArray[Any],
        data: NDArray[np.uint8],
        kept: NDArray[np.bool_],
        new: NDArray[np.bool_],
    ) -> None:
        """Appends rows with those of the parts that are kept. `new`: the journal has nothing of the row yet."""
        if not len(rows):
            return
        if not kept.all():
            data = data[np.repeat(kept, parts["bytes"].astype(np.int64))]
        parts = parts[kept]
        parts["span"] = 0  # nothing to who reads it
        self._before_frame()
        self._next_sequence = max(self._next_sequence, int(rows["sequence"][-1]) + 1)
        self._write(PARTS, rows.tobytes() + parts.tobytes(), [data], len(rows), len(parts))
        row, place = rows["row"], (parts["row"], parts["task"])
        self._note_before(row)
        self._drop(row[new])
        segment, living = self._segments[-1], parts["state"] != NOT_DONE
        self._count(self._segment_of[place][self._changes[place] != 0], -1)
        self._changes[place] = np.where(living, parts["change"], 0)
        self._segment_of[place] = np.where(living, segment.number, 0)
        self._generations[row], self._times[row] = rows["generation"], rows["inserted_at_ns"]
        self._priorities[row], self._sampled[row] = rows["priority"], rows["times_sampled"]
        pieces = int(np.count_nonzero(living))
        self._living[segment.number] += pieces
        segment.rows += pieces
        self._totals[0] += len(rows)
        self._totals[2] += pieces
        assert self._baseline is not None
        self._appended += int(np.count_nonzero(rows["sequence"][new] >= self._baseline))

    def _note_gone(self, rows: NDArray[np.uint32]) -> None:
        self._note_before(rows)
        self._drop(rows)

    def _drop(self, rows: NDArray[np.uint32]) -> None:
        """Notes that the journal has nothing of rows any more."""
        self._count(self._segment_of[rows][self._changes[rows] != 0], -1)
        self._generations[rows] = 0
        self._changes[rows] = self._segment_of[rows] = 0


def _frames(
    rows: NDArray[Any], parts: NDArray[Any], of: NDArray[np.int64], frame_bytes: int
) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[np.int64]]]:
    """Rows and their parts, as many at a time as a frame has, one row at least."""
    nbytes = np.full(len(rows), ROW.itemsize, np.int64)
    np.add.at(nbytes, of, parts["bytes"].astype(np.int64) + PART.itemsize)
    for run, _ in runs_of(np.cumsum(nbytes), frame_bytes):
        mine = slice(*np.searchsorted(of, (run.start, run.stop)))
        yield rows[run], parts[mine], of[mine] - run.start


__all__ = ["FRAME_BYTES", "SEGMENT_BYTES", "JournalWriter", "PartsWriter"]
