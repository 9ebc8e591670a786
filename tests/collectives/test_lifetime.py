"""Life of groups: close beside everything, groups that are dropped or alive at the interpreter's end."""

from __future__ import annotations

import contextlib
import gc
import mmap
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from collectives_crew import MemoryStore, group_of
from deadlines import patience

from geartrain.collectives import Group, Reducer
from geartrain.core import process_report
from geartrain.core.threads import DaemonThread
from geartrain.errors import ArgumentError, CollectiveClosedError, ConnectionClosedError, GeartrainError, RankLostError


def groups_of(world_size: int, **options: Any) -> list[Group]:
    store = MemoryStore()
    groups: list[Any] = [None] * world_size

    def make(rank: int) -> None:
        groups[rank] = group_of(rank, world_size, store=store, timeout_s=patience(20), **options)

    in_threads(*(lambda rank=rank: make(rank) for rank in range(world_size)))  # type: ignore[misc]
    return groups


def in_threads(*calls: Callable[[], Any]) -> None:
    """Runs all at once; raises what one has raised, and fails when one hangs."""
    raised: list[BaseException] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(60))
    assert not any(thread.is_alive() for thread in threads), "a call hangs"
    if raised:
        raise raised[0]


def mapped_array(count: int) -> Any:
    """An array in a mapping of its own: what writes there after it was dropped is a SIGSEGV."""
    array = np.frombuffer(mmap.mmap(-1, 4 * count), np.float32)
    array.fill(1)
    return array


def late(random_: random.Random, call: Callable[[], Any], *may_raise: type[BaseException]) -> Callable[[], None]:
    delay_s = random_.random() * 2e-3

    def run() -> None:
        time.sleep(delay_s)
        with contextlib.suppress(*may_raise):
            call()

    return run


ROUNDS = [10, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("reduced", [False, True])
def test_a_group_is_closed_by_threads_at_once_beside_its_other_calls(rounds: int, reduced: bool) -> None:
    dice = random.Random(3)
    for _ in range(rounds):
        close_beside_everything(dice, Reducer(transport="tcp") if reduced else None)


def close_beside_everything(dice: random.Random, reducer: Reducer | None) -> None:
    options = {} if reducer is None else {"reducers": [reducer.address], "on_reducer_loss": "continue"}
    group, other = groups_of(2, **options)
    arrays = [np.ones(20_000, np.float32) for _ in range(4)]
    calls = [
        late(dice, group.close),
        late(dice, group.close),
        late(dice, lambda: group.close(0.0)),
        late(dice, group.counters, CollectiveClosedError),
        late(dice, group.error),
        late(dice, lambda: group.all_reduce(arrays[0]), CollectiveClosedError, RankLostError),
        late(dice, lambda: group.all_reduce_async(arrays[1]), CollectiveClosedError),
        late(dice, lambda: other.all_reduce(arrays[2]), GeartrainError),
        late(dice, lambda: other.all_reduce(arrays[3]), GeartrainError),
    ]
    if reducer is not None:
        calls += [late(dice, lambda: reducer.close(0.0)), late(dice, lambda: reducer.close(0.0))]
    in_threads(*calls)
    for call in (lambda: group.all_reduce(arrays[0]), group.counters):
        with pytest.raises(CollectiveClosedError):
            call()
    group.close()
    group.abort("too late")
    assert isinstance(group.error(), GeartrainError)
    other.close(0.0)
    if reducer is not None:
        with pytest.raises(ConnectionClosedError):
            reducer.metrics()


def test_a_close_beside_a_blocked_wait_returns_and_ends_the_wait() -> None:
    group, other = groups_of(2)
    ended: list[Any] = []

    def wait() -> None:
        began = time.monotonic()
        with pytest.raises(CollectiveClosedError):
            work.wait()
        ended.append(time.monotonic() - began)

    work = group.all_reduce_async(np.ones(50_000, np.float32), timeout_s=3600)
    waiter = threading.Thread(target=wait)
    waiter.start()
    began = time.monotonic()
    group.close(timeout_s=3600)
    waiter.join()
    assert time.monotonic() - began < patience(1)
    assert ended
    with pytest.raises(RankLostError, match="rank 0 has left"):
        other.all_reduce(np.ones(50_000, np.float32))
    other.close()


def test_a_close_ends_waits_for_a_rank_that_takes_over_from_a_lost_reducer() -> None:
    reducer = Reducer(transport="tcp")
    group, other = groups_of(2, reducers=[reducer.address], shares=[0, 0, 1], on_reducer_loss="continue")
    work = group.all_reduce_async(np.ones(50_000, np.float32), timeout_s=3600)
    raised: list[BaseException] = []

    def wait() -> None:  # for the other rank, which does nothing
        try:
            work.wait()
        except BaseException as error:
            raised.append(error)

    waiters = [threading.Thread(target=wait) for _ in range(2)]
    for waiter in waiters:
        waiter.start()
    reducer.close(0.0)
    until_s = time.monotonic() + patience(20)
    while group.counters()["lost_reducers"] == 0 and time.monotonic() < until_s:
        time.sleep(0.001)
    began = time.monotonic()
    group.close(timeout_s=3600)
    for waiter in waiters:
        waiter.join(patience(20))
    assert time.monotonic() - began < patience(2)
    assert [type(error) for error in raised] == [CollectiveClosedError] * 2
    other.close(0.0)


@pytest.mark.parametrize("rounds", [3, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_arrays_live_until_a_dropped_group_has_ended(rounds: int) -> None:
    for _ in range(rounds):
        groups = groups_of(2)
        other = groups[1]
        of_other = [mapped_array(50_000) for _ in range(4)]
        dropped: list[int] = []

        def drop(number: int, other: Group = other, arrays: Any = of_other, seen: list[int] = dropped) -> None:
            # As soon as the first array is given up, the results for all come.
            if not seen:
                for array in arrays:
                    other.all_reduce_async(array)
            seen.append(number)
            time.sleep(0.02)

        arrays = [mapped_array(50_000) for _ in range(4)]
        callbacks = [weakref.ref(array, lambda _, i=i: drop(i)) for i, array in enumerate(arrays)]
        for array in arrays:
            groups[0].all_reduce_async(array)
        del array, arrays
        groups.clear()
        gc.collect()
        until_s = time.monotonic() + patience(30)  # a thread of the group's may hold it for an instant
        while len(dropped) < len(callbacks) and time.monotonic() < until_s:
            time.sleep(0.001)
        assert len(dropped) == len(callbacks)
        other.close(0.0)


SCRIPT = """
import mmap, sys, threading, time
import numpy as np
sys.path.insert(0, {support!r})
from collectives_crew import MemoryStore
from geartrain.collectives import Group, Reducer

arrays = [np.frombuffer(mmap.mmap(-1, 1_600_000), np.float32) for _ in range(40)]
store, groups, reducer = MemoryStore(), [None, None], Reducer()

def make(rank):
    groups[rank] = Group(rank, 2, store=store, reducers=[reducer.address])

threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
works = [groups[i % 2].all_reduce_async(array) for i, array in enumerate(arrays)]
if {daemon}:
    for work in works:
        threading.Thread(target=work.wait, daemon=True).start()
del {dropped}
"""


@pytest.mark.parametrize("dropped", ["arrays", "groups", "works", "store, groups, works"])
@pytest.mark.parametrize("daemon", [False, True])
def test_an_interpreter_ends_with_operations_under_way(dropped: str, daemon: bool) -> None:
    support = str(__import__("pathlib").Path(__file__).parents[1] / "support")
    script = SCRIPT.format(support=support, daemon=daemon, dropped=dropped)
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", script],
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr


def refused_thread(name: str) -> Callable[[DaemonThread], None]:
    """`DaemonThread.start` where the system has no more threads for those of this name."""
    start = DaemonThread.start

    def start_or_not(thread: DaemonThread) -> None:
        if thread.name == name:
            raise GeartrainError(f"cannot start the thread {name!r}")
        start(thread)

    return start_or_not


def test_a_group_whose_report_cannot_have_a_thread_works_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(process_report, "_reporter", process_report._Reporter())
    monkeypatch.setattr(DaemonThread, "start", refused_thread("geartrain-report"))
    first, second = groups_of(2)
    arrays = [np.ones(4, np.float32) for _ in range(2)]
    in_threads(lambda: first.all_reduce(arrays[0]), lambda: second.all_reduce(arrays[1]))
    assert arrays[0].tolist() == arrays[1].tolist() == [2.0] * 4
    assert "cannot start the thread 'geartrain-report'" in caplog.text
    first.close()
    second.close()


@pytest.mark.parametrize("options", [{}, {"hierarchical": True, "hosts": ["a", "b"]}])
def test_a_rank_that_gives_up_once_all_have_joined_tells_the_others_at_once(monkeypatch, options):
    def register_or_not(group: Group, *_: object) -> None:
        if group.rank == 1:
            raise ArgumentError("GEARTRAIN_REPORT_S is a number")

    monkeypatch.setattr("geartrain.collectives.group.register", register_or_not)
    store, told, took_s = MemoryStore(), [], []

    def join(rank: int) -> None:
        began_s = time.monotonic()
        try:
            group_of(rank, 2, store=store, timeout_s=300.0, host="127.0.0.1", **options).all_reduce(
                np.ones(4, np.float32)
            )
        except GeartrainError as error:
            told.append(str(error))
        took_s.append(time.monotonic() - began_s)

    in_threads(lambda: join(0), lambda: join(1))
    assert len(told) == 2
    assert all("GEARTRAIN_REPORT_S is a number" in text for text in told), told
    assert max(took_s) < patience(10)


@pytest.mark.skipif(not hasattr(threading._active_limbo_lock, "_is_owned"), reason="a handler cannot start a thread")  # type: ignore[attr-defined]
def test_a_hierarchical_group_is_closed_by_a_handler_that_interrupts_the_start_of_a_thread():
    first, second = groups_of(2, hierarchical=True, hosts=["a", "b"])
    closed = threading.Event()

    def close() -> None:
        with threading._active_limbo_lock:  # type: ignore[attr-defined]  # as `Thread.start` has it for an instant
            first.close(0.0)
        closed.set()

    threading.Thread(target=close, daemon=True).start()
    assert closed.wait(patience(10))
    second.close(0.0)
