"""Connections that carry ordered messages between two processes, over the fastest transport that works between them.

    listener = transport.listen()
    mine = transport.connect(listener.address)        # usually in another process
    theirs = listener.accept()
    mine.send(b"what it is", [array])
    message = theirs.receive()                        # message.header, message.buffers

The transports, fastest first:

- `inproc`: both ends are in one process.
- `shm`: both ends are on one host. Messages go through a ring buffer in shared memory. Large buffers are leased in
  shared-memory segments instead of copied.
- `tcp`: everything else.

`connect` tries each transport in this order. It never compares host names, so containers work without configuration.
`connection.transport` names the transport in use. `connection.considered` says why a faster one does not work.

native/transport/transport.h documents threads, memory, lost peers, trust and forks. `geartrain.transport.codec` encodes
values. `geartrain.rpc` calls functions over connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import geartrain._native as _native
from geartrain.core.arguments import (
    SECONDS,
    Options,
    check_flag,
    check_real,
    check_secret,
    check_text,
    check_texts,
    check_type,
    check_whole,
    checked,
    did_you_mean,
    shown,
    timeout,
)
from geartrain.core.lifetime import Closing
from geartrain.errors import ArgumentError, TransportError
from geartrain.transport.tls import TLS

Message = _native.Message
Payload = _native.Payload

#: All transports, fastest first.
TRANSPORTS = ("inproc", "shm", "tcp")
#: TCP connections in addition to the first one.
MOST_LANES = 16


_LIMIT = checked(check_whole, 0, 2**64 - 1)


@dataclass(frozen=True)
class MessageLimits(Options):
    """Limits on what one side accepts from the other. A message beyond one is refused before memory is allocated.

    Attributes:
        max_header_bytes: bytes of a header.
        max_message_bytes: bytes of a message, with its buffers.
        max_buffers: buffers of a message.
        max_queued_bytes: bytes that are read ahead while a send waits.
        max_segment_bytes: shared memory that one connection uses and keeps.
        max_pending: connections to a listener that have not authenticated yet, and as many that wait for their lanes;
            at most a quarter of RLIMIT_NOFILE. Further peers retry until their `timeout_s`.
        handshake_timeout_s: longest duration of each step of a handshake, in seconds.

    Examples:
        >>> small = MessageLimits(max_message_bytes=1 << 20)
        >>> listener = listen(limits=small)
        >>> listener.close()
    """

    max_header_bytes: int = field(default=64 << 20, metadata=_LIMIT)
    max_message_bytes: int = field(default=16 << 30, metadata=_LIMIT)
    max_buffers: int = field(default=4096, metadata=_LIMIT)
    max_queued_bytes: int = field(default=256 << 20, metadata=_LIMIT)
    max_segment_bytes: int = field(default=8 << 30, metadata=_LIMIT)
    max_pending: int = field(default=1024, metadata=_LIMIT)
    handshake_timeout_s: float = field(default=5.0, metadata=SECONDS)


#: Options that connections, listeners and nodes have.
LIMITS = checked(lambda _, value: check_type("limits are geartrain.transport.MessageLimits", value, MessageLimits))
SPIN_US = checked(check_real, 0)


def viable() -> dict[str, str | None]:
    """Each transport with None, or the reason why it cannot work in this process.

    Examples:
        >>> viable()["inproc"] is None
        True
    """
    return {name: reason or None for name, reason in _native.transports().items()}


class Connection(Closing, elsewhere="connect again there, to the address of the listener"):
    """One end of a connection. Any thread may send. One thread at a time receives; others wait.

    Args:
        native: set by `connect` and `Listener.accept`; do not call the class itself.

    Examples:
        >>> import numpy as np
        >>> listener = listen()  # a Listener
        >>> mine = connect(listener.address)
        >>> theirs = listener.accept()
        >>> mine.send(b"numbers", [np.arange(3)])
        >>> message = theirs.receive()
        >>> bytes(message.header), message.buffers[0].view(np.int64).tolist()
        (b'numbers', [0, 1, 2])
        >>> mine.close(); theirs.close(); listener.close()
    """

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
        """Sends one message. When it returns, you may change the memory that you passed.

        Args:
            header: a few bytes; or an encoded value (`codec.encode`), which has its own buffers and takes no others.
            buffers: C-contiguous objects with the buffer protocol. The transport makes as few copies as it can.
            tag: a number below 2**64 that is sent with the message.
            kind: a number below 2**32 that is sent with the message.
            timeout_s: longest wait for a peer that does not receive, in seconds.

        Raises:
            ArgumentError: an argument has the wrong type or is out of range. Nothing was sent.
            MessageError: the message exceeds a limit. Nothing was sent.
            WaitTimeoutError: the peer received too slowly. If a part was sent, the connection ends.
            PeerLostError: the peer is lost.
            ConnectionClosedError: this end was closed.
        """
        self.native.send(
            check_whole("tag", tag, 0, 2**64 - 1),
            check_whole("kind", kind, 0, 2**32 - 1),
            _payload(header, buffers),
            timeout(timeout_s),
        )

    def receive(self, *, timeout_s: float = 30.0) -> Message:
        """Receives the next message. Its buffers are writable NumPy views that keep its memory alive.

        Args:
            timeout_s: longest wait, in seconds.

        Raises:
            WaitTimeoutError: no message in time.
            PeerLostError: the peer is lost, and everything that it had sent completely was received.
            MessageError: malformed data arrived. The connection has ended.
        """
        return self.native.receive(timeout(timeout_s))

    def expose(self, array: Any, *, writable: bool = False) -> MemoryRegion:
        """Exposes memory to one-sided reads and writes of the peer. They do not involve this side's program.

        Send the region's `handle` in any message; it is valid only for the peer of this connection. Nothing is copied.
        Access ends with `close()`, with the last reference to the region, and with the connection.

        Args:
            array: C-contiguous memory with the buffer protocol: a NumPy array, or a tensor's `.numpy()`.
            writable: whether the peer may write to it.

        Raises:
            ConnectionClosedError: this end is closed.
            ArgumentError: the object has no buffer, is not contiguous, or is read-only although `writable` is set.

        Examples:
            >>> import numpy as np
            >>> listener = listen()
            >>> mine = connect(listener.address)
            >>> theirs = listener.accept()
            >>> region = theirs.expose(np.arange(5))  # a MemoryRegion
            >>> into = np.empty(2, np.int64)
            >>> mine.read(region.handle, into, offset=16)
            >>> into
            array([2, 3])
        """
        return MemoryRegion(self.native.expose(_plain(array), check_flag("writable", writable)))

    def read(self, handle: bytes, into: Any, *, offset: int = 0, timeout_s: float = 30.0) -> None:
        """One-sided read: fills `into` from memory that the peer exposed, without involving its program.

        On one host the bytes are copied once, directly from the peer's memory, if a probe shows that this works
        (cross-memory attach; `counts()` says "cma"). Otherwise the peer's side-channel thread sends them ("served").
        Reads are not atomic: a concurrent write may be seen in part.

        Args:
            handle: the region's `handle`, received from this peer.
            into: writable, C-contiguous memory with the buffer protocol; all of it is filled.
            offset: first byte to read in the region.
            timeout_s: longest wait for a peer that does not serve the read, in seconds.

        Raises:
            RegionError: the region is closed, or too small.
            ArgumentError: this is not a handle; or `into` is read-only, not contiguous, or has no buffer.
            WaitTimeoutError, PeerLostError, ConnectionClosedError: the contents of `into` are undefined.
        """
        offset = check_whole("offset", offset, 0, 2**64 - 1)
        self.native.read(_handle(handle), _plain(into), offset, timeout(timeout_s))

    def write(self, handle: bytes, array: Any, *, offset: int = 0, timeout_s: float = 30.0) -> None:
        """One-sided write into memory that the peer exposed with `writable=True`; complete when it returns.

        The peer's side-channel thread copies from this process's memory ("cma"), or receives the bytes ("served").
        After an error the written part of the region is undefined.

        Args:
            handle: the region's `handle`, received from this peer.
            array: C-contiguous memory with the buffer protocol.
            offset: first byte to write in the region.
            timeout_s: longest wait for a peer that does not serve the write, in seconds.

        Raises:
            RegionError: the region is closed, too small, or read-only.
            ArgumentError: this is not a handle, or `array` is not contiguous or has no buffer.
            WaitTimeoutError, PeerLostError, ConnectionClosedError: the region's contents are undefined.
        """
        offset = check_whole("offset", offset, 0, 2**64 - 1)
        self.native.write(_handle(handle), _plain(array), offset, timeout(timeout_s))

    @property
    def one_sided(self) -> str:
        """How `read` and `write` work here: "memory", "cma", or "served: ..." with the reason; "" before the first."""
        return self.native.one_sided

    def describe(self) -> str:
        """The transport and both ends, as text for logs."""
        return self.native.describe()

    @property
    def transport(self) -> str:
        """Transport in use: one of `TRANSPORTS`."""
        return self.native.transport

    @property
    def considered(self) -> list[tuple[str, str]]:
        """Faster transports, and why each was not used. Empty on the accepting side."""
        return list(self.native.considered)

    @property
    def authenticated(self) -> bool:
        """Whether both sides proved in the handshake that they know the secret."""
        return self.native.authenticated

    @property
    def tls(self) -> str:
        """ "TLSv1.3" and the cipher if the connection is encrypted; otherwise ""."""
        return self.native.tls

    def counts(self) -> dict[str, Any]:
        """Messages each way, and bytes by path: memory, ring, segment, view, stream, lanes; cma, served."""
        return self.native.counts()

    def close(self) -> None:
        """Closes this end.

        Messages sent before are still delivered. Waits of other threads end with `ConnectionClosedError`.
        """
        self.native.close()

    def __repr__(self) -> str:
        state = " closed" if self.native.closed else " lost" if self.native.lost else ""
        return f"<Connection {self.native.describe()}{state}>"


class MemoryRegion(Closing, elsewhere="send its handle"):
    """Memory of this process that a peer can access. `Connection.expose` returns it.

    Access ends when the region is closed or garbage-collected.

    Args:
        native: set by `Connection.expose`; do not call the class itself.
    """

    def __init__(self, native: _native.Region) -> None:
        self.native = native

    @property
    def handle(self) -> bytes:
        """56 bytes with which the peer addresses the region, over the connection that exposed it."""
        return self.native.handle

    @property
    def nbytes(self) -> int:
        """Size of the region in bytes."""
        return self.native.nbytes

    @property
    def closed(self) -> bool:
        """Whether the region was closed on this side."""
        return self.native.closed

    def close(self) -> None:
        """Ends access. When it returns no write is in progress, and later reads and writes fail at the peer."""
        self.native.close()


class Listener(Closing, elsewhere="send its address, to which others connect"):
    """Accepts connections. A background thread performs the handshakes, so a slow client does not delay the others.

    Args:
        native: set by `listen`; do not call the class itself.
    """

    def __init__(self, native: _native.Listener) -> None:
        self.native = native

    @property
    def address(self) -> str:
        """Address for peers to connect to, with every transport that reaches this listener."""
        return self.native.address

    @property
    def refused(self) -> int:
        """Number of refused connections: garbage, failed authentication, or no handshake in time."""
        return self.native.refused

    @property
    def refusal(self) -> str:
        """Why the last refused connection was refused; "" if none was.

        The `WaitTimeoutError` of `accept` says it too.
        """
        return self.native.refusal

    def accept(self, *, timeout_s: float = 30.0) -> Connection:
        """The next connection that passed its handshake.

        Args:
            timeout_s: longest wait, in seconds.

        Raises:
            WaitTimeoutError: no connection in time.
            ConnectionClosedError: the listener was closed.
        """
        return Connection(self.native.accept(timeout(timeout_s)))

    def close(self) -> None:
        """Accepts no more connections. Accepted ones stay open."""
        self.native.close()

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
    spin_us: float = 50.0,
    views: bool = True,
    peer_timeout_s: float = 30.0,
    tls: TLS | Literal[False] | None = None,
) -> Listener:
    """Listens for peers in this process, on this host and, over TCP, on other hosts.

    Args:
        host: address to bind TCP to; None for no TCP. Any but loopback needs a secret.
        port: port to bind; 0 takes any free one.
        secret: the cluster's secret. Peers prove by HMAC that they know it; it is never sent.
        advertise: host names to put into the address, if peers know this host by other names.
        shm: whether peers on this host may connect through shared memory.
        limits: limits on what peers may send.
        spin_us: how long a receive spins before it sleeps, in microseconds; 0 never spins.
        views: receive large messages as views of shared memory; False copies them out at once.
        peer_timeout_s: a peer without heartbeats for this many seconds is lost: its process is stopped, or the network
            is cut. 0 never, otherwise at least 2. A program that hangs while its process runs is not noticed; that is
            what timeouts are for.
        tls: certificates, to encrypt TCP and authenticate both sides; shared memory is not affected. None uses the
            environment (`TLS.of_environment`), False uses none. The files are read once, here.

    Returns:
        The listener.

    Raises:
        TransportError: OpenSSL 3 is not installed.
        ArgumentError: a file of `tls` cannot be used, or an argument is out of range.
        UntrustedPeerError: the host is not loopback, and there is no secret.
        GeartrainError: the port is in use, or the address is not of this host.
    """
    options = options_of(secret, limits, spin_us, views, peer_timeout_s, tls)
    return Listener(native_listener(options, host, port, advertise, check_flag("shm", shm)))


def connect(
    address: str,
    *,
    transport: str | None = None,
    secret: bytes = b"",
    timeout_s: float = 10.0,
    limits: MessageLimits | None = None,
    spin_us: float = 50.0,
    views: bool = True,
    lanes: int | None = None,
    peer_timeout_s: float = 30.0,
    cross_memory: bool = True,
    tls: TLS | Literal[False] | None = None,
) -> Connection:
    """Connects to a listener, over the fastest transport that works or over a forced one.

    Args:
        address: the listener's `address`; or "id=any;tcp=host:port" for any listener there.
        transport: one of `TRANSPORTS`, to force it.
        secret: as for `listen`.
        timeout_s: longest duration of the whole call, in seconds.
        limits: as for `listen`.
        spin_us: as for `listen`.
        views: as for `listen`.
        lanes: further TCP connections, at most 16, which messages of 8 MiB and more use in parallel. None: 2. Under TLS
            they are used from 1.25 MiB on, and None stands for as many as there are cores (2 to 8), or `TLS.threads`.
        peer_timeout_s: as for `listen`.
        cross_memory: allow cross-memory attach for exposed memory; False has it served.
        tls: as for `listen`; set it on both sides or on neither.

    Returns:
        The connection.

    Raises:
        TransportError: no transport reaches the peer, or the forced one does not. The message has every reason.
        UntrustedPeerError: the secrets differ, only one side uses TLS, or a certificate was refused. The message says
            which and why.
        ArgumentError: a file of `tls` cannot be used.
        WaitTimeoutError: the peer did not reply in time.
    """
    options = options_of(secret, limits, spin_us, views, peer_timeout_s, tls)
    options["cross_memory"] = check_flag("cross_memory", cross_memory)
    if transport is not None:
        if check_text("transport", transport) not in TRANSPORTS:
            raise TransportError(
                f"there is no transport {shown(transport)}; there are {', '.join(TRANSPORTS)}"
                f"{did_you_mean(transport, TRANSPORTS)}"
            )
        options["transport"] = transport
    if lanes is not None:
        options["lanes"] = check_whole("lanes", lanes, 0, MOST_LANES)
    return Connection(_native.connect(check_text("address", address), options, timeout(timeout_s)))


def native_listener(
    options: dict[str, Any], host: str | None, port: int, advertise: Iterable[str], shm: bool = True
) -> _native.Listener:
    """The native listener of `listen`, with `options_of`. Raises `ArgumentError` for an invalid host or port."""
    bound = "" if host is None else check_text("host", host, empty=True)
    return _native.Listener.make(
        options, bound, check_whole("port", port, 0, 65535), check_texts("advertise", advertise), shm
    )


def options_of(
    secret: bytes,
    limits: MessageLimits | None,
    spin_us: float,
    views: bool,
    peer_timeout_s: float = 30.0,
    tls: TLS | Literal[False] | None = None,
) -> dict[str, Any]:
    """Options of the native layer. Raises `ArgumentError` for numbers that are none, or too large."""
    options: dict[str, Any] = {} if limits is None else asdict(LIMITS("limits", limits))
    certificates = TLS.of_environment() if tls is None else tls
    if isinstance(certificates, TLS):
        options |= certificates.options()
    elif certificates is not None and certificates is not False:
        raise ArgumentError(f"tls is geartrain.transport.TLS, False or None, found {shown(certificates)}")
    return options | {
        "secret": check_secret(secret),
        "spin_us": SPIN_US("spin_us", spin_us),
        "views": check_flag("views", views),
        "peer_timeout_s": SECONDS("peer_timeout_s", peer_timeout_s),
    }


def _payload(header: bytes | Payload, buffers: Iterable[Any]) -> Payload:
    """The arguments of `send` as one payload."""
    if isinstance(buffers, (str, bytes, bytearray, memoryview)) or hasattr(buffers, "dtype"):
        raise ArgumentError(f"a message's buffers are a sequence of them, found one {type(buffers).__name__}")
    try:
        each = [_plain(memory) for memory in buffers]
    except TypeError:
        raise ArgumentError(f"a message's buffers are a sequence of them, found a {type(buffers).__name__}") from None
    if isinstance(header, Payload):
        if each:
            raise ArgumentError(f"an encoded value has its own buffers and takes no others, found {len(each)}")
        return header
    if not isinstance(header, bytes):  # once a message: no call
        raise ArgumentError(
            "a message's header is bytes, or a value that geartrain.transport.codec.encode has encoded; "
            f"found a {type(header).__name__}"
        )
    return Payload(header, each)


def _handle(handle: bytes) -> bytes:
    if not isinstance(handle, bytes):
        hint = "; give its `handle`" if isinstance(handle, MemoryRegion) else ""
        raise ArgumentError(f"a region's handle is bytes, found a {type(handle).__name__}{hint}")
    return handle


def _plain(memory: Any) -> Any:
    """The same memory. Raises for arrays of Python objects.

    Addresses of Python objects mean nothing in another process, and a peer that writes there would end this process.
    """
    if memory is None:
        raise ArgumentError("memory is anything C-contiguous with the buffer protocol, found None")
    dtype = getattr(memory, "dtype", None)
    if getattr(dtype, "hasobject", False) or (isinstance(memory, memoryview) and "O" in memory.format):
        raise ArgumentError(
            f"memory of Python objects cannot be sent or exposed: found a {type(memory).__name__} of them"
        )
    return memory
