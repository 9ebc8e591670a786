"""Forked children and spawned workers of a process with a store: what they hold, and who ends the segment."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import tagged
from deadlines import patience
from segments import Pipe, Segment, kill, wait_for
from value_rows import X

import geartrain as gt
from geartrain.errors import StaleKeyError, StaleStoreError, StoreClosedError, StoreMissingError

# --- forks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forks", [30, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(300)])])
def test_a_child_forked_while_other_threads_allocate_uses_the_store(
    name: str, fork: Callable[[Callable[[], object]], int], forks: int
) -> None:
    with gt.Store.create(name, X, capacity=64) as store:
        stop = threading.Event()

        def churn() -> None:
            while not stop.is_set():
                store.native.abandon_one(store.native.allocate_one())

        threads = [threading.Thread(target=churn) for _ in range(2)]
        for thread in threads:
            thread.start()

        def child() -> None:
            signal.alarm(int(patience(20)))  # it hung with the segment's lock
            store.insert({"x": np.arange(2)})
            store.close()

        try:
            codes = [wait_for(fork(child)) for _ in range(forks)]
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert codes == [0] * forks
        assert store.stats()["inserted"] == 2 * forks
        assert store.audit() == []


def test_the_rows_of_a_killed_creator_come_back_while_its_forked_child_lives(names, fork):
    name = names(may_stay=True)
    pipe, read_write = Pipe(), os.pipe()

    def creator() -> None:
        store = tagged.create(name, 8)
        store.native.allocate(5)
        child = os.fork()
        if child == 0:
            tagged.insert(store, [1])
            pipe.say()
            signal.pause()
            os._exit(0)
        os.write(read_write[1], child.to_bytes(4, "little"))
        signal.pause()

    middle = fork(creator)
    child = int.from_bytes(os.read(read_write[0], 4), "little")
    pipe.hear()
    with gt.Store.open(name) as store:
        try:
            assert store.native.live_clients() == 3
            kill(middle)
            assert store.native.live_clients() == 2  # the child's memory keeps none of its parent's leases
            assert store.reap() == 1
            assert store.stats()["reclaimed"] == 5
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_handle_that_was_closed_is_closed_in_a_forked_child(name, fork):
    store = gt.Store.create(name, X, capacity=2)
    store.close()

    def child() -> None:
        for refused in (store.keys, store.row, lambda: len(store)):
            with pytest.raises(StoreClosedError):
                refused()
        store.close()

    assert wait_for(fork(child)) == 0


# --- a clean end ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("killed", [True, False], ids=["killed in the lock", "closed"])
def test_a_forked_child_that_outlives_the_others_decides_whether_the_end_was_clean(killed, tmp_path, fork):
    path = tmp_path / "store"
    store = tagged.create(path, 8)
    tagged.insert(store, [1, 2, 3])
    go, there = Pipe(), Pipe()

    def outlive() -> None:
        go.hear()
        tagged.insert(store, [4])
        if killed:
            segment = Segment(store)
            segment.lock()
            status = np.frombuffer(segment.bytes, np.uint32, 8 * 12, 32768).reshape(8, 12)
            status[:4, 8:10] = 3  # the list that a death in the middle of it leaves: a circle
            there.say()
            signal.pause()
        store.close()

    child = fork(outlive)
    store.close()
    go.say()
    if killed:
        there.hear()
        kill(child)
        with pytest.raises(StaleStoreError):
            gt.Store.open(path)
    else:
        assert wait_for(child) == 0
    with gt.Store.open(path, adopt=killed) as after:
        assert after.audit() == []
        assert len(after) == 4
        assert tagged.mixed(gt.fetch(after, after.keys(), output="numpy", threads=1)) == []


# --- rows of forks and of spawned workers ------------------------------------------------------------------------


def test_a_forked_child_inserts_and_updates_as_a_process_of_its_own(name, fork):
    with tagged.create(name, capacity=8) as store:
        mine = store.row(zeros=tagged.FIELDS)
        mine.length = 1

        def child() -> int:
            keys = tagged.insert(store, [1, 2])
            store.update_priorities(keys, 3.0)
            with pytest.raises(StaleKeyError, match="not being written by this process"):
                mine.commit()
            return store.native.live_clients()

        assert wait_for(fork(child)) == 2
        assert len(store) == 2
        assert store.stats()["writing"] == 1
        mine["tag"] = 5
        mine.commit()
        assert len(store) == 3
        assert store.native.live_clients() == 1 or store.reap() == 1
        assert store.audit() == []


def test_the_rows_of_a_killed_parent_come_back_while_its_child_lives(name, fork):
    with tagged.create(name, capacity=8) as store:
        pipe = Pipe()
        read, write = os.pipe()

        def parent() -> None:
            store.native.allocate(5)
            child = os.fork()
            if child == 0:
                tagged.insert(store, [1])
                pipe.say()
                signal.pause()
                os._exit(0)
            os.write(write, child.to_bytes(4, "little"))
            signal.pause()

        middle = fork(parent)
        child = int.from_bytes(os.read(read, 4), "little")
        pipe.hear()
        assert store.native.live_clients() == 3
        kill(middle)
        assert store.native.live_clients() == 2  # the child shares none of its parent's leases
        assert store.reap() == 1
        assert store.stats()["reclaimed"] == 5
        os.kill(child, signal.SIGKILL)
        deadline_s = time.monotonic() + patience(20)
        while store.native.live_clients() > 1 and time.monotonic() < deadline_s:
            time.sleep(0.001)  # it is another process's child, so there is nothing to wait on
        tagged.assert_sound(store)


def test_a_forked_child_that_never_touches_the_store_leaves_no_trace(name, fork):
    with tagged.create(name, capacity=8) as store:
        tagged.insert(store, [1])
        assert wait_for(fork(lambda: None)) == 0
        assert store.native.live_clients() == 1
    with pytest.raises(StoreMissingError):
        gt.Store.open(name)


def test_a_child_that_outlives_the_last_process_is_told_that_the_store_is_gone(name, fork):
    store = tagged.create(name, capacity=8)
    go = Pipe()

    def late() -> int:
        go.hear()
        try:
            store.keys()
        except StoreClosedError as error:
            return 7 if "removed" in str(error) else 1
        return 2

    child = fork(late)
    store.close()
    go.say()
    assert wait_for(child) == 7


def _insert_from_spawned(store: gt.Store, tag: int) -> None:
    tagged.insert(store, [tag])
    store.close()


def test_a_store_travels_to_spawned_processes_by_pickle(name):
    with tagged.create(name, capacity=8) as store:
        process = multiprocessing.get_context("spawn").Process(target=_insert_from_spawned, args=(store, 42))
        process.start()
        process.join()
        assert process.exitcode == 0
        batch = gt.fetch(store, store.keys(), output="numpy")
        assert batch["tag"].tolist() == [42]
        assert tagged.mixed(batch) == []
        assert store.native.live_clients() == 1
