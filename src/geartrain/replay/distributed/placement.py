"""Which shard rows belong in, so that few of them have to move in training (GEAR, section 3.2).

With `assignment="local_first"` a replica trains on rows of its own host as far as a batch has any. What moves is what a
shard is drawn more often for than the replicas beside it train on. So rows lie best where each shard's share of what
selection looks at, its reader share, is the share of replicas that read from it first. The first reader of a replica
is its rank that reads most bytes a row: the only one in data parallelism, the head or the tail of a pipeline.

    deal       rows of a dataset: who inserts which, so that shares come out right. No communication.
    report     shares as they are, and what they come to: rows that a batch finds on its own host.
    rebalance  moves rows until shares are right, on request.

Rows that actors make while training goes on are not dealt: they are written to the shard of the host they are made on,
which costs no network, and `rebalance` evens out what that leads to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from geartrain.core.arguments import default_threads, timeout
from geartrain.core.progress import Progress
from geartrain.errors import ArgumentError, PeerLostError
from geartrain.replay.distributed.assignment import assign
from geartrain.replay.distributed.balance import deal, expected_up_to, flows, heaviest_within, meetings
from geartrain.replay.distributed.members import Members, agree
from geartrain.replay.distributed.messages import BOOK, Box, message_of
from geartrain.replay.distributed.rank_group import Bytes, Message, OneRank, Ranks, join
from geartrain.replay.distributed.topology import Place, topology_of
from geartrain.replay.fetch import Plan
from geartrain.store.store import Store

By = Literal["priority", "rows"]

# Rows travel in messages of at most so many bytes, or one row.
PIECE_BYTES = 32 << 20
# Rounds of planning and moving; one is enough but where a shard was out of room before others had made some.
MAX_ROUNDS = 16
# Batches that are made up to estimate the local share of a pipeline.
SIMULATED = 64

# What travels of a row beside its fields and its `serving.BOOK`. A row that was gone has generation 0 in its book.
LEDGER = np.dtype([("priority", "<f8"), ("times_sampled", "<u4"), ("reserved", "<u4")])


@dataclass(frozen=True)
class ShardStatus:
    """A shard as it was when ranks last told each other.

    Attributes:
        ranks: those that have it attached; the first speaks for it.
        rows: that can be selected.
        free: rows that can be inserted before others have to make room.
        bytes: of the fields of its rows.
        amount: its priorities, or its rows; what selection looks at.
        share: of the amounts of all shards; 0 where there is none.
        reader_share: of the replicas, those that read from it first.
        reads: of the bytes of a batch, those that its ranks read.
    """

    ranks: tuple[int, ...]
    rows: int
    free: int
    bytes: int
    amount: float
    share: float
    reader_share: float
    reads: float


@dataclass(frozen=True)
class Report:
    """How rows lie; `print` it.

    Attributes:
        shards: in their order in the population.
        by: what shares are of, priorities or rows.
        batch_size: that the expectation is for.
        expected_local_share: of the bytes delivered, those that come from the host's own shard, for independent draws
            and `assignment="local_first"`; None without a batch size, or rows.
        method: "exact", by the binomial distribution of each shard's draws; "simulated" from 64 batches, where ranks of
            a replica read from different shards.
        measured_local_share: over all ranks, since their replays were made; None without a replay, or before its
            first batch.
    """

    shards: tuple[ShardStatus, ...]
    by: By
    batch_size: int | None
    expected_local_share: float | None
    method: Literal["exact", "simulated"] | None
    measured_local_share: float | None

    def __str__(self) -> str:
        lines = [f"shard      ranks        rows        free         MB  {self.by + ' share':>12}  reader share"]
        for number, shard in enumerate(self.shards):
            lines.append(
                f"{number:5}  {_ranks_in_words(shard.ranks):>9}  {shard.rows:10,}  {shard.free:10,}  "
                f"{shard.bytes / 1e6:9,.1f}  {shard.share:12.1%}  {shard.reader_share:12.1%}"
            )
        if self.expected_local_share is not None:
            lines.append(
                f"expected local share of a batch of {self.batch_size}: {self.expected_local_share:.1%} ({self.method})"
            )
        if self.measured_local_share is not None:
            lines.append(f"measured local share: {self.measured_local_share:.1%}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Moved:
    """What rebalancing came to, of all ranks together.

    Attributes:
        rows: that are in another shard now.
        bytes: of their fields.
        shares_before, shares_after: each shard's share of the priorities, or of the rows.
    """

    rows: int
    bytes: int
    shares_before: tuple[float, ...]
    shares_after: tuple[float, ...]


class Placement:
    """Places rows near those who will read them. Every rank makes one, alike, as it makes its `Replay`.

    Args:
        store: this rank's. One placement is for one population; a mixture's stores take one each.
        group, mesh, inputs, targets, window: as the replay has them. With neither group nor mesh the process is alone.
        by: what selection looks at: "priority" for `Prioritized` and the like, "rows" for `Uniform`.
        timeout_s: longest wait for another rank.

    Raises:
        ArgumentError, FieldError: what was asked for does not fit the store.
        RanksDisagreeError: the ranks were set up differently.
        PeerLostError: a rank did not come, or is gone.

    Example:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> store = gt.Store.create("doc-placement", {"x": gt.Field((2,), "float32")}, max_length=10, capacity=4)
        >>> with Placement(store) as placement:
        ...     mine = placement.mine(np.array([0.5, 0.1, 2.0]))
        ...     _ = store.insert({"x": np.zeros((len(mine), 10, 2), np.float32)})
        ...     placement.report(batch_size=8).expected_local_share
        1.0
        >>> store.close()
    """

    def __init__(
        self,
        store: Store,
        *,
        group: Any = None,
        mesh: Any = None,
        by: By = "priority",
        inputs: Sequence[str] | None = None,
        targets: Sequence[str] | None = None,
        window: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if by not in ("priority", "rows"):
            raise ArgumentError(f"by is 'priority' or 'rows', found {by!r}")
        timeout(timeout_s)
        if isinstance(inputs, str) or isinstance(targets, str):
            raise ArgumentError(f"inputs and targets are lists of names, found {inputs!r} and {targets!r}")
        if window is not None and not 1 <= window < 2**31:
            raise ArgumentError(f"a window has at least one step, found window={window}")
        if inputs is None and targets is None:
            inputs = targets = list(store.fields)
        inputs, targets = list(inputs or ()), list(targets or ())
        for name in [*inputs, *targets]:
            store.field_number(name)
        self.store = store
        self.by: By = by
        # Whole rows of all fields, as raw bytes: what moves. Fields are in one order whatever a host's store has.
        names = sorted(store.fields)
        self._rows = Plan(store, names, 0, False, "numpy", default_threads(None))
        self.row_bytes = sum(self._rows.row_bytes(name) for name in names)
        self._scale = 2.0 ** store.options["priority_fraction_bits"]
        self._max_rows = int(store.options["max_rows"])
        self._ranks: Ranks = OneRank()
        place = Place()
        if group is not None or mesh is not None:
            topology = topology_of(group, mesh)
            self._ranks, place = join(group, topology.members, timeout_s), topology.place
        try:
            self._members = self._introduce(place, inputs, targets, window)
            self._map_readers()
            self.shards: tuple[ShardStatus, ...] = ()
            self.refresh()
        except BaseException:
            if self._ranks is not group:
                self._ranks.close()
            raise

    def _introduce(self, place: Place, inputs: list[str], targets: list[str], window: int | None) -> Members:
        job: dict[str, Any] = {"by": self.by, "inputs": inputs, "targets": targets, "window": window}
        job["priority_fraction_bits"] = self.store.options["priority_fraction_bits"]
        for name, spec in self.store.fields.items():
            job[f"field {name!r}"] = (
                f"{spec.dtype} {spec.block_shape(self.store.max_length)}{' without time' if spec.per_row else ''}"
            )
        fields = list(dict.fromkeys([*(inputs if place.is_head else ()), *(targets if place.is_tail else ())]))
        read = Plan(self.store, fields, window or 0, True, "numpy", 1)
        store_id = self.store.native.describe()["store_id"]
        return Members(self._ranks, place, job, [store_id], fields, sum(map(read.row_bytes, fields)))

    def _map_readers(self) -> None:
        """What is read from each shard, and by how many replicas first."""
        (shards,) = self._members.stores
        self._shard_of, self._servers = shards.of_rank, shards.servers
        self.shard = self._shard_of[self._ranks.rank]
        # Bytes of a row of its replica's batch, by rank; other parts of a stage get a copy from their first.
        self._bytes_read = [0] * self._ranks.size
        for consumer in self._members.consumers:
            self._bytes_read[consumer.rank] = self._members.row_bytes[consumer.rank]
        firsts = [self._shard_of[reader.ranks[0]] for reader in self._members.readers]
        self._reader_share: NDArray[np.float64] = np.bincount(firsts, minlength=len(self._servers)) / len(firsts)
        reads = np.bincount(self._shard_of, self._bytes_read, minlength=len(self._servers))
        self._reads: NDArray[np.float64] = reads / reads.sum()

    @property
    def _leads(self) -> bool:
        return self._members.leads(0)

    # --- what is there --------------------------------------------------------------------------------------------

    def refresh(self) -> tuple[ShardStatus, ...]:
        """What all shards hold now, which `deal` goes by. Collective; the constructor, `report`, `rebalance` do it."""
        native = self.store.native
        if self._leads and self.store.options["max_age_s"] is not None:
            self.store.expire()
        amount = native.total_priority() if self.by == "priority" else len(self.store)
        every = self._members.gather_shards(0, np.array([len(self.store), self._free(), amount], np.uint64))
        amounts = every[:, 2].astype(np.float64) / (self._scale if self.by == "priority" else 1.0)
        whole = float(amounts.sum())
        self.shards = tuple(
            ShardStatus(
                tuple(ranks),
                rows,
                free,
                rows * self.row_bytes,
                float(amount),
                float(amount) / whole if whole else 0.0,
                float(self._reader_share[number]),
                float(self._reads[number]),
            )
            for number, (ranks, (rows, free, _), amount) in enumerate(
                zip(self._servers, every.tolist(), amounts, strict=True)
            )
        )
        return self.shards

    def _free(self) -> int:
        """Rows that this shard takes before it evicts one."""
        counts = self.store.native.counters()
        return max(0, min(counts["free"], self._max_rows - counts["committed"] - counts["open"] - counts["writing"]))

    def report(self, replay: Any = None, *, batch_size: int | None = None) -> Report:
        """How rows lie and what that comes to for batches. Collective.

        Args:
            replay: this rank's `Replay`, whose measured local share is to be told; on all ranks or none.
            batch_size: rows of the global batch; by default the replay's.

        Raises:
            ArgumentError: the batch cannot be shared out evenly.
            RanksDisagreeError: a replay on some ranks only, or batches of different sizes.
        """
        if batch_size is None and replay is not None:
            batch_size = int(replay.batch_size)
        replicas = len(self._members.readers)
        if batch_size is not None and (batch_size < 1 or batch_size % replicas):
            raise ArgumentError(
                f"a global batch of {batch_size} rows cannot be shared out to {replicas} data-parallel replicas evenly"
            )
        moved = None
        if replay is not None:
            stats = replay.stats()
            # A replay of a process alone has no such figures: all it reads is local.
            moved = (stats.get("local_bytes", stats["bytes"]), stats.get("received_bytes", 0))
        shards = self.refresh()
        told = self._ranks.gather_objects((batch_size, moved))
        for rank, (size, figures) in enumerate(told):
            agree("batch_size", told[0][0], size, rank)
            agree("the replay", "given" if told[0][1] else "missing", "given" if figures else "missing", rank)
        measured = None
        if moved is not None:
            local, received = np.array([figures for _, figures in told], np.float64).sum(0)
            measured = float(local / (local + received)) if local + received else None
        expected, method = self._expect(np.array([shard.share for shard in shards]), batch_size)
        return Report(shards, self.by, batch_size, expected, method, measured)

    def _expect(
        self, share: NDArray[np.float64], batch_size: int | None
    ) -> tuple[float | None, Literal["exact", "simulated"] | None]:
        """The local share that is to be expected of batches."""
        if batch_size is None or not share.any():
            return None, None
        readers, copies = self._members.readers, self._members.place.tp_size  # all copies but one are moved
        if all(len(set(reader.homes)) == 1 for reader in readers):
            # A shard's draws are local up to the number that the replicas beside it train on, whatever the others'.
            here = np.rint(self._reader_share * batch_size).astype(np.int64)
            local = sum(
                expected_up_to(batch_size, float(p), int(most)) for p, most in zip(share, here, strict=True) if most
            )
            return local / (batch_size * copies), "exact"
        at_home = np.zeros((len(readers), len(share)))
        for replica, reader in enumerate(readers):
            for rank in reader.ranks:
                at_home[replica, self._shard_of[rank]] += self._bytes_read[rank]
        delivered = batch_size * copies * sum(self._bytes_read) / len(readers)
        rng = np.random.default_rng(0)
        local_bytes = 0.0
        for _ in range(SIMULATED):
            shard = np.minimum(np.searchsorted(share.cumsum(), rng.random(batch_size), side="right"), len(share) - 1)
            assigned = assign(shard.astype(np.int64), readers, self._servers, "local_first")
            local_bytes += at_home[assigned.replica, shard].sum()
        return float(local_bytes / (SIMULATED * delivered)), "simulated"

    # --- rows of a dataset ----------------------------------------------------------------------------------------

    def deal(self, priorities: ArrayLike) -> NDArray[np.int64]:
        """The shard that each row of a dataset belongs in: (n,) int64, the same on all ranks.

        Shards get their reader shares of the priorities, those they hold already counted in (as of `refresh`: call it
        before the next dataset is dealt). The few thousand likeliest rows are dealt one by one, each to the shard that
        lacks most; the others by turns from the likeliest on, so that every shard gets as many of each span of priorities
        and shares stay right when all are raised to another power. When a shard is full the others go on; when all
        that replicas read from first are, the rest, which is coldest, goes to the shards of a pipeline's other
        readers, and then to those that nobody reads from, in proportion to their free rows.

        Args:
            priorities: (n,) how likely each row will be drawn, finite and >= 0, the same on all ranks: the priorities it
                will be inserted with, or ones. Where all are 0 they stand for ones.

        Raises:
            ArgumentError: priorities that are none, or more rows than are free in all shards.

        Cost: no communication; two sorts and a few passes, below 200 bytes of memory a row.
        """
        likely = self._checked_priorities(priorities)
        n = len(likely)
        free = np.array([shard.free for shard in self.shards], np.int64)
        if n > free.sum():
            raise ArgumentError(
                f"{n} rows do not fit: {free.sum()} are free in all shards together "
                f"({', '.join(f'{each} in shard {number}' for number, each in enumerate(free))}); create the stores "
                f"with more capacity, or deal fewer rows"
            )
        amount = np.array([shard.amount for shard in self.shards])
        return deal(likely, amount, self._reader_share, self._reads, free)

    def mine(self, priorities: ArrayLike) -> NDArray[np.int64]:
        """The rows of a dataset that this rank should insert: their numbers, (k,) int64, ascending.

        The rows of a shard, as `deal` has them, are split into contiguous parts for its ranks.
        """
        rows = np.flatnonzero(self.deal(priorities) == self.shard)
        servers = self._servers[self.shard]
        return np.array_split(rows, len(servers))[servers.index(self._ranks.rank)].astype(np.int64)

    def _checked_priorities(self, priorities: ArrayLike) -> NDArray[np.float64]:
        if hasattr(priorities, "detach"):
            priorities = priorities.detach().cpu()
        likely = np.asarray(priorities, np.float64)
        if likely.ndim != 1:
            raise ArgumentError(f"priorities are one number for each row of the dataset, (n,), found {likely.shape}")
        if len(likely) >= 2**32:
            raise ArgumentError(f"at most 2**32 - 1 rows can be dealt at once, found {len(likely)}")
        bad = np.flatnonzero(~(np.isfinite(likely) & (likely >= 0)))
        if len(bad):
            raise ArgumentError(f"priorities are finite and >= 0, found {likely[bad[0]]} for row {bad[0]}")
        if self.by == "rows" and len(likely) and likely.min() != likely.max():
            raise ArgumentError("this placement is by='rows', where each is as likely; give ones, or use by='priority'")
        if self.by == "rows" or not likely.any():
            return np.ones(len(likely))
        return likely

    # --- moving rows ----------------------------------------------------------------------------------------------

    def rebalance(self, *, tolerance: float = 0.05, max_bytes: int | None = None, progress: bool = False) -> Moved:
        """Moves rows to where they are read, until shares are right. Collective.

        Rows go from shards with more than their reader share to those with less and free rows: the heaviest first,
        so that the fewest bytes move (the newest first with by="rows"). A row is committed where it goes before it is
        deleted where it was: a job that is killed in between has some rows twice, and never lost one.

        Call it between steps, after `replay.settle()` and with nobody inserting. Otherwise priorities that are updated
        meanwhile may be lost, and writers may take the room that rows are moved into, so that old ones are evicted
        for them.

        Fields, length, priority, version and count of samples of a row are kept exactly. Its key is new, so earlier
        batches' keys are stale; it counts as inserted now, in the order of commits (`Fifo` draws it again) and in its
        age.

        Args:
            tolerance: does nothing where no shard's share is further than this from its reader share.
            max_bytes: of fields, to be moved at most.
            progress: show a progress bar, on the first rank.

        Raises:
            ArgumentError: a tolerance or a number of bytes that is none.
            RanksDisagreeError: the ranks ask for different things.
            PeerLostError: a rank is gone. Rows may be there twice; the stores stay, to be adopted.

        Cost: the bytes of the rows, one copy each out, over the network and in, in messages of 32 MB; one of them at a
        time in memory. A pass over the books of the shards that rows leave.
        """
        if not 0 <= tolerance <= 1:
            raise ArgumentError(f"tolerance is a share, from 0 to 1, found {tolerance}")
        if max_bytes is not None and max_bytes < 0:
            raise ArgumentError(f"max_bytes must be at least 0, found {max_bytes}")
        asked = self._ranks.gather_objects((tolerance, max_bytes))
        for rank, (their_tolerance, their_bytes) in enumerate(asked):
            agree("tolerance", asked[0][0], their_tolerance, rank)
            agree("max_bytes", asked[0][1], their_bytes, rank)
        try:
            return self._rebalance(tolerance, max_bytes, progress)
        except BaseException as error:
            # The job is over and may be restarted: what is in shared memory stays, to be adopted.
            self.store.native.keep_segment()
            if not isinstance(error, PeerLostError):
                self._ranks.fail(f"{type(error).__name__}: {error}")
            raise

    def _rebalance(self, tolerance: float, max_bytes: int | None, progress: bool) -> Moved:
        shards = self.refresh()
        before = tuple(shard.share for shard in shards)
        moved = 0
        for _ in range(MAX_ROUNDS):
            chosen = self._choose(self._flows(shards, tolerance))
            left = None if max_bytes is None else max_bytes // self.row_bytes - moved
            counts = self._fit(chosen, shards, left)
            if not counts.any():
                break
            self._oldest_first(chosen, counts)
            with Progress("rebalance", int(counts.sum()), unit="rows", enabled=progress and self._leads) as bar:
                done = self._move(chosen, counts, bar)
            done = int(self._members.gather_shards(0, np.array([done], np.int64)).sum())
            shards = self.refresh()
            moved += done
            if not done:
                break
        return Moved(moved, moved * self.row_bytes, before, tuple(shard.share for shard in shards))

    def _flows(self, shards: Sequence[ShardStatus], tolerance: float) -> NDArray[np.float64]:
        amount = np.array([shard.amount for shard in shards])
        free = np.array([shard.free for shard in shards], np.int64)
        return flows(amount, self._reader_share, free, tolerance)

    def _choose(self, wanted: NDArray[np.float64]) -> dict[int, NDArray[np.uint32]]:
        """The rows of this shard that should go to each other: keys (n, 2), the ones to go first in front."""
        to = np.flatnonzero(wanted[self.shard])
        if not self._leads or not len(to):
            return {}
        rows, generations = self.store.native.keys()  # oldest first
        keys = np.stack([rows, generations], 1)[::-1]
        if self.by == "rows":
            amounts = np.ones(len(keys))
        else:
            infos = self.store.native.infos(np.ascontiguousarray(keys[:, 0]))
            amounts = np.where(infos["generation"] == keys[:, 1], infos["priority"], 0) / self._scale
            order = np.argsort(-amounts, kind="stable")[: int(np.count_nonzero(amounts))]
            keys, amounts = keys[order], amounts[order]
        chosen: dict[int, NDArray[np.uint32]] = {}
        for shard in to.tolist():
            index = heaviest_within(amounts, float(wanted[self.shard, shard]))
            chosen[shard] = keys[index]
            keys, amounts = np.delete(keys, index, 0), np.delete(amounts, index)
        return chosen

    def _fit(
        self, chosen: dict[int, NDArray[np.uint32]], shards: Sequence[ShardStatus], left: int | None
    ) -> NDArray[np.int64]:
        """How many rows go from each shard to each: what was chosen, as far as there is room and leave."""
        mine = np.zeros(len(shards), np.int64)
        for shard, keys in chosen.items():
            mine[shard] = len(keys)
        counts = self._members.gather_shards(0, mine)
        for shard, status in enumerate(shards):
            counts[:, shard] = np.diff(np.minimum(counts[:, shard].cumsum(), status.free), prepend=0)
        wanted = int(counts.sum())
        if left is not None and left < wanted:
            # As large a part of each flow.
            upto = counts.reshape(-1).cumsum()
            counts = np.diff([int(each) * left // wanted for each in upto], prepend=0).reshape(counts.shape)
        return counts.astype(np.int64)

    def _oldest_first(self, chosen: dict[int, NDArray[np.uint32]], counts: NDArray[np.int64]) -> None:
        """Cuts what was chosen to what goes, and lets rows keep their order among themselves."""
        for shard, keys in chosen.items():
            going = keys[: counts[self.shard, shard]]
            sequences = self.store.native.infos(np.ascontiguousarray(going[:, 0]))["sequence"]
            chosen[shard] = going[np.argsort(sequences, kind="stable")]

    def _move(self, chosen: dict[int, NDArray[np.uint32]], counts: NDArray[np.int64], bar: Progress) -> int:
        """Sends what was chosen and takes what comes; returns how many rows have left this shard."""
        bytes_each = self.row_bytes + BOOK.itemsize + LEDGER.itemsize
        done = 0
        for together in meetings(counts, max(1, PIECE_BYTES // bytes_each)):
            sends: list[Message] = []
            receives: list[Message] = []
            replies: list[tuple[bool, Message]] = []
            keys, letter = None, None
            for sender, receiver, start, count in together:
                if self._leads and sender == self.shard:
                    peer = self._servers[receiver][0]
                    keys = chosen[receiver][start : start + count]
                    sends = [(peer, piece) for piece in self._pack(keys)]
                    replies.append((False, (peer, np.zeros(count, np.uint8))))
                elif self._leads and receiver == self.shard:
                    peer = self._servers[sender][0]
                    message, arrays, books = message_of(self._rows, count)
                    ledger = np.zeros(count, LEDGER)
                    letter = arrays, books, ledger
                    receives = [(peer, message), (peer, ledger.view(np.uint8))]
                    replies.append((True, (peer, np.zeros(count, np.uint8))))
            self._ranks.exchange(sends, receives)
            if letter is not None:
                replies[-1][1][1][:] = self._insert(*letter)
            self._ranks.exchange(
                [reply for ours, reply in replies if ours], [reply for ours, reply in replies if not ours]
            )
            if keys is not None:
                # Only now, when they are committed elsewhere.
                there = keys[replies[-1][1][1] != 0]
                self.store.native.remove(np.ascontiguousarray(there[:, 0]), np.ascontiguousarray(there[:, 1]))
                done += len(there)
            count = sum(meeting[3] for meeting in together)
            bar.advance(count * self.row_bytes, count)
        return done

    def _pack(self, keys: NDArray[np.uint32]) -> tuple[Bytes, Bytes]:
        """Rows of this shard as a message, and their ledger."""
        rows, generations = np.ascontiguousarray(keys[:, 0]), np.ascontiguousarray(keys[:, 1])
        box = Box(self._rows, len(rows))
        raw = self._rows.fetch(rows, generations, None, box.arrays)
        infos = self.store.native.infos(rows)
        there = (raw.torn == 0) & (infos["generation"] == generations)
        books = box.books
        books["row"], books["generation"], books["shard"] = rows, np.where(there, generations, 0), self.shard
        books["length"], books["start"], books["steps"] = raw.lengths, 0, raw.lengths
        books["version"], books["probability"] = raw.versions, 0
        ledger = np.zeros(len(rows), LEDGER)
        ledger["priority"], ledger["times_sampled"] = infos["priority"] / self._scale, infos["times_sampled"]
        assert box.message is not None
        return box.message, ledger.view(np.uint8)

    def _insert(self, arrays: list[Any], books: NDArray[Any], ledger: NDArray[Any]) -> NDArray[np.bool_]:
        """Commits rows that have come; returns which. The last ones stay away when there is no room for them."""
        taken: NDArray[np.bool_] = books["generation"] != 0
        taken[np.flatnonzero(taken)[self._free() :]] = False
        if not taken.all():
            arrays, books, ledger = [array[taken] for array in arrays], books[taken], ledger[taken]
        if len(books):
            rows, generations = self.store.native.insert(
                len(books),
                list(zip(self._rows.numbers, arrays, strict=True)),
                books["length"].astype(np.uint32),
                np.ascontiguousarray(ledger["priority"]),
                np.ascontiguousarray(books["version"]),
                self._rows.threads,
            )
            self.store.native.set_times_sampled(rows, generations, np.ascontiguousarray(ledger["times_sampled"]))
        return taken

    # --- leaving --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leaves the group. The store stays open; it is the caller's."""
        self._ranks.close()

    def __enter__(self) -> Placement:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Placement({self.store!r}, by={self.by!r}, shard {self.shard} of {len(self._servers)})"


def _ranks_in_words(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks)) if len(ranks) <= 3 else f"{ranks[0]}, ... ({len(ranks)})"


__all__ = ["Moved", "Placement", "Report", "ShardStatus"]
