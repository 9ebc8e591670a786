"""Messages between two processes, over the fastest way that both can really use.

    listener = transport.listen()
    mine = transport.connect(listener.address)        # usually in another process
    theirs = listener.accept()
    mine.send(b"what it is", [array])
    message = theirs.receive()                        # message.header, message.buffers

Providers, fastest first: `inproc` (both ends in one process), `shm` (one host: a ring in shared memory, big buffers in
segments that are lent, not copied) and `tcp`. Which one works is found by doing it, never by comparing host names, so
containers are fine; `connection.transport` says what it came to and `connection.considered` why not something faster.
native/transport/transport.h is the manual: threads, memory, death, trust and forks.

`geartrain.transport.codec` makes parcels of values; `geartrain.rpc` calls functions over connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Literal

import geartrain._native as _native
from geartrain.errors import TransportError
from geartrain.transport.tls import TLS

Message = _native.Message
Payload = _native.Parcel

#: The transports there are, fastest first.
TRANSPORTS = ("inproc", "shm", "tcp")


@dataclass(frozen=True)
class MessageLimits:
    """What one side takes from the other. A message beyond a limit is refused before memory is taken for it.

    `max_queued_bytes` bounds what is read ahead while a send waits; `max_segment_bytes` the shared memory that one
    connection lends and keeps warm; `max_pending` the connections to a listener that have not proved themselves yet,
    each of them for `handshake_timeout_s`.
    """

    max_header_bytes: int = 64 << 20
    max_message_bytes: int = 16 << 30
    max_buffers: int = 4096
    max_queued_bytes: int = 256 << 20
    max_segment_bytes: int = 8 << 30
    max_pending: int = 64
    handshake_timeout_s: float = 5.0


def viable() -> dict[str, str | None]:
    """Each transport with None, or the reason why it cannot work in this process."""
    return {name: reason or None for name, reason in _native.transports().items()}


class Connection:
    """One end of a connection. Any thread may send; one at a time receives, others wait for their turn."""

    def __init__(self, native: _native.Connection) -> None:
        self.native = native

    def send(
        self,
        header: bytes | Payload,
        buffers: Sequence[Any] = (),
        *,
        tag: int = 0,
        kind: int = 0,
        timeout_s: float = 30.0,
    ) -> None:
        """Sends one message. When this returns, its memory may be changed again.

        Args:
            header: a few bytes; or a payload, which has its own buffers.
            buffers: anything with the buffer protocol, C-contiguous; not copied more often than the way demands.
            tag: a number below 2**64 and
            kind: one below 2**32 that travel with the message as they are.
            timeout_s: how long to wait for a peer that does not take it.

        Raises:
            MessageError: a limit is exceeded; nothing was sent.
            WaitTimeoutError: the peer took it too slowly. A message that had half left ends the connection.
            PeerLostError, ConnectionClosedError: there is nobody to send to.
        """
        payload = header if isinstance(header, Payload) else Payload(header, list(buffers))
        self.native.send(tag, kind, payload, timeout_s)

    def receive(self, *, timeout_s: float = 30.0) -> Message:
        """The next message; its buffers are writable NumPy views that keep its memory.

        Raises:
            WaitTimeoutError: none came in time.
            PeerLostError: the peer is gone, and all that it had sent whole has been received.
            MessageError: what came is not a message; the connection has ended.
        """
        return self.native.receive(timeout_s)

    def expose(self, array: Any, *, writable: bool = False) -> MemoryRegion:
        """Lets the peer read this memory, or write it as well, without a message and without this program's doing.

        The region's `handle` travels in any message; the peer's end of this connection takes it, and no other. Nothing
        is copied. It ends with `close()`, with the last reference to the region, and with the connection.

        Args:
            array: anything with the buffer protocol, C-contiguous: a NumPy array, a tensor's `.numpy()`.
            writable: whether the peer may write it.

        Raises:
            ConnectionClosedError: this end is closed.
            BufferError, ValueError: the memory is read-only, or not contiguous.

        Example:
            >>> import numpy as np
            >>> listener = listen()
            >>> mine = connect(listener.address)
            >>> theirs = listener.accept()
            >>> region = theirs.expose(np.arange(5))
            >>> into = np.empty(2, np.int64)
            >>> mine.read(region.handle, into, offset=16)
            >>> into
            array([2, 3])
        """
        return MemoryRegion(self.native.expose(array, writable))

    def read(self, handle: bytes, into: Any, *, offset: int = 0, timeout_s: float = 30.0) -> None:
        """Fills `into` from memory that the peer exposed. Its program need not receive, or do anything, for that.

        Args:
            handle: the region's, from a message of this peer.
            into: anything writable with the buffer protocol, C-contiguous; as many bytes as it has are read.
            offset: of the first byte in the region.
            timeout_s: how long to wait for a peer that does not serve it.

        On one host the bytes come straight out of the peer's memory (`counts()` says "cma"), in one copy, where a
        probe showed that this works; else a thread of the peer's transport sends them ("served"). What is written
        there meanwhile may be seen in part: reads are not atomic.

        Raises:
            RegionError: the region is closed, or too small.
            ArgumentError: this is not a handle.
            WaitTimeoutError, PeerLostError, ConnectionClosedError: `into` then holds anything.
        """
        self.native.read(handle, into, offset, timeout_s)

    def write(self, handle: bytes, array: Any, *, offset: int = 0, timeout_s: float = 30.0) -> None:
        """Copies into memory that the peer exposed with `writable=True`; it is there when this returns.

        The peer's transport fetches it out of this process's memory ("cma"), or is sent it ("served"). Arguments and
        errors as for `read`; after an error the region holds anything from `offset` on, for as much as `array` has.
        """
        self.native.write(handle, array, offset, timeout_s)

    @property
    def one_sided(self) -> str:
        """How `read` and `write` work here: "memory", "cma", or "served: ..." with why not the former; "" at first."""
        return self.native.one_sided

    def describe(self) -> str:
        """The way, and its ends, for people and logs."""
        return self.native.describe()

    @property
    def transport(self) -> str:
        """The provider in use: one of `TRANSPORTS`."""
        return self.native.transport

    @property
    def considered(self) -> list[tuple[str, str]]:
        """The faster transports, and why each was not taken. Empty on the listener's side."""
        return list(self.native.considered)

    @property
    def authenticated(self) -> bool:
        """Whether both sides proved that they know the secret."""
        return self.native.authenticated

    @property
    def tls(self) -> str:
        """ "TLSv1.3" and the cipher, where all that goes over this connection is encrypted; else ""."""
        return self.native.tls

    def counts(self) -> dict[str, Any]:
        """Messages each way, and bytes by path: memory, ring, segment, view, stream, lanes; cma, served."""
        return self.native.counts()

    def close(self) -> None:
        """Hangs up. What was sent is still delivered; waits in other threads end with `ConnectionClosedError`."""
        self.native.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self.native.closed else " lost" if self.native.lost else ""
        return f"<Connection {self.native.describe()}{state}>"


class MemoryRegion:
    """Memory that a peer may use until this is closed, or gone: `Connection.expose`."""

    def __init__(self, native: _native.Region) -> None:
        self.native = native

    @property
    def handle(self) -> bytes:
        """56 bytes that let the peer use it, over the connection that it was exposed on."""
        return self.native.handle

    @property
    def nbytes(self) -> int:
        """How many bytes there are."""
        return self.native.nbytes

    @property
    def closed(self) -> bool:
        """Whether it was closed on this side."""
        return self.native.closed

    def close(self) -> None:
        """Ends it. When this returns nobody writes to the memory, and what is read from then on is an error there."""
        self.native.close()

    def __enter__(self) -> MemoryRegion:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Listener:
    """Takes connections; a thread of its own answers handshakes, so that nobody can hold up another."""

    def __init__(self, native: _native.Listener) -> None:
        self.native = native

    @property
    def address(self) -> str:
        """What to give to peers: text, for any way that this listener can be reached."""
        return self.native.address

    @property
    def refused(self) -> int:
        """Connections that were turned away: garbage, no proof, or nothing said in time."""
        return self.native.refused

    @property
    def refusal(self) -> str:
        """Why the last of them was turned away; "" when none was. `accept` says it as well when it waits in vain."""
        return self.native.refusal

    def accept(self, *, timeout_s: float = 30.0) -> Connection:
        """The next connection that proved itself. Raises `WaitTimeoutError`, `ConnectionClosedError`."""
        return Connection(self.native.accept(timeout_s))

    def close(self) -> None:
        """Takes no more connections; those accepted live on."""
        self.native.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Listener {self.address}>"


def listen(
    host: str | None = "127.0.0.1",
    port: int = 0,
    *,
    secret: bytes = b"",
    advertise: Iterable[str] = (),
    shm: bool = True,
    limits: MessageLimits | None = None,
    spin_us: float = 30.0,
    views: bool = True,
    peer_timeout_s: float = 30.0,
    tls: TLS | Literal[False] | None = None,
) -> Listener:
    """A listener for peers in this process, on this host and, over TCP, elsewhere.

    Args:
        host: to bind TCP to; None for no TCP. Anything but loopback needs a secret.
        port: 0 takes any free one.
        secret: the cluster's. Peers prove that they know it, without sending it.
        advertise: hosts to put into the address, when peers know this one by other names.
        shm: whether peers on this host may come through shared memory.
        limits: of what peers may send.
        spin_us: how long a receive looks again and again before it sleeps; it learns to do without.
        views: hand out big messages of shared memory where they are; else copy them out at once.
        peer_timeout_s: a peer without a sign of life for so long is lost, whether anybody waits for it or not: its
            process is stopped, or the way to it is cut. 0 for never (debuggers stop processes), or 2 and more. A
            program that hangs while its process runs is not noticed: deadlines are for that.
        tls: certificates, for TCP to be encrypted and mutually authenticated; shared memory is not concerned. None for
            what the environment says (`TLS.of_environment`), False for none. The files are read here, once.

    Raises:
        TransportError, ArgumentError: there is no OpenSSL 3 on this machine; a file of `tls` cannot be used.
        UntrustedPeerError: everyone could reach it, and there is no secret.
        GeartrainError: the port is taken, or the host is not this one.
    """
    options = options_of(secret, limits, spin_us, views, peer_timeout_s, tls)
    return Listener(_native.Listener.make(options, host or "", port, list(advertise), shm))


def connect(
    address: str,
    *,
    transport: str | None = None,
    secret: bytes = b"",
    timeout_s: float = 10.0,
    limits: MessageLimits | None = None,
    spin_us: float = 30.0,
    views: bool = True,
    lanes: int = 2,
    peer_timeout_s: float = 30.0,
    cross_memory: bool = True,
    tls: TLS | Literal[False] | None = None,
) -> Connection:
    """A connection to a listener, over the fastest transport that works or over the one asked for.

    Args:
        address: the listener's `address`; or "id=any;tcp=host:port" for whoever listens there.
        transport: one of `TRANSPORTS`, to force it.
        lanes: TCP connections beside the first one, for messages of 8 MiB and more.
        timeout_s: for all of it.
        secret, limits, spin_us, views, peer_timeout_s: as for `listen`.
        cross_memory: whether exposed memory may be reached straight in the other process; False has it served.
        tls: as for `listen`, and on both sides or on neither.

    Raises:
        TransportError: no transport, or not the one asked for, reaches the peer; with every reason.
        UntrustedPeerError: the secrets are not the same; one side uses TLS and the other does not, or a certificate is
            refused: says which, and why.
        ArgumentError: a file of `tls` cannot be used.
        WaitTimeoutError: the peer did not answer in time.
    """
    options = options_of(secret, limits, spin_us, views, peer_timeout_s, tls)
    options["cross_memory"] = cross_memory
    if transport is not None:
        if transport not in TRANSPORTS:
            raise TransportError(f"there is no transport {transport!r}; there are {', '.join(TRANSPORTS)}")
        options["transport"] = transport
    options["lanes"] = lanes
    return Connection(_native.connect(address, options, timeout_s))


def options_of(
    secret: bytes,
    limits: MessageLimits | None,
    spin_us: float,
    views: bool,
    peer_timeout_s: float = 30.0,
    tls: TLS | Literal[False] | None = None,
) -> dict[str, Any]:
    """What the native layer wants to know."""
    options: dict[str, Any] = {} if limits is None else asdict(limits)
    shown = TLS.of_environment() if tls is None else tls
    if shown:
        options |= shown.options()
    return options | {
        "secret": bytes(secret),
        "spin_us": float(spin_us),
        "views": views,
        "peer_timeout_s": float(peer_timeout_s),
    }
