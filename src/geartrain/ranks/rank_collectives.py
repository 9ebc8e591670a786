"""Collectives built from the few that every rank group has.

They cover all-gathers by rounds of messages, all-to-alls that exchange their sizes first, and set-up steps that succeed
on all ranks or raise on all.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from geartrain.errors import RanksDisagreeError
from geartrain.ranks.carrier import Bytes, Message
from geartrain.ranks.rank_group import RankGroup

# Ranks that an all-gather reaches in one round.
RADIX = 8
# Largest group in which every rank sends a message to every other one in each batch: it costs a rank about 5 us of
# processor time for each of them, and saves a round.
DIRECT_RANKS = 32

T = TypeVar("T")


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


__all__ = [
    "DIRECT_RANKS",
    "RADIX",
    "all_gather_among",
    "all_gather_bruck",
    "all_gather_object",
    "all_to_all_of_known_sizes",
    "run_on_all_ranks",
]
