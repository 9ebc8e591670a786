"""In-process rank group for tests: ranks are threads, eight start in a millisecond, and faults are objects."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from geartrain.core.threads import DaemonThread
from geartrain.errors import PeerLostError
from geartrain.ranks.rank_collectives import all_gather_bruck, all_gather_object
from geartrain.ranks.rank_group import Bytes, Message

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class _Wire:
    """Message queues between all pairs of ranks, and the reason of the group's failure."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.queues: defaultdict[tuple[int, int], queue.SimpleQueue[Bytes]] = defaultdict(queue.SimpleQueue)
        self.broken: str | None = None
        self.lock = threading.Lock()


class ThreadRankGroup:
    """One of `size` ranks in this process; see `geartrain.ranks.rank_group.RankGroup`.

    Args:
        die_at: number of the exchange at which this rank dies, like a killed process.

    Attributes:
        one_host: True if all ranks are on one host and may read each other's shards. Otherwise each rank stands for a
            host.
        exchanges: number of exchanges that this rank has begun.
    """

    def __init__(self, wire: _Wire, rank: int, timeout_s: float, die_at: int | None = None) -> None:
        self._wire = wire
        self.rank = rank
        self.size = wire.size
        self.sent_bytes = 0
        self.sent_messages = 0
        self._timeout_s = timeout_s
        self.exchanges = 0
        self.die_at = die_at
        self.one_host = False

    @classmethod
    def make(cls, size: int, timeout_s: float = 20.0, *, one_host: bool = False) -> list[Self]:
        """All ranks of a new group."""
        wire = _Wire(size)
        made = [cls(wire, rank, timeout_s) for rank in range(size)]
        for each in made:
            each.one_host = one_host
        return made

    def all_gather(self, mine: Bytes) -> Bytes:
        return all_gather_bruck(self, mine)

    def all_gather_object(self, mine: Any) -> list[Any]:
        return all_gather_object(self, mine)

    def all_to_all(self, parts: Sequence[Bytes]) -> list[Bytes]:
        self._begin()
        for peer, part in enumerate(parts):
            if peer != self.rank:
                self._queue(self.rank, peer).put(part.copy())
                self.sent_bytes += part.size
                self.sent_messages += 1
        deadline_s = time.monotonic() + self._timeout_s
        return [part if peer == self.rank else self._receive(peer, deadline_s) for peer, part in enumerate(parts)]

    def post(self, parts: Mapping[int, Bytes]) -> int:
        self._begin()
        for peer, part in parts.items():
            self._queue(self.rank, peer).put(part.copy())
            self.sent_bytes += part.size
            self.sent_messages += 1
        return self.exchanges

    def collect(self, number: int, peers: Collection[int]) -> dict[int, Bytes]:
        deadline_s = time.monotonic() + self._timeout_s
        return {peer: self._receive(peer, deadline_s) for peer in peers}

    def arrived(self, number: int, peers: Collection[int]) -> bool:
        return True

    def flush(self) -> None:
        pass

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        self._begin()
        for peer, array in sends:
            if array.size:
                self._queue(self.rank, peer).put(array.copy())
        self.sent_bytes += sum(array.size for _, array in sends)
        self.sent_messages += len({peer for peer, array in sends if array.size})
        deadline_s = time.monotonic() + self._timeout_s
        for peer, array in receives:
            if not array.size:
                continue
            got = self._receive(peer, deadline_s)
            if got.size != array.size:
                self.abort(f"rank {peer} sent {got.size} bytes, {array.size} were expected")
                raise PeerLostError(str(self._wire.broken))
            array[:] = got

    def peers(self) -> dict[str, int]:
        """All by queues of this process."""
        return {"threads": self.size - 1}

    def shm_peers(self) -> set[int]:
        """All others, or none."""
        return set(range(self.size)) - {self.rank} if self.one_host else set()

    def check_peers(self) -> None:
        if self._wire.broken is not None:
            raise PeerLostError(str(self._wire.broken))

    def abort(self, reason: str) -> None:
        if self._wire.broken is None:
            self._wire.broken = f"rank {self.rank} aborted: {reason}"

    def close(self) -> None:
        pass

    def _begin(self) -> None:
        if self.exchanges == self.die_at:
            self.abort("die_at was reached")
        self.exchanges += 1
        if self._wire.broken is not None:
            raise PeerLostError(self._wire.broken)

    def _queue(self, sender: int, receiver: int) -> queue.SimpleQueue[Bytes]:
        with self._wire.lock:
            return self._wire.queues[sender, receiver]

    def _receive(self, peer: int, deadline_s: float) -> Bytes:
        waiting = self._queue(peer, self.rank)
        while True:
            try:
                return waiting.get(timeout=0.02)
            except queue.Empty:
                if self._wire.broken is not None:
                    raise PeerLostError(self._wire.broken) from None
                if time.monotonic() > deadline_s:
                    self.abort(f"rank {peer} did not answer within {self._timeout_s} s")
                    raise PeerLostError(str(self._wire.broken)) from None


def run_ranks(
    ranks: int | Sequence[ThreadRankGroup], body: Callable[[ThreadRankGroup], T], timeout_s: float = 60.0
) -> list[T]:
    """Runs `body(rank)` on a thread a rank and returns the results in the order of ranks.

    A rank that raises aborts the group. Of all errors the first that is not just the loss of another rank is raised.

    Raises:
        TimeoutError: a rank did not finish in time.
    """
    group = ThreadRankGroup.make(ranks) if isinstance(ranks, int) else list(ranks)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(one: ThreadRankGroup) -> None:
        try:
            results[one.rank] = body(one)
        except BaseException as error:
            errors[one.rank] = error
            one.abort(f"{type(error).__name__}: {error}")

    threads = [DaemonThread(run, "geartrain-rank", (one,)) for one in group]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError(f"not all ranks ended within {timeout_s} s; errors so far: {errors}")
    for error in sorted(errors.values(), key=lambda error: isinstance(error, PeerLostError)):
        raise error
    return [results[one.rank] for one in group]
