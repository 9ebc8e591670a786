"""Remote procedure calls between named peers, with tensors and plain values as arguments and results.

    @rpc.function
    def add(a, b):
        return a + b

    rpc.init("worker", rank=1, world_size=2, init_method="tcp://10.0.0.1:29500")
    rpc.call("learner", "add", 1, 2)                   # waits
    rpc.call_async("learner", add, 1, 2).result()      # a registered function stands for its name
    await rpc.call_async("learner", add, 1, 2)

A call is sent, and its reply received, by the thread that makes it (native/transport/rpc/pending_calls.h); on the
other side a thread that has waited for any client executes the function and replies itself
(native/transport/rpc/inbox.h).

A client's calls are executed in the order in which it made them, one after the other; different clients' concurrently.
The next one begins when a function returns (a batched or async one at once), waits for a call of its own, or is
cancelled at its deadline. `@rpc.function(concurrent=True)` opts out of the order. Of all clients together, one function
begins at a time (`max_running`), for Python runs one thread at a time: the next when it returns, has run for 5 ms, or
waits. An `async def` needs no thread.

Every wait has a deadline. A lost peer fails its calls with `PeerLostError` and is reported to `on_peer_lost`; the next
call finds a peer that has restarted under its name.

Functions are addressed by name, and values are encoded by `geartrain.transport.codec`, which executes nothing. Where
every peer has the same `secret`, Python objects and functions that are not registered go by pickle as well;
`pickle=False` forbids it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import geartrain.rpc.probe  # every node answers it
import geartrain.rpc.tensors.calls  # noqa: F401  # and these
from geartrain.core.arguments import check_keywords, check_store, timeout, whole_number
from geartrain.errors import ArgumentError, GeartrainError, PeerLostError
from geartrain.rpc.caller import Caller
from geartrain.rpc.future import Future
from geartrain.rpc.node import Node
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
    """Rendezvous with the other processes, and this process's node, which the functions of this module use.

    Args:
        name: by which peers address this process.
        rank, world_size: of the processes that start together; `init` waits until all have joined. More may join
            later, without a rank.
        init_method: "tcp://host:port", "env://" (MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE) or "file:///path", as
            for `torch.distributed`; the tcp store is started by rank 0.
        store: a c10d store instead.
        secret: the cluster's; by default the environment's GEARTRAIN_SECRET.
        device_maps: `Node`'s `device_map`.
        options: as for `Node`.

    Raises:
        WaitTimeoutError: not all joined in time; names the missing ranks.
        NameTakenError: another node has this name or this rank, and is not known to be gone.
        ArgumentError: `timeout_s` is not from 0 to 1e9 seconds.
    """
    global _node
    check_keywords("rpc.init", options, Node)
    if _node is not None:
        raise GeartrainError(f"this process has joined as {_node.name!r} already; rpc.shutdown() first, or make a Node")
    timeout(timeout_s)
    check_store(store)
    for what, number in (("rank", rank), ("world_size", world_size)):
        if number is not None:
            whole_number(what, number, 2**31 - 1)
    if world_size is not None and not (0 if rank is None else rank) < world_size:
        raise ArgumentError(f"ranks are from 0 to world_size - 1, found rank={rank}, world_size={world_size}")
    if store is None and init_method is not None:
        store, rank, world_size = store_of(init_method, rank, world_size, timeout_s)
    if secret is None:
        secret = os.environ.get("GEARTRAIN_SECRET", "").encode()
    node = Node(name, store=store, secret=secret, timeout_s=timeout_s, device_map=device_maps, **options)
    _node = node  # before the others can call: their functions may ask for it
    try:
        node.directory.join(name, rank, world_size, timeout_s, node.why_not_gone)
    except BaseException:
        shutdown()
        raise
    return node


def node() -> Node:
    """This process's node. Raises `GeartrainError` before `init`."""
    if _node is None:
        raise GeartrainError("this process has not joined: rpc.init(name, ...) first")
    return _node


def call(
    peer: str, function: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
) -> Any:
    """`Node.call` of this process's node."""
    return node().call(peer, function, *args, timeout_s=timeout_s, **kwargs)


def call_async(
    peer: str, function: str | Callable[..., Any], *args: Any, timeout_s: float | None = None, **kwargs: Any
) -> Future:
    """`Node.call_async` of this process's node."""
    return node().call_async(peer, function, *args, timeout_s=timeout_s, **kwargs)


def shutdown() -> None:
    """Closes this process's node, without waiting for peers: one that still calls it gets `PeerLostError`."""
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
