"""Handshake of two NIXL agents, which verifies a link before it is used.

Each side proves that it can read and write the other side's memory.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from geartrain.core.lifetime import on_error
from geartrain.errors import GeartrainError, MessageError, TransportError
from geartrain.transport.connection import Connection
from geartrain.transport.one_sided.nixl.agent import this_agent
from geartrain.transport.one_sided.nixl.link import NixlLink, RegisteredRegion

_NONCE = 32


class NixlHandshake:
    """One side of a handshake, as `geartrain.transport.one_sided.Handshake` says.

    `attach` does this over a connection, `geartrain.rpc` does it by calls.
    """

    def __init__(self) -> None:
        self._agent = this_agent()
        self._nonce = secrets.token_bytes(_NONCE)
        self._scratch = np.zeros(2 * _NONCE, np.uint8)  # the nonce, and where the peer writes what it read
        self._scratch[:_NONCE] = np.frombuffer(self._nonce, np.uint8)
        self._region = RegisteredRegion(self._agent, self._scratch)
        about = self._agent.hello()
        self.hello: bytes = struct.pack("<I", len(about)) + about + self._region.descriptor

    def prove(self, hello: bytes, lost: Callable[[], bool], timeout_s: float = 10.0) -> NixlLink:
        """Reads the peer's nonce and writes it back, through NIXL. Raises `TransportError` when that does not work."""
        try:
            size = struct.unpack_from("<I", hello)[0]
            about, descriptor = hello[4 : 4 + size], hello[4 + size :]
        except struct.error:
            raise MessageError("this is no hello of NIXL's") from None
        link = NixlLink(self._agent, self._agent.join(about), lost)
        read = np.empty(_NONCE, np.uint8)
        try:
            link.read(read, descriptor, timeout_s=timeout_s)
            link.write(read, descriptor, offset=_NONCE, timeout_s=timeout_s)
        except GeartrainError as error:
            link.close()
            raise TransportError(f"nixl: the peer's memory cannot be read and written: {error}") from error
        return link

    def confirm(self) -> None:
        """Raises `TransportError` unless the peer has written this side's nonce back."""
        written = self._scratch[_NONCE:].tobytes()
        self._region.close()
        if written != self._nonce:
            raise TransportError("nixl: what the peer has read and written back is not this side's nonce")


def attach(connection: Connection, *, timeout_s: float = 30.0) -> NixlLink:
    """A link to the other side of a connection, which must attach too.

    Send nothing else on the connection until it returns.

    Raises:
        TransportError: NIXL does not work between the two; with the reason, also when it is the peer's.
        WaitTimeoutError, PeerLostError: the peer did not attach.
    """
    until_s = time.monotonic() + timeout_s

    def left_s() -> float:
        return max(0.0, until_s - time.monotonic())

    def or_report(work: Callable[[], Any]) -> Any:
        """The work's result; a failure is sent to the peer, which need not wait for its deadline."""
        try:
            return work()
        except GeartrainError as error:
            connection.send(b"!" + str(error).encode(), timeout_s=left_s())
            raise

    def receive() -> bytes:
        said = connection.receive(timeout_s=left_s()).header
        if said[:1] == b"!":
            raise TransportError(f"nixl does not work for the peer: {said[1:].decode(errors='replace')}")
        return said[1:]

    handshake = or_report(NixlHandshake)
    connection.send(b"." + handshake.hello, timeout_s=left_s())
    hello = receive()
    link: NixlLink = or_report(lambda: handshake.prove(hello, lambda: connection.native.lost, left_s()))
    with on_error(link.close):
        connection.send(b".proved", timeout_s=left_s())
        receive()
        handshake.confirm()
    return link
