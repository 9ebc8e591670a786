"""Rounds in flight: exchanges between ranks whose messages are sent now and received later.

A rank begins a round by sending its messages. It receives the others' messages when it needs them, and may begin more
rounds in between. All ranks begin the same rounds in the same order, and receive them in that order. So a message does
not have to name its round.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from geartrain.core.threads import DaemonThread
from geartrain.errors import GeartrainError, WaitTimeoutError
from geartrain.ranks.carrier import INLINE_BYTES
from geartrain.ranks.rank_group import Bytes, RankGroup
from geartrain.ranks.torch_rank_group import TorchRankGroup

# How long one message is waited for before the program is asked whether there is something else to do.
GLANCE_S = 0.002


@runtime_checkable
class Rounds(Protocol):
    """Rounds of the ranks of a group. One thread begins and receives them."""

    def post(self, parts: Mapping[int, Bytes]) -> int:
        """Begins a round: sends some ranks a message each, without waiting for them. Returns the round's number.

        The messages may not be changed before their receivers have answered to them.
        """
        ...

    def collect(self, number: int, peers: Collection[int]) -> dict[int, Bytes]:
        """The messages of a round, of all ranks that have sent one to this rank. Raises `PeerLostError`."""
        ...

    def arrived(self, number: int, peers: Collection[int]) -> bool:
        """Whether `collect` has no need to wait; waits a little itself. Raises `PeerLostError`."""
        ...

    def flush(self) -> None:
        """Waits until all messages of this rank are on their way, before it sends others or leaves.

        Raises:
            WaitTimeoutError: ranks did not take them in time.
        """
        ...


def rounds_of(group: RankGroup) -> Rounds:
    """The rounds of a group: its own, those of its transports, or ones that are made when they are received.

    Collective: all ranks are connected with each other when it returns.
    """
    group.all_to_all([np.empty(0, np.uint8)] * group.size)
    if isinstance(group, Rounds):
        return group
    any_group: Any = group
    return TransportRounds(any_group) if getattr(group, "native_rounds", None) is not None else LateRounds(group)


class TransportRounds:
    """Rounds over geartrain's transports.

    A separate thread sends messages that may have to wait for their receiver, and all messages after them.

    Args:
        group: a group with `native_rounds` whose ranks are all connected.
    """

    def __init__(self, group: TorchRankGroup) -> None:
        assert group.native_rounds is not None
        self._group = group
        self._rounds = group.native_rounds
        self._behind = _Sender(self._rounds, group.timeout_s)
        self._early: dict[int, _Early] = {}

    def post(self, parts: Mapping[int, Bytes]) -> int:
        group, size = self._group, self._group.size
        group.check_usable()
        number = self._rounds.begin()
        # In the order of a ring, so that not all begin with the same one.
        messages = sorted(parts.items(), key=lambda each: (each[0] - group.rank) % size)
        if self._behind.idle and all(part.size <= INLINE_BYTES for _, part in messages):
            try:
                self._rounds.send(number, messages, group.timeout_s)
            except GeartrainError as error:
                group.round_failed(error)
        else:
            try:
                self._behind.send(number, messages)
            except GeartrainError as error:  # no more threads
                group.abort(str(error))
                raise
        return number

    def collect(self, number: int, peers: Collection[int]) -> dict[int, Bytes]:
        group, size = self._group, self._group.size
        group.check_usable()
        early = self._early.pop(number, None) or _Early()
        found = early.parts
        order = sorted(set(peers) - found.keys(), key=lambda peer: (group.rank - peer) % size)
        left_s = max(early.since_s + group.timeout_s - time.monotonic(), 0.001)
        try:
            found.update(zip(order, self._rounds.receive(number, order, left_s), strict=True))
        except GeartrainError as error:
            group.round_failed(error)
        return found

    def arrived(self, number: int, peers: Collection[int]) -> bool:
        early, group = self._early.setdefault(number, _Early()), self._group
        for peer in sorted(set(peers) - early.parts.keys(), key=lambda peer: (group.rank - peer) % group.size):
            try:
                (early.parts[peer],) = self._rounds.receive(number, [peer], GLANCE_S)
            except WaitTimeoutError as error:
                if time.monotonic() > early.since_s + group.timeout_s:
                    group.round_failed(error)
                return False
            except GeartrainError as error:
                group.round_failed(error)
        return True

    def flush(self) -> None:
        if not self._behind.flush(self._group.timeout_s):
            raise WaitTimeoutError(
                f"the other ranks did not take this rank's messages within {self._group.timeout_s} s"
            )


class _Early:
    """The messages of a round that have arrived, and since when the round has been waited for."""

    def __init__(self) -> None:
        self.since_s = time.monotonic()
        self.parts: dict[int, Bytes] = {}


class _Sender:
    """Sends messages one after the other on a thread, which is there while there are some."""

    def __init__(self, rounds: Any, timeout_s: float) -> None:
        self._rounds = rounds
        self._timeout_s = timeout_s
        self._waiting: queue.SimpleQueue[tuple[int, list[tuple[int, Bytes]]]] = queue.SimpleQueue()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._unsent = 0

    @property
    def idle(self) -> bool:
        return self._unsent == 0

    def send(self, number: int, messages: list[tuple[int, Bytes]]) -> None:
        self._waiting.put((number, messages))
        with self._lock:
            self._unsent += 1
            if self._unsent > 1:
                return  # the thread is there
            try:
                DaemonThread(self._run, "geartrain-rank-sends").start()
            except BaseException:
                self._unsent -= 1
                self._waiting.get_nowait()
                raise

    def flush(self, timeout_s: float) -> bool:
        with self._lock:
            return self._changed.wait_for(lambda: self._unsent == 0, timeout_s)

    def _run(self) -> None:
        while True:
            number, messages = self._waiting.get()
            # A rank that does not take them is found by what is received of it, which has a deadline as well.
            with contextlib.suppress(GeartrainError):
                self._rounds.send(number, messages, self._timeout_s, beside=True)
            with self._lock:
                self._unsent -= 1
                if self._unsent == 0:
                    self._changed.notify_all()
                    return


class LateRounds:
    """Rounds of any group: each is made, by an all-to-all, when its messages are received."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._posted: dict[int, Mapping[int, Bytes]] = {}
        self._number = 0

    def post(self, parts: Mapping[int, Bytes]) -> int:
        self._number += 1
        self._posted[self._number] = parts
        return self._number

    def collect(self, number: int, peers: Collection[int]) -> dict[int, Bytes]:
        parts, nothing = self._posted.pop(number), np.empty(0, np.uint8)
        received = self._group.all_to_all([parts.get(rank, nothing) for rank in range(self._group.size)])
        return {peer: received[peer] for peer in peers}

    def arrived(self, number: int, peers: Collection[int]) -> bool:
        """What comes is not known before."""
        return True

    def flush(self) -> None:
        """Nothing is sent but when it is received."""


__all__ = ["LateRounds", "Rounds", "TransportRounds", "rounds_of"]
