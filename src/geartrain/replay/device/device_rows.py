"""Source of batches in the memory of a device. Two are in flight: the next is started while one is being copied.

    start     draws the rows on the host, or on the device from its copy of the priorities, and launches their copies
    finish    waits for the copies, redraws torn rows, and returns the batch

A row is torn if a writer overwrote it during its copy. Only a complete copy shows whether its rows are torn. So
`finish` has to wait for the copies before it can return a batch.

Both steps run on the replay's prefetch thread, which sleeps while it waits. The consumer's thread waits only for the
prefetch thread, and the consumer's stream for the batch's event.

Each step is one native call, as for a batch in host memory. The native code calls a transfer back to copy the rows
(transfer.py). Staged batches are sampled into pinned memory like batches in host memory, and then sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import geartrain._native as _native
from geartrain.core.lifetime import on_error
from geartrain.errors import ArgumentError
from geartrain.replay.admission import Admission
from geartrain.replay.builder import BuiltBatch, PriorityUpdate, RowSource, State
from geartrain.replay.device.copied_rows import CopyTransfer
from geartrain.replay.device.mirrors import Mirrors
from geartrain.replay.device.options import DeviceOptions
from geartrain.replay.device.priority_mirror import DrawnTransfer
from geartrain.replay.device.session import DeviceSession
from geartrain.replay.device.staged_batches import StagedBatches
from geartrain.replay.device.staging import StagedTransfer
from geartrain.replay.device.target import DeviceTarget
from geartrain.replay.device.transfer import GatherTransfer, ReadyBatch, Transfer
from geartrain.replay.local_rows import LocalRows
from geartrain.replay.native_batch import keys_of
from geartrain.replay.sampler import BegunRows, StoreSampler
from geartrain.replay.store_waits import wait_together
from geartrain.selection.mixture import Selection

#: What copies the rows of a batch, by its path. Staged batches are sampled into pinned memory instead, unless their
#: size is known only when they are drawn.
TRANSFERS: dict[str, type[CopyTransfer] | type[GatherTransfer] | type[StagedTransfer]] = {
    "copy": CopyTransfer,
    "gather": GatherTransfer,
    "staged": StagedTransfer,
}


@dataclass
class PendingBatch:
    """A batch whose copies are launched."""

    step: int
    state: State
    admission: Admission
    transfer: Transfer
    rows: _native.SampledBatch | None = None  # of several stores
    parts: list[tuple[int, BegunRows]] = field(default_factory=list)  # of each store, by its number
    made: BuiltBatch | None = None  # when it is finished already


class DeviceRows(RowSource):
    """Draws batches from the stores of this process, and has a device read them; see `RowSource`.

    Args:
        samplers: one for each store; their plans are all alike.
        selection: the strategy, or the mixture.
        batch_size: rows of a batch.
        options: as `Replay` was given them.

    Raises:
        PinError, ArgumentError: an option that was given by name cannot be used.
    """

    def __init__(
        self, samplers: list[StoreSampler], selection: Selection, batch_size: int, options: DeviceOptions
    ) -> None:
        self.samplers = samplers
        self.store_ids = [sampler.plan.store.id for sampler in samplers]
        self.rows = batch_size
        self.options = options
        self._host = LocalRows(samplers, selection, batch_size)
        self._session = DeviceSession(options.device)
        self.device = self._session.device
        self.targets = self._session.targets
        with on_error(self.close):
            rows = batch_size if len(samplers) == 1 else None
            for sampler in samplers:
                self.targets.append(DeviceTarget(self.device, self._session.stream, sampler.plan, options, rows=rows))
            self._settle_path()
            self._staged = None
            # Without a mixture the last batch of a pass may have fewer rows.
            if self.path == "staged" and (self._host.mixed or samplers[0].passes is None):
                self._staged = StagedBatches(self.targets[0], samplers[0], batch_size, self._host.mixed)
            self._mirrors = Mirrors(samplers, self.targets, options)
        self.overlaps = self._staged is None  # what is staged is finished when it is started
        # Where a batch may depend on the one before (a cursor, a limit on samples), it is finished before the next one
        # is started.
        self._alone = any(sampler.limited or sampler.traits.stateful for sampler in samplers)

    def _settle_path(self) -> None:
        mixed = len(self.targets) > 1
        staged = [one for one in self.targets if one.path == "staged"]
        gathered = [one for one in self.targets if one.path == "gather"]
        if mixed and self.options.packed and gathered and not staged:
            if self.options.path == "gather":
                raise ArgumentError("a mixture is gathered into padded windows only; use path='staged' or packed=False")
            staged = self.targets[:1]
        # One batch comes one way: where some rows are small and others large, all of them are gathered.
        self.path = "staged" if staged else "gather" if gathered else "copy"
        if self.path == "gather":
            for one in self.targets:
                if one.path == "copy":
                    one.why, one.path = "another store of the mixture has smaller rows", "gather"
        if staged:
            for one in self.targets:
                if one.path != "staged":
                    one.why = f"another store of the mixture is: {staged[0].why}" if mixed else one.why
                    one.path = "staged"

    @property
    def callbacks(self) -> list[str]:
        names = self._host.callbacks
        if self._staged is None:
            if any(copy is not None for copy in self._mirrors.copies):
                names.append("DevicePriorities.draw")
            name = TRANSFERS[self.path].__name__
            names += [f"{name}.launch", f"{name}.resolve"]
        return names

    def enter(self) -> None:
        self._session.enter()

    # --- a batch -----------------------------------------------------------------------------------------------

    def start(
        self, step: int, state: State, updates: list[PriorityUpdate], admission: Admission
    ) -> PendingBatch | BuiltBatch:
        with self._session.at_work():
            self._session.hold_back()
            if self._staged is not None:
                return self._stage(self._staged, step, state, admission)
            pending = self._launch(step, state, admission)
            if self._alone:
                pending.made = self._finish(pending)
                pending.state = pending.made.state
            return pending

    def finish(self, started: PendingBatch) -> BuiltBatch:
        if started.made is not None:
            return started.made
        with self._session.at_work():
            return self._finish(started)

    def _stage(self, staged: StagedBatches, step: int, state: State, admission: Admission) -> BuiltBatch:
        """Makes a batch in pinned memory, and sends it."""
        one = staged.take()
        with on_error(staged.give_back, one):
            after = self._host.sample_into(one.rows, step, state, admission)
        keys = keys_of(one.rows, self.store_ids, self.targets[0].plan.per_step, copied=True)
        return self._built(staged.send(one, keys, step), after, admission)

    def _launch(self, step: int, state: State, admission: Admission) -> PendingBatch:
        """Draws the rows of each store, and launches their copies."""
        transfer = TRANSFERS[self.path](self.targets, self.rows)
        rows = self.samplers[0].empty_rows(self.rows) if self._host.mixed else None
        pending, first = PendingBatch(step, list(state), admission, transfer, rows), 0
        wait_together(self.samplers)
        with on_error(_abandon, pending):
            for number, (sampler, quota) in enumerate(zip(self.samplers, self._host.quotas(step), strict=True)):
                if not quota:
                    continue
                copier: Transfer | DrawnTransfer = transfer
                priorities = self._mirrors.copies[number]
                if priorities is not None and isinstance(transfer, GatherTransfer):
                    copier = DrawnTransfer(transfer, priorities, sampler.strategy, step)
                begun = sampler.begin(quota, step, state[number], admission, rows, first, copier, number)
                pending.parts.append((number, begun))
                pending.state[number] = begun.state
                if rows is not None:
                    rows.set_shard(first, quota, number)
                first += quota
        return pending

    def _finish(self, pending: PendingBatch) -> BuiltBatch:
        rows, state = pending.rows, list(pending.state)
        with on_error(_abandon, pending):
            for number, begun in pending.parts:
                rows, state[number] = begun.finish()
        assert rows is not None
        keys = keys_of(rows, self.store_ids, self.targets[0].plan.per_step)
        ready = pending.transfer.finish(keys, rows.probability(), rows.importance_weights(), pending.step)
        return self._built(ready, state, pending.admission)

    def _built(self, ready: ReadyBatch, state: State, admission: Admission) -> BuiltBatch:
        return BuiltBatch(ready.batch, state, self._session.deliver(ready), admission=admission)

    # --- priorities, figures, closing --------------------------------------------------------------------------

    def submit_updates(self, update: PriorityUpdate, step: int) -> int | None:
        return self._host.submit_updates(update, step)

    def describe(self) -> list[dict[str, Any]]:
        """The path in use and why, where rows are drawn, pinned bytes."""
        staged = {}
        if self._staged is not None:
            staged = {"pinned_pool_bytes": self.targets[0].pool.nbytes + self._staged.nbytes}
        return [
            {"store": sampler.plan.store.name, **target.describe(), "select": select, **staged}
            for sampler, target, select in zip(self.samplers, self.targets, self._mirrors.describe(), strict=True)
        ]

    def close(self) -> None:
        """Waits for the stream, and unpins."""
        self._session.close()


def _abandon(pending: PendingBatch) -> None:
    """Releases the rows that were launched for a batch that nobody gets."""
    for _, begun in pending.parts:
        begun.abandon()


__all__ = ["DeviceRows"]
