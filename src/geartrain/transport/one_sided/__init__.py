"""One-sided access to the memory of peers (RDMA): the interface of its backends.

A backend is a package in this folder. Its name is what users pass: `Node(transport=name)`, or
`GEARTRAIN_RANK_CARRIER=name`. Nothing else in geartrain names one, and a backend is imported when it is asked for.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, Protocol, cast

from geartrain.errors import TransportError
from geartrain.transport.connection import Connection


class Region(Protocol):
    """Exposed memory. Peers that know its descriptor may write and read it until it is closed."""

    address: int
    nbytes: int
    descriptor: bytes

    def close(self) -> None:
        """Ends access. A peer's write that is under way may continue."""


class Link(Protocol):
    """Access to the exposed memory of one peer. See a backend's class for errors."""

    @property
    def ended(self) -> str:
        """Why the link has ended; "" while it is open."""

    def write(
        self, memory: Any, descriptor: bytes, *, offset: int = 0, nbytes: int | None = None, timeout_s: float = 30.0
    ) -> None:
        """Writes an array, a tensor or a `Region` into a peer's region. The write is complete when this returns."""

    def close(self) -> None:
        """Ends the link. The connection that it was made over stays open."""


class Handshake(Protocol):
    """One side of a handshake. It proves that each side can access the other's memory.

    Send `hello` to the other side. Call `prove` with the other side's hello, and tell the other side when it has
    returned. Call `confirm` after the other side has reported the same.
    """

    hello: bytes

    def prove(self, hello: bytes, lost: Callable[[], bool], timeout_s: float = 10.0) -> Link:
        """The link to the other side. Raises `TransportError` if its memory cannot be accessed."""

    def confirm(self) -> None:
        """Raises `TransportError` unless the other side has accessed this side's memory."""


class Backend(Protocol):
    """What the package of a backend defines."""

    def why_not(self) -> str | None:
        """None if the backend works in this process, else the reason. The first call may take seconds."""

    def describe(self) -> str:
        """The backend and its network, for people."""

    def expose(self, memory: Any) -> Region:
        """Exposes a contiguous array or tensor. Raises `TransportError` if the backend does not work."""

    def start_handshake(self) -> Handshake:
        """This process's side of a handshake. Raises `TransportError` if the backend does not work."""

    def attach(self, connection: Connection, *, timeout_s: float = 30.0) -> Link:
        """Does the handshake over a connection, whose other side must attach too."""


def names() -> tuple[str, ...]:
    """The backends in this folder."""
    return tuple(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)


def backend(name: str) -> Backend:
    """A backend by its name. Raises `TransportError` if there is none of that name."""
    if name not in names():
        raise TransportError(f"there is no one-sided transport {name!r}, only {', '.join(names())}")
    return cast(Backend, importlib.import_module(f"{__name__}.{name}"))
