"""`RankGroup`: the collectives that a replay over several ranks uses.

    all_gather          fixed-size bytes of every rank, to every rank: shard totals, a few dozen bytes each
    all_gather_object   the same for picklable objects, for set-up only
    all_to_all          bytes for every rank, of sizes that only the sender knows: priority updates
    exchange            point-to-point messages whose sizes both ends know: rows (all-to-all, where all pairs have some)

| implementation | group |
|---|---|
| `TorchRankGroup` (torch_rank_group.py) | ranks of a `torch.distributed` job |
| `geartrain.tools.testing.ThreadRankGroup` | threads of one process |
| `SingleRank` | one rank |

`TorchRankGroup` has connections of its own (carrier.py). So its traffic never mixes with the training's collectives,
and it may run on another thread.

Every call returns, raises `PeerLostError` when a rank is lost, or times out. The first rank that notices a loss writes
the reason to the job's key-value store, sends it to its connected peers, and closes its connections. So all others fail
at once and name the same reason. A group that has lost a rank cannot be used again; restart the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from geartrain.ranks.carrier import Bytes, Message


class RankGroup(Protocol):
    """Collectives of the ranks of a replay. Every rank makes every call, in the same order."""

    @property
    def rank(self) -> int:
        """This rank, 0 to size - 1."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank has sent so far."""
        ...

    @property
    def sent_messages(self) -> int:
        """Messages this rank has sent so far: one for each exchange and peer that it had bytes for."""
        ...

    def peers(self) -> dict[str, int]:
        """Number of ranks that this one exchanged messages with, by "shm", "tcp", "gloo" or a backend."""
        ...

    def shm_peers(self) -> set[int]:
        """Ranks that are known to be of this one's host: their messages come through shared memory."""
        ...

    def check_peers(self) -> None:
        """Raises `PeerLostError` where a rank is known to be gone, without a message; any thread may call it."""
        ...

    def all_gather(self, mine: Bytes) -> Bytes:
        """All-gather of bytes: (n,) uint8, the same n on every rank, to (size, n)."""
        ...

    def all_gather_object(self, mine: Any) -> list[Any]:
        """All-gather of picklable objects: for set-up, not for every batch."""
        ...

    def all_to_all(self, parts: Sequence[Bytes]) -> list[Bytes]:
        """All-to-all of (size,) arrays of uint8 of any length: part i goes to rank i; returns each rank's, to be read.

        One message to every other rank, in one round but over Gloo, so for groups of up to `DIRECT_RANKS` ranks.
        """
        ...

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Sends messages and receives into the given arrays; between two ranks messages keep the order of the lists."""
        ...

    def abort(self, reason: str) -> None:
        """Leaves the group and tells the other ranks why, so that none of them blocks."""
        ...

    def close(self) -> None:
        """Leaves the group."""
        ...


class SingleRank:
    """A group of one rank, whose collectives are copies or no-ops."""

    rank = 0
    size = 1
    sent_bytes = 0
    sent_messages = 0

    def peers(self) -> dict[str, int]:
        return {}

    def shm_peers(self) -> set[int]:
        return set()

    def check_peers(self) -> None:
        pass

    def all_gather(self, mine: Bytes) -> Bytes:
        copied: Bytes = mine[None].copy()
        return copied

    def all_gather_object(self, mine: Any) -> list[Any]:
        return [mine]

    def all_to_all(self, parts: Sequence[Bytes]) -> list[Bytes]:
        return list(parts)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        pass

    def abort(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass


__all__ = ["Bytes", "Message", "RankGroup", "SingleRank"]
