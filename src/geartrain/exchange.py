"""Batches over many ranks: chosen together, read where the rows are, moved only where they must.

For every batch all ranks do the same, and learn the same from it (GEAR, sections 3.3 and 3.4):

    1. head      each rank tells its step, what it takes the job to be, how many rows its shard has   gather
    2. weights   weights that were updated for rows of other shards go there                          only if there are
    3. select    totals in, owners out (totals.py); every rank resolves the draws of its own shard    gather
    4. assign    which replica trains on which draw, who reads it (assignment.py)                     nothing
    5. serve     rows are read from shared memory, into the batch or into messages                    nothing
    6. exchange  one message per pair of ranks that has something to move, of a size both know        the surplus
    7. parts     tensor-parallel peers get the batch of the first among them                          one copy each

No rank ever asks another for a row: both ends know what moves. A row that is overwritten between 3 and 5 is drawn again
by the rank that reads it, from the same shard, so nobody else needs to know. A rank that fails says so and leaves, and
every other one raises `PeerLostError`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.assignment import Assignment, Reader, assign
from geartrain.batch import Batch
from geartrain.errors import EmptyStoreError, PeerLostError, RanksDisagreeError, SchemaError
from geartrain.fetch import Plan, Raw
from geartrain.keys import Keys
from geartrain.ranks import Bytes, Message, Ranks
from geartrain.sampling import Sampler
from geartrain.selection import Again, Fifo, Mixture, Strategy, Weighted, at_step
from geartrain.serving import Box, Consumer, Draws, Served, message_of, order_of
from geartrain.topology import Place
from geartrain.totals import NO_ROW, Chosen, Shard, check_strategy, select_shards

State = list[dict[str, int]]

# A weight to be set, as it travels to the shard.
UPDATE = np.dtype([("part", "<u4"), ("row", "<u4"), ("generation", "<u4"), ("reserved", "<u4"), ("priority", "<f8")])
# What each rank tells first; then, per store, its count, its next sequence number and its last sequence used.
HEAD = ("fingerprint", "step", "updates")


@dataclass(frozen=True)
class Update:
    """Priorities that a consumer has given to rows of its batch."""

    keys: Keys
    priorities: NDArray[np.float64]


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


@dataclass(frozen=True)
class _Store:
    """One of the stores of the job (several for a mixture), as sharded over its ranks."""

    shard_of: list[int]  # by rank: which shard it has attached
    servers: list[list[int]]  # by shard: the ranks that have
    first: int  # number of its first shard among those of all stores


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

    Raises:
        RanksDisagreeError: the ranks do not agree on strategy, seed, schema or sizes.
        SchemaError: the batch cannot be shared out evenly.
    """

    def __init__(
        self,
        samplers: list[Sampler],
        selection: Strategy | Mixture,
        batch_size: int,
        ranks: Ranks,
        place: Place,
        assignment: Assignment,
        inputs: Sequence[str],
        targets: Sequence[str],
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
        wanted = (inputs if place.is_head else ()), (targets if place.is_tail else ())
        mine = tuple(dict.fromkeys([*wanted[0], *wanted[1]]))
        everyone = self._introduce(mine)
        self._stores = [self._map_store(number, everyone) for number in range(len(samplers))]
        self._consumers = _consumers(everyone)
        self.readers = self._map_readers(everyone)
        replicas = len(self.readers)
        if batch_size % replicas:
            raise SchemaError(
                f"a global batch of {batch_size} rows cannot be shared out to {replicas} data-parallel replicas evenly"
            )
        self.rows_per_replica = batch_size // replicas
        for sampler in samplers:
            if self.rows_per_replica % sampler.atom:
                raise SchemaError(
                    f"{self.rows_per_replica} rows a replica do not hold whole groups of {sampler.atom}; choose a "
                    f"batch_size that is a multiple of {sampler.atom * replicas}"
                )
        # The memory format of what a consumer gets, by its fields; the plan of the first store serves for all of them.
        self._plans = [
            {
                consumer.fields: sampler.plan.of_fields(consumer.fields)
                for consumer in self._consumers
                if consumer.fields
            }
            for sampler in samplers
        ]
        self._me = next((c for c in self._consumers if c.rank == ranks.rank or ranks.rank in c.peers), None)

    # --- setting up -----------------------------------------------------------------------------------------------

    def _introduce(self, fields: tuple[str, ...]) -> list[dict[str, Any]]:
        """What every rank is and takes the job to be; raises when they do not agree."""
        job: dict[str, Any] = {
            "seed": self.selection.seed,
            "strategy": describe_strategy(self.selection),
            "batch_size": self.batch_size,
            "assignment": self._assignment,
        }
        for number, part in enumerate(self.parts):
            which = f" of store {number}" if len(self.parts) > 1 else ""
            plan = part.plan
            job |= {f"window{which}": plan.window, f"pad{which}": "left" if plan.pad_left else "right"}
            job[f"weight_fraction_bits{which}"] = plan.store.options["weight_fraction_bits"]
            for name, spec in plan.store.fields.items():
                job[f"field {name!r}{which}"] = f"{spec.dtype} {spec.shape}{'' if spec.timed else ' without time'}"
        self._fingerprint = zlib.crc32(json.dumps(job, sort_keys=True).encode())
        about = {
            "job": job,
            "place": dataclasses.astuple(self.place),
            "fields": fields,
            "row_bytes": {
                name: int(self.parts[0].plan.row_bytes(name)) for name in fields if name in self.parts[0].plan.names
            },
            "stores": [part.plan.store.native.describe()["store_id"] for part in self.parts],
        }
        everyone: list[dict[str, Any]] = self.ranks.gather_objects(about)
        first = everyone[0]
        for rank, other in enumerate(everyone):
            for name in {**first["job"], **other["job"]}:
                mine, theirs = first["job"].get(name, "missing"), other["job"].get(name, "missing")
                if mine != theirs:
                    raise RanksDisagreeError(f"{name} is {mine} on rank 0 and {theirs} on rank {rank}")
            if other["place"][3:] != first["place"][3:]:
                raise RanksDisagreeError(
                    f"the mesh has (data, pipeline, tensor) sizes {first['place'][3:]} on rank 0 and "
                    f"{other['place'][3:]} on rank {rank}"
                )
        places = [tuple(each["place"][:3]) for each in everyone]
        if len(set(places)) != len(places) or len(places) != int(np.prod(first["place"][3:])):
            raise RanksDisagreeError(
                f"{len(places)} ranks stand at {len(set(places))} different places of a mesh of "
                f"{' x '.join(map(str, first['place'][3:]))}"
            )
        return everyone

    def _map_store(self, number: int, everyone: list[dict[str, Any]]) -> _Store:
        """Shards are numbered in the order of the lowest ranks that have them attached."""
        ids = [each["stores"][number] for each in everyone]
        order = list(dict.fromkeys(ids))
        shard_of = [order.index(each) for each in ids]
        servers = [[rank for rank, each in enumerate(shard_of) if each == shard] for shard in range(len(order))]
        return _Store(shard_of, servers, number and self._shards_before(number, everyone))

    @staticmethod
    def _shards_before(number: int, everyone: list[dict[str, Any]]) -> int:
        return sum(len({each["stores"][before] for each in everyone}) for before in range(number))

    def _map_readers(self, everyone: list[dict[str, Any]]) -> list[Reader]:
        readers = []
        for replica in range(everyone[0]["place"][3]):
            ranks = [c.rank for c in self._consumers if c.replica == replica and c.fields]
            ranks.sort(key=lambda rank: (-sum(everyone[rank]["row_bytes"].values()), rank))
            if not ranks:
                raise SchemaError(f"replica {replica} has no rank that reads anything; name inputs or targets")
            homes = [frozenset(store.first + store.shard_of[rank] for store in self._stores) for rank in ranks]
            readers.append(Reader(tuple(ranks), tuple(homes)))
        return readers

    def _leads(self, number: int) -> bool:
        """Whether this rank speaks for its shard of a store."""
        store = self._stores[number]
        return store.servers[store.shard_of[self.ranks.rank]][0] == self.ranks.rank

    # --- a batch --------------------------------------------------------------------------------------------------

    def make(self, step: int, state: State, updates: Sequence[Update] = ()) -> tuple[Batch, State]:
        """This rank's part of the batch of a step, and the strategies' state after it.

        Raises:
            EmptyStoreError, NotEnoughRowsError: on all ranks alike; the replay goes on.
            PeerLostError: a rank failed or is gone; the replay is over.
        """
        began_s = time.perf_counter()
        try:
            made = self._make(step, state, updates)
        except _AgreedError as error:
            raise error.error from None
        except BaseException as error:
            # The job is over and may be restarted: what is in shared memory stays, to be adopted.
            for part in self.parts:
                part.plan.store.native.keep_segment()
            if not isinstance(error, PeerLostError):
                self.ranks.fail(f"{type(error).__name__}: {error}")
            raise
        self.make_s += time.perf_counter() - began_s
        self.made += 1
        return made

    def _make(self, step: int, state: State, updates: Sequence[Update]) -> tuple[Batch, State]:
        began_s, sent = time.perf_counter(), self.ranks.sent_bytes
        quotas = (
            self.selection.quotas(self.batch_size, step) if isinstance(self.selection, Mixture) else [self.batch_size]
        )
        counts, state = self._meet(step, state, updates)
        chosen = [self._choose(number, quota, step, state) for number, quota in enumerate(quotas)]
        state = [old if each is None else {**old, **each.state} for old, each in zip(state, chosen, strict=True)]
        self.traffic.selection_bytes += self.ranks.sent_bytes - sent
        selected_s = time.perf_counter()
        draws = self._assign(chosen, quotas)
        boxes, mine = self._boxes(draws)
        lowest = self._serve(step, state, chosen, draws, boxes)
        served_s = time.perf_counter()
        self._deliver(boxes, mine, draws)
        importance = self._importance(mine, draws, lowest, counts, step)
        batch = self._hand_out(mine, draws, importance, step)
        ended_s = time.perf_counter()
        self.traffic.select_s += selected_s - began_s
        self.traffic.fetch_s += served_s - selected_s
        self.traffic.exchange_s += ended_s - served_s
        return batch, state

    def _meet(self, step: int, state: State, updates: Sequence[Update]) -> tuple[list[int], State]:
        """Steps 1 and 2: nobody draws before everybody is here, and all weights that were given are set.

        Returns the number of selectable rows of each store, and the state with what ranks did on their own.
        """
        for number, part in enumerate(self.parts):
            if self._leads(number):
                part.expire()
        head = [self._fingerprint, step, sum(len(update.keys) for update in updates)]
        for number, part in enumerate(self.parts):
            native = part.plan.store.native
            head += [native.committed_count(), native.next_sequence(), self._after[number]]
        heads = self._gather(np.array(head, np.int64))
        self._check_heads(heads, step)
        if heads[:, 2].any():
            self._send_updates(updates)
        counts = []
        state = [dict(each) for each in state]
        for number, (part, store) in enumerate(zip(self.parts, self._stores, strict=True)):
            count, sequence, after = heads[:, len(HEAD) + 3 * number :].T[:3]
            if self._leads(number):
                part.plan.store.native.advance_sequence(int(sequence.max()))
            part.follow_exponent(step, apply=self._leads(number))
            counts.append(int(count[[servers[0] for servers in store.servers]].sum()))
            if isinstance(part.strategy, Fifo):
                for rank, used in enumerate(after.tolist()):
                    if used:
                        name = f"after/{store.shard_of[rank]}"
                        state[number][name] = max(state[number].get(name, 0), used)
        for part, count in zip(self.parts, counts, strict=True):
            self._agreed(functools.partial(part.check_count, count))
        return counts, state

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

    def _send_updates(self, updates: Sequence[Update]) -> None:
        """Each update goes to the rank that leads its row's shard, which sets the weights in the order of ranks."""
        keys = Keys.join([update.keys for update in updates]) if updates else Keys.empty().of_shard(0)
        priorities = np.concatenate([update.priorities for update in updates]) if updates else np.empty(0)
        assert keys.shard is not None
        records = np.zeros(len(keys), UPDATE)
        leader = np.zeros(len(keys), np.int64)
        for number, store in enumerate(self._stores):
            for shard, servers in enumerate(store.servers):
                here = keys.shard == store.first + shard
                records["part"][here], leader[here] = number, servers[0]
        records["row"], records["generation"], records["priority"] = keys.row, keys.generation, priorities
        size = self.ranks.size
        counts = self._gather(np.bincount(leader, minlength=size).astype(np.int64))
        to_me = counts[:, self.ranks.rank]
        inboxes = [np.empty(count, UPDATE) for count in to_me.tolist()]
        outboxes = [np.ascontiguousarray(records[leader == rank]) for rank in range(size)]
        inboxes[self.ranks.rank] = outboxes[self.ranks.rank]
        others = [rank for rank in range(size) if rank != self.ranks.rank]
        self.ranks.exchange(
            [(rank, outboxes[rank].view(np.uint8)) for rank in others],
            [(rank, inboxes[rank].view(np.uint8)) for rank in others],
        )
        every = np.concatenate(inboxes)
        for number, part in enumerate(self.parts):
            mine = every[every["part"] == number]
            if len(mine):
                weights = np.abs(mine["priority"]) ** part.exponent
                part.plan.store.update_weights(Keys(mine["row"], mine["generation"]), weights)

    def _choose(self, number: int, quota: int, step: int, state: State) -> Chosen | None:
        if quota == 0:
            return None
        part, store = self.parts[number], self._stores[number]
        leaders = [servers[0] for servers in store.servers]

        def gather(mine: NDArray[Any]) -> NDArray[Any]:
            return self._gather(mine)[leaders]

        shard = Shard(part.candidates, store.shard_of[self.ranks.rank], len(leaders), gather)
        chosen: Chosen = self._agreed(lambda: select_shards(part.strategy, shard, quota, step, state[number] or None))
        return chosen

    def _gather(self, mine: NDArray[Any]) -> NDArray[Any]:
        mine = np.ascontiguousarray(mine)
        every = self.ranks.gather(mine.reshape(-1).view(np.uint8))
        return np.ascontiguousarray(every).view(mine.dtype).reshape(self.ranks.size, *mine.shape)

    @staticmethod
    def _agreed(body: Callable[[], Any]) -> Any:
        """Errors about the stores that every rank comes to by itself, and so need not be told anybody."""
        try:
            return body()
        except EmptyStoreError as error:
            raise _AgreedError(error) from None

    # --- who gets what --------------------------------------------------------------------------------------------

    def _assign(self, chosen: Sequence[Chosen | None], quotas: Sequence[int]) -> Draws:
        """Step 4, for the draws of all stores one after the other."""
        part = np.repeat(np.arange(len(quotas)), quotas)
        shard = np.concatenate(
            [each.shard + store.first for each, store in zip(chosen, self._stores, strict=True) if each is not None]
        )
        atom = None
        if any(sampler.atom > 1 for sampler in self.parts):
            sizes = np.repeat([sampler.atom for sampler in self.parts], quotas)
            atom = np.cumsum(_starts_of_atoms(part, sizes)) - 1
        servers = [servers for store in self._stores for servers in store.servers]
        assigned = assign(shard, self.readers, servers, self._assignment, atom)
        # Each replica's rows lie in its batch in the order of draws.
        place = np.empty(len(part), np.int64)
        for replica in range(len(self.readers)):
            its = np.flatnonzero(assigned.replica == replica)
            place[its] = np.arange(len(its))
        first = np.concatenate([[0], np.cumsum(quotas)]).astype(np.int64)
        return Draws(part, shard, assigned.replica, assigned.server, place, first)

    def _boxes(self, draws: Draws) -> tuple[dict[int, Box], Box | None]:
        """A place for the rows that this rank reads for each consumer, and for its own batch."""
        boxes: dict[int, Box] = {}
        rank = self.ranks.rank
        served = draws.server == rank
        mine: Box | None = None
        for consumer in self._consumers:
            if not consumer.fields:
                continue
            plan = self._plans[0][consumer.fields]
            if consumer.rank == rank:
                mine = Box(plan, self.rows_per_replica, plan.empty(self.rows_per_replica))
                boxes[rank] = mine
            elif count := int(np.count_nonzero(served & (draws.replica == consumer.replica))):
                boxes[consumer.rank] = Box(plan, count)
        return boxes, mine

    # --- reading --------------------------------------------------------------------------------------------------

    def _serve(
        self,
        step: int,
        state: State,
        chosen: Sequence[Chosen | None],
        draws: Draws,
        boxes: Mapping[int, Box],
    ) -> list[float]:
        """Step 5: reads this rank's rows to where they are wanted, drawing lost ones again.

        Returns the lowest probability among the rows it read, for each store.
        """
        lowest = [np.inf for _ in self.parts]
        for number, each in enumerate(chosen):
            if each is None:
                continue
            here = np.flatnonzero((draws.part == number) & (draws.server == self.ranks.rank))
            if len(here):
                rows = Served(each, here - draws.first[number])
                self._read(number, rows, here, step, state[number], draws, boxes)
                lowest[number] = float(rows.probability.min())
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
        sampler, store = self.parts[number], self._stores[number]
        orders = [
            order
            for consumer in self._consumers
            if consumer.rank in boxes
            for order in [order_of(consumer, boxes[consumer.rank], here, draws, self.ranks.rank)]
            if len(order.index)
        ]
        shard = store.first + store.shard_of[self.ranks.rank]
        pending = np.arange(len(here))
        attempt = 0
        while len(pending):
            found = pending[rows.rows[pending] != NO_ROW]
            keys = rows.rows[found], rows.generations[found]
            torn = np.zeros(len(here), np.uint8)
            torn[pending] = 1
            torn[found] = ~sampler.count_samples(*keys)
            ends = None
            placed = sampler.ends(step, attempt, rows.numbers[found].astype(np.uint32), keys[0])
            if placed is not None:
                ends = np.zeros(len(here), np.int32)
                ends[found] = placed
            for order in orders:
                torn[order.read(self._plans[number], rows, found, ends, shard)] = 1
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
        sampler, store = self.parts[number], self._stores[number]
        cursor = state.get(f"after/{store.shard_of[self.ranks.rank]}")
        numbers = rows.numbers[lost].astype(np.uint32)
        again = Again(attempt, numbers, rows.kept(lost))
        mine = sampler.draw(rows.n, step, {} if cursor is None else {"after": cursor}, again)
        rows.replace(lost, mine)
        if isinstance(sampler.strategy, Fifo):
            self._after[number] = max(self._after[number], mine.state["after"])

    # --- moving ---------------------------------------------------------------------------------------------------

    def _deliver(self, boxes: Mapping[int, Box], mine: Box | None, draws: Draws) -> None:
        """Step 6: one message per pair of ranks, and its rows to their places."""
        rank = self.ranks.rank
        sends: list[Message] = []
        for peer, box in sorted(boxes.items()):
            if peer != rank:
                assert box.message is not None
                sends.append((peer, box.message))
                self.traffic.sent_bytes += sum(array.nbytes for array in box.arrays)
        letters: list[tuple[int, Bytes, list[Any], NDArray[Any], NDArray[np.int64]]] = []
        if mine is not None and self._me is not None:
            its = draws.replica == self._me.replica
            for peer in np.unique(draws.server[its]).tolist():
                places = draws.place[its & (draws.server == peer)]
                if peer == rank:
                    self.traffic.local_bytes += sum(array.nbytes for array in mine.arrays) * len(places) // mine.n
                else:
                    letters.append((peer, *message_of(mine.plan, len(places)), places))
        self.ranks.exchange(sends, [(peer, message) for peer, message, *_ in letters])
        for _, _, arrays, books, places in letters:
            assert mine is not None
            for into, array in zip(mine.arrays, arrays, strict=True):
                into[places] = array
            mine.books[places] = books
            self.traffic.received_bytes += sum(array.nbytes for array in arrays)

    def _importance(
        self, mine: Box | None, draws: Draws, lowest: Sequence[float], counts: Sequence[int], step: int
    ) -> NDArray[np.float64] | None:
        """Importance weights, scaled by the largest of the whole batch, wherever it is."""
        betas = [
            None if not isinstance(part.strategy, Weighted) or part.strategy.beta is None else part.strategy.beta
            for part in self.parts
        ]
        if all(beta is None for beta in betas):
            return None
        lowest_of_all = self._gather(np.array(lowest)).min(0)
        if mine is None:
            return None
        importance = np.ones(mine.n)
        assert self._me is not None
        its = np.flatnonzero(draws.replica == self._me.replica)
        for number, (beta, count) in enumerate(zip(betas, counts, strict=True)):
            places = draws.place[its[draws.part[its] == number]]
            if beta is not None and len(places):
                probability = np.concatenate([mine.books["probability"][places], lowest_of_all[[number]]])
                weights = (np.maximum(probability, np.finfo(np.float64).tiny) * count) ** -at_step(beta, step)
                importance[places] = weights[:-1] / weights[-1]
        return importance

    def _hand_out(self, mine: Box | None, draws: Draws, importance: NDArray[np.float64] | None, step: int) -> Batch:
        """Step 7: the batch, for this rank and its tensor-parallel peers."""
        me = self._me
        if me is None or not me.fields:
            self._pass_on(None, None, None)
            return _empty_batch(self.parts[0].plan, step)
        plan = self._plans[0][me.fields]
        if mine is None:
            mine = Box(plan, self.rows_per_replica, plan.empty(self.rows_per_replica))
        weights = importance if importance is not None else np.empty(0)
        if self.place.tp and any(
            isinstance(part.strategy, Weighted) and part.strategy.beta is not None for part in self.parts
        ):
            weights = np.empty(mine.n)
        self._pass_on(me, mine, weights)
        books = mine.books
        raw = Raw(
            mine.arrays,
            np.zeros(mine.n, np.uint8),
            plan.mask(books["start"], books["steps"]),
            np.ascontiguousarray(books["start"]),
            np.ascontiguousarray(books["length"]),
            np.ascontiguousarray(books["version"]),
            0,
        )
        keys = Keys(books["row"], books["generation"], books["shard"].astype(np.uint16))
        its = np.flatnonzero(draws.replica == me.replica)
        batch = plan.batch(
            raw,
            keys,
            np.ascontiguousarray(books["probability"]),
            weights if len(weights) else None,
            step,
        )
        return dataclasses.replace(batch, draw=plan.book(its.astype(np.int64)))

    def _pass_on(self, me: Consumer | None, mine: Box | None, weights: NDArray[np.float64] | None) -> None:
        """The batch from the first of the tensor-parallel peers to the others."""
        if not any(consumer.peers for consumer in self._consumers):
            return
        sends: list[Message] = []
        receives: list[Message] = []
        if me is not None and mine is not None and weights is not None:
            pieces = [*(_flat(array) for array in mine.arrays), _flat(mine.books), _flat(weights)]
            if me.rank == self.ranks.rank:
                sends = [(peer, piece) for peer in me.peers for piece in pieces]
                self.traffic.sent_bytes += len(me.peers) * sum(array.nbytes for array in mine.arrays)
            else:
                receives = [(me.rank, piece) for piece in pieces]
                self.traffic.received_bytes += sum(array.nbytes for array in mine.arrays)
        self.ranks.exchange(sends, receives)

    def rewind(self) -> None:
        """Forgets what later batches had used, before the state of an earlier one is loaded."""
        self._after = [0 for _ in self.parts]

    def close(self) -> None:
        """Leaves the group."""
        self.ranks.close()


class _AgreedError(Exception):
    def __init__(self, error: EmptyStoreError) -> None:
        self.error = error


def _consumers(everyone: list[dict[str, Any]]) -> list[Consumer]:
    """The ranks with tensor-parallel number 0, in the order of ranks."""
    made = []
    for rank, each in enumerate(everyone):
        dp, pp, tp = each["place"][:3]
        if tp == 0:
            peers = [
                r for r, other in enumerate(everyone) if tuple(other["place"][:2]) == (dp, pp) and other["place"][2]
            ]
            made.append(Consumer(rank, dp, tuple(each["fields"]), tuple(peers)))
    return made


def _starts_of_atoms(part: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
    index = np.arange(len(part)) - np.searchsorted(part, part)
    starts: NDArray[np.bool_] = index % sizes == 0
    return starts


def _flat(array: NDArray[Any]) -> Bytes:
    flat: Bytes = array.reshape(-1).view(np.uint8)
    return flat


def _empty_batch(plan: Plan, step: int) -> Batch:
    """What a rank gets that reads nothing."""
    empty = plan.of_fields(())
    none = np.empty(0, np.int32)
    raw = Raw([], np.empty(0, np.uint8), empty.mask(none, none), none, none, np.empty(0, np.int64), 0)
    batch = empty.batch(raw, Keys.empty(), np.empty(0), None, step)
    return dataclasses.replace(batch, draw=empty.book(np.empty(0, np.int64)))


def describe_strategy(selection: Strategy | Mixture) -> str:
    """A strategy in words that two processes agree on: functions by their names."""
    if isinstance(selection, Mixture):
        shares = ", ".join(str(float(share)) for share in selection.shares)
        return f"Mixture([{shares}], [{', '.join(describe_strategy(each) for each in selection.strategies)}])"
    if not dataclasses.is_dataclass(selection):
        return type(selection).__qualname__
    settings = []
    for field in dataclasses.fields(selection):
        value = getattr(selection, field.name)
        named = callable(value) and not dataclasses.is_dataclass(value)
        settings.append(f"{field.name}={getattr(value, '__qualname__', type(value).__name__) if named else value!r}")
    return f"{type(selection).__qualname__}({', '.join(settings)})"


__all__ = ["RankedMaker", "Traffic", "Update", "describe_strategy"]
