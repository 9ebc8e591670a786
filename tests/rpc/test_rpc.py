"""Named functions of named peers: answers, errors, deadlines, order, batches, and peers that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import preloaded
import pytest
from deadlines import patience, stop

from geartrain import _native, rpc
from geartrain.errors import (
    ArgumentError,
    BusyError,
    CallCancelledError,
    ConnectionClosedError,
    GeartrainError,
    MessageError,
    PeerLostError,
    RemoteError,
    UnknownPeerError,
    UntrustedPeerError,
    WaitTimeoutError,
)
from geartrain.rpc.registry import functions
from geartrain.transport.tls import TLS

TRANSPORTS = ("inproc", "shm", "tcp")


@rpc.function
def add(a: object, b: object) -> object:
    return a + b  # type: ignore[operator]


@rpc.function
def overwhelmed() -> None:
    raise BusyError("too much")


@rpc.function
def missing() -> None:
    {}["x"]  # type: ignore[index]


@rpc.function
def fail(text: str) -> None:
    raise ValueError(text)


@rpc.function(concurrent=True)
def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@rpc.function
def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


_gate = threading.Event()


@rpc.function
def pass_gate() -> bool:
    return _gate.wait(patience(30))


@rpc.function(concurrent=True)
def pass_gate_beside() -> bool:
    return _gate.wait(patience(30))


_seen: list[int] = []


@rpc.function
def note(number: int) -> int:
    _seen.append(number)
    return number


@rpc.function
async def later(value: object) -> object:
    await asyncio.sleep(0.01)
    return value


_batches: list[int] = []


@rpc.batched(max_size=4, max_wait_us=None)
def double(values: list[int]) -> list[int]:
    _batches.append(len(values))
    return [2 * value for value in values]


@rpc.batched(max_size=1000, max_wait_us=20_000)
def triple(values: list[int]) -> list[int]:
    _batches.append(len(values))
    return [3 * value for value in values]


@rpc.batched(max_size=3, max_wait_us=None, stack=True)
def total(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows).sum(axis=1)


@rpc.batched(max_size=3, max_wait_us=None, stack=True)
def halves(rows: np.ndarray, wrong: np.ndarray) -> dict[str, Any]:
    sums = np.asarray(rows).sum(axis=1)
    return {"half": rows / 2, "sum": sums[: len(sums) - int(wrong.max())]}


@rpc.batched(max_size=1)
def unstacked_dict(values: list[int]) -> dict[str, list[int]]:
    return {"value": values}


@rpc.batched(max_size=2, max_wait_us=None, max_queued=2)
def never_filled(values: list[int]) -> list[int]:
    return values


@rpc.function
class Counter:
    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, n: int) -> int:
        self.count += n
        return self.count

    def _hidden(self) -> None:
        raise AssertionError("nobody may call this")


def unregistered(x: int) -> int:
    return x + 1000


@pytest.fixture(params=[*TRANSPORTS, "tcp+tls"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[rpc.Node, rpc.Node]]:
    """Two nodes in this process that know each other, over one transport."""
    tls = request.getfixturevalue("loopback") if request.param == "tcp+tls" else None
    way: Any = {"timeout_s": 10, "transport": request.param.removesuffix("+tls"), "tls": tls}
    with rpc.Node("server", **way) as server:
        with rpc.Node("client", peers={"server": server.address}, **way) as client:
            yield server, client


def test_values_arrays_and_tensors_go_there_and_back(pair: tuple[rpc.Node, rpc.Node]) -> None:
    torch = pytest.importorskip("torch")
    _, client = pair
    assert client.call("server", "add", 1, 2) == 3
    assert client.call("server", add, a=[1], b=[2]) == [1, 2]
    for size in (10, 5000, 3_000_000):
        array = np.arange(size, dtype=np.float32)
        assert (client.call("server", "add", array, 1) == array + 1).all()
        tensor = torch.arange(size)
        assert torch.equal(client.call("server", "add", tensor, tensor), 2 * tensor)
    assert client.connections()["server"].split()[0] in TRANSPORTS


def test_an_exception_comes_back_with_its_type_and_traceback(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    with pytest.raises(ValueError, match="no such luck") as caught:
        client.call("server", "fail", "no such luck")
    assert isinstance(caught.value, RemoteError)
    assert "in fail" in caught.value.remote_traceback
    assert caught.value.remote_type == "ValueError"
    with pytest.raises(LookupError, match="no function 'nonsense'"):
        client.call("server", "nonsense")
    with pytest.raises(TypeError):
        client.call("server", "add", 1)
    with pytest.raises(MessageError, match="pickle"):
        client.call("server", "add", object(), 1)
    with pytest.raises(BusyError, match="too much") as busy:
        client.call("server", "overwhelmed")
    assert isinstance(busy.value, RemoteError)
    with pytest.raises(KeyError) as caught_key:
        client.call("server", "missing")
    assert "line" in str(caught_key.value)
    assert "\\n" not in str(caught_key.value)
    assert client.call("server", "add", 1, 2) == 3


def test_a_peers_calls_begin_in_their_order(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    _seen.clear()
    futures = [client.call_async("server", "note", i) for i in range(2000)]
    assert [future.result() for future in futures] == list(range(2000))
    assert _seen == list(range(2000))


def test_many_threads_share_a_connection(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    wrong = []

    def ask(seed: int) -> None:
        for i in range(200):
            if client.call("server", "add", seed, i) != seed + i:
                wrong.append((seed, i))

    threads = [threading.Thread(target=ask, args=(1000 * t,)) for t in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_futures_callbacks_and_await(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    done = threading.Event()
    _gate.clear()
    future = client.call_async("server", "pass_gate", timeout_s=patience(30))
    assert not future.done()
    future.add_done_callback(lambda f: done.set())
    assert not done.is_set()
    _gate.set()
    assert done.wait(patience(5))
    assert future.result() is True

    async def many() -> list[int]:
        return await asyncio.gather(*(client.call_async("server", "add", i, i) for i in range(50)))

    assert asyncio.run(many()) == [2 * i for i in range(50)]
    assert client.call("server", "later", [1, 2]) == [1, 2]
    failing = client.call_async("server", "fail", "x")
    assert isinstance(failing.exception(), ValueError)


def test_a_call_ends_at_its_deadline_and_others_go_on(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    assert client.call("server", "add", 1, 1) == 2  # connected: the deadline below is the call's alone
    nap_s = patience(1.0)
    began_s = time.monotonic()
    with pytest.raises(WaitTimeoutError, match="'server'"):
        client.call("server", "sleep", nap_s, timeout_s=0.1)
    assert time.monotonic() - began_s < 0.9 * nap_s
    assert client.call("server", "add", 1, 1) == 2  # the handler still sleeps
    future = client.call_async("server", "sleep", nap_s, timeout_s=0.1)
    with pytest.raises(WaitTimeoutError):
        future.result()
    with_callback = client.call_async("server", "sleep", nap_s, timeout_s=0.1)
    ended = threading.Event()
    with_callback.add_done_callback(lambda f: ended.set())
    assert ended.wait(patience(3))
    assert isinstance(with_callback.exception(), WaitTimeoutError)


def test_a_slow_function_holds_up_its_peers_own_calls_until_given_up_and_nobody_elses(
    pair: tuple[rpc.Node, rpc.Node],
) -> None:
    server, client = pair
    with rpc.Node("other", peers={"server": server.address}, timeout_s=patience(10)) as other:
        long_s = patience(10)
        _gate.clear()
        slow = client.call_async("server", "pass_gate", timeout_s=long_s)
        behind = client.call_async("server", "add", 1, 2, timeout_s=long_s)
        assert other.call("server", "add", 3, 4) == 7
        assert not behind.done()
        _gate.set()
        assert behind.result() == 3
        assert slow.done()
        _gate.clear()
        beside = client.call_async("server", "pass_gate_beside", timeout_s=long_s)
        assert client.call("server", "add", 1, 2, timeout_s=long_s) == 3
        assert not beside.done()
        _gate.set()
        assert beside.result() is True
        _gate.clear()
        endless = client.call_async("server", "pass_gate", timeout_s=0.1)
        behind = client.call_async("server", "add", 5, 6, timeout_s=long_s)
        with pytest.raises(WaitTimeoutError):
            endless.result()
        assert behind.result() == 11
        _gate.set()


def test_a_cancelled_call_is_given_up_on_both_sides(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    future = client.call_async("server", "never_filled", 1)
    assert future.cancel()
    with pytest.raises(CallCancelledError):
        future.result()
    assert not client.call_async("server", "add", 1, 1).exception()
    # The cancelled call makes no batch full, and is in none.
    found = [client.call_async("server", "never_filled", i) for i in (2, 3)]
    assert [one.result(timeout_s=patience(5)) for one in found] == [2, 3]


def test_batches_are_run_when_full_or_when_time_is_up(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    _batches.clear()
    futures = [client.call_async("server", "double", i) for i in range(8)]
    assert [future.result() for future in futures] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert _batches == [4, 4]
    _batches.clear()
    before = rpc.batch_stats(triple)
    futures = [client.call_async("server", "triple", i) for i in range(2)]
    assert [future.result() for future in futures] == [0, 3]
    assert sum(_batches) == 2  # in one batch, unless the second call took longer to come than the first waits
    until_s = time.monotonic() + patience(5)
    while (stats := rpc.batch_stats(triple)).calls < before.calls + 2:  # it is counted after the answers have left
        assert time.monotonic() < until_s
        time.sleep(0.001)
    assert stats.full == before.full
    assert stats.waited.quantile(0.0) >= 0.018  # of each call's batch, by a histogram's steps
    rows = [client.call_async("server", "total", np.full(5, i)) for i in range(3)]
    assert [int(future.result()) for future in rows] == [0, 5, 10]


def test_a_stacked_batch_may_be_answered_by_arrays_by_name(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    asked = [client.call_async("server", "halves", np.full(4, i, "float32"), np.int64(0)) for i in range(3)]
    for i, future in enumerate(asked):
        answer = future.result()
        assert sorted(answer) == ["half", "sum"]
        np.testing.assert_array_equal(answer["half"], np.full(4, i / 2, "float32"))
        assert float(answer["sum"]) == 4 * i
    asked = [client.call_async("server", "halves", np.full(4, i, "float32"), np.int64(i // 2)) for i in range(3)]
    for future in asked:
        with pytest.raises(ArgumentError, match=r"got 3 calls and returned 'sum' as \(2,\), not 3 rows"):
            future.result()
    with pytest.raises(ArgumentError, match="only with stack=True"):
        client.call("server", "unstacked_dict", 1)


def test_a_full_queue_refuses_more(pair: tuple[rpc.Node, rpc.Node]) -> None:
    from geartrain.rpc.batching import Batcher

    batcher = Batcher(lambda values: values, max_size=3, max_wait_us=None, max_queued=3, stack=False)
    for i in range(2):
        batcher.submit((i,), {})
    batcher._max_queued = 2
    with pytest.raises(BusyError):
        batcher.submit((9,), {})


def test_a_batched_function_tells_how_long_its_batches_take(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    done: list[rpc.BatchDone] = []
    batches = iter(range(10))
    longest_wait_s = patience(0.1)  # the last call waits for another so long, and no two of the others longer

    @rpc.batched(max_size=2, max_wait_us=int(longest_wait_s * 1e6), on_batch=done.append)
    def timed(values: list[int]) -> list[int]:
        time.sleep(0.02)
        if next(batches) == 1:
            raise ValueError("the second one")
        return values

    try:
        futures = [client.call_async("server", "timed", i) for i in range(5)]
        errors = [future.exception() for future in futures]
        assert [type(error).__name__ for error in errors] == ["NoneType"] * 2 + ["ValueError"] * 2 + ["NoneType"]
        until_s = time.monotonic() + patience(5)
        while len(done) < 3 and time.monotonic() < until_s:
            time.sleep(0.001)  # it is told of a batch after the answers have left
        assert [one.size for one in done] == [2, 2, 1]
        for one in done:
            assert one.asked_s <= one.began_s <= one.returned_s - 0.02 <= one.answered_s
        assert isinstance(done[1].error, ValueError)
        stats = rpc.batch_stats(timed)
        assert (stats.calls, stats.batches, stats.full, stats.errors, stats.sizes) == (5, 3, 2, 1, {2: 2, 1: 1})
        assert stats.ran.count == 3
        assert 0.018 < stats.ran.quantile(0.5) <= stats.took.quantile(0.99) <= stats.took.most_s
        assert stats.waited.most_s >= longest_wait_s  # of the last one
        assert rpc.batch_stats("timed").batches == 3
        with pytest.raises(LookupError, match="no batched function 'add'"):
            rpc.batch_stats(add)
    finally:
        del functions["timed"]


def test_batches_that_never_return_hold_up_no_other() -> None:
    stuck, seen = threading.Event(), []

    @rpc.batched(max_size=8, max_wait_us=1_000)
    def moody(values: list[int]) -> list[int]:
        seen.append(values)
        if values[0] < 3:
            stuck.wait(patience(20))
        return values

    try:
        with (
            rpc.Node("server", timeout_s=patience(20)) as server,
            rpc.Node("client", peers={"server": server.address}) as client,
        ):
            lost = []
            assert client.call("server", "add", 1, 1) == 2  # connected: the deadlines below are the calls' alone
            for i in range(3):
                lost.append(client.call_async("server", "moody", i, timeout_s=patience(0.3)))
                until_s = time.monotonic() + patience(5)
                while len(seen) <= i:
                    assert time.monotonic() < until_s
                    time.sleep(0.001)
            assert client.call("server", "moody", 7, timeout_s=patience(5)) == 7
            for one in lost:
                with pytest.raises(WaitTimeoutError):
                    one.result()
            stuck.set()
    finally:
        stuck.set()
        del functions["moody"]


def test_functions_that_wait_for_calls_of_their_own_need_no_thread_of_the_pool() -> None:
    with rpc.Node("a", timeout_s=patience(20), max_threads=1, max_running=1) as a:
        with rpc.Node("b", timeout_s=patience(20), max_threads=1, max_running=1, peers={"a": a.address}) as b:
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
    with rpc.Node("server", timeout_s=patience(20), max_threads=2) as server:
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
        with rpc.Node("server", timeout_s=patience(10), max_running=2) as server:
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
        with rpc.Node("server", timeout_s=patience(20), max_running=1) as server:
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


def test_a_function_may_ask_who_calls(pair: tuple[rpc.Node, rpc.Node]) -> None:
    server, client = pair

    @rpc.function(name="who", with_caller=True)
    def who(caller: rpc.Caller, greeting: str) -> str:
        assert caller.node is server
        assert not caller.authenticated
        return f"{greeting} {caller.name}"

    try:
        assert client.call("server", "who", "hello") == "hello client"
    finally:
        del functions["who"]


def test_remote_objects_live_with_their_peer(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    one, other = client.remote("server", Counter, 5), client.remote("server", "Counter", 100)
    assert one.call("add", 2) == 7
    assert other.call_async("add", 1).result() == 101
    assert one.call("add", 1) == 8
    with pytest.raises(AttributeError, match="is private"):
        one.call("_hidden")
    one.close()
    with pytest.raises(KeyError):
        one.call("add", 1)
    with pytest.raises(LookupError):
        client.remote("server", "add", 1)


def test_a_topic_reaches_its_subscribers_in_order_and_late_ones_get_the_newest(pair: tuple[rpc.Node, rpc.Node]) -> None:
    server, client = pair
    topic = server.topic("weights", history=2)
    with pytest.raises(LookupError, match="no topic 'nonsense'"):
        client.subscribe("server", "nonsense", print)
    for version in range(3):
        assert topic.publish({"version": version}) == version
    got: list[int] = []
    enough = threading.Event()

    def take(number: int, value: dict[str, int]) -> None:
        assert value == {"version": number}
        got.append(number)
        if number == 49:
            enough.set()

    client.subscribe("server", "weights", take)
    assert topic.subscribers == ["client"]
    for version in range(3, 50):
        topic.publish({"version": version})
    assert enough.wait(patience(10))
    assert got == list(range(1, 50))
    client.unsubscribe("server", "weights")
    assert topic.subscribers == []
    client.subscribe("server", "weights", take)
    client.close()
    until_s = time.monotonic() + patience(5)
    while topic.subscribers:  # a value that left before the loss was noticed reaches nobody
        assert time.monotonic() < until_s
        topic.publish({"version": 0})
        time.sleep(0.01)


def test_a_subscriber_that_came_back_gets_nothing_meant_for_the_one_before() -> None:
    with rpc.Node("server", timeout_s=patience(5)) as server:
        topic = server.topic("news", history=2)
        peers = {"server": server.address}
        first = rpc.Node("client", peers=peers, timeout_s=patience(5))
        first.subscribe("server", "news", lambda number, value: None)
        first.close()
        with rpc.Node("client", peers=peers, timeout_s=patience(5)) as second:
            server.directory.known["client"] = second.address  # as a store would tell
            got: list[int] = []
            topic.publish("meant for the first")
            until_s = time.monotonic() + patience(5)
            while topic.subscribers and time.monotonic() < until_s:
                topic.publish("nobody wants this")
                time.sleep(0.01)
            assert topic.subscribers == []  # it was told, and has stopped
            second.subscribe("server", "news", lambda number, value: got.append(number))
            newest = topic.publish("the newest")
            until_s = time.monotonic() + patience(5)
            while newest not in got and time.monotonic() < until_s:
                time.sleep(0.001)
            assert got == list(range(max(0, newest - 2), newest + 1))  # the first may have been dropped at once


def test_objects_and_functions_go_by_pickle_only_between_peers_with_the_secret() -> None:
    for pickle in (True, False):
        with rpc.Node("server", secret=b"s", pickle=pickle) as server:
            peers = {"server": server.address}
            with rpc.Node("client", peers=peers, secret=b"s", pickle=pickle) as client:
                if pickle:
                    assert client.call("server", unregistered, 1) == 1001
                    assert client.call("server", "add", np.datetime64("2026-01-01"), 1) == np.datetime64("2026-01-02")
                else:
                    with pytest.raises(UntrustedPeerError):
                        client.call("server", unregistered, 1)
                    with pytest.raises(MessageError):
                        client.call("server", "add", np.datetime64("2026-01-01"), 1)
            with rpc.Node("stranger", peers=peers, secret=b"other") as stranger:
                with pytest.raises(UntrustedPeerError):
                    stranger.call("server", "add", 1, 2)


def test_a_node_calls_itself_and_is_called_back(pair: tuple[rpc.Node, rpc.Node]) -> None:
    server, client = pair
    assert client.call("client", "add", 1, 2) == 3
    server.directory.known["client"] = client.address

    @rpc.function(name="ping-pong")
    def ping_pong(depth: int, names: list[str]) -> int:
        if depth == 0:
            return 0
        caller = server if names[0] == "server" else client
        return 1 + int(caller.call(names[1], "ping-pong", depth - 1, names[::-1]))

    assert client.call("server", "ping-pong", 12, ["server", "client"]) == 12


def test_a_forked_child_makes_a_node_of_its_own(
    pair: tuple[rpc.Node, rpc.Node], fork: Callable[[Callable[[], object]], int]
) -> None:
    server, client = pair
    assert client.call("server", "add", 1, 2) == 3

    def child() -> int:
        with pytest.raises(ConnectionClosedError, match="forked"):
            client.call("server", "add", 1, 2)
        with pytest.raises(ConnectionClosedError, match="forked"):
            client.call("client", "add", 1, 2)
        own = "tcp" if client.connections()["server"].startswith("tcp") else "shm"
        shown = {name[4:]: value for name, value in server._options.items() if name.startswith("tls_")}
        tls = TLS(**shown) if shown else None
        with rpc.Node("child", peers={"server": server.address}, transport=own, tls=tls) as mine:
            return 0 if own != server._options["transport"] or mine.call("server", "add", 1, 2) == 3 else 1

    assert os.waitstatus_to_exitcode(os.waitpid(fork(child), 0)[1]) == 0
    assert client.call("server", "add", 1, 2) == 3


def test_unknown_peers_are_named_errors_in_time() -> None:
    with rpc.Node("alone") as alone, pytest.raises(UnknownPeerError, match="nobody"):
        alone.call("nobody", "add", 1, 2)


def test_peers_find_each_other_in_a_store_and_late_ones_are_waited_for() -> None:
    distributed = pytest.importorskip("torch.distributed")
    store = distributed.HashStore()
    with rpc.Node("early", store=store, timeout_s=patience(5)) as early:
        with pytest.raises(UnknownPeerError, match="before the deadline"):
            early.call("late", "add", 1, 2, timeout_s=0.2)
        late: list[rpc.Node] = []
        timer = threading.Timer(0.3, lambda: late.append(rpc.Node("late", store=store)))
        timer.start()
        assert early.call("late", "add", 1, 2) == 3
        timer.join()
        # It leaves and comes back: the next call finds it again.
        lost = threading.Event()
        early.on_peer_lost(lambda name, reason: name == "late" and lost.set())
        late[0].close()
        assert lost.wait(patience(5))
        with rpc.Node("late", store=store):
            assert early.call("late", "add", 3, 4) == 7


# --- other processes ----------------------------------------------------------------------------------------------

PEER = """
import sys, time
from geartrain import rpc
import numpy as np

@rpc.function
def add(a, b):
    return a + b

@rpc.function
def big(n):
    return np.ones(n, np.uint8)

@rpc.function
def forever():
    time.sleep(1000)

@rpc.function
def call_back(address):
    node.directory.known["me"] = address
    node.tell("me", "add", 1, 2)

node = rpc.Node(sys.argv[1], timeout_s=20, transport=None if sys.argv[2] == "auto" else sys.argv[2])
print(node.address, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def spawn() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Starts a node in a process of its own; returns the process and the node's address."""
    running: list[subprocess.Popen[str]] = []

    def start(name: str, transport: str = "auto", prefix: tuple[str, ...] = ()) -> tuple[subprocess.Popen[str], str]:
        command = [*prefix, sys.executable, "-c", PEER, name, transport]
        popen = subprocess.Popen if prefix else preloaded.Popen
        process = popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    yield start
    for process in running:
        with_streams = process.poll()
        if with_streams is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.communicate()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_peer_fails_its_calls_at_once_and_memory_and_files_come_back(
    spawn: Callable[..., tuple[subprocess.Popen[str], str]], transport: str
) -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    lost: list[str] = []
    with rpc.Node("me", timeout_s=patience(20), transport=transport) as me:
        me.on_peer_lost(lambda name, reason: lost.append(name))
        before = files()
        for round_ in range(4):
            process, address = spawn(f"peer-{round_}", transport)
            me.directory.known[f"peer-{round_}"] = address
            assert me.call(f"peer-{round_}", "add", 1, 2) == 3
            assert me.connections()[f"peer-{round_}"].startswith(transport)
            waiting = me.call_async(
                f"peer-{round_}", "forever" if round_ % 2 else "big", *([] if round_ % 2 else [2**30])
            )
            time.sleep(0.05 * round_)
            process.kill()
            began_s = time.monotonic()
            with contextlib.suppress(PeerLostError):
                waiting.result()
            assert time.monotonic() - began_s < patience(3)
            with pytest.raises((PeerLostError, GeartrainError)):
                me.call(f"peer-{round_}", "add", 1, 2, timeout_s=patience(3))
            process.communicate()
            del waiting
            me._clients.clear()
        until_s = time.monotonic() + patience(3)
        while len(set(lost)) < 4 and time.monotonic() < until_s:
            time.sleep(0.01)
        assert set(lost) == {f"peer-{i}" for i in range(4)}
        until_s = time.monotonic() + patience(3)
        while gc.collect() is not None and files() > before + 6:  # the last round's connection at most, not four
            assert time.monotonic() < until_s
            time.sleep(0.01)


def test_a_stopped_peer_is_a_deadline(spawn: Callable[..., tuple[subprocess.Popen[str], str]]) -> None:
    process, address = spawn("stopped")
    with rpc.Node("me", peers={"stopped": address}) as me:
        assert me.call("stopped", "add", 1, 2) == 3
        stop(process.pid)
        with pytest.raises(WaitTimeoutError):
            me.call("stopped", "add", 1, 2, timeout_s=0.2)
        process.send_signal(signal.SIGCONT)
        assert me.call("stopped", "add", 1, 2) == 3


@pytest.mark.skipif(not hasattr(_native.Connection, "expose"), reason="transports without signs of life")
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_peer_that_gives_no_sign_of_life_is_lost_in_time(
    spawn: Callable[..., tuple[subprocess.Popen[str], str]], transport: str
) -> None:
    process, address = spawn("silent", transport)
    lost = threading.Event()
    why: list[str] = []

    def note(name: str, reason: str) -> None:
        why.append(f"{name}: {reason}")
        lost.set()

    with rpc.Node("me", peers={"silent": address}, transport=transport, peer_timeout_s=2, timeout_s=patience(30)) as me:
        me.on_peer_lost(note)
        assert me.call("silent", "add", 1, 2) == 3
        waiting = me.call_async("silent", "forever")
        stop(process.pid)
        began_s = time.monotonic()
        with pytest.raises(PeerLostError, match=r"no heartbeat for 2(\.\d+)? s"):  # as it counted, and not sooner
            waiting.result()
        assert time.monotonic() - began_s < patience(5)
        assert lost.wait(patience(2))
        assert why[0].startswith("silent: ")
        process.send_signal(signal.SIGCONT)
        assert me.call("silent", "add", 1, 2) == 3  # it is found again


@pytest.mark.skipif(not hasattr(_native.Connection, "expose"), reason="transports without signs of life")
def test_a_caller_that_gives_no_sign_of_life_is_lost_too(
    spawn: Callable[..., tuple[subprocess.Popen[str], str]],
) -> None:
    lost = threading.Event()
    with rpc.Node("me", peer_timeout_s=2, timeout_s=patience(30)) as me:
        process, address = spawn("caller")
        me.directory.known["caller"] = address
        me.on_peer_lost(lambda name, reason: name == "caller" and lost.set())
        assert process.stdin is not None
        me.call("caller", "call_back", me.address)
        until_s = time.monotonic() + patience(5)
        while "caller" not in {one.name for one in me.server.sessions} and time.monotonic() < until_s:
            time.sleep(0.01)
        me._clients["caller"].connection.close()  # this way round nobody asks it for anything
        lost.clear()
        stop(process.pid)
        assert lost.wait(patience(6))
        until_s = time.monotonic() + patience(5)  # callers are told of before they are forgotten
        while "caller" in {one.name for one in me.server.sessions}:
            assert time.monotonic() < until_s
            time.sleep(0.01)


def namespaces(*flags: str) -> tuple[str, ...]:
    prefix = ("unshare", *flags)
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"no permission for {' '.join(prefix)}")
    return prefix


def test_containers_with_namespaces_of_their_own_share_memory(
    spawn: Callable[..., tuple[subprocess.Popen[str], str]],
) -> None:
    prefix = namespaces("--mount", "--ipc", "--pid", "--fork", "--uts")
    _, address = spawn(
        "contained", "auto", (*prefix, "sh", "-c", 'mount -t tmpfs -o size=64k none /dev/shm; exec "$@"', "-")
    )
    with rpc.Node("me", peers={"contained": address}) as me:
        assert me.call("contained", "big", 200_000_000).nbytes == 200_000_000  # /dev/shm there holds 64 KB
        assert me.connections()["contained"].startswith("shm")


def test_a_peer_in_another_network_namespace_is_explained(
    spawn: Callable[..., tuple[subprocess.Popen[str], str]],
) -> None:
    _, address = spawn("elsewhere", "auto", namespaces("--net"))
    with rpc.Node("me", peers={"elsewhere": address}) as me:
        with pytest.raises(GeartrainError, match=r"shm: its socket is not there.*tcp: ") as caught:
            me.call("elsewhere", "add", 1, 2, timeout_s=patience(5))
        assert "inproc: the peer is another process" in str(caught.value)


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_ranks_join_through_a_store_and_leave_in_silence(tmp_path: Path, scheme: str) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "rank.py"
    script.write_text(
        """
import sys
from geartrain import rpc

@rpc.function
def whoami():
    return rpc.node().name

rank = int(sys.argv[1])
rpc.init(f"worker{rank}", rank=rank, world_size=3, init_method=sys.argv[2], timeout_s=60)
for other in range(3):
    assert rpc.call(f"worker{other}", whoami) == f"worker{other}"
rpc.call("worker0", "whoami")
import os, time
from pathlib import Path
here = Path(sys.argv[0]).parent
(here / f"{rank}.here").write_text(str(os.getpid()))
(here / f"{rank}.here").rename(here / f"called-{rank}")
while len(list(here.glob("called-*"))) < 3:  # not by the store, which may go while another asks it
    time.sleep(0.01)
before = rank and Path(f"/proc/{(here / f'called-{rank - 1}').read_text()}/stat")
while before and before.exists() and before.read_text().rsplit(")", 1)[1].split()[0] != "Z":
    time.sleep(0.01)  # rank 0, which has the tcp store, goes first: one that asks it as it goes is told so by torch
rpc.shutdown()
print("fine")
"""
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = {"file": f"file://{tmp_path}/store", "tcp": f"tcp://127.0.0.1:{probe.getsockname()[1]}"}[scheme]
    ranks = [
        preloaded.Popen([sys.executable, str(script), str(rank), url], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for rank in range(3)
    ]
    for rank in ranks:
        said, complained = rank.communicate(timeout=patience(240))
        assert said == "fine\n", complained
        assert "c10d" not in complained


def test_joining_says_who_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with pytest.raises(WaitTimeoutError, match=r"ranks \[1, 2\]"):
        rpc.init("first", rank=0, world_size=3, init_method=f"file://{tmp_path}/store", timeout_s=0.5)
    with pytest.raises(GeartrainError, match="has not joined"):
        rpc.call("first", "add", 1, 2)
