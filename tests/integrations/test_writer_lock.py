"""Lock of buffers that processes share: closed or taken by a signal's handler before any line of its calls; forked."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import deadlines
import pytest
from hostile.instants import Interruption

import geartrain as gt
import geartrain.core.locks as locks
from geartrain.errors import StoreClosedError
from geartrain.integrations.transitions.writer_lock import WriterLock

FIELDS = {"x": gt.Field((), "float32")}


def locked_once(lock: WriterLock, store: gt.Store, inside: list[bool]) -> None:
    with lock.locked(store):
        inside.append(True)


def descriptors_of(path: str) -> list[str]:
    opened = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            opened.append(os.readlink(f"/proc/self/fd/{number}"))
    return [name for name in opened if name.startswith(str(path))]


def closed_at(line: int | None) -> int:
    """Closes lock and store before a line; returns how many lines there are."""
    store, lock, inside = gt.Store.create(FIELDS, max_length=2, capacity=2), WriterLock(5.0), []

    def close() -> None:
        lock.close()
        store.close()

    one = Interruption(line, close)
    try:
        one.during(lambda: locked_once(lock, store, inside))
    except StoreClosedError:
        assert line is not None and not inside
    close()
    assert not descriptors_of(store.path), f"line {line}: the file stays open"
    return one.lines


def test_a_lock_that_is_closed_before_any_of_its_lines_ends_its_call_and_its_file() -> None:
    closed_at(None)  # imports
    lines = closed_at(None)
    assert lines > 20
    for line in range(lines):
        closed_at(line)


class OtherProcess:
    """Whether another process could take the lock, by an open file of its own."""

    def __init__(self, store: gt.Store) -> None:
        self._file = os.open(store.path, os.O_RDWR | os.O_CLOEXEC)

    def is_kept_out(self) -> bool:
        return any(locks.is_taken(self._file, number) for number in BYTES)

    def close(self) -> None:
        os.close(self._file)


BYTES = (1 << 20,)


def taken_at(line: int | None, closes: bool = False) -> tuple[int, list[bool]]:
    """A handler takes the lock before a line; returns how many lines there are, and whether uses kept others out."""
    store, lock = gt.Store.create(FIELDS, max_length=2, capacity=2), WriterLock(5.0)
    other, kept_out = OtherProcess(store), []

    def use() -> None:
        with lock.locked(store):
            kept_out.append(other.is_kept_out())

    def handler() -> None:
        use()
        if closes:
            lock.close()

    one = Interruption(line, handler)
    one.during(use)
    left = other.is_kept_out()
    lock.close()
    assert not left, f"line {line}: the lock is kept after its last use"
    other.close()
    assert not descriptors_of(store.path) or closes, f"line {line}: the file stays open"
    store.close()
    return one.lines, kept_out


def test_a_lock_that_a_handler_takes_before_any_of_its_lines_is_held_in_each_use_and_free_after() -> None:
    for closes in (False, True):
        taken_at(None)  # imports
        lines, _ = taken_at(None)
        assert lines > 20
        for line in range(lines):
            _, kept_out = taken_at(line, closes)
            assert kept_out == [True, True], f"line {line}: {kept_out}"


class HandlerError(Exception):
    pass


def raised_at(line: int | None, nested: bool) -> tuple[int, int]:
    """A handler raises before a line, `nested` within another use of the lock and having used it itself; returns how
    many lines there are, and how many descriptors were left."""
    store, lock = gt.Store.create(FIELDS, max_length=2, capacity=2), WriterLock(5.0)
    other, kept_out = OtherProcess(store), []
    before = len(descriptors_of(store.path))

    def use() -> None:
        with lock.locked(store):
            kept_out.append(other.is_kept_out())

    def handler() -> None:
        if nested:
            use()
        raise HandlerError

    def use_twice() -> None:
        with lock.locked(store):
            with contextlib.suppress(HandlerError):
                one.during(use)
            kept_out.append(other.is_kept_out())

    one = Interruption(line, handler)
    with contextlib.suppress(HandlerError):
        if nested:
            use_twice()
        else:
            one.during(use)
    assert not other.is_kept_out(), f"line {line}: the lock of processes is kept after its last use"
    user = threading.Thread(target=use)
    user.start()
    user.join(deadlines.patience(5))
    assert not user.is_alive(), f"line {line}: the lock of threads is kept after its last use"
    assert kept_out and all(kept_out), f"line {line}: a use keeps nobody out"
    assert not other.is_kept_out(), f"line {line}: the lock is kept after a later use"
    lock.close()
    left = len(descriptors_of(store.path)) - before
    other.close()
    store.close()
    return one.lines, left


@pytest.mark.parametrize("nested", [False, True])
def test_a_lock_is_free_after_a_handler_has_raised_before_any_of_its_lines(nested: bool) -> None:
    raised_at(None, nested)  # imports
    lines, _ = raised_at(None, nested)
    assert lines > 20
    for line in range(lines):
        _, left = raised_at(line, nested)
        assert left == 0, f"line {line}: the file stays open"


def test_a_lock_is_free_whenever_a_handler_raises() -> None:
    store, lock = gt.Store.create(FIELDS, max_length=2, capacity=2), WriterLock(5.0)
    other, random_s, raised = OtherProcess(store), random.Random(1), 0
    armed: list[bool] = []
    free: list[bool] = []

    def raise_it(*_: object) -> None:
        if armed:
            armed.clear()
            raise HandlerError

    def others_can_take() -> None:
        free.append(lock._thread.acquire(blocking=False))
        if free[-1]:
            lock._thread.release()

    before = signal.signal(signal.SIGALRM, raise_it)
    until_s = time.monotonic() + deadlines.patience(20)
    while raised < 500 and time.monotonic() < until_s:
        free.clear()
        armed.append(True)
        try:
            signal.setitimer(signal.ITIMER_REAL, random_s.random() * 60e-6 + 1e-6)
            for _ in range(4):
                with lock.locked(store):
                    pass
            armed.clear()
        except HandlerError:
            raised += 1
        user = threading.Thread(target=others_can_take)
        user.start()
        user.join()
        assert free == [True] and not other.is_kept_out(), raised
    signal.signal(signal.SIGALRM, before)
    assert raised >= 500
    lock.close()
    other.close()
    store.close()


def in_child(call: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            call()
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_forked_child_uses_a_lock_that_a_thread_of_its_parents_has_and_keeps_it_from_nobody() -> None:
    store, lock = gt.Store.create(FIELDS, max_length=2, capacity=2), WriterLock(deadlines.patience(20))
    other = OtherProcess(store)
    holding, over = threading.Event(), threading.Event()
    read, write = os.pipe()

    def hold() -> None:
        with lock.locked(store):
            holding.set()
            over.wait(deadlines.patience(20))

    holder = threading.Thread(target=hold)
    holder.start()
    holding.wait()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # until the parent has looked
        os._exit(in_child(lambda: locked_once(lock, store, [])))
    over.set()
    holder.join()
    lock.close()
    kept_out = other.is_kept_out()  # by the child's copy of the file
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not kept_out
    os.close(read)
    other.close()
    store.close()


def test_a_lock_that_is_closed_beside_a_use_closes_its_file() -> None:
    store, lock = gt.Store.create(FIELDS, max_length=2, capacity=2), WriterLock(5.0)
    before = len(descriptors_of(store.path))
    with lock.locked(store):
        closing = threading.Thread(target=lock.close)
        closing.start()
        closing.join()
    assert len(descriptors_of(store.path)) == before
    store.close()
