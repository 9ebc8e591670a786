"""Lagged batch builder: batches over ranks whose priority updates take effect a stated number of batches later.

With its status a rank tells the total of its shard, and in the same message sends the updates for the others. Where
those take effect with this batch (builder.py), totals need another round. Here they take effect with a later one, so
that the totals that came with the status are those of the draws, and nothing has to wait for a round trip:

    batch t      begin: status, totals, updates of t  |  hear all: draw, read, send rows  |  receive rows: finished
    batch t + 1                                          begin ...                        |  hear all ...

What came with batch t is applied before batch t + lag begins, by the rank that leads the shard, which alone reads it.
So batch t is drawn with the updates of batches up to t - lag on any number of ranks, whatever their speed. The first
batch after a start, an error or `settle` sees all updates that were given by then, as in any group.

All ranks begin and receive rounds in one order: of batch t the status, the outcome of its read and its rows, and then
those of t + 1. Where rows were lost for good, which ranks learn last, some may have begun batch t + 1: all begin it
then, with the updates that are due before it, take those that come with it, and draw batch t again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.errors import ArgumentError, PeerLostError
from geartrain.replay.admission import Admission
from geartrain.replay.builder import BuiltBatch, PriorityUpdate, State
from geartrain.replay.config import ReplayConfig
from geartrain.replay.distributed.draw import TooFewRowsError
from geartrain.replay.distributed.later_updates import LaterUpdates
from geartrain.replay.distributed.messages import flat_bytes
from geartrain.replay.distributed.rank_group import Bytes
from geartrain.replay.distributed.read_agreement import ReadAgreement, RowsLostError
from geartrain.replay.distributed.rounds_in_flight import rounds_of
from geartrain.replay.sampler import StoreSampler

if TYPE_CHECKING:
    from geartrain.replay.distributed.builder import DistributedBatchBuilder


def check_lag(samplers: Sequence[StoreSampler], config: ReplayConfig) -> None:
    """Raises `ArgumentError` where updates cannot take effect later than with the batch that they come with."""
    if config.extra_lag and not (config.device is None and _everyone_reads(samplers, config)):
        raise _refusal(config.extra_lag)


def _everyone_reads(samplers: Sequence[StoreSampler], config: ReplayConfig) -> bool:
    """Whether draws are by totals, and the first and the last stage of a pipeline get all fields."""
    names = set(samplers[0].plan.names)
    stages = [names if given is None else set(given) for given in (config.inputs, config.targets)]
    return all(sampler.by_totals for sampler in samplers) and names == set.union(*stages)


def _refusal(extra_lag: int) -> ArgumentError:
    return ArgumentError(
        f"an update_lag of prefetch + {extra_lag} is for batches in host memory whose draws are independent: Uniform "
        f"or Prioritized with replacement, or a Mixture of them, of whole rows or windows, without limits, views and "
        f"stages of a pipeline. With others update_lag is prefetch: leave it out"
    )


def _whole(rank: int, received: Bytes, nbytes: int) -> Bytes:
    if received.size != nbytes:
        raise PeerLostError(f"rank {rank} sent {received.size} bytes, {nbytes} were expected")
    return received


class _Begun:
    """A batch whose round has begun on this rank: what it has told and heard, and what it has read."""

    def __init__(self, step: int, state: State) -> None:
        self.step = step
        self.state = state
        self.began_s = time.perf_counter()
        self.built: BuiltBatch | None = None
        self.error: BaseException | None = None
        self.admission = Admission()
        self.parts: list[Bytes] = []  # that it told; none: it has yet to tell, or its round is over
        self.round = self.outcomes = self.rows = 0
        self.few = False  # there are too few rows: all ranks are to draw it again, once there are enough
        self.read = False  # and its rows are sent; those below are kept until its batch is finished
        self.heard: _native.RankRead | None = None
        self.batch: Any = None
        self.agreement: ReadAgreement | None = None
        self.told: Any = None


class LaggedBuilder:
    """See `geartrain.replay.builder.BatchBuilder`.

    Args:
        inner: builds batches whose updates take effect at once, in the same group: the first one after a start.
        lag: batches after the one that they came with.

    Raises:
        ArgumentError: on all ranks alike, where batches are more than one native call.
    """

    builds_anywhere = False
    own_thread = True
    overlaps = True  # the next batch begins before this one's rows are received
    collective = True

    def __init__(self, inner: DistributedBatchBuilder, lag: int) -> None:
        if not inner.reader.by_totals:
            inner.assembler.close()
            raise _refusal(lag)
        self.samplers = inner.samplers
        self.rows = inner.rows
        self.store_ids = inner.store_ids
        self._inner = inner
        self._reader, self._agreed = inner.reader, inner.sampler
        self._rank = inner.group.rank
        self._others = [rank for rank in range(inner.group.size) if rank != inner.group.rank]
        try:
            self._rounds = rounds_of(inner.group)
        except BaseException:
            inner.assembler.close()
            raise
        self._later = LaterUpdates[Bytes](lag)
        self._first = True  # batch since the thread was started
        self._newest: _Begun | None = None

    def enter(self) -> None:
        """See `BatchBuilder`."""
        self._inner.enter()
        self._first, self._newest = True, None

    # --- a batch ----------------------------------------------------------------------------------------------------

    def start(self, step: int, state: State, updates: list[PriorityUpdate]) -> _Begun:
        """See `BatchBuilder`. Reads the batch before it, where that was only begun."""
        if not self._first:
            return self._inner.or_abort(lambda: self._begin(step, state, updates))
        self._inner.or_abort(lambda: self._apply_all(step))
        begun = _Begun(step, state)
        begun.built = self._inner.start(step, state, updates)
        begun.admission = begun.built.admission
        self._first = False
        return begun

    def ready(self, begun: _Begun) -> bool:
        """Whether all ranks have sent what this one needs to finish a batch; waits a little for their rows."""
        if begun.built is None:
            self._inner.or_abort(lambda: self._read(begun))
        heard = begun.heard
        return heard is None or (
            self._rounds.arrived(begun.outcomes, self._others)
            and self._rounds.arrived(begun.rows, [peer for peer, _ in heard.receives])
        )

    def finish(self, begun: _Begun) -> BuiltBatch:
        """See `BatchBuilder`."""
        try:
            built = begun.built or self._inner.or_abort(lambda: self._finish(begun))
        except BaseException:
            begun.admission.give_back()
            raise
        return built or self._inner.start(begun.step, begun.state, [], admitted=begun.admission)

    def _begin(self, step: int, state: State, updates: list[PriorityUpdate]) -> _Begun:
        if self._newest is not None:
            self._read(self._newest)
        self._newest = begun = _Begun(step, state)
        self._tell(begun, updates)
        return begun

    def _tell(self, begun: _Begun, updates: list[PriorityUpdate]) -> None:
        self._apply(begun.step, self._later.due(begun.step))
        self._reader.expire()
        begun.parts = self._agreed.steps.begin(begun.step, self._agreed.given(updates))
        updates.clear()
        begun.round = self._rounds.post({rank: begun.parts[rank] for rank in self._others})

    def _hear(self, begun: _Begun) -> _native.RankRead:
        received = self._rounds.collect(begun.round, self._others)
        parts, begun.parts = begun.parts, []
        every = [received.get(rank, part) for rank, part in enumerate(parts)]
        heard, updates = self._agreed.steps.hear(begun.step, every)
        if heard.changed:
            self._later.keep(begun.step, updates)
        self._inner.traffic.selection_bytes += sum(parts[rank].size for rank in self._others)
        return heard

    def _read(self, begun: _Begun) -> None:
        """Draws a batch that has begun and reads this rank's rows, once all ranks have begun it; and sends them."""
        if begun.built is not None or begun.read or begun.few:
            return
        if begun.error is not None:  # as it was
            raise begun.error
        try:
            begun.admission = self._inner.admission.wait(begun.step)
            if not begun.parts:  # its round was over before, with that of a batch that was drawn again
                self._tell(begun, [])
            heard = self._hear(begun)
            self._reader.check(heard, begun.step)
            begun.batch = self._reader.read_heard(begun.step, heard, self._inner.admission.quotas(begun.step))
            begun.agreement = self._reader.agreement(heard)
            begun.told = begun.agreement.told
            begun.outcomes = self._rounds.post(dict.fromkeys(self._others, flat_bytes(begun.told)))
            begun.rows = self._rounds.post(dict(heard.sends))
            begun.heard, begun.read = heard, True
        except TooFewRowsError:  # on all ranks
            begun.few = True
        except BaseException as error:
            begun.error = error
            begun.admission.give_back()
            raise

    def _finish(self, begun: _Begun) -> BuiltBatch | None:
        """The batch; None where all ranks are to draw it again."""
        self._read(begun)
        if begun.few:
            self._again(begun)
            return None
        heard, batch, agreement = begun.heard, begun.batch, begun.agreement
        assert heard is not None
        assert agreement is not None
        begun.heard = begun.batch = None
        outcomes = self._rounds.collect(begun.outcomes, self._others)
        receives = heard.receives
        rows = self._rounds.collect(begun.rows, [peer for peer, _ in receives])
        for peer, into in receives:
            into[:] = _whole(peer, rows[peer], into.size)
        told = [begun.told if rank not in outcomes else self._told_by(rank, outcomes, begun) for rank in self._every()]
        try:
            agreement.take(np.stack(told))
        except RowsLostError:
            self._again(begun)
            return None
        self._reader.place(batch, heard)
        self._reader.weigh(batch, heard, heard.rows, agreement, begun.step)
        made = self._reader.finish(batch, heard, begun.step)
        received = heard.received_rows * self._reader.row_bytes
        self._inner.count(heard, begun.began_s, heard.agreed_s, received)
        self._inner.note(time.perf_counter() - begun.began_s)
        return BuiltBatch(made, begun.state, admission=begun.admission)

    def _told_by(self, rank: int, outcomes: Mapping[int, Bytes], begun: _Begun) -> NDArray[Any]:
        return _whole(rank, outcomes[rank], begun.told.nbytes).view(begun.told.dtype)

    def _every(self) -> range:
        return range(len(self._others) + 1)

    def _again(self, begun: _Begun) -> None:
        """Before all ranks draw a batch again: has all of them begin the one after it, as some have, and takes the
        updates that came with that one."""
        after = self._newest
        if after is None or after is begun or not after.parts:
            after = _Begun(begun.step + 1, begun.state)
            self._tell(after, [])
        self._hear(after)
        self._rounds.flush()

    def _apply_all(self, step: int) -> None:
        """Before calls that end rounds of their own: what this rank has sent is on its way."""
        self._rounds.flush()
        self._apply(step, self._later.all())

    def _apply(self, step: int, updates: Sequence[Bytes]) -> None:
        for each in updates:
            self._agreed.steps.apply(each, self._agreed.change_at(step))

    # --- priorities, state, leaving ---------------------------------------------------------------------------------

    def submit_updates(self, update: PriorityUpdate, step: int) -> int | None:
        """See `BatchBuilder`. They go to the rows' shards with the next batch, and wait there."""
        return self._inner.submit_updates(update, step)

    def settle(self, step: int, updates: list[PriorityUpdate]) -> None:
        """See `BatchBuilder`."""
        self._inner.or_abort(lambda: self._apply_all(step))
        self._inner.settle(step, updates)

    def rewind(self) -> None:
        """See `BatchBuilder`: with updates that are not applied yet."""
        self._later.all()
        self._inner.rewind()

    def stats(self) -> dict[str, float]:
        """See `BatchBuilder`: as of all groups."""
        return self._inner.stats()

    def describe(self) -> list[dict[str, Any]]:
        """See `BatchBuilder`."""
        return self._inner.describe()

    def abort(self, reason: str) -> None:
        """See `BatchBuilder`."""
        self._inner.abort(reason)

    def close(self) -> None:
        """See `BatchBuilder`. What other ranks have yet to receive is sent before."""
        try:
            self._rounds.flush()
        finally:
            self._inner.close()


__all__ = ["LaggedBuilder", "check_lag"]
