"""Builds the batches of a replay on a device, with two of them in flight: it starts the next while one is being copied.

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

import time
from dataclasses import dataclass, field
from typing import Any

import geartrain._native as _native
from geartrain.core.lifetime import on_error
from geartrain.errors import ArgumentError
from geartrain.replay.admission import Admission
from geartrain.replay.builder import BuiltBatch, PriorityUpdate, State, build_stats, path_of
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
    """A batch that was started."""

    step: int
    state: State
    admission: Admission
    transfer: Transfer | None = None  # None where it is finished already
    rows: _native.SampledBatch | None = None  # of several stores
    parts: list[tuple[int, BegunRows]] = field(default_factory=list)  # of each store, by its number
    made: BuiltBatch | None = None  # when it is finished already


class DeviceBatchBuilder:
    """Builds batches on a device; see `BatchBuilder`.

    Args:
        samplers: one for each store; their plans are all alike.
        selection: the strategy, or the mixture.
        batch_size: rows of a batch.
        options: as `Replay` was given them.

    Raises:
        PinError, ArgumentError: an option that was given by name cannot be used.
    """

    update_lag: int | None = None
    collective = False

    def __init__(
        self, samplers: list[StoreSampler], selection: Selection, batch_size: int, options: DeviceOptions
    ) -> None:
        self.samplers = samplers
        self.store_ids = [sampler.plan.store.id for sampler in samplers]
        self.rows = batch_size
        self.options = options
        self._make_s = 0.0
        self._built = 0
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

    def enter(self) -> None:
        self._session.enter()

    # --- a batch -----------------------------------------------------------------------------------------------

    def start(self, step: int, state: State, updates: list[PriorityUpdate]) -> PendingBatch:
        with Admission() as admission, self._session.at_work():
            began_s = time.perf_counter()
            self._session.hold_back()
            pending = PendingBatch(step, state, admission)
            (self._launch if self._staged is None else self._stage)(pending, began_s)
            self._make_s += time.perf_counter() - began_s
            if self._alone and pending.made is None:
                pending.made = self._finish(pending)
                pending.state = pending.made.state
            return pending

    def ready(self, started: PendingBatch) -> bool:
        return True

    def finish(self, started: PendingBatch) -> BuiltBatch:
        if started.made is not None:
            return started.made
        with started.admission, self._session.at_work():
            return self._finish(started)

    def _stage(self, pending: PendingBatch, began_s: float) -> None:
        """Makes a batch in pinned memory, and sends it."""
        assert self._staged is not None
        one = self._staged.take()
        with on_error(self._staged.give_back, one):
            pending.state = self._host.sample_into(one.rows, pending.step, pending.state, pending.admission)
        keys = keys_of(one.rows, self.store_ids, self.targets[0].plan.per_step, copied=True)
        ready = self._staged.send(one, keys, pending.step)
        pending.made = self._built_batch(ready, pending, time.perf_counter() - began_s)

    def _launch(self, pending: PendingBatch, began_s: float) -> None:
        """Draws the rows of each store, and launches their copies."""
        step, state = pending.step, pending.state
        transfer = pending.transfer = TRANSFERS[self.path](self.targets, self.rows)
        mixed = self._host.mixed
        rows = pending.rows = self.samplers[0].empty_rows(self.rows) if mixed else None
        pending.state, first = list(state), 0
        wait_together(self.samplers)
        with on_error(_abandon, pending):
            for number, (sampler, quota) in enumerate(zip(self.samplers, self._host.quotas(step), strict=True)):
                if not quota:
                    continue
                copier: Transfer | DrawnTransfer = transfer
                priorities = self._mirrors.copies[number]
                if priorities is not None and isinstance(transfer, GatherTransfer):
                    copier = DrawnTransfer(transfer, priorities, sampler.strategy, step)
                begun = sampler.begin(quota, step, state[number], pending.admission, rows, first, copier, number)
                pending.parts.append((number, begun))
                pending.state[number] = begun.state
                if rows is not None:
                    rows.set_shard(first, quota, number)
                first += quota

    def _finish(self, pending: PendingBatch) -> BuiltBatch:
        began_s = time.perf_counter()
        rows, state, transfer = pending.rows, list(pending.state), pending.transfer
        with on_error(_abandon, pending):
            for number, begun in pending.parts:
                rows, state[number] = begun.finish()
        assert rows is not None
        assert transfer is not None
        pending.state = state
        keys = keys_of(rows, self.store_ids, self.targets[0].plan.per_step)
        ready = transfer.finish(keys, rows.probability(), rows.importance_weights(), pending.step)
        self._make_s += time.perf_counter() - began_s
        return self._built_batch(ready, pending)

    def _built_batch(self, ready: ReadyBatch, pending: PendingBatch, make_s: float = float("inf")) -> BuiltBatch:
        self._built += 1
        deliver = self._session.deliver(ready)
        return BuiltBatch(ready.batch, pending.state, deliver, make_s, admission=pending.admission)

    # --- priorities, figures, closing --------------------------------------------------------------------------

    def submit_updates(self, update: PriorityUpdate, step: int) -> int | None:
        return self._host.submit_updates(update, step)

    def settle(self, step: int, updates: list[PriorityUpdate]) -> None:
        """None are kept."""

    def restart(self) -> None:
        """No updates wait."""

    def rewind(self) -> None:
        """Nothing is kept but the state."""

    def stats(self) -> dict[str, Any]:
        callbacks = [name for sampler in self.samplers for name in sampler.callbacks]
        if self._staged is None:
            if any(copy is not None for copy in self._mirrors.copies):
                callbacks.append("DevicePriorities.draw")
            name = TRANSFERS[self.path].__name__
            callbacks += [f"{name}.launch", f"{name}.resolve"]
        return {**build_stats(self._built, self._make_s, self.samplers), "path": path_of(callbacks)}

    def describe(self) -> list[dict[str, Any]]:
        """The path in use and why, where rows are drawn, pinned bytes."""
        staged = {}
        if self._staged is not None:
            staged = {"pinned_pool_bytes": self.targets[0].pool.nbytes + self._staged.nbytes}
        return [
            {"store": sampler.plan.store.name, **target.describe(), "select": select, **staged}
            for sampler, target, select in zip(self.samplers, self.targets, self._mirrors.describe(), strict=True)
        ]

    def abort(self, reason: str) -> None:
        """No other rank waits."""

    def close(self) -> None:
        """Waits for the stream, and unpins."""
        self._session.close()


def _abandon(pending: PendingBatch) -> None:
    """Releases the rows that were launched for a batch that nobody gets."""
    for _, begun in pending.parts:
        begun.abandon()


__all__ = ["DeviceBatchBuilder", "PendingBatch"]
