"""Rows read for others: from this host's shard to the batch or the message that each belongs in.

A box is memory for rows of one plan, fields and books; it is a consumer's batch, or a message to it. An order says
which of the rows that this rank reads one consumer wants, and where in its box each goes. Rows are copied once, from
shared memory to their place.

A message holds the fields' arrays one after the other, each padded to 64 bytes, and then a `BOOK` for every row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain import _native
from geartrain.fetch import Plan
from geartrain.members import Consumer
from geartrain.ranks import Bytes
from geartrain.selection import Drawn
from geartrain.totals import NO_ROW, Chosen

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


class Box:
    """Where the rows for one consumer go: its batch, or a message to it."""

    def __init__(self, plan: Plan, n: int, arrays: list[Any] | None = None) -> None:
        self.plan = plan
        self.n = n
        self.message: Bytes | None = None
        if arrays is None:
            self.message, arrays, self.books = message_of(plan, n)
        else:
            self.books = np.zeros(n, BOOK)
        self.arrays: list[Any] = arrays


def message_of(plan: Plan, n: int, message: Bytes | None = None) -> tuple[Bytes, list[Any], NDArray[Any]]:
    """Memory for a message of n rows, and its parts: the fields' arrays one after the other, then the books."""
    shapes = [(plan.shape(name, n), plan.raw_dtype(name)) for name in plan.names]
    sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in shapes]
    if message is None:
        message = _native.pooled_bytes(sum(_padded(size) for size in sizes) + n * BOOK.itemsize)
    arrays, at = [], 0
    for (shape, dtype), size in zip(shapes, sizes, strict=True):
        arrays.append(message[at : at + size].view(dtype).reshape(shape))
        at += _padded(size)
    return message, arrays, message[at:].view(BOOK)


def _padded(size: int) -> int:
    return (size + 63) // 64 * 64


class Served:
    """The draws of one store that this rank reads, and their rows so far."""

    def __init__(self, chosen: Chosen, numbers: NDArray[np.intp]) -> None:
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

    def replace(self, lost: NDArray[np.intp], drawn: Drawn) -> None:
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
        plans: Mapping[tuple[str, ...], Plan],
        rows: Served,
        found: NDArray[np.intp],
        ends: NDArray[np.int32] | None,
        shard: int,
    ) -> NDArray[np.intp]:
        """Copies the rows that were found and are wanted; returns those that were torn."""
        wanted = np.zeros(len(self.place), bool)
        wanted[self.index] = True
        index = found[wanted[found]]
        if not len(index):
            return index
        places = self.place[index]
        plan = plans[self.fields]
        raw = plan.fetch(
            np.ascontiguousarray(rows.rows[index]),
            np.ascontiguousarray(rows.generations[index]),
            None if ends is None else np.ascontiguousarray(ends[index]),
            self.box.arrays,
            places.astype(np.uint32),
        )
        books = np.zeros(len(index), BOOK)
        books["row"], books["generation"], books["shard"] = rows.rows[index], rows.generations[index], shard
        books["length"], books["start"], books["version"] = raw.lengths, raw.starts, raw.versions
        books["steps"] = raw.mask.sum(1)
        books["probability"] = rows.probability[index]
        self.box.books[places] = books
        torn: NDArray[np.intp] = index[raw.torn != 0]
        return torn


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


__all__ = ["BOOK", "Box", "Draws", "Order", "Served", "message_of", "order_of"]
