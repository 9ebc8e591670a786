"""Nodes and futures that are closed, forked or ended beside calls; test_hostile_callers.py has the generated cases."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from deadlines import patience, taken, until

from geartrain import rpc
from geartrain.errors import ConnectionClosedError, GeartrainError, PeerLostError
from geartrain.rpc import server
from geartrain.rpc.registry import functions
from geartrain.rpc.tensors.receiver import TensorReceiver

_gate = threading.Event()


@pytest.fixture(autouse=True)
def gate() -> Iterator[None]:
    _gate.clear()
    rpc.function(name="life-hold", concurrent=True)(lambda: _gate.wait(patience(60)))
    rpc.function(name="life-same")(lambda value: value)
    yield
    _gate.set()
    del functions["life-hold"], functions["life-same"]


@contextlib.contextmanager
def deaf_address() -> Iterator[str]:
    """Of a listener that takes connections and says nothing."""
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(8)
        yield f"id=any;tcp=127.0.0.1:{deaf.getsockname()[1]}"


class SlowStore:
    """A store that never has a name, and does not say so before the deadline."""

    def set(self, key: str, value: str) -> None:
        pass

    def get(self, key: str) -> str:
        raise AssertionError("nothing is here")

    def check(self, keys: list[str]) -> bool:
        return False

    def wait(self, keys: list[str], timeout: object) -> None:
        _gate.wait(patience(60))
        raise RuntimeError("timed out")


def ends_when_closed(node: rpc.Node, call: Callable[[], object], waits: Callable[[], bool]) -> None:
    """The call waits, and `close` returns and ends it within a second (of an idle machine)."""
    ended: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            ended.append(None)
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until_s = time.monotonic() + patience(10)
    while not waits():
        assert time.monotonic() < until_s
        time.sleep(0.001)
    assert not ended
    began_s = time.monotonic()
    node.close()
    assert time.monotonic() - began_s < patience(1)
    thread.join(patience(1))
    assert not thread.is_alive()
    assert isinstance(ended[0], ConnectionClosedError)
    assert str(ended[0])


@pytest.mark.parametrize("how", ["call", "call_async", "tell", "client", "remote", "subscribe"])
def test_close_ends_a_call_that_still_connects(how: str) -> None:
    with deaf_address() as address:
        node = rpc.Node("one", peers={"deaf": address}, timeout_s=patience(60), transport="tcp")
        calls: dict[str, Callable[[], object]] = {
            "call": lambda: node.call("deaf", "life-same", 1),
            "call_async": lambda: node.call_async("deaf", "life-same", 1),
            "tell": lambda: node.tell("deaf", "life-same", 1),
            "client": lambda: node.client("deaf"),
            "remote": lambda: node.remote("deaf", "Counter"),
            "subscribe": lambda: node.subscribe("deaf", "news", print),
        }
        ends_when_closed(node, calls[how], lambda: "deaf" in node._dialling)


@pytest.mark.parametrize("how", ["call", "wait_for"])
def test_close_ends_a_wait_for_a_name(how: str) -> None:
    node = rpc.Node("one", store=SlowStore(), timeout_s=patience(60))
    calls: dict[str, Callable[[], object]] = {
        "call": lambda: node.call("nobody", "life-same", 1),
        "wait_for": lambda: node.wait_for("nobody"),
    }

    def searches() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name.startswith("geartrain waits for")]

    ends_when_closed(node, calls[how], lambda: bool(searches()))
    _gate.set()  # the store's answer to a wait that nobody needs any more: it is the last
    for one in searches():
        one.join(patience(10))
        assert not one.is_alive()


def test_a_client_that_is_accepted_while_its_node_closes_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    accepted, closed = threading.Event(), threading.Event()

    def made_late(*arguments: object) -> TensorReceiver:
        accepted.set()
        assert closed.wait(patience(10))
        return TensorReceiver(*arguments)  # type: ignore[arg-type]

    with rpc.Node("late") as node, rpc.Node("caller", peers={"late": node.address}) as caller:
        monkeypatch.setattr(server, "TensorReceiver", made_late)
        closing = threading.Thread(target=node.close)
        answer = caller.call_async("late", "life-same", 1, timeout_s=patience(20))
        assert accepted.wait(patience(10))
        closing.start()
        until(lambda: node.server.closed, "the node does not close")
        closed.set()
        with pytest.raises(PeerLostError):
            answer.result()
        closing.join()


def test_a_forked_childs_copy_of_a_future_is_refused_while_the_parent_waits_for_it(
    fork: Callable[[Callable[[], object]], int],
) -> None:
    with rpc.Node("server") as server, rpc.Node("one", peers={"server": server.address}) as node:
        done = node.call_async("server", "life-same", 7)
        assert done.result() == 7
        waiting, called = node.call_async("server", "life-hold", timeout_s=patience(60)), threading.Event()
        thread = threading.Thread(target=lambda: waiting.result() and called.set())
        thread.start()
        while not taken(waiting._reading):
            time.sleep(0.001)

        def child() -> int:
            assert done.result() == 7
            assert waiting.done()
            with pytest.raises(ConnectionClosedError, match="forked"):
                waiting.result()
            assert not waiting.cancel()
            called_back: list[object] = []
            waiting.add_done_callback(called_back.append)
            assert called_back == [waiting]
            with pytest.raises(ConnectionClosedError, match="forked"):
                node.call_async("server", "life-same", 1)
            with pytest.raises(ConnectionClosedError, match="forked"):
                node.topic("news")
            node.close()
            node.close()
            return 0

        assert os.waitstatus_to_exitcode(os.waitpid(fork(child), 0)[1]) == 0
        _gate.set()
        thread.join(patience(10))
        assert called.is_set()
        assert node.call("server", "life-same", 1) == 1


def test_a_child_that_c_code_has_forked_refuses_the_parents_calls() -> None:
    with rpc.Node("server") as server, rpc.Node("one", peers={"server": server.address}) as node:
        waiting = node.call_async("server", "life-hold", timeout_s=patience(60))
        for _ in range(5):  # another thread may be within CPython's own lock at the fork: such a child hangs in it
            child = ctypes.PyDLL(None).fork()  # no handler of Python's runs
            if child == 0:
                code = 1
                try:
                    with pytest.raises(ConnectionClosedError, match="forked"):
                        waiting.result()
                    with pytest.raises(ConnectionClosedError, match="forked"):
                        node.call("server", "life-same", 1)
                    code = 0
                finally:
                    os._exit(code)
            until_s = time.monotonic() + patience(5)
            while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until_s:
                time.sleep(0.01)
            if ended[0] != 0:
                break
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        assert ended[0] != 0, "all children hang"
        assert os.waitstatus_to_exitcode(ended[1]) == 0
        _gate.set()
        assert waiting.result() is True


def test_calls_do_not_ask_the_system_for_the_process_id(monkeypatch: pytest.MonkeyPatch) -> None:
    with rpc.Node("server") as server, rpc.Node("one", peers={"server": server.address}) as node:
        assert node.call("server", "life-same", 1) == 1
        mine, asked, ask = threading.current_thread(), [], os.getpid

        def getpid() -> int:
            if threading.current_thread() is mine:
                asked.append(True)
            return ask()

        monkeypatch.setattr(os, "getpid", getpid)
        assert node.call("server", "life-same", 2) == 2
        assert node.call_async("server", "life-same", 3).result() == 3
        assert not asked


@pytest.mark.parametrize("rounds", [5, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_nodes_are_closed_by_two_threads_beside_calls(rounds: int) -> None:
    """Two threads close one of two nodes at a random instant while three threads call over it."""
    random_ = random.Random(1)
    for _ in range(rounds):
        server = rpc.Node("server", timeout_s=patience(20))
        node = rpc.Node("one", peers={"server": server.address}, timeout_s=patience(20))
        odd: list[BaseException] = []
        closes = node if random_.random() < 0.5 else server

        def ask(node: rpc.Node = node, odd: list[BaseException] = odd) -> None:
            done = threading.Event()
            try:
                while True:
                    assert node.call("server", "life-same", 1) == 1
                    future = node.call_async("server", "life-same", 2)
                    future.add_done_callback(lambda _, done=done: done.set())
                    assert future.result() == 2
                    assert done.wait(patience(10))
                    node.tell("server", "life-same", 3)
            except (ConnectionClosedError, PeerLostError):
                pass
            except BaseException as error:
                odd.append(error)

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(random_.random() * 0.02)
        closers = [threading.Thread(target=closes.close, daemon=True) for _ in range(2)]
        for thread in closers:
            thread.start()
        for thread in [*closers, *threads]:
            thread.join(patience(10))
            assert not thread.is_alive()
        assert odd == []
        node.close()
        server.close()
        with pytest.raises(GeartrainError):
            node.call("server", "life-same", 1)


AT_EXIT = """
import random, sys, threading, time
from geartrain import rpc
rpc.function(name="same")(lambda value: value)
rpc.function(name="nap", concurrent=True)(time.sleep)
server = rpc.Node("server")
node = rpc.Node("one", peers={"server": server.address})
node.call("server", "same", 1)
def ask(*call):
    try:
        while True:
            node.call("server", *call)
            node.call_async("server", *call).result()
    except Exception:
        pass
for call in [("same", 1)] * 3 + [("nap", 60)] * 3:
    threading.Thread(target=ask, args=call, daemon=True).start()
time.sleep(random.random() * 0.05)
"""


@pytest.mark.parametrize("times", [2, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_an_interpreter_ends_while_its_daemon_threads_call(times: int) -> None:
    for _ in range(times):
        ended = subprocess.run(
            [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=patience(60), check=False
        )
        assert (ended.returncode, ended.stderr) == (0, "")
