"""Batches over many ranks: chosen together, read where the rows are, moved only where they must.

For every batch all ranks do the same, and learn the same from it (GEAR, sections 3.3 and 3.4):

    1. head      each rank tells its step, what it takes the job to be, how many rows its shard has   gather
    2. priorities   priorities that were updated for rows of other shards go there                          only if there are
    3. select    totals in, owners out (totals.py); every rank resolves the draws of its own shard    gather
    4. assign    which replica trains on which draw, who reads it (assignment.py)                     nothing
    5. serve     rows are read from shared memory, into the batch or into messages                    nothing
    6. exchange  one message per pair of ranks that has something to move, of a size both know        the surplus
                 (docks.py: into host memory, into a GPU's by way of it, or from GPU to GPU)
    7. parts     tensor-parallel peers get the batch of the first among them                          one copy each

No rank ever asks another for a row: both ends know what moves. A row that is overwritten between 3 and 5 is drawn again
by the rank that reads it, from the same shard, so nobody else needs to know. A rank that fails says so and leaves, and
every other one raises `PeerLostError`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.keys import Keys
from geartrain.device.nccl import DeviceGroup
from geartrain.errors import ArgumentError, EmptyStoreError, NotEnoughRowsError, PeerLostError, RanksDisagreeError
from geartrain.replay.batch import Batch
from geartrain.replay.builder import Made, State
from geartrain.replay.device import DeviceOptions
from geartrain.replay.distributed.assembly import HostDock, Incoming, check_options, open_dock
from geartrain.replay.distributed.assignment import Assignment, assign
from geartrain.replay.distributed.fingerprint import describe_job
from geartrain.replay.distributed.members import Consumer, Members
from geartrain.replay.distributed.messages import Box, Draws, Served, order_of
from geartrain.replay.distributed.priority_updates import Update, send_updates
from geartrain.replay.distributed.rank_group import Bytes, Message, Ranks, together
from geartrain.replay.distributed.topology import Place
from geartrain.replay.fetch import Plan
from geartrain.replay.sampler import MAX_ATTEMPTS, Sampler
from geartrain.selection.mixture import Selection, quotas_of
from geartrain.selection.sharded import (
    NO_ROW,
    Shard,
    ShardedDraw,
    check_strategy,
    is_independent,
    redraw_shards,
    select_shards,
    totals_of,
)
from geartrain.selection.strategy import Draw, Redraw, importance_of

# What each rank tells first; then, per store, six numbers (`_about_store`).
HEAD = ("fingerprint", "step", "updates")
PER_STORE = 5


@dataclass
class Traffic:
    """Bytes and seconds since the replay was made, of this rank."""

    local_bytes: int = 0  # fields read from this host's own shard, for this rank
    sent_bytes: int = 0  # fields read for other ranks
    received_bytes: int = 0
    selection_bytes: int = 0  # sent for steps 1 to 3
    select_s: float = 0.0
    fetch_s: float = 0.0
    exchange_s: float = 0.0


class RankedMaker:
    """Makes this rank's part of the batch of each step, together with all other ranks.

    Args:
        samplers: for each store this rank's shard, with its strategy; their plans name all fields that are read.
        selection: the strategy, or the mixture.
        batch_size: rows of the global batch.
        ranks: the group.
        place: where this rank stands in it.
        assignment: "local_first" or "ordered".
        inputs, targets: fields for the first and the last stage of a pipeline.
        job: further settings that all ranks must have alike.
        on_device: where batches go; host memory by default.
        members: global ranks of the job, where `ranks` speak over torch.distributed: those that may exchange device
            memory.
        timeout_s: of that exchange.

    Raises:
        RanksDisagreeError: the ranks do not agree on strategy, seed, schema or sizes.
        ArgumentError: the batch cannot be shared out evenly.
    """

    def __init__(
        self,
        samplers: list[Sampler],
        selection: Selection,
        batch_size: int,
        ranks: Ranks,
        place: Place,
        assignment: Assignment,
        inputs: Sequence[str],
        targets: Sequence[str],
        job: Mapping[str, Any],
        on_device: DeviceOptions | None = None,
        members: Sequence[int] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        for sampler in samplers:
            check_strategy(sampler.strategy)
        self.parts = samplers
        self.selection = selection
        self.batch_size = batch_size
        self.ranks = ranks
        self.place = place
        self.traffic = Traffic()
        self.make_s = 0.0
        self.made = 0
        self._assignment: Assignment = assignment
        self._after = [0 for _ in samplers]  # sequence numbers used to replace lost rows, for FIFO
        self._spent: list[list[tuple[NDArray[np.uint32], NDArray[np.uint32]]]] = [[] for _ in samplers]
        self._random = all(is_independent(sampler.strategy) and not sampler.limited for sampler in samplers)
        mine = [*(inputs if place.is_head else ()), *(targets if place.is_tail else ())]
        fields = tuple(dict.fromkeys(mine))
        plan = samplers[0].plan
        job = describe_job(samplers, selection, batch_size) | {"assignment": assignment} | dict(job)
        job["exchange"] = "host" if on_device is None else on_device.exchange
        if on_device is not None and on_device.exchange == "nccl":
            # What the sender's GPU gathers is what the receiver's batch holds.
            job["convert"] = {name: repr(into) for name, into in sorted(on_device.convert.items())}
        self._fingerprint = zlib.crc32(json.dumps(job, sort_keys=True).encode())
        self.members = Members(
            ranks,
            place,
            job,
            [sampler.plan.store.native.describe()["store_id"] for sampler in samplers],
            fields,
            sum(plan.row_bytes(name) for name in fields),
        )
        self._check_sizes()
        # The memory format of what a consumer gets, by its fields; the plans of the first store serve for all of them.
        wanted = {consumer.fields for consumer in self.members.consumers if consumer.fields}
        self._plans = [{names: sampler.plan.of_fields(names) for names in wanted} for sampler in samplers]
        self.dock = HostDock()

        def open_mine() -> None:
            self.dock = self._open_dock(fields, on_device, members, timeout_s)

        try:
            together(ranks, open_mine)
        except BaseException:
            self.dock.close()
            raise

    # --- setting up -----------------------------------------------------------------------------------------------

    def _open_dock(
        self, fields: tuple[str, ...], on_device: DeviceOptions | None, members: Sequence[int] | None, timeout_s: float
    ) -> HostDock:
        if on_device is None:
            return HostDock()
        has_peers = any(consumer.peers for consumer in self.members.consumers)
        check_options(on_device, self.parts[0].plan.names, has_peers)
        make_group = None
        if members is not None:
            make_group = lambda device: DeviceGroup(device.collectives, members, timeout_s)  # noqa: E731
        return open_dock(on_device, self._plans, fields, has_peers, make_group)

    def _check_sizes(self) -> None:
        replicas = len(self.members.readers)
        if self.batch_size % replicas:
            raise ArgumentError(
                f"a global batch of {self.batch_size} rows cannot be shared out to {replicas} data-parallel replicas "
                f"evenly"
            )
        self.rows_per_replica = self.batch_size // replicas
        sizes = sorted({sampler.atom for sampler in self.parts})
        for size in sizes:
            if self.rows_per_replica % size:
                raise ArgumentError(
                    f"{self.rows_per_replica} rows a replica do not hold whole groups of {size}; choose a batch_size "
                    f"that is a multiple of {size * replicas}"
                )
        for small, large in itertools.pairwise(sizes):
            if large % small:
                raise ArgumentError(
                    f"groups of {small} and of {large} rows cannot fill a replica together; one must divide the other"
                )
        if len(sizes) > 1 and self._assignment == "ordered" and replicas > 1:
            raise ArgumentError("slices of a mixture with groups would cut groups; use assignment='local_first'")

    # --- a batch --------------------------------------------------------------------------------------------------

    def make(self, step: int, state: State, updates: list[Update]) -> Made:
        """This rank's part of the batch of a step, and the strategies' state after it.

        Raises:
            EmptyStoreError, NotEnoughRowsError: on all ranks alike; the replay goes on.
            PeerLostError: a rank failed or is gone; the replay is over.
        """
        began_s = time.perf_counter()
        with self.dock.at_work():
            made: Made = self._or_leave(lambda: self._make(step, state, updates))
        self.make_s += time.perf_counter() - began_s
        self.made += 1
        return made

    def settle(self, step: int, updates: list[Update]) -> None:
        """Steps 1 and 2 alone: sets the priorities that were given. Raises `PeerLostError`."""
        self._or_leave(lambda: self._set_priorities(self._heads(step, updates), step, updates))

    def _or_leave(self, body: Callable[[], Any]) -> Any:
        """Runs a piece of the protocol; whoever fails in the middle of it tells the others and leaves."""
        try:
            return body()
        except _AgreedError as error:
            raise error.error from None
        except PeerLostError as error:
            self.leave(str(error))
            raise
        except BaseException as error:
            self.leave(f"{type(error).__name__}: {error}")
            raise

    def _make(self, step: int, state: State, updates: list[Update]) -> Made:
        began_s, sent = time.perf_counter(), self.ranks.sent_bytes
        quotas = quotas_of(self.selection, self.batch_size, step)
        for number, quota in enumerate(quotas):
            if quota and self.members.leads(number):
                # The shard's limiter counts its even share: what will be drawn from it is not known yet.
                self.parts[number].admit(-(-quota // len(self.members.stores[number].servers)))
        counts, state, totals = self._meet(step, state, updates)
        chosen = [self._choose(number, quota, step, state, totals[number]) for number, quota in enumerate(quotas)]
        state = [old if each is None else each.state for old, each in zip(state, chosen, strict=True)]
        self.traffic.selection_bytes += self.ranks.sent_bytes - sent
        selected_s = time.perf_counter()
        draws = self._assign(chosen, quotas)
        boxes, mine = self._boxes(draws)
        lowest = self._serve(step, state, chosen, draws, boxes)
        served_s = time.perf_counter()
        self._deliver(boxes, mine, draws)
        importance_weights = self._importance(mine, draws, lowest, counts, step)
        batch, deliver = self._hand_out(mine, draws, importance_weights, step)
        ended_s = time.perf_counter()
        self.traffic.select_s += selected_s - began_s
        self.traffic.fetch_s += served_s - selected_s
        self.traffic.exchange_s += ended_s - served_s
        return Made(batch, state, deliver)

    def _heads(self, step: int, updates: Sequence[Update]) -> NDArray[np.int64]:
        head = [self._fingerprint, step, sum(len(update.keys) for update in updates)]
        for number, part in enumerate(self.parts):
            native = part.plan.store.native
            if self.members.leads(number):
                part.expire()
            # Everybody has read the rows of the batch before by now, or will not get them.
            for keys in self._spent[number]:
                part.release(*keys)
            self._spent[number].clear()
            told = totals_of(part.strategy, part.candidates)
            totals = [] if told is None else [int(each) for each in told.astype(np.int64)]
            head += [native.committed_count(), native.next_sequence(), self._after[number], *(totals or [0, 0])]
        heads = self.members.gather(np.array(head, np.int64))
        self._check_heads(heads, step)
        return heads

    def _set_priorities(self, heads: NDArray[np.int64], step: int, updates: list[Update]) -> bool:
        """Whether any priority was set."""
        if not heads[:, 2].any():
            return False
        for number, part in enumerate(self.parts):
            part.follow_exponent(step, apply=self.members.leads(number))
        send_updates(self.members, self.parts, updates)
        updates.clear()  # so that nobody sends them again when this batch cannot be made
        return True

    def _meet(
        self, step: int, state: State, updates: list[Update]
    ) -> tuple[list[int], State, list[NDArray[np.uint64] | None]]:
        """Steps 1 and 2: nobody draws before everybody is here, and all priorities that were given are set.

        Returns the number of selectable rows of each store, the state with what ranks did on their own, and the totals
        of each store's shards where these are known by now.
        """
        heads = self._heads(step, updates)
        changed = self._set_priorities(heads, step, updates)
        counts: list[int] = []
        known: list[NDArray[np.uint64] | None] = []
        state = [dict(each) for each in state]
        for number, (part, store) in enumerate(zip(self.parts, self.members.stores, strict=True)):
            at = len(HEAD) + PER_STORE * number
            count, sequence, after = heads[:, at : at + 3].T
            if self.members.leads(number):
                part.plan.store.native.advance_sequence(int(sequence.max()))
            counts.append(int(count[store.leaders].sum()))
            told = not changed and totals_of(part.strategy, part.candidates) is not None
            known.append(heads[store.leaders, at + 3 : at + 5].astype(np.uint64) if told else None)
            if part.traits.cursor:
                for rank, used in enumerate(after.tolist()):
                    if used:
                        name = f"after/{store.of_rank[rank]}"
                        state[number][name] = max(state[number].get(name, 0), used)
        for part, count in zip(self.parts, counts, strict=True):
            self._agreed(functools.partial(part.check_count, count))
        return counts, state, known

    def _check_heads(self, heads: NDArray[np.int64], step: int) -> None:
        for rank, (fingerprint, other_step) in enumerate(heads[:, :2].tolist()):
            if fingerprint != self._fingerprint:
                raise RanksDisagreeError(
                    f"rank {rank} draws with another strategy, seed or batch size than rank {self.ranks.rank} by now"
                )
            if other_step != step:
                raise RanksDisagreeError(
                    f"rank {rank} is at step {other_step}, rank {self.ranks.rank} at step {step}; all ranks iterate, "
                    f"and load their state, together"
                )

    def _choose(
        self, number: int, quota: int, step: int, state: State, totals: NDArray[np.uint64] | None
    ) -> ShardedDraw | None:
        """Step 3, for one store."""
        if quota == 0:
            return None
        part, store = self.parts[number], self.members.stores[number]
        shard = Shard(
            part.candidates,
            store.of_rank[self.ranks.rank],
            len(store.servers),
            functools.partial(self.members.gather_shards, number),
            self.members.leads(number),
            functools.partial(self.members.tell, number),
            part.limited,
            totals,
        )
        chosen: ShardedDraw = self._agreed(
            lambda: select_shards(part.strategy, shard, quota, step, state[number] or None)
        )
        return self._count_samples(number, shard, chosen, step) if part.limited else chosen

    def _count_samples(self, number: int, shard: Shard, chosen: ShardedDraw, step: int) -> ShardedDraw:
        """Counts samples in a store that limits them, before the rows are read; draws that came too late are redrawn.

        The leader counts for its shard, and holds rows on their last sample until everybody has read them.
        """
        part = self.parts[number]
        shard = dataclasses.replace(shard, totals=None)
        open_draws = np.arange(len(chosen.shard))
        for attempt in range(1, MAX_ATTEMPTS + 1):
            refused = np.zeros(len(chosen.shard), bool)
            if shard.leads:
                mine = open_draws[chosen.shard[open_draws] == shard.number]
                found = mine[chosen.rows[mine] != NO_ROW]
                keys = np.ascontiguousarray(chosen.rows[found]), np.ascontiguousarray(chosen.generations[found])
                refused[mine] = True
                refused[found] = ~part.count_samples(*keys)
                self._spent[number].append(keys)
            bits = np.bitwise_or.reduce(shard.gather(np.packbits(refused)), axis=0)
            open_draws = np.flatnonzero(np.unpackbits(bits, count=len(refused)))
            if not len(open_draws):
                return chosen
            if not is_independent(part.strategy):
                chosen.rows[open_draws] = NO_ROW  # whoever reads them finds others
                return chosen
            part.note_lost(len(open_draws), attempt)
            chosen = self._agreed(
                functools.partial(redraw_shards, part.strategy, shard, chosen, open_draws, attempt, step)
            )
        raise AssertionError("unreachable")

    @staticmethod
    def _agreed(body: Callable[[], Any]) -> Any:
        """Errors about the stores that every rank comes to by itself, and so need not be told anybody."""
        try:
            return body()
        except EmptyStoreError as error:
            raise _AgreedError(error) from None

    # --- who gets what --------------------------------------------------------------------------------------------

    def _assign(self, chosen: Sequence[ShardedDraw | None], quotas: Sequence[int]) -> Draws:
        """Step 4, for the draws of all stores one after the other."""
        part = np.repeat(np.arange(len(quotas)), quotas)
        stores = self.members.stores
        shard = np.concatenate(
            [each.shard + store.first for each, store in zip(chosen, stores, strict=True) if each is not None]
        )
        sizes = np.repeat([sampler.atom for sampler in self.parts], quotas)
        servers = [servers for store in stores for servers in store.servers]
        assigned = assign(shard, self.members.readers, servers, self._assignment, _atoms(part, sizes))
        # Each replica's rows lie in its batch in the order of draws.
        order = np.argsort(assigned.replica, kind="stable")
        place = np.empty(len(part), np.int64)
        place[order] = np.arange(len(part)) % self.rows_per_replica
        first = np.concatenate([[0], np.cumsum(quotas)]).astype(np.int64)
        return Draws(part, shard, assigned.replica, assigned.server, place, first)

    def _boxes(self, draws: Draws) -> tuple[dict[int, Box], Box | None]:
        """A place for the rows that this rank reads for each consumer, and for its own batch."""
        rank = self.ranks.rank
        counts = np.bincount(draws.replica[draws.server == rank], minlength=len(self.members.readers))
        parcels: list[tuple[int, Plan, int]] = []
        mine: Box | None = None
        for consumer in self.members.consumers:
            if not consumer.fields:
                continue
            plan = self._plans[0][consumer.fields]
            if consumer.rank == rank:
                mine = self.dock.begin(plan, self.rows_per_replica)
            elif counts[consumer.replica]:
                parcels.append((consumer.rank, plan, int(counts[consumer.replica])))
        boxes = self.dock.parcels(parcels)
        return (boxes if mine is None else {rank: mine, **boxes}), mine

    # --- reading --------------------------------------------------------------------------------------------------

    def _serve(
        self,
        step: int,
        state: State,
        chosen: Sequence[ShardedDraw | None],
        draws: Draws,
        boxes: Mapping[int, Box],
    ) -> list[float]:
        """Step 5: reads this rank's rows to where they are wanted, drawing lost ones again.

        Returns the lowest probability among the rows it read, for each store.
        """
        lowest = [np.inf for _ in self.parts]
        failed: EmptyStoreError | None = None
        for number, each in enumerate(chosen):
            if each is None:
                continue
            here = np.flatnonzero((draws.part == number) & (draws.server == self.ranks.rank))
            if len(here):
                rows = Served(each, here - draws.first[number])
                try:
                    self._read(number, rows, here, step, state[number], draws, boxes)
                except EmptyStoreError as error:
                    if self._random:
                        raise
                    failed = error
                lowest[number] = float(rows.probability.min())
        if not self._random:
            # No other row may be left to take a lost one's place; then there is no batch, for anybody.
            flags = self.members.gather(np.array([failed is not None]))[:, 0]
            if flags.any():
                rank = int(np.flatnonzero(flags)[0])
                raise _AgreedError(
                    failed
                    or NotEnoughRowsError(f"rank {rank} found no other rows in its shard for those that were lost")
                )
        return lowest

    def _read(
        self,
        number: int,
        rows: Served,
        here: NDArray[np.intp],
        step: int,
        state: dict[str, int],
        draws: Draws,
        boxes: Mapping[int, Box],
    ) -> None:
        sampler, store = self.parts[number], self.members.stores[number]
        orders = [
            order
            for consumer in self.members.consumers
            if consumer.rank in boxes
            for order in [order_of(consumer, boxes[consumer.rank], here, draws, self.ranks.rank)]
            if len(order.index)
        ]
        shard = store.first + store.of_rank[self.ranks.rank]
        pending = np.arange(len(here))
        attempt = 0
        while len(pending):
            found = pending[rows.rows[pending] != NO_ROW]
            keys = rows.rows[found], rows.generations[found]
            torn = np.zeros(len(here), np.uint8)
            torn[pending] = 1
            counted = sampler.limited and attempt == 0  # by the shard's leader
            torn[found] = 0 if counted else ~sampler.count_samples(*keys)
            ends = None
            placed = sampler.ends(step, attempt, rows.numbers[found].astype(np.uint32), keys[0])
            if placed is not None:
                ends = np.zeros(len(here), np.int32)
                ends[found] = placed
            begun = [order.read(number, self._plans[number], rows, found, ends, shard) for order in orders]
            for finish in begun:
                torn[finish()] = 1
            if not counted:
                sampler.release(*keys)
            lost = sampler.with_atoms(torn)
            if not len(lost):
                return
            attempt += 1
            sampler.note_lost(len(lost), attempt)
            self._again(number, rows, lost, attempt, step, state)
            pending = lost

    def _again(
        self, number: int, rows: Served, lost: NDArray[np.intp], attempt: int, step: int, state: dict[str, int]
    ) -> None:
        """Replaces rows of this rank's shard that were lost, by others of the same shard."""
        sampler, store = self.parts[number], self.members.stores[number]
        shard = store.of_rank[self.ranks.rank]
        cursor = state.get(f"after/{shard}")
        numbers = rows.numbers[lost].astype(np.uint32)
        # Ranks that share the shard draw under different attempts, so as not to find the same rows.
        servers = store.servers[shard]
        turn = (attempt - 1) * len(servers) + servers.index(self.ranks.rank) + 1
        mine = sampler.draw(
            rows.n, step, {} if cursor is None else {"after": cursor}, Redraw(turn, numbers, rows.kept(lost))
        )
        rows.replace(lost, mine)
        if sampler.traits.cursor:
            self._after[number] = max(self._after[number], mine.state["after"])

    # --- moving ---------------------------------------------------------------------------------------------------

    def _deliver(self, boxes: Mapping[int, Box], mine: Box | None, draws: Draws) -> None:
        """Step 6: one message per pair of ranks, and its rows to their places."""
        rank = self.ranks.rank
        parcels = {peer: box for peer, box in boxes.items() if peer != rank}
        self.traffic.sent_bytes += sum(box.nbytes for box in parcels.values())
        incoming: list[Incoming] = []
        if mine is not None and self.members.me is not None:
            its = draws.replica == self.members.me.replica
            for peer in np.unique(draws.server[its]).tolist():
                places = draws.place[its & (draws.server == peer)]
                if peer == rank:
                    self.traffic.local_bytes += mine.nbytes * len(places) // mine.n
                else:
                    incoming.append((peer, places))
        idle = not any(
            (draws.server[draws.replica == consumer.replica] != consumer.rank).any()
            for consumer in self.members.consumers
            if consumer.fields
        )
        self.traffic.received_bytes += self.dock.move(self.ranks, parcels, mine, incoming, idle)

    def _importance(
        self, mine: Box | None, draws: Draws, lowest: Sequence[float], counts: Sequence[int], step: int
    ) -> NDArray[np.float64] | None:
        """Importance weights, scaled by the largest of the whole batch, wherever it is."""
        if not any(part.traits.importance for part in self.parts):
            return None
        lowest_of_all = self.members.gather(np.array(lowest)).min(0)
        if mine is None:
            return None
        importance_weights = np.ones(mine.n)
        assert self.members.me is not None
        its = np.flatnonzero(draws.replica == self.members.me.replica)
        for number, (part, count) in enumerate(zip(self.parts, counts, strict=True)):
            places = draws.place[its[draws.part[its] == number]]
            if part.traits.importance and len(places):
                books = mine.books[places]
                draw = Draw(
                    books["row"], books["generation"], books["probability"], lowest=float(lowest_of_all[number])
                )
                importance_weights[places] = importance_of(part.strategy, draw, count, step)
        return importance_weights

    def _hand_out(
        self, mine: Box | None, draws: Draws, importance_weights: NDArray[np.float64] | None, step: int
    ) -> tuple[Batch, Callable[[], None]]:
        """Step 7: the batch, for this rank and its tensor-parallel peers."""
        me = self.members.me
        if me is None or not me.fields:
            self._pass_on(None, None, None)
            return self.dock.no_batch(self.parts[0].plan, step)
        if mine is None:
            mine = self.dock.begin(self._plans[0][me.fields], self.rows_per_replica)
        priorities = importance_weights if importance_weights is not None else np.empty(0)
        if self.place.tp and any(part.traits.importance for part in self.parts):
            priorities = np.empty(mine.n)
        self._pass_on(me, mine, priorities)
        books = mine.books
        its = np.flatnonzero(draws.replica == me.replica).astype(np.int64)
        keys = Keys(books["row"], books["generation"], books["shard"].astype(np.uint16), its)
        return self.dock.batch(mine, keys, priorities if len(priorities) else None, step, its)

    def _pass_on(self, me: Consumer | None, mine: Box | None, priorities: NDArray[np.float64] | None) -> None:
        """The batch from the first of the tensor-parallel peers to the others."""
        if not any(consumer.peers for consumer in self.members.consumers):
            return
        sends: list[Message] = []
        receives: list[Message] = []
        if me is not None and mine is not None and priorities is not None:
            pieces = [*(_flat(array) for array in mine.arrays), _flat(mine.books), _flat(priorities)]
            if me.rank == self.ranks.rank:
                sends = [(peer, piece) for peer in me.peers for piece in pieces]
                self.traffic.sent_bytes += len(me.peers) * sum(array.nbytes for array in mine.arrays)
            else:
                receives = [(me.rank, piece) for piece in pieces]
                self.traffic.received_bytes += sum(array.nbytes for array in mine.arrays)
        self.ranks.exchange(sends, receives)

    def check_update(self, keys: Keys, priorities: NDArray[np.float64]) -> None:
        """Raises `ArgumentError` for priorities that cannot be set."""
        if not np.isfinite(priorities).all():
            raise ArgumentError(f"priority {np.flatnonzero(~np.isfinite(priorities))[0]} is not finite")
        if len(keys) and (keys.shard is None or int(keys.shard.max()) >= self.members.shards):
            raise ArgumentError("these keys do not tell a shard of this replay; use the rows of its batches")

    def rewind(self) -> None:
        """Forgets what later batches had used, before the state of an earlier one is loaded."""
        self._after = [0 for _ in self.parts]

    def leave(self, reason: str) -> None:
        """Ends the group at once, telling the others why; what is in shared memory stays."""
        for part in self.parts:
            part.plan.store.native.keep_segment()
        self.ranks.fail(reason)

    def close(self) -> None:
        """Leaves the group in good order."""
        for number, part in enumerate(self.parts):
            for keys in self._spent[number]:
                if not part.plan.store.closed:
                    part.release(*keys)
            self._spent[number].clear()
        self.dock.close()
        self.ranks.close()


class _AgreedError(Exception):
    def __init__(self, error: EmptyStoreError) -> None:
        self.error = error


def _atoms(part: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """A number for each draw that it shares with those it stands and falls with; None when all stand alone."""
    if (sizes == 1).all():
        return None
    index = np.arange(len(part)) - np.searchsorted(part, part)
    atoms: NDArray[np.int64] = np.cumsum(index % sizes == 0) - 1
    return atoms


def _flat(array: NDArray[Any]) -> Bytes:
    flat: Bytes = array.reshape(-1).view(np.uint8)
    return flat


__all__ = ["RankedMaker", "Traffic", "Update"]
