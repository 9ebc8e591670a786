"""Rank group: the collectives that a replay over several ranks uses.

    all_gather          fixed-size bytes of every rank, to every rank: shard totals, a few dozen bytes each
    all_gather_object   the same for picklable objects, for set-up only
    all_to_all          bytes for every rank, of sizes that only the sender knows: priority updates
    exchange            point-to-point messages whose sizes both ends know: rows (all-to-all, where all pairs have some)

`TorchRankGroup` has connections of its own (carrier.py), so its traffic never mixes with the training's collectives and
may run on another thread. `geartrain.tools.testing.ThreadRankGroup` is a group of threads of one process, `SingleRank`
a group of one.

Every call returns, raises `PeerLostError` when a rank is lost, or times out. The first rank that notices writes the
reason to the job's key-value store, tells it to those it is connected with and closes its connections, so that all
others fail at once and name the same reason. A group that has lost a rank cannot be used again; the job is restarted.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import numpy as np

from geartrain.core.extras import require_torch
from geartrain.errors import ArgumentError, GeartrainError, PeerLostError, RanksDisagreeError, WaitTimeoutError
from geartrain.replay.distributed.carrier import MAX_MESSAGES, Bytes, Carrier, CarrierError, Cause, Message
from geartrain.replay.distributed.gloo_carrier import GlooCarrier

if TYPE_CHECKING:  # the network is loaded by the group that uses it
    import geartrain._native as _native
    from geartrain.replay.distributed.transport_carrier import TransportCarrier

# Longest wait for the key-value store when the reason of a failure is read or written.
NOTE_S = 2.0
# Ranks that an all-gather reaches in one round.
RADIX = 8
# Largest group in which every rank sends a message to every other one in each batch: it costs a rank about 5 us of
# processor time for each of them, and saves a round.
DIRECT_RANKS = 32


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
        """Number of ranks that this one has exchanged messages with, by what moves them: "shm", "tcp", "gloo"."""
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
        """See `RankGroup`."""
        return {}

    def shm_peers(self) -> set[int]:
        """See `RankGroup`."""
        return set()

    def check_peers(self) -> None:
        """See `RankGroup`."""

    def all_gather(self, mine: Bytes) -> Bytes:
        """See `RankGroup`."""
        copied: Bytes = mine[None].copy()
        return copied

    def all_gather_object(self, mine: Any) -> list[Any]:
        """See `RankGroup`."""
        return [mine]

    def all_to_all(self, parts: Sequence[Bytes]) -> list[Bytes]:
        """See `RankGroup`."""
        return list(parts)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """See `RankGroup`."""

    def abort(self, reason: str) -> None:
        """See `RankGroup`."""

    def close(self) -> None:
        """See `RankGroup`."""


def all_gather_bruck(ranks: RankGroup, mine: Bytes) -> Bytes:
    """`RankGroup.all_gather` by `RankGroup.exchange`: Bruck's algorithm, ceil(log8 size) rounds (Bruck et al., 1997).

    In round k each rank sends the blocks it has to the seven ranks 8^k, 2 * 8^k, ... before it: up to 8 ranks take one
    round, 64 two. Every rank sends (size - 1) * n bytes, in seven messages a round at most.
    """
    return all_gather_among(ranks, range(ranks.size), mine)


def all_gather_among(ranks: RankGroup, members: Sequence[int], mine: Bytes) -> Bytes:
    """All-gather among some of the ranks, (len(members), n). All ranks make the call; non-members get zeros."""
    size = len(members)
    have = np.zeros((size, mine.size), np.uint8)
    at = members.index(ranks.rank) if ranks.rank in members else None
    have[0] = mine
    step = 1
    while step < size:
        if at is None:
            ranks.exchange([], [])
        else:
            sends: list[Message] = []
            receives: list[Message] = []
            for first in range(step, min(RADIX * step, size), step):
                count = min(step, size - first)
                sends.append((members[(at - first) % size], have[:count].reshape(-1)))
                receives.append((members[(at + first) % size], have[first : first + count].reshape(-1)))
            ranks.exchange(sends, receives)
        step *= RADIX
    if at is None:
        return np.zeros_like(have)
    rolled: Bytes = np.roll(have, at, axis=0)
    return rolled


def all_gather_object(ranks: RankGroup, mine: Any) -> list[Any]:
    """`RankGroup.all_gather_object` by `RankGroup.all_gather`."""
    data = np.frombuffer(pickle.dumps(mine), np.uint8)
    sizes = ranks.all_gather(np.array([data.size], np.int64).view(np.uint8)).reshape(-1).view(np.int64)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: data.size] = data
    return [
        pickle.loads(part[:size].tobytes()) for part, size in zip(ranks.all_gather(padded), sizes.tolist(), strict=True)
    ]


def all_to_all_of_known_sizes(ranks: RankGroup, parts: Sequence[Bytes]) -> list[Bytes]:
    """`RankGroup.all_to_all` by an all-gather of the sizes and an exchange."""
    sizes = np.array([part.size for part in parts], np.int64)
    every = ranks.all_gather(sizes.view(np.uint8)).reshape(-1).view(np.int64).reshape(ranks.size, ranks.size)
    received = [np.empty(size, np.uint8) for size in every[:, ranks.rank].tolist()]
    received[ranks.rank] = parts[ranks.rank]
    others = [rank for rank in range(ranks.size) if rank != ranks.rank]
    ranks.exchange([(rank, parts[rank]) for rank in others], [(rank, received[rank]) for rank in others])
    return received


T = TypeVar("T")


def run_on_all_ranks(ranks: RankGroup, make: Callable[[], T]) -> T:
    """Runs a set-up step on every rank and returns this rank's result; when one rank fails, all raise.

    Raises:
        RanksDisagreeError: another rank failed; its error is raised there as itself.
    """
    made: list[T] = []
    failed = None
    try:
        made.append(make())
    except Exception as error:
        failed = error
    failures = ranks.all_gather_object(None if failed is None else f"{type(failed).__name__}: {failed}")
    if failed is not None:
        raise failed
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise RanksDisagreeError(f"rank {rank} cannot take part: {failure}")
    return made[0]


# Number of groups made so far, by their members; equal on all of them.
_groups_made: Counter[tuple[int, ...]] = Counter()


class TorchRankGroup:
    """A `RankGroup` over some or all ranks of a `torch.distributed` job.

    Ranks of one host exchange messages through shared memory, ranks of different hosts over TCP, by geartrain's own
    transports (transport_carrier.py); by Gloo (gloo_carrier.py) where a rank cannot use those. `repr` says which, and
    why. `GEARTRAIN_RANK_CARRIER` may say "tcp" (no shared memory) or "gloo" instead of "auto"; it is the same on all
    ranks, or Gloo on all where one says so. A rank that has not asked for Gloo warns. Gloo knows no TLS: where a rank
    asks for that (`GEARTRAIN_TLS_CERT` and the others), all ranks raise instead.

    Args:
        members: global ranks; their order gives the ranks in this group. This process must be one of them, and all of
            them construct the group at the same point of the program.
        timeout_s: timeout of each collective.

    Attributes:
        native_rounds: of the transports, for native code that exchanges small messages; None where Gloo carries them.
        timeout_s: see above.

    Raises:
        ArgumentError: there is no process group, this rank is not a member, or `GEARTRAIN_RANK_CARRIER` says something
            else; or, on all ranks, a rank has settings that cannot be followed: certificates that cannot be used, TLS
            over Gloo, an interface in `GLOO_SOCKET_IFNAME` that is not there.
        PeerLostError: not all members joined in time.
    """

    def __init__(self, members: Sequence[int], timeout_s: float = 60.0) -> None:
        require_torch("a group of ranks")
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise ArgumentError(
                "a replay over several ranks needs torch.distributed: start the script with torchrun and call "
                "torch.distributed.init_process_group first"
            )
        here = dist.get_rank()
        self._members = list(members)
        if here not in self._members:
            raise ArgumentError(f"rank {here} is not a member of the group {self._members}")
        self.rank = self._members.index(here)
        self.size = len(self._members)
        self.native_rounds: _native.RankRounds | None = None
        self.timeout_s = timeout_s
        self._sent_bytes = 0  # besides those of native rounds
        self._sent_messages = 0
        self._calls = 0  # where there are none
        self._broken: str | None = None
        self._pid = os.getpid()
        self._why_gloo = ""
        self._carrier: Carrier | None = None
        self._transports: TransportCarrier | None = None  # the carrier, where it is this one
        wanted = os.environ.get("GEARTRAIN_RANK_CARRIER", "auto")
        if wanted not in ("auto", "tcp", "gloo"):
            raise ArgumentError(f"GEARTRAIN_RANK_CARRIER is auto, tcp or gloo, found {wanted!r}")
        # torch names a group by the number of groups the process has made, which may differ between ranks, and uses a
        # name again once its group is destroyed. These names are unique for the life of the job. (torchrun's restart
        # count is of no use: hosts that restart because another host did count differently.)
        key = tuple(self._members)
        name = f"geartrain/{zlib.crc32(repr(key).encode()):08x}/{_groups_made[key]}"
        _groups_made[key] += 1
        self._store = dist.PrefixStore(  # type: ignore[attr-defined]
            name, dist.distributed_c10d._get_default_store()
        )
        if self.size > 1:
            self._open(wanted)

    def _open(self, wanted: str) -> None:
        from geartrain.replay.distributed.transport_carrier import open_carrier

        try:
            opened = open_carrier(
                self._store,
                self.rank,
                self.size,
                self.timeout_s,
                self._is_broken,
                transport="tcp" if wanted == "tcp" else None,
                refuse="GEARTRAIN_RANK_CARRIER says gloo" if wanted == "gloo" else None,
            )
            if isinstance(opened, str):
                self._why_gloo = opened
                if wanted != "gloo":
                    warnings.warn(f"the ranks use Gloo, because of {opened}", RuntimeWarning, stacklevel=4)
                self._carrier = GlooCarrier(self._store, self.rank, self.size, self.timeout_s)
            else:
                self._carrier = self._transports = opened
                self.native_rounds = opened.rounds
            self.all_gather(np.zeros(1, np.uint8))  # all of them reach those they have most to do with
        except (RuntimeError, WaitTimeoutError) as error:
            which = f": missing are {error}" if isinstance(error, WaitTimeoutError) else f": {error}"
            raise PeerLostError(
                f"ranks {self._members} did not all join within {self.timeout_s} s{which}{_restart_hint()}"
            ) from error

    @property
    def sent_bytes(self) -> int:
        """See `RankGroup`."""
        rounds = self.native_rounds
        return self._sent_bytes + (0 if rounds is None else rounds.sent_bytes)

    @property
    def sent_messages(self) -> int:
        """See `RankGroup`."""
        rounds = self.native_rounds
        return self._sent_messages + (0 if rounds is None else rounds.sent_messages)

    def all_gather(self, mine: Bytes) -> Bytes:
        """See `RankGroup`."""
        if self.size > RADIX or self._transports is None:
            return all_gather_bruck(self, mine)
        parts = self.all_to_all([mine] * self.size)
        gathered = np.empty((self.size, mine.size), np.uint8)
        for rank, part in enumerate(parts):
            if part.size != mine.size:
                detail = f"sent {part.size} bytes to an all-gather of {mine.size}"
                self._lost(CarrierError(rank, Cause.refused, detail))
            gathered[rank] = part
        return gathered

    def all_gather_object(self, mine: Any) -> list[Any]:
        """See `RankGroup`."""
        return all_gather_object(self, mine)

    def all_to_all(self, parts: Sequence[Bytes]) -> list[Bytes]:
        """See `RankGroup`."""
        self.check_usable()
        carrier = self._transports
        if carrier is None:
            return all_to_all_of_known_sizes(self, parts)
        number = carrier.rounds.begin()
        if not carrier.rounds.carries(max(part.size for part in parts)):
            self._sent_bytes += sum(part.size for part in parts) - parts[self.rank].size
            self._sent_messages += self.size - 1
        try:
            return carrier.all_to_all(number, parts, time.monotonic() + self.timeout_s)
        except CarrierError as error:
            self._lost(error)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """See `RankGroup`."""
        self.check_usable()
        for messages in (sends, receives):
            if len(messages) > MAX_MESSAGES and max(Counter(peer for peer, _ in messages).values()) > MAX_MESSAGES:
                raise ArgumentError(f"one exchange takes at most {MAX_MESSAGES} messages a peer")
        number = self._next_number()
        sends = [message for message in sends if message[1].size]
        receives = [message for message in receives if message[1].size]
        carrier = self._carrier
        if carrier is None or not (sends or receives):
            return
        self._sent_bytes += sum(array.size for _, array in sends)
        self._sent_messages += len({peer for peer, _ in sends})
        try:
            carrier.exchange(number, sends, receives, time.monotonic() + self.timeout_s)
        except CarrierError as error:
            self._lost(error)

    def _next_number(self) -> int:
        """The number of an exchange, equal on all ranks."""
        if self.native_rounds is not None:
            return self.native_rounds.begin()
        self._calls += 1
        return self._calls

    def check_usable(self) -> None:
        """Raises `PeerLostError` where this rank has left the group, or is the child of one that is in it."""
        if os.getpid() != self._pid:
            raise PeerLostError("a rank group belongs to the process that made it: this one was forked from it")
        if self._broken is not None:
            raise PeerLostError(self._broken)

    def round_failed(self, error: GeartrainError) -> NoReturn:
        """Raises what an error of native code that uses `native_rounds` means: the error itself, or `PeerLostError`."""
        if self._transports is None:
            raise error
        self._lost(self._transports.error_of_round(error))

    def peers(self) -> dict[str, int]:
        """See `RankGroup`."""
        return {} if self._carrier is None else self._carrier.peers()

    def shm_peers(self) -> set[int]:
        """See `RankGroup`: of those that it is connected with by now."""
        return set() if self._transports is None else self._transports.shm_peers()

    def check_peers(self) -> None:
        """See `RankGroup`. Over Gloo no rank is known to be gone before a call fails."""
        self.check_usable()
        for peer in sorted(self._transports.lost_peers()) if self._transports is not None else ():
            self._lost(CarrierError(peer, Cause.lost))

    def abort(self, reason: str) -> None:
        """See `RankGroup`."""
        if self._broken is None:
            self._broken = self._leave_note(f"rank {self._members[self.rank]} aborted: {reason}")
            self._leave(self._broken)
        self.close()

    def close(self) -> None:
        """See `RankGroup`."""
        if self._broken is None:
            self._broken = "this rank has left the group"
        self._leave("")

    def _leave(self, reason: str) -> None:
        if self._carrier is not None and os.getpid() == self._pid:
            self._carrier.close(reason)  # its connections, which the other ranks notice

    def __repr__(self) -> str:
        ways = ", ".join(f"{count} by {name}" for name, count in self.peers().items()) or "none yet"
        why = f" (Gloo, because {self._why_gloo})" if self._why_gloo else ""
        return f"<TorchRankGroup rank {self.rank} of {self.size}, peers: {ways}{why}>"

    def _lost(self, error: CarrierError) -> NoReturn:
        if error.cause is Cause.left:
            raise PeerLostError(self._broken or "this rank has left the group") from error
        who = f"rank {self._members[error.peer]}"
        if error.cause is Cause.told:
            self._broken = error.detail
            self._leave(error.detail)
            raise PeerLostError(f"{error.detail} [told by {who}]") from error
        found = {
            Cause.timed_out: f"{who} did not answer within {self.timeout_s} s",
            Cause.lost: f"{who} was lost: its connection closed",
            Cause.refused: f"{who} {error.detail}",
        }[error.cause]
        note = self._leave_note(found)
        self._broken = note if note == found else f"{note} (noticed as: {found})"
        self._leave(note)
        raise PeerLostError(self._broken) from error

    def _leave_note(self, note: str) -> str:
        """Writes the reason for the other ranks, and returns the one that was written first."""
        if os.getpid() != self._pid:
            return note  # a forked child shares the store's connection with its parent, which goes on
        return _asked(lambda: str(self._store.compare_set("lost", "", note).decode()), note)

    def _is_broken(self) -> bool:
        """Whether another rank has written a reason."""
        return _asked(lambda: bool(self._store.check(["lost"])), False)


def _asked(ask: Callable[[], T], otherwise: T) -> T:
    """An answer of the key-value store, which may be lost with the rank that served it, and has a longer timeout."""
    answers = [otherwise]

    def run() -> None:
        answers.append(ask())

    thread = threading.Thread(target=_quietly, args=(run,), daemon=True)
    thread.start()
    thread.join(NOTE_S)
    return answers[-1]


def as_rank_group(group: Any, members: Sequence[int], timeout_s: float) -> RankGroup:
    """The group itself where it is a `RankGroup`, else a new `TorchRankGroup` of the members. Collective."""
    if group is not None and hasattr(group, "exchange"):
        ranks: RankGroup = group
        return ranks
    return TorchRankGroup(members, timeout_s)


def _restart_hint() -> str:
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
        return ""
    return (
        " (if torchrun has restarted this job, ranks may read addresses of the run before the restart, unless it is "
        "started with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --standalone or --rdzv-backend c10d)"
    )


def _quietly(body: Any) -> None:
    try:
        body()
    except Exception:  # the reason is for error texts only
        return


__all__ = [
    "DIRECT_RANKS",
    "RADIX",
    "Bytes",
    "Message",
    "SingleRank",
    "RankGroup",
    "TorchRankGroup",
    "all_gather_among",
    "all_gather_bruck",
    "all_gather_object",
    "all_to_all_of_known_sizes",
    "as_rank_group",
    "run_on_all_ranks",
]
