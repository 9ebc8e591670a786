"""`TransportCarrier`: moves messages between ranks through shared memory within a host, and over TCP across hosts.

Connections. Each rank has a listener and publishes its address in the job's key-value store. Two ranks connect when
they first have messages for each other, the higher rank to the lower. geartrain then tests which transport works
(geartrain.transport.connection), so containers of one host share memory only if they can. Shared memory is in memfds,
which have no name in /dev/shm and disappear with their last process.

Authentication. Rank 0 generates a random key and puts it into the key-value store. Listeners reject peers that cannot
prove they know it. With TLS (`geartrain.transport.tls`) connections between hosts are encrypted.

Messages. All messages of an exchange from one rank to another travel as one. Up to `INLINE_BYTES` go as a header, in
the ring. Larger ones go as buffers, in a segment or over the socket.

Deadlocks. A send over TCP may wait until its peer receives, while that peer waits in its own send to a third rank. So a
separate thread makes long sends, in parallel with the receives. Both follow the order of a ring: send to rank + 1,
rank + 2, ..., receive from rank - 1, rank - 2, ... The sends and receives of the lowest distance then always have both
ends at work, so the ranks never wait in a circle.
"""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np

import geartrain._native as _native
from geartrain.core.threads import DaemonThread
from geartrain.errors import (
    ConnectionClosedError,
    GeartrainError,
    ListenerGoneError,
    MessageError,
    PeerLostError,
    WaitTimeoutError,
)
from geartrain.ranks.carrier import INLINE_BYTES, Bytes, CarrierError, Cause, Message, by_peer
from geartrain.transport.connection import Connection, Listener, connect

# How long a rank waits for one peer before it looks after the others.
GLANCE_S = 0.5
# How long an accepted connection may take to say which rank it is of.
HELLO_S = 5.0

# Kind of the message that tells why a rank leaves, and for how long it is tried to be sent.
REASON = 1
TELL_S = 1.0

# First message of a connection: the dialer's rank.
HELLO = struct.Struct("<8sQ")
MAGIC = b"GTRANKS1"


class TransportCarrier:
    """Carrier of messages by shared memory and TCP. Made by `open_carrier` (carrier_addresses.py).

    Args:
        listener: this rank's listener.
        addresses: addresses of all ranks.
        rank: this rank in the group.
        key: key that authenticates connections.
        transport: the transport to use; None for the fastest that works.
        failed: returns whether another rank has reported a failure. Called while this rank waits for a peer to connect.

    Attributes:
        rounds: numbers all exchanges of the group, and makes the exchanges of small messages once all are connected.
        rank, size: this rank in the group, and the group's size.
        connections: by rank, for the ranks that this one has exchanged messages with.
        closed: whether this rank has left the group.
    """

    def __init__(
        self,
        listener: Listener,
        addresses: Sequence[str],
        rank: int,
        key: bytes,
        failed: Callable[[], bool],
        transport: str | None = None,
    ) -> None:
        self._listener = listener
        self._addresses = addresses
        self.rank = rank
        self.size = len(addresses)
        self._key = key
        self._failed = failed
        self.rounds = _native.RankRounds(rank, len(addresses), INLINE_BYTES)
        self._transport = transport
        self.connections: dict[int, Connection] = {}
        self._lock = threading.Lock()  # of the connections, and of their closing
        self.closed = False

    def exchange(self, number: int, sends: Sequence[Message], receives: Sequence[Message], until_s: float) -> None:
        incoming = by_peer(receives)
        for peer, parts in self.transfer(number, by_peer(sends), incoming, until_s):
            self.put(peer, parts, incoming[peer])

    def all_to_all(self, number: int, parts: Sequence[Bytes], until_s: float) -> list[Bytes]:
        """Numbers are those of exchanges."""
        if self.rounds.carries(max(part.size for part in parts)):
            try:
                return self.rounds.all_to_all(number, parts, max(until_s - time.monotonic(), 0.001))
            except GeartrainError as error:
                raise self.error_of_round(error) from error
        outgoing = {peer: [part] for peer, part in enumerate(parts) if peer != self.rank}
        received = list(parts)
        for peer, found in self.transfer(number, outgoing, outgoing.keys(), until_s):
            received[peer] = found[0] if found else np.empty(0, np.uint8)
        return received

    def transfer(
        self, number: int, outgoing: Mapping[int, list[Bytes]], incoming: Collection[int], until_s: float
    ) -> Iterator[tuple[int, list[Bytes]]]:
        """Sends to some peers, and receives from some: one message each, as it is taken from the iterator."""
        self.connect({*outgoing, *incoming} - self.connections.keys(), until_s)
        later: list[tuple[int, list[Bytes]]] = []
        for peer in sorted(outgoing, key=lambda peer: (peer - self.rank) % self.size):
            arrays = outgoing[peer]
            if incoming and self._may_wait(peer, sum(array.size for array in arrays)):
                later.append((peer, arrays))
            else:
                self.send(number, peer, arrays, until_s)
        sender = None
        if later:
            sender = _Sender(lambda: self._send_all(number, later, until_s))
        here: dict[int, list[Bytes]] = {}
        for peer in sorted(incoming, key=lambda peer: (self.rank - peer) % self.size):
            self.receive(number, peer, incoming, here, until_s)
            yield peer, here[peer]
            here[peer] = []
        if sender is not None:  # where a receive has failed the group is closed, which ends the sends
            sender.join()

    def peers(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for connection in list(self.connections.values()):
            found[connection.transport] = found.get(connection.transport, 0) + 1
        return found

    def shm_peers(self) -> set[int]:
        """The peers that are connected through shared memory."""
        with self._lock:
            return {peer for peer, each in self.connections.items() if each.transport == "shm"}

    def lost_peers(self) -> set[int]:
        """The peers whose connections have ended."""
        with self._lock:
            return {peer for peer, each in self.connections.items() if each.native.found_lost()}

    def close(self, reason: str = "") -> None:
        """Sends the reason to all connected ranks, because the store may be gone before they read it."""
        with self._lock:
            closed, self.closed = self.closed, True
            connections = list(self.connections.values())
        self._listener.close()
        until_s = time.monotonic() + TELL_S
        for connection in connections if reason and not closed else ():
            if time.monotonic() < until_s:  # one that does not take it sees the connection close
                with contextlib.suppress(GeartrainError):
                    connection.send(reason.encode(), kind=REASON, timeout_s=TELL_S / 10)
        for connection in connections:
            connection.close()

    # --- messages -----------------------------------------------------------------------------------------------------

    def put(self, peer: int, parts: Sequence[Bytes], wanted: Sequence[Bytes]) -> None:
        """Copies a peer's message into the arrays that it is wanted in."""
        nbytes, found = sum(array.size for array in wanted), sum(part.size for part in parts)
        if found != nbytes or (len(parts) > 1 and len(parts) != len(wanted)):
            raise CarrierError(peer, Cause.refused, f"sent {found} bytes where {nbytes} were expected")
        if len(parts) == len(wanted):
            for into, part in zip(wanted, parts, strict=True):
                into[:] = part
            return
        at = 0  # within the header, which has all of them
        for into in wanted:
            into[:] = parts[0][at : at + into.size]
            at += into.size

    def _may_wait(self, peer: int, nbytes: int) -> bool:
        """Whether a send of this many bytes may wait for the peer to receive."""
        return nbytes > INLINE_BYTES and self.connections[peer].transport == "tcp"

    def _send_all(self, number: int, outgoing: Sequence[tuple[int, list[Bytes]]], until_s: float) -> None:
        for peer, arrays in outgoing:
            self.send(number, peer, arrays, until_s)

    def send(self, number: int, peer: int, arrays: Sequence[Bytes], until_s: float) -> None:
        """Sends a peer its message of an exchange."""
        connection = self.connections[peer]
        left_s = max(until_s - time.monotonic(), 0.001)
        try:
            if sum(array.size for array in arrays) <= INLINE_BYTES:
                connection.send(b"".join(array.tobytes() for array in arrays), tag=number, timeout_s=left_s)
            else:
                connection.send(b"", arrays, tag=number, timeout_s=left_s)
        except GeartrainError as error:
            raise self.error_of(peer, error) from error

    def receive(
        self, number: int, peer: int, incoming: Collection[int], here: dict[int, list[Bytes]], until_s: float
    ) -> None:
        """Puts a peer's message into `here`, and those of others that have come by then."""
        while peer not in here:
            left_s = max(until_s - time.monotonic(), 0.001)
            if self._take(number, peer, here, min(left_s, GLANCE_S)):
                return
            for other in incoming:  # one that is gone is an error now, not after this one's message
                if other not in here and self.connections[other].native.found_lost():
                    self._take(number, other, here, 0.0)  # its message, or why it left, or that it is gone
            if left_s <= GLANCE_S and peer not in here:
                for other in incoming:  # one that was lost later is what this one may wait for
                    if self.connections[other].native.found_lost():
                        raise CarrierError(other, Cause.lost)
                raise self._missing(peer, Cause.timed_out)

    def _take(self, number: int, peer: int, here: dict[int, list[Bytes]], timeout_s: float) -> bool:
        """Whether a peer's message came within a time."""
        try:
            message = self.connections[peer].native.receive(timeout_s)
        except WaitTimeoutError:
            return False
        except GeartrainError as error:
            raise self.error_of(peer, error) from error
        if message.kind == REASON:
            raise CarrierError(peer, Cause.told, message.header.decode(errors="replace"))
        if message.tag != number:
            raise CarrierError(peer, Cause.refused, f"is at its exchange {message.tag}, this rank at {number}")
        header = message.header
        here[peer] = [np.frombuffer(header, np.uint8)] if header else message.buffers
        return True

    def error_of_round(self, error: GeartrainError) -> CarrierError:
        """The `CarrierError` for an error of the group's rounds. Raises the error itself if they have not failed."""
        failure = self.rounds.failure
        if failure is None:
            raise error
        peer, cause, detail = failure
        return self.error_of(peer, error) if cause == "error" else CarrierError(peer, Cause(cause), detail)

    def error_of(self, peer: int, error: GeartrainError) -> CarrierError:
        """What an error of a peer's connection means for the exchange."""
        if self.closed or isinstance(error, ConnectionClosedError):
            return CarrierError(peer, Cause.left)
        if isinstance(error, WaitTimeoutError):
            return self._missing(peer, Cause.timed_out)
        if isinstance(error, PeerLostError | ListenerGoneError):
            return self._missing(peer, Cause.lost)
        if isinstance(error, MessageError):
            return CarrierError(peer, Cause.refused, f"sent what is no message: {error}")
        return CarrierError(peer, Cause.refused, f"cannot be reached: {error}")

    def _missing(self, peer: int, cause: Cause) -> CarrierError:
        """A peer that is gone or late; or why, where a rank has said why it leaves: that may be for another one."""
        told = self.rounds.reason_told(peer)
        return CarrierError(peer, cause) if told is None else CarrierError(told[0], Cause.told, told[1])

    # --- connections --------------------------------------------------------------------------------------------------

    def connect(self, peers: set[int], until_s: float) -> None:
        """Connects to peers; each of them does so in the same exchange."""
        for peer in sorted(peers):
            if peer < self.rank:  # its listener answers, whatever its program does
                self._dial(peer, until_s)
        waited_for = {peer for peer in peers if peer > self.rank}
        while waited_for - self.connections.keys():
            self._accept(min(waited_for - self.connections.keys()), until_s)

    def _dial(self, peer: int, until_s: float) -> None:
        left_s = max(until_s - time.monotonic(), 0.001)
        try:
            connection = connect(
                self._addresses[peer],
                transport=self._transport,
                secret=self._key,
                timeout_s=left_s,
                peer_timeout_s=0,  # every wait of a group has a deadline of its own
            )
            self._keep(peer, connection)
            connection.send(HELLO.pack(MAGIC, self.rank), timeout_s=left_s)
        except GeartrainError as error:
            raise self.error_of(peer, error) from error

    def _accept(self, peer: int, until_s: float) -> None:
        """Accepts one connection, of any rank, while it waits for one of `peer`."""
        left_s = max(until_s - time.monotonic(), 0.001)
        try:
            connection = self._listener.accept(timeout_s=min(left_s, GLANCE_S))
        except WaitTimeoutError as error:
            if self._failed():
                raise CarrierError(peer, Cause.lost) from error
            if left_s <= GLANCE_S:
                raise CarrierError(peer, Cause.timed_out) from error
            return
        except GeartrainError as error:
            raise self.error_of(peer, error) from error
        try:
            magic, rank = HELLO.unpack(connection.receive(timeout_s=min(left_s, HELLO_S)).header)
        except (GeartrainError, struct.error):  # it has gone again
            connection.close()
            return
        if magic != MAGIC or not self.rank < rank < self.size or rank in self.connections:
            connection.close()
            return
        self._keep(rank, connection)

    def _keep(self, peer: int, connection: Connection) -> None:
        with self._lock:
            self.connections[peer] = connection
            self.rounds.add(peer, connection.native)
            closed = self.closed
        if closed:
            connection.close()


class _Sender:
    """Sends on a separate thread, in parallel with the receives of the calling thread."""

    def __init__(self, body: Callable[[], object]) -> None:
        self._body = body
        self._error: BaseException | None = None
        self._thread = DaemonThread(self._run, "geartrain-rank-sends")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._body()
        except BaseException as error:
            self._error = error

    def join(self) -> None:
        """Until all is sent; each send has a deadline. Raises what one has raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error


__all__ = ["TransportCarrier"]
