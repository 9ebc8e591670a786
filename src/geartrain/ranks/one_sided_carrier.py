"""`OneSidedCarrier`: the transports, with large messages between hosts written into the receiver's memory (RDMA).

A backend (`geartrain.transport.one_sided`) carries messages of `WRITE_BYTES` or more to ranks of other hosts.
`TransportCarrier` sends everything else.

In an exchange both ends know the messages, and take three steps:

    receiver    leases registered memory, sends its descriptor
    sender      copies its arrays into registered memory of its own, writes, sends `WRITTEN`
    receiver    copies the written bytes into its arrays

Both ends copy because their arrays are not registered. The registered memory is registered once and reused. Two ranks
attach in the first exchange that needs it.

Threads: as in `TransportCarrier`, one exchange runs at a time, and any thread may close. Lost peers: memory that a lost
peer may still write to is never used again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from geartrain.errors import GeartrainError
from geartrain.ranks.carrier import Bytes, CarrierError, Cause, Message, by_peer
from geartrain.ranks.transport_carrier import TransportCarrier
from geartrain.transport.one_sided import Link
from geartrain.transport.one_sided.registered_memory import RegisteredBuffer, RegisteredMemoryPool

#: Smaller messages go as others do: a write takes a message more each way.
WRITE_BYTES = 256 << 10
#: The message that follows a write.
WRITTEN = b"written"


class OneSidedCarrier(TransportCarrier):
    """Carrier that has RDMA cards write large messages into the other host's memory.

    Args:
        name: of the backend.
        arguments: those of `TransportCarrier`.
    """

    def __init__(self, name: str, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._links: dict[int, Link] = {}
        self._pool = RegisteredMemoryPool(name)

    def exchange(self, number: int, sends: Sequence[Message], receives: Sequence[Message], until_s: float) -> None:
        outgoing, incoming = by_peer(sends), by_peer(receives)
        self.connect({*outgoing, *incoming} - self.connections.keys(), until_s)
        written, read = self._written(outgoing), self._written(incoming)
        leased: dict[int, RegisteredBuffer] = {}
        try:
            for peer in sorted(written.keys() | read.keys()):  # in this order no two ranks wait for each other in vain
                self._attach(peer, until_s)
            for peer, nbytes in read.items():
                leased[peer] = self._lease(peer, nbytes)
                self.send(number, peer, [np.frombuffer(leased[peer].descriptor, np.uint8)], until_s)
            self._write(number, written, outgoing, until_s)
            notes = {peer: [np.frombuffer(WRITTEN, np.uint8)] for peer in written}
            for peer, parts in self.transfer(number, {**outgoing, **notes}, incoming, until_s):
                if peer not in read:
                    self.put(peer, parts, incoming[peer])
                    continue
                if b"".join(part.tobytes() for part in parts[:1]) != WRITTEN or len(parts) != 1:
                    raise CarrierError(peer, Cause.refused, f"sent its rows by another way than {self._pool.name}")
                self.put(peer, [np.frombuffer(leased[peer].memory, np.uint8, read[peer])], incoming[peer])
                leased.pop(peer).release()
        finally:
            for buffer in leased.values():  # the exchange has failed, and peers may be writing
                with contextlib.suppress(GeartrainError):
                    buffer.abandon()

    def peers(self) -> dict[str, int]:
        """The backend's entry counts the ranks that this one has exchanged large messages with so far."""
        found = super().peers()
        if self._links:
            found["tcp"] -= len(self._links)
            found[self._pool.name] = len(self._links)
        return {name: count for name, count in found.items() if count}

    def close(self, reason: str = "") -> None:
        super().close(reason)
        for link in list(self._links.values()):
            link.close()
        self._pool.close()

    # --- the parts of an exchange ------------------------------------------------------------------------------------

    def _written(self, messages: Mapping[int, Sequence[Bytes]]) -> dict[int, int]:
        """The peers whose messages are written, which know so themselves; and their bytes."""
        sizes = {peer: sum(array.size for array in arrays) for peer, arrays in messages.items()}
        far = {peer for peer in sizes if self.connections[peer].transport == "tcp"}
        return {peer: nbytes for peer, nbytes in sizes.items() if nbytes >= WRITE_BYTES and peer in far}

    def _attach(self, peer: int, until_s: float) -> None:
        if peer in self._links:
            return
        try:
            link = self._pool.backend.attach(self.connections[peer], timeout_s=max(until_s - time.monotonic(), 0.001))
        except GeartrainError as error:
            raise self.error_of(peer, error) from error
        self._links[peer] = link
        if self.closed:  # by another thread, which may have seen the links of before
            link.close()

    def _lease(self, peer: int, nbytes: int) -> RegisteredBuffer:
        try:
            return self._pool.lease(nbytes)
        except GeartrainError as error:
            raise self.error_of(peer, error) from error

    def _write(
        self, number: int, written: Mapping[int, int], outgoing: Mapping[int, Sequence[Bytes]], until_s: float
    ) -> None:
        """Writes to each peer as soon as it has sent its descriptor, in the order of a ring."""
        here: dict[int, list[Bytes]] = {}
        for peer in sorted(written, key=lambda peer: (peer - self.rank) % self.size):
            self.receive(number, peer, written, here, until_s)
            buffer = self._lease(peer, written[peer])
            try:
                np.concatenate(outgoing[peer], out=np.frombuffer(buffer.memory, np.uint8, written[peer]))
                self._links[peer].write(
                    buffer.region,
                    b"".join(part.tobytes() for part in here[peer]),
                    nbytes=written[peer],
                    timeout_s=max(until_s - time.monotonic(), 0.001),
                )
            except BaseException as error:
                buffer.abandon()  # the network card may still be reading it
                if isinstance(error, GeartrainError):
                    raise self.error_of(peer, error) from error
                raise
            buffer.release()


__all__ = ["WRITE_BYTES", "WRITTEN", "OneSidedCarrier"]
