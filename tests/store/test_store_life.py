"""The life of a handle of a store: closed, closed beside calls of other threads, and at the interpreter's end."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tagged
from deadlines import patience
from segments import Pipe, Segment, holding_the_lock, wait_for
from value_rows import X

import geartrain as gt
import geartrain._native as _native
from geartrain.errors import (
    LockTimeoutError,
    ReadOnlyStoreError,
    SchemaError,
    StoreClosedError,
    StoreError,
    StoreFullError,
)

# --- a closed handle --------------------------------------------------------------------------------------------


#: Every method of the native store, with arguments that a store of four int64 rows takes.
ONE, DOUBLE, WIDE = np.array([0], np.uint32), np.array([1.0]), np.array([0], np.uint64)

NATIVE_CALLS: dict[str, tuple[Any, ...]] = {
    "counters": (),
    "set_counters": ({"inserted": 77},),
    "column": (0,),
    "segment": (),
    "layout": (),
    "allocate": (1,),
    "allocate_one": (),
    "take_block": (set(), "x", 0, 0),
    "commit": (ONE, None, None, None),
    "commit_one": (0, 1, 1.0, 0),
    "publish_one": (0, 1, 1.0, 0),
    "limit": (True, 1.0, 1, 9.0, True, False),
    "limiter": (),
    "limited": (),
    "limited_by_steps": (),
    "admit_inserts": (1, 0.0),
    "admit_samples": (1, 0.0),
    "give_back": (1, 1),
    "new_priority": (),
    "max_priority": (),
    "restore_max_priority": (1,),
    "reset_max_priority": (),
    "seal_segment": (),
    "extend": (0, 1),
    "seal_one": (0,),
    "abandon": (ONE,),
    "abandon_one": (0,),
    "insert": (1, [(0, np.zeros((1, 8), np.int64)[:, 0])], None, None, None, 1),
    "rewrite": (ONE, ONE, [(0, np.zeros((1, 8), np.int64)[:, 0])], None, None),
    "apply_updates": (ONE, ONE, None, None, DOUBLE),
    "update_priorities": (ONE, ONE, DOUBLE),
    "update_step_priorities": (ONE, ONE, ONE, DOUBLE),
    "step_priorities": (ONE, ONE, ONE),
    "sums_of_steps": (ONE,),
    "copy_step_priorities": (ONE, ONE, ONE),
    "raise_priorities": (2.0,),
    "keep_segment": (),
    "set_times_sampled": (ONE, ONE, ONE),
    "advance_sequence": (9,),
    "remove": (ONE, ONE),
    "count_samples": (ONE, ONE),
    "release_exhausted": (ONE, ONE),
    "expire": (),
    "keys": (),
    "free_rows": (),
    "infos": (ONE,),
    "restore": (ONE, ONE, ONE, ONE, ONE, WIDE, WIDE, WIDE.astype(np.int64), 1),
    "lengths": (ONE,),
    "set_journal": (b"/nowhere", False, 1),
    "journal_changes": (0, np.zeros(4, np.uint32), np.zeros(4, np.uint64), False),
    "journal_state": (),
    "journal_count": (0, 0, 0, 0),
    "await_journal_request": (0, 0.0),
    "journal_passed": (1, 1),
    "journal_failed": (0,),
    "request_journal_priorities": (),
    "sync_journal": (0.0,),
    "live_clients": (),
    "closed_in_order": (),
    "clients": (),
    "lock_holder": (),
    "committed_count": (),
    "step_count": (),
    "step_count_up_to": (1,),
    "counted_steps": (0, 1),
    "total_priority": (),
    "next_sequence": (),
    "reap": (),
    "rebuild": (),
    "audit": (),
    "unlink": (),
    "insert_with_spans": (1, [], np.zeros((1, 1), np.uint32), None, None, 1, 0.0),
    "claim_rows": (1, 1, 0, 0, 0.0),
    "release_rows": (1, ONE, ONE, ONE.astype(np.uint16)),
    "drop_rows": (1, ONE, ONE, ONE.astype(np.uint16)),
    "owned_rows": (1, ONE, ONE, ONE.astype(np.uint16)),
    "claim_again": (1, ONE, ONE, ONE.astype(np.uint16), 0),
    "claim_for_others": (),
    "lengths_of_rows": (ONE, ONE),
    "write_rows": (0, 1, 0, ONE, ONE, None, [], np.zeros((1, 1), np.uint32), 0, False, None, 1, 0.0),
    "appended_parts": (1, 0, 1, 1, []),
    "task_figures": (),
    "oldest_claim": (1,),
    "occupancy": (),
    "rows_left": (),
    "advance": (1,),
    "check_in_flight": (1,),
    "clock": (),
    "complete": (1,),
    "finished": (1,),
    "free_taken": (1,),
    "kept_alone_stop": (1,),
    "limit_tasks": (1, 1),
    "saved_before": (),
    "say_version": (1, ONE, ONE, ONE.astype(np.uint16), 1),
    "set_clock": (1,),
    "stale_rows": (ONE, ONE),
    "begin_load": (),
    "changed_parts": (0,),
    "copy_parts": (np.zeros((1, 88), np.uint8),),
    "load_parts": (np.zeros((1, 88), np.uint8), np.zeros(0, np.uint8), np.zeros(2, np.uint64)),
    "finish_load": (np.zeros((1, 40), np.uint8), 1),
    "task_state": (),
    "restore_task_state": ({},),
    "settle_journal": ("inserted", True),
    "taken": (1,),
    "taken_steps": (),
    "untake": (1,),
    "end_inserts": (),
    "is_over": (1,),
}

#: What a closed store still tells: what it was, and that it is closed.
ALLOWED = {"create", "attach", "describe", "close", "closed", "read_only", "timeout_s"}

#: What a store that was opened read-only may do.
READS = {
    "counters", "column", "segment", "layout", "limiter", "limited", "keys", "infos", "lengths", "live_clients",
    "closed_in_order", "clients", "lock_holder",
    "committed_count", "step_count", "step_count_up_to", "counted_steps", "limited_by_steps",
    "total_priority", "next_sequence", "unlink", "keep_segment", "journal_state",
    "new_priority", "max_priority",
}  # fmt: skip

#: What reads priorities of steps: a store without any says so.
READS_STEPS = {"step_priorities", "sums_of_steps", "copy_step_priorities"}

#: Of stores with axes or tasks: any other store says that it has none.
OF_TASKS = {
    "insert_with_spans", "claim_rows", "release_rows", "drop_rows", "owned_rows", "lengths_of_rows", "write_rows",
    "appended_parts", "task_figures", "oldest_claim", "occupancy", "rows_left", "end_inserts", "is_over",
    "advance", "check_in_flight", "clock", "complete", "finished", "free_taken", "kept_alone_stop", "limit_tasks",
    "saved_before", "say_version", "set_clock", "stale_rows", "taken", "taken_steps", "untake", "claim_again",
    "claim_for_others", "begin_load", "changed_parts", "copy_parts", "load_parts", "finish_load", "task_state",
    "restore_task_state",
}  # fmt: skip

#: No effect on a store without max_age_s, max_times_sampled or a journal.
NOTHING_TO_DO = {"expire", "release_exhausted", "settle_journal"}

#: What counts nothing through a handle that was opened read-only.
NOT_COUNTED = {"count_samples", "give_back"}


def call(native: _native.Store, method: str) -> Any:
    found = getattr(native, method)
    return found(*NATIVE_CALLS[method]) if callable(found) else found


def methods() -> list[str]:
    return sorted(each for each in dir(_native.Store) if not each.startswith("_") and each not in ALLOWED)


@pytest.mark.parametrize("options", [{}, {"max_age_s": 9.0, "max_times_sampled": 3}], ids=["plain", "limits"])
def test_a_closed_handle_refuses_every_call_and_changes_nothing_in_the_living_segment(name, options):
    with gt.Store.create(name, X, capacity=4, **options) as living:
        living.insert({"x": np.arange(2)})
        handle = gt.Store.open(name)
        candidates = gt.selection.Candidates.of_store(handle.native, handle.column)
        limiter, row = handle.limiter, handle.row()
        handle.close()
        before = (living.stats(), living.limiter.state(), living.path.read_bytes())
        for method in methods():
            with pytest.raises(StoreClosedError, match="was closed"):
                call(handle.native, method)
        for refused in (
            lambda: limiter.set(samples_per_insert=2),
            limiter.off,
            limiter.state,
            lambda: limiter.admit_inserts(1),
            lambda: limiter.give_back(samples=1),
            lambda: len(handle),
            handle.stats,
            handle.status,
            row.commit,
            candidates.native.total_priority,
            candidates.native.count,
            lambda: candidates.native.draw(True, 0, 0, 0, ONE),
            lambda: candidates.native.find(True, np.zeros(1, np.uint64)),
            lambda: _native.empty_batch(handle.native, 1, [0], 0),
            gt.selection.Candidates.of_store(handle.native, handle.column).native.count,
        ):
            with pytest.raises(StoreClosedError, match="was closed"):
                refused()
        assert (living.stats(), living.limiter.state(), living.path.read_bytes()) == before
        assert handle.native.describe()["capacity"] == 4
        row.abandon()  # of a row that the close gave back: no effect, no error
        handle.close()


def test_a_read_only_look_refuses_every_call_that_would_write(name, fork):
    with gt.Store.create(name, X, capacity=4) as store:
        store.insert({"x": np.arange(2)})
        store.limiter.set(samples_per_insert=2, min_size_to_sample=1, error_buffer=8)
        before = store.path.read_bytes()

        def write_to_it() -> None:  # in a process of its own: a write that is not refused ends it
            look = gt.Store.open(name, mode="r")
            for method in methods():
                if method in READS | NOTHING_TO_DO | NOT_COUNTED:
                    call(look.native, method) if method != "unlink" else None
                    continue
                if method in READS_STEPS:
                    with pytest.raises(SchemaError, match="priorities of rows"):
                        call(look.native, method)
                    continue
                if method in OF_TASKS:
                    with pytest.raises(SchemaError, match="neither axes nor tasks"):
                        call(look.native, method)
                    continue
                with pytest.raises(ReadOnlyStoreError, match="mode='r'"):
                    call(look.native, method)
            for refused in (
                lambda: look.limiter.set(samples_per_insert=1),
                look.limiter.off,
                lambda: look.insert({"x": np.arange(1)}),
                lambda: gt.Replay(look, gt.selection.Uniform(), 1),
            ):
                with pytest.raises(ReadOnlyStoreError, match="mode='r'"):
                    refused()

        assert wait_for(fork(write_to_it)) == 0
        assert store.path.read_bytes() == before


# --- closing beside calls ---------------------------------------------------------------------------------------


def _inserts(store: gt.Store) -> None:
    tagged.insert(store, [1, 2])


def _writes_rows(store: gt.Store) -> None:
    with store.row(zeros=store.fields) as row:
        row["tag"] = 1
        row.length = 1


def _extends(store: gt.Store) -> None:
    with store.row(zeros=store.fields) as row:
        row.publish(length=1)
        for length in range(2, 12):
            row.extend(length)


def _updates(store: gt.Store) -> None:
    keys = store.keys()
    many = keys[np.arange(500) % len(keys)] if len(keys) else keys
    store.update_priorities(many, np.ones(len(many)))


def _samples(store: gt.Store) -> None:
    keys = store.keys()
    store.native.count_samples(keys.row, keys.generation)
    store.native.release_exhausted(keys.row, keys.generation)


def _fetches(store: gt.Store) -> None:
    gt.fetch(store, store.keys(), output="numpy", threads=2, on_stale="drop")


def _draws(store: gt.Store) -> None:
    gt.selection.Candidates.of_store(store.native, store.column).native.draw(True, 0, 0, 0, ONE)


def _looks(store: gt.Store) -> None:
    store.audit()
    store.stats()
    store.status()
    store.limiter.state()


def _waits_for_the_limiter(store: gt.Store) -> None:
    store.limiter.admit_samples(1, 20.0)


CALLS: dict[str, tuple[Callable[[gt.Store], None], dict[str, Any]]] = {
    "inserts": (_inserts, {}),
    "rows": (_writes_rows, {}),
    "open rows": (_extends, {}),
    "updates": (_updates, {}),
    "updates with the lock": (_updates, {"remover": "lowest_priority"}),
    "samples": (_samples, {"max_times_sampled": 2}),
    "fetches": (_fetches, {}),
    "draws": (_draws, {}),
    "looks": (_looks, {}),
    "waits": (_waits_for_the_limiter, {}),
}


def _close_beside(store: gt.Store, one: Callable[[gt.Store], None], threads: int, delay_s: float) -> list[str]:
    """Closes a handle while threads use it; what they ended with, where it is not that it was closed."""
    wrong: list[str] = []

    def use() -> None:
        try:
            while True:
                with contextlib.suppress(StoreFullError):
                    one(store)
        except StoreClosedError:
            pass
        except BaseException as error:
            wrong.append(repr(error))

    users = [threading.Thread(target=use) for _ in range(threads)]
    for user in users:
        user.start()
    time.sleep(delay_s)  # the random instant itself
    store.close()
    for user in users:
        user.join(patience(20))
        if user.is_alive():
            wrong.append("a call never ended")
    return wrong


def _race(name: str, kind: str, rounds: int, seed: int) -> int:
    choose = random.Random(seed)
    one, options = CALLS[kind]
    with tagged.create(name, **options) as living:
        tagged.insert(living, np.arange(6))
        if kind == "waits":
            living.limiter.set(min_size_to_sample=living.capacity)
        for _ in range(rounds):
            wrong = _close_beside(gt.Store.open(name), one, 2, choose.random() * 0.002)
            problems = living.audit()
            clients = living.native.live_clients()
            if wrong or problems or clients != 1 or living.stats()["writing"]:
                print(kind, wrong, problems, clients, living.stats())
                return 1
    return 0


@pytest.mark.parametrize("kind", CALLS)
def test_a_close_beside_calls_of_other_threads_ends_them_and_leaves_the_store_sound(kind, name, fork):
    assert wait_for(fork(lambda: _race(name, kind, 20, seed=1))) == 0


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", CALLS)
def test_a_thousand_closes_beside_calls_of_other_threads(kind, name, fork):
    assert wait_for(fork(lambda: _race(name, kind, 1000, seed=2))) == 0


def test_of_threads_that_close_a_handle_at_once_each_returns_when_it_is_left(name, fork):
    def close_together() -> int:
        for _ in range(40):
            store = gt.Store.create(name, X, capacity=2)
            start, again = threading.Barrier(3), []

            def close(store: gt.Store = store, start: threading.Barrier = start, again: list[bool] = again) -> None:
                start.wait()
                store.close()
                again.append(store.path.exists())

            threads = [threading.Thread(target=close) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if again != [False] * 3:
                return 1
        return 0

    assert wait_for(fork(close_together)) == 0


@pytest.mark.parametrize("wait", ["insert", "sample"])
def test_a_close_beside_a_wait_for_the_limiter_returns_within_a_second(wait, name):
    store = gt.Store.create(name, X, capacity=8)
    store.limiter.set(samples_per_insert=1, min_size_to_sample=2, error_buffer=1)
    if wait == "insert":
        store.insert({"x": np.arange(3)})
    ended: list[BaseException] = []
    waiting = threading.Event()

    def block() -> None:
        waiting.set()
        try:
            (store.native.admit_inserts if wait == "insert" else store.native.admit_samples)(1, 1000.0)
        except StoreClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=block, daemon=True)
    thread.start()
    waiting.wait()
    while store.native.limiter()[f"{wait}_wait_s"] == 0 and Segment(store).limiter_waiters() == 0:
        time.sleep(0.001)
    began = time.monotonic()
    store.close()
    assert time.monotonic() - began < patience(1)
    thread.join(patience(5))
    assert len(ended) == 1


def test_a_close_ends_a_wait_for_a_lock_whose_holder_is_stopped(name, fork):
    with gt.Store.create(name, X, capacity=8) as living:
        store = gt.Store.open(name, timeout_s=1000.0)
        pipe, go = Pipe(), Pipe()
        child = holding_the_lock(store, fork, pipe, go.hear)
        pipe.hear()
        ended: list[BaseException] = []

        def block() -> None:
            try:
                store.keys()
            except StoreError as error:
                ended.append(error)

        blocked, closing = threading.Thread(target=block), threading.Thread(target=store.close)
        blocked.start()
        closing.start()
        blocked.join(patience(10))
        assert [type(error) for error in ended] == [StoreClosedError]
        assert closing.is_alive()  # it takes the lock itself, to leave in good order
        go.say()
        closing.join(patience(10))
        assert not closing.is_alive()
        assert wait_for(child) == 0
        assert living.native.live_clients() == 1
        assert living.audit() == []


# --- the interpreter's lock -------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", ["free_rows", "dropped"])
def test_a_wait_for_the_segments_lock_lets_other_threads_of_the_interpreter_run(wait, name, fork):
    with gt.Store.create(name, X, capacity=8) as living:
        handles = [gt.Store.open(name, timeout_s=patience(6))]
        pipe, go = Pipe(), Pipe()
        child = holding_the_lock(living, fork, pipe, go.hear)
        pipe.hear()
        started, outcome = threading.Event(), []

        def block() -> None:
            started.set()
            try:
                if wait == "dropped":
                    handles.clear()  # the destructor leaves the store
                else:
                    outcome.append(len(handles[0].native.free_rows()))
            except LockTimeoutError as error:
                outcome.append(error)

        thread = threading.Thread(target=block)
        thread.start()
        started.wait()
        time.sleep(0.05)  # without the interpreter's lock this takes until the other's timeout
        go.say()
        assert wait_for(child) == 0
        thread.join()
        if wait == "free_rows":
            assert outcome == [8]
            handles[0].close()
        assert Segment(living).clients_in_use() == 1


# --- the interpreter's end ---------------------------------------------------------------------------------------


PROGRAM = """
import sys, threading, time
import numpy as np
import geartrain as gt

name, what = sys.argv[1:]
store = gt.Store.create(name, {"x": gt.Field((), "int64", per_row=True)}, capacity=512)
if what == "limiter":
    store.limiter.set(min_size_to_sample=512)
started = threading.Event()

def use():
    started.set()
    while True:
        if what == "limiter":
            store.native.admit_samples(1, 1000.0)
        elif what == "inserts":
            store.insert({"x": np.arange(32)})
        else:
            store.audit()

for _ in range(3):
    threading.Thread(target=use, daemon=True).start()
started.wait()
time.sleep(0.01)
print("ending")
"""


@pytest.mark.parametrize("what", ["limiter", "inserts", "audits"])
def test_daemon_threads_in_calls_at_the_interpreters_end_neither_abort_it_nor_leave_the_segment(what, name):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, what], capture_output=True, text=True, timeout=patience(60), check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ending\n", "")
    # The `name` fixture fails where the segment is left.
