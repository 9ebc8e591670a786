"""Remote objects: a server keeps an object for a client, and the client calls its methods through a handle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from geartrain.core.lifetime import Uncopied
from geartrain.errors import ObjectGoneError
from geartrain.rpc.future import Future
from geartrain.rpc.registry import function, functions

if TYPE_CHECKING:
    from geartrain.rpc.session import ServerSession

MAKE, METHOD, DROP = "geartrain.rpc.make", "geartrain.rpc.method", "geartrain.rpc.drop"


class CallingNode(Protocol):
    """The part of a node that handles use."""

    def call(self, peer: str, function: str, /, *args: Any, timeout_s: float | None = None) -> Any:
        """The result of a peer's function."""

    def call_async(self, peer: str, function: str, /, *args: Any, timeout_s: float | None = None) -> Future:
        """As `call`, but returns a `Future`."""

    def tell(self, peer: str, function: str, /, *args: Any, timeout_s: float | None = None) -> None:
        """A call without a reply."""


class Remote(Uncopied, elsewhere="make another one there, with node.remote(...)"):
    """Handle of an object that a peer keeps. `remote.call("method", ...)` calls it there.

    Args:
        node: this process's node.
        peer: name of the peer.
        number: number of the object, as `Caller.keep` returned it.

    Examples:
        >>> from geartrain import rpc
        >>> @rpc.function
        ... class Tally:
        ...     def __init__(self):
        ...         self.n = 0
        ...     def add(self, k):
        ...         self.n += k
        ...         return self.n
        >>> server = rpc.Node("server")
        >>> client = rpc.Node("client", peers={"server": server.address})
        >>> tally = client.remote("server", Tally)  # a Remote
        >>> tally.call("add", 5)
        5
        >>> tally.close(); client.close(); server.close()
    """

    def __init__(self, node: CallingNode, peer: str, number: int) -> None:
        self._node, self.peer, self._number = node, peer, number

    def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Calls a method of the object and waits for the result. Raises the same errors as `Node.call`.

        Args:
            method: name of the method.
            args: positional arguments.
            timeout_s: deadline of the call, in seconds; the node's by default.
            kwargs: keyword arguments.
        """
        return self._node.call(self.peer, METHOD, self._number, method, args, kwargs, timeout_s=timeout_s)

    def call_async(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Future:
        """Sends a call of a method and returns its `Future`.

        Args:
            method, args, timeout_s, kwargs: as for `call`.
        """
        return self._node.call_async(self.peer, METHOD, self._number, method, args, kwargs, timeout_s=timeout_s)

    def tell(self, what: str, *args: Any) -> None:
        """Internal: calls one of the peer's functions about the object, without a reply."""
        self._node.tell(self.peer, what, self._number, *args)

    def close(self) -> None:
        """Tells the peer to drop the object."""
        self._node.call(self.peer, DROP, self._number)

    def __repr__(self) -> str:
        return f"<Remote {self._number} of {self.peer!r}>"


def _make(session: ServerSession, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    cls = functions.get(name)
    if not isinstance(cls, type):
        raise LookupError(f"no class {name!r} is registered")
    return session.keep(cls(*args, **kwargs))


def _method(session: ServerSession, number: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if method.startswith("_") and method != "__call__":
        raise AttributeError(f"{method!r} is private: clients call public methods and __call__")
    if number not in session.objects:
        raise ObjectGoneError(
            "the object is gone: it was dropped, or the connection that made it was lost. Make another one"
        )
    return getattr(session.objects[number], method)(*args, **kwargs)


def _drop(session: ServerSession, number: int) -> None:
    session.objects.pop(number, None)


function(name=MAKE, with_caller=True)(_make)
function(name=METHOD, with_caller=True)(_method)
function(name=DROP, with_caller=True)(_drop)
