"""Which functions run at once: slow ones, waiting ones and blocked ones hold up nobody else."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from deadlines import patience
from rpc_functions import gate

from geartrain import rpc
from geartrain.errors import WaitTimeoutError
from geartrain.rpc.registry import functions


def test_a_slow_function_holds_up_its_peers_own_calls_until_given_up_and_nobody_elses(
    pair: tuple[rpc.Node, rpc.Node],
) -> None:
    server, client = pair
    with rpc.Node("other", peers={"server": server.address}, timeout_s=patience(10)) as other:
        long_s = patience(10)
        gate.clear()
        slow = client.call_async("server", "pass_gate", timeout_s=long_s)
        behind = client.call_async("server", "add", 1, 2, timeout_s=long_s)
        assert other.call("server", "add", 3, 4) == 7
        assert not behind.done()
        gate.set()
        assert behind.result() == 3
        assert slow.done()
        gate.clear()
        beside = client.call_async("server", "pass_gate_beside", timeout_s=long_s)
        assert client.call("server", "add", 1, 2, timeout_s=long_s) == 3
        assert not beside.done()
        gate.set()
        assert beside.result() is True
        gate.clear()
        endless = client.call_async("server", "pass_gate", timeout_s=0.1)
        behind = client.call_async("server", "add", 5, 6, timeout_s=long_s)
        with pytest.raises(WaitTimeoutError):
            endless.result()
        assert behind.result() == 11
        gate.set()


def test_functions_that_wait_for_calls_of_their_own_need_no_thread_of_the_pool() -> None:
    one = rpc.NodeOptions(max_threads=1, max_running=1)
    with rpc.Node("a", timeout_s=patience(20), options=one) as a:
        with rpc.Node("b", timeout_s=patience(20), options=one, peers={"a": a.address}) as b:
            a.directory.known["b"] = b.address

            @rpc.function(name="deep")
            def deep(depth: int, here: str, there: str) -> int:
                if depth == 0:
                    return 0
                return 1 + int((a if here == "a" else b).call(there, "deep", depth - 1, there, here))

            try:
                assert b.call("a", "deep", 20, "a", "b") == 20
                many = [b.call_async("a", "deep", 3, "a", "b") for _ in range(50)]
                assert [one.result() for one in many] == [3] * 50
            finally:
                del functions["deep"]


def test_functions_that_never_return_are_given_up_and_others_run() -> None:
    with rpc.Node("server", timeout_s=patience(20), options=rpc.NodeOptions(max_threads=2)) as server:
        nodes = [rpc.Node(f"n{i}", peers={"server": server.address}, timeout_s=patience(10)) for i in range(5)]
        nap_s = patience(8.0)
        for node in nodes:  # connected: the deadlines below are the calls' alone
            assert node.call("server", "add", 1, 1) == 2
        began_s = time.monotonic()
        stuck = [node.call_async("server", "sleep", nap_s, timeout_s=0.5) for node in nodes[:4]]
        others = [node.call_async("server", "nap", nap_s, timeout_s=0.5) for node in nodes[:4]]
        answer = nodes[4].call("server", "add", 1, 2)  # once a place is free: two functions run at most
        assert answer == 3
        assert time.monotonic() - began_s < nap_s / 2
        for one in stuck + others:
            with pytest.raises(WaitTimeoutError, match="'server'"):
                one.result()
        assert time.monotonic() - began_s < nap_s / 2
        for node in nodes:
            assert node.call("server", "add", 1, 2, timeout_s=patience(2)) == 3
            node.close()
        until_s = time.monotonic() + patience(3)
        while server.server.scheduler.backlog and time.monotonic() < until_s:
            time.sleep(0.01)
        assert not server.server.scheduler.backlog  # nobody waits for those that were given up


def test_blocked_functions_starve_nobody() -> None:
    # Twelve functions wait for an event that the thirteenth sets, and two begin at a time.
    event = threading.Event()
    rpc.function(name="hold")(lambda: event.wait(patience(10)))
    rpc.function(name="release")(event.set)
    try:
        with rpc.Node("server", timeout_s=patience(10), options=rpc.NodeOptions(max_running=2)) as server:
            nodes = [rpc.Node(f"n{i}", peers={"server": server.address}, timeout_s=patience(10)) for i in range(13)]
            held = [node.call_async("server", "hold") for node in nodes[:12]]
            began_s = time.monotonic()
            nodes[12].call("server", "release")
            assert [one.result() for one in held] == [True] * 12
            assert time.monotonic() - began_s < patience(3)
            for node in nodes:
                node.close()
    finally:
        del functions["hold"], functions["release"]


def test_few_functions_run_at_once_and_slow_ones_do_not_count() -> None:
    at_once, most, early, round_began_s = 0, 0, 0, 0.0
    lock = threading.Lock()

    @rpc.function(name="busy")
    def busy(ms: float) -> None:
        nonlocal at_once, most, early
        with lock:
            # Each of those that run had its 5 ms alone, however late the machine let any of them begin.
            early += time.monotonic() - round_began_s < 0.005 * at_once
            at_once += 1
            most = max(most, at_once)
        time.sleep(ms * 1e-3)
        with lock:
            at_once -= 1

    try:
        with rpc.Node("server", timeout_s=patience(20), options=rpc.NodeOptions(max_running=1)) as server:
            nodes = [rpc.Node(f"n{i}", peers={"server": server.address}, timeout_s=patience(20)) for i in range(6)]
            for node in nodes:
                assert node.call("server", "add", 1, 1) == 2
            for ms in [0.2] * 20 + [20.0] * 5:
                while at_once:
                    time.sleep(0.001)
                round_began_s = time.monotonic()
                for one in [node.call_async("server", "busy", ms) for node in nodes]:
                    one.result()
            assert early == 0
            most = 0
            for one in [node.call_async("server", "busy", 1000 * patience(0.2)) for node in nodes]:
                one.result()
            assert most >= 5
            for node in nodes:
                node.close()
    finally:
        del functions["busy"]


def _sleeps() -> dict[str, int]:
    """How often each thread of this process has gone to sleep, by its number."""
    counted = {}
    for status in Path("/proc/self/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                counted[status.parent.name] = int(line.split()[1])
    return counted


def test_the_threads_of_a_node_that_nobody_calls_sleep() -> None:
    others = set(_sleeps())
    with rpc.Node("idle"):
        time.sleep(0.3)  # its threads come to rest
        before = _sleeps()
        time.sleep(1.0)
        after = _sleeps()
    woken = sum(after[one] - before[one] for one in before.keys() & after.keys() - others)
    assert woken < 60  # those that looked every millisecond, for a fifth of the time, woke 200 times a second


def test_threads_that_wait_for_peers_of_an_idle_node_stay_asleep() -> None:
    with rpc.Node("quiet") as node:
        waiting = [t for t in threading.enumerate() if t.name.endswith((" accepts quiet", " serves quiet"))]
        assert len(waiting) == 3
        assert node.call("quiet", "add", 1, 2) == 3
        time.sleep(0.3)  # threads that served look for a while whether more comes
        before = _sleeps()
        time.sleep(1.5)  # in which each looked for signals six times, which only Python's main thread can handle
        after = _sleeps()
        assert sum(after[number] - before[number] for number in (str(t.native_id) for t in waiting)) <= 3


def test_a_callback_that_is_added_as_a_wait_ends_without_the_reply_is_called(
    pair: tuple[rpc.Node, rpc.Node],
) -> None:
    _, client = pair

    class ReleasedLater:
        """The lock of those who wait for a reply. Before its release another thread adds a callback."""

        def __init__(self, lock: Any) -> None:
            self.lock = lock
            self.armed = True

        def acquire(self, timeout: float = -1) -> bool:
            return bool(self.lock.acquire(timeout=timeout))

        def release(self) -> None:
            if self.armed:
                self.armed = False
                adding = threading.Thread(target=future.add_done_callback, args=(called.append,))
                adding.start()
                adding.join()
            self.lock.release()

        def _is_owned(self) -> bool:
            return bool(self.lock._is_owned())

    called: list[Any] = []
    gate.clear()
    future = client.call_async("server", "pass_gate_beside", timeout_s=patience(20))
    future._reading = ReleasedLater(future._reading)  # type: ignore[assignment]
    with pytest.raises(WaitTimeoutError):
        future.result(timeout_s=0.05)
    assert not called
    gate.set()
    until_s = time.monotonic() + patience(10)
    while not called:
        assert time.monotonic() < until_s, "nobody waits for the reply"
        time.sleep(0.001)
    assert called == [future]
    assert future.result() is True
