"""The bytes of a segment and the ends of processes, for tests that stand in for one in the middle of something."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
from collections.abc import Callable

import numpy as np
from deadlines import patience

import geartrain as gt
import geartrain._native as _native

Fork = Callable[[Callable[[], object]], int]

# Where things are in a segment, native/segment/segment.h.
MUTEX_OFFSET, CLIENTS_OFFSET, CLIENT_BYTES, REGIONS_OFFSET, STATUS_BYTES = 4096, 16384, 64, 32768, 48
LIMITER_WAITING = MUTEX_OFFSET + 268


def words_offset(capacity: int) -> int:
    """Where the rows' words begin."""
    return REGIONS_OFFSET + (capacity * STATUS_BYTES + 4095) // 4096 * 4096


def wait_for(child: int) -> int:
    """How a child ended: its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    assert wait_for(child) == -signal.SIGKILL


class Segment:
    """The bytes of a segment, for tests that stand in for a process in the middle of something."""

    def __init__(self, store: gt.Store) -> None:
        with store.path.open("r+b") as file:
            self.bytes = mmap.mmap(file.fileno(), 0)
        self._mutex = ctypes.c_byte.from_buffer(self.bytes, MUTEX_OFFSET)
        self._libc = ctypes.CDLL(None)

    def lock(self) -> None:
        assert self._libc.pthread_mutex_lock(ctypes.byref(self._mutex)) == 0

    def unlock(self) -> None:
        assert self._libc.pthread_mutex_unlock(ctypes.byref(self._mutex)) == 0

    def slot_of(self, pid: int) -> int:
        for slot in range(_native.MAX_CLIENTS):
            in_use, found = np.frombuffer(self.bytes, np.int32, 2, CLIENTS_OFFSET + slot * CLIENT_BYTES)
            if in_use and found == pid:
                return slot
        raise AssertionError(f"process {pid} is not attached")

    def clients_in_use(self) -> int:
        slots = range(_native.MAX_CLIENTS)
        return sum(self.bytes[CLIENTS_OFFSET + slot * CLIENT_BYTES] != 0 for slot in slots)

    def limiter_waiters(self) -> int:
        return int.from_bytes(self.bytes[LIMITER_WAITING : LIMITER_WAITING + 4], "little")

    def set_priority_writers(self, pid: int, count: int) -> None:
        at = CLIENTS_OFFSET + self.slot_of(pid) * CLIENT_BYTES + 24
        self.bytes[at : at + 4] = count.to_bytes(4, "little")


class Pipe:
    """One byte from a child says that it got there."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def say(self) -> None:
        os.write(self._write, b"x")

    def hear(self) -> None:
        assert select.select([self._read], [], [], patience(60))[0], "the child never got there"
        assert os.read(self._read, 1) == b"x"

    def __del__(self) -> None:
        os.close(self._read)
        os.close(self._write)


def holding_the_lock(store: gt.Store, fork: Fork, pipe: Pipe, then: Callable[[], object]) -> int:
    """A child that holds the segment's lock while `then` runs, and says by the pipe that it has it."""

    def body() -> None:
        segment = Segment(store)
        segment.lock()
        pipe.say()
        then()
        segment.unlock()

    return fork(body)


def holding_blocks(store: gt.Store, fork: Fork, pipe: Pipe, n: int) -> int:
    """A child that holds n blocks until it is killed, and says by the pipe that it has them."""

    def body() -> None:
        store.native.allocate(n)
        pipe.say()
        signal.pause()

    return fork(body)
