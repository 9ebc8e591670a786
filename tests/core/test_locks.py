"""File locks: owned by an open file, dropped by the kernel, waited for with a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import killed

import geartrain.core.locks as locks
from geartrain.errors import GeartrainError


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Two open files of one file."""
    path = tmp_path / "locked"
    path.touch()
    fds = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    yield fds
    for fd in fds:
        os.close(fd)


def test_an_exclusive_lock_has_one_owner(two: tuple[int, int]) -> None:
    one, other = two
    assert locks.take(one, locks.EXCLUSIVE, 7)
    assert locks.take(one, locks.EXCLUSIVE, 7), "it has it already"
    assert not locks.take(other, locks.EXCLUSIVE, 7)
    assert not locks.take(other, locks.SHARED, 7)
    assert locks.is_taken(other, 7)
    assert not locks.is_taken(one, 7), "only others' count"
    assert locks.take(other, locks.EXCLUSIVE, 8), "another number is another lock"
    locks.drop(one, 7)
    assert not locks.is_taken(other, 7)
    assert locks.take(other, locks.EXCLUSIVE, 7)


def test_a_shared_lock_has_many_owners_and_can_become_exclusive(two: tuple[int, int]) -> None:
    one, other = two
    assert locks.take(one, locks.SHARED, 0)
    assert locks.take(other, locks.SHARED, 0)
    assert locks.is_taken(one, 0)
    assert not locks.take(one, locks.EXCLUSIVE, 0)
    locks.drop(other, 0)
    assert locks.take(one, locks.EXCLUSIVE, 0)


def test_numbers_are_bytes_far_beyond_the_file(two: tuple[int, int]) -> None:
    """Other builds of geartrain find them there: it is part of the priorities' format."""
    import fcntl
    import struct

    one, other = two
    assert locks.take(one, locks.EXCLUSIVE, 5)
    asked = struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, start, length, _ = struct.unpack("@hhqqi4x", fcntl.fcntl(other, fcntl.F_OFD_GETLK, asked))
    assert (kind, start, length) == (fcntl.F_WRLCK, (1 << 40) + 5, 1)


def test_waiting_has_a_deadline(two: tuple[int, int]) -> None:
    one, other = two
    assert locks.take(one, locks.EXCLUSIVE, 0)
    began_s = time.monotonic()
    assert not locks.take(other, locks.EXCLUSIVE, 0, timeout_s=0.3)
    assert 0.3 <= time.monotonic() - began_s < 10


def test_a_waiting_thread_gets_it_and_others_run_meanwhile(two: tuple[int, int]) -> None:
    one, other = two
    assert locks.take(one, locks.EXCLUSIVE, 0)
    got: list[bool] = []
    waiting = threading.Thread(target=lambda: got.append(locks.take(other, locks.EXCLUSIVE, 0, timeout_s=60)))
    waiting.start()
    time.sleep(0.05)
    assert got == []
    locks.drop(one, 0)
    waiting.join(30)
    assert got == [True]


def test_signals_are_handled_while_waiting_and_the_wait_goes_on(two: tuple[int, int]) -> None:
    one, other = two
    assert locks.take(one, locks.EXCLUSIVE, 0)
    came = []

    def handler(*_: object) -> None:
        came.append(time.monotonic())
        locks.drop(one, 0)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        assert locks.take(other, locks.EXCLUSIVE, 0, timeout_s=60)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(came) == 1


def test_a_killed_process_leaves_no_lock(two: tuple[int, int], tmp_path: Path) -> None:
    code = (
        "import os, sys, time\n"
        "import geartrain.core.locks as locks\n"
        "fd = os.open(sys.argv[1], os.O_RDWR)\n"
        "print(locks.take(fd, locks.EXCLUSIVE, 3), flush=True)\n"
        "time.sleep(600)\n"
    )
    with killed(
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "locked")], stdout=subprocess.PIPE)
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"True\n"
        assert locks.is_taken(two[0], 3)
        child.kill()
        child.wait()
        assert not locks.is_taken(two[0], 3)


def test_what_cannot_be_locked_is_an_error(tmp_path: Path) -> None:
    readable = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(GeartrainError, match="cannot lock"):
            locks.take(readable, locks.EXCLUSIVE, 0)
    finally:
        os.close(readable)
    with pytest.raises(GeartrainError, match="cannot ask"):
        locks.is_taken(readable, 0)
