"""Remote procedure calls between named peers, with tensors and plain values as arguments and results.

    @rpc.function
    def add(a, b):
        return a + b

    rpc.init("worker", rank=1, world_size=2, init_method="tcp://10.0.0.1:29500")
    rpc.call("learner", "add", 1, 2)                   # waits
    rpc.call_async("learner", add, 1, 2).result()      # a registered function stands for its name
    await rpc.call_async("learner", add, 1, 2)

Order. The server runs the calls of one client one after the other, in the order in which the client made them. Calls
of different clients run concurrently. `@rpc.function(concurrent=True)` exempts a function from this order.

Concurrency. Python runs one thread at a time, so by default only one function starts at a time (`max_running`). The
next function starts when the current one returns or has run for 5 ms. It also starts when the current one waits for a
call of its own, or is cancelled at its deadline. Batched functions and `async def` functions count as returned at
once. An `async def` function needs no thread.

Deadlines and lost peers. Every wait has a deadline. If a peer is lost, calls to it fail with `PeerLostError`, and
`on_peer_lost` is called. The next call finds a peer that was restarted under the same name.

Encoding. Functions are addressed by name. `geartrain.transport.codec` encodes values, and decoding executes no code. If
every peer has the same `secret`, pickle sends other Python objects and unregistered functions. `pickle=False` forbids
this.

Threads. The calling thread itself sends the call and receives the reply (native/transport/rpc/pending_calls.h). On the
server, a thread that waits for messages runs the function and replies (native/transport/rpc/inbox.h).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import geartrain.rpc.probe  # every node answers it
import geartrain.rpc.tensors.calls  # noqa: F401  # and these
from geartrain.core.arguments import check_keywords, check_store, check_whole, timeout
from geartrain.core.lifetime import on_error
from geartrain.errors import ArgumentError, GeartrainError, PeerLostError
from geartrain.rpc.caller import Caller
from geartrain.rpc.future import Future
from geartrain.rpc.node import Node
from geartrain.rpc.options import NodeOptions
from geartrain.rpc.pubsub import Topic
from geartrain.rpc.registry import batch_stats, batched, function
from geartrain.rpc.remote_objects import Remote
from geartrain.rpc.stats import BatchDone, BatchStats, Histogram
from geartrain.transport.rendezvous import store_of

_node: Node | None = None


def init(
    name: str,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    init_method: str | None = None,
    store: Any = None,
    secret: bytes | None = None,
    timeout_s: float = 60.0,
    device_maps: Any = None,
    **options: Any,
) -> Node:
    """Joins the other processes, and makes this process's node, which the functions of this module use.

    Args:
        name: name by which peers address this process.
        rank: number of this process among those that start together.
        world_size: number of processes that start together. `init` waits for all of them. More may join later, without
            a rank.
        init_method: "tcp://host:port", "env://" (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE) or "file:///path", as for
            `torch.distributed`. Rank 0 starts the tcp store.
        store: a c10d store instead.
        secret: the cluster's secret; by default the environment variable GEARTRAIN_SECRET.
        timeout_s: longest wait for the others, in seconds.
        device_maps: `device_map` of `Node`.
        options: as for `Node`.

    Returns:
        The node.

    Raises:
        WaitTimeoutError: some processes did not join in time. The message names the missing ranks.
        NameTakenError: another node has this name or rank, and is alive or may be.
        ArgumentError: an argument is out of range.
        GeartrainError: this process has a node already; call `shutdown` first.

    Examples:
        >>> from geartrain import rpc
        >>> @rpc.function
        ... def squared(a):
        ...     return a * a
        >>> import socket, contextlib
        >>> with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        ...     port = free.getsockname()[1]
        >>> node = rpc.init("worker", rank=0, world_size=1, init_method=f"tcp://127.0.0.1:{port}")
        >>> rpc.call("worker", "squared", 2), rpc.call_async("worker", squared, 3).result()
        (4, 9)
        >>> rpc.shutdown()
    """
    global _node
    check_keywords("rpc.init", options, Node)
    if _node is not None:
        raise GeartrainError(
            f"this process has joined as {_node.name!r} already: call rpc.shutdown() first, or make a Node"
        )
    timeout(timeout_s)
    check_store(store)
    for what, number in (("rank", rank), ("world_size", world_size)):
        if number is not None:
            check_whole(what, number, 0, 2**31 - 1)
    if world_size is not None and not (0 if rank is None else rank) < world_size:
        raise ArgumentError(f"ranks are from 0 to world_size - 1, found rank={rank}, world_size={world_size}")
    if store is None and init_method is not None:
        store, rank, world_size = store_of(init_method, rank, world_size, timeout_s)
    if secret is None:
        secret = os.environ.get("GEARTRAIN_SECRET", "").encode()
    node = Node(name, store=store, secret=secret, timeout_s=timeout_s, device_map=device_maps, **options)
    _node = node  # before the others can call: their functions may ask for it
    with on_error(shutdown):
        node.directory.join(name, rank, world_size, timeout_s, node.why_not_gone)
    return node


def node() -> Node:
    """This process's node. Raises `GeartrainError` before `init`."""
    if _node is None:
        raise GeartrainError("this process has not joined: call rpc.init(name, ...) first")
    return _node


def call(
    peer: str, function: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
) -> Any:
    """Calls a function of a peer through this process's node, and waits for the result.

    Args:
        peer, function, args, timeout_s, kwargs: as for `Node.call`.

    Raises:
        RemoteError, WaitTimeoutError, PeerLostError, UnknownPeerError: as for `Node.call`.
    """
    return node().call(peer, function, *args, timeout_s=timeout_s, **kwargs)


def call_async(
    peer: str, function: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
) -> Future:
    """Sends a call through this process's node, and returns its `Future`.

    Args:
        peer, function, args, timeout_s, kwargs: as for `Node.call`.
    """
    return node().call_async(peer, function, *args, timeout_s=timeout_s, **kwargs)


def shutdown() -> None:
    """Closes this process's node without waiting for peers. One that still calls it gets `PeerLostError`."""
    global _node
    if _node is not None:
        _node.close()
        _node = None


def _forget_parents_node() -> None:
    global _node
    _node = None


os.register_at_fork(after_in_child=_forget_parents_node)

__all__ = [
    "BatchDone",
    "BatchStats",
    "Caller",
    "Future",
    "Histogram",
    "Node",
    "NodeOptions",
    "PeerLostError",
    "Remote",
    "Topic",
    "batch_stats",
    "batched",
    "call",
    "call_async",
    "function",
    "init",
    "node",
    "shutdown",
]
