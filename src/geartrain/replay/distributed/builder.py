"""Distributed batch builder: one global batch from the shards of many ranks, moving only the surplus.

For every batch all ranks take the same steps, in the same order (GEAR, sections 3.3 and 3.4):

    1. status      every rank's step, fingerprint, row counts and totals                           all-gather
    2. priorities  priority updates go to the leaders of their rows' shards, with the status       only if any
    3. draw        each rank computes which shard owns each draw; its ranks look the rows up       all-gather
    4. assign      draws to replicas (consumers) and ranks (readers)                               none
    5. read        rows from shared memory, into the batch or into messages                        none
    6. exchange    one row message per pair of ranks that has rows to move, of a size both know    the surplus
    7. copies      tensor-parallel peers get a copy of the batch                                   one copy each

Steps 1, 2, 4 and 5 are native for every strategy (native/fetch/rank_steps.h, rank_reader.h). Step 3 is native where
draws follow from the shards' totals; then steps 1 to 5 are one call, and step 6 too where no row ever moves. Other
strategies draw in draw.py. Step 6 is the assembler's: into host memory, into a GPU's through it, or from GPU to GPU.

No rank requests a row: both ends know what moves. A row that is overwritten between 3 and 5 is redrawn by the rank that
reads it, from the same shard, so no other rank has to know. Where that shard has no other row all ranks learn it in
step 6, and draw the batch again (read_agreement.py). A rank that fails aborts the group, and every other one raises
`PeerLostError`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.device.nccl import DeviceGroup
from geartrain.errors import PeerLostError, StoreClosedError
from geartrain.replay.admission import Admission
from geartrain.replay.batch import Batch
from geartrain.replay.builder import BuiltBatch, PriorityUpdate, State, build_stats, check_priorities, path_of
from geartrain.replay.config import ReplayConfig
from geartrain.replay.device import DeviceOptions
from geartrain.replay.distributed.assembly import BatchAssembler, check_options, open_assembler
from geartrain.replay.distributed.assembly_host import HostAssembler
from geartrain.replay.distributed.assignment import check_sizes, sizes_of
from geartrain.replay.distributed.draw import CommonError, ShardedSampler, TooFewRowsError
from geartrain.replay.distributed.fingerprint import describe_job, fingerprint_of
from geartrain.replay.distributed.members import Members
from geartrain.replay.distributed.messages import flat_bytes
from geartrain.replay.distributed.rank_collectives import run_on_all_ranks
from geartrain.replay.distributed.rank_group import Message, RankGroup
from geartrain.replay.distributed.rank_reader import RankReader, arrays_of, open_near
from geartrain.replay.distributed.read_agreement import RowsLostError
from geartrain.replay.distributed.row_wait import wait_for_rows
from geartrain.replay.distributed.shard_admission import ShardAdmission
from geartrain.replay.distributed.topology import MeshPosition
from geartrain.replay.sampler import MAX_ATTEMPTS, StoreSampler
from geartrain.selection.mixture import Selection
from geartrain.selection.sharded import check_strategy
from geartrain.store.priorities import check_keys_of

T = TypeVar("T")


@dataclass
class Traffic:
    """Bytes and seconds of this rank, since the replay was made."""

    local_bytes: int = 0  # fields read from this host's own shard, for this rank
    sent_bytes: int = 0  # fields read for other ranks
    received_bytes: int = 0
    selection_bytes: int = 0  # sent in steps 1 to 3
    select_s: float = 0.0
    fetch_s: float = 0.0
    exchange_s: float = 0.0


class DistributedBatchBuilder:
    """Builds this rank's part of the global batch of each step, together with all other ranks.

    Args:
        samplers: of this rank's shards, one for each store; their plans name all fields that some rank reads.
        selection: the strategy, or the mixture.
        config: of the replay; its batch is the global one.
        group: the rank group.
        position: this rank's position in the mesh.
        members: global ranks of the job where the group is one of `torch.distributed`: the ranks that may exchange
            device memory.

    Attributes:
        admission: of each batch by the rate limiters of this rank's shards.

    Raises:
        RanksDisagreeError: the ranks differ in strategy, seed, schema or sizes.
        ArgumentError: the batch cannot be divided evenly.
    """

    builds_anywhere = False
    own_thread = True
    overlaps = False
    collective = True

    def __init__(
        self,
        samplers: list[StoreSampler],
        selection: Selection,
        config: ReplayConfig,
        group: RankGroup,
        position: MeshPosition,
        members: Sequence[int] | None = None,
    ) -> None:
        for sampler in samplers:
            check_strategy(sampler.strategy)
        self.samplers = samplers
        self.group = group
        self.position = position
        self.traffic = Traffic()
        self._make_s = 0.0
        self._built = 0
        self._has_importance = any(sampler.traits.importance for sampler in samplers)
        options, arrays = config.device, arrays_of(samplers[0])
        names = list(arrays)
        inputs = names if config.inputs is None else config.inputs
        targets = names if config.targets is None else config.targets
        mine = [*(inputs if position.is_first_stage else ()), *(targets if position.is_last_stage else ())]
        fields = tuple(dict.fromkeys(mine))
        job = describe_job(samplers, selection, config.batch_size, config.view)
        job |= {name: getattr(config, name) for name in ("assignment", "prefetch", "num_batches")}
        job["update_lag"] = config.prefetch + config.extra_lag
        job["exchange"] = "host" if options is None else options.exchange
        if options is not None and options.exchange == "nccl":
            # The consumer's batch holds what the reader's GPU has converted.
            job["convert"] = {name: repr(into) for name, into in sorted(options.convert.items())}
        self.members = Members(
            group,
            position,
            job,
            [sampler.plan.store.id for sampler in samplers],
            fields,
            sum(arrays[name] for name in fields),
        )
        self.store_ids: list[int] = self.members.shard_ids.tolist()
        replicas = len(self.members.replicas)
        check_sizes([sampler.atom for sampler in samplers], replicas, config.batch_size, config.assignment)
        self.rows = config.batch_size // replicas
        self.admission = ShardAdmission(samplers, self.members, selection, config.batch_size)
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
        self.sampler = ShardedSampler(samplers, self.members, fingerprint_of(job))
        self.assembler: BatchAssembler = HostAssembler()

        def open_mine() -> None:
            self.assembler = self._open_assembler(fields, names, options, members, config.timeout_s)
            self.sampler.mirrors = self.assembler.open_mirrors(samplers)

        try:
            run_on_all_ranks(group, open_mine)
            self.reader = self._open_reader(config, names)
        except BaseException:
            self.assembler.close()
            raise

    # --- set-up -------------------------------------------------------------------------------------------------

    def _open_assembler(
        self,
        fields: tuple[str, ...],
        names: Sequence[str],
        options: DeviceOptions | None,
        members: Sequence[int] | None,
        timeout_s: float,
    ) -> BatchAssembler:
        if options is None:
            return HostAssembler()
        check_options(options, names, self._has_peers)
        make_group = None
        if members is not None:
            make_group = lambda device: DeviceGroup(device.collectives, members, timeout_s)  # noqa: E731
        return open_assembler(options, self._plans, fields, self._has_peers, make_group, self.group.rank)

    def _open_reader(self, config: ReplayConfig, names: Sequence[str]) -> RankReader:
        """Collective: what one rank can do all others have to do alike."""
        everyone_reads = len(self.members.consumers) == self.group.size and all(
            each.fields == tuple(names) and not each.peers for each in self.members.consumers
        )
        by_totals = everyone_reads and config.device is None and all(each.by_totals for each in self.samplers)
        near = open_near(self.samplers, self.members, by_totals=by_totals, lagged=config.extra_lag > 0)
        try:
            return RankReader(self.sampler, config, near)
        except BaseException:
            near.close()
            raise

    # --- a batch ------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """See `BatchBuilder`."""
        self.assembler.enter()

    def start(
        self, step: int, state: State, updates: list[PriorityUpdate], *, admitted: Admission | None = None
    ) -> BuiltBatch:
        """See `BatchBuilder`. This rank's part of the batch is finished when this returns.

        Args:
            admitted: of the batch, where it was admitted before.

        Raises:
            EmptyStoreError, NotEnoughRowsError: on all ranks alike; the replay can go on.
            PeerLostError: a rank failed or is lost; the replay is over.
        """
        began_s = time.perf_counter()
        with self.assembler.at_work():
            built = self.or_abort(lambda: self._build(step, state, updates, admitted))
        self.note(time.perf_counter() - began_s)
        return built

    def note(self, make_s: float) -> None:
        """Counts a batch that took so long to make."""
        self._make_s += make_s
        self._built += 1

    def ready(self, started: BuiltBatch) -> bool:
        """See `BatchBuilder`."""
        return True

    def finish(self, started: BuiltBatch) -> BuiltBatch:
        """See `BatchBuilder`."""
        return started

    def settle(self, step: int, updates: list[PriorityUpdate]) -> None:
        """Steps 1 and 2 alone: applies the priority updates of all ranks. Raises `PeerLostError`."""
        self.or_abort(lambda: self.sampler.settle(step, updates, self.reader.exchange))

    def or_abort(self, body: Callable[[], T]) -> T:
        """Runs steps of the protocol; a rank that fails in the middle of them aborts the group."""
        try:
            return body()
        except CommonError as error:
            raise error.error from None
        except PeerLostError as error:
            self.abort(str(error))
            raise
        except BaseException as error:
            self.abort(f"{type(error).__name__}: {error}")
            raise

    def _build(self, step: int, state: State, updates: list[PriorityUpdate], admitted: Admission | None) -> BuiltBatch:
        began_s, sent = time.perf_counter(), self.group.sent_bytes
        admission = self.admission.wait(step) if admitted is None else admitted
        with admission:
            built = self._draw_until_whole(step, state, updates, admission, began_s, sent)
        built.admission = admission
        return built

    def _draw_until_whole(
        self, step: int, state: State, updates: list[PriorityUpdate], admission: Admission, began_s: float, sent: int
    ) -> BuiltBatch:
        used, attempt = list(self.sampler.cursors), 1
        while True:
            try:
                return self._build_once(step, state, updates, admission, began_s, sent)
            except TooFewRowsError as error:
                wait_for_rows(error, self.samplers, self.members)  # on all ranks, which then count again
            except CommonError as error:
                self.sampler.cursors[:] = used  # no one has got what was redrawn for this batch
                if attempt == MAX_ATTEMPTS or not isinstance(error, RowsLostError):
                    raise  # on all ranks; otherwise all of them draw again from what there is now
                attempt += 1

    def _build_once(
        self, step: int, state: State, updates: list[PriorityUpdate], admission: Admission, began_s: float, sent: int
    ) -> BuiltBatch:
        reader = self.reader
        if reader.by_totals:
            mine, read = reader.build(step, updates, self.admission.quotas(step))
            counts = read.rows
            self.traffic.selection_bytes += read.selection_bytes
            selected_s = read.agreed_s
        else:
            mine, read, counts, state, selected_s = self._draw_and_read(step, state, updates, admission, sent)
        agreement, received, weights = None, 0, None
        if not read.whole:
            agreement = reader.agreement(read)
            received = self.assembler.exchange(agreement, reader, read, mine)
        if self._has_importance and mine is not None:
            weights = self.assembler.weigh(agreement, reader, read, mine, counts, step)
        batch, deliver = self._finish(mine, read, weights, step)
        self.count(read, began_s, selected_s, received)
        return BuiltBatch(batch, state, deliver)

    def _draw_and_read(
        self, step: int, state: State, updates: list[PriorityUpdate], admission: Admission, sent: int
    ) -> tuple[Any, _native.RankRead, list[int], State, float]:
        """Steps 1 to 5 of draws that native code does not make.

        Returns:
            The buffer of this rank's batch, what was read, selectable rows and state of each store, and when the rows
            were known.
        """
        quotas = self.admission.quotas(step)
        known = self.sampler.gather_totals(step, state, updates, quotas, self.reader.exchange)
        found = [self.sampler.draw(number, quota, step, known) for number, quota in enumerate(quotas)]
        state = [old if each is None else each.state for old, each in zip(known.state, found, strict=True)]
        sizes = [0 if each is None else len(each.shard) for each in found]  # fewer where a pass ends
        self.admission.keep(admission, sizes)
        self.traffic.selection_bytes += self.group.sent_bytes - sent
        selected_s = time.perf_counter()
        drawn = self.reader.drawn(found, state)
        mine = self._buffer(sum(sizes)) if self._reads_own else None
        others = [] if self.assembler.in_host_memory else self.assembler.targets_of(self._messages(drawn))
        own = None if mine is None else self.assembler.own(mine)
        read = self.reader.read(step, drawn, own, others, in_host_memory=self.assembler.in_host_memory)
        return mine, read, known.counts, state, selected_s

    def _buffer(self, n: int) -> Any:
        """Memory for this rank's batch, of a global one of n rows; None where it has none of them."""
        me = self.members.me
        assert me is not None
        rows = int(sizes_of(n, len(self.members.replicas))[me.replica])
        return self.assembler.buffer(self.reader, self._plans[0][me.fields], rows) if rows else None

    def _messages(self, drawn: Sequence[tuple[Any, ...] | None]) -> list[tuple[int, Any, int]]:
        """What this rank reads for others: (rank, plan, rows)."""
        fields = {consumer.rank: consumer.fields for consumer in self.members.consumers}
        return [(rank, self._plans[0][fields[rank]], rows) for rank, rows in self.reader.messages(drawn)]

    def _finish(
        self, mine: Any, read: _native.RankRead, weights: NDArray[np.float64] | None, step: int
    ) -> tuple[Batch, Callable[[], None]]:
        """Step 7: the batch, of this rank and of its tensor-parallel peers."""
        me = self._mine
        if me is None:
            self._copy_to_peers(None, 0, None)
            return self.assembler.empty_batch(self.samplers[0], None, step)
        if not self._reads_own:
            mine = self._buffer(len(read.draws()) * len(self.members.replicas))
            weights = np.empty(len(read.draws())) if self._has_importance else None
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

    # --- priorities, state, leaving -------------------------------------------------------------------------------

    def submit_updates(self, update: PriorityUpdate, step: int) -> int | None:
        """See `BatchBuilder`. They go to the rows' shards with the next batch."""
        keys, priorities = update.keys, update.priorities
        check_priorities(priorities)
        if len(keys):
            check_keys_of(keys, per_step=self.samplers[0].plan.store.per_step, whose="a store of this replay")
            self.members.shard_of(keys)
        return None

    def stats(self) -> dict[str, Any]:
        """See `BatchBuilder`: with this rank's `Traffic`, and the share of bytes read on its own host."""
        traffic: dict[str, float] = dataclasses.asdict(self.traffic)
        moved = traffic["local_bytes"] + traffic["received_bytes"]
        traffic["local_share"] = traffic["local_bytes"] / moved if moved else 1.0
        traffic |= {f"peers_by_{name}": count for name, count in self.group.peers().items()}
        return (
            build_stats(self._built, self._make_s, self.samplers) | traffic | {"path": path_of(self.reader.callbacks)}
        )

    def describe(self) -> list[dict[str, Any]]:
        """See `BatchBuilder`."""
        return self.assembler.describe()

    def rewind(self) -> None:
        """Forgets the redraws of later batches, before the state of an earlier one is loaded."""
        self.sampler.rewind()

    def abort(self, reason: str) -> None:
        """Leaves the group at once and tells the other ranks why; the segments stay in shared memory."""
        for part in self.samplers:
            with contextlib.suppress(StoreClosedError):  # it may be why this rank leaves
                part.plan.store.native.keep_segment()
        self.group.abort(reason)

    def close(self) -> None:
        """Leaves the group."""
        self.sampler.close()
        self.reader.close()
        self.assembler.close()
        self.group.close()


__all__ = ["DistributedBatchBuilder", "Traffic"]
