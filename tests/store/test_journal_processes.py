"""Journals of several processes: written on by others, ended, killed, forked, closed from several threads."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tagged
from deadlines import patience, stop, until
from journals import CAPACITY, KillingDisk, SlowDisk, content, create, lose_power, tags
from segments import Fork, Pipe, kill, wait_for

import geartrain as gt
import geartrain.store.journal as journal_module
from geartrain.errors import (
    JournalError,
    LockTimeoutError,
    StoreClosedError,
)
from geartrain.store.journal_directory import JournalDirectory
from geartrain.store.journal_writer import JournalWriter

# --- processes --------------------------------------------------------------------------------------------------


def test_another_process_writes_on_when_the_writer_is_killed(tmp_path: Path, name: str, fork: Fork) -> None:
    ready = Pipe()

    def write_and_wait() -> None:
        store = create(tmp_path / "journal", name)
        tagged.insert(store, range(5))
        store.sync_journal(patience(10))
        ready.say()
        signal.pause()

    child = fork(write_and_wait)
    ready.hear()
    with gt.Store.open(name) as store:
        assert not store.journal.is_writer
        tagged.insert(store, [50])
        kill(child)
        tagged.insert(store, [51])
        store.sync_journal(patience(20))
        assert store.journal.is_writer
        assert tags(store) == [0, 1, 2, 3, 4, 50, 51]
        assert JournalDirectory(tmp_path / "journal").contents().rows == 7
    with create(tmp_path / "journal") as again:
        assert tags(again) == [0, 1, 2, 3, 4, 50, 51]


def test_a_stopped_writer_holds_commits_up_to_their_deadline(tmp_path: Path, name: str, fork: Fork) -> None:
    ready = Pipe()

    def write_and_wait() -> None:
        store = create(tmp_path / "journal", name, journal_sync_s=0.2)
        ready.say()
        signal.pause()
        store.close()

    child = fork(write_and_wait)
    ready.hear()
    with gt.Store.open(name, timeout_s=0.5) as store:
        store.sync_journal(patience(10))
        stop(child)
        with pytest.raises(LockTimeoutError, match="the process that writes it is stopped"):
            for tag in range(1_000_000):
                tagged.insert(store, [tag])
        kill(child)
        store.sync_journal(patience(20))
        tagged.insert(store, [5])


def test_a_forked_child_takes_over(tmp_path: Path, name: str, fork: Fork) -> None:
    """The lock is the parent's open file, of which the child has a copy: one that is not given back would stay."""
    there, go = Pipe(), Pipe()

    def parent() -> None:
        store = create(tmp_path / "journal", name)
        tagged.insert(store, [1])
        if os.fork() == 0:
            tagged.insert(store, [2])
            there.say()
            go.hear()
            store.sync_journal(patience(20))
            tagged.insert(store, [3])
            store.close()
            there.say()
            os._exit(0)
        signal.pause()

    process = fork(parent)
    there.hear()
    kill(process)
    go.say()
    there.hear()
    with create(tmp_path / "journal") as again:
        assert tags(again) == [1, 2, 3]


@pytest.mark.parametrize("opens", ["its parent's", "its own"])
def test_a_child_of_multiprocessing_ends_with_everything_on_the_disk(tmp_path: Path, name: str, opens: str) -> None:
    store = create(tmp_path / "journal", name)
    tagged.insert(store, [1])
    store.sync_journal(patience(10))

    def work() -> None:
        global _left_open
        _left_open = store if opens == "its parent's" else create(tmp_path / "other")
        tagged.insert(_left_open, [2])

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(patience(30))
    assert child.exitcode == 0
    path = tmp_path / ("journal" if opens == "its parent's" else "other")
    assert JournalDirectory(path).contents().rows == (2 if opens == "its parent's" else 1)
    store.close()


_left_open: gt.Store | None = None


def _killed_at(operation: int, path: Path, name: str, fork: Fork) -> bool:
    """Kills a process at an operation of its journal; whether it came to that. What it was told is durable must be."""
    read, write = os.pipe()

    def insert() -> None:
        options = journal_module.JournalOptions(path, 0.0, "wait", KillingDisk(operation))
        store = tagged.create(name, CAPACITY)
        store._journal = options.attach(store.native, store.fields, store.max_length, store.options)()
        for tag in range(40):
            keys = tagged.insert(store, [2 * tag, 2 * tag + 1])
            if tag % 3 == 0:
                store.delete(keys[:1])
            os.write(write, bytes([tag]))
        signal.pause()

    child = fork(insert)
    os.close(write)
    told = b""
    while len(told) < 40 and (more := os.read(read, 100)):
        told += more
    os.close(read)
    if len(told) == 40:
        kill(child)
    else:
        assert wait_for(child) == -signal.SIGKILL
    lose_power(name)
    with create(path, name) as again:
        content(again)
        last = len(told)
        present = tags(again)
        living = [tag for tag in range(2 * last) if tag % 6][-CAPACITY + 2 :]
        assert set(living) <= set(present)
        assert set(present) <= set(range(2 * last + 2))
        assert again.audit() == []
    return len(told) < 40


def test_a_kill_at_operations_of_the_journal_loses_nothing_that_was_acknowledged(
    tmp_path: Path, name: str, fork: Fork
) -> None:
    for number, operation in enumerate([0, 1, 2, 3, 9, 20, 41]):
        assert _killed_at(operation, tmp_path / str(number), name, fork)


@pytest.mark.slow
def test_a_kill_at_every_operation_of_the_journal(tmp_path: Path, name: str, fork: Fork) -> None:
    operation = 0
    while _killed_at(operation, tmp_path / str(operation), name, fork):
        operation += 1
    assert operation > 80


# --- the end ----------------------------------------------------------------------------------------------------


def test_a_store_that_is_dropped_unclosed_ends_its_thread_and_loses_nothing(tmp_path: Path) -> None:
    store = create(tmp_path / "journal")
    tagged.insert(store, [1, 2, 3])
    path, thread = store.path, store._journal._thread
    del store
    thread.join(patience(10))
    assert not thread.is_alive()
    until(lambda: not path.exists(), "the segment is still there")
    with create(tmp_path / "journal") as again:
        assert tags(again) == [1, 2, 3]


def test_closing_from_several_threads_and_calls_afterwards(tmp_path: Path) -> None:
    store = create(tmp_path / "journal")
    tagged.insert(store, [1])
    failures: list[BaseException] = []

    def close() -> None:
        try:
            store.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(30))
    assert failures == []
    for call in (lambda: store.journal, store.sync_journal):
        with pytest.raises(StoreClosedError):
            call()
    store.close()
    with create(tmp_path / "journal") as again:
        assert tags(again) == [1]


def test_a_signal_handler_closes_what_its_thread_is_closing(tmp_path: Path, name: str, fork: Fork) -> None:
    def close() -> None:
        slow = SlowDisk()
        options = journal_module.JournalOptions(tmp_path / "journal", 30.0, "wait", slow)
        store = gt.Store.create(name, tagged.FIELDS, max_length=tagged.STEPS, capacity=CAPACITY)
        store._journal = options.attach(store.native, store.fields, store.max_length, store.options)()
        tagged.insert(store, [1])
        slow.go.clear()
        handled = []

        def handler(*_: Any) -> None:
            slow.go.set()
            store.close()
            handled.append(store.closed)

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        store.close()
        assert handled == [True]
        assert store.closed

    child, ended = fork(close), []
    waits = threading.Thread(target=lambda: ended.append(wait_for(child)), daemon=True)
    waits.start()
    waits.join(patience(20))
    if not ended:
        os.kill(child, signal.SIGKILL)
        waits.join()
    assert ended == [0]
    with create(tmp_path / "journal") as again:
        assert tags(again) == [1]


@pytest.mark.parametrize("full", ["wait", "error"])
def test_a_close_whose_disk_fails_says_so_and_closes_within_its_timeout(
    tmp_path: Path, disk: SlowDisk, full: Any
) -> None:
    store = create(tmp_path / "journal", journal_full=full, timeout_s=0.3)
    tagged.insert(store, [1])
    disk.error = OSError(5, os.strerror(5))
    began_s = time.monotonic()
    with pytest.raises(JournalError, match="may lack the last commits"):
        store.close()
    assert time.monotonic() - began_s < patience(3)
    assert store.closed
    disk.error = None


def test_a_handler_that_closes_as_the_journals_thread_is_joined_does_not_call_rows_lost_that_are_written(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = create(tmp_path / "journal", name=name)
    tagged.insert(store, [1])
    assert store._journal is not None
    join, closed = store._journal._thread.join, []

    def interrupted(timeout: float | None = None) -> None:
        if not closed:
            closed.append(True)
            store.close()  # raised JournalError
        join(timeout)

    monkeypatch.setattr(store._journal._thread, "join", interrupted)
    store.close()
    assert closed and store.closed
    with create(tmp_path / "journal") as again:
        assert tags(again) == [1]


def test_a_journal_goes_on_when_a_pass_found_no_memory(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run_pass, failed = JournalWriter.run_pass, []

    def fails_once(self: JournalWriter, ticket: int, *, priorities: bool) -> bool:
        if not failed:
            failed.append(True)
            raise MemoryError
        return run_pass(self, ticket, priorities=priorities)

    monkeypatch.setattr(JournalWriter, "run_pass", fails_once)
    with create(tmp_path / "journal", name) as store:
        tagged.insert(store, range(3))
        store.sync_journal(patience(20))
        assert failed and "no memory is left" in caplog.text and store.journal.error is None
    with create(tmp_path / "journal") as again:
        assert tags(again) == [0, 1, 2]
