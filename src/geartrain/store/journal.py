"""Journal of a store: writes committed rows and removals to disk within a time bound, and restores the store.

One process at a time writes the journal: the one that holds the lock of the journal's directory. Every process that has
the store open runs a thread that tries to get the lock every `CHECK_S`. If the holder dies, the kernel drops the lock.
The next holder reads the journal and continues it (docs/decisions/checkpoints-and-journals.md).

Commits enforce the bound. If earlier commits have been missing on disk for longer than the bound, new commits wait
(native/store/journal.cc).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import geartrain._native as _native
from geartrain.core.arguments import check_path
from geartrain.core.schema import Field
from geartrain.core.shared_files import naming_errors
from geartrain.core.threads import DaemonThread, ReentrantEvent
from geartrain.errors import GeartrainError, JournalError, StoreClosedError
from geartrain.store.checkpoint_reader import Checkpoint, restore
from geartrain.store.journal_directory import (
    Disk,
    JournalContents,
    JournalDirectory,
    is_journal,
    is_journal_of,
    make_journal,
)
from geartrain.store.journal_format import Frame, block_shapes
from geartrain.store.journal_writer import JournalWriter, PartsWriter
from geartrain.store.saved_parts import load_rows
from geartrain.store.segment import JournalFull

CHECK_S = 0.25
#: How often priorities and counts of samples that have changed are written.
PRIORITIES_EVERY_S = 60.0
#: Longest pause between two passes, where the bound is longer.
_MOST_PAUSE_S = 5.0
#: Pause after a pass that found rows being rewritten.
_LEFT_PAUSE_S = 0.01
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JournalStatus:
    """Figures of a store's journal, over all processes. `Store.journal` returns them.

    Attributes:
        path: directory of the journal.
        sync_s: bound in seconds between a commit and its flush; 0 flushes before a commit returns.
        full: what a commit does if the disk is full: "wait" or "error".
        rows: rows written since the store was created. Rows that were rewritten or compacted count again.
        removals: removals written since the store was created.
        bytes_written: bytes since the store was created.
        missed: rows that were evicted before they were written.
        waits: commits that waited for the disk.
        age_s: everything committed at least this long ago, in seconds, is on the disk; None before the first pass.
        error: why the last pass failed; None if it did not.
        is_writer: whether this process writes the journal.

    Examples:
        >>> import geartrain as gt, numpy as np, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = gt.Store.create({"x": gt.Field((), "float32", per_row=True)}, capacity=8, journal=folder)
        ...     _ = store.insert({"x": np.zeros(3, np.float32)})
        ...     store.sync_journal()
        ...     status = store.journal  # a JournalStatus
        ...     store.close()
        >>> status.rows
        3
    """

    path: Path
    sync_s: float
    full: JournalFull
    rows: int
    removals: int
    bytes_written: int
    missed: int
    waits: int
    age_s: float | None
    error: str | None
    is_writer: bool


class Journal:
    """This process's part of a store's journal: the thread that writes it, or waits to."""

    def __init__(
        self,
        native: _native.Store,
        fields: dict[str, Field],
        max_length: int,
        writer: JournalWriter | None = None,
        disk: Disk | None = None,
        follows: bool = True,
    ) -> None:
        state = native.journal_state()
        assert state is not None
        self._native, self._fields, self._max_length = native, fields, max_length
        self._store_id = int(native.describe()["store_id"])
        self.path = Path(os.fsdecode(state["path"]))
        self._disk = disk
        pause_s = state["sync_ns"] / 3e9 if state["sync_ns"] else CHECK_S
        self._pause_s = min(pause_s, _MOST_PAUSE_S)
        self._writer = writer
        self._locked = writer is not None
        self._said = ""  # the last warning
        self._follows = follows
        try:
            self._start()
        except BaseException:  # no more threads: the directory is free for others
            self._close_writer()
            raise

    def _start(self) -> None:
        self._stop = ReentrantEvent()
        self._hurry = ReentrantEvent()
        self._finishing = threading.RLock()  # a signal's handler may close what its thread is closing
        self._finished: bool | None = None
        self._synced = False  # whether all is on the disk, once nothing follows
        self._thread: threading.Thread = DaemonThread(self._run, f"geartrain journal {self.path.name}")
        if self._follows:
            self._thread.start()
            _journals.add(self)

    @property
    def is_writer(self) -> bool:
        """Whether this process writes."""
        return self._writer is not None

    def status(self) -> JournalStatus:
        """Figures of the journal. Raises `StoreClosedError`."""
        state = self._native.journal_state()
        assert state is not None
        synced_ns = state["synced_ns"]
        return JournalStatus(
            self.path,
            state["sync_ns"] / 1e9,
            "error" if state["full_is_error"] else "wait",
            state["rows"],
            state["removals"],
            state["bytes"],
            state["missed"],
            state["waits"],
            max(0.0, (time.monotonic_ns() - synced_ns) / 1e9) if synced_ns else None,
            os.strerror(state["error"]) if state["error"] else None,
            self.is_writer,
        )

    def sync(self, timeout_s: float) -> bool:
        """Has everything written until now; whether it is on the disk. An error of the disk may pass meanwhile."""
        until_s = time.monotonic() + timeout_s
        while not self._native.sync_journal(max(0.0, until_s - time.monotonic())):
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.01)  # a journal whose full disk is an error does not wait in there
        return True

    def finish(self) -> bool:
        """Has everything written, then stops; whether all of it is on the disk. Another process writes from then on.

        It takes as long as the handle's `timeout_s` at most.
        """
        with self._finishing:
            if self._finished is None:
                done = self._finish(self._native.timeout_s)
                if self._finished is None:  # else a signal's handler has finished it meanwhile
                    self._finished = done
            return self._finished

    def _finish(self, timeout_s: float) -> bool:
        done, until_s = self._synced, time.monotonic() + timeout_s
        self._hurry.set()
        with contextlib.suppress(StoreClosedError):  # another thread closes it as well
            while (
                not done
                and (self._thread.is_alive() or not self._follows)
                and (left_s := until_s - time.monotonic()) > 0
            ):
                done = self._native.sync_journal(min(left_s, CHECK_S))
                if not done:
                    time.sleep(0.01)
        self._synced = done  # for a signal's handler that finishes it while its thread is joined
        self.stop()
        if self._thread is not threading.current_thread() and self._follows:
            self._thread.join(max(CHECK_S, until_s - time.monotonic()))
        return done

    def stop(self) -> None:
        """Requests the end of the thread, after a last pass, without waiting for it."""
        self._stop.set()
        self._hurry.set()
        with contextlib.suppress(GeartrainError):
            self._native.sync_journal(0.0)  # wakes it

    def after_fork(self) -> None:
        """In a forked child, which has neither the thread nor, once it has closed its copy of it, the lock."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        if self._stop.is_set() or self._native.closed:
            self._finishing, self._finished = threading.RLock(), True
            self._stop, self._hurry = ReentrantEvent(), ReentrantEvent()
            self._stop.set()
            self._thread = threading.current_thread()
        else:
            self._start()

    # --- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        seen, priorities_s = 0, time.monotonic()
        stop, hurry = self._stop, self._hurry
        try:
            while not stop.is_set():
                try:
                    if self._writer is None:
                        if not self._become_writer():
                            hurry.wait(CHECK_S)
                            if hurry.is_set():
                                stop.wait(0.01)
                            continue
                        ticket = self._native.await_journal_request(seen, 0.0)
                    else:
                        ticket = self._native.await_journal_request(seen, self._pause_s)
                    due = stop.is_set() or hurry.is_set() or time.monotonic() - priorities_s > PRIORITIES_EVERY_S
                    passed = self._writer_or_raise().run_pass(ticket, priorities=due)
                    self._said = ""
                    if due:
                        priorities_s = time.monotonic()
                    if passed:
                        seen = ticket
                    else:
                        stop.wait(_LEFT_PAUSE_S)
                except StoreClosedError:
                    return
                except (GeartrainError, OSError) as error:
                    self._failed(error)
                    stop.wait(CHECK_S)
                except MemoryError as error:  # within whatever: it begins again with what is on the disk
                    self._failed(error)
                    self._close_writer()
                    stop.wait(CHECK_S)
            if self._writer is not None:
                with contextlib.suppress(GeartrainError):
                    ticket = self._native.await_journal_request(seen, 0.0)
                    try:
                        self._writer.run_pass(ticket, priorities=True)
                    except (OSError, MemoryError) as error:
                        self._failed(error)
        finally:
            self._close_writer()

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _writer_or_raise(self) -> JournalWriter:
        if self._writer is None:
            raise StoreClosedError("the journal was closed")
        return self._writer

    def _failed(self, error: Exception) -> None:
        if self._locked:  # else it is for another process to write
            with contextlib.suppress(GeartrainError):
                known = errno.ENOMEM if isinstance(error, MemoryError) else errno.EIO
                self._native.journal_failed((isinstance(error, OSError) and error.errno) or known)
        if (said := str(error) or "no memory is left") != self._said:
            self._said = said
            _log.warning("the journal %s cannot be written: %s. Commits wait or fail until it can", self.path, said)

    def _become_writer(self) -> bool:
        directory = JournalDirectory(self.path, self._disk)
        self._locked = directory.lock()
        if not self._locked:
            return False
        try:
            contents = directory.contents(verify=False, repair=True)
            if contents.store != self._store_id:
                raise JournalError(f"{self.path} now belongs to another store")
            self._writer = _writer_of(self._native, self._fields, self._max_length, directory, contents)
        except BaseException:
            directory.unlock()
            raise
        return True


class JournalOptions:
    """The journal that `Store.create` was asked for. It is checked and locked first, then attached to the new store.

    Raises:
        ArgumentError, JournalError: as `Store.create`.
    """

    def __init__(
        self, path: str | os.PathLike[str], sync_s: float, full: JournalFull, disk: Disk | None = None
    ) -> None:
        self.path = Path(os.path.realpath(check_path("journal", path)))
        self._sync_s, self._full, self._disk = sync_s, full, disk

    def is_of(self, native: _native.Store) -> bool:
        """Whether a store has its rows from, or in, this journal."""
        return is_journal_of(self.path, native)

    def attach(
        self,
        native: _native.Store,
        fields: dict[str, Field],
        max_length: int,
        options: dict[str, Any],
        checkpoint: Checkpoint | None = None,
        progress: bool = False,
    ) -> Callable[[], Journal]:
        """Restores the journal's contents into a new store, and journals the store from there on.

        With a checkpoint, an empty journal begins with the checkpoint's rows, which are on disk when this returns. A
        journal that has already begun with them holds later changes too, so the journal is restored instead. That also
        holds for a later checkpoint of the store that the journal was written for.

        Returns a function that starts this process's thread.
        """
        intact = "What is in the journal stays as it is: make room and make the same call again"
        with naming_errors("cannot write the journal", self.path, JournalError, if_full=intact):
            origin = None if checkpoint is None else checkpoint.id
            directory = make_journal(self.path, native, options, self._disk, origin)
            if not directory.lock():
                raise JournalError(
                    f"the journal {self.path} is in use by another store: join that one with Store.open, or close "
                    "it first"
                )
            writer = None
            try:
                directory.note_span_bytes(options)
                with directory.filling(int(native.describe()["store_id"])):
                    writer = self._writer(native, fields, max_length, directory, checkpoint, progress)
                    native.set_journal(os.fsencode(self.path), self._full == "error", int(self._sync_s * 1e9))
            except BaseException:
                if writer is not None:
                    writer.close()
                directory.unlock()
                raise
        return lambda: Journal(native, fields, max_length, writer, self._disk)

    def _writer(
        self,
        native: _native.Store,
        fields: dict[str, Field],
        max_length: int,
        directory: JournalDirectory,
        checkpoint: Checkpoint | None,
        progress: bool,
    ) -> JournalWriter:
        state = None if directory.origin is None else directory.contents(verify=False)
        begun = state is None or state.origin is not None
        if checkpoint is None and not begun:
            raise JournalError(
                f"loading the checkpoint that the journal {self.path} begins with was interrupted: load it again with "
                "this journal, or give another directory"
            )
        if checkpoint is not None and checkpoint.id not in (directory.origin, *directory.later):
            if state is None or not begun or checkpoint.store_id != state.store:
                raise JournalError(
                    f"the journal {self.path} did not begin with the checkpoint {checkpoint.directory}, and its "
                    "last store did not save that checkpoint: restore the journal with Store.create, or continue "
                    "from the checkpoint with a new journal directory"
                )
            if checkpoint.next_sequence > state.next_sequence:
                raise JournalError(
                    f"the journal {self.path} lacks rows of the checkpoint {checkpoint.directory}: restore the "
                    "journal with Store.create, or continue from the checkpoint with a new journal directory"
                )
            directory.note_later(checkpoint.id)
        if begun:
            contents = fill(native, directory, repair=True)
            _check_unused(directory, contents)
            writer = _writer_of(native, fields, max_length, directory, contents)
            writer.note_step_priorities()
            return writer
        assert checkpoint is not None
        directory.clear()
        checkpoint.fill(native, progress=progress)
        writer = _writer_of(native, fields, max_length, directory, directory.contents())
        try:
            until_s = time.monotonic() + native.timeout_s
            while not writer.run_pass(0):
                if time.monotonic() > until_s:
                    raise JournalError(f"rows of {checkpoint.directory} are being rewritten while they are loaded")
                time.sleep(_LEFT_PAUSE_S)
            writer.mark(checkpoint.id)
        except BaseException:
            writer.close()
            raise
        return writer


def _writer_of(
    native: _native.Store,
    fields: dict[str, Field],
    max_length: int,
    directory: JournalDirectory,
    contents: JournalContents,
) -> JournalWriter:
    """The writer of a store's kind. Raises `OSError`."""
    kind = JournalWriter if directory.plan is None else PartsWriter
    return kind(native, fields, max_length, directory, contents)


def join(native: _native.Store, fields: dict[str, Field], max_length: int) -> Journal | None:
    """Joins the journal of a store that was opened; None if the store has none.

    A directory of another user's is not written to: its store's commits wait for that user's processes.
    """
    state = native.journal_state()
    if state is None:
        return None
    try:
        mine = Path(os.fsdecode(state["path"])).stat().st_uid == os.geteuid()
    except OSError:
        mine = True  # the thread says what is wrong
    return Journal(native, fields, max_length, follows=mine)


def fill(native: _native.Store, directory: JournalDirectory, *, repair: bool) -> JournalContents:
    """Puts every row of a journal in its place, in a new store of the same schema and capacity.

    What was claimed is due again.

    Raises:
        JournalError: damage; names the file and the place.
    """
    if not directory.numbers():
        return directory.contents(repair=repair)
    if directory.plan is None:
        contents = _fill_blocks(native, directory, repair)
        counters = {"inserted": contents.rows}
    else:
        contents = _fill_parts(native, directory, repair)
        counters = {}
        if contents.state is not None:
            native.restore_task_state(contents.state["tasks"])
            counters = contents.state["counters"]
        # Rows have consecutive numbers: whoever inserts rows continues behind the last one that is there.
        counters = {**counters, "inserted": contents.next_sequence - 1}
    native.restore_max_priority(contents.max_priority)
    native.set_counters(counters)
    return contents


def _fill_blocks(native: _native.Store, directory: JournalDirectory, repair: bool) -> JournalContents:
    columns = [native.column(number) for number in range(len(directory.fields))]
    native.allocate(directory.capacity)
    steps = np.zeros((directory.capacity, directory.max_length), np.uint32) if directory.per_step else None

    def put(records: np.ndarray[Any, Any], frame: Frame) -> None:
        assert frame.blocks is not None
        shapes, at = block_shapes(directory.fields, directory.max_length, frame.steps), 0
        for column, shape in zip(columns, shapes, strict=True):
            nbytes = len(records) * int(np.prod(shape, dtype=np.int64)) * column.itemsize
            if at + nbytes > len(frame.blocks):
                raise JournalError(f"{directory.path} is damaged: a frame is too short for its rows")
            blocks = np.frombuffer(frame.blocks[at : at + nbytes], column.dtype).reshape(len(records), *shape)
            timed = shape != column.shape[1:]
            if timed:
                column[records["row"], : frame.steps] = blocks
            else:
                column[records["row"]] = blocks
            at += nbytes
        if steps is not None:
            nbytes = len(records) * frame.steps * steps.itemsize
            if at + nbytes > len(frame.blocks) or frame.steps > directory.max_length:
                raise JournalError(f"{directory.path} is damaged: a frame is too short for the steps of its rows")
            values = np.frombuffer(frame.blocks[at : at + nbytes], "<u4").reshape(len(records), frame.steps)
            steps[records["row"], : frame.steps] = values

    def put_steps(rows: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> None:
        assert steps is not None
        block = np.zeros((len(rows), directory.max_length), np.uint32)
        block[np.arange(directory.max_length) < lengths[:, None]] = values
        steps[rows] = block

    contents = directory.contents(on_rows=put, on_steps=put_steps, repair=repair)
    table = contents.table()
    of_steps = None
    if steps is not None:
        there = table[: contents.rows]
        of_steps = steps[there["row"]][np.arange(directory.max_length) < there["length"][:, None]]
    restore(native, table, contents.next_sequence, of_steps)
    return contents


def _fill_parts(native: _native.Store, directory: JournalDirectory, repair: bool) -> JournalContents:
    contents = directory.contents(repair=repair)
    table, parts = contents.table(), directory.read_parts(contents)
    load_rows(native, table, parts, contents.next_sequence, directory.path, JournalError)
    return contents


def _check_unused(directory: JournalDirectory, contents: JournalContents) -> None:
    """Raises `JournalError` where the store that was journaled last lives on: its writer has just died."""
    if contents.store is None or contents.store_path is None:
        return
    try:
        there = _native.Store.attach(contents.store_path, False, True, 1.0, "any")
        used = there.describe()["store_id"] == contents.store and there.live_clients() > 0
    except (GeartrainError, OSError):
        return
    if used:
        raise JournalError(
            f"the journal {directory.path} belongs to {contents.store_path}, which processes use: join that store "
            "with Store.open"
        )


_journals: weakref.WeakSet[Journal] = weakref.WeakSet()
_registered = False  # with multiprocessing


def _after_fork() -> None:
    for journal in list(_journals):
        journal.after_fork()
    _finish_with_multiprocessing()


def _finish_with_multiprocessing() -> None:
    """A child of multiprocessing's that was forked ends with its finalizers, and calls nothing of atexit's."""
    global _registered
    util = sys.modules.get("multiprocessing.util")
    if util is not None and not _registered:
        _registered = True  # children of children have a copy of it
        # A finalizer of here would be dropped: a child begins with none. What is registered for it runs after that.
        util.register_after_fork(_journals, lambda _: util.Finalize(None, _at_exit, exitpriority=10))
        if sys.modules["multiprocessing.process"].parent_process() is not None:  # a child that has begun
            util.Finalize(None, _at_exit, exitpriority=10)


@atexit.register
def _at_exit() -> None:
    for journal in list(_journals):
        if not journal.finish():
            _log.warning("the journal %s may lack the last commits", journal.path)


os.register_at_fork(after_in_child=_after_fork)
_finish_with_multiprocessing()

__all__ = ["Journal", "JournalOptions", "JournalStatus", "fill", "is_journal", "join"]
