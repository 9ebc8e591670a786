"""`ReplayOptions` and `RankOptions`: the rare options of a replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from geartrain.core.arguments import (
    PAD,
    SECONDS,
    SEED,
    THREADS,
    Options,
    check_choice,
    check_function,
    check_names_of,
    check_whole,
    checked,
    leave_out,
)
from geartrain.ranks.rank_group import RankGroup
from geartrain.ranks.topology import Mesh
from geartrain.replay.batch import Batch
from geartrain.replay.cost import Cost, as_cost
from geartrain.replay.distributed.assignment import ASSIGNMENTS, Assignment
from geartrain.replay.fetch_plan import Pad

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# More batches ahead than any machine has use for: a mistake.
MAX_PREFETCH = 1024
MAX_UPDATE_LAG = 2 * MAX_PREFETCH


@dataclass(frozen=True)
class ReplayOptions(Options):
    """Rare options of a `Replay`: `Replay(store, selection, 256, options=ReplayOptions(min_rows=1000))`.

    Args:
        min_rows: fewest rows to draw from; over several ranks, of all ranks together. With fewer, a batch waits up to
            `timeout_s` if another process has the store open or is about to (`Store.expect_writers`); over several
            ranks only the latter counts. Otherwise `NotEnoughRowsError` is raised at once. A writer thread in this
            process cannot be seen: use `store.limiter.set(min_size_to_sample=...)` for it. 1 by default. For a
            store with `max_times_sampled` it is the batch size, so that no sample is wasted on half a batch.
        min_steps: the same in steps (`Store.num_steps`), for example 10_000 steps of the environments before the first
            gradient step. No minimum by default. In a mixture, `min_rows` and `min_steps` are those of each store.
        timeout_s: longest wait for a batch and for another rank, in seconds. Your own strategy code and `transform` are
            not interrupted.
        threads: threads that copy; by default up to 4 of the cores this process may use.
        update_lag: number of batches after which priority updates take effect. Batch t sees exactly the updates made
            before batch `t - update_lag` was requested, on any number of ranks. At least `prefetch`, which is the
            default over several ranks. By default a replay without a group applies updates at once. Above `prefetch`,
            ranks draw without waiting for each other's updates, which hides the latency between hosts (docs/ranks.md).
            Several ranks take this for independent draws only. If a shard lost rows and a batch is drawn again, it sees
            the updates of one batch more.
        pad: side on which short windows are padded, "left" or "right". Not with offsets, whose steps keep their places.
        first_only: names of fields of which batches have the first step of each window alone, (B, ...) instead of
            (B, W, ...), such as a recurrent state. It is the step `batch.start`, never padding. Only this step is
            copied.
        transform: called with each batch where it is built, usually on the prefetch thread. `sample` returns what it
            returns, and raises what it raises; the next `sample` then draws the same batch again. Over several ranks
            each rank transforms its own part of the batch, and an error ends the group. In host memory only.
        keep: "saved" keeps the rows of each batch in a store with tasks until `saved` is called, so that a run that is
            killed draws the same batches again (docs/training-from-tasks.md). Each row must be drawn once
            (`max_times_sampled=1`, the default with tasks), and only this replay draws from the store. By default the
            draw frees a row.
        seed: seed for strategies without one. In a mixture each strategy gets a seed derived from it.

    Raises:
        ArgumentError: an option is out of range.

    Examples:
        >>> import geartrain as gt
        >>> gt.ReplayOptions(min_rows=1000).timeout_s
        60.0
    """

    min_rows: int | None = field(default=None, metadata=checked(check_whole, 1, 2**32))
    min_steps: int | None = field(default=None, metadata=checked(check_whole, 1, 2**63 - 1))
    timeout_s: float = field(default=60.0, metadata=SECONDS)
    threads: int | None = field(default=None, metadata=THREADS)
    update_lag: int | None = field(default=None, metadata=checked(check_whole, 0, MAX_UPDATE_LAG))
    pad: Pad = field(default="left", metadata=PAD)
    first_only: Sequence[str] = field(default=(), metadata=checked(check_names_of, empty=True))
    transform: Callable[[Batch], Any] | None = field(
        default=None, metadata=checked(check_function, "a function of a batch")
    )
    keep: Literal["saved"] | None = field(default=None, metadata=checked(check_choice, ("saved",)))
    seed: int = field(default=0, metadata=SEED)


@dataclass(frozen=True)
class RankOptions(Options):
    """How batches are divided over ranks; `Replay(group=pg)` is short for `Replay(group=RankOptions(pg))`.

    Args:
        group: a `torch.distributed` process group (data parallel), or a `RankGroup`.
        mesh: the same with pipeline and tensor parallelism: a `DeviceMesh` with dimensions named dp, pp and tp, a
            DeepSpeed grid or topology, or an object with the usual mpu methods. Of a store with axes all ranks of a
            replica get the same rows, with all fields.
        inputs, targets: fields for the first and the last pipeline stage, instead of `fields`; not for stores with
            axes. A rank that is both gets both.
        assignment: "local_first" prefers rows of the rank's own host, "ordered" gives replica i the i-th slice of the
            global batch.
        balance: for stores with axes: the name of an axis, such as "tokens". Every rank then gets whole rows with about
            the same number of these items in all, and ranks have different numbers of rows. `geartrain.Cost` counts
            the square of a sequence as well. By default every rank gets the same number of rows.

    Raises:
        ArgumentError: an option has no such value, or two exclude each other.

    Examples:
        >>> import geartrain as gt
        >>> gt.RankOptions(balance="tokens").assignment
        'local_first'
    """

    group: ProcessGroup | RankGroup | None = None
    mesh: Mesh | None = None
    inputs: Sequence[str] | None = field(default=None, metadata=checked(check_names_of, empty=True))
    targets: Sequence[str] | None = field(default=None, metadata=checked(check_names_of, empty=True))
    assignment: Assignment = field(default="local_first", metadata=checked(check_choice, ASSIGNMENTS))
    balance: str | Cost | None = field(default=None, metadata=checked(lambda what, value: as_cost(value)))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.balance is not None:
            ordered = self.assignment == "ordered" and self.assignment
            leave_out("balance= chooses the replica of each row by its cost", assignment=ordered)


__all__ = ["MAX_PREFETCH", "RankOptions", "ReplayOptions"]
