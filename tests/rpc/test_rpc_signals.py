"""Calls from a signal's handler, whatever call of the node's own it interrupts: each ends by its deadline."""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import preloaded
import pytest
from deadlines import patience
from hostile.instants import Interruption

import geartrain.core.lifetime as lifetime
from geartrain import rpc
from geartrain.errors import GeartrainError, WaitTimeoutError


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a peer that takes connections, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"id=any;tcp=127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.timeout(60)
def test_a_call_ends_by_its_deadline_while_no_thread_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "_LATE_S", 0.1)
    with rpc.Node("server") as server, rpc.Node("client", peers={"server": server.address}) as client:
        # As in a signal's handler that has come within `Thread.start`: no new thread gets beyond its first lines.
        with threading._active_limbo_lock:  # type: ignore[attr-defined]
            with pytest.raises(WaitTimeoutError, match="a connection with 'server'"):
                client.call("server", "add", 1, 2, timeout_s=0.1)
            with pytest.raises(WaitTimeoutError, match="a peer 'server'"):
                client.wait_for("server", timeout_s=0.1)
        assert client.call("server", "add", 1, 2, timeout_s=patience(20)) == 3


@pytest.mark.timeout(60)
def test_a_handler_that_calls_another_peer_at_any_line_of_a_call_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifetime, "_LATE_S", 0.1)

    def lines_of(at: int | None) -> int:
        with rpc.Node("server") as server, rpc.Node("other") as other:
            with rpc.Node("client", peers={"server": server.address, "other": other.address}) as client:

                def handler() -> None:
                    with contextlib.suppress(GeartrainError):
                        assert client.call("other", "add", 3, 4, timeout_s=0.2) == 7

                one = Interruption(at, handler)
                results: list[int] = []
                one.during(lambda: results.append(client.call("server", "add", 1, 2, timeout_s=patience(20))))
                assert results == [3], at
                return one.lines

    lines_of(None)  # imports
    for at in range(lines_of(None)):
        lines_of(at)


@pytest.mark.timeout(60)
def test_a_handler_publishes_and_subscribes_at_any_line_of_the_same() -> None:
    with rpc.Node("publisher") as publisher, rpc.Node("subscriber") as subscriber:
        publisher.directory.known["subscriber"] = subscriber.address
        subscriber.directory.known["publisher"] = publisher.address
        names = itertools.count()

        def lines_of(call: str, at: int | None) -> int:
            name, got, complete = f"news-{next(names)}", [], threading.Event()
            topic = publisher.topic(name, history=4)

            def arrived(number: int, value: object) -> None:
                got.append((number, value))
                if len(got) == 2:
                    complete.set()

            if call == "publish":
                subscriber.subscribe("publisher", name, arrived)
                one = Interruption(at, lambda: topic.publish("handler's"))
                one.during(lambda: topic.publish("thread's"))
                if at is not None:
                    assert complete.wait(patience(10)), at
                    assert [number for number, _ in got] == [0, 1], at
                    assert {value for _, value in got} == {"handler's", "thread's"}, at
            else:
                one = Interruption(at, lambda: subscriber.subscribe("publisher", name, arrived))
                one.during(lambda: subscriber.subscribe("publisher", name, arrived))
            subscriber.unsubscribe("publisher", name)
            return one.lines

        for call in ("publish", "subscribe"):
            lines_of(call, None)  # imports
            lines = lines_of(call, None)
            assert lines > 20
            for at in range(lines):
                lines_of(call, at)


def test_a_call_does_not_wait_beyond_its_deadline_for_another_one_that_dials(silent: str) -> None:
    with rpc.Node("client", peers={"silent": silent}) as client:
        long_s = patience(30)

        def call() -> None:
            with contextlib.suppress(GeartrainError):
                client.call("silent", "add", 1, 2, timeout_s=long_s)

        other = threading.Thread(target=call)
        other.start()
        time.sleep(0.2)
        began_s = time.monotonic()
        with pytest.raises(WaitTimeoutError):
            client.call("silent", "add", 1, 2, timeout_s=0.2)
        assert time.monotonic() - began_s < long_s / 2
        client.close()
        other.join()


@pytest.mark.timeout(60)
def test_ctrl_c_ends_a_wait_for_ranks_that_do_not_join() -> None:
    pytest.importorskip("torch")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = (
        "import torch.distributed; from geartrain import rpc\n"
        f"print('joins', flush=True); rpc.init('a', rank=0, world_size=2, init_method='tcp://127.0.0.1:{port}')"
    )
    child = preloaded.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline() == "joins\n"
        time.sleep(1.0)  # it waits by now, or is about to
        child.send_signal(signal.SIGINT)
        _, told = child.communicate(timeout=patience(7))  # the store's own waits are of 10 s
    finally:
        child.kill()
    assert child.returncode == -signal.SIGINT and told.rstrip().endswith("KeyboardInterrupt"), told
