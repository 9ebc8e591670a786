"""Lock of buffers that processes share: closed or taken by a signal's handler before any line of its calls; forked."""

from __future__ import annotations

import contextlib
import os
import threading
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
    assert lines > 10
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
        assert lines > 10
        for line in range(lines):
            _, kept_out = taken_at(line, closes)
            assert kept_out == [True, True], f"line {line}: {kept_out}"


class HandlerError(Exception):
    pass


@pytest.mark.parametrize("nested", [False, True])
def test_a_lock_is_free_after_a_handler_has_raised_within_a_use(nested: bool) -> None:
    store, lock = gt.Store.create(FIELDS, max_length=2, capacity=2), WriterLock(5.0)
    other, kept_out = OtherProcess(store), []
    with pytest.raises(HandlerError), lock.locked(store):
        with lock.locked(store) if nested else contextlib.nullcontext():
            kept_out.append(other.is_kept_out())
            raise HandlerError
    assert not other.is_kept_out(), "the lock of processes is kept after its last use"
    user = threading.Thread(target=locked_once, args=(lock, store, kept_out))
    user.start()
    user.join(deadlines.patience(5))
    assert kept_out == [True, True]
    lock.close()
    other.close()
    assert not descriptors_of(store.path)
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
