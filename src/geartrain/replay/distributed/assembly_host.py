"""Builds batches in host memory.

Native code reads rows into this rank's batch and into messages. Rows from other ranks are copied to their places.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.keys import Keys
from geartrain.ranks.rank_group import Bytes
from geartrain.replay.batch import Batch
from geartrain.replay.builder import nothing
from geartrain.replay.distributed.rank_reader import RankReader, Target
from geartrain.replay.distributed.read_agreement import ReadAgreement
from geartrain.replay.fetch_plan import FetchPlan
from geartrain.replay.native_batch import global_batch
from geartrain.replay.sampler import StoreSampler
from geartrain.selection.strategy import Draw, importance_of

if TYPE_CHECKING:
    from geartrain.replay.device.priority_mirror import DevicePriorities


_NOTHING = contextlib.nullcontext()


class HostAssembler:
    """Buffers, exchange and finished batches of one rank, here in host memory.

    Called on the replay's thread, apart from `close`. A buffer is the memory of this rank's batch, an object of the
    assembler's own kind.
    """

    def enter(self) -> None:
        """Called first on the thread that builds batches."""
        return

    def open_mirrors(self, samplers: Sequence[StoreSampler]) -> Sequence[DevicePriorities | None]:
        """For each store, the copy of this rank's shard on the device that draws may be made from; None without one.

        Raises:
            ArgumentError: select="device" was asked for, and a store's rows cannot be drawn there.
        """
        return [None for _ in samplers]

    def at_work(self) -> AbstractContextManager[None]:
        """Held while a batch is built; `close` waits for it. Raises `StoreClosedError` once closed."""
        return _NOTHING

    def buffer(self, reader: RankReader, plan: FetchPlan, n: int) -> Any:
        """A buffer for this rank's batch of n rows of a plan."""
        return reader.empty_batch(n)

    def own(self, mine: Any) -> Any:
        """A buffer as native code reads rows into it: a native batch, or a `Target`."""
        return mine

    def targets_of(self, wanted: Callable[[], Sequence[tuple[int, FetchPlan, int]]]) -> list[Target] | None:
        """Targets that native code reads the rows of each (rank, plan, rows) into; None for messages in host memory."""
        return None

    def exchange(
        self, agreement: ReadAgreement, reader: RankReader, read: _native.RankRead, mine: _native.SampledBatch | None
    ) -> int:
        """Sends rows to other ranks and puts incoming rows into this rank's batch. Collective.

        Args:
            agreement: exchanges messages; raises if a rank has lost rows.
            reader: the reader that has read the rows.
            read: the rows that it has read, and the rows to receive.
            mine: the buffer of this rank's batch; None if it gets no rows.

        Returns:
            Bytes of the fields received.
        """
        if read.outcome is not None:  # no row moves, and all ranks have told already
            agreement.check(read.outcome)
            return 0
        agreement.exchange(read.sends, read.receives, idle=not read.moves)
        return 0 if mine is None else reader.place(mine, read)

    def weigh(
        self,
        agreement: ReadAgreement | None,
        reader: RankReader,
        read: _native.RankRead,
        mine: _native.SampledBatch,
        counts: Sequence[int],
        step: int,
    ) -> NDArray[np.float64] | None:
        """Importance weights (n,) of this rank's rows, of `counts` selectable rows in each store; None without any."""
        if not reader.with_lowest or (mine.weighed and read.outcome is not None):  # `RankReader.build` has done it
            return mine.importance_weights()
        lowest = None if agreement is None else agreement.lowest
        if lowest is None:  # all ranks have told already
            lowest = np.array(read.lowest_of_all, np.float64)
        beta = reader.beta_at(step)
        if beta is not None:
            reader.native.weigh(mine, counts[0], beta, float(lowest[0]))
        else:
            rows, generations, probability = mine.rows(), mine.generations(), mine.probability()
            mine.set_importance(
                0, importance_weights(reader.samplers, read, rows, generations, probability, counts, lowest, step)
            )
        return mine.importance_weights()

    def pieces(self, mine: _native.SampledBatch) -> list[Bytes]:
        """A buffer's memory in host memory, for a copy of the whole batch."""
        return [mine.buffer()]

    def batch(
        self,
        reader: RankReader,
        read: _native.RankRead,
        mine: _native.SampledBatch,
        weights: NDArray[np.float64] | None,
        step: int,
    ) -> tuple[Batch, Callable[[], None]]:
        """The batch in the buffer, and what the consumer's thread calls when it takes the batch."""
        if weights is not None and not mine.weighed:  # of the tensor-parallel peer whose batch this is
            mine.set_importance(0, weights)
        view = reader.samplers[0].transitions
        if view is not None:
            view.settle(mine)  # which asks functions of the user's
        return global_batch(mine, view or reader.plan, step, reader.members.shard_ids, read.draws()), nothing

    def empty_batch(self, sampler: StoreSampler, plan: FetchPlan | None, step: int) -> tuple[Batch, Callable[[], None]]:
        """The same of no rows, with the fields of a plan; None for a rank that gets no fields."""
        shown = sampler.transitions or sampler.plan
        names = [] if plan is None else plan.names if sampler.transitions is None else shown.names
        like = global_batch(sampler.empty_batch(1, shards=True), shown, step, (0,))  # there is none of no rows
        described = ("mask", "start", "length", "version", "probability", "draw")
        metadata = {name: getattr(like, name)[:0] for name in described}
        return Batch({name: like[name][:0] for name in names}, Keys.empty(), step=step, **metadata), nothing

    def describe(self) -> list[dict[str, Any]]:
        """For each store, how its rows come to the device; empty for host memory."""
        return []

    def close(self) -> None:
        """Releases devices and segments."""
        return


def importance_weights(
    samplers: Sequence[StoreSampler],
    read: _native.RankRead,
    rows: NDArray[np.uint32],
    generations: NDArray[np.uint32],
    probability: NDArray[np.float64],
    counts: Sequence[int],
    lowest: NDArray[np.float64],
    step: int,
) -> NDArray[np.float64]:
    """Importance weights of this rank's rows, scaled by the largest of the global batch; 1 where there are none."""
    made = np.ones(len(rows))
    for number, sampler in enumerate(samplers):
        part = slice(read.parts[number], read.parts[number + 1])
        if not sampler.traits.importance or part.start == part.stop:
            continue
        draw = Draw(rows[part], generations[part], probability[part], lowest=float(lowest[number]))
        weights = importance_of(sampler.strategy, draw, counts[number], step)
        if weights is not None:
            made[part] = weights
    return made


__all__ = ["HostAssembler", "importance_weights"]
