"""Reads of a global batch: rows from this host's shards, into the batch or into row messages (step 5).

A row buffer holds the rows of one consumer: its batch, or a message to it. A read request says which of the rows that
this rank reads one consumer gets, and their places in its buffer. A row is copied once, from shared memory to its
place. Reads are started and completed in two calls, so that a GPU gathers for one consumer while the CPU copies for
another.

A row that is overwritten before it is copied is redrawn from the same shard by the rank that reads it, so that no other
rank has to know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import EmptyStoreError
from geartrain.replay.builder import State
from geartrain.replay.distributed.members import Consumer, Members
from geartrain.replay.distributed.messages import ROW_HEADER, RowMessage
from geartrain.replay.distributed.read_agreement import ReadAgreement, ReadOutcome
from geartrain.replay.distributed.transition_rows import ReadDraws, TransitionRows
from geartrain.replay.fetch_plan import FetchPlan
from geartrain.replay.sampler import StoreSampler
from geartrain.selection.sharded import NO_ROW, ShardedDraw, begins_with_offers, is_independent
from geartrain.selection.strategy import Draw, Redraw


@dataclass(frozen=True)
class AssignedDraws:
    """All draws of a global batch, as every rank knows them: arrays (batch_size,).

    Attributes:
        store: number of the store.
        shard: number of the shard, among those of all stores.
        replica: that trains on the row.
        reader: rank that reads the row.
        place: of the row in its replica's batch.
        first: (stores,), each store's first draw.
        sizes: (replicas,), rows of each replica's batch.
    """

    store: NDArray[np.int64]
    shard: NDArray[np.int64]
    replica: NDArray[np.int64]
    reader: NDArray[np.int64]
    place: NDArray[np.int64]
    first: NDArray[np.int64]
    sizes: NDArray[np.int64]


@dataclass(frozen=True)
class ReadResult:
    """What a read found of k rows: arrays (k,)."""

    torn: NDArray[np.uint8]
    lengths: NDArray[np.int32]
    starts: NDArray[np.int32]
    steps: NDArray[np.int32]  # real steps in the window
    versions: NDArray[np.int64]


class RowBuffer:
    """Memory for the rows of one consumer, fields and headers: its batch, or a message to it.

    Args:
        plan: of the rows.
        n: rows.
        arrays: the fields of the batch; without them a message is allocated.

    Attributes:
        message: the row message; None for a batch.
        headers: (n,) `ROW_HEADER`.
    """

    def __init__(self, plan: FetchPlan, n: int, arrays: list[Any] | None = None) -> None:
        self.plan = plan
        self.n = n
        self.message: RowMessage | None = None
        self.arrays: list[Any]
        self.headers: NDArray[Any]
        if arrays is None:
            self.message = RowMessage(plan, n)
            self.arrays, self.headers = list(self.message.arrays), self.message.headers
        else:
            self.arrays, self.headers = arrays, np.zeros(n, ROW_HEADER)

    @property
    def nbytes(self) -> int:
        """Bytes of the fields."""
        return sum(int(array.nbytes) for array in self.arrays)

    def read(
        self,
        store: int,
        plan: FetchPlan,
        rows: NDArray[np.uint32],
        generations: NDArray[np.uint32],
        ends: NDArray[np.int32] | None,
        places: NDArray[np.uint32],
        draws: ReadDraws,
    ) -> Callable[[], ReadResult]:
        """Starts to copy rows of a store to their places in the buffer; the call of what is returned completes it."""
        if isinstance(plan, TransitionRows):
            assert ends is not None
            result = ReadResult(*plan.gather(rows, generations, ends, self.arrays, places, draws, self.n))
        else:
            raw = plan.fetch(rows, generations, ends, self.arrays, places)
            result = ReadResult(raw.torn, raw.lengths, raw.starts, raw.mask.sum(1, dtype=np.int32), raw.versions)
        return lambda: result


class ShardRows:
    """The draws of one store that this rank reads, and their current rows. A `Redrawable` batch (sampler.py).

    Args:
        drawn: all draws of the store.
        numbers: of the draws that this rank reads.

    Attributes:
        rows, generations, probability: (k,) of the current rows.
        torn: (k,) nonzero for rows that were lost in the last read.
        steps: (k,) that were drawn with the rows; None where windows are drawn.
        rounds: (k,) under which they were drawn, which their windows are placed by.
    """

    def __init__(self, drawn: ShardedDraw, numbers: NDArray[np.intp]) -> None:
        self.n = len(drawn.shard)
        self.numbers = numbers
        self.torn = np.zeros(len(numbers), np.uint8)
        self.rows = drawn.rows[numbers]
        self.steps = None if drawn.steps is None else drawn.steps[numbers]
        self.rounds = np.zeros(len(numbers), np.int64) if drawn.rounds is None else drawn.rounds[numbers]
        self.generations = drawn.generations[numbers]
        self.probability = drawn.probability[numbers]
        self._shard_rows = drawn.rows
        self._known = drawn.rows != NO_ROW
        self._share = drawn.share

    def lost(self) -> NDArray[np.uint8]:
        """See `Redrawable`."""
        return self.torn

    def kept(self, lost: NDArray[np.intp]) -> NDArray[np.uint32]:
        """The shard's other rows in this batch, those that other ranks read included."""
        others = self._known.copy()
        others[self.numbers[lost]] = False
        return np.ascontiguousarray(self._shard_rows[others])

    def replace(self, lost: NDArray[np.intp], redrawn: Draw) -> None:
        """Replaces lost rows by redrawn rows of the same shard."""
        self.rows[lost] = self._shard_rows[self.numbers[lost]] = redrawn.rows
        self.generations[lost] = redrawn.generations
        self.probability[lost] = redrawn.probability * self._share
        if self.steps is not None and redrawn.steps is not None:
            self.steps[lost] = redrawn.steps
        self._known[self.numbers[lost]] = True


@dataclass(frozen=True)
class ReadRequest:
    """Which of the draws that this rank reads one consumer gets, and their places.

    Attributes:
        buffer: of the consumer.
        fields: that it gets.
        index: (k,) among the draws of `ShardRows`.
        place: in the buffer, of every draw of `ShardRows`.
    """

    buffer: RowBuffer
    fields: tuple[str, ...]
    index: NDArray[np.intp]
    place: NDArray[np.int64]

    @staticmethod
    def of(
        consumer: Consumer, buffer: RowBuffer, here: NDArray[np.intp], draws: AssignedDraws, rank: int
    ) -> ReadRequest:
        """What a consumer gets of the draws `here`, those of one store that this rank reads."""
        wanted = draws.replica[here] == consumer.replica
        if consumer.rank == rank:
            place = draws.place[here]
        else:
            # A message holds the rows of all stores that this rank reads for the consumer, in the order of draws.
            every = (draws.reader == rank) & (draws.replica == consumer.replica)
            place = (np.cumsum(every) - 1)[here]
        return ReadRequest(buffer, consumer.fields, np.flatnonzero(wanted), place)

    def start(
        self,
        store: int,
        plans: Mapping[tuple[str, ...], FetchPlan],
        rows: ShardRows,
        found: NDArray[np.intp],
        ends: NDArray[np.int32] | None,
        shard: int,
        step: int,
        attempt: int,
    ) -> Callable[[], NDArray[np.intp]]:
        """Starts to copy those of the found rows that the consumer gets.

        The call of what is returned completes the copy, writes the headers and returns the rows that were torn.
        """
        wanted = np.zeros(len(self.place), bool)
        wanted[self.index] = True
        index = found[wanted[found]]
        if not len(index):
            return lambda: index
        places = self.place[index]
        complete = self.buffer.read(
            store,
            plans[self.fields],
            np.ascontiguousarray(rows.rows[index]),
            np.ascontiguousarray(rows.generations[index]),
            None if ends is None else np.ascontiguousarray(ends[index]),
            places.astype(np.uint32),
            ReadDraws(step, attempt, rows.numbers[index].astype(np.uint32)),
        )
        headers = np.zeros(len(index), ROW_HEADER)
        headers["row"], headers["generation"], headers["shard"] = rows.rows[index], rows.generations[index], shard
        headers["probability"] = rows.probability[index]

        def finish() -> NDArray[np.intp]:
            result = complete()
            headers["length"], headers["start"], headers["version"] = result.lengths, result.starts, result.versions
            headers["steps"] = result.steps
            self.buffer.headers[places] = headers
            torn: NDArray[np.intp] = index[result.torn != 0]
            return torn

        return finish


class ShardReader:
    """Reads this rank's rows of each batch, and redraws those that are lost.

    Args:
        samplers: of this rank's shards, one for each store.
        members: the ranks.
        plans: for each store, fetch plans by the fields that some consumer gets.
        cursors: `ShardedSampler.cursors`, to be advanced by redraws.
    """

    def __init__(
        self,
        samplers: Sequence[StoreSampler],
        members: Members,
        plans: Sequence[Mapping[tuple[str, ...], FetchPlan]],
        cursors: list[int],
    ) -> None:
        self.samplers = samplers
        self.members = members
        self._plans = plans
        self._cursors = cursors
        # Whether a batch can be drawn again by all ranks: draws that are independent or in an order use nothing up.
        self._can_redraw = all(
            (is_independent(each.strategy) or begins_with_offers(each.strategy))
            and not (each.limited or each.may_refuse)
            for each in samplers
        )

    def read(
        self,
        step: int,
        state: State,
        drawn: Sequence[ShardedDraw | None],
        draws: AssignedDraws,
        buffers: Mapping[int, RowBuffer],
    ) -> ReadOutcome:
        """Reads this rank's rows into the consumers' buffers."""
        lowest = [np.inf for _ in self.samplers]
        failed: EmptyStoreError | None = None
        for number, each in enumerate(drawn):
            if each is None:
                continue
            here = np.flatnonzero((draws.store == number) & (draws.reader == self.members.group.rank))
            if len(here):
                rows = ShardRows(each, here - draws.first[number])
                try:
                    self._read_store(number, rows, here, step, state[number], draws, buffers)
                except EmptyStoreError as error:
                    failed = error
                lowest[number] = float(rows.probability.min())
        return ReadOutcome(lowest, failed)

    def agreement(self, outcome: ReadOutcome, *, with_lowest: bool) -> ReadAgreement:
        """The exchange of what was read, which tells all ranks of lost rows.

        Args:
            outcome: of `read`.
            with_lowest: whether lowest probabilities are wanted.
        """
        return ReadAgreement(self.members, outcome, with_lowest=with_lowest, can_redraw=self._can_redraw)

    def _read_store(
        self,
        number: int,
        rows: ShardRows,
        here: NDArray[np.intp],
        step: int,
        state: dict[str, int],
        draws: AssignedDraws,
        buffers: Mapping[int, RowBuffer],
    ) -> None:
        sampler, store, rank = self.samplers[number], self.members.stores[number], self.members.group.rank
        requests = [
            request
            for consumer in self.members.consumers
            if consumer.rank in buffers
            for request in [ReadRequest.of(consumer, buffers[consumer.rank], here, draws, rank)]
            if len(request.index)
        ]
        shard = store.first + store.of_rank[rank]

        def read(pending: NDArray[np.intp], attempt: int, *, counted: bool) -> None:
            found = pending[rows.rows[pending] != NO_ROW]
            keys = rows.rows[found], rows.generations[found]
            rows.torn[pending] = 1
            rows.torn[found] = 0 if counted else ~sampler.count_samples(*keys)
            ends = None
            steps = None if rows.steps is None else rows.steps[found]
            placed = sampler.ends(step, attempt, rows.numbers[found].astype(np.uint32), *keys, steps)
            if placed is not None:
                ends = np.zeros(len(here), np.int32)
                ends[found] = placed
            plans = self._plans[number]
            started = [each.start(number, plans, rows, found, ends, shard, step, attempt) for each in requests]
            for finish in started:
                rows.torn[finish()] = 1
            if not counted:
                sampler.release(*keys)

        # In a limited store the shard's leader has counted them as they were drawn, some of them several times.
        for round in np.unique(rows.rounds).tolist():
            read(np.flatnonzero(rows.rounds == round), round, counted=sampler.limited)
        for redraw in sampler.redraws(rows):
            lost = redraw.numbers.astype(np.intp)
            self._redraw(number, rows, redraw, step, state)
            read(lost, redraw.attempt, counted=False)

    def _redraw(self, number: int, rows: ShardRows, redraw: Redraw, step: int, state: dict[str, int]) -> None:
        """Replaces lost rows, which `redraw` numbers among those that this rank reads, by others of its shard."""
        sampler, store, rank = self.samplers[number], self.members.stores[number], self.members.group.rank
        shard = store.of_rank[rank]
        cursor = state.get(f"after/{shard}")
        lost = redraw.numbers.astype(np.intp)
        numbers = rows.numbers[lost].astype(np.uint32)
        # Ranks that share a shard redraw under different attempts, so that they do not find the same rows.
        ranks = store.ranks[shard]
        turn = (redraw.attempt - 1) * len(ranks) + ranks.index(rank) + 1
        redrawn = sampler.draw(
            rows.n, step, {} if cursor is None else {"after": cursor}, Redraw(turn, numbers, redraw.kept)
        )
        rows.replace(lost, redrawn)
        if sampler.traits.cursor:
            self._cursors[number] = max(self._cursors[number], redrawn.state["after"])


__all__ = [
    "AssignedDraws",
    "ReadRequest",
    "ReadResult",
    "RowBuffer",
    "ShardReader",
    "ShardRows",
]
