"""Source of packed batches, of rows with lengths of their own, from the shards of many ranks.

The steps are those of rank_rows.py. Two are different, because the ranks do not know the lengths of rows:

    3. draw        as there (sharded_sampler.py)
    3a. tell       the leader of each shard tells all ranks the keys and lengths of its drawn rows      one message each
    4. assign      every rank computes alike which replica trains on a row: by number of rows, or by cost          none
    5. read        rows from shared memory, by the ranks of the replica that have their shard                      none
    6. exchange    one message per pair of ranks, with what the sender has read for the receiver        one message each

All ranks of a replica get the same batch in the same order, with all fields: those of its pipeline and its
tensor-parallel peers, too. A rank reads rows of its own shard itself, also where another rank reads them for others.

So every rank knows the lengths of the whole global batch (`BatchLengths`), and derives from them, without another
message, what all ranks have to do alike.

A row can be deleted between steps 3a and 5. All ranks learn that in step 6, and draw the batch again. In a store that
limits how often rows are sampled, the leader holds drawn rows until all ranks have read them. If another replay was
first to draw a row, the leader draws another one of its shard in step 3a.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.keys import Keys
from geartrain.core.tasks import RowPlan
from geartrain.errors import EmptyStoreError, NotEnoughRowsError, PeerLostError
from geartrain.ranks.rank_collectives import run_on_all_ranks
from geartrain.ranks.rank_group import Bytes, RankGroup
from geartrain.ranks.topology import MeshPosition
from geartrain.replay.admission import Admission
from geartrain.replay.batch_lengths import BatchLengths
from geartrain.replay.builder import BuiltBatch, PriorityUpdate, State
from geartrain.replay.config import ReplayConfig
from geartrain.replay.distributed.assignment import Assigner
from geartrain.replay.distributed.messages import flat_bytes
from geartrain.replay.distributed.rank_source import RankSource
from geartrain.replay.distributed.read_agreement import RowsLostError
from geartrain.replay.distributed.sharded_sampler import CommonError, DrawnBatch
from geartrain.replay.kept_rows import KeptRows
from geartrain.replay.packed_batch import PackedBatch, axes_of, check_room, packed_batch, repeated_probability, room_of
from geartrain.replay.sampler import MAX_ATTEMPTS, StoreSampler
from geartrain.selection.mixture import Selection
from geartrain.selection.shard import NO_ROW, NO_ROWS, ShardedDraw
from geartrain.selection.strategy import Draw, Redraw, importance_of
from geartrain.store.packed import PackedReader, PackedValues, as_bounds, spread

# First number of each message: whether its sender has what the others need.
_WHOLE, _LOST = 0, 1


class _Message:
    """Takes arrays out of a received message, one behind the other."""

    def __init__(self, data: Bytes, sender: int) -> None:
        self._data = data
        self._sender = sender
        self._at = 0

    def take(self, dtype: Any, n: int) -> NDArray[Any]:
        """The next n entries. Raises `PeerLostError` if there are not as many."""
        nbytes = np.dtype(dtype).itemsize * n
        part = self._data[self._at : self._at + nbytes]
        if part.size != nbytes:
            raise PeerLostError(f"rank {self._sender} sent {self._data.size} bytes, which are too few for its rows")
        self._at += nbytes
        return part.view(dtype)

    def end(self) -> None:
        """Raises `PeerLostError` if there is more."""
        if self._at != self._data.size:
            raise PeerLostError(f"rank {self._sender} sent {self._data.size} bytes, {self._at} were expected")


class RowLengths:
    """Reads and tells the lengths of rows, for step 3a.

    Args:
        native: this rank's shard.
        plan: its schema.
        names: fields of the batch.
        axes: further axes whose lengths are told.
    """

    def __init__(self, native: _native.Store, plan: RowPlan, names: Sequence[str], axes: Sequence[str]) -> None:
        dividers = [each.divided_by for each in plan.axes if each.name in axes and each.divided_by is not None]
        found = {*axes, *axes_of(plan, [*names, *dividers])}
        # Axes that are cut into sequences, and the axis that has one item for each of them.
        self.divided = {
            axis.name: str(plan.fields[axis.divided_by].axis)
            for axis in plan.axes
            if axis.name in found and axis.divided_by is not None
        }
        self.axes: list[str] = []  # those that divide others first
        while found:
            self.axes += sorted(axis for axis in found if self.divided.get(axis) not in found)
            found -= set(self.axes)
        self.flags = [
            name
            for name in names
            if plan.fields[name].dtype == "bool" and plan.fields[name].axis is not None and not plan.fields[name].shape
        ]
        self._plan = plan
        self._reader = PackedReader(native, plan, self.flags, self.axes)

    def read(self, keys: Keys) -> _native.PackedArrays:
        """What is told of rows; `torn` of it names rows that are gone."""
        return self._reader.read(keys)

    def pack(self, found: _native.PackedArrays) -> list[Bytes]:
        """The lengths of rows as they are sent."""
        pieces = []
        for axis in self.axes:
            lengths, _, parts = found.axis(self._plan.axis(axis))
            pieces.append(flat_bytes(lengths))
            if axis in self.divided:
                assert parts is not None  # of an axis that is divided
                pieces.append(flat_bytes(np.diff(parts)))
        for place, name in enumerate(self.flags):
            bounds = found.axis(self._plan.axis(self._plan.fields[name].axis))[1].tolist()
            values = found.field(place)
            sums = [np.count_nonzero(values[first:last]) for first, last in itertools.pairwise(bounds)]
            pieces.append(flat_bytes(np.array(sums, np.int32)))
        return pieces

    def unpack(self, message: _Message, n: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Lengths, lengths of sequences, and sums of n rows."""
        lengths, parts = {}, {}
        for axis in self.axes:
            lengths[axis] = message.take(np.int32, n).astype(np.int64)
            if axis in self.divided:
                parts[axis] = message.take(np.int32, int(lengths[self.divided[axis]].sum())).astype(np.int64)
        sums = {name: message.take(np.int32, n).astype(np.int64) for name in self.flags}
        return lengths, parts, sums


class MovedRows:
    """Rows of one message, which another rank has read.

    Args:
        reader: of the fields.
        like: any rows that this rank has read, for dtypes and shapes.
        message: the rows.
        lengths: of the global batch.
        places: the rows' places in it.
    """

    def __init__(
        self,
        reader: PackedReader,
        like: _native.PackedArrays,
        message: _Message,
        lengths: BatchLengths,
        places: NDArray[np.int64],
    ) -> None:
        self._reader = reader
        self._fields: list[NDArray[Any]] = []
        self._bounds: list[NDArray[np.int64] | None] = []
        self.nbytes = 0
        for place, name in enumerate(reader.names):
            field = reader.plan.fields[name]
            items = lengths.items(field.axis, places)
            if field.kind == "array":
                kind = like.field(place)
                values = message.take(kind.dtype, items * int(np.prod(kind.shape[1:], dtype=np.int64)))
                self._fields.append(values.reshape(items, *kind.shape[1:]))
                self._bounds.append(None)
            else:
                bounds = message.take(np.int64, items + 1)
                self._fields.append(message.take(np.uint8, int(bounds[-1])))
                self._bounds.append(bounds)
            self.nbytes += self._fields[-1].nbytes

    @staticmethod
    def pack(reader: PackedReader, found: _native.PackedArrays) -> list[Bytes]:
        """Rows that were read, as they are sent."""
        pieces: list[Bytes] = []
        for place, name in enumerate(reader.names):
            if reader.plan.fields[name].kind != "array":
                pieces.append(flat_bytes(found.string_bounds(place)))
            pieces.append(flat_bytes(found.field(place)))
        return pieces

    def field(self, place: int) -> NDArray[Any]:
        """The values of a field."""
        return self._fields[place]

    def strings(self, place: int) -> list[Any]:
        """The strings of a field."""
        text, bounds = self._fields[place].tobytes(), self._bounds[place]
        assert bounds is not None
        cut = [text[first:last] for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
        decoded = self._reader.plan.fields[self._reader.names[place]].kind == "text"
        return [each.decode() for each in cut] if decoded else cut


class JoinedRows:
    """The rows of this rank's batch, by the ranks that have read them.

    See `geartrain.store.packed.PackedValues`. Arrays are joined when they are asked for.
    """

    def __init__(self, plan: RowPlan, parts: Sequence[_native.PackedArrays | MovedRows], lengths: BatchLengths) -> None:
        self._plan, self._parts, self._lengths = plan, parts, lengths
        self.nbytes = sum(each.nbytes for each in parts)

    def field(self, place: int, /) -> NDArray[Any]:
        return np.concatenate([each.field(place) for each in self._parts])

    def strings(self, place: int, /) -> list[Any]:
        return [one for each in self._parts for one in each.strings(place)]

    def axis(self, number: int, /) -> tuple[Any, Any, Any]:
        axis = self._plan.axes[number - 1]
        places = self._lengths.places
        lengths = self._lengths.lengths[axis.name][places]
        parts = None
        if axis.name in self._lengths.parts:
            counts, flat = self._lengths.parts[axis.name]
            starts = np.cumsum(counts) - counts
            parts = as_bounds(flat[spread(starts[places], counts[places])])
        return lengths.astype(np.int32), as_bounds(lengths), parts


class PackedRankRows(RankSource):
    """This rank's part of the packed global batch of each step; see `RankSource`.

    Its batch has the rows that its replica's first rank has read first, then those of each other rank; `batch.draw`
    tells their places in the global batch.

    Args:
        samplers: of this rank's shard.
        selection: the strategy.
        config: of the replay; its batch is the global one.
        group: the rank group.
        position: this rank's position in the mesh.
    """

    def __init__(
        self,
        samplers: list[StoreSampler],
        selection: Selection,
        config: ReplayConfig,
        group: RankGroup,
        position: MeshPosition,
    ) -> None:
        super().__init__(samplers, selection, config, group, position)
        (sampler,) = samplers
        assert sampler.packed is not None
        self._config = config
        self._sampler = sampler
        self._reader = sampler.packed
        self._cost = config.cost
        axes = [] if self._cost is None else [self._cost.axis]
        self._lengths = RowLengths(sampler.plan.store.native, self._reader.plan, self._reader.names, axes)
        members, (shards,) = self.members, self.members.stores
        self._shard, self._leads = shards.of_rank[group.rank], members.leads(0)
        self._assigner = Assigner(members.replicas, shards.ranks)
        # The ranks of each replica: those of each pipeline stage, which get the same rows.
        self._ranks_of: list[list[int]] = [[] for _ in members.replicas]
        for each in members.consumers:
            self._ranks_of[each.replica] += [each.rank, *each.peers]
        self._me = next(number for number, ranks in enumerate(self._ranks_of) if group.rank in ranks)
        self._none = self._reader.read(Keys(NO_ROWS, NO_ROWS))  # has the dtypes and shapes of the fields
        rooms = members.all_gather_shards(0, np.array(room_of(sampler.plan.store)))
        check_room([(in_flight, capacity) for in_flight, capacity in rooms.tolist()], config)
        self._newest = self._most = self._mean = 0.0  # balance, and the sums that it is of
        self._kept = sampler.kept
        if self._kept is not None:
            self._kept.of_ranks = True
            keeper = self._kept
            run_on_all_ranks(group, lambda: keeper.hold() if self._leads else None)
        self._admitted = False  # the batch that is built, by rate limiters
        self.exchange = self.sharded.exchange_of(idle=False)

    @property
    def callbacks(self) -> list[str]:
        return ["select_shards", *self._sampler.callbacks]

    # --- a batch ------------------------------------------------------------------------------------------------

    def start(self, step: int, state: State, updates: list[PriorityUpdate], admission: Admission) -> Any:
        """This rank's part of the batch, with the errors of all sources. A repeated batch waits for no rate limiter."""
        began_s = time.perf_counter()
        self._admitted = False
        self._sampler.step = step
        with self.together:
            return self.build(step, state, updates, admission, began_s)

    def build_once(
        self, step: int, state: State, updates: list[PriorityUpdate], admission: Admission, began_s: float
    ) -> BuiltBatch:
        try:
            return self._build(step, state, updates, admission, began_s)
        except CommonError:
            if self._kept is not None and self._leads:  # on all ranks
                self._kept.give_up(step)
                self._sampler.note_used_up(admission)
                admission.finish()
            raise

    def _build(
        self, step: int, state: State, updates: list[PriorityUpdate], admission: Admission, began_s: float
    ) -> BuiltBatch:
        traffic, sent_bytes = self.traffic, self.group.sent_bytes
        repeated = None if self._kept is None else self._agree_on_kept(self._kept, step)
        if repeated is not None:
            self.sharded.settle(step, updates, self.exchange)
            drawn = DrawnBatch([0], state, [repeated])
        else:
            if not self._admitted:
                self.admission.wait(step, admission)
                self._admitted = True
            drawn = self.sharded.draw_all(step, state, updates, self.admission.quotas(step), self.exchange)
            self.admission.keep(admission, drawn.sizes)
        found, version, lengths = self._tell(step, drawn)
        lengths, reader = self._assign(found.shard, lengths)
        traffic.selection_bytes += self.group.sent_bytes - sent_bytes
        selected_s = time.perf_counter()
        batch = self._exchange(step, found, version, lengths, reader, drawn.counts[0], selected_s)
        traffic.select_s += selected_s - began_s
        if self._kept is not None:  # they are drawn for good, even if nobody gets this batch
            admission.pop(self._sampler, None)
        return BuiltBatch(batch, drawn.state, admission=admission)

    def _agree_on_kept(self, kept: KeptRows, step: int) -> ShardedDraw | None:
        """The rows that the batch of a step has drawn before, on whichever shards; None if it is to be drawn.

        Also frees the rows of steps that were saved on every rank. A batch that is not complete is given up on all
        shards: a process died while it was drawn, a row was deleted, or a host's shard is lost.
        """
        rows, generations, places = kept.marked(step) if self._leads else (NO_ROWS, NO_ROWS, NO_ROWS)
        mine = _message(step, [np.array([kept.told, len(places)]), places])
        told = [_Message(each, peer) for peer, each in enumerate(self.members.all_to_all([mine] * self.group.size))]
        heads = np.array([message.take(np.int64, 3) for message in told])
        self.sharded.check_ranks([(self.sharded.fingerprint, each) for each in heads[:, 0].tolist()], step)
        self._free(kept, int(heads[:, 1].min()))
        of_shards = [told[rank].take(np.uint32, int(heads[rank, 2])) for rank in self.members.stores[0].leaders]
        every, n = np.concatenate(of_shards), self._config.batch_size
        if np.array_equal(np.sort(every), np.arange(n)):
            shard, found, generation = np.empty(n, np.int64), np.full(n, NO_ROW), np.zeros(n, np.uint32)
            for number, here in enumerate(of_shards):
                shard[here] = number
            found[places], generation[places] = rows, generations
            probability = np.full(n, repeated_probability(self._sampler.traits.form))
            return ShardedDraw(shard, found, generation, probability)
        if len(every):
            self._sampler.give_back(kept.give_up(step) if self._leads else 0)
            if self.group.rank == 0:
                kept.warn_of_lost(step, n - len(np.unique(every)), n)
        elif self._leads:
            kept.warn_of_gone(step)
        return None

    def _free(self, kept: KeptRows, saved: int) -> None:
        """Frees the rows of steps up to the last one that was saved on every rank."""
        if self._leads and saved >= 0:
            kept.free(saved)

    def settle(self, step: int, updates: list[PriorityUpdate]) -> None:
        """Also frees the rows of steps that were saved on every rank."""
        if self._kept is not None:
            with self.together:
                self._free(self._kept, int(self.members.all_gather(np.array([self._kept.told])).min()))
        super().settle(step, updates)

    def _tell(self, step: int, drawn: DrawnBatch) -> tuple[ShardedDraw, NDArray[np.int64], BatchLengths]:
        """Step 3a: the draw with the rows of all shards, the version of each row, and their lengths.

        Raises `CommonError` on all ranks where the leader of a shard has lost rows for good.
        """
        found = drawn.found[0]
        assert found is not None
        message: Bytes = np.empty(0, np.uint8)
        if self._leads:
            message = self._describe(step, found)
        told = self.members.all_to_all([message] * self.group.size)
        return self._hear(found.shard, told)

    def _describe(self, step: int, found: ShardedDraw) -> Bytes:
        """What the leader of a shard tells of the shard's drawn rows."""
        places = np.flatnonzero(found.shard == self._shard)
        rows, generations, probability = found.rows[places], found.generations[places], found.probability[places]
        for attempt in range(1, MAX_ATTEMPTS + 1):
            there = np.flatnonzero(rows != NO_ROW)
            read = self._lengths.read(Keys(rows[there], generations[there]))
            lost = np.ones(len(rows), bool)
            lost[there] = read.torn() != 0
            if not lost.any():
                pieces: list[NDArray[Any]] = [rows, generations, probability, read.versions()]
                pieces += self._lengths.pack(read)
                return _message(_WHOLE, pieces)
            if not self._sampler.limited or self._kept is not None:
                break  # all ranks draw again
            again, numbers = np.flatnonzero(lost), places[lost].astype(np.uint32)
            self._sampler.note_lost(len(again), attempt)
            try:
                other = self._sampler.draw(len(again), step, {}, Redraw(attempt, numbers, rows[~lost]))
            except (EmptyStoreError, NotEnoughRowsError):
                break
            taken = self.sharded.count_mine(0, other.rows, other.generations, step, numbers)
            rows[again] = np.where(taken, other.rows, NO_ROW)
            generations[again], probability[again] = other.generations, other.probability * found.share
        return _message(_LOST, [])

    def _hear(
        self, shard: NDArray[np.int64], told: Sequence[Bytes]
    ) -> tuple[ShardedDraw, NDArray[np.int64], BatchLengths]:
        """The global batch, of what the leaders of all shards have told."""
        n, told_of = len(shard), self._lengths
        found = ShardedDraw(shard, np.zeros(n, np.uint32), np.zeros(n, np.uint32), np.zeros(n))
        version = np.zeros(n, np.int64)
        lengths = BatchLengths(
            {axis: np.zeros(n, np.int64) for axis in told_of.axes},
            {},
            {name: np.zeros(n, np.int64) for name in told_of.flags},
            replica=np.zeros(n, np.int64),  # not assigned yet
            places=np.arange(n),
        )
        sequences: list[tuple[NDArray[np.intp], dict[str, NDArray[np.int64]]]] = []
        messages = [_Message(told[leader], leader) for leader in self.members.stores[0].leaders]
        lost = [message.take(np.int64, 1)[0] == _LOST for message in messages]
        if any(lost):
            raise self._lost_rows(self.members.stores[0].leaders[lost.index(True)])
        for number, message in enumerate(messages):
            mine = np.flatnonzero(shard == number)
            found.rows[mine] = message.take(np.uint32, len(mine))
            found.generations[mine] = message.take(np.uint32, len(mine))
            found.probability[mine] = message.take(np.float64, len(mine))
            version[mine] = message.take(np.int64, len(mine))
            its, parts, sums = told_of.unpack(message, len(mine))
            message.end()
            for into, values in ((lengths.lengths, its), (lengths.sums, sums)):
                for name, each in values.items():
                    into[name][mine] = each
            sequences.append((mine, parts))
        for axis, by in told_of.divided.items():
            counts = lengths.lengths[by]
            starts, flat = np.cumsum(counts) - counts, np.zeros(int(counts.sum()), np.int64)
            for mine, parts in sequences:
                flat[spread(starts[mine], counts[mine])] = parts[axis]
            lengths.parts[axis] = counts, flat
        return found, version, lengths

    def _lost_rows(self, rank: int) -> CommonError:
        """What all ranks raise where one has lost rows: they draw again, unless samples are used up."""
        error = NotEnoughRowsError(f"rows of the shard that rank {rank} reads were deleted while a batch was drawn")
        return CommonError(error) if self._sampler.limited and self._kept is None else RowsLostError(error)

    def _assign(self, shard: NDArray[np.int64], lengths: BatchLengths) -> tuple[BatchLengths, NDArray[np.int64]]:
        """Step 4: the lengths of the global batch with the replica of each row, and the rank that reads each."""
        n, atom = len(shard), self._sampler.atom
        if self._cost is not None:
            cost = self._cost.of_rows(lengths)
            made = self._assigner.assign_by_cost(shard, cost, atom)
        else:
            cost = np.sum(list(lengths.lengths.values()) or [np.ones(n, np.int64)], axis=0).tolist()
            atoms = None if atom == 1 else np.full(n // atom, atom, np.int64)
            made = self._assigner.assign(shard, self._config.assignment, atoms)
        loads = np.bincount(made.replica, cost, len(self._ranks_of))
        self._newest = float(loads.max() / loads.mean()) if loads.any() else 1.0
        self._most += float(loads.max())
        self._mean += float(loads.mean())
        mine = np.flatnonzero(made.replica == self._me)
        # The rows that the replica's first rank reads come first, then those of each other rank.
        first = self.members.replicas[self._me].ranks[0]
        order = np.lexsort((mine, made.reader[mine], made.reader[mine] != first))
        lengths = dataclasses.replace(
            lengths, replica=made.replica, places=mine[order], me=self._me, replicas=len(self._ranks_of)
        )
        return lengths, made.reader

    def _exchange(
        self,
        step: int,
        drawn: ShardedDraw,
        version: NDArray[np.int64],
        lengths: BatchLengths,
        reader: NDArray[np.int64],
        count: int,
        selected_s: float,
    ) -> PackedBatch:
        """Steps 5 and 6. Raises `CommonError` on all ranks where one has lost rows."""
        rank, traffic, of_rank = self.group.rank, self.traffic, self.members.stores[0].of_rank
        read: dict[tuple[int, int], _native.PackedArrays] = {}  # by replica, and the rank that has to read them
        lost, sent = False, dict[int, list[Bytes]]()
        for number in np.unique(lengths.replica[reader == rank]).tolist():
            far = [each for each in self._ranks_of[number] if of_rank[each] != self._shard]
            if far:
                found, torn = self._read(drawn, np.flatnonzero((reader == rank) & (lengths.replica == number)))
                read[number, rank], lost = found, lost or torn
                sent |= dict.fromkeys(far, MovedRows.pack(self._reader, found))
                traffic.sent_bytes += len(far) * found.nbytes
        # The rows of this replica by the ranks that read them, in the order of its batch.
        readers = reader[lengths.places]
        its = {each: lengths.places[readers == each] for each in dict.fromkeys(readers.tolist())}
        for peer, places in its.items():
            if of_rank[peer] == self._shard and (self._me, peer) not in read:
                read[self._me, peer], torn = self._read(drawn, places)
                lost |= torn
        read_s = time.perf_counter()
        messages = [
            _message(_LOST, []) if lost else _message(_WHOLE, sent.get(peer, ())) for peer in range(self.group.size)
        ]
        received = [_Message(each, peer) for peer, each in enumerate(self.members.all_to_all(messages))]
        failed = [peer for peer, message in enumerate(received) if message.take(np.int64, 1)[0] == _LOST]
        if failed:
            raise self._lost_rows(failed[0])
        parts: list[_native.PackedArrays | MovedRows] = []
        for peer, places in its.items():
            own = read.get((self._me, peer))
            if own is not None:
                traffic.local_bytes += own.nbytes
                parts.append(own)
            else:
                moved = MovedRows(self._reader, self._none, received[peer], lengths, places)
                traffic.received_bytes += moved.nbytes
                parts.append(moved)
        for message in received:
            message.end()
        traffic.fetch_s += read_s - selected_s
        traffic.exchange_s += time.perf_counter() - read_s
        return self._batch(step, drawn, version, lengths, parts, count)

    def _read(self, drawn: ShardedDraw, places: NDArray[np.int64]) -> tuple[_native.PackedArrays, bool]:
        """Rows of this rank's shard, and whether some of them are gone."""
        found = self._reader.read(Keys(drawn.rows[places], drawn.generations[places]))
        return found, bool(found.torn().any())

    def _batch(
        self,
        step: int,
        drawn: ShardedDraw,
        version: NDArray[np.int64],
        lengths: BatchLengths,
        parts: Sequence[_native.PackedArrays | MovedRows],
        count: int,
    ) -> PackedBatch:
        places = lengths.places
        found: PackedValues = self._none
        if parts:
            only = parts[0] if len(parts) == 1 else None
            found = only if isinstance(only, _native.PackedArrays) else JoinedRows(self._reader.plan, parts, lengths)
        keys = Keys.of_rows(
            drawn.rows[places],
            drawn.generations[places],
            self.members.shard_ids[drawn.shard[places]],
            shard=drawn.shard[places].astype(np.uint16),
            draw=places,
        )
        probability, weights = drawn.probability[places], None
        if self.has_importance:
            lowest = float(drawn.probability.min(initial=1.0))
            its = Draw(keys.row, keys.generation, probability, lowest=lowest)
            weights = importance_of(self._sampler.strategy, its, count, step)
        return packed_batch(
            self._reader,
            self._sampler.plan.output,
            found,
            keys,
            version[places],
            probability=probability,
            importance_weights=weights,
            step=step,
            lengths=lengths,
        )

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
        super().close()

    def stats(self, make_s: float) -> dict[str, Any]:
        """Also the balance of costs: of the largest of a rank over the mean."""
        together = self._most / self._mean if self._mean else 1.0
        return super().stats(make_s) | {"balance": together, "balance_newest": self._newest or 1.0}


def _message(state: int, pieces: Sequence[NDArray[Any]]) -> Bytes:
    """One message: its state, and arrays one behind the other."""
    return np.concatenate([flat_bytes(np.array([state], np.int64)), *(flat_bytes(piece) for piece in pieces)])


__all__ = ["PackedRankRows"]
