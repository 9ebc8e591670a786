"""Data placement: stores rows in the shards whose hosts train on them, so that few rows move during training.

With `assignment="local_first"` a replica trains on rows of its own host while a batch has any, and only the surplus
moves (GEAR, section 3.2). The surplus is least if each shard's share of the priorities (or rows) equals its reader
share. The reader share of a shard is the share of replicas whose first reader has the shard locally. The first reader
of a replica is its rank with the most bytes a row. In data parallelism that is its only rank, with pipelines a rank of
the first or the last stage.

    deal       partitions a dataset: which rank inserts which rows. No communication.
    report     the shares, and the expected and measured share of rows that a batch finds on its own host.
    rebalance  moves rows between shards until the shares are right, on request.

`deal` does not cover rows of actors. An actor inserts into the shard of its own host, which costs no network.
`rebalance` corrects the resulting imbalance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from geartrain.core.arguments import (
    check_choice,
    check_flag,
    check_names_of,
    check_real,
    check_type,
    check_whole,
    default_threads,
    optional,
    shown,
    timeout,
)
from geartrain.core.lifetime import Closing
from geartrain.core.progress import Progress
from geartrain.errors import ArgumentError, PeerLostError
from geartrain.placement.balance import deal, expected_up_to, flows
from geartrain.placement.moves import RowMover
from geartrain.placement.report import By, PlacementReport, RebalanceResult, ShardStatus
from geartrain.ranks.rank_group import RankGroup, SingleRank
from geartrain.ranks.topology import MeshPosition, topology_of
from geartrain.ranks.torch_rank_group import as_rank_group
from geartrain.replay.distributed.assignment import assign
from geartrain.replay.distributed.members import Members, check_same
from geartrain.replay.distributed.messages import PROTOCOL
from geartrain.replay.fetch_plan import FetchPlan
from geartrain.replay.windows import as_windows
from geartrain.store.store import Store

# Rounds of planning and moving, at most. One is enough unless a shard was full before others had made room.
MAX_ROUNDS = 16
# Simulated batches from which the local share of a pipeline is estimated.
SIMULATED = 64


class Placement(Closing, elsewhere="each rank makes its own, in its process"):
    """Places rows in the shards of the hosts that train on them. Every rank makes one, with the same arguments.

    Args:
        store: this rank's shard. In a mixture, make one placement for each store.
        group, mesh, inputs, targets, window: as for `Replay`. Without group and mesh the process is the only rank.
        by: what rows are drawn by: "priority" for `Prioritized` and similar strategies, "rows" for `Uniform`.
        timeout_s: longest wait for the other ranks in each call, in seconds.

    Raises:
        ArgumentError: an argument does not fit the store.
        FieldError: the store has no such field.
        RanksDisagreeError: the ranks have different arguments.
        PeerLostError: a rank did not join, or is lost.

    Examples:
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
        check_type("a placement is of a Store, this rank's shard", store, Store)
        check_choice("by", by, ("priority", "rows"))
        timeout(timeout_s)
        for what, names in (("inputs", inputs), ("targets", targets)):
            optional(check_names_of, what, names, empty=True)
        optional(check_whole, "window", window, 1, 2**31 - 1)
        if inputs is None and targets is None:
            inputs = targets = list(store.fields)
        inputs, targets = list(inputs or ()), list(targets or ())
        for name in [*inputs, *targets]:
            store.field_number(name)
        self.store = store
        self.by: By = by
        # Whole rows of all fields, as raw bytes. The order of fields is the same on all ranks, whatever their stores'.
        names = sorted(store.fields)
        self._rows = FetchPlan(store, names, None, False, "numpy", default_threads(None))
        self.row_bytes = sum(self._rows.row_bytes(name) for name in names)
        self._scale = 2.0 ** store.options["priority_fraction_bits"]
        self._group: RankGroup = SingleRank()
        position = MeshPosition()
        if group is not None or mesh is not None:
            topology = topology_of(group, mesh)
            self._group, position = as_rank_group(group, topology.members, timeout_s), topology.position
        try:
            self._members = self._gather_members(position, inputs, targets, window)
            self._mover = RowMover(self._members, self._rows, by == "priority")
            self._map_readers()
            self.shards: tuple[ShardStatus, ...] = ()
            self.refresh()
        except BaseException:
            if self._group is not group:
                self._group.close()
            raise

    def _gather_members(
        self, position: MeshPosition, inputs: list[str], targets: list[str], window: int | None
    ) -> Members:
        job: dict[str, Any] = {
            "protocol": PROTOCOL,
            "by": self.by,
            "inputs": inputs,
            "targets": targets,
            "window": window,
        }
        for name in ("priority_fraction_bits", "priority_per"):
            job[name] = self.store.options[name]
        for name, spec in self.store.fields.items():
            job[f"field {name!r}"] = (
                f"{spec.dtype} {spec.block_shape(self.store.max_length)}{' without time' if spec.per_row else ''}"
            )
        fields = list(
            dict.fromkeys([*(inputs if position.is_first_stage else ()), *(targets if position.is_last_stage else ())])
        )
        read = FetchPlan(self.store, fields, as_windows(window), True, "numpy", 1)
        store_id = self.store.id
        return Members(self._group, position, job, [store_id], fields, sum(map(read.row_bytes, fields)))

    def _map_readers(self) -> None:
        """The bytes of a batch read from each shard, and its reader share."""
        (shards,) = self._members.stores
        self._shard_of, self._shard_ranks = shards.of_rank, shards.ranks
        self.shard = self._shard_of[self._group.rank]
        # Bytes a row that each rank reads; tensor-parallel peers get copies.
        self._bytes_read = [0] * self._group.size
        for consumer in self._members.consumers:
            self._bytes_read[consumer.rank] = self._members.row_bytes[consumer.rank]
        firsts = [self._shard_of[replica.ranks[0]] for replica in self._members.replicas]
        self._reader_share: NDArray[np.float64] = np.bincount(firsts, minlength=len(self._shard_ranks)) / len(firsts)
        reads = np.bincount(self._shard_of, self._bytes_read, minlength=len(self._shard_ranks))
        self._reads: NDArray[np.float64] = reads / reads.sum()

    @property
    def _leads(self) -> bool:
        return self._members.leads(0)

    # --- status --------------------------------------------------------------------------------------------

    def refresh(self) -> tuple[ShardStatus, ...]:
        """All-gathers the status of the shards, which `deal` uses.

        The constructor, `report` and `rebalance` call it.
        """
        native = self.store.native
        if self._leads and self.store.options["max_age_s"] is not None:
            self.store.expire()
        amount = native.total_priority() if self.by == "priority" else len(self.store)
        every = self._members.all_gather_shards(
            0, np.array([len(self.store), self._mover.free_rows(), amount], np.uint64)
        )
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
                zip(self._shard_ranks, every.tolist(), amounts, strict=True)
            )
        )
        return self.shards

    def report(self, replay: Any = None, *, batch_size: int | None = None) -> PlacementReport:
        """Reports the shares of the shards, and the local share of batches. Collective: every rank calls it.

        Args:
            replay: this rank's `Replay`, for the measured local share; on all ranks or on none.
            batch_size: rows of the global batch; by default the replay's.

        Raises:
            ArgumentError: the batch cannot be divided evenly among the replicas.
            RanksDisagreeError: only some ranks passed a replay, or the batches differ in size.
        """
        if replay is not None and not all(hasattr(replay, what) for what in ("batch_size", "stats")):
            raise ArgumentError(f"replay is this rank's Replay, found {shown(replay)}")
        if batch_size is None and replay is not None:
            batch_size = int(replay.batch_size)
        batch_size = None if batch_size is None else check_whole("batch_size", batch_size)
        if batch_size is not None and not batch_size < 2**31:
            raise ArgumentError(f"batch_size is below 2**31, found {shown(batch_size)}")
        replicas = len(self._members.replicas)
        if batch_size is not None and (batch_size < 1 or batch_size % replicas):
            raise ArgumentError(
                f"a global batch of {batch_size} rows cannot be divided evenly over {replicas} data-parallel replicas"
            )
        moved = None
        if replay is not None:
            stats = replay.stats()
            # A replay of one rank has no such statistics: all it reads is local.
            moved = (stats.get("local_bytes", stats["bytes"]), stats.get("received_bytes", 0))
        shards = self.refresh()
        every = self._group.all_gather_object((batch_size, moved))
        for rank, (size, figures) in enumerate(every):
            check_same("batch_size", every[0][0], size, rank)
            check_same("the replay", "given" if every[0][1] else "missing", "given" if figures else "missing", rank)
        measured = None
        if moved is not None:
            local, received = np.array([figures for _, figures in every], np.float64).sum(0)
            measured = float(local / (local + received)) if local + received else None
        expected, method = self._expect(np.array([shard.share for shard in shards]), batch_size)
        return PlacementReport(shards, self.by, batch_size, expected, method, measured)

    def _expect(
        self, share: NDArray[np.float64], batch_size: int | None
    ) -> tuple[float | None, Literal["exact", "simulated"] | None]:
        """The expected local share of batches."""
        if batch_size is None or not share.any():
            return None, None
        replicas, copies = (
            self._members.replicas,
            self._members.position.tp_size,
        )  # all copies but one cross the network
        if all(len(set(replica.local_shards)) == 1 for replica in replicas):
            # A shard's draws are local up to the number of rows that its local replicas train on.
            here = np.rint(self._reader_share * batch_size).astype(np.int64)
            local_rows = sum(
                expected_up_to(batch_size, float(p), int(most)) for p, most in zip(share, here, strict=True) if most
            )
            return local_rows / (batch_size * copies), "exact"
        local = np.zeros((len(replicas), len(share)))  # bytes a row, of each replica and shard
        for number, replica in enumerate(replicas):
            for rank in replica.ranks:
                local[number, self._shard_of[rank]] += self._bytes_read[rank]
        delivered = batch_size * copies * sum(self._bytes_read) / len(replicas)
        rng = np.random.default_rng(0)
        local_bytes = 0.0
        for _ in range(SIMULATED):
            shard = np.minimum(np.searchsorted(share.cumsum(), rng.random(batch_size), side="right"), len(share) - 1)
            assigned = assign(shard.astype(np.int64), replicas, self._shard_ranks, "local_first")
            local_bytes += local[assigned.replica, shard].sum()
        return float(local_bytes / (SIMULATED * delivered)), "simulated"

    # --- rows of a dataset ----------------------------------------------------------------------------------------

    def deal(self, priorities: ArrayLike) -> NDArray[np.int64]:
        """Partitions a dataset among the shards: the shard of each row, (n,) int64, the same on all ranks.

        Each shard gets the part of the priorities that the ranks on its host train on (its reader share). Rows that it
        holds already count, as of the last `refresh`: call that before you deal the next dataset. The few thousand rows
        of highest priority are dealt one by one, each to the shard that lacks most. The others are dealt in turns by
        descending priority, so that every shard gets the same distribution of priorities. Full shards are skipped. The
        rest goes to the shards of a pipeline's other readers, and then to shards without readers, in proportion to
        their free rows.

        Args:
            priorities: (n,) finite and >= 0, the same on all ranks: the priorities that the rows will be inserted with,
                or ones. All zeros count as ones.

        Raises:
            ArgumentError: a priority is negative or not finite, or the shards have fewer free rows than n.

        Cost: no communication; two sorts and a few scans, and less than 200 bytes of memory a row.
        """
        likely = self._checked_priorities(priorities)
        n = len(likely)
        free = np.array([shard.free for shard in self.shards], np.int64)
        if n > free.sum():
            raise ArgumentError(
                f"{n} rows do not fit: all shards together have {free.sum()} free rows "
                f"({', '.join((f'{each} in shard {number}' for number, each in enumerate(free)))}). Create "
                "the stores with more capacity, or deal fewer rows"
            )
        amount = np.array([shard.amount for shard in self.shards])
        return deal(likely, amount, self._reader_share, self._reads, free)

    def mine(self, priorities: ArrayLike) -> NDArray[np.int64]:
        """Rows of a dataset that this rank inserts: their numbers, (k,) int64, ascending.

        The rows that `deal` gives to a shard are split into contiguous parts for its ranks.

        Args:
            priorities: as for `deal`.

        Raises:
            ArgumentError: as for `deal`.
        """
        rows = np.flatnonzero(self.deal(priorities) == self.shard)
        ranks = self._shard_ranks[self.shard]
        return np.array_split(rows, len(ranks))[ranks.index(self._group.rank)].astype(np.int64)

    def _checked_priorities(self, priorities: ArrayLike) -> NDArray[np.float64]:
        if hasattr(priorities, "detach"):
            priorities = priorities.detach().cpu()
        try:
            given = np.asarray(priorities)
        except (TypeError, ValueError):  # lists of several lengths
            given = np.zeros((), object)
        if given.dtype.kind not in "biuf" and given.size:
            raise ArgumentError(f"priorities are numbers, one for each row of the dataset; found {shown(priorities)}")
        likely = given.astype(np.float64)
        if likely.ndim != 1:
            raise ArgumentError(f"priorities are one number for each row of the dataset, (n,), found {likely.shape}")
        if len(likely) >= 2**32:
            raise ArgumentError(f"at most 2**32 - 1 rows can be dealt at once, found {len(likely)}")
        bad = np.flatnonzero(~(np.isfinite(likely) & (likely >= 0)))
        if len(bad):
            raise ArgumentError(f"priorities are finite and >= 0, found {likely[bad[0]]} for row {bad[0]}")
        if self.by == "rows" and len(likely) and likely.min() != likely.max():
            raise ArgumentError("with by='rows' all rows have the same priority: pass ones, or use by='priority'")
        if self.by == "rows" or not likely.any():
            return np.ones(len(likely))
        return likely

    # --- moving rows ----------------------------------------------------------------------------------------------

    def rebalance(
        self, *, tolerance: float = 0.05, max_bytes: int | None = None, progress: bool = False
    ) -> RebalanceResult:
        """Moves rows between shards until each has its reader share. Collective: every rank calls it.

        Call it between steps, after `replay.settle()` and while no process inserts. Otherwise concurrent priority
        updates may be lost, and writers may fill the room that rows move into, so that rows are evicted.

        Rows move from shards above their reader share to shards below it that have free rows. The rows of highest
        priority move first, so that the fewest bytes move; with by="rows" the newest. A row is committed in its new
        shard before it is removed from the old one. If the job is killed in between, some rows exist twice and none is
        lost.

        A row keeps its fields, length, priority, version and number of samples. Its key is new, so keys of earlier
        batches are stale. Its age and its place in the order of commits start again (`Fifo` draws it again).

        Args:
            tolerance: nothing moves while all shares are within this of their reader shares.
            max_bytes: most bytes of fields to move; None for no limit.
            progress: show a progress bar, on the first rank.

        Raises:
            ArgumentError: `tolerance` or `max_bytes` is out of range, or the store has priority_per="step".
            RanksDisagreeError: the ranks have different arguments.
            PeerLostError: a rank is lost. Some rows may exist twice; the segments stay and can be adopted.

        Cost: each moved row is copied out, sent and copied in, in messages of 32 MB, with one message in memory at a
        time. One scan of the metadata of shards that rows leave.
        """
        if self.store.per_step:
            raise ArgumentError(
                f"the store {self.store.name!r} has priority_per='step', whose rows cannot be moved: save a "
                "checkpoint and load it into other shards instead"
            )
        check_real("tolerance", tolerance, 0, 1)
        optional(check_whole, "max_bytes", max_bytes, 0)
        check_flag("progress", progress)
        arguments = self._group.all_gather_object((tolerance, max_bytes))
        for rank, (their_tolerance, their_bytes) in enumerate(arguments):
            check_same("tolerance", arguments[0][0], their_tolerance, rank)
            check_same("max_bytes", arguments[0][1], their_bytes, rank)
        try:
            return self._rebalance(tolerance, max_bytes, progress)
        except BaseException as error:
            # The job is over and may be restarted: the segment stays in shared memory, to be adopted.
            self.store.native.keep_segment()
            if not isinstance(error, PeerLostError):
                self._group.abort(f"{type(error).__name__}: {error}")
            raise

    def _rebalance(self, tolerance: float, max_bytes: int | None, progress: bool) -> RebalanceResult:
        shards = self.refresh()
        before = tuple(shard.share for shard in shards)
        moved = 0
        for _ in range(MAX_ROUNDS):
            chosen = self._mover.choose(self._flows(shards, tolerance))
            left = None if max_bytes is None else max_bytes // self.row_bytes - moved
            counts = self._mover.fit(chosen, [shard.free for shard in shards], left)
            if not counts.any():
                break
            with Progress("rebalance", int(counts.sum()), unit="rows", enabled=progress and self._leads) as bar:
                mine = self._mover.move(chosen, counts, bar)
            done = int(self._members.all_gather_shards(0, np.array([mine], np.int64)).sum())
            shards = self.refresh()
            moved += done
            if not done:
                break
        return RebalanceResult(moved, moved * self.row_bytes, before, tuple(shard.share for shard in shards))

    def _flows(self, shards: Sequence[ShardStatus], tolerance: float) -> NDArray[np.float64]:
        amount = np.array([shard.amount for shard in shards])
        free = np.array([shard.free for shard in shards], np.int64)
        return flows(amount, self._reader_share, free, tolerance)

    # --- leaving --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leaves the group. The store stays open."""
        self._group.close()

    def __repr__(self) -> str:
        return f"Placement({self.store!r}, by={self.by!r}, shard {self.shard} of {len(self._shard_ranks)})"


__all__ = ["Placement"]
