"""Waits of ranks of one host that run the group's loop themselves: what they do, and what ends them."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from collectives_crew import run_ranks
from deadlines import patience

from geartrain.collectives import Group
from geartrain.errors import CollectiveClosedError, CollectiveTimeoutError

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from process_groups import ranks  # noqa: E402

from geartrain.collectives.torch_backend.options import BackendOptions  # noqa: E402

SPIN_US = 1e6


@pytest.mark.parametrize("spin_us", [None, 0, SPIN_US])
def test_collectives_are_right_however_long_waits_poll(spin_us: float | None) -> None:
    def body(rank: int, group: Group) -> dict[str, Any]:
        for count in (1, 100, 5000, 50_000):
            mine = np.arange(count, dtype=np.float32) + rank
            assert (group.all_reduce(mine) == 3 * np.arange(count, dtype=np.float32) + 3).all()
            works = [group.all_reduce_async(np.full(count, rank + i, np.int32)) for i in range(4)]
            assert all((work.wait() == 3 + 3 * i).all() for i, work in enumerate(works))
            parts = [np.full(count, 10 * rank + other, np.int64) for other in range(3)]
            assert (group.reduce_scatter(parts, np.empty(count, np.int64)) == 30 + 3 * rank).all()
            given = [np.empty(count, np.int64) for _ in range(3)]
            assert [one[0] for one in group.all_to_all(parts, given)] == [rank, 10 + rank, 20 + rank]
            group.all_gather(np.full(count, rank, np.int64), given)
            assert [one[-1] for one in given] == [0, 1, 2]
            assert (group.broadcast(np.full(count, rank), root=1) == 1).all()
        return group.counters()

    found = run_ranks(3, body, spin_us=spin_us)
    assert all(isinstance(one, dict) for one in found), found


def test_ranks_that_own_their_cores_do_their_operations_themselves_and_others_do_not() -> None:
    def body(_: int, group: Group) -> dict[str, Any]:
        array = np.ones(1000, np.float32)
        for _i in range(300):
            group.all_reduce(array)
        return group.counters()

    spinning = run_ranks(2, body, spin_us=SPIN_US)
    assert all(one["operations"] == 300 and one["by_callers"] > 200 for one in spinning), spinning

    over_tcp = run_ranks(2, body, spin_us=SPIN_US, transport="tcp")
    assert all(one["operations"] == 300 and one["by_callers"] == 0 for one in over_tcp), over_tcp


def test_operations_that_nobody_waits_for_are_done_meanwhile() -> None:
    def body(_: int, group: Group) -> None:
        for _i in range(5):
            work = group.all_reduce_async(np.ones(1000, np.float32))
            until_s = time.monotonic() + patience(0.7)
            while not work.done() and time.monotonic() < until_s:
                time.sleep(0.002)
            assert work.done()

    assert run_ranks(2, body, spin_us=SPIN_US) == [None, None]


def test_a_wait_that_spins_ends_at_its_deadline_and_names_who_is_late() -> None:
    over = threading.Event()

    def body(rank: int, group: Group) -> Any:
        group.all_reduce(np.ones(4))
        if rank == 1:
            return over.wait(patience(30))
        began_s = time.monotonic()
        work = group.all_reduce_async(np.ones(4), timeout_s=1.5)
        with pytest.raises(CollectiveTimeoutError):
            work.wait(0.2)  # of this wait only
        assert time.monotonic() - began_s < patience(1.0)
        with pytest.raises(CollectiveTimeoutError) as caught:
            work.wait()
        over.set()
        assert caught.value.ranks == (1,)
        return time.monotonic() - began_s

    late_s, _ = run_ranks(2, body, over.set, spin_us=1e8)
    assert 1.4 < late_s < patience(3.0), late_s


def test_ctrl_c_ends_a_wait_that_spins() -> None:
    connected, over = threading.Event(), threading.Event()
    groups: list[Group] = []

    def body(rank: int, group: Group) -> None:
        if rank == 0:
            groups.append(group)
            connected.set()
        over.wait(patience(30))
        group.close(0.0)

    others = threading.Thread(target=run_ranks, args=(2, body, connected.set), kwargs={"spin_us": 1e8})
    others.start()
    assert connected.wait(patience(20)) and groups
    try:
        work = groups[0].all_reduce_async(np.ones(4))
        began_s = time.monotonic()
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        assert time.monotonic() - began_s < patience(2.0)
    finally:
        over.set()
        others.join(patience(30))
    assert not others.is_alive()


def test_close_by_another_thread_ends_a_wait_that_spins() -> None:
    over = threading.Event()

    def body(rank: int, group: Group) -> Any:
        if rank == 1:
            return over.wait(patience(30))
        work = group.all_reduce_async(np.ones(4))
        closing = threading.Timer(0.2, group.close)
        began_s = time.monotonic()
        closing.start()
        with pytest.raises(CollectiveClosedError):
            work.wait()
        took_s = time.monotonic() - began_s
        over.set()
        closing.join()
        return took_s

    took_s, _ = run_ranks(2, body, over.set, spin_us=1e8)
    assert took_s < patience(2.0), took_s


def test_a_forked_child_beside_a_wait_that_spins_ends() -> None:
    def body(rank: int, group: Group) -> Any:
        if rank == 1:
            time.sleep(0.3)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    group.all_reduce(np.ones(4))
                except CollectiveClosedError:
                    code = 0
                finally:
                    os._exit(code)
            until_s = time.monotonic() + patience(20)
            while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until_s:
                time.sleep(0.01)
            group.all_reduce(np.ones(4))
            return ended[1]
        group.all_reduce(np.ones(4))
        return 0

    assert run_ranks(2, body, spin_us=1e8) == [0, 0]


def test_torchs_backend_spins_where_its_call_waits() -> None:
    def body(group: Any, _: int) -> Any:
        opts = dist.AllreduceOptions()
        opts.asyncOp = False
        for _i in range(200):
            group.allreduce([torch.ones(100)], opts).wait()
            group.barrier(None, None).wait()
        return group.counters()["groups"]["cpu"]

    found = ranks(2, body, options=BackendOptions(spin_us=SPIN_US))
    assert all(one["operations"] == 400 and one["by_callers"] > 200 for one in found), found
