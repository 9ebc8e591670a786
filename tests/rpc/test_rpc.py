"""Named functions of named peers: answers, errors, deadlines, order, batches, and peers that come and go."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from deadlines import patience
from rpc_functions import TRANSPORTS, Counter, add, gate, seen, unregistered

from geartrain import rpc
from geartrain.errors import (
    BusyError,
    CallCancelledError,
    ConnectionClosedError,
    MessageError,
    RemoteError,
    UnknownPeerError,
    UntrustedPeerError,
    WaitTimeoutError,
)
from geartrain.rpc.registry import functions
from geartrain.transport.tls import TLS


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
    seen.clear()
    futures = [client.call_async("server", "note", i) for i in range(500)]
    assert [future.result() for future in futures] == list(range(500))
    assert seen == list(range(500))


def test_many_threads_share_a_connection(pair: tuple[rpc.Node, rpc.Node]) -> None:
    _, client = pair
    wrong = []

    def ask(seed: int) -> None:
        for i in range(50):
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
    done, overtook = threading.Event(), threading.Event()
    gate.clear()
    future = client.call_async("server", "pass_gate_beside", timeout_s=patience(30))
    assert not future.done()
    future.add_done_callback(lambda f: done.set())
    later = client.call_async("server", "add", 1, 1)
    later.add_done_callback(lambda f: overtook.set())
    assert overtook.wait(patience(5)) and later.result() == 2
    assert not done.is_set()
    gate.set()
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
        tls = TLS(**{**shown, "threads": shown["threads"] or None}) if shown else None
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
