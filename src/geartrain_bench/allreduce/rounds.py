"""Synchronized rounds of all-reduce, timed and checked: the measured loop of every configuration's ranks.

Imports NumPy and nothing of geartrain, since MPI's ranks run it in environments of their own.

A round begins at an instant that all ranks agree on through a shared file, without traffic on the measured network. Its
time, for each rank, is from that instant to the end of the rank's last call; the bench takes the slowest rank.
Processes of one machine share the monotonic clock, across network namespaces.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

#: All ranks sleep until their common start; a rank that is scheduled later is late, and its delay counts.
LEAD_NS = 3_000_000
POLL_S = 2e-4
TIMEOUT_S = 120.0
_NUMBER, _START, _SLOTS = 0, 1, 2

#: Other processes of the machine should not be measured.
NICENESS = -10

Array = np.ndarray[Any, Any]


def raise_priority() -> None:
    """Raises this process's scheduling priority, where permitted."""
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, NICENESS)


class RoundBarrier:
    """Barrier of ranks in a shared file, with a common start time for each round.

    Args:
        path: of a file of `RoundBarrier.bytes(parties)` zeros.
        parties: ranks.
        index: of this rank, from 0.
    """

    def __init__(self, path: str, parties: int, index: int) -> None:
        self._cells = np.memmap(path, np.int64, "r+", shape=(_SLOTS + parties,))
        self._index = index
        self._round = 0

    @staticmethod
    def bytes(parties: int) -> int:
        """Size of the file."""
        return 8 * (_SLOTS + parties)

    def start(self) -> int:
        """Waits for all ranks, and then for the agreed instant; returns it, in nanoseconds.

        Raises:
            TimeoutError: a rank did not reach the round.
        """
        self._round += 1
        cells, number = self._cells, self._round
        cells[_SLOTS + self._index] = number
        ends_s = time.monotonic() + TIMEOUT_S
        if self._index == 0:
            while (cells[_SLOTS:] < number).any():
                self._nap(ends_s)
            cells[_START] = time.monotonic_ns() + LEAD_NS
            cells[_NUMBER] = number
        while cells[_NUMBER] < number:
            self._nap(ends_s)
        start_ns = int(cells[_START])
        time.sleep(max(0, start_ns - time.monotonic_ns()) / 1e9)
        return start_ns

    @staticmethod
    def _nap(ends_s: float) -> None:
        time.sleep(POLL_S)
        if time.monotonic() > ends_s:
            raise TimeoutError(f"not all ranks reached a round within {TIMEOUT_S:g} s")


def contribution(rank: int, count: int) -> Array:
    """A rank's contribution: small integers, whose sums are exact in float32 in any order."""
    return ((np.arange(count, dtype=np.int64) * (2 * rank + 3)) % 61 + rank).astype(np.float32)


def total(size: int, count: int) -> Array:
    """The expected sum."""
    found = np.zeros(count, np.float32)
    for rank in range(size):
        found += contribution(rank, count)
    return found


def timed_rounds(
    all_reduce: Callable[[Array], Any],
    *,
    barrier: RoundBarrier,
    rank: int,
    size: int,
    nbytes: int,
    calls: int,
    rounds: int,
    warm: int,
) -> list[float]:
    """Seconds of a call in each round, on this rank; each round makes `calls` of them, one after the other.

    `all_reduce` works in place, or returns an array of sums. Warm-up rounds come first and do not count. Every element
    of every sum is checked, between rounds.

    Raises:
        ArithmeticError: a sum is wrong.
    """
    count = nbytes // 4
    mine, wanted = contribution(rank, count), total(size, count)
    arrays = [mine.copy() for _ in range(calls)]
    seconds = []
    gc.collect()
    for number in range(warm + rounds):
        for array in arrays:
            array[:] = mine
        start_ns = barrier.start()
        given = [all_reduce(array) for array in arrays]
        took_s = (time.monotonic_ns() - start_ns) / 1e9
        barrier.start()  # what is checked would take a core from ranks that are not done yet
        for array, other in zip(arrays, given, strict=True):
            array = other if isinstance(other, np.ndarray) else array  # noqa: PLW2901 - not all are in place
            wrong = int((array != wanted).sum())
            if wrong:
                where = int(np.flatnonzero(array != wanted)[0])
                raise ArithmeticError(
                    f"{wrong} of {count} sums are wrong on rank {rank}: element {where} is {array[where]}, "
                    f"not {wanted[where]}"
                )
        if number >= warm:
            seconds.append(took_s / calls)
    return seconds
