"""The ranks that share one replay, and the three things they say to each other.

    gather            every rank's bytes to every rank: totals, a few dozen bytes each
    gather_objects    the same for Python objects, when the replay is made
    exchange          messages whose sizes both ends know: the rows that move

`TorchRanks` speaks over a Gloo group of its own, so that its traffic never mixes with the training's collectives and
can run on another thread than theirs. `geartrain.tools.testing.ThreadRanks` are threads of one process.

Every call ends: with its result, with `PeerLostError` when a rank is gone, or when the deadline has passed. The first
rank that notices leaves a note with the reason in the job's key-value store and closes its connections, so that all
others notice at once and can say what happened. A group that has lost a rank stays lost; the job is restarted.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import ArgumentError, PeerLostError, RanksDisagreeError

Bytes = NDArray[np.uint8]
# Bytes for or from a rank.
Message = tuple[int, Bytes]

# How long a rank that lost another waits for the note that says why.
NOTE_S = 2.0
# Messages between two ranks in one exchange, at most; more would share a tag.
MAX_MESSAGES = 256


class Ranks(Protocol):
    """What a replay over many ranks asks of them. All calls are collective: every rank makes them, in one order."""

    @property
    def rank(self) -> int:
        """This rank, 0 to size - 1."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def sent_bytes(self) -> int:
        """Bytes this rank has sent."""
        ...

    def gather(self, mine: Bytes) -> Bytes:
        """Every rank's bytes: (n,) uint8, the same n everywhere, to (size, n)."""
        ...

    def gather_objects(self, mine: Any) -> list[Any]:
        """Every rank's object, by pickle: for setting up, not for every batch."""
        ...

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Sends and receives into the arrays given; messages between two ranks arrive in the order of the lists."""
        ...

    def fail(self, reason: str) -> None:
        """Leaves for good, telling the others why, so that none of them waits."""
        ...

    def close(self) -> None:
        """Leaves in good order."""
        ...


class OneRank:
    """A group of one: nothing to say to anybody."""

    rank = 0
    size = 1
    sent_bytes = 0

    def gather(self, mine: Bytes) -> Bytes:
        """See `Ranks`."""
        copied: Bytes = mine[None].copy()
        return copied

    def gather_objects(self, mine: Any) -> list[Any]:
        """See `Ranks`."""
        return [mine]

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """See `Ranks`."""

    def fail(self, reason: str) -> None:
        """See `Ranks`."""

    def close(self) -> None:
        """See `Ranks`."""


def gather_by_doubling(ranks: Ranks, mine: Bytes) -> Bytes:
    """`Ranks.gather` by `Ranks.exchange`, in ceil(log2 size) rounds.

    In round k every rank passes on what it has to the rank 2^k before it, and has twice as much afterwards (Bruck et
    al., 1997). (size - 1) * n bytes leave every rank in all, whatever the number of rounds.
    """
    return gather_among(ranks, range(ranks.size), mine)


def gather_among(ranks: Ranks, members: Sequence[int], mine: Bytes) -> Bytes:
    """The same among some of the ranks, (len(members), n); all make the call, and the others get zeros."""
    size = len(members)
    have = np.zeros((size, mine.size), np.uint8)
    at = members.index(ranks.rank) if ranks.rank in members else None
    have[0] = mine
    step = 1
    while step < size:
        if at is None:
            ranks.exchange([], [])
        else:
            count = min(step, size - step)
            ranks.exchange(
                [(members[(at - step) % size], have[:count].reshape(-1))],
                [(members[(at + step) % size], have[step : step + count].reshape(-1))],
            )
        step *= 2
    if at is None:
        return np.zeros_like(have)
    rolled: Bytes = np.roll(have, at, axis=0)
    return rolled


def gather_pickled(ranks: Ranks, mine: Any) -> list[Any]:
    """`Ranks.gather_objects` by `Ranks.gather`."""
    data = np.frombuffer(pickle.dumps(mine), np.uint8)
    sizes = ranks.gather(np.array([data.size], np.int64).view(np.uint8)).reshape(-1).view(np.int64)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: data.size] = data
    return [
        pickle.loads(part[:size].tobytes()) for part, size in zip(ranks.gather(padded), sizes.tolist(), strict=True)
    ]


Thing = TypeVar("Thing")


def together(ranks: Ranks, make: Callable[[], Thing]) -> Thing:
    """What every rank makes; when one cannot, all say so.

    Raises:
        RanksDisagreeError: another rank could not; what it raised there is raised there as itself.
    """
    made: list[Thing] = []
    failed = None
    try:
        made.append(make())
    except Exception as error:
        failed = error
    complaints = ranks.gather_objects(None if failed is None else f"{type(failed).__name__}: {failed}")
    if failed is not None:
        raise failed
    for rank, complaint in enumerate(complaints):
        if complaint is not None:
            raise RanksDisagreeError(f"rank {rank} cannot take part: {complaint}")
    return made[0]


# How many groups these ranks have made in this process; the same number on all of them.
_groups_made: Counter[tuple[int, ...]] = Counter()


class TorchRanks:
    """The ranks of a `torch.distributed` job, or some of them, over Gloo.

    Args:
        members: their global ranks, in the order that numbers them; this process must be one. All of them make this
            object at the same point of the program.
        timeout_s: longest wait for another rank.

    Raises:
        ArgumentError: there is no process group, or this rank is not a member.
        PeerLostError: not all of them came in time.
    """

    def __init__(self, members: Sequence[int], timeout_s: float = 60.0) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise ArgumentError(
                "a replay over several ranks needs torch.distributed: start the script with torchrun and call "
                "torch.distributed.init_process_group first"
            )
        here = dist.get_rank()
        self._members = list(members)
        if here not in self._members:
            raise ArgumentError(f"rank {here} is none of the replay's ranks {self._members}")
        self.rank = self._members.index(here)
        self.size = len(self._members)
        self.sent_bytes = 0
        self._timeout_s = timeout_s
        self._calls = 0
        self._broken: str | None = None
        # Groups that torch makes are named by what else the process has made, which may differ between ranks, and a
        # name is used again once its group is gone. Ours have names of their own, for as long as the job lives. (Not
        # by torchrun's count of restarts: hosts that restart because another did count differently.)
        key = tuple(self._members)
        name = f"geartrain/{zlib.crc32(repr(key).encode()):08x}/{_groups_made[key]}"
        _groups_made[key] += 1
        self._store = dist.PrefixStore(  # type: ignore[attr-defined]
            name, dist.distributed_c10d._get_default_store()
        )
        try:
            self._group: Any = dist.ProcessGroupGloo(
                self._store, self.rank, self.size, timedelta(seconds=max(timeout_s, 1e-3))
            )
        except RuntimeError as error:
            raise PeerLostError(
                f"ranks {self._members} did not all meet within {timeout_s} s: {error}{_restart_hint()}"
            ) from error

    def gather(self, mine: Bytes) -> Bytes:
        """See `Ranks`."""
        return gather_by_doubling(self, mine)

    def gather_objects(self, mine: Any) -> list[Any]:
        """See `Ranks`."""
        return gather_pickled(self, mine)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """See `Ranks`."""
        group = self._group
        if self._broken is not None or group is None:
            raise PeerLostError(self._broken or "this replay has left its group")
        import torch

        self._calls += 1
        under_way: list[tuple[int, Any]] = []
        deadline_s = time.monotonic() + self._timeout_s
        peer = self.rank
        try:
            for start, messages in ((group.recv, receives), (group.send, sends)):
                numbers: dict[int, int] = {}
                for peer, array in messages:
                    number = numbers[peer] = numbers.get(peer, -1) + 1
                    if number >= MAX_MESSAGES:
                        raise ArgumentError(f"at most {MAX_MESSAGES} messages a peer fit in one exchange")
                    if array.size:
                        tag = self._calls % 65536 * MAX_MESSAGES + number
                        under_way.append((peer, start([torch.from_numpy(array)], peer, tag)))
            self.sent_bytes += sum(array.size for _, array in sends)
            for peer, work in under_way:  # noqa: B007  the error names the peer
                work.wait(timedelta(seconds=max(0.001, deadline_s - time.monotonic())))
        except RuntimeError as error:
            self._lost(peer, error)

    def fail(self, reason: str) -> None:
        """See `Ranks`."""
        if self._broken is None:
            self._broken = self._leave_note(f"rank {self._members[self.rank]} gave up: {reason}")
        self.close()

    def close(self) -> None:
        """See `Ranks`."""
        if self._broken is None:
            self._broken = "this replay has left its group"
        self._group = None  # its connections close with it, which the others notice

    def _lost(self, peer: int, error: RuntimeError) -> NoReturn:
        timed_out = "imed out" in str(error)
        found = (
            f"rank {self._members[peer]} did not answer within {self._timeout_s} s"
            if timed_out
            else f"rank {self._members[peer]} was lost: its connection closed"
        )
        note = self._leave_note(found)
        self._broken = note if note == found else f"{note} (noticed as: {found})"
        self.close()
        raise PeerLostError(self._broken) from error

    def _leave_note(self, note: str) -> str:
        """Leaves the reason for the others, unless one of them was first: then that is the reason."""
        notes = [note]

        def leave() -> None:
            notes.append(self._store.compare_set("lost", "", note).decode())

        # The key-value store may have died with the rank that kept it, and waits much longer than we do.
        thread = threading.Thread(target=_quietly, args=(leave,), daemon=True)
        thread.start()
        thread.join(NOTE_S)
        return notes[-1]


def join(group: Any, members: Sequence[int], timeout_s: float) -> Ranks:
    """The members of a job as `Ranks`: over a Gloo group of their own, or `group` where that is `Ranks` already.

    Collective, unless `group` is. Raises as `TorchRanks` does.
    """
    if group is not None and hasattr(group, "exchange"):
        ranks: Ranks = group
        return ranks
    return TorchRanks(members, timeout_s)


def _restart_hint() -> str:
    if "TORCHELASTIC_RUN_ID" not in os.environ or os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
        return ""
    return (
        " (if torchrun has restarted this job, ranks of its lives may mix up their addresses unless it is started with "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --standalone or --rdzv-backend c10d)"
    )


def _quietly(body: Any) -> None:
    try:
        body()
    except Exception:  # a note that cannot be left is no note
        return


__all__ = [
    "Bytes",
    "Message",
    "OneRank",
    "Ranks",
    "TorchRanks",
    "gather_among",
    "gather_by_doubling",
    "gather_pickled",
    "join",
    "together",
]
