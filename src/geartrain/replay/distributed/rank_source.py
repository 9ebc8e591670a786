"""`RankSource`: what all sources of batches from the shards of many ranks have in common.

A source has the ranks draw each batch together, until all of them have all of their rows. It sends priority updates
along with the draws, and leaves the group when this rank fails. How rows are read and moved is a subclass's own:
rank_rows.py for rows and windows of equal shapes, packed_rank_rows.py for rows of any length.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import geartrain._native as _native
from geartrain.errors import PeerLostError, StoreClosedError
from geartrain.ranks.rank_group import RankGroup
from geartrain.ranks.topology import MeshPosition
from geartrain.replay.admission import Admission
from geartrain.replay.builder import BuiltBatch, PriorityUpdate, RowSource, State, check_priorities
from geartrain.replay.config import ReplayConfig
from geartrain.replay.distributed.fingerprint import fingerprint_of
from geartrain.replay.distributed.members import join_job
from geartrain.replay.distributed.rank_waits import ShardAdmission, wait_for_rows
from geartrain.replay.distributed.sharded_sampler import CommonError, DrawAgainError, ShardedSampler, TooFewRowsError
from geartrain.replay.sampler import MAX_ATTEMPTS, StoreSampler
from geartrain.selection.mixture import Selection
from geartrain.store.priorities import check_keys_of


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


class Together:
    """Steps that all ranks take: a rank that fails within them leaves the group, and all others fail as well.

    An error that all ranks have alike leaves it as it is.

    Args:
        group: the rank group.
        samplers: of this rank's shards.
    """

    def __init__(self, group: RankGroup, samplers: Sequence[StoreSampler]) -> None:
        self._group = group
        self._samplers = samplers

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        if isinstance(error, CommonError):
            raise error.error from None
        self.abort(str(error) if isinstance(error, PeerLostError) else f"{type(error).__name__}: {error}")

    def abort(self, reason: str) -> None:
        """Leaves the group at once and tells the other ranks why; the segments stay in shared memory."""
        for sampler in self._samplers:
            with contextlib.suppress(StoreClosedError):  # it may be why this rank leaves
                sampler.plan.store.native.keep_segment()
        self._group.abort(reason)


class RankSource(RowSource):
    """This rank's part of the global batch of each step, drawn together with all other ranks.

    See `geartrain.replay.builder.RowSource`.

    Args:
        samplers: of this rank's shards, one for each store.
        selection: the strategy, or the mixture.
        config: of the replay; its batch is the global one.
        group: the rank group.
        position: this rank's position in the mesh.

    Attributes:
        admission: of each batch by the rate limiters of this rank's shards.
        together: the context of steps that all ranks take.
        sharded: draws from the shards of all ranks.
        has_importance: whether rows have importance weights.
        exchange: used by native code to exchange messages with other ranks; set by the subclass.

    Raises:
        RanksDisagreeError: the ranks differ in strategy, seed, schema or sizes.
        ArgumentError: the batch cannot be divided evenly.
    """

    collective = True
    exchange: _native.RankExchange

    def __init__(
        self,
        samplers: list[StoreSampler],
        selection: Selection,
        config: ReplayConfig,
        group: RankGroup,
        position: MeshPosition,
    ) -> None:
        self.samplers = samplers
        self.group = group
        self.update_lag = config.prefetch + config.extra_lag
        self.traffic = Traffic()
        self.together = Together(group, samplers)
        self.has_importance = any(sampler.traits.importance for sampler in samplers)
        self.members = join_job(group, position, samplers, selection, config)
        self.store_ids: list[int] = self.members.shard_ids.tolist()
        self.rows = config.batch_size // len(self.members.replicas)
        self.admission = ShardAdmission(samplers, self.members, selection, config.batch_size)
        self.sharded = ShardedSampler(samplers, self.members, fingerprint_of(self.members.job))

    # --- a batch ------------------------------------------------------------------------------------------------

    def at_work(self) -> AbstractContextManager[None]:
        """Held while a batch is built."""
        return contextlib.nullcontext()

    def start(self, step: int, state: State, updates: list[PriorityUpdate], admission: Admission) -> Any:
        """This rank's part of the batch is finished when this returns.

        Raises:
            EmptyStoreError, NotEnoughRowsError: on all ranks alike; the replay can go on.
            PeerLostError: a rank failed or is lost; the replay is over.
        """
        began_s = time.perf_counter()
        with self.at_work(), self.together:
            self.admission.wait(step, admission)
            return self.build(step, state, updates, admission, began_s)

    def build(
        self, step: int, state: State, updates: list[PriorityUpdate], admission: Admission, began_s: float
    ) -> BuiltBatch:
        """The batch of a step that was admitted: drawn by all ranks together, until all of them have all of their rows.

        Another attempt is a round of messages, in which all ranks learn of lost rows, and so no loop of native code.
        """
        used, attempt = list(self.sharded.cursors), 1
        while True:
            try:
                return self.build_once(step, state, updates, admission, began_s)
            except TooFewRowsError as error:
                wait_for_rows(error, self.samplers, self.members)  # on all ranks, which then count again
            except CommonError as error:
                self.sharded.cursors[:] = used  # no one has got what was redrawn for this batch
                if attempt == MAX_ATTEMPTS or not isinstance(error, DrawAgainError):
                    raise  # on all ranks; otherwise all of them draw again from what there is now
                attempt += 1
            finally:
                for sampler in self.samplers:
                    sampler.note_used_up(admission)

    @abstractmethod
    def build_once(
        self, step: int, state: State, updates: list[PriorityUpdate], admission: Admission, began_s: float
    ) -> BuiltBatch:
        """The batch, drawn once. Raises `TooFewRowsError` or `DrawAgainError` on all ranks to have it repeated."""

    # --- priorities, state, leaving -------------------------------------------------------------------------------

    def submit_updates(self, update: PriorityUpdate, step: int) -> int | None:
        """They go to the rows' shards with the next batch."""
        keys, priorities = update.keys, update.priorities
        check_priorities(priorities)
        if len(keys):
            check_keys_of(keys, per_step=self.samplers[0].plan.store.per_step, whose="a store of this replay")
            self.members.shard_of(keys)
        return None

    def settle(self, step: int, updates: list[PriorityUpdate]) -> None:
        """Steps 1 and 2 alone: applies the priority updates of all ranks. Raises `PeerLostError`."""
        with self.together:
            self.sharded.settle(step, updates, self.exchange)

    def rewind(self) -> None:
        """Forgets the redraws of later batches, before the state of an earlier one is loaded."""
        self.sharded.rewind()

    def stats(self, make_s: float) -> dict[str, Any]:
        """This rank's `Traffic`, and the share of bytes read on its own host."""
        traffic: dict[str, Any] = dataclasses.asdict(self.traffic)
        moved = traffic["local_bytes"] + traffic["received_bytes"]
        traffic["local_share"] = traffic["local_bytes"] / moved if moved else 1.0
        return traffic | {f"peers_by_{name}": count for name, count in self.group.peers().items()}

    def abort(self, reason: str) -> None:
        self.together.abort(reason)

    def close(self) -> None:
        """Leaves the group."""
        self.sharded.close()
        self.group.close()


__all__ = ["RankSource", "Together", "Traffic"]
