"""Stores with tasks and a journal: restored, durable puts, the bound, full disks, several processes."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpo
import numpy as np
import pytest
import tasked_stores
from deadlines import patience, until
from journals import KillingDisk, SlowDisk, lose_power
from replay_calls import replay_of
from saved_rows import pieces_in, pieces_of
from segments import Fork, Pipe, kill, wait_for

import geartrain as gt
import geartrain.store.journal as journal_module
from geartrain.errors import (
    ArgumentError,
    JournalError,
    LockTimeoutError,
    NoSpaceError,
    StaleClaimError,
    WaitTimeoutError,
)
from geartrain.store.journal_directory import JournalDirectory

NEVER_S = 1e6


def create(path: Path, name: str | None = None, **options: Any) -> gt.Store:
    given = {"capacity": 64, "span_bytes": 1 << 20, "reserve": False, "journal_sync_s": 30.0, **options}
    where = () if name is None else (name,)
    return gt.Store.create(*where, grpo.FIELDS, tasks=grpo.TASKS, journal=path, **given)


def work(store: gt.Store, task: str, n: int) -> None:
    grpo.work(store, task, store.claim(task, n))


# --- restored -----------------------------------------------------------------------------------------------------


def test_a_store_with_tasks_comes_back_as_it_was_and_what_was_claimed_is_due_again(tmp_path: Path) -> None:
    with create(tmp_path / "journal") as store:
        grpo.insert(store, range(20))
        store.advance(5)
        store.limiter.set(in_flight=40, max_stale=9)
        work(store, "answer", 12)
        for task in ("reward", "ref", "advantage"):
            work(store, task, 8)
        store.claim("answer", 1).drop()
        replay = replay_of(store, gt.selection.Fifo(), batch_size=2, keep="saved", prefetch=0)
        batches = [replay.sample() for _ in range(2)]
        numbers = [grpo.check(batch) for batch in batches]
        replay.saved(batches[0].step)
        replay.close()
        claim = store.claim("answer", 2)
        grpo.append(next(iter(claim)), 13)
        before, sequences = pieces_of(store)
        stats, figures = store.stats(), store.task_stats()
        store.finish()
        store.sync_journal(patience(10))
        assert pieces_in(tmp_path / "journal")[0] == before
        assert store.journal.rows >= 17
    with create(tmp_path / "journal") as again:
        assert again.audit() == []
        assert pieces_of(again) == (before, sequences)
        found = again.stats()
        for name in ("inserted", "sampled", "under_way", "kept", "clock", "dropped", "exhausted"):
            assert found[name] == stats[name], name
        assert again.limiter.state().most_in_flight == 40
        due = again.task_stats()
        assert due["answer"]["due"] == figures["answer"]["due"] + 2
        assert all(due[task]["done"] == figures[task]["done"] for task in grpo.TASKS)
        assert due["answer"]["claimed"] == 0
        with again.claim("answer", 2) as claim:  # what was only appended is not saved
            assert not any(row.partial for row in claim)
        assert again.native.saved_before() == 1
        with replay_of(again, gt.selection.Fifo(), batch_size=2, keep="saved", prefetch=0) as resumed:
            resumed.load_state_dict({**resumed.state_dict(), "step": 1})
            assert grpo.check(resumed.sample()) == numbers[1]
        fresh = grpo.insert(again, [90])
        assert int(fresh.generation[0]) > 1 or int(fresh.row[0]) >= 20
        for claim in again.claims("answer", 8, timeout_s=patience(10)):  # they end, as inserts had ended
            grpo.work(again, "answer", claim)


def test_stores_with_axes_and_no_tasks_come_back(tmp_path: Path) -> None:
    fields = {"x": gt.Field(("n",), "float32"), "text": gt.Text(), "id": gt.Field((), "int64")}
    given = {"capacity": 8, "span_bytes": 1 << 14, "journal": tmp_path / "journal", "max_times_sampled": 3}
    with gt.Store.create(fields, **given) as store:
        keys = store.insert({"x": [[1, 2], [], [3]], "text": ["a", "ä", ""], "id": [1, 2, 3]}, priorities=[1, 2, 3])
        store.update_priorities(keys[:1], [5.0])
        store.delete(keys[1:2])
        before = pieces_of(store)
    with gt.Store.create(fields, **given) as again:
        assert pieces_of(again) == before
        assert len(again) == 2
        assert again.status()["priority"].tolist() == [5.0, 3.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": {**grpo.TASKS, "ref": gt.Task(grpo.TASKS["ref"].fields, after="reward")}}, "comes after"),
        ({"capacity": 65}, "capacity=64, but 65"),
        ({"tasks": None, "span_bytes": 1 << 20}, "was given"),
    ],
)
def test_a_store_that_cannot_take_the_rows_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    create(tmp_path / "journal").close()
    given: dict[str, Any] = {"tasks": grpo.TASKS, "capacity": 64, "span_bytes": 1 << 20, **change}
    with pytest.raises(JournalError, match=message):
        gt.Store.create(grpo.FIELDS, journal=tmp_path / "journal", **given)


def test_a_larger_region_takes_what_a_full_one_held_and_a_smaller_one_is_refused(tmp_path: Path) -> None:
    with create(tmp_path / "journal") as store:
        grpo.insert(store, range(30))
        work(store, "answer", 30)
        before = pieces_of(store)
    with create(tmp_path / "journal", span_bytes=1 << 21) as again:
        assert pieces_of(again) == before
    with pytest.raises(JournalError, match="span_bytes=2097152, but 1048576 was given"):
        create(tmp_path / "journal", span_bytes=1 << 20)


def test_a_store_in_all_states_comes_back_with_its_change_numbers(tmp_path: Path) -> None:
    with tasked_stores.in_all_states(journal=tmp_path / "journal") as store:
        before = tasked_stores.everything(store)
    with tasked_stores.make_store(journal=tmp_path / "journal") as again:
        assert again.audit() == []
        found = tasked_stores.everything(again)
        assert found["parts"] == before["parts"]
        again.sync_journal(patience(10))
        assert again.journal.rows == 0, "rows that were restored are not written again"


def test_a_journal_with_tasks_is_these_bytes(tmp_path: Path) -> None:
    golden = tmp_path / "golden"
    shutil.copytree(Path(__file__).parent / "data" / "journal-with-tasks", golden)
    with tasked_stores.make_store(journal=golden) as store:
        assert store.audit() == []
        found = tasked_stores.everything(store)
        with tasked_stores.in_all_states() as fresh:
            made = tasked_stores.everything(fresh)
    for piece, (_, content) in made["parts"].items():
        assert found["parts"][piece][1] == content
    assert found["parts"].keys() == made["parts"].keys()
    assert found["next_sequence"] == made["next_sequence"] == 8
    for name in ("clock", "in_flight", "max_stale", "dropped", "finished"):
        assert found["state"][name] == made["state"][name]


def test_a_journal_begins_with_a_checkpoint_of_tasks_and_is_what_comes_back_later(tmp_path: Path, name: str) -> None:
    with tasked_stores.in_all_states() as store:
        store.save(tmp_path / "checkpoint")
    with gt.Store.load(tmp_path / "checkpoint", name, journal=tmp_path / "journal") as begun:
        assert pieces_in(tmp_path / "journal")[0] == pieces_of(begun)[0], "it is on the disk when load returns"
        tasked_stores.answer(begun, 1)
        before = pieces_of(begun)
    with gt.Store.load(tmp_path / "checkpoint", name, journal=tmp_path / "journal") as again:
        assert pieces_of(again) == before
        assert again.audit() == []


# --- durable ------------------------------------------------------------------------------------------------------


def _insert(store: gt.Store, **options: Any) -> None:
    store.insert({"prompt": [grpo.prompt_of(7)], "id": [7]}, **options)


def _put_claim(store: gt.Store, **options: Any) -> None:
    store.claim("reward", 1).put(reward=np.zeros(grpo.ANSWERS, np.float32), **options)


def _put_row(store: gt.Store, **options: Any) -> None:
    for row in store.claim("reward", 1):
        row.put(reward=np.zeros(grpo.ANSWERS, np.float32), **options)


def _put_appended(store: gt.Store, **options: Any) -> None:
    for row in store.claim("answer", 1):
        grpo.append(row, 1)
        row.put(**options)


def _put_key(store: gt.Store, **options: Any) -> None:
    keys = gt.Keys(np.array([1], np.uint32), np.array([1], np.uint32))
    assert len(store.put(keys, "reward", {"reward": [np.ones(grpo.ANSWERS, np.float32)]}, **options)) == 0


WRITES = [_insert, _put_claim, _put_row, _put_appended, _put_key]


def begun(path: Path, **options: Any) -> gt.Store:
    """Row 0 is answered, row 1 has a reward, row 2 is due for an answer."""
    store = create(path, **options)
    grpo.insert(store, range(2))
    work(store, "answer", 2)
    claim = store.claim("reward", 2)
    second = list(claim)[1]
    second.put(reward=np.zeros(grpo.ANSWERS, np.float32))
    claim.release()
    grpo.insert(store, [1])
    store.sync_journal(patience(10))
    return store


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_durably_is_on_the_disk_when_the_call_returns(
    tmp_path: Path, disk: SlowDisk, write: Callable[..., None]
) -> None:
    with begun(tmp_path / "journal", journal_sync_s=NEVER_S) as store:
        disk.go.clear()
        threading.Timer(0.2, disk.go.set).start()
        write(store, durable=True)
        assert disk.go.is_set()
        assert disk.unsynced_pages(512) == []
        assert pieces_in(tmp_path / "journal")[0] == pieces_of(store)[0]


@pytest.mark.parametrize("write", WRITES)
def test_a_bound_of_0_writes_all_durably(tmp_path: Path, disk: SlowDisk, write: Callable[..., None]) -> None:
    with begun(tmp_path / "journal", journal_sync_s=0.0) as store:
        write(store)
        assert disk.unsynced_pages(512) == []
        assert pieces_in(tmp_path / "journal")[0] == pieces_of(store)[0]
        store.claim("ref", 1).drop()
        assert pieces_in(tmp_path / "journal")[0] == pieces_of(store)[0]


def test_rows_of_any_store_are_inserted_durably(tmp_path: Path) -> None:
    fields = {"x": gt.Field((), "int64", per_row=True)}
    path = tmp_path / "journal"
    with gt.Store.create(fields, capacity=8, journal=path, journal_sync_s=NEVER_S) as store:
        store.insert({"x": np.arange(3)}, durable=True)
        assert JournalDirectory(path).contents().rows == 3


@pytest.mark.parametrize("write", WRITES)
def test_without_a_journal_a_durable_write_is_refused_and_writes_nothing(write: Callable[..., None]) -> None:
    with grpo.new_store() as store:
        grpo.insert(store, range(2))
        work(store, "answer", 1)
        work(store, "reward", 1)
        if write in (_put_claim, _put_row):
            work(store, "answer", 1)
        before = pieces_of(store)
        with pytest.raises(ArgumentError, match="it has none: pass journal="):
            write(store, durable=True)
        assert pieces_of(store) == before


# --- the bound, and full disks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("full", ["wait", "error"])
def test_a_disk_that_fails_is_back_pressure_or_an_error_and_nothing_is_written(
    tmp_path: Path, disk: SlowDisk, full: Any, write: Callable[..., None]
) -> None:
    with begun(tmp_path / "journal", journal_full=full, timeout_s=0.3 if full == "wait" else 60.0) as store:
        disk.error = OSError(28, os.strerror(28))
        grpo.insert(store, [8])
        with pytest.raises(WaitTimeoutError, match="No space left"):
            store.sync_journal(0.3)
        until(lambda: store.journal.error is not None)
        before = pieces_of(store)
        with pytest.raises(NoSpaceError, match="No space left on device"):
            write(store)
        assert pieces_of(store) == before
        assert store.audit() == []
        disk.error = None
        store.sync_journal(patience(10))
        after = pieces_of(store)
    with create(tmp_path / "journal") as again:
        assert pieces_of(again) == after


def test_a_durable_put_that_the_disk_refuses_is_put_and_says_so(tmp_path: Path, disk: SlowDisk) -> None:
    with begun(tmp_path / "journal", journal_full="error", journal_sync_s=NEVER_S) as store:
        disk.error = OSError(28, os.strerror(28))
        claim = store.claim("reward", 1)
        row = next(iter(claim))
        with pytest.raises(NoSpaceError, match=r"rows were put, but the journal .* No space left"):
            row.put(reward=np.zeros(grpo.ANSWERS, np.float32), durable=True)
        disk.error = None
        store.sync_journal(patience(10))
        with pytest.raises(StaleClaimError):
            row.put(reward=np.zeros(grpo.ANSWERS, np.float32))
        assert pieces_in(tmp_path / "journal")[0] == pieces_of(store)[0]


def test_puts_and_inserts_wait_for_a_disk_that_is_behind_the_bound(tmp_path: Path, disk: SlowDisk) -> None:
    with begun(tmp_path / "journal", journal_sync_s=0.05, timeout_s=0.3) as store:
        disk.go.clear()
        claim = store.claim("reward", 1)
        until(lambda: _is_behind(store))
        with pytest.raises(LockTimeoutError, match="behind its bound"):
            claim.put(reward=np.zeros(grpo.ANSWERS, np.float32))
        with pytest.raises(LockTimeoutError, match="behind its bound"):
            _insert(store)
        disk.go.set()
        store.sync_journal(patience(10))
        assert len(claim.put(reward=np.zeros(grpo.ANSWERS, np.float32))) == 0
        _insert(store)


def _is_behind(store: gt.Store) -> bool:
    try:
        _insert(store)
    except LockTimeoutError:
        return True
    return False


def test_an_insert_that_waits_for_room_goes_on_while_the_disk_is_behind_and_catches_up(
    tmp_path: Path, disk: SlowDisk
) -> None:
    with create(tmp_path / "journal", capacity=4, journal_sync_s=0.05, timeout_s=60.0) as store:
        grpo.insert(store, range(4))
        store.sync_journal(patience(10))
        inserted = threading.Event()

        def insert() -> None:
            grpo.insert(store, range(4, 8))
            inserted.set()

        thread = threading.Thread(target=insert)
        thread.start()
        disk.go.clear()
        threading.Timer(0.5, disk.go.set).start()
        for task in ("answer", "reward", "ref", "advantage"):
            work(store, task, 4)  # waits for the disk, and the insert for rows
        assert not inserted.is_set()
        with gt.Replay(store, gt.selection.Fifo(), batch_size=4, prefetch=0) as replay:
            replay.sample()
        assert inserted.wait(patience(20))
        thread.join()


# --- processes ----------------------------------------------------------------------------------------------------


def test_another_process_writes_on_when_the_writer_is_killed(tmp_path: Path, name: str, fork: Fork) -> None:
    ready = Pipe()

    def write_and_wait() -> None:
        store = create(tmp_path / "journal", name)
        grpo.insert(store, range(6))
        work(store, "answer", 3)
        store.sync_journal(patience(10))
        ready.say()
        signal.pause()

    child = fork(write_and_wait)
    ready.hear()
    with gt.Store.open(name) as store:
        assert not store.journal.is_writer
        rows = store.journal.rows
        work(store, "answer", 1)
        store.claim("answer", 1).drop()
        kill(child)
        work(store, "reward", 2)
        store.sync_journal(patience(20))
        assert store.journal.is_writer
        assert store.journal.rows - rows <= 3, "what is on the disk is not written again"
        before = pieces_of(store)
        assert pieces_in(tmp_path / "journal")[0] == before[0]
    with create(tmp_path / "journal") as again:
        assert pieces_of(again) == before
        # And once more, by who takes over a store that was restored.
        rows = again.journal.rows
        assert rows == 0


@pytest.mark.parametrize("operation", [0, 1, 2, 3, 5, 8, 13, 21, 34])
def test_a_kill_at_operations_of_the_journal_loses_no_durable_put(
    tmp_path: Path, name: str, fork: Fork, operation: int
) -> None:
    path = tmp_path / "journal"
    read, write = os.pipe()

    def run() -> None:
        os.close(read)
        disk = KillingDisk(operation + 4)
        init = journal_module.JournalOptions.__init__
        journal_module.JournalOptions.__init__ = lambda self, *given: init(self, *given, disk)  # type: ignore[method-assign]
        store = create(path, name, journal_sync_s=NEVER_S)
        for number in range(1000):
            store.insert({"prompt": [grpo.prompt_of(number)], "id": [number]}, durable=True)
            os.write(write, b"i")
            for row in store.claim("answer", 1):
                grpo.append(row, number)
                row.put(durable=True)
            os.write(write, b"a")

    child = fork(run)
    os.close(write)
    told = b""
    while more := os.read(read, 100):
        told += more
    os.close(read)
    assert wait_for(child) == -signal.SIGKILL
    lose_power(name)
    with create(path, name) as again:
        assert again.audit() == []
        inserted, answered = told.count(b"i"), told.count(b"a")
        figures = again.task_stats()
        assert inserted <= again.stats()["inserted"] <= inserted + 1
        assert len(again.native.changed_parts(0)[1]) == again.stats()["inserted"]
        done = again.stats()["under_way"] - figures["answer"]["remaining"]
        assert answered <= done <= answered + 1
        numbers = np.asarray(again.claim("reward", 64)["id"]).tolist()
        assert numbers == list(range(done))
