"""The carrier of a rank group moves messages between its ranks. The protocol and its error.

| carrier | file | between ranks of one host | of different hosts |
|---|---|---|---|
| `TransportCarrier` | transport_carrier.py | rings and segments in shared memory | TCP |
| `OneSidedCarrier` | one_sided_carrier.py | the same | the same; large messages by RDMA |
| `GlooCarrier` | gloo_carrier.py | TCP | TCP |
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
# A peer's rank, and the bytes sent to it or received from it.
Message = tuple[int, Bytes]

# Messages of so many bytes to one rank in one exchange fit into a ring, or into the buffers of a socket whose peer has
# received everything of the exchanges before: sending them waits for nobody.
INLINE_BYTES = 16 << 10
# Most messages between two ranks in one exchange; more would share a tag.
MAX_MESSAGES = 256


class Cause(enum.Enum):
    """Why an exchange failed."""

    lost = "lost"  # the peer is gone, or has left the group
    timed_out = "timed out"
    refused = "refused"  # the peer sent something else than was expected, or cannot be reached
    left = "left"  # this rank has left the group
    told = "told"  # the peer has left the group, and said why


class CarrierError(Exception):
    """An exchange that failed because of one peer; `TorchRankGroup` reports it to the other ranks and raises.

    Args:
        peer: its rank in the group.
        cause: see `Cause`.
        detail: for `Cause.refused`, the mismatch found; for `Cause.told`, the reason.
    """

    def __init__(self, peer: int, cause: Cause, detail: str = "") -> None:
        super().__init__(peer, cause, detail)
        self.peer = peer
        self.cause = cause
        self.detail = detail


class Carrier(Protocol):
    """Point-to-point messages between the ranks of one group. One exchange at a time; any thread may close."""

    def exchange(self, number: int, sends: Sequence[Message], receives: Sequence[Message], until_s: float) -> None:
        """Sends messages and receives into the given arrays, none of which is empty.

        Args:
            number: number of the exchange; equal on all ranks.
            sends, receives: between two ranks messages keep the order of the lists.
            until_s: deadline (`time.monotonic`).

        Raises:
            CarrierError: a peer is lost, or did not answer before the deadline.
        """
        ...

    def peers(self) -> dict[str, int]:
        """Number of peers that messages went to or came from, by what moves them: "shm", "tcp", "gloo" or a backend."""
        ...

    def close(self, reason: str = "") -> None:
        """Closes all connections, which the other ranks notice, with the reason where the carrier can tell it.

        Exchanges that wait end with `Cause.left`.
        """
        ...


def by_peer(messages: Sequence[Message]) -> dict[int, list[Bytes]]:
    """The arrays for each peer, in order."""
    found: dict[int, list[Bytes]] = {}
    for peer, array in messages:
        found.setdefault(peer, []).append(array)
    return found


__all__ = ["INLINE_BYTES", "MAX_MESSAGES", "Bytes", "Carrier", "CarrierError", "Cause", "Message", "by_peer"]
