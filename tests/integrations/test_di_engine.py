"""Events between nodes, without DI-engine: who gets them, in what order, and what happens when somebody is gone."""

from __future__ import annotations

import itertools
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from deadlines import killed, patience, stop, until

from geartrain.errors import (
    GeartrainError,
    MessageError,
    WaitTimeoutError,
)
from geartrain.integrations.di_engine import Bus, Window
from geartrain.integrations.di_engine.discovery import Publication, StoreRegister, contacts_of, parse_contact

SECRET = b"known to all of us"


class Listener:
    """A node whose events are handled by one thread, and kept."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.got: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.go = threading.Event()
        self.go.set()
        self._pool = ThreadPoolExecutor(1)
        bus.set_handler(self._handle)

    def _handle(self, topic: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Future[None]]:
        return [self._pool.submit(self._keep, topic, args, kwargs)]

    def _keep(self, topic: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self.go.wait(patience(20))
        self.got.append((topic, args, kwargs))


@pytest.fixture
def make() -> Iterator[Callable[..., Listener]]:
    made: list[Bus] = []
    names = itertools.count()

    def one(node_id: int, **given: Any) -> Listener:
        given = {"secret": SECRET, "timeout_s": 10.0, **given}
        made.append(Bus(f"test-{os.getpid()}-{next(names)}-{secrets.token_hex(3)}", node_id, **given))
        return Listener(made[-1])

    yield one
    for bus in made:
        bus.close()


def linked(one: Listener, *others: Listener) -> None:
    for other in others:
        other.bus.connect([parse_contact(one.bus.address)])


def tcp(listener: Listener) -> str:
    return "tcp://" + listener.bus.address.rpartition("tcp=")[2]


def fixed_port() -> int:
    """One that is free now, and that the system gives to nobody who asks for any."""
    lowest_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.randrange(lowest_given - 12_000, lowest_given)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


# --- events ---------------------------------------------------------------------------------------------------------


def test_an_event_is_shipped_to_those_who_asked_for_it_and_to_nobody_else(make: Callable[..., Listener]) -> None:
    one, two, three = make(0), make(1), make(2)
    linked(one, two, three)
    two.bus.subscribe("data")
    three.bus.subscribe("model")
    until(lambda: one.bus.peers == {1: {"data"}, 2: {"model"}})
    sent = {name: counts["messages_sent"] for name, counts in one.bus.node.counts().items()}
    array = np.arange(1000.0)
    assert one.bus.emit("data", (array, "text"), {"step": 3}) == 1
    assert one.bus.emit("nobody's", (array,), {}) == 0
    until(lambda: two.got)
    topic, args, kwargs = two.got[0]
    assert (topic, args[1], kwargs) == ("data", "text", {"step": 3})
    assert (args[0] == array).all()
    more = {name: counts["messages_sent"] - sent[name] for name, counts in one.bus.node.counts().items()}
    assert more == {two.bus.name: 1, three.bus.name: 0}
    two.bus.unsubscribe(["data"])
    until(lambda: one.bus.peers[1] == set())
    assert one.bus.emit("data", (array,), {}) == 0


def test_whoever_answers_an_event_knows_what_its_sender_had_subscribed_to(make: Callable[..., Listener]) -> None:
    one, two = make(0), make(1)
    linked(one, two)
    answered: list[int] = []
    two.bus.subscribe("question")
    two.bus.set_handler(lambda topic, args, kwargs: answered.append(two.bus.emit("answer", args, {})) or [])
    until(lambda: one.bus.peers[1] == {"question"})
    one.bus.subscribe("answer")  # and at once:
    one.bus.emit("question", (1,), {})
    until(lambda: one.got and answered)  # an answer may be here before its sender has counted it
    assert answered == [1]


def test_a_peers_events_come_in_the_order_in_which_it_emitted_them(make: Callable[..., Listener]) -> None:
    one, two = make(0), make(1)
    linked(one, two)
    two.bus.subscribe("n")
    until(lambda: one.bus.peers[1])
    sizes = itertools.cycle([1, 70_000, 10, 3_000_000])
    for i in range(200):
        one.bus.emit("n", (i, np.full(next(sizes), i % 100, np.uint8)), {})
    until(lambda: len(two.got) == 200)
    assert [args[0] for _, args, _ in two.got] == list(range(200))
    assert all((args[1] == i % 100).all() for i, (_, args, _) in enumerate(two.got))


def test_tensors_go_without_pickle_and_other_objects_only_with_a_secret(make: Callable[..., Listener]) -> None:
    torch = pytest.importorskip("torch")
    one, two = make(0, secret=b""), make(1, secret=b"")
    linked(one, two)
    two.bus.subscribe("x")
    until(lambda: one.bus.peers[1])
    model = torch.nn.Linear(3, 2).state_dict()
    assert one.bus.emit("x", (dict(model),), {}) == 1
    until(lambda: two.got)
    assert torch.equal(two.got[0][1][0]["weight"], model["weight"])
    with pytest.raises(MessageError, match="secret"):
        one.bus.emit("x", (Path("x"),), {})
    assert one.bus.emit("x", (1,), {}) == 1  # and the link is as it was
    trusted, other = make(2), make(3)
    linked(trusted, other)
    other.bus.subscribe("x")
    until(lambda: trusted.bus.peers[3])
    trusted.bus.emit("x", (Path("x"), model), {})
    until(lambda: other.got)
    path, received = other.got[0][1]
    assert path == Path("x")
    assert type(received) is type(model)
    assert torch.equal(received["weight"], model["weight"])
    assert received["weight"].is_contiguous()
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    trusted.bus.emit("x", (deep,), {"step": 2})  # what the codec refuses goes as DI-engine sends all
    until(lambda: len(other.got) == 2)
    assert other.got[1] == ("x", (deep,), {"step": 2})
    with pytest.raises(MessageError, match="an event of topic 'x' cannot be sent"):
        trusted.bus.emit("x", (threading.Lock(),), {})


def test_a_slow_peer_holds_its_sender_back_and_is_named_but_loses_nothing(make: Callable[..., Listener]) -> None:
    one, slow, quick = make(0, window=Window(events=4), timeout_s=0.3), make(1), make(2)
    linked(one, slow, quick)
    slow.bus.subscribe("n")
    quick.bus.subscribe("n")
    until(lambda: len(one.bus.peers) == 2 and all(one.bus.peers.values()))
    slow.go.clear()
    for i in range(4):
        assert one.bus.emit("n", (i,), {}) == 2
    began = time.monotonic()
    with pytest.raises(WaitTimeoutError, match="node 1 does not keep up: 4 events in flight"):
        one.bus.emit("n", (4,), {})
    assert 0.2 < time.monotonic() - began < patience(2)
    until(lambda: len(quick.got) == 5)  # the others have got it
    slow.go.set()
    until(lambda: len(slow.got) == 4)
    assert one.bus.emit("n", (5,), {}) == 2
    until(lambda: len(slow.got) == 5)
    assert [args[0] for _, args, _ in slow.got] == [0, 1, 2, 3, 5]


def test_bytes_under_way_are_bounded_as_well(make: Callable[..., Listener]) -> None:
    one, slow = make(0, window=Window(nbytes=1 << 20), timeout_s=0.2), make(1)
    linked(one, slow)
    slow.bus.subscribe("n")
    until(lambda: one.bus.peers[1])
    slow.go.clear()
    assert one.bus.emit("n", (np.zeros(2 << 20, np.uint8),), {}) == 1  # one may always go
    with pytest.raises(WaitTimeoutError, match="does not keep up"):
        one.bus.emit("n", (np.zeros(10, np.uint8),), {})
    slow.go.set()


def test_a_handler_that_raises_is_told_to_the_sender_and_holds_up_nobody(
    make: Callable[..., Listener], caplog: pytest.LogCaptureFixture
) -> None:
    one, broken = make(0, window=Window(events=3)), make(1)
    linked(one, broken)

    def fail(*_: Any) -> Any:
        raise ValueError("no such luck")

    broken.bus.set_handler(fail)
    broken.bus.subscribe("n")
    until(lambda: one.bus.peers[1])
    for _ in range(20):
        one.bus.emit("n", (1,), {})
    assert [r.levelname for r in caplog.records if "no such luck" in r.message] == ["ERROR"]  # once


# --- links ----------------------------------------------------------------------------------------------------------


def test_late_joiners_are_found_and_get_what_is_emitted_from_then_on(
    make: Callable[..., Listener], tmp_path: Path
) -> None:
    early = make(1)
    early.bus.subscribe("n")
    place = tmp_path / "node-0.ipc"
    early.bus.connect([parse_contact(f"ipc://{place}")])
    late = make(0)
    assert early.bus.peers == {}
    publication = Publication(place, late.bus.address)
    until(lambda: late.bus.peers == {1: {"n"}})
    late.bus.emit("n", ("here",), {})
    until(lambda: early.got)
    publication.close()
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_comes_back_under_its_port_is_found_again(make: Callable[..., Listener]) -> None:
    port = fixed_port()
    first, two = make(0, port=port), make(1)
    place = tcp(first)
    two.bus.connect([parse_contact(place)])
    assert two.bus.peers == {0: set()}
    assert "inproc" in str(two.bus.node.connections())  # found by TCP, and linked by the fastest way
    first.bus.close()
    until(lambda: two.bus.peers == {})
    again = make(0, port=port)
    again.bus.subscribe("n")
    until(lambda: two.bus.peers == {0: {"n"}})
    two.bus.emit("n", (1,), {})
    until(lambda: again.got)


def test_nodes_find_each_other_through_a_store_in_any_topology(make: Callable[..., Listener], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    shapes = {"mesh": [{1, 2}, {0, 2}, {0, 1}], "star": [{1, 2}, {0}, {0}], "alone": [set(), {2}, {1}]}
    for topology, expected in shapes.items():
        nodes = [make(i) for i in range(3)]
        for i, node in enumerate(nodes):
            register = StoreRegister(f"file://{tmp_path}/{topology}", i, 5.0)
            attach_to = ["1_0_0"] if topology == "alone" and i == 2 else []
            node.bus.connect(contacts_of(attach_to, topology, i, node.bus.address, register))
        assert [set(node.bus.peers) for node in nodes] == expected, topology


def test_a_store_that_nobody_starts_is_an_error_that_says_who_should() -> None:
    pytest.importorskip("torch")
    with pytest.raises(WaitTimeoutError, match="node 0 starts it"):
        StoreRegister("tcp://127.0.0.1:9", 1, 1.0)


def test_two_nodes_with_one_id_are_refused_and_a_restarted_one_is_not(
    make: Callable[..., Listener], caplog: pytest.LogCaptureFixture
) -> None:
    one, two, double = make(0), make(1), make(1)
    linked(one, two)
    linked(one, double)
    assert "two nodes have the id 1" in caplog.text
    assert double.bus.peers == {}
    two.bus.node.close()  # as if killed: without a word
    until(lambda: one.bus.peers == {} or double.bus.peers)
    until(lambda: double.bus.peers == {0: set()})


def test_nobody_gets_in_without_the_secret(make: Callable[..., Listener], caplog: pytest.LogCaptureFixture) -> None:
    one, other = make(0), make(1, secret=b"another")
    linked(one, other)
    assert "secret" in caplog.text
    assert one.bus.peers == other.bus.peers == {}


VICTIM = """
import sys, time
from geartrain.integrations.di_engine import Bus
from geartrain.integrations.di_engine.discovery import parse_contact

bus = Bus("victim", 7, secret=b"known to all of us")
bus.set_handler(lambda topic, args, kwargs: [])
bus.subscribe("n")
bus.connect([parse_contact(sys.argv[1])])
print("linked", flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_peer_killed_in_the_middle_of_a_transfer_is_noticed_and_the_rest_goes_on(
    make: Callable[..., Listener], caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    changes: list[tuple[str, int]] = []
    one = make(0, transport=transport, on_change=lambda what, node_id, _: changes.append((what, node_id)))
    other = make(1, transport=transport)
    words: list[str] = []
    other.bus.set_handler(lambda topic, args, kwargs: words.extend(a for a in args if isinstance(a, str)) or [])
    linked(one, other)
    other.bus.subscribe("n")
    with killed(
        subprocess.Popen([sys.executable, "-c", VICTIM, tcp(one)], stdout=subprocess.PIPE, text=True)
    ) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "linked\n"
        until(lambda: len(one.bus.peers) == 2 and all(one.bus.peers.values()))
        array = np.zeros(40_000_000, np.uint8)
        threading.Timer(0.1, victim.send_signal, [signal.SIGKILL]).start()
        began = time.monotonic()
        while 7 in one.bus.peers:
            one.bus.emit("n", (array,), {})
            assert time.monotonic() - began < patience(20)
    assert changes[-1] == ("lost", 7)
    assert "node 7 is lost" in caplog.text
    assert one.bus.emit("n", ("still here",), {}) == 1
    until(lambda: words == ["still here"])


def test_a_stopped_peer_is_a_named_error_within_the_deadline(make: Callable[..., Listener]) -> None:
    one = make(0, timeout_s=1.0, window=Window(events=2))
    with killed(
        subprocess.Popen([sys.executable, "-c", VICTIM, tcp(one)], stdout=subprocess.PIPE, text=True)
    ) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "linked\n"
        until(lambda: one.bus.peers and all(one.bus.peers.values()))
        stop(victim.pid)
        began = time.monotonic()
        with pytest.raises(WaitTimeoutError, match="node 7 does not keep up"):
            for _ in range(5):
                one.bus.emit("n", (np.zeros(1_000_000, np.uint8),), {})
        assert time.monotonic() - began < patience(6)
    until(lambda: one.bus.peers == {})


def test_closing_ends_a_wait_for_room_and_leaves_no_thread_behind(make: Callable[..., Listener]) -> None:
    one, slow = make(0, window=Window(events=1), timeout_s=patience(30.0)), make(1)
    linked(one, slow)
    slow.bus.subscribe("n")
    until(lambda: one.bus.peers[1])
    slow.go.clear()
    one.bus.emit("n", (1,), {})
    ended: list[object] = []

    def emit() -> None:
        try:
            ended.append(one.bus.emit("n", (2,), {}))
        except GeartrainError as error:
            ended.append(error)

    thread = threading.Thread(target=emit)
    thread.start()
    time.sleep(0.1)
    one.bus.close()
    thread.join(patience(5))
    assert not thread.is_alive()
    slow.go.set()
