"""Nodes under misuse that a scenario for all classes does not know: raising functions and callbacks, futures that are
dropped, cancelled beside a wait or interrupted, names of nodes that cannot be reached, and arguments that are none."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from deadlines import patience

from geartrain import rpc
from geartrain.errors import ArgumentError, CallCancelledError, NameTakenError, RemoteError, WaitTimeoutError

_over = threading.Event()


@rpc.function(name="hostile-nodes.twice")
def twice(n: int) -> int:
    return 2 * n


class Unreadable:
    """Whoever unpickles it gets an error of no class of geartrain's."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


@rpc.function(name="hostile-nodes.unreadable")
def unreadable() -> Unreadable:
    return Unreadable()


@rpc.function(name="hostile-nodes.wait")
def wait(seconds: float) -> None:
    _over.wait(seconds)


@rpc.function(name="hostile-nodes.leave")
async def leave(how: str) -> str:
    if how == "exit":
        raise SystemExit(3)
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "stop":
        asyncio.get_running_loop().stop()
    if how == "callback":
        asyncio.get_running_loop().call_soon(exit)
    await asyncio.sleep(0.0)
    return how


@pytest.fixture
def nodes() -> Iterator[tuple[rpc.Node, rpc.Node]]:
    _over.clear()
    with rpc.Node("server") as server:
        with rpc.Node("client", peers={"server": server.address}, timeout_s=patience(20)) as client:
            yield client, server
        _over.set()


def ends(condition: Callable[[], bool]) -> bool:
    """Whether it becomes true in time."""
    until_s = time.monotonic() + patience(10)
    while not (found := condition()) and time.monotonic() < until_s:
        time.sleep(0.005)
    return found


@pytest.mark.parametrize(("how", "raised"), [("exit", "SystemExit"), ("interrupt", "KeyboardInterrupt")])
def test_an_async_function_that_exits_ends_itself_alone(nodes, how: str, raised: str) -> None:
    client, _ = nodes
    with pytest.raises(RemoteError, match=raised):
        client.call("server", "hostile-nodes.leave", how)
    assert client.call("server", "hostile-nodes.leave", "stay") == "stay"


@pytest.mark.parametrize("how", ["stop", "callback"])
def test_an_async_function_that_stops_its_loop_stops_no_other_call(nodes, how: str, capfd) -> None:
    client, _ = nodes
    other = client.call_async("server", "hostile-nodes.leave", "other")
    assert client.call("server", "hostile-nodes.leave", how) == how
    assert other.result() == "other"
    assert client.call("server", "hostile-nodes.leave", "later") == "later"


@pytest.mark.parametrize("raised", [ZeroDivisionError, SystemExit])
def test_a_callback_that_raises_holds_up_no_other_future(nodes, raised: type[BaseException], capfd) -> None:
    client, _ = nodes
    done: list[int] = []

    def fail(_: rpc.Future) -> None:
        raise raised("of a callback")

    for number in range(3):
        future = client.call_async("server", "hostile-nodes.twice", number)
        future.add_done_callback(fail)
        future.add_done_callback(lambda one: done.append(one.result()))
    assert ends(lambda: len(done) == 3)
    assert sorted(done) == [0, 2, 4]
    future.add_done_callback(fail)  # at once
    assert ends(lambda: capfd.readouterr().err.count("of a callback") > 0)


def test_a_result_that_cannot_be_unpickled_ends_its_future_and_holds_up_no_other() -> None:
    secret = b"between us"
    with rpc.Node("server", secret=secret) as server:
        peers = {"server": server.address}
        with rpc.Node("client", secret=secret, peers=peers, timeout_s=patience(20)) as client:
            for wait_in_background in (False, True):
                future = client.call_async("server", "hostile-nodes.unreadable")
                if wait_in_background:
                    future.add_done_callback(lambda _: None)
                for _ in range(2):
                    with pytest.raises(ValueError, match="no number"):
                        future.result()
            other = client.call_async("server", "hostile-nodes.twice", 4)
            other.add_done_callback(lambda _: None)
            assert other.result() == 8


def test_a_callback_about_a_lost_peer_may_raise_anything(nodes, capfd) -> None:
    client, server = nodes
    names: list[str] = []

    def fail(name: str, _: str) -> None:
        names.append(name)
        raise SystemExit

    server.on_peer_lost(fail)
    for number in range(4):  # more than there are threads that serve
        with rpc.Node(f"peer-{number}", peers={"server": server.address}) as peer:
            assert peer.call("server", "hostile-nodes.twice", number, timeout_s=patience(20)) == 2 * number
    assert ends(lambda: len(names) == 4)
    assert client.call("server", "hostile-nodes.twice", 5) == 10


def test_replies_to_futures_that_nobody_keeps_are_dropped(nodes) -> None:
    client, _ = nodes
    calls = client.client("server").calls
    for number in range(1500):  # more than may be open at once
        client.call_async("server", "hostile-nodes.twice", number)
    assert client.call("server", "hostile-nodes.twice", 1) == 2
    gc.collect()
    assert calls.open <= 1024
    assert client.call_async("server", "hostile-nodes.twice", 2).result() == 4
    assert calls.open == 0  # calls of one client are answered in order


def test_a_future_is_cancelled_while_another_thread_waits_for_it(nodes) -> None:
    client, _ = nodes
    future = client.call_async("server", "hostile-nodes.wait", 60.0)
    raised: list[BaseException | None] = []
    waiting = threading.Thread(target=lambda: raised.append(future.exception()))
    waiting.start()
    time.sleep(0.05)
    called_back = threading.Event()
    assert not future.done()
    future.add_done_callback(lambda _: called_back.set())
    with pytest.raises(WaitTimeoutError):
        future.result(timeout_s=0.01)
    assert future.cancel()
    waiting.join(patience(10))
    assert [type(error) for error in raised] == [CallCancelledError]
    assert called_back.wait(patience(10))
    assert not future.cancel()
    assert client.call("server", "hostile-nodes.twice", 3) == 6  # it held up the calls behind it


def waits(future: rpc.Future, timeout_s: float, raised: list[BaseException]) -> None:
    try:
        future.result(timeout_s=timeout_s)
    except BaseException as error:
        raised.append(error)


def test_a_wait_gives_up_beside_another_one_and_a_callback(nodes) -> None:
    client, _ = nodes
    for _ in range(20):
        future = client.call_async("server", "hostile-nodes.wait", 60.0)
        raised: list[BaseException] = []
        waiting = [threading.Thread(target=waits, args=(future, each, raised)) for each in (0.03, 0.035, 60.0)]
        for thread in waiting:
            thread.start()
        time.sleep(0.01)
        called_back = threading.Event()
        future.add_done_callback(lambda _, called_back=called_back: called_back.set())
        for thread in waiting[:2]:
            thread.join(patience(10))
        assert [type(error) for error in raised] == [WaitTimeoutError] * 2
        assert future.cancel()
        waiting[2].join(patience(10))
        assert [type(error) for error in raised[2:]] == [CallCancelledError]
        assert called_back.wait(patience(10))


def test_a_callback_that_came_beside_a_wait_that_gave_up_is_called(nodes) -> None:
    client, _ = nodes
    future = client.call_async("server", "hostile-nodes.wait", 60.0)
    gave_up: list[BaseException] = []

    def wait_a_moment() -> None:
        try:
            future.result(timeout_s=0.1)
        except WaitTimeoutError as error:
            gave_up.append(error)

    waiting = threading.Thread(target=wait_a_moment)
    waiting.start()
    time.sleep(0.03)
    called_back = threading.Event()
    future.add_done_callback(lambda _: called_back.set())
    waiting.join(patience(10))
    assert len(gave_up) == 1
    _over.set()
    assert called_back.wait(patience(10))


class InterruptionError(Exception):
    pass


def test_a_call_that_a_signal_interrupts_is_cancelled_at_the_peer(nodes) -> None:
    client, _ = nodes

    def interrupt(*_: Any) -> None:
        raise InterruptionError

    # Connected before: Python's own `Thread.start` answers with a KeyError to a handler that raises within it.
    assert client.call("server", "hostile-nodes.twice", 3) == 6
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(InterruptionError):
            client.call("server", "hostile-nodes.wait", 60.0)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert client.call("server", "hostile-nodes.twice", 4, timeout_s=patience(10)) == 8
    assert client.client("server").calls.open == 0


class Names:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> str:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


def test_a_name_goes_over_only_where_the_other_host_says_that_nobody_listens() -> None:
    store = Names()
    key = "geartrain/rpc/same"
    unknown = "id=" + "0" * 32 + ";tcp="
    for place in ("no-such-host.invalid:1", "255.255.255.255:9"):  # unresolved; no way there: the node may be alive
        store.set(key, unknown + place)
        with pytest.raises(NameTakenError, match="may be alive"):
            rpc.Node("same", store=store, timeout_s=patience(5))
    with rpc.Node("other") as other:
        port = other.address.rpartition(":")[2]
    for gone in (unknown + f"127.0.0.1:{port}", "id=" + "0" * 32 + ";shm=geartrain-" + "0" * 32):
        store.set(key, gone)
        with rpc.Node("same", store=store) as node:
            assert store.get(key) == node.address


@pytest.mark.parametrize(
    "options",
    [
        {"name": ""},
        {"name": None},
        {"options": {"max_threads": float("nan")}},
        {"options": {"max_threads": 0}},
        {"options": {"max_open": 1.5}},
        {"options": {"max_running": "4"}},
        {"options": {"spin_us": float("nan")}},
        {"options": {"spin_us": -1}},
        {"options": {"peer_timeout_s": float("inf")}},
        {"port": 70_000},
        {"transport": "carrier pigeon"},
        {"store": 5},
        {"peers": {"b": 5}},
        {"timeout_s": float("nan")},
    ],
    ids=lambda options: "-".join(f"{name}-{value}" for name, value in options.items()),
)
def test_arguments_of_a_node_that_are_none_are_refused_at_the_door(options: dict[str, Any]) -> None:
    before = threading.active_count()
    with pytest.raises(ArgumentError):
        made = {"options": rpc.NodeOptions(**options["options"])} if "options" in options else options
        rpc.Node(**{"name": "node", **made})
    assert threading.active_count() <= before
