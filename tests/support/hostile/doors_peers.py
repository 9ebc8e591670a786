"""Calls of transports, RPC, weights and collectives, each with arguments that it takes."""

from __future__ import annotations

from typing import Any

import numpy as np

from geartrain import collectives, rpc, transport, weights
from hostile.subject import Tools
from hostile.values import SHORT_S, Door, door

# --- transport --------------------------------------------------------------------------------------------------------


@door("transport.listen")
def listen(tools: Tools) -> Door:
    return transport.listen, {}


@door("transport.connect")
def connect(tools: Tools) -> Door:
    listener = tools.enter(transport.listen())
    return transport.connect, {"address": listener.address, "timeout_s": SHORT_S}


@door("transport.MessageLimits")
def limits(tools: Tools) -> Door:
    def make(**arguments: Any) -> Any:
        return transport.listen(host=None, limits=transport.MessageLimits(**arguments))

    return make, dict(vars(transport.MessageLimits()))


@door("transport.TLS")
def tls(tools: Tools) -> Door:
    def make(certificate: Any, key: Any, ca: Any, name: Any, threads: Any) -> Any:
        return transport.listen(tls=transport.TLS(certificate, key, ca, name, threads))

    return make, {"certificate": "/none/a", "key": "/none/b", "ca": "/none/c", "name": "", "threads": 2}


@door("Listener.accept")
def accept(tools: Tools) -> Door:
    listener = tools.enter(transport.listen())

    def call(timeout_s: Any) -> None:
        tools.enter(transport.connect(listener.address))
        listener.accept(timeout_s=timeout_s)

    return call, {"timeout_s": SHORT_S}


def connected(tools: Tools) -> tuple[transport.Connection, transport.Connection]:
    listener = tools.enter(transport.listen())
    mine = tools.enter(transport.connect(listener.address))
    return mine, tools.enter(listener.accept())


@door("Connection.send")
def send(tools: Tools) -> Door:
    mine, theirs = connected(tools)

    def call(**arguments: Any) -> None:
        mine.send(**arguments)
        theirs.receive(timeout_s=tools.patience(5))

    return call, {"header": b"x", "buffers": [np.zeros(3)], "tag": 0, "kind": 0, "timeout_s": 5.0}


@door("Connection.receive")
def receive(tools: Tools) -> Door:
    mine, theirs = connected(tools)

    def call(timeout_s: Any) -> None:
        mine.send(b"x")
        theirs.receive(timeout_s=timeout_s)

    return call, {"timeout_s": SHORT_S}


@door("Connection.expose")
def expose(tools: Tools) -> Door:
    mine, _ = connected(tools)
    return mine.expose, {"array": np.zeros(8)}


@door("Connection.read")
def read(tools: Tools) -> Door:
    mine, theirs = connected(tools)
    region = theirs.expose(np.zeros(64), writable=True)
    tools.stack.callback(region.close)
    return mine.read, {"handle": region.handle, "into": np.zeros(8), "offset": 0, "timeout_s": 5.0}


@door("Connection.write")
def write(tools: Tools) -> Door:
    mine, theirs = connected(tools)
    region = theirs.expose(np.zeros(64), writable=True)
    tools.stack.callback(region.close)
    return mine.write, {"handle": region.handle, "array": np.zeros(8), "offset": 0, "timeout_s": 5.0}


# --- rpc --------------------------------------------------------------------------------------------------------------


@rpc.function(name="hostile.values.echo")
def echo(value: object = None) -> int:
    return 1


class Kept:
    """A class of objects that a peer keeps."""

    def __init__(self, value: object = None) -> None:
        self.value = value

    def get(self, value: object = None) -> int:
        return 1


@door("rpc.Node")
def node(tools: Tools) -> Door:
    return rpc.Node, {"name": "one", "timeout_s": 1.0}


@door("rpc.NodeOptions")
def node_options(tools: Tools) -> Door:
    def make(**arguments: Any) -> Any:
        return rpc.Node("one", timeout_s=1.0, options=rpc.NodeOptions(**arguments))

    return make, dict(vars(rpc.NodeOptions()))


@door("rpc.init")
def init(tools: Tools) -> Door:
    def call(**arguments: Any) -> None:
        try:
            rpc.init(**arguments)
        finally:
            rpc.shutdown()

    return call, {
        "name": "one",
        "rank": 0,
        "world_size": 1,
        "init_method": None,
        "store": None,
        "secret": None,
        "timeout_s": SHORT_S,
        "device_maps": None,
        "host": "127.0.0.1",
        "port": 0,
        "options": None,
    }


def nodes(tools: Tools) -> rpc.Node:
    there = tools.enter(rpc.Node("there"))
    here = tools.enter(rpc.Node("here", peers={"there": there.address}, timeout_s=tools.patience(5)))
    here.call("there", "hostile.values.echo")
    return here


@door("Node.call")
def call(tools: Tools) -> Door:
    here = nodes(tools)

    def one(**arguments: Any) -> None:
        arguments.setdefault("timeout_s", 1.0)
        if not isinstance(arguments["peer"], str) or arguments["peer"] != "there":
            arguments["timeout_s"] = SHORT_S
        here.call(**arguments)

    return one, {"peer": "there", "function": "hostile.values.echo", "value": 1, "timeout_s": 5.0}


@door("Node.call_async")
def call_async(tools: Tools) -> Door:
    here = nodes(tools)
    return here.call_async, {"peer": "there", "function": "hostile.values.echo", "timeout_s": SHORT_S}


@door("Node.tell")
def tell(tools: Tools) -> Door:
    here = nodes(tools)
    return here.tell, {"peer": "there", "function": "hostile.values.echo", "timeout_s": SHORT_S}


@door("Node.client")
def client(tools: Tools) -> Door:
    return nodes(tools).client, {"name": "there", "timeout_s": SHORT_S}


@door("Node.connected")
def node_connected(tools: Tools) -> Door:
    return nodes(tools).connected, {"name": "there"}


@door("Node.hang_up")
def hang_up(tools: Tools) -> Door:
    return nodes(tools).hang_up, {"name": "nobody"}


@door("Node.device_map")
def device_map(tools: Tools) -> Door:
    return nodes(tools).device_map, {"peer": "there"}


@door("Node.on_peer_lost")
def on_peer_lost(tools: Tools) -> Door:
    return tools.enter(rpc.Node("alone")).on_peer_lost, {"callback": print}


@door("Node.topic")
def topic(tools: Tools) -> Door:
    here = nodes(tools)

    def call(**arguments: Any) -> None:
        here.topic(**arguments).publish(1)

    return call, {"name": "t", "history": 1, "timeout_s": SHORT_S}


@door("Node.subscribe")
def subscribe(tools: Tools) -> Door:
    there = tools.enter(rpc.Node("there"))
    here = tools.enter(rpc.Node("here", peers={"there": there.address}, timeout_s=0.3))
    there.topic("t")
    return here.subscribe, {"peer": "there", "topic": "t", "callback": print}


@door("Node.unsubscribe")
def unsubscribe(tools: Tools) -> Door:
    return nodes(tools).unsubscribe, {"peer": "there", "topic": "t"}


@door("Node.wait_for")
def wait_for(tools: Tools) -> Door:
    here = nodes(tools)

    def call(name: Any, timeout_s: Any) -> None:
        here.wait_for(name, timeout_s=timeout_s)

    return call, {"name": "there", "timeout_s": SHORT_S}


@door("Node.why_not_gone")
def why_not_gone(tools: Tools) -> Door:
    here = nodes(tools)
    return here.why_not_gone, {"address": here.address}


@door("Node.remote")
def remote(tools: Tools) -> Door:
    there = tools.enter(rpc.Node("there"))
    here = tools.enter(rpc.Node("here", peers={"there": there.address}, timeout_s=0.3))
    return here.remote, {"peer": "there", "cls": "nothing.there"}


@door("Future.result")
def future_result(tools: Tools) -> Door:
    here = nodes(tools)
    return lambda timeout_s: here.call_async("there", "hostile.values.echo").result(timeout_s=timeout_s), {
        "timeout_s": 1.0
    }


@door("Future.exception")
def future_exception(tools: Tools) -> Door:
    here = nodes(tools)
    return lambda timeout_s: here.call_async("there", "hostile.values.echo").exception(timeout_s=timeout_s), {
        "timeout_s": 1.0
    }


@door("Future.add_done_callback")
def future_callback(tools: Tools) -> Door:
    future = nodes(tools).call_async("there", "hostile.values.echo")
    future.result()
    return future.add_done_callback, {"callback": lambda _: None}


@door("rpc.function")
def rpc_function(tools: Tools) -> Door:
    def call(name: Any, concurrent: Any, with_caller: Any) -> None:
        rpc.function(name=name, concurrent=concurrent, with_caller=with_caller)(lambda value: value)

    return call, {"name": "hostile.values.other", "concurrent": False, "with_caller": False}


@door("rpc.batched")
def rpc_batched(tools: Tools) -> Door:
    def call(**arguments: Any) -> None:
        rpc.batched(**arguments)

    return call, {"max_size": 4, "max_wait_us": 1000.0, "max_queued": 10, "stack": False, "on_batch": None}


@door("rpc.batch_stats")
def batch_stats(tools: Tools) -> Door:
    return rpc.batch_stats, {"function": "hostile.values.echo"}


@door("Histogram.quantile")
def quantile(tools: Tools) -> Door:
    return rpc.Histogram().quantile, {"q": 0.5}


# --- weights ----------------------------------------------------------------------------------------------------------


@door("weights.Publisher")
def publisher(tools: Tools) -> Door:
    return weights.Publisher, {"name": tools.name(), "directory": tools.folder()}


@door("Publisher.publish")
def publish(tools: Tools) -> Door:
    one = tools.enter(weights.Publisher(tools.name()))
    return one.publish, {"version": 2, "weights": {"w": np.ones(3)}, "timeout_s": SHORT_S}


@door("weights.Reader")
def reader(tools: Tools) -> Door:
    name = tools.name()
    tools.enter(weights.Publisher(name)).publish(1, {"w": np.ones(3)})
    return weights.Reader, {"name": name, "timeout_s": SHORT_S}


@door("Reader.latest")
def latest(tools: Tools) -> Door:
    name = tools.name()
    tools.enter(weights.Publisher(name)).publish(1, {"w": np.ones(3)})
    return tools.enter(weights.Reader(name)).latest, {"at_least": None, "timeout_s": SHORT_S}


@door("weights.describe")
def weights_describe(tools: Tools) -> Door:
    name = tools.name()
    tools.enter(weights.Publisher(name)).publish(1, {"w": np.ones(3)})
    return weights.describe, {"name": name}


@door("weights.names")
def weights_names(tools: Tools) -> Door:
    return weights.names, {}


@door("weights.reap")
def weights_reap(tools: Tools) -> Door:
    return weights.reap, {"directory": tools.folder()}


@door("weights.unlink")
def weights_unlink(tools: Tools) -> Door:
    return weights.unlink, {"name": tools.name(), "directory": tools.folder()}


# --- collectives ------------------------------------------------------------------------------------------------------


@door("collectives.Group")
def group(tools: Tools) -> Door:
    return collectives.Group, {"rank": 0, "world_size": 1, "timeout_s": 0.3}


@door("collectives.GroupOptions")
def group_options(tools: Tools) -> Door:
    def make(**arguments: Any) -> Any:
        return collectives.Group(0, 1, timeout_s=0.3, options=collectives.GroupOptions(**arguments))

    return make, dict(vars(collectives.GroupOptions()))


@door("collectives.Reducer")
def reducer(tools: Tools) -> Door:
    return collectives.Reducer, {}


def alone(tools: Tools) -> collectives.Group:
    return tools.enter(collectives.Group(0, 1))


@door("Group.all_reduce")
def all_reduce(tools: Tools) -> Door:
    return alone(tools).all_reduce, {"array": np.ones(8, np.float32)}


@door("Group.all_gather")
def all_gather(tools: Tools) -> Door:
    return alone(tools).all_gather, {"array": np.ones(8), "outputs": [np.ones(8)]}


@door("Group.all_to_all")
def all_to_all(tools: Tools) -> Door:
    return alone(tools).all_to_all, {"inputs": [np.ones(8)], "outputs": [np.ones(8)]}


@door("Group.reduce_scatter")
def reduce_scatter(tools: Tools) -> Door:
    return alone(tools).reduce_scatter, {"inputs": [np.ones(8)], "output": np.ones(8)}


@door("Group.broadcast")
def broadcast(tools: Tools) -> Door:
    return alone(tools).broadcast, {"array": np.ones(8), "root": 0}


@door("Group.close")
def group_close(tools: Tools) -> Door:
    return alone(tools).close, {"timeout_s": SHORT_S}


@door("Reducer.close")
def reducer_close(tools: Tools) -> Door:
    return tools.enter(collectives.Reducer()).close, {"timeout_s": SHORT_S}


@door("Work.wait")
def work_wait(tools: Tools) -> Door:
    one = alone(tools)
    return one.all_reduce_async(np.ones(8)).wait, {}
