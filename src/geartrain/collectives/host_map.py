"""Map of ranks to hosts, for hierarchical all-reduces and for the order of neighbours in a ring."""

from __future__ import annotations

import socket
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from geartrain.errors import ArgumentError

#: Elements that a share's boundaries are multiples of (native/collectives/sharded_allreduce.h).
GRAIN = 16
#: Pieces up to this size are not divided among the ranks of a host.
WHOLE_BYTES = 16 << 10


def host_identity() -> str:
    """An id that is equal for processes that share a kernel and a network namespace, and thus can exchange memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    with suppress(OSError):
        about = Path("/proc/self/ns/net").stat()
        return f"{boot}/{about.st_dev}:{about.st_ino}"
    return boot


@dataclass(frozen=True)
class HostMap:
    """Which ranks are on which host.

    Attributes:
        hosts: the ranks of each host, ascending; hosts by their lowest rank.

    Example:
        >>> found = HostMap.of(["a", "b", "a", "b"])
        >>> found.hosts, found.place_of(3)
        (((0, 2), (1, 3)), (1, 1))
    """

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, names: Sequence[Hashable]) -> HostMap:
        """The map, from the name of each rank's host."""
        found: dict[Hashable, list[int]] = {}
        for rank, name in enumerate(names):
            found.setdefault(name, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in found.values()))

    @property
    def lanes(self) -> int:
        """How many ranks of every host take part in the reduction across hosts, each with a part of the array."""
        return min(len(ranks) for ranks in self.hosts)

    def lane(self, number: int) -> tuple[int, ...]:
        """The ranks of one lane: one of every host, in the order of the hosts."""
        return tuple(ranks[number] for ranks in self.hosts)

    def place_of(self, rank: int) -> tuple[int, int]:
        """The number of the rank's host, and the rank's place there."""
        for host, ranks in enumerate(self.hosts):
            if rank in ranks:
                return host, ranks.index(rank)
        raise ArgumentError(f"there is no rank {rank} among {sum(map(len, self.hosts))}")


def cut(count: int, itemsize: int, lanes: int, number: int) -> list[tuple[int, int]]:
    """Start and length, in elements, of each lane's part of a piece.

    Equal parts in multiples of `GRAIN`; a small piece goes whole to one lane, by turns of the piece's `number`.
    """
    if count * itemsize <= WHOLE_BYTES:
        turn = number % lanes
        return [(0, count if lane == turn else 0) for lane in range(lanes)]
    grains = count // GRAIN
    starts = [grains * lane // lanes * GRAIN for lane in range(lanes)] + [count]
    return [(starts[lane], starts[lane + 1] - starts[lane]) for lane in range(lanes)]


@dataclass(frozen=True)
class RingOrder:
    """How many hops of a ring in rank order go from one host to another.

    Attributes:
        crossings: hops between ranks of different hosts.
        least: the fewest that any order of the ranks has: one for each host, none for one host.
        order: of the ranks, as they are now, that has the fewest.
    """

    crossings: int
    least: int
    order: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[Hashable]) -> RingOrder:
        """The order, from the name of each rank's host.

        Example:
            >>> RingOrder.of(["a", "b", "a", "b"])
            RingOrder(crossings=4, least=2, order=(0, 2, 1, 3))
        """
        n = len(names)
        crossings = sum(names[rank] != names[(rank + 1) % n] for rank in range(n))
        hosts = HostMap.of(names).hosts
        return cls(crossings, len(hosts) if len(hosts) > 1 else 0, tuple(rank for ranks in hosts for rank in ranks))

    def advice(self) -> str | None:
        """The change to make. None if no order would be better."""
        if self.crossings == self.least:
            return None
        shown = ", ".join(map(str, self.order[:32])) + (", ..." if len(self.order) > 32 else "")
        return (
            f"{self.crossings} of {len(self.order)} hops of the ring lead from host to host, where {self.least} would "
            f"do: number the ranks of a host one after the other, as torchrun does; of today's ranks: {shown}"
        )
