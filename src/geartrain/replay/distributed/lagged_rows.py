"""Source of batches over ranks with `update_lag`: priority updates take effect a fixed number of batches later.

A *round* is one exchange of messages between the ranks. In its status message a rank sends the total of its shard and
the priority updates for the other ranks. If the updates affect the same batch (rank_rows.py), the totals need a second
round. Here they affect a later batch. So the totals in the status message are valid for the draws, and the next batch
can begin before this one is received:

    batch t      begin: status, totals, updates of t  |  hear all: draw, read, send rows  |  receive rows: finished
    batch t + 1                                          begin ...                        |  hear all ...

The updates that came with batch t are applied before batch t + lag begins. The rank that leads the shard applies them,
and only this rank reads the shard. So batch t is drawn with the updates of batches up to t - lag, on any number of
ranks and at any speed. The first batch after a start, an error or `settle` sees all updates submitted by then, as in
any group.

All ranks begin and receive rounds in the same order: for batch t its status, the outcome of its read and its rows, then
the same for t + 1. The ranks learn last whether rows of batch t were lost for good. By then some may have begun batch
t + 1. In that case all ranks begin it, with the updates that are due before it, and keep the updates that come with it.
Then they draw batch t again.

The steps are those of rank_rows.py, split at each wait for other ranks. So here Python begins, reads and finishes a
batch in separate calls. Without rounds in flight one native call does it all, and waits inside.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.lifetime import on_error
from geartrain.errors import ArgumentError, PeerLostError
from geartrain.ranks.rank_group import Bytes, RankGroup
from geartrain.ranks.rounds_in_flight import rounds_of
from geartrain.ranks.topology import MeshPosition
from geartrain.replay.admission import Admission
from geartrain.replay.builder import BuiltBatch, PriorityUpdate, State
from geartrain.replay.config import ReplayConfig
from geartrain.replay.distributed.messages import flat_bytes
from geartrain.replay.distributed.rank_rows import RankRows
from geartrain.replay.distributed.read_agreement import ReadAgreement, RowsLostError
from geartrain.replay.distributed.sharded_sampler import TooFewRowsError
from geartrain.replay.later_updates import LaterUpdates
from geartrain.replay.sampler import StoreSampler
from geartrain.selection.mixture import Selection


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
    """A batch whose round has begun on this rank: the messages sent and received, and the rows read so far."""

    def __init__(self, step: int, state: State, admission: Admission) -> None:
        self.step = step
        self.state = state
        self.admission = admission
        self.began_s = time.perf_counter()
        self.built: BuiltBatch | None = None
        self.error: BaseException | None = None
        self.parts: list[Bytes] = []  # that it told; none: it has yet to tell, or its round is over
        self.round = self.outcomes = self.rows = 0
        self.few = False  # there are too few rows: all ranks are to draw it again, once there are enough
        self.read = False  # and its rows are sent; those below are kept until its batch is finished
        self.heard: _native.RankRead | None = None
        self.batch: Any = None
        self.agreement: ReadAgreement | None = None
        self.told: Any = None


class LaggedRows(RankRows):
    """`RankRows` with priority updates that take effect `config.extra_lag` batches after the batch they came with.

    Raises:
        ArgumentError: on all ranks, if a batch takes more than one native call.
    """

    overlaps = True  # the next batch begins before this one's rows are received

    def __init__(
        self,
        samplers: list[StoreSampler],
        selection: Selection,
        config: ReplayConfig,
        group: RankGroup,
        position: MeshPosition,
        members: Sequence[int] | None = None,
    ) -> None:
        super().__init__(samplers, selection, config, group, position, members)
        self._others = [rank for rank in range(group.size) if rank != group.rank]
        with on_error(self.assembler.close):
            if not self.reader.by_totals:
                raise _refusal(config.extra_lag)
            self._rounds = rounds_of(group)
        self._later = LaterUpdates[Bytes](config.extra_lag)
        self._first = True  # batch of a run
        self._newest: _Begun | None = None

    def restart(self) -> None:
        self._first, self._newest = True, None

    # --- a batch ----------------------------------------------------------------------------------------------------

    def start(self, step: int, state: State, updates: list[PriorityUpdate], admission: Admission) -> _Begun:
        """Reads the batch before it, where that was only begun."""
        if not self._first:
            with self.together:
                return self._begin(step, state, updates, admission)
        with self.together:
            self._apply_all(step)
        begun = _Begun(step, state, admission)
        begun.built = super().start(step, state, updates, admission)
        self._first = False
        return begun

    def ready(self, started: _Begun) -> bool:
        """Whether all ranks have sent the messages that finish this batch. Waits a little for their rows."""
        if started.built is None:
            with self.together:
                self._read(started)
        heard = started.heard
        return heard is None or (
            self._rounds.arrived(started.outcomes, self._others)
            and self._rounds.arrived(started.rows, [peer for peer, _ in heard.receives])
        )

    def finish(self, started: _Begun) -> BuiltBatch:
        if started.built is not None:
            return started.built
        with self.together:
            built = self._finish(started)
            return built or self.build(started.step, started.state, [], started.admission, started.began_s)

    def _begin(self, step: int, state: State, updates: list[PriorityUpdate], admission: Admission) -> _Begun:
        if self._newest is not None:
            self._read(self._newest)
        self._newest = begun = _Begun(step, state, admission)
        self._tell(begun, updates)
        return begun

    def _tell(self, begun: _Begun, updates: list[PriorityUpdate]) -> None:
        self._apply(begun.step, self._later.due(begun.step))
        self.reader.expire()
        begun.parts = self.sharded.steps.begin(begun.step, self.sharded.given(updates))
        updates.clear()
        begun.round = self._rounds.post({rank: begun.parts[rank] for rank in self._others})

    def _hear(self, begun: _Begun) -> _native.RankRead:
        received = self._rounds.collect(begun.round, self._others)
        parts, begun.parts = begun.parts, []
        every = [received.get(rank, part) for rank, part in enumerate(parts)]
        heard, updates = self.sharded.steps.hear(begun.step, every)
        if heard.changed:
            self._later.keep(begun.step, updates)
        self.traffic.selection_bytes += sum(parts[rank].size for rank in self._others)
        return heard

    def _read(self, begun: _Begun) -> None:
        """Draws a batch that has begun and reads this rank's rows, once all ranks have begun it; and sends them."""
        if begun.built is not None or begun.read or begun.few:
            return
        if begun.error is not None:  # as it was
            raise begun.error
        try:
            self.admission.wait(begun.step, begun.admission)
            if not begun.parts:  # its round was over before, with that of a batch that was drawn again
                self._tell(begun, [])
            heard = self._hear(begun)
            self.reader.check(heard, begun.step)
            begun.batch = self.reader.read_heard(begun.step, heard, self.admission.quotas(begun.step))
            begun.agreement = self.reader.agreement(heard)
            begun.told = begun.agreement.told
            begun.outcomes = self._rounds.post(dict.fromkeys(self._others, flat_bytes(begun.told)))
            begun.rows = self._rounds.post(dict(heard.sends))
            begun.heard, begun.read = heard, True
        except TooFewRowsError:  # on all ranks
            begun.few = True
        except BaseException as error:
            begun.error = error
            raise

    def _finish(self, begun: _Begun) -> BuiltBatch | None:
        """The batch; None where all ranks are to draw it again."""
        self._read(begun)
        if begun.few:
            self._again(begun)
            return None
        heard, mine, agreement = begun.heard, begun.batch, begun.agreement
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
        received = self.reader.place(mine, heard)
        batch, deliver = self.complete(mine, heard, heard.rows, agreement, begun.step)
        self.count(heard, begun.began_s, heard.agreed_s, received)
        return BuiltBatch(batch, begun.state, deliver, admission=begun.admission)

    def _told_by(self, rank: int, outcomes: Mapping[int, Bytes], begun: _Begun) -> NDArray[Any]:
        return _whole(rank, outcomes[rank], begun.told.nbytes).view(begun.told.dtype)

    def _every(self) -> range:
        return range(len(self._others) + 1)

    def _again(self, begun: _Begun) -> None:
        """Before all ranks draw a batch again: has all of them begin the one after it, as some have, and takes the
        updates that came with that one."""
        after = self._newest
        if after is None or after is begun or not after.parts:
            after = _Begun(begun.step + 1, begun.state, Admission())
            self._tell(after, [])
        self._hear(after)
        self._rounds.flush()

    def _apply_all(self, step: int) -> None:
        """Before calls that end rounds of their own: what this rank has sent is on its way."""
        self._rounds.flush()
        self._apply(step, self._later.all())

    def _apply(self, step: int, updates: Sequence[Bytes]) -> None:
        for each in updates:
            self.sharded.steps.apply(each, self.sharded.change_at(step))

    # --- priorities, state, leaving ---------------------------------------------------------------------------------

    def settle(self, step: int, updates: list[PriorityUpdate]) -> None:
        with self.together:
            self._apply_all(step)
        super().settle(step, updates)

    def rewind(self) -> None:
        """With updates that are not applied yet."""
        self._later.all()
        super().rewind()

    def close(self) -> None:
        """Before it closes, sends the messages that other ranks have yet to receive."""
        try:
            self._rounds.flush()
        finally:
            super().close()


__all__ = ["LaggedRows", "check_lag"]
