"""`Caller`: tells a function registered `with_caller` which peer called it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from geartrain.rpc.node import Node


class Caller(Protocol):
    """The caller of a function: `@rpc.function(with_caller=True)` passes it before the call's own arguments.

    Examples:
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
        """Name of the calling node, as it states itself."""

    @property
    def authenticated(self) -> bool:
        """Whether the caller proved that it knows the cluster's secret."""

    @property
    def node(self) -> Node:
        """Node of this process that was called."""

    def keep(self, kept: Any) -> int:
        """Keeps an object for the caller until the caller drops it or is lost; returns its number.

        Args:
            kept: the object. The caller reaches it as `Remote(node, peer, number)`.
        """
