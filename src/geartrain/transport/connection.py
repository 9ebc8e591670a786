"""Connections: ordered messages between two processes, over the fastest transport that works between them.

    listener = transport.listen()
    mine = transport.connect(listener.address)        # usually in another process
    theirs = listener.accept()
    mine.send(b"what it is", [array])
    message = theirs.receive()                        # message.header, message.buffers

Providers, fastest first: `inproc` (both ends in one process), `shm` (one host: a ring in shared memory, big buffers in
segments that are leased, not copied) and `tcp`. Each is tried, and host names are never compared, so containers are
fine; `connection.transport` is the one in use and `connection.considered` says why not a faster one.
native/transport/transport.h is the manual: threads, memory, lost peers, trust and forks.

`geartrain.transport.codec` encodes values; `geartrain.rpc` calls functions over connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Literal, NoReturn, SupportsIndex

import geartrain._native as _native
from geartrain.core.arguments import (
    check_flag,
    check_real,
    check_secret,
    check_text,
    check_texts,
    did_you_mean,
    refuse_copies,
    shown,
    timeout,
    whole_number,
)
from geartrain.errors import ArgumentError, TransportError
from geartrain.transport.tls import TLS

Message = _native.Message
Payload = _native.Payload

#: All transports, fastest first.
TRANSPORTS = ("inproc", "shm", "tcp")
#: TCP connections beside the first one.
MOST_LANES = 16


@dataclass(frozen=True)
class MessageLimits:
    """Limits on what one side accepts from the other. A message beyond one is refused before memory is allocated.

    `max_queued_bytes` bounds what is read ahead while a send waits; `max_segment_bytes` the shared memory that one
    connection leases out and keeps warm; `max_pending` the connections to a listener that have yet to authenticate, and
    as many again that wait for their lanes (a quarter of RLIMIT_NOFILE where that is less), each step of a handshake
    for `handshake_timeout_s`. Peers for whom there is no place try again until their `timeout_s`.
    """

    max_header_bytes: int = 64 << 20
    max_message_bytes: int = 16 << 30
    max_buffers: int = 4096
    max_queued_bytes: int = 256 << 20
    max_segment_bytes: int = 8 << 30
    max_pending: int = 1024
    handshake_timeout_s: float = 5.0


def viable() -> dict[str, str | None]:
    """Each transport with None, or the reason why it cannot work in this process."""
    return {name: reason or None for name, reason in _native.transports().items()}


class Connection:
    """One end of a connection. Any thread may send; one at a time receives, others block."""

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
        """Sends one message. When this returns, the caller may change its memory.

        Args:
            header: a few bytes; or an encoded value (`codec.encode`), which has its own buffers and takes no others.
            buffers: anything with the buffer protocol, C-contiguous; not copied more often than the transport needs.
            tag: a number below 2**64 and
            kind: one below 2**32, which are part of the message.
            timeout_s: how long to wait for a peer that does not receive.

        Raises:
            ArgumentError: one of these is of another type, or out of its range; nothing was sent.
            MessageError: a limit is exceeded; nothing was sent.
            WaitTimeoutError: the peer received too slowly. A message sent in part ends the connection.
            PeerLostError, ConnectionClosedError: the connection has ended.
        """
        self.native.send(
            whole_number("tag", tag, 2**64 - 1),
            whole_number("kind", kind, 2**32 - 1),
            _payload(header, buffers),
            timeout(timeout_s),
        )

    def receive(self, *, timeout_s: float = 30.0) -> Message:
        """The next message; its buffers are writable NumPy views that keep its memory alive.

        Raises:
            WaitTimeoutError: none came in time.
            PeerLostError: the peer is gone, and all that it had sent completely has been received.
            MessageError: malformed data arrived; the connection has ended.
        """
        return self.native.receive(timeout(timeout_s))

    def expose(self, array: Any, *, writable: bool = False) -> MemoryRegion:
        """Exposes memory to one-sided reads of the peer's, and to writes; neither involves this side's program.

        Send the region's `handle` in any message: it is valid on the peer's end of this connection only. Nothing is
        copied. Access ends with `close()`, with the last reference to the region, and with the connection.

        Args:
            array: anything with the buffer protocol, C-contiguous: a NumPy array, a tensor's `.numpy()`.
            writable: whether the peer may write it.

        Raises:
            ConnectionClosedError: this end is closed.
            ArgumentError: this is no memory; or it is not contiguous, or read-only and to be written.

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
        return MemoryRegion(self.native.expose(_plain(array), check_flag("writable", writable)))

    def read(self, handle: bytes, into: Any, *, offset: int = 0, timeout_s: float = 30.0) -> None:
        """One-sided read: fills `into` from memory that the peer exposed, without involving its program.

        Args:
            handle: the region's, from a message of this peer.
            into: anything writable with the buffer protocol, C-contiguous; as many bytes as it has are read.
            offset: of the first byte in the region.
            timeout_s: how long to wait for a peer that does not serve the read.

        On one host the bytes are copied once, directly from the peer's memory (cross-memory attach: `counts()` says
        "cma"), where a probe showed that this works; else the peer's side-channel thread sends them ("served"). Reads
        are not atomic: concurrent writes may be seen in part.

        Raises:
            RegionError: the region is closed, or too small.
            ArgumentError: this is not a handle; `into` is read-only, not contiguous or no memory.
            WaitTimeoutError, PeerLostError, ConnectionClosedError: the contents of `into` are undefined.
        """
        offset = whole_number("offset", offset, 2**64 - 1)
        self.native.read(_handle(handle), _plain(into), offset, timeout(timeout_s))

    def write(self, handle: bytes, array: Any, *, offset: int = 0, timeout_s: float = 30.0) -> None:
        """One-sided write into memory that the peer exposed with `writable=True`; complete when this returns.

        The peer's side-channel thread copies from this process's memory ("cma"), or receives the bytes ("served").
        Arguments and errors as for `read`; after an error the written part of the region is undefined.
        """
        offset = whole_number("offset", offset, 2**64 - 1)
        self.native.write(_handle(handle), _plain(array), offset, timeout(timeout_s))

    @property
    def one_sided(self) -> str:
        """How `read` and `write` work here: "memory", "cma", or "served: ..." with why not the former; "" at first."""
        return self.native.one_sided

    def describe(self) -> str:
        """The transport and both ends, for people and logs."""
        return self.native.describe()

    @property
    def transport(self) -> str:
        """The provider in use: one of `TRANSPORTS`."""
        return self.native.transport

    @property
    def considered(self) -> list[tuple[str, str]]:
        """The faster transports, and why each was not taken. Empty on the accepting side."""
        return list(self.native.considered)

    @property
    def authenticated(self) -> bool:
        """Whether both sides proved in the handshake that they know the secret."""
        return self.native.authenticated

    @property
    def tls(self) -> str:
        """ "TLSv1.3" and the cipher where the connection is encrypted, else ""."""
        return self.native.tls

    def counts(self) -> dict[str, Any]:
        """Messages each way, and bytes by path: memory, ring, segment, view, stream, lanes; cma, served."""
        return self.native.counts()

    def close(self) -> None:
        """Closes this end. What was sent is still delivered; other threads' waits end with `ConnectionClosedError`."""
        self.native.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copies(self, "connect again there, to the address of the listener")

    def __repr__(self) -> str:
        state = " closed" if self.native.closed else " lost" if self.native.lost else ""
        return f"<Connection {self.native.describe()}{state}>"


class MemoryRegion:
    """Memory exposed to a peer until this is closed or collected: `Connection.expose`."""

    def __init__(self, native: _native.Region) -> None:
        self.native = native

    @property
    def handle(self) -> bytes:
        """56 bytes with which the peer addresses it, over the connection that it was exposed on."""
        return self.native.handle

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.native.nbytes

    @property
    def closed(self) -> bool:
        """Whether it was closed on this side."""
        return self.native.closed

    def close(self) -> None:
        """Ends access. When this returns no write is under way, and later reads and writes fail at the peer."""
        self.native.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copies(self, "send its handle")

    def __enter__(self) -> MemoryRegion:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Listener:
    """Accepts connections; a thread of its own does the handshakes, so that no client delays another."""

    def __init__(self, native: _native.Listener) -> None:
        self.native = native

    @property
    def address(self) -> str:
        """Text for peers to connect to, with every transport that reaches this listener."""
        return self.native.address

    @property
    def refused(self) -> int:
        """Refused connections: garbage, failed authentication, or no handshake in time."""
        return self.native.refused

    @property
    def refusal(self) -> str:
        """Why the last of them was refused; "" when none was. Also in the `WaitTimeoutError` of `accept`."""
        return self.native.refusal

    def accept(self, *, timeout_s: float = 30.0) -> Connection:
        """The next connection that passed its handshake. Raises `WaitTimeoutError`, `ConnectionClosedError`."""
        return Connection(self.native.accept(timeout(timeout_s)))

    def close(self) -> None:
        """Accepts no more connections; those accepted stay open."""
        self.native.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copies(self, "send its address, to which others connect")

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
    spin_us: float = 50.0,
    views: bool = True,
    peer_timeout_s: float = 30.0,
    tls: TLS | Literal[False] | None = None,
) -> Listener:
    """A listener for peers in this process, on this host and, over TCP, elsewhere.

    Args:
        host: to bind TCP to; None for no TCP. Anything but loopback needs a secret.
        port: 0 takes any free one.
        secret: the cluster's. Peers prove by HMAC that they know it; it is not sent.
        advertise: hosts to put into the address, when peers know this one by other names.
        shm: whether peers on this host may connect through shared memory.
        limits: of what peers may send.
        spin_us: how long a receive busy-waits before it sleeps, where recent waits were short; 0: never.
        views: whether big messages are received as views of shared memory, or copied out at once.
        peer_timeout_s: a peer without heartbeats for so long is lost, whether a call waits for it or not: its process
            is stopped, or the network is cut. 0 for never (debuggers stop processes), or 2 and more. A program that
            hangs while its process runs is not noticed: that is what timeouts are for.
        tls: certificates, to encrypt TCP and authenticate both sides; shared memory is not affected. None for what the
            environment says (`TLS.of_environment`), False for none. The files are read here, once.

    Raises:
        TransportError, ArgumentError: OpenSSL 3 is not installed; a file of `tls` cannot be used.
        UntrustedPeerError: the host is not loopback, and there is no secret.
        GeartrainError: the port is in use, or the host is not this one.
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
        lanes: further TCP connections, 16 at most, used in parallel by messages of 8 MiB and more. None for 2; under
            TLS, where they are used from 1.25 MiB on and each may be encrypted by a thread of its own, for as many as
            there are cores, 2 to 8, or `TLS.threads`.
        timeout_s: for all of it.
        secret, limits, spin_us, views, peer_timeout_s: as for `listen`.
        cross_memory: whether exposed memory may be accessed by cross-memory attach; False has it served.
        tls: as for `listen`, and on both sides or on neither.

    Raises:
        TransportError: no transport, or not the forced one, reaches the peer; with every reason.
        UntrustedPeerError: the secrets differ; only one side uses TLS; or a certificate is refused: says which, and
            why.
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
        options["lanes"] = whole_number("lanes", lanes, MOST_LANES)
    return Connection(_native.connect(check_text("address", address), options, timeout(timeout_s)))


def native_listener(
    options: dict[str, Any], host: str | None, port: int, advertise: Iterable[str], shm: bool = True
) -> _native.Listener:
    """The native listener of `listen`, with `options_of`. Raises `ArgumentError` for what is no host or port."""
    bound = "" if host is None else check_text("host", host, empty=True)
    return _native.Listener.make(
        options, bound, whole_number("port", port, 65535), check_texts("advertise", advertise), shm
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
    if limits is not None and not isinstance(limits, MessageLimits):
        raise ArgumentError(f"limits are geartrain.transport.MessageLimits, found {shown(limits)}")
    options: dict[str, Any] = {} if limits is None else asdict(limits)
    for name, value in options.items():
        options[name] = float(timeout(value, name)) if name.endswith("_s") else whole_number(name, value, 2**64 - 1)
    certificates = TLS.of_environment() if tls is None else tls
    if isinstance(certificates, TLS):
        options |= certificates.options()
    elif certificates is not None and certificates is not False:
        raise ArgumentError(f"tls is geartrain.transport.TLS, False or None, found {shown(certificates)}")
    spin_us = check_real("spin_us", spin_us)
    if spin_us < 0:
        raise ArgumentError(f"spin_us is 0 or more, found {spin_us}")
    return options | {
        "secret": check_secret(secret),
        "spin_us": spin_us,
        "views": check_flag("views", views),
        "peer_timeout_s": float(timeout(peer_timeout_s, "peer_timeout_s")),
    }


def _payload(header: bytes | Payload, buffers: Iterable[Any]) -> Payload:
    """What `send` was given, as one payload."""
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
    if not isinstance(header, bytes):
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
    """The same memory, unless it holds Python's objects: their addresses mean nothing elsewhere, and a peer that writes
    there would end this process."""
    if memory is None:
        raise ArgumentError("memory is anything C-contiguous with the buffer protocol, found None")
    dtype = getattr(memory, "dtype", None)
    if getattr(dtype, "hasobject", False) or (isinstance(memory, memoryview) and "O" in memory.format):
        raise ArgumentError(f"memory of Python objects is not sent or exposed: found a {type(memory).__name__} of them")
    return memory
