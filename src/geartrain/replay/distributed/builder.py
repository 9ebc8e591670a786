"""Distributed batch builder: one global batch from the shards of many ranks, moving only the surplus.

For every batch all ranks take the same steps, in the same order (GEAR, sections 3.3 and 3.4):

    1. status      every rank's step, fingerprint, row counts and totals (draw.py)                     all-gather
    2. priorities  priority updates go to the leaders of their rows' shards, with the status           only if any
    3. draw        each rank computes which shard owns each draw; its ranks look the rows up,          all-gather
                   in shared memory or in a copy of the priorities on a GPU (device/mirrors.py)
    4. assign      draws to replicas (consumers) and ranks (readers) (batch_assignment.py)             none
    5. read        rows from shared memory, into the batch or into messages (read.py)                  none
    6. exchange    one row message per pair of ranks that has rows to move, of a size both know        the surplus
                   (assembly.py: into host memory, into a GPU's through it, or from GPU to GPU)
    7. copies      tensor-parallel peers get a copy of the batch                                       one copy each

Where draws are independent, of one store and in host memory, steps 1 to 5 are one native call, and step 6 as well where
no row moves (native_read.py).

No rank requests a row: both ends know what moves. A row that is overwritten between 3 and 5 is redrawn by the rank that
reads it, from the same shard, so no other rank has to know. Where that shard has no other row all ranks learn it in
step 6, and draw the batch again (read_agreement.py). A rank that fails aborts the group, and every other one raises
`PeerLostError`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.keys import Keys
from geartrain.device.nccl import DeviceGroup
from geartrain.errors import PeerLostError
from geartrain.replay.admission import Admission
from geartrain.replay.batch import Batch
from geartrain.replay.builder import BuiltBatch, PriorityUpdate, State, build_stats, check_priorities
from geartrain.replay.config import ReplayConfig
from geartrain.replay.device import DeviceOptions
from geartrain.replay.distributed.assembly import BatchAssembler, check_options, open_assembler
from geartrain.replay.distributed.assembly_host import HostAssembler, Incoming
from geartrain.replay.distributed.batch_assignment import BatchAssigner, check_sizes
from geartrain.replay.distributed.draw import CommonError, ShardedSampler
from geartrain.replay.distributed.fingerprint import describe_job, fingerprint_of
from geartrain.replay.distributed.members import Consumer, Members
from geartrain.replay.distributed.messages import flat_bytes
from geartrain.replay.distributed.native_read import NativeReader, open_native_reader
from geartrain.replay.distributed.priority_updates import check_steps
from geartrain.replay.distributed.rank_collectives import run_on_all_ranks
from geartrain.replay.distributed.rank_group import Message, RankGroup
from geartrain.replay.distributed.read import AssignedDraws, RowBuffer, ShardReader
from geartrain.replay.distributed.read_agreement import ReadAgreement, RowsLostError
from geartrain.replay.distributed.shard_admission import ShardAdmission
from geartrain.replay.distributed.topology import MeshPosition
from geartrain.replay.distributed.transition_rows import TransitionRows
from geartrain.replay.fetch_plan import FetchPlan
from geartrain.replay.sampler import MAX_ATTEMPTS, StoreSampler
from geartrain.selection.mixture import Selection
from geartrain.selection.sharded import check_strategy
from geartrain.selection.strategy import Draw, importance_of, seed_of

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
        plans = [_rows_of(each) for each in samplers]
        self._plan = plan = plans[0]
        options, names = config.device, plan.names
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
            sum(plan.row_bytes(name) for name in fields),
        )
        self.store_ids: list[int] = self.members.shard_ids.tolist()
        check_sizes(samplers, len(self.members.replicas), config.batch_size, config.assignment)
        self.rows = config.batch_size // len(self.members.replicas)
        self.admission = ShardAdmission(samplers, self.members, selection, config.batch_size)
        # Fetch plans by the fields of each consumer; those of the first store serve as memory format for all stores.
        wanted = {consumer.fields for consumer in self.members.consumers if consumer.fields}
        self._plans = [{names: each.of_fields(names) for names in wanted} for each in plans]
        self._sampler = ShardedSampler(samplers, self.members, fingerprint_of(job))
        self._assigner = BatchAssigner(samplers, self.members, config.assignment)
        self._reader = ShardReader(samplers, self.members, self._plans, self._sampler.cursors)
        self.assembler: BatchAssembler = HostAssembler()

        def open_mine() -> None:
            self.assembler = self._open_assembler(fields, options, members, config.timeout_s)
            self._sampler.mirrors = self.assembler.open_mirrors(samplers)

        try:
            run_on_all_ranks(group, open_mine)
            self.native = open_native_reader(self._sampler, selection, config)
        except BaseException:
            self.assembler.close()
            raise

    # --- set-up -------------------------------------------------------------------------------------------------

    def _open_assembler(
        self, fields: tuple[str, ...], options: DeviceOptions | None, members: Sequence[int] | None, timeout_s: float
    ) -> BatchAssembler:
        if options is None:
            return HostAssembler()
        has_peers = any(consumer.peers for consumer in self.members.consumers)
        check_options(options, self._plan.names, has_peers)
        make_group = None
        if members is not None:
            make_group = lambda device: DeviceGroup(device.collectives, members, timeout_s)  # noqa: E731
        return open_assembler(options, self._plans, fields, has_peers, make_group)

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
        self.or_abort(lambda: self._sampler.settle(step, updates))

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
        used = list(self._sampler.cursors)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                return self._build_once(step, state, updates, admission, began_s, sent)
            except CommonError as error:
                self._sampler.cursors[:] = used  # no one has got what was redrawn for this batch
                if attempt == MAX_ATTEMPTS or not isinstance(error, RowsLostError):
                    raise  # on all ranks; otherwise all of them draw again from what there is now
        raise AssertionError("unreachable")

    def _build_once(
        self, step: int, state: State, updates: list[PriorityUpdate], admission: Admission, began_s: float, sent: int
    ) -> BuiltBatch:
        if self.native is not None:
            return self._build_natively(self.native, step, state, updates, began_s)
        quotas = self.admission.quotas(step)
        known = self._sampler.gather_totals(step, state, updates, quotas)
        drawn = [self._sampler.draw(number, quota, step, known) for number, quota in enumerate(quotas)]
        state = [old if each is None else each.state for old, each in zip(known.state, drawn, strict=True)]
        quotas = [0 if each is None else len(each.shard) for each in drawn]  # fewer where a pass ends
        self.admission.keep(admission, quotas)
        self.traffic.selection_bytes += self.group.sent_bytes - sent
        selected_s = time.perf_counter()
        draws = self._assigner.assign(drawn, quotas)
        buffers, mine = self._buffers(draws)
        outcome = self._reader.read(step, state, drawn, draws, buffers)
        read_s = time.perf_counter()
        agreement = self._reader.agreement(outcome, with_lowest=self._has_importance)
        self._exchange(agreement, buffers, mine, draws)
        importance_weights = None
        if mine is not None and agreement.lowest is not None:
            importance_weights = self._importance_weights(mine, draws, agreement.lowest, known.counts, step)
        batch, deliver = self._finish(mine, draws, importance_weights, step)
        ended_s = time.perf_counter()
        self.traffic.select_s += selected_s - began_s
        self.traffic.fetch_s += read_s - selected_s
        self.traffic.exchange_s += ended_s - read_s
        return BuiltBatch(batch, state, deliver)

    def _build_natively(
        self, native: NativeReader, step: int, state: State, updates: list[PriorityUpdate], began_s: float
    ) -> BuiltBatch:
        """Steps 1 to 6 where they are one native call, or two around a message of rows."""
        rows, read = native.build(step, updates)
        agreement = self._reader.agreement(native.outcome(read), with_lowest=self._has_importance)
        native.exchange(agreement, rows, read)
        batch = native.finish(rows, read, agreement, step)
        self.traffic.selection_bytes += read.selection_bytes
        self.count(native, began_s, read)
        return BuiltBatch(batch, state)

    def count(self, native: NativeReader, began_s: float, read: _native.RankRead) -> None:
        """Counts what was read for a batch that is finished now."""
        traffic, ended_s = self.traffic, time.perf_counter()
        traffic.local_bytes, traffic.sent_bytes, traffic.received_bytes = (
            count * native.row_bytes for count in (native.local_rows, native.sent_rows, native.received_rows)
        )
        traffic.select_s += read.agreed_s - began_s
        traffic.fetch_s += read.read_s - read.agreed_s
        traffic.exchange_s += ended_s - read.read_s

    def _buffers(self, draws: AssignedDraws) -> tuple[dict[int, RowBuffer], RowBuffer | None]:
        """Buffers for the rows that this rank reads, by the consumer's rank; and the one of its own batch."""
        rank = self.group.rank
        counts = np.bincount(draws.replica[draws.reader == rank], minlength=len(self.members.replicas))
        outgoing: list[tuple[int, FetchPlan, int]] = []
        mine: RowBuffer | None = None
        for consumer in self.members.consumers:
            if not consumer.fields:
                continue
            plan = self._plans[0][consumer.fields]
            if consumer.rank == rank:
                mine = self.assembler.batch_buffer(plan, int(draws.sizes[consumer.replica]))
            elif counts[consumer.replica]:
                outgoing.append((consumer.rank, plan, int(counts[consumer.replica])))
        buffers = self.assembler.message_buffers(outgoing)
        return (buffers if mine is None else {rank: mine, **buffers}), mine

    def _exchange(
        self,
        agreement: ReadAgreement,
        buffers: Mapping[int, RowBuffer],
        mine: RowBuffer | None,
        draws: AssignedDraws,
    ) -> None:
        """Step 6: one message per pair of ranks, and its rows to their places, where no rank has lost any for good."""
        rank = self.group.rank
        outgoing = {peer: buffer for peer, buffer in buffers.items() if peer != rank}
        self.traffic.sent_bytes += sum(buffer.nbytes for buffer in outgoing.values())
        incoming: list[Incoming] = []
        if mine is not None and self.members.me is not None:
            its = draws.replica == self.members.me.replica
            for peer in np.unique(draws.reader[its]).tolist():
                places = draws.place[its & (draws.reader == peer)]
                if peer == rank:
                    self.traffic.local_bytes += mine.nbytes * len(places) // mine.n
                else:
                    incoming.append((peer, places))
        idle = self._idle(draws)
        self.traffic.received_bytes += self.assembler.exchange(agreement, outgoing, mine, incoming, idle)

    def _idle(self, draws: AssignedDraws) -> bool:
        """Whether no row moves between any two ranks, for assemblers that exchange nothing then."""
        if not self.assembler.skips_idle:
            return False
        return not any(
            (draws.reader[draws.replica == consumer.replica] != consumer.rank).any()
            for consumer in self.members.consumers
            if consumer.fields
        )

    def _importance_weights(
        self, mine: RowBuffer, draws: AssignedDraws, lowest: NDArray[np.float64], counts: Sequence[int], step: int
    ) -> NDArray[np.float64]:
        """Importance weights of this rank's rows, scaled by the largest of the global batch."""
        importance_weights = np.ones(mine.n)
        assert self.members.me is not None
        its = np.flatnonzero(draws.replica == self.members.me.replica)
        for number, (part, count) in enumerate(zip(self.samplers, counts, strict=True)):
            places = draws.place[its[draws.store[its] == number]]
            if part.traits.importance and len(places):
                rows = mine.headers[places]
                lowest_here = float(lowest[number])
                draw = Draw(rows["row"], rows["generation"], rows["probability"], lowest=lowest_here)
                importance_weights[places] = importance_of(part.strategy, draw, count, step)
        return importance_weights

    def _finish(
        self,
        mine: RowBuffer | None,
        draws: AssignedDraws,
        importance_weights: NDArray[np.float64] | None,
        step: int,
    ) -> tuple[Batch, Callable[[], None]]:
        """Step 7: the batch, of this rank and of its tensor-parallel peers."""
        me = self.members.me
        if me is None or not me.fields:
            self._copy_to_peers(None, None, None)
            return self.assembler.empty_batch(self._plan, step)
        if mine is None:
            mine = self.assembler.batch_buffer(self._plans[0][me.fields], int(draws.sizes[me.replica]))
        weights = importance_weights if importance_weights is not None else np.empty(0)
        if self.position.tp and self._has_importance:
            weights = np.empty(mine.n)
        self._copy_to_peers(me, mine, weights)
        headers = mine.headers
        its = np.flatnonzero(draws.replica == me.replica).astype(np.int64)
        shard = headers["shard"].astype(np.uint16)
        ids = self.members.shard_ids[shard]
        steps = mine.plan.anchors(headers["start"], headers["steps"]) if mine.plan.per_step else None
        rows, generations = (np.ascontiguousarray(headers[name]) for name in ("row", "generation"))
        keys = Keys.of_rows(rows, generations, ids, shard=shard, draw=its, step=steps)
        return self.assembler.batch(mine, keys, weights if len(weights) else None, step, its)

    def _copy_to_peers(self, me: Consumer | None, mine: RowBuffer | None, weights: NDArray[np.float64] | None) -> None:
        """The batch of the first tensor-parallel peer, to the others."""
        if not any(consumer.peers for consumer in self.members.consumers):
            return
        sends: list[Message] = []
        receives: list[Message] = []
        if me is not None and mine is not None and weights is not None:
            pieces = [*(flat_bytes(array) for array in mine.arrays), flat_bytes(mine.headers), flat_bytes(weights)]
            if me.rank == self.group.rank:
                sends = [(peer, piece) for peer in me.peers for piece in pieces]
                self.traffic.sent_bytes += len(me.peers) * sum(array.nbytes for array in mine.arrays)
            else:
                receives = [(me.rank, piece) for piece in pieces]
                self.traffic.received_bytes += sum(array.nbytes for array in mine.arrays)
        self.group.exchange(sends, receives)

    # --- priorities, state, leaving -------------------------------------------------------------------------------

    def submit_updates(self, update: PriorityUpdate, step: int) -> int | None:
        """See `BatchBuilder`. They go to the rows' shards with the next batch."""
        keys, priorities = update.keys, update.priorities
        check_priorities(priorities)
        check_steps(self.samplers[0].plan.store.per_step, keys)
        if len(keys):
            self.members.shard_of(keys)
        return None

    def stats(self) -> dict[str, float]:
        """See `BatchBuilder`: with this rank's `Traffic`, and the share of bytes read on its own host."""
        traffic: dict[str, float] = dataclasses.asdict(self.traffic)
        moved = traffic["local_bytes"] + traffic["received_bytes"]
        traffic["local_share"] = traffic["local_bytes"] / moved if moved else 1.0
        traffic |= {f"peers_by_{name}": count for name, count in self.group.peers().items()}
        return build_stats(self._built, self._make_s, self.samplers) | traffic

    def describe(self) -> list[dict[str, Any]]:
        """See `BatchBuilder`."""
        return self.assembler.describe()

    def rewind(self) -> None:
        """Forgets the redraws of later batches, before the state of an earlier one is loaded."""
        self._sampler.rewind()

    def abort(self, reason: str) -> None:
        """Leaves the group at once and tells the other ranks why; the segments stay in shared memory."""
        for part in self.samplers:
            part.plan.store.native.keep_segment()
        self.group.abort(reason)

    def close(self) -> None:
        """Leaves the group."""
        self._sampler.close()
        if self.native is not None:
            self.native.close()
        self.assembler.close()
        self.group.close()


def _rows_of(sampler: StoreSampler) -> FetchPlan:
    """The arrays of a sampler's rows, as ranks exchange them."""
    view = sampler.transitions
    return sampler.plan if view is None else TransitionRows(view, sampler.plan, seed_of(sampler.strategy))


__all__ = ["DistributedBatchBuilder", "Traffic"]
