"""Type of the first argument of functions registered `with_caller`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from geartrain.rpc.node import Node


class Caller(Protocol):
    """Who calls a function: `@rpc.function(with_caller=True)` passes it before the caller's own arguments.

    Example:
        >>> from geartrain import rpc
        >>> @rpc.function(with_caller=True)
        ... def greet(caller: rpc.Caller, greeting: str) -> str:
        ...     return f"{greeting} {caller.name}"
        >>> with rpc.Node("server") as server, rpc.Node("ada", peers={"server": server.address}) as client:
        ...     client.call("server", greet, "hello")
        'hello ada'
    """

    @property
    def name(self) -> str:
        """The calling node's name, as it says itself."""

    @property
    def authenticated(self) -> bool:
        """Whether it proved that it knows the cluster's secret."""

    @property
    def node(self) -> Node:
        """The node of this process that is called."""

    def keep(self, kept: Any) -> int:
        """Keeps an object for the client, until it drops it or is lost: `Remote(node, peer, number)` calls it."""
