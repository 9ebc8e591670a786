"""Source of batches from the shards of many ranks. It moves only the rows that a rank cannot get on its own host.

For every batch all ranks take the same steps, in the same order (GEAR, sections 3.3 and 3.4):

    1. status      every rank's step, fingerprint, row counts and totals                           all-gather
    2. priorities  priority updates go to the leaders of their rows' shards, with the status       only if any
    3. draw        each rank computes which shard owns each draw; its ranks look the rows up       all-gather
    4. assign      draws to replicas (consumers) and ranks (readers)                               none
    5. read        rows from shared memory, into the batch or into messages                        none
    6. exchange    one row message per pair of ranks that has rows to move, of a size both know    the surplus
    7. copies      tensor-parallel peers get a copy of the batch                                   one copy each

Native code runs steps 1, 2, 4 and 5 for every strategy (native/fetch/rank_steps.h, rank_reader.h). Step 3 is native if
the draws follow from the shards' totals. Then steps 1 to 5 are one call, and so is step 6 if no row ever moves. Other
strategies draw in sharded_sampler.py. The assembler runs step 6: into host memory, through it into a GPU's memory, or
from GPU to GPU.

No rank requests a row, because both ends know which rows move. If a row is overwritten between steps 3 and 5, its
reader redraws it from the same shard. No other rank has to know. If that shard has no other row, all ranks
learn it in step 6 and draw the batch again (read_agreement.py). A rank that fails aborts the group, and every other
rank raises `PeerLostError`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.lifetime import on_error
from geartrain.device.nccl import DeviceGroup
from geartrain.ranks.rank_collectives import run_on_all_ranks
from geartrain.ranks.rank_group import Message, RankGroup
from geartrain.ranks.topology import MeshPosition
from geartrain.replay.admission import Admission
from geartrain.replay.batch import Batch
from geartrain.replay.builder import BuiltBatch, PriorityUpdate, State
from geartrain.replay.config import ReplayConfig
from geartrain.replay.device import DeviceOptions
from geartrain.replay.distributed.assembly import check_options, open_assembler
from geartrain.replay.distributed.assembly_host import HostAssembler
from geartrain.replay.distributed.assignment import sizes_of
from geartrain.replay.distributed.messages import flat_bytes
from geartrain.replay.distributed.rank_reader import RankReader, open_near
from geartrain.replay.distributed.rank_source import RankSource
from geartrain.replay.distributed.read_agreement import ReadAgreement
from geartrain.replay.sampler import StoreSampler
from geartrain.selection.mixture import Selection


class RankRows(RankSource):
    """This rank's part of the global batch of each step, drawn and read together with all other ranks.

    See `geartrain.replay.builder.RowSource`. Its batches are finished when they are started; with rounds in flight
    (lagged_rows.py) they are not.

    Args:
        samplers: of this rank's shards, one for each store; their plans name all fields that some rank reads.
        selection: the strategy, or the mixture.
        config: of the replay; its batch is the global one.
        group: the rank group.
        position: this rank's position in the mesh.
        members: global ranks of the job where the group is one of `torch.distributed`: the ranks that may exchange
            device memory.

    Raises:
        RanksDisagreeError, ArgumentError: as `RankSource`.
    """

    def __init__(
        self,
        samplers: list[StoreSampler],
        selection: Selection,
        config: ReplayConfig,
        group: RankGroup,
        position: MeshPosition,
        members: Sequence[int] | None = None,
    ) -> None:
        super().__init__(samplers, selection, config, group, position)
        # Fetch plans by the fields of each consumer; those of the first store serve as memory format for all stores.
        wanted = {consumer.fields for consumer in self.members.consumers if consumer.fields}
        self._plans = [
            {names: each.plan if config.view is not None else each.plan.of_fields(names) for names in wanted}
            for each in samplers
        ]
        self._has_peers = any(consumer.peers for consumer in self.members.consumers)
        me = self.members.me  # whose batch this rank has; it gets rows itself where it is not another's copy
        self._mine = me if me is not None and me.fields else None
        self._reads_own = self._mine is not None and self._mine.rank == group.rank
        self.assembler = HostAssembler()

        def open_mine() -> None:
            self.assembler = self._open_assembler(config.device, members, config.timeout_s)
            self.sharded.mirrors = self.assembler.open_mirrors(samplers)

        with on_error(lambda: self.assembler.close()):  # noqa: PLW0108  # the one that is open by then
            run_on_all_ranks(group, open_mine)
            self.reader = self._open_reader(config)
            self.exchange = self.reader.exchange

    # --- set-up -------------------------------------------------------------------------------------------------

    def _open_assembler(
        self, options: DeviceOptions | None, members: Sequence[int] | None, timeout_s: float
    ) -> HostAssembler:
        if options is None:
            return HostAssembler()
        check_options(options, list(self.samplers[0].arrays), self._has_peers)
        make_group = None
        if members is not None:
            make_group = lambda device: DeviceGroup(device.collectives, members, timeout_s)  # noqa: E731
        return open_assembler(options, self._plans, self.members.fields, self._has_peers, make_group, self.group.rank)

    def _open_reader(self, config: ReplayConfig) -> RankReader:
        """Collective: what one rank can do all others have to do alike."""
        names = tuple(self.samplers[0].arrays)
        everyone_reads = len(self.members.consumers) == self.group.size and all(
            each.fields == names and not each.peers for each in self.members.consumers
        )
        by_totals = everyone_reads and config.device is None and all(each.by_totals for each in self.samplers)
        near = open_near(self.samplers, self.members, by_totals=by_totals, lagged=config.extra_lag > 0)
        with on_error(near.close):
            return RankReader(self.sharded, config, near)

    @property
    def callbacks(self) -> list[str]:
        return self.reader.callbacks

    # --- a batch ------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        self.assembler.enter()

    def at_work(self) -> AbstractContextManager[None]:
        return self.assembler.at_work()

    def build_once(
        self, step: int, state: State, updates: list[PriorityUpdate], admission: Admission, began_s: float
    ) -> BuiltBatch:
        reader, traffic, quotas = self.reader, self.traffic, self.admission.quotas(step)
        mine: Any
        if reader.by_totals:
            mine, read = reader.build(step, updates, quotas)
            counts, selected_s = read.rows, read.agreed_s
            traffic.selection_bytes += read.selection_bytes
        else:
            sent_bytes = self.group.sent_bytes
            drawn = self.sharded.draw_all(step, state, updates, quotas, reader.exchange)
            counts, state = drawn.counts, drawn.state
            self.admission.keep(admission, drawn.sizes)
            traffic.selection_bytes += self.group.sent_bytes - sent_bytes
            selected_s = time.perf_counter()
            mine = self._buffer(sum(drawn.sizes)) if self._reads_own else None
            own = None if mine is None else self.assembler.own(mine)
            read = reader.read(step, drawn, own, self._targets)
        agreement, received = None, 0
        if not read.whole:
            agreement = reader.agreement(read)
            received = self.assembler.exchange(agreement, reader, read, mine)
        batch, deliver = self.complete(mine, read, counts, agreement, step)
        self.count(read, began_s, selected_s, received)
        return BuiltBatch(batch, state, deliver, admission=admission)

    def _buffer(self, n: int) -> Any:
        """Memory for this rank's batch, of a global one of n rows; None where it has none of them."""
        me = self.members.me
        assert me is not None
        rows = int(sizes_of(n, len(self.members.replicas))[me.replica])
        return self.assembler.buffer(self.reader, self._plans[0][me.fields], rows) if rows else None

    def _targets(self, outgoing: Callable[[], list[tuple[int, int]]]) -> Any:
        """Targets for the rows of other ranks, each (rank, rows); None if their messages are in host memory."""
        fields = {consumer.rank: consumer.fields for consumer in self.members.consumers}
        return self.assembler.targets_of(
            lambda: [(rank, self._plans[0][fields[rank]], rows) for rank, rows in outgoing()]
        )

    def complete(
        self,
        mine: Any,
        read: _native.RankRead,
        counts: Sequence[int],
        agreement: ReadAgreement | None,
        step: int,
    ) -> tuple[Batch, Callable[[], None]]:
        """The batch of this rank, whose rows are complete, and step 7: the copies for its tensor-parallel peers.

        Args:
            mine: the buffer of this rank's batch; None if it has read no rows for itself.
            read: the rows that it has read.
            counts: selectable rows of each store.
            agreement: of all ranks on their reads; None if they have exchanged the outcomes already.
            step: step of the batch.
        """
        me, weights = self._mine, None
        if self.has_importance and mine is not None:
            weights = self.assembler.weigh(agreement, self.reader, read, mine, counts, step)
        if me is None:
            self._copy_to_peers(None, 0, None)
            return self.assembler.empty_batch(self.samplers[0], None, step)
        if not self._reads_own:
            mine = self._buffer(len(read.draws()) * len(self.members.replicas))
            weights = np.empty(len(read.draws())) if self.has_importance else None
        if mine is None:
            return self.assembler.empty_batch(self.samplers[0], self._plans[0][me.fields], step)
        if self._has_peers:
            self._copy_to_peers(mine, len(read.draws()), weights)
        return self.assembler.batch(self.reader, read, mine, weights, step)

    def _copy_to_peers(self, mine: Any, rows: int, weights: NDArray[np.float64] | None) -> None:
        """The batch of the first tensor-parallel peer, to the others."""
        if not self._has_peers:
            return
        me, sends, receives = self.members.me, list[Message](), list[Message]()
        if me is not None and mine is not None:
            pieces = self.assembler.pieces(mine)
            if weights is not None:
                pieces.append(flat_bytes(weights))
            copied = rows * self.reader.row_bytes
            if me.rank == self.group.rank:
                sends = [(peer, piece) for peer in me.peers for piece in pieces]
                self.traffic.sent_bytes += len(me.peers) * copied
            else:
                receives = [(me.rank, piece) for piece in pieces]
                self.traffic.received_bytes += copied
        self.group.exchange(sends, receives)

    def count(self, read: _native.RankRead, began_s: float, selected_s: float, received: int) -> None:
        """Counts a batch that is finished now."""
        traffic, ended_s = self.traffic, time.perf_counter()
        traffic.local_bytes += read.local_rows * self.reader.row_bytes
        traffic.sent_bytes += read.sent_bytes
        traffic.received_bytes += received
        traffic.select_s += selected_s - began_s
        traffic.fetch_s += read.read_s - selected_s
        traffic.exchange_s += ended_s - read.read_s

    # --- leaving --------------------------------------------------------------------------------------------------

    def describe(self) -> list[dict[str, Any]]:
        return self.assembler.describe()

    def close(self) -> None:
        """Leaves the group."""
        self.reader.close()
        self.assembler.close()
        super().close()


__all__ = ["RankRows"]
