"""Factories of connections, nodes and weights: whatever has a peer, except groups."""

from __future__ import annotations

import threading

import numpy as np

import geartrain.rpc as rpc
import geartrain.transport as transport
import geartrain.weights as weights
from geartrain.integrations.di_engine import Bus, Queue
from hostile.subject import Subject, Tools, factory, order_lock

# --- transport --------------------------------------------------------------------------------------------------------


def pair(tools: Tools, kind: str) -> tuple[transport.Listener, transport.Connection, transport.Connection]:
    listener = tools.enter(transport.listen())
    mine = transport.connect(listener.address, transport=kind)
    return listener, mine, tools.enter(listener.accept())


def connection_over(tools: Tools, kind: str) -> Subject:
    listener, one, other = pair(tools, kind)
    region = other.expose(np.arange(64), writable=True)
    into = np.zeros(8, np.int64)

    def echo() -> None:
        one.send(b"ping", [np.ones(1000)])
        other.receive(timeout_s=tools.patience(5))

    return Subject(
        calls={
            "send": echo,
            "receive": lambda: (other.send(b"x"), one.receive(timeout_s=tools.patience(5))),
            "expose": lambda: one.expose(np.arange(8)),
            "read": lambda: one.read(region.handle, into),
            "write": lambda: one.write(region.handle, into),
            "counts": one.counts,
            "describe": one.describe,
            "repr": lambda: repr(one),
            "about": lambda: (one.transport, one.considered, one.authenticated, one.tls, one.one_sided),
        },
        close=one.close,
        survives=frozenset({"counts", "describe", "repr", "about"}),
        blocked={"receive": lambda: one.receive(timeout_s=60)},
        work=lambda: one.send(b"x", [np.ones(1 << 16)]),
        owned=[listener, other, region],
    )


@factory(transport.Connection, "in process", waits=True)
def connection_in_process(tools: Tools) -> Subject:
    return connection_over(tools, "inproc")


@factory(transport.Connection, "shared memory", waits=True)
def connection_in_shared_memory(tools: Tools) -> Subject:
    return connection_over(tools, "shm")


@factory(transport.Connection, waits=True)
def connection_over_tcp(tools: Tools) -> Subject:
    return connection_over(tools, "tcp")


@factory(transport.Listener, waits=True)
def listener(tools: Tools) -> Subject:
    one = transport.listen()

    def reach() -> None:
        with transport.connect(one.address, timeout_s=tools.patience(5)), one.accept(timeout_s=tools.patience(5)):
            pass

    return Subject(
        calls={
            "accept": reach,
            "address": lambda: one.address,
            "refused": lambda: (one.refused, one.refusal),
            "repr": lambda: repr(one),
        },
        close=one.close,
        survives=frozenset({"address", "refused", "repr"}),
        blocked={"accept": lambda: one.accept(timeout_s=60)},
        work=lambda: transport.connect(one.address),
    )


@factory(transport.MemoryRegion)
def region(tools: Tools) -> Subject:
    listening, mine, other = pair(tools, "tcp")
    tools.enter(mine)
    one = other.expose(np.arange(64), writable=True)
    into = np.zeros(8, np.int64)
    return Subject(
        calls={
            "read": lambda: mine.read(one.handle, into, timeout_s=tools.patience(5)),
            "write": lambda: mine.write(one.handle, into, timeout_s=tools.patience(5)),
            "about": lambda: (one.nbytes, one.closed),
            "handle": lambda: one.handle,
        },
        close=one.close,
        survives=frozenset({"about", "handle"}),
        owned=[listening, mine, other],
    )


# --- calls ------------------------------------------------------------------------------------------------------------


class Counter:
    """A class whose objects peers keep."""

    def __init__(self) -> None:
        self.value = 0

    def add(self, n: int) -> int:
        self.value += n
        return self.value


@rpc.function(name="hostile.twice")
def twice(n: int) -> int:
    return 2 * n


_over = threading.Event()


@rpc.function(name="hostile.wait")
def wait(seconds: float) -> None:
    """Waits until the subjects of this process are cleaned up."""
    _over.wait(seconds)


rpc.function(name="hostile.Counter")(Counter)


def nodes(tools: Tools) -> tuple[rpc.Node, rpc.Node]:
    _over.clear()
    peer = tools.enter(rpc.Node("peer"))
    tools.stack.callback(_over.set)
    one = rpc.Node("one", peers={"peer": peer.address})
    tools.stack.callback(one.close)  # also where it cannot reach the peer
    return one, peer


@factory(rpc.Node, waits=True)
def node(tools: Tools) -> Subject:
    one, peer = nodes(tools)
    peer.directory.known["one"] = one.address
    news = peer.topic("news")
    made = iter(range(1_000_000))
    return Subject(
        calls={
            "call": lambda: one.call("peer", "hostile.twice", 21),
            "call_async": lambda: one.call_async("peer", "hostile.twice", 21).result(),
            "tell": lambda: one.tell("peer", "hostile.twice", 1),
            "remote": lambda: one.remote("peer", "hostile.Counter").close(),
            "topic": lambda: one.topic(f"topic-{next(made)}").publish(1),
            "subscribe": lambda: one.subscribe("peer", "news", lambda *_: None),
            "unsubscribe": lambda: one.unsubscribe("peer", "news"),
            "client": lambda: one.client("peer"),
            "wait_for": lambda: one.wait_for("peer"),
            "connected": lambda: one.connected("peer"),
            "figures": lambda: (one.connections(), one.considered(), one.authenticated(), one.counts()),
            "on_peer_lost": lambda: one.on_peer_lost(lambda *_: None),
            "repr": lambda: repr(one),
        },
        close=one.close,
        survives=frozenset({"connected", "figures", "on_peer_lost", "repr"}),
        blocked={"call": lambda: one.call("peer", "hostile.wait", 60.0)},
        work=lambda: one.call_async("peer", "hostile.wait", 0.2),
        owned=[peer, news],
    )


@factory(rpc.Node, "called by a peer", waits=True)
def called_node(tools: Tools) -> Subject:
    _over.clear()
    one = rpc.Node("one")
    tools.stack.callback(one.close)  # also where no peer can be made
    peer = tools.enter(rpc.Node("peer", peers={"one": one.address}))
    tools.stack.callback(_over.set)
    return Subject(
        calls={"call": lambda: peer.call("one", "hostile.twice", 1, timeout_s=tools.patience(5))},
        close=one.close,
        blocked={"call": lambda: peer.call("one", "hostile.wait", 60.0)},
        work=lambda: peer.call_async("one", "hostile.wait", 0.2),
        owned=[peer],
    )


@factory(rpc.Future, waits=True)
def future(tools: Tools) -> Subject:
    one, peer = nodes(tools)
    done = one.call_async("peer", "hostile.twice", 21)
    done.result()
    going = one.call_async("peer", "hostile.wait", 60.0)
    return Subject(
        calls={
            "result": done.result,
            "exception": done.exception,
            "done": lambda: (done.done(), going.done()),
            "add_done_callback": lambda: going.add_done_callback(lambda _: None),
        },
        close=one.close,
        survives=frozenset({"result", "exception", "done", "add_done_callback"}),
        blocked={"result": lambda: one.call_async("peer", "hostile.wait", 60.0).result()},
        work=lambda: one.call_async("peer", "hostile.wait", 0.2),
        owned=[peer],
    )


@factory(rpc.Remote)
def remote(tools: Tools) -> Subject:
    one, peer = nodes(tools)
    there = one.remote("peer", "hostile.Counter")
    return Subject(
        calls={
            "call": lambda: there.call("add", 1),
            "call_async": lambda: there.call_async("add", 1).result(),
            "repr": lambda: repr(there),
        },
        close=one.close,
        survives=frozenset({"repr"}),
        owned=[peer],
    )


@factory(rpc.Topic)
def topic(tools: Tools) -> Subject:
    one, peer = nodes(tools)
    news = one.topic("news")
    peer.directory.known["one"] = one.address
    peer.subscribe("one", "news", lambda *_: None)
    return Subject(
        calls={"publish": lambda: news.publish(np.ones(100)), "subscribers": lambda: news.subscribers},
        close=one.close,
        survives=frozenset({"subscribers", "publish"}),  # to nobody
        owned=[peer],
    )


# --- weights ----------------------------------------------------------------------------------------------------------

WEIGHTS = {"w": np.ones((64, 64), np.float32), "b": np.ones(64, np.float32)}


@factory(weights.Publisher, waits=True)
def publisher(tools: Tools) -> Subject:
    one = weights.Publisher(tools.name(), timeout_s=60)
    one.publish(0, WEIGHTS)
    versions = iter(range(1, 1_000_000_000))
    lock = order_lock()

    def publish() -> None:
        with lock:
            one.publish(next(versions), WEIGHTS)

    def publish_while_all_is_held() -> None:
        held = []
        with weights.Reader(one.name) as reader:
            while True:
                held.append(reader.latest(timeout_s=1))
                publish()

    return Subject(
        calls={"publish": publish, "version": lambda: one.version, "repr": lambda: repr(one)},
        close=one.close,
        survives=frozenset({"version", "repr"}),
        blocked={"publish": publish_while_all_is_held},
    )


@factory(weights.Reader, waits=True)
def reader(tools: Tools) -> Subject:
    name = tools.name()
    there = tools.enter(weights.Publisher(name))
    there.publish(1, WEIGHTS)
    one = weights.Reader(name)
    return Subject(
        calls={
            "latest": lambda: one.latest(timeout_s=tools.patience(1)),
            "version": lambda: one.version,
            "is_relay": lambda: one.is_relay,
        },
        close=one.close,
        survives=frozenset({"is_relay"}),
        blocked={"latest": lambda: one.latest(at_least=99, timeout_s=60)},
        work=one.latest,
        in_child=frozenset({"latest", "version"}),
        owned=[there],
    )


@factory(weights.Reader, "of another host", waits=True)
def following_reader(tools: Tools) -> Subject:
    name = tools.name()
    trainer = tools.enter(rpc.Node("trainer"))
    there = tools.enter(weights.Publisher(name, node=trainer))
    there.publish(1, WEIGHTS)
    mine = tools.enter(rpc.Node("actor", peers={"trainer": trainer.address}))
    one = weights.Reader(name, node=mine, source="trainer")
    return Subject(
        calls={"latest": lambda: one.latest(timeout_s=tools.patience(5)), "version": lambda: one.version},
        close=one.close,
        blocked={"latest": lambda: one.latest(at_least=99, timeout_s=60)},
        work=one.latest,
        owned=[there, trainer, mine],
    )


@factory(weights.Snapshot)
def snapshot(tools: Tools) -> Subject:
    name = tools.name()
    there = tools.enter(weights.Publisher(name))
    there.publish(1, WEIGHTS)
    reading = weights.Reader(name)
    one = reading.latest()
    return Subject(
        calls={"[]": one["w"].sum, "iter": lambda: list(one), "copy": one.copy, "repr": lambda: repr(one)},
        close=reading.close,
        survives=frozenset({"[]", "iter", "copy", "repr"}),
        in_child=frozenset({"[]"}),
        owned=[there],
    )


# --- DI-engine --------------------------------------------------------------------------------------------------------


@factory(Bus)
def bus(tools: Tools) -> Subject:
    from geartrain.integrations.di_engine.discovery import parse_contact

    one = Bus("one", 0)
    tools.stack.callback(one.close)  # also where no other can be made, nor be joined
    other = Bus("other", 1)
    tools.stack.callback(other.close)
    got = threading.Event()
    other.set_handler(lambda *_: (got.set(), [])[1])
    other.subscribe("news")
    one.connect([parse_contact(other.address)])
    return Subject(
        calls={
            "emit": lambda: one.emit("news", (1,), {}),
            "subscribe": lambda: one.subscribe("x"),
            "unsubscribe": lambda: one.unsubscribe(["x"]),
            "about": lambda: (one.address, one.peers, one.topics),
        },
        close=one.close,
        survives=frozenset({"about", "emit", "subscribe", "unsubscribe"}),  # to nobody: DI-engine's loops may emit late
        owned=[other],
    )


@factory(Queue, waits=True)
def queue(tools: Tools) -> Subject:
    one = Queue("tcp://127.0.0.1:0")
    tools.stack.callback(one.stop)  # also where it cannot listen
    one.listen()
    return Subject(
        calls={
            "publish": lambda: one.publish("x", b"1"),
            "emit": lambda: one.emit("x", (1,), {}),
            "subscribe": lambda: one.subscribe("x"),
            "unsubscribe": lambda: one.unsubscribe("x*"),
            "listen": one.listen,
        },
        close=one.stop,
        survives=frozenset({"publish", "emit", "subscribe", "unsubscribe", "listen"}),
        blocked={"recv": one.recv},
    )
