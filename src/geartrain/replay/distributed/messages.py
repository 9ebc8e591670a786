"""Rows read for others: from this host's shard to the batch or the message that each belongs in.

A box is memory for rows of one plan, fields and books; it is a consumer's batch, or a message to it. An order says
which of the rows that this rank reads one consumer wants, and where in its box each goes. Rows are copied once, from
shared memory to their place.

Reading is begun and then waited for, so that a GPU gathers for one consumer while the CPU copies for others.

A message holds the fields' arrays one after the other, each padded to 64 bytes, and then a `BOOK` for every row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.replay.distributed.members import Consumer
from geartrain.replay.distributed.rank_group import Bytes
from geartrain.replay.fetch import Plan
from geartrain.selection.sharded import NO_ROW, ShardedDraw
from geartrain.selection.strategy import Draw

# What is known of a row of a batch besides its fields, as it travels.
BOOK = np.dtype(
    [
        ("row", "<u4"),
        ("generation", "<u4"),
        ("shard", "<u4"),
        ("length", "<i4"),
        ("start", "<i4"),
        ("steps", "<i4"),  # real ones in the window
        ("version", "<i8"),
        ("probability", "<f8"),
    ]
)


@dataclass(frozen=True)
class Draws:
    """All draws of a batch, as every rank knows them: arrays (batch_size,)."""

    part: NDArray[np.int64]  # which store
    shard: NDArray[np.int64]  # among those of all stores
    replica: NDArray[np.int64]  # that trains on it
    server: NDArray[np.int64]  # rank that reads it
    place: NDArray[np.int64]  # in the replica's batch
    first: NDArray[np.int64]  # each store's first draw


@dataclass(frozen=True)
class Seen:
    """What was found of k rows as they were read: arrays (k,)."""

    torn: NDArray[np.uint8]
    lengths: NDArray[np.int32]
    starts: NDArray[np.int32]
    steps: NDArray[np.int32]  # real ones in the window
    versions: NDArray[np.int64]


class Box:
    """Where the rows for one consumer go: its batch, or a message to it.

    Args:
        plan: of the rows.
        n: rows.
        arrays: the memory of the batch; by default a message is made.
    """

    def __init__(self, plan: Plan, n: int, arrays: list[Any] | None = None) -> None:
        self.plan = plan
        self.n = n
        self.message: Bytes | None = None
        if arrays is None:
            self.message, arrays, self.books = message_of(plan, n)
        else:
            self.books = np.zeros(n, BOOK)
        self.arrays: list[Any] = arrays

    @property
    def nbytes(self) -> int:
        """Of the fields."""
        return sum(int(array.nbytes) for array in self.arrays)

    def read(
        self,
        part: int,
        plan: Plan,
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        ends: NDArray[np.int32] | None,
        places: NDArray[np.uint32],
    ) -> Callable[[], Seen]:
        """Begins to copy rows of store `part` to places of the box; what is returned waits for the end of it."""
        raw = plan.fetch(rows, generations, ends, self.arrays, places)
        seen = Seen(raw.torn, raw.lengths, raw.starts, raw.mask.sum(1, dtype=np.int32), raw.versions)
        return lambda: seen


def message_layout(plan: Plan, n: int) -> tuple[list[int], int, int]:
    """Where in a message of n rows its fields begin, where its books do, and its bytes."""
    begins, at = [], 0
    for name in plan.names:
        begins.append(at)
        at += _padded(int(np.prod(plan.shape(name, n))) * plan.raw_dtype(name).itemsize)
    return begins, at, at + n * BOOK.itemsize


def message_of(plan: Plan, n: int, message: Bytes | None = None) -> tuple[Bytes, list[Any], NDArray[Any]]:
    """Memory for a message of n rows, and its parts: the fields' arrays one after the other, then the books."""
    begins, books, nbytes = message_layout(plan, n)
    if message is None:
        message = _native.pooled_bytes(nbytes)
    arrays = []
    for name, at in zip(plan.names, begins, strict=True):
        shape, dtype = plan.shape(name, n), plan.raw_dtype(name)
        size = int(np.prod(shape)) * dtype.itemsize
        arrays.append(message[at : at + size].view(dtype).reshape(shape))
    return message, arrays, message[books:].view(BOOK)


def _padded(size: int) -> int:
    return (size + 63) // 64 * 64


class Served:
    """The draws of one store that this rank reads, and their rows so far."""

    def __init__(self, chosen: ShardedDraw, numbers: NDArray[np.intp]) -> None:
        self.n = len(chosen.shard)
        self.numbers = numbers
        self.rows = chosen.rows[numbers]
        self.generations = chosen.generations[numbers]
        self.probability = chosen.probability[numbers]
        self._shard_rows = chosen.rows
        self._known = chosen.rows != NO_ROW
        self._share = chosen.share

    def kept(self, lost: NDArray[np.intp]) -> NDArray[np.uint32]:
        """The shard's other rows in this batch, those that other ranks read included."""
        others = self._known.copy()
        others[self.numbers[lost]] = False
        return np.ascontiguousarray(self._shard_rows[others])

    def replace(self, lost: NDArray[np.intp], drawn: Draw) -> None:
        """Puts newly drawn rows of the shard in the place of lost ones."""
        self.rows[lost] = self._shard_rows[self.numbers[lost]] = drawn.rows
        self.generations[lost] = drawn.generations
        self.probability[lost] = drawn.probability * self._share
        self._known[self.numbers[lost]] = True


@dataclass(frozen=True)
class Order:
    """Which of the served draws one consumer wants, and where."""

    box: Box
    fields: tuple[str, ...]
    index: NDArray[np.intp]  # among the served draws
    place: NDArray[np.int64]  # in the box; of every served draw

    def read(
        self,
        part: int,
        plans: Mapping[tuple[str, ...], Plan],
        rows: Served,
        found: NDArray[np.intp],
        ends: NDArray[np.int32] | None,
        shard: int,
    ) -> Callable[[], NDArray[np.intp]]:
        """Begins to copy the rows of store `part` that were found and are wanted.

        What is returned waits for the end of it, writes the books, and returns the rows that were torn.
        """
        wanted = np.zeros(len(self.place), bool)
        wanted[self.index] = True
        index = found[wanted[found]]
        if not len(index):
            return lambda: index
        places = self.place[index]
        seen_later = self.box.read(
            part,
            plans[self.fields],
            np.ascontiguousarray(rows.rows[index]),
            np.ascontiguousarray(rows.generations[index]),
            None if ends is None else np.ascontiguousarray(ends[index]),
            places.astype(np.uint32),
        )
        books = np.zeros(len(index), BOOK)
        books["row"], books["generation"], books["shard"] = rows.rows[index], rows.generations[index], shard
        books["probability"] = rows.probability[index]

        def finish() -> NDArray[np.intp]:
            seen = seen_later()
            books["length"], books["start"], books["version"] = seen.lengths, seen.starts, seen.versions
            books["steps"] = seen.steps
            self.box.books[places] = books
            torn: NDArray[np.intp] = index[seen.torn != 0]
            return torn

        return finish


def order_of(consumer: Consumer, box: Box, here: NDArray[np.intp], draws: Draws, rank: int) -> Order:
    """What a consumer wants of the draws `here`, which are those of one store that this rank reads."""
    wanted = draws.replica[here] == consumer.replica
    if consumer.rank == rank:
        place = draws.place[here]
    else:
        # A message holds the rows of all stores that this rank reads for the consumer, in the order of draws.
        every = (draws.server == rank) & (draws.replica == consumer.replica)
        place = (np.cumsum(every) - 1)[here]
    return Order(box, consumer.fields, np.flatnonzero(wanted), place)


__all__ = ["BOOK", "Box", "Draws", "Order", "Seen", "Served", "message_layout", "message_of", "order_of"]
