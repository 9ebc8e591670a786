"""A segment file that somebody truncates: refused by whoever opens it, and whoever has it open can end without a crash.

Reading the memory of a file that was truncated is SIGBUS, which no library can keep from a program; so each case runs
in a process of its own.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from deadlines import patience
from mounts import file_system

import geartrain as gt
from geartrain.errors import CorruptStoreError, IncompatibleStoreError, StoreError

FIELDS = {"obs": gt.Field((64,), "float32")}
SIZES = [0, 100, 4096, 70_000, -1]  # -1: all but the last byte
RESERVED = pytest.mark.parametrize("reserve", [True, False], ids=["reserved", "sparse"])


def make(path: Path, reserve: bool) -> gt.Store:
    store = gt.Store.create(path, FIELDS, max_length=16, capacity=2000, reserve=reserve)
    store.insert({"obs": np.ones((500, 16, 64), np.float32)})
    return store


def cut(path: Path, size: int) -> None:
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


def in_child(work: Callable[[], object]) -> int:
    """Exit code of a forked child: 0 where `work` returned, 1 where it raised."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        try:
            work()
            os._exit(0)
        except BaseException as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@RESERVED
@pytest.mark.parametrize("size", SIZES)
def test_whoever_opens_it_is_told(tmp_path, size, reserve):
    path = tmp_path / "segment"

    def work() -> None:
        make(path, reserve).close(keep=True)
        cut(path, size)
        for door in (
            gt.Store.open,
            lambda path: gt.Store.open(path, mode="r"),
            lambda path: gt.Store.open(path, adopt=True),
        ):
            with pytest.raises(IncompatibleStoreError, match=r"bytes|empty"):
                door(path)

    assert in_child(work) == 0


@RESERVED
@pytest.mark.parametrize("size", SIZES)
def test_whoever_closes_it_is_told_and_goes_on(tmp_path, size, reserve):
    path = tmp_path / "segment"

    def work() -> None:
        store = make(path, reserve)
        cut(path, size)
        with pytest.raises(CorruptStoreError, match="was truncated while it was in use"):
            store.close()
        store.close()

    assert in_child(work) == 0


@pytest.mark.parametrize("size", SIZES)
def test_a_process_that_has_it_open_ends_by_itself(tmp_path, size):
    path = tmp_path / "segment"
    code = (
        "import os, sys\n"
        "import geartrain as gt\n"
        "path, size = sys.argv[1], int(sys.argv[2])\n"
        "kept = gt.Store.create(path, {'obs': gt.Field((64,), 'float32')}, max_length=16, capacity=2000)\n"
        "dropped = gt.Store.open(path)\n"
        "cut = size if size >= 0 else os.path.getsize(path) + size\n"
        "os.truncate(path, cut)\n"
        "del dropped\n"
        "cycle = [kept]\n"
        "cycle.append(cycle)\n"
    )
    arguments = [sys.executable, "-c", code, str(path), str(size)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=patience(30), check=False)
    assert (done.returncode, done.stderr) == (0, ""), done


@RESERVED
@pytest.mark.parametrize("size", SIZES)
def test_a_forked_child_is_refused(tmp_path, size, reserve):
    path = tmp_path / "segment"

    def work() -> None:
        store = make(path, reserve)
        cut(path, size)

        def child() -> None:
            for call in (store.audit, lambda: store.insert({"obs": np.ones((1, 16, 64), np.float32)})):
                with pytest.raises(StoreError, match="cannot be opened again in this forked child"):
                    call()
            store.close()

        assert in_child(child) == 0
        os._exit(0)

    assert in_child(work) == 0


def test_a_writer_that_dies_of_a_full_file_system_is_repaired_once_there_is_room(tmp_path):
    """What `reserve=False` costs: the kernel ends whoever touches a page for which there is none."""
    with file_system(tmp_path, "16m") as small:
        path, filler = small / "segment", small / "filler"
        store = gt.Store.create(path, FIELDS, max_length=16, capacity=2000, reserve=False)
        store.insert({"obs": np.ones((100, 16, 64), np.float32)})
        filler.write_bytes(bytes(os.statvfs(small).f_bavail * 4096 - (1 << 20)))

        def write() -> None:
            for _ in range(100):
                store.insert({"obs": np.full((10, 16, 64), 2, np.float32)})

        assert in_child(write) == -signal.SIGBUS
        filler.unlink()
        assert store.audit() == []
        assert 100 <= len(store) < 2000
        store.insert({"obs": np.ones((1800, 16, 64), np.float32)})
        assert store.audit() == []
        store.close()
