"""Repairs after stopped and killed processes, and descriptors that the program closed itself."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable

import numpy as np
import pytest
import tagged
from segments import Pipe, Segment, holding_blocks, kill, wait_for, words_offset

import geartrain as gt
import geartrain._native as _native
from geartrain.core.keys import Keys
from geartrain.errors import LockTimeoutError, StoreFullError

# --- an audit that cannot be finished ---------------------------------------------------------------------------


def test_an_audit_that_a_stopped_writer_delays_owes_nobody_a_repair(name, fork):
    with tagged.create(name, 8, timeout_s=0.2) as store:
        keys = tagged.insert(store, [1, 2, 3])
        pipe = Pipe()

        def stand_still() -> None:
            store.reap()
            Segment(store).set_priority_writers(os.getpid(), 1)
            pipe.say()
            signal.pause()

        child = fork(stand_still)
        pipe.hear()
        for _ in range(2):
            with pytest.raises(LockTimeoutError, match=f"process {child} has been updating priorities"):
                store.audit()
        assert len(store.keys()) == 3
        tagged.insert(store, [4])
        assert store.update_priorities(keys, 2.0) == 0
        kill(child)
        assert store.reap() == 1
        assert store.audit() == []


# --- deaths that only somebody who draws can notice ----------------------------------------------------------------


def _die_in_an_update(store: gt.Store, fork: Callable[[Callable[[], object]], int], keys: Keys) -> None:
    """A process that changed the word of row 0 and is killed before it changed the sums above."""
    pipe = Pipe()

    def half_update() -> None:
        store.update_priorities(keys[:1], 1.0)
        segment = Segment(store)
        segment.set_priority_writers(os.getpid(), 1)
        words = np.frombuffer(segment.bytes, np.uint64, store.capacity, words_offset(store.capacity))
        words[0] += np.uint64(5 << 16)
        pipe.say()
        signal.pause()

    child = fork(half_update)
    pipe.hear()
    kill(child)


def _die_in_the_lock(store: gt.Store, fork: Callable[[Callable[[], object]], int], keys: Keys) -> None:
    pipe = Pipe()

    def half_update() -> None:
        segment = Segment(store)
        segment.lock()
        words = np.frombuffer(segment.bytes, np.uint64, store.capacity, words_offset(store.capacity))
        words[0] += np.uint64(5 << 16)
        pipe.say()
        signal.pause()

    child = fork(half_update)
    pipe.hear()
    kill(child)


@pytest.mark.parametrize("die", [_die_in_an_update, _die_in_the_lock], ids=["without the lock", "in the lock"])
@pytest.mark.parametrize("notice", ["draw", "total", "find", "copy"])
def test_whoever_draws_next_sets_right_the_sums_that_a_dead_process_left_half_changed(die, notice, name, fork):
    with tagged.create(name, 40) as store:
        keys = tagged.insert(store, np.arange(40))
        candidates = gt.selection.Candidates.of_store(store.native, store.column).native
        die(store, fork, keys)
        numbers = np.arange(64, dtype=np.uint32)
        if notice == "draw":
            assert candidates.draw(True, 0, 0, 0, numbers)[3] == 0
        elif notice == "total":
            assert store.native.total_priority() == (40 + 5) << 16
        elif notice == "find":
            candidates.find(True, np.zeros(1, np.uint64))
        else:
            _native.AllowedRows(candidates, True, (0, 0, 0), np.empty(0, np.uint32))
        assert candidates.total_priority() == (40 + 5) << 16
        assert store.audit() == []
        drawn = candidates.draw(True, 7, 0, 0, np.arange(45_000, dtype=np.uint32))
        assert 5_400 < np.count_nonzero(drawn[0] == 0) < 6_600  # six of 45: 6,000 of them


# --- descriptors that the program closes -------------------------------------------------------------------------


def _descriptors(store: gt.Store) -> list[int]:
    about = store.path.stat()
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            one = os.fstat(int(entry))
            if (one.st_ino, one.st_dev) == (about.st_ino, about.st_dev):
                found.append(int(entry))
    return found


def test_a_descriptor_that_the_program_closed_and_reused_judges_nobody_dead(name, fork):
    def careless() -> None:
        with tagged.create(name, 8) as store:
            tagged.insert(store, [1])
            pipe = Pipe()
            other = holding_blocks(store, fork, pipe, 4)
            pipe.hear()
            (number,) = _descriptors(store)
            with tempfile.TemporaryFile() as file:
                os.dup2(file.fileno(), number)  # what closing it and opening another file comes to
                assert store.reap() == 0
                assert store.native.live_clients() == 2
                with pytest.raises(StoreFullError, match="4 are being written"):
                    store.rows(5)
                # This process is alive as well, to others.
                with gt.Store.open(name) as joined:
                    assert joined.reap() == 0
                    assert joined.native.live_clients() == 3
                child = fork(lambda: tagged.insert(store, [2]) and 0)
                assert wait_for(child) == 0
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
                assert store.reap() >= 1
                assert store.stats()["reclaimed"] == 4
                store.close()
                assert os.fstat(number).st_ino == os.fstat(file.fileno()).st_ino  # and it is not closed in turn
            os.close(number)
        assert not store.path.exists()

    assert wait_for(fork(careless)) == 0
