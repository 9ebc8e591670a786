"""Stores with a journal: restored after the machine lost its memory, bounded, full, with checkpoints, misused."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tagged
from deadlines import patience, until
from journals import CAPACITY, KillingDisk, SlowDisk, assert_same, content, create, lose_power, tags
from mounts import file_system
from segments import Fork, wait_for

import geartrain as gt
import geartrain.store.journal as journal_module
from geartrain.errors import (
    ArgumentError,
    CheckpointError,
    JournalError,
    LockTimeoutError,
    NoSpaceError,
    StoreExistsError,
)
from geartrain.store.checkpoint_reader import Checkpoint
from geartrain.store.journal_directory import JournalDirectory

# --- restored ---------------------------------------------------------------------------------------------------


def test_a_store_comes_back_from_its_journal_as_it_was(tmp_path: Path) -> None:
    with create(tmp_path / "journal") as store:
        keys = tagged.insert(store, range(10, 22))
        store.delete(keys[2:5])
        tagged.insert(store, range(30, 40))  # some of the oldest make room
        store.update_priorities(store.keys()[:6], np.arange(6) + 0.5)
        with store.row(priority=3.0, version=77) as row:
            tag = np.array([77], np.uint64)
            for name, values in tagged.rows_of(tag).items():
                row[name][...] = values[0]
            row.length = int(tagged.length_of(tag)[0])
        before, following = content(store), store.native.next_sequence()
        evicted = store.stats()["evicted"]
    assert evicted > 0
    with create(tmp_path / "journal") as again:
        assert_same(before, content(again))
        assert again.native.next_sequence() == following
        assert again.audit() == []
        fresh = tagged.insert(again, range(50, 55))
        assert np.all(fresh.generation[np.isin(fresh.row, keys.row)] > 1), "a key from before could name a new row"
        after = content(again)
    with create(tmp_path / "journal") as third:
        assert_same(after, content(third))


def test_rows_that_are_extended_come_back_once_they_are_sealed(tmp_path: Path) -> None:
    with create(tmp_path / "journal") as store:
        open_row, sealed = store.row(zeros=tagged.FIELDS), store.row(zeros=tagged.FIELDS)
        for row in (open_row, sealed):
            row["steps"][:] = 0
            row.publish(length=3)
        sealed.commit()
        store.sync_journal(patience(10))
        assert JournalDirectory(tmp_path / "journal").contents().rows == 1
        open_row.commit()
        store.sync_journal(patience(10))
        assert JournalDirectory(tmp_path / "journal").contents().rows == 2


def test_what_is_written_in_place_comes_back(tmp_path: Path) -> None:
    with create(tmp_path / "journal") as store:
        keys = tagged.insert(store, [1, 2, 3])
        store.sync_journal(patience(10))
        store.write(keys[1:2], {"late": np.arange(5, dtype=np.uint64)[None]})
        store.sync_journal(patience(10))
        assert store.journal.rows == 4
    with create(tmp_path / "journal") as again:
        assert again.column("late")[keys.row[1]].tolist() == [0, 1, 2, 3, 4]
        assert again.keys().row.tolist() == keys.row.tolist()


def test_a_store_that_cannot_take_the_rows_is_refused(tmp_path: Path, name: str) -> None:
    create(tmp_path / "journal").close()
    with pytest.raises(JournalError, match="capacity=16, but 17 was given"):
        gt.Store.create(name, tagged.FIELDS, max_length=tagged.STEPS, capacity=17, journal=tmp_path / "journal")
    with pytest.raises(JournalError, match="max_length"):
        gt.Store.create(name, tagged.FIELDS, max_length=7, capacity=CAPACITY, journal=tmp_path / "journal")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.pt").touch()
    with pytest.raises(JournalError, match=r"files that are not of a journal \(model.pt\)"):
        create(tmp_path / "other", name)
    assert not (Path("/dev/shm") / f"geartrain.{name}").exists()


def test_a_directory_that_another_call_restores_says_which(tmp_path: Path) -> None:
    with create(tmp_path / "journal") as store:
        store.save(tmp_path / "checkpoint")
        gt.save_checkpoint(store, tmp_path / "run", step=1)
    for place, what in (("journal", "Store.create"), ("run", "load_checkpoint"), ("run/step-00000001", "load_check")):
        with pytest.raises(CheckpointError, match=what):
            gt.Store.load(tmp_path / place)
    with pytest.raises(JournalError, match=r"is a checkpoint: Store\.load"):
        create(tmp_path / "checkpoint")


def test_a_restore_on_a_full_disk_says_that_nothing_is_lost_and_goes_on_once_there_is_room(
    tmp_path: Path, disk: SlowDisk
) -> None:
    with create(tmp_path / "journal") as store:
        tagged.insert(store, [1, 2, 3])
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(NoSpaceError, match="stays as it is: make room and make the same call again"):
        create(tmp_path / "journal")
    disk.error = None
    with create(tmp_path / "journal") as again:
        assert tags(again) == [1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"journal": 3},
        {"journal_sync_s": -1.0},
        {"journal_sync_s": "soon"},
        {"journal_full": "drop"},
        {"journal": None, "journal_sync_s": 1.0},
        {"journal": None, "journal_full": "wait"},
    ],
)
def test_arguments_that_make_no_journal_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError):
        gt.Store.create(tagged.FIELDS, max_length=8, capacity=4, **{"journal": tmp_path / "journal", **wrong})
    assert not (tmp_path / "journal").exists()


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda file: _flip(file, -100), "segment-00000001.bin is damaged at byte "),
        (lambda file: _flip(file, 0), "segment-00000001.bin is damaged at byte 0"),
        (lambda file: os.truncate(file, 0), "segment-00000001.bin is damaged at byte 0"),
        (lambda file: os.truncate(file, file.stat().st_size - 64), "segment-00000001.bin is damaged at byte "),
        (Path.unlink, "segment-00000001.bin is missing"),
        (lambda file: (file.parent / "journal.json").unlink(), "journal.json is missing"),
    ],
)
def test_damage_to_all_that_a_closed_store_wrote_is_an_error_and_changes_nothing(
    tmp_path: Path, harm: Callable[[Path], None], says: str
) -> None:
    with create(tmp_path) as store:
        tagged.insert(store, [1])
    harm(tmp_path / "segment-00000001.bin")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(JournalError, match=f"{says}.*[Pp]ut the file back.*load a checkpoint"):
        create(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_end_that_a_crash_cut_is_dropped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = create(tmp_path / "journal")
    tagged.insert(store, [1])
    store.sync_journal()
    tagged.insert(store, [2])
    store.sync_journal()
    shutil.copytree(tmp_path / "journal", tmp_path / "crashed")
    store.close()
    file = tmp_path / "crashed" / "segment-00000001.bin"
    _flip(file, -100)
    with create(tmp_path / "crashed") as again:
        assert tags(again) == [1]
    assert f"{file} ends with " in caplog.text and "unfinished write" in caplog.text


def test_a_manifest_that_the_disk_cannot_read_is_named(tmp_path: Path) -> None:
    create(tmp_path / "journal").close()
    (tmp_path / "journal" / "journal.json").unlink()
    (tmp_path / "journal" / "journal.json").symlink_to("/proc/self/mem")  # whose first page is EIO
    with pytest.raises(JournalError, match=r"/journal\.json cannot be read: Input/output error"):
        create(tmp_path / "journal")


def test_a_journal_in_use_is_refused(tmp_path: Path) -> None:
    with create(tmp_path / "journal"), pytest.raises(JournalError, match="join that"):
        create(tmp_path / "journal")


def test_a_store_without_a_journal_says_so(name: str) -> None:
    with tagged.create(name) as store:
        assert store.journal is None
        with pytest.raises(ArgumentError, match="has no journal"):
            store.sync_journal()


# --- the bound --------------------------------------------------------------------------------------------------


def test_with_a_bound_of_0_a_commit_and_a_deletion_return_once_they_are_on_the_disk(
    tmp_path: Path, disk: SlowDisk
) -> None:
    with create(tmp_path / "journal", journal_sync_s=0) as store:
        keys = tagged.insert(store, [1, 2])
        assert JournalDirectory(tmp_path / "journal").contents().rows == 2
        assert disk.unsynced_pages(512) == []
        store.delete(keys[:1])
        assert JournalDirectory(tmp_path / "journal").contents().rows == 1
        assert disk.unsynced_pages(512) == []
        disk.go.clear()
        done = threading.Event()
        thread = threading.Thread(target=lambda: (tagged.insert(store, [3]), done.set()))
        thread.start()
        until(lambda: disk.unsynced_pages(512), "nothing was written")
        assert not done.is_set()
        disk.go.set()
        assert done.wait(patience(10))
        thread.join()


def test_commits_wait_for_a_disk_that_is_behind_the_bound_and_no_longer_than_for_the_lock(
    tmp_path: Path, disk: SlowDisk
) -> None:
    with create(tmp_path / "journal", journal_sync_s=0.05, timeout_s=0.3) as store:
        tagged.insert(store, [1])
        store.sync_journal(patience(10))
        disk.go.clear()
        with pytest.raises(LockTimeoutError, match="behind its bound"):
            for tag in range(2, 1_000_000):
                tagged.insert(store, [tag])
        assert store.journal.waits > 0
        disk.go.set()
        store.sync_journal(patience(10))
        tagged.insert(store, [0])


TWO = np.array([2], np.uint64)


def _insert(store: gt.Store) -> None:
    tagged.insert(store, TWO)


def _put(row: Any) -> None:
    for field, values in tagged.rows_of(TWO).items():
        row[field] = values[0]


def _write_row(store: gt.Store) -> None:
    with store.row(version=2) as row:
        _put(row)
        row.length = int(tagged.length_of(TWO)[0])


def _write_rows(store: gt.Store) -> None:
    with store.rows(2, version=2) as rows:
        _put(rows[0])
        _put(rows[1])
        rows.lengths = tagged.length_of(np.concatenate([TWO, TWO]))


@pytest.mark.parametrize("write", [_insert, _write_row, _write_rows])
@pytest.mark.parametrize(
    "options",
    [{"journal_full": "wait"}, {"journal_full": "error"}, {"journal_full": "error", "remover": "lowest_priority"},
     {"journal_full": "error", "priority_per": "step"}],
)  # fmt: skip
def test_a_commit_that_the_journal_refuses_commits_nothing(
    tmp_path: Path, disk: SlowDisk, options: dict[str, Any], write: Any
) -> None:
    full = options["journal_full"]
    options = {**options, "timeout_s": 0.3 if full == "wait" else 60.0}
    limits = {name: options[name] for name in ("remover", "priority_per") if name in options}
    with create(tmp_path / "journal", journal_sync_s=0.0, **options) as store:
        tagged.insert(store, [1])
        before = content(store), store.stats()
        disk.error = OSError(28, os.strerror(28))
        began_s = time.monotonic()
        told = "cannot be written, for 0.3 s: No space" if full == "wait" else "cannot be written: No space"
        with pytest.raises(NoSpaceError, match=f"{told} left on device. No row was committed"):
            write(store)
        assert time.monotonic() - began_s < patience(10)
        assert_same(before[0], content(store))
        assert store.stats() == {**before[1], "abandoned": store.stats()["abandoned"]}
        assert store.audit() == []
        disk.error = None
        store.sync_journal(patience(10))
        write(store)
        after = content(store)
    with create(tmp_path / "journal", **limits) as again:
        assert_same(after, content(again))


@pytest.mark.parametrize("limits", [{}, {"remover": "lowest_priority"}, {"priority_per": "step"}])
def test_an_open_row_that_the_journal_refuses_can_be_completed_later(
    tmp_path: Path, disk: SlowDisk, limits: dict[str, Any]
) -> None:
    with create(tmp_path / "journal", journal_full="error", journal_sync_s=0.0, timeout_s=60.0, **limits) as store:
        row = store.row(version=2)
        _put(row)
        row.publish(length=1)
        row.extend(int(tagged.length_of(TWO)[0]))
        disk.error = OSError(28, os.strerror(28))
        with pytest.raises(NoSpaceError, match="No row was committed"):
            row.commit()
        assert store.stats()["open"] == 1
        assert store.audit() == []
        disk.error = None
        store.sync_journal(patience(10))
        row.commit()
        after = content(store)
    with create(tmp_path / "journal", **limits) as again:
        assert_same(after, content(again))


@pytest.mark.parametrize("options", [{}, {"publish_every": 2}, {"share_rows": True}])
def test_a_step_that_the_journal_refuses_can_be_recorded_again(
    tmp_path: Path, disk: SlowDisk, options: dict[str, Any]
) -> None:
    of_steps = {"obs": gt.Field((), "float32"), "action": gt.Field((), "int64"), "reward": gt.Field((), "float32")}
    fields = gt.recorded_fields(of_steps, share_rows="share_rows" in options)
    made = {"max_length": 4, "capacity": 8, "journal": tmp_path / "journal"}
    with (
        gt.Store.create(fields, **made, journal_full="error", journal_sync_s=0.0, timeout_s=60.0) as store,
        store.recorder(2, autoreset="disabled", **options) as recorder,
    ):
        recorder.reset(np.zeros(2, np.float32))
        for step in range(1, 4):
            seen = np.full(2, step, np.float32)
            given = {"terminated": np.array([step == 3, False]), "truncated": np.zeros(2, bool)}
            if step == 3:
                disk.error = OSError(28, os.strerror(28))
                with pytest.raises(NoSpaceError, match="No row was committed"):
                    recorder.step(seen, action=np.ones(2, np.int64), reward=np.ones(2, np.float32), **given)
                assert store.audit() == []
                disk.error = None
                store.sync_journal(patience(10))
            recorder.step(seen, action=np.ones(2, np.int64), reward=np.ones(2, np.float32), **given)
        recorder.reset(np.zeros(2, np.float32), mask=np.array([True, False]))
        recorder.close()
        assert store.stats()["inserted"] == store.stats()["committed"]
        assert store.audit() == []


def test_a_full_file_system_loses_nothing_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    with file_system(tmp_path / "small", "2m") as small:
        (small / "filler").write_bytes(bytes(1_400_000))  # more than rows that wait to be written
        with create(small / "journal", journal_full="error", journal_sync_s=0.02) as store:
            committed = []
            with pytest.raises(NoSpaceError, match="No space left on device"):
                for tag in range(1, 10_000):
                    tagged.insert(store, [tag])
                    committed.append(tag)
            (small / "filler").unlink()
            store.sync_journal(patience(10))
            tagged.insert(store, [20_000])
            before = content(store)
        with create(small / "journal") as again:
            assert_same(before, content(again))
            assert tags(again)[-2:] == [committed[-1], 20_000]


def test_rows_that_are_evicted_before_they_are_written_are_counted(tmp_path: Path) -> None:
    with create(tmp_path / "journal", journal_sync_s=1000.0) as store:
        store.sync_journal(patience(10))
        tagged.insert(store, range(5))
        store.sync_journal(patience(10))
        for tag in range(100, 100 + 4 * CAPACITY):
            tagged.insert(store, [tag])
        store.sync_journal(patience(10))
        status = store.journal
        assert status.rows + status.missed == 5 + 4 * CAPACITY
        assert status.missed >= 3 * CAPACITY - 8
    with create(tmp_path / "journal") as again:
        assert tags(again) == list(range(100 + 3 * CAPACITY, 100 + 4 * CAPACITY))


# --- priorities of steps ------------------------------------------------------------------------------------------


def step_priorities(store: gt.Store) -> list[list[float]]:
    """Of all rows, oldest first."""
    keys, lengths, found = store.keys(), store.status()["length"], []
    for at, length in enumerate(lengths):
        steps = keys[np.full(length, at)].of_steps(np.arange(length))
        found.append(store.status(steps)["priority"].tolist())
    return found


@pytest.mark.parametrize("taken_over", [False, True])
def test_priorities_of_steps_come_back_with_their_rows(tmp_path: Path, taken_over: bool) -> None:
    with create(tmp_path / "journal", priority_per="step") as store:
        keys = tagged.insert(store, range(10, 20))
        store.sync_journal(patience(10))
        changed = keys[2:6].of_steps([0, 1, 0, 0])
        store.update_priorities(changed, [0.5, 3.0, 7.0, 0.0])
        store.delete(keys[3:4])
        if taken_over:  # by a writer that knows nothing of what was written
            store.native.request_journal_priorities()
            store.sync_journal(patience(10))
            store._journal._writer._steps[:] = 0
        tagged.insert(store, range(30, 33))
        before, of_steps = content(store), step_priorities(store)
    assert of_steps[2][0] == 0.5 and of_steps[3][0] == 7.0
    for _ in range(2):
        with create(tmp_path / "journal", priority_per="step") as again:
            assert_same(before, content(again))
            assert step_priorities(again) == of_steps
            assert again.audit() == []


def test_steps_whose_priorities_are_as_they_were_are_not_written_again(tmp_path: Path) -> None:
    with create(tmp_path / "journal", priority_per="step") as store:
        keys = tagged.insert(store, range(12))
        store.sync_journal(patience(10))
        before = store.journal.bytes_written
        store.native.request_journal_priorities()
        store.sync_journal(patience(10))
        assert store.journal.bytes_written == before
        store.update_priorities(keys[:1].of_steps([0]), 9.0)
        store.native.request_journal_priorities()
        store.sync_journal(patience(10))
        assert 0 < store.journal.bytes_written - before < 200 + 4 * tagged.STEPS
    with create(tmp_path / "journal", priority_per="step") as again:
        before = again.journal.bytes_written
        again.native.request_journal_priorities()
        again.sync_journal(patience(10))
        assert again.journal.bytes_written == before, "what was restored was written again"


def test_a_journal_of_steps_is_none_of_rows(tmp_path: Path) -> None:
    create(tmp_path / "steps", priority_per="step").close()
    create(tmp_path / "rows").close()
    with pytest.raises(JournalError, match="priority_per='step', but 'row'"):
        create(tmp_path / "steps")
    with pytest.raises(JournalError, match="priority_per='row', but 'step'"):
        create(tmp_path / "rows", priority_per="step")


# --- with checkpoints ---------------------------------------------------------------------------------------------


def test_saving_a_checkpoint_has_the_priorities_journaled(tmp_path: Path) -> None:
    with create(tmp_path / "journal") as store:
        keys = tagged.insert(store, range(8))
        store.sync_journal(patience(10))
        store.update_priorities(keys, np.arange(8) + 0.25)
        store.sync_journal(patience(10))
        assert np.all(JournalDirectory(tmp_path / "journal").contents().records["priority"][keys.row] == 1 << 16)
        store.save(tmp_path / "checkpoint")
        store.sync_journal(patience(10))
        kept = JournalDirectory(tmp_path / "journal").contents().records["priority"][keys.row]
        assert np.array_equal(kept, ((np.arange(8) + 0.25) * 65536).astype(np.uint32))


@pytest.mark.parametrize("priority_per", ["row", "step"])
def test_a_journal_begins_with_a_checkpoint_and_is_what_comes_back_later(
    tmp_path: Path, name: str, priority_per: Any
) -> None:
    with tagged.create(name, CAPACITY, priority_per=priority_per) as store:
        keys = tagged.insert(store, range(10))
        if priority_per == "step":
            store.update_priorities(keys.of_steps(np.zeros(10, np.int64)), np.arange(10) + 1.5)
        store.save(tmp_path / "checkpoint")

    def load() -> gt.Store:
        return gt.Store.load(tmp_path / "checkpoint", name, journal=tmp_path / "journal", journal_sync_s=30.0)

    with load() as store:
        first = content(store)
        assert JournalDirectory(tmp_path / "journal").contents().rows == 10, "not all of it is on the disk"
        of_steps = step_priorities(store) if priority_per == "step" else []
        store.delete(store.keys()[:2])
        tagged.insert(store, [50, 51])
        later = content(store)
    assert first["tag"].tolist() == list(range(10))
    with load() as again:
        assert_same(later, content(again))
        if priority_per == "step":
            assert step_priorities(again)[:8] == of_steps[2:]
            assert of_steps[3][0] == 4.5
    with create(tmp_path / "journal", name, priority_per=priority_per) as by_create:
        assert_same(later, content(by_create))
    with load() as again:
        assert_same(later, content(again))


def test_a_checkpoint_and_a_journal_of_something_else_are_refused(tmp_path: Path, name: str) -> None:
    with create(tmp_path / "journal") as store:
        tagged.insert(store, [1])
        store.save(tmp_path / "checkpoint")
        tagged.insert(store, [2])
    with pytest.raises(JournalError, match="did not begin with the checkpoint"):
        gt.Store.load(tmp_path / "checkpoint", name, journal=tmp_path / "journal")
    with pytest.raises(ArgumentError, match="journal_full"):
        gt.Store.load(tmp_path / "checkpoint", name, journal=tmp_path / "new", journal_full="never")
    assert not (tmp_path / "new").exists() and not (Path("/dev/shm") / f"geartrain.{name}").exists()
    with create(tmp_path / "journal") as again:
        assert tags(again) == [1, 2]


def test_loading_that_is_killed_while_its_journal_begins_starts_anew(tmp_path: Path, name: str, fork: Fork) -> None:
    with tagged.create(name, CAPACITY) as store:
        tagged.insert(store, range(12))
        store.save(tmp_path / "checkpoint")
    killed = 0
    for operation in range(1, 40, 4):
        path = tmp_path / f"journal-{operation}"

        def load(operation: int = operation, path: Path = path) -> None:
            options = journal_module.JournalOptions(path, 0.0, "wait", KillingDisk(operation))
            with Checkpoint(tmp_path / "checkpoint") as checkpoint:
                store = gt.Store.create(name, tagged.FIELDS, max_length=tagged.STEPS, capacity=CAPACITY)
                store.begin_journal(options, checkpoint)
            store.close()

        if wait_for(fork(load)) == 0:
            break
        killed += 1
        lose_power(name)
        with contextlib.suppress(JournalError):  # it says so, or has begun with all of the rows
            create(path, name).close()
        with gt.Store.load(tmp_path / "checkpoint", name, journal=path, journal_sync_s=30.0) as again:
            assert tags(again) == list(range(12))
    assert killed >= 2


def test_a_killed_load_and_a_killed_job_are_started_again_on_the_same_host(
    tmp_path: Path, name: str, fork: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tagged.create(name, CAPACITY) as store:
        tagged.insert(store, range(12))
        store.save(tmp_path / "checkpoint")

    def load(journal: Path) -> gt.Store:
        return gt.Store.load(tmp_path / "checkpoint", name, journal=journal, journal_sync_s=0.0)

    options = journal_module.JournalOptions.__init__
    for operation in (1, 5, 9):

        def killed(operation: int = operation) -> None:
            disk = KillingDisk(operation)
            with monkeypatch.context() as patch:
                patch.setattr(journal_module.JournalOptions, "__init__", lambda self, *args: options(self, *args, disk))
                load(tmp_path / "journal")
            os._exit(0)

        wait_for(fork(killed))

    def run() -> None:
        store = load(tmp_path / "journal")
        tagged.insert(store, [50])
        os.kill(os.getpid(), signal.SIGKILL)

    for rows in (13, 14):
        wait_for(fork(run))
        with gt.Store.open(name, mode="r", adopt=True) as left:
            assert len(left) == rows
    with load(tmp_path / "journal") as again:
        assert tags(again)[:12] == list(range(12)) and len(again) == 14
        with pytest.raises(StoreExistsError):  # a process uses it
            load(tmp_path / "journal")
    wait_for(fork(run))
    with pytest.raises(StoreExistsError):  # another journal's
        load(tmp_path / "other")
    with gt.Store.load(tmp_path / "checkpoint", name, create="replace") as plain:
        assert len(plain) == 12
        with pytest.raises(StoreExistsError, match="in use"):
            gt.Store.load(tmp_path / "checkpoint", name, create="replace")
    with pytest.raises(ArgumentError, match="create is"):
        gt.Store.load(tmp_path / "checkpoint", name, create="never")


def test_later_checkpoints_of_a_journals_store_restore_the_journal(tmp_path: Path, name: str) -> None:
    with tagged.create(name, CAPACITY) as store:
        tagged.insert(store, range(4))
        store.save(tmp_path / "first")

    def load(checkpoint: str) -> gt.Store:
        return gt.Store.load(tmp_path / checkpoint, name, journal=tmp_path / "journal", journal_sync_s=0.0)

    with load("first") as store:
        tagged.insert(store, [10])
        store.save(tmp_path / "second")
        tagged.insert(store, [11])
    for _ in range(2):
        with load("second") as store:  # the second time it is of the store before the last
            assert tags(store) == [0, 1, 2, 3, 10, 11]
    with load("first") as store:
        assert len(store) == 6
        store.save(tmp_path / "third")
    with gt.Store.load(tmp_path / "third", name) as foreign:
        tagged.insert(foreign, [12])
        foreign.save(tmp_path / "foreign")
    with pytest.raises(JournalError, match=r"restore the journal with Store\.create"):
        load("foreign")
    with load("third") as store:
        tagged.insert(store, [13])
        store.sync_journal(patience(10))
        kept = {path.name: path.read_bytes() for path in (tmp_path / "journal").iterdir()}
        tagged.insert(store, [14])
        store.save(tmp_path / "ahead")
    for path in (tmp_path / "journal").iterdir():  # a power cut took what is newer
        path.unlink()
    for file, content_then in kept.items():
        (tmp_path / "journal" / file).write_bytes(content_then)
    with pytest.raises(JournalError, match="lacks"):
        load("ahead")
