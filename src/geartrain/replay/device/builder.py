"""Device batch builder: two batches in flight, the next one drawn and launched while one is being copied.

    start     draws the rows (on the host, or on the device from its copy of the priorities) and launches the gather
    finish    waits for it, redraws lost rows, and hands the batch out

Both run on the replay's own thread, which sleeps while it waits. It has to wait: whether a row was overwritten during
its copy is known when the copy is complete, and torn rows are redrawn before the batch is handed out. The consumer's
host waits for this thread only, and its stream for the batch's event.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.keys import Keys
from geartrain.errors import ArgumentError
from geartrain.replay.admission import Admission
from geartrain.replay.builder import (
    BuiltBatch,
    PriorityUpdate,
    State,
    apply_updates,
    build_stats,
    join_importance,
)
from geartrain.replay.device.copied_rows import CopyTransfer
from geartrain.replay.device.mirrors import Mirrors
from geartrain.replay.device.options import DeviceOptions
from geartrain.replay.device.session import DeviceSession
from geartrain.replay.device.staged_batches import StagedBatches
from geartrain.replay.device.target import DeviceTarget
from geartrain.replay.device.transfer import BatchTransfer, ReadyBatch
from geartrain.replay.local_rows import LocalRows
from geartrain.replay.native_batch import keys_of
from geartrain.replay.sampler import StoreSampler
from geartrain.replay.store_waits import wait_together
from geartrain.selection.mixture import Selection
from geartrain.selection.strategy import Draw, Redraw, importance_of, seed_of


@dataclass
class _StoreRows:
    """One store's rows of a batch in flight."""

    number: int
    at: int  # its first place in the batch
    n: int
    count: int  # selectable rows
    on_device: bool = False  # whether the device draws it
    draw: Draw | None = None  # None while only the device knows it
    taken: NDArray[np.bool_] | None = None  # False where somebody else had the row's last sample
    torn: NDArray[np.uint8] | None = None
    attempts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # that drew each window
    steps: NDArray[np.int32] | None = None  # that windows are told by, where keys name steps
    state: dict[str, int] = field(default_factory=dict)

    def lost(self) -> NDArray[Any]:
        """Rows that were overwritten as they were copied, or whose last sample somebody else had first."""
        assert self.taken is not None
        assert self.torn is not None
        lost: NDArray[Any] = self.torn | ~self.taken
        return lost

    def kept(self, lost: NDArray[np.intp]) -> NDArray[np.uint32]:
        """The other rows of the draw, which the host knows by now."""
        assert self.draw is not None
        return np.delete(self.draw.rows, lost)


@dataclass
class PendingBatch:
    """A batch that was started."""

    step: int
    state: State
    transfer: BatchTransfer | None  # None where it is finished already
    parts: list[_StoreRows]
    admission: Admission
    made: BuiltBatch | None = None  # when it is finished already


class DeviceBatchBuilder:
    """Builds batches on a device; see `BatchBuilder`.

    Args:
        samplers: of each store; their plans are all alike.
        selection: the strategy, or the mixture.
        batch_size: rows of a batch.
        options: as `Replay` was given them.

    Raises:
        PinError, ArgumentError: what was asked for by name cannot be had.
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
        try:
            rows = batch_size if len(samplers) == 1 else None
            for sampler in samplers:
                self.targets.append(DeviceTarget(self.device, self._session.stream, sampler.plan, options, rows=rows))
            self._settle_path()
            self._staged = None
            if self.path == "staged":
                self._staged = StagedBatches(self.targets[0], samplers[0], batch_size, self._host.mixed)
            self._mirrors = Mirrors(samplers, self.targets, options)
            self._priorities = self._mirrors.copies
        except BaseException:
            self.close()
            raise
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
        """See `BatchBuilder`."""
        self._session.enter()

    # --- a batch -----------------------------------------------------------------------------------------------

    def start(self, step: int, state: State, updates: list[PriorityUpdate]) -> PendingBatch:
        """See `BatchBuilder`."""
        with Admission() as admission:
            if self.path != "staged":  # what is staged is admitted where it is sampled
                self._admit(step, admission)
            with self._session.at_work():
                return self._start(step, state, admission)

    def _admit(self, step: int, admission: Admission) -> None:
        """Waits for rows and for the stores' rate limiters, not holding what `close` waits for."""
        wait_together(self.samplers)
        for sampler, quota in zip(self.samplers, self._host.quotas(step), strict=True):
            if quota:
                sampler.wait_to_draw(quota, admission)

    def _start(self, step: int, state: State, admission: Admission) -> PendingBatch:
        began_s = time.perf_counter()
        self._session.hold_back()
        stage = self._stage if self.path == "staged" else self._launch
        pending = stage(step, state, admission)
        self._make_s += time.perf_counter() - began_s
        if self._alone and pending.made is None:
            pending.made = self._finish(pending)
            pending.state = pending.made.state
        return pending

    def ready(self, started: PendingBatch) -> bool:
        """See `BatchBuilder`."""
        return True

    def finish(self, started: PendingBatch) -> BuiltBatch:
        """See `BatchBuilder`."""
        if started.made is not None:
            return started.made
        with self._session.at_work(), started.admission:
            return self._finish(started)

    def _finish(self, pending: PendingBatch) -> BuiltBatch:
        began_s = time.perf_counter()
        metadata = self._resolve(pending)
        state = list(pending.state)
        for part in pending.parts:
            state[part.number] = part.state
        assert pending.transfer is not None
        made = self._ready(pending.transfer.finish(*metadata, pending.step), state, pending.admission)
        self._make_s += time.perf_counter() - began_s
        return made

    def _ready(self, ready: ReadyBatch, state: State, admission: Admission, make_s: float = float("inf")) -> BuiltBatch:
        self._built += 1
        return BuiltBatch(ready.batch, state, self._session.deliver(ready), make_s, admission=admission)

    # --- staged ------------------------------------------------------------------------------------------------

    def _stage(self, step: int, state: State, admission: Admission) -> PendingBatch:
        assert self._staged is not None
        began_s = time.perf_counter()
        one = self._staged.take()
        try:
            after = self._host.sample_into(one.rows, step, state, admission)
        except BaseException:
            self._staged.give_back(one)
            raise
        keys = keys_of(one.rows, self._host.store_ids, self.targets[0].plan.per_step, copied=True)
        ready = self._staged.send(one, keys, step)
        made = self._ready(ready, after, admission, time.perf_counter() - began_s)
        return PendingBatch(step, after, None, [], admission, made)

    # --- gathered, or copied -----------------------------------------------------------------------------------

    def _launch(self, step: int, state: State, admission: Admission) -> PendingBatch:
        transfer = (CopyTransfer if self.path == "copy" else BatchTransfer)(self.targets[0], self.rows)
        parts, asked, at = [], [], 0
        for number, quota in enumerate(self._host.quotas(step)):
            if quota == 0:
                continue
            part = self._part(number, at, quota, step, state)
            asked += self._draw_and_gather(transfer, part, step, None, at == 0)
            parts.append(part)
            at += quota
        transfer.read_back(asked)
        after = list(state)
        for part in parts:
            after[part.number] = part.state
        return PendingBatch(step, after, transfer, parts, admission)

    def _part(self, number: int, at: int, n: int, step: int, state: State) -> _StoreRows:
        sampler = self.samplers[number]
        sampler.expire()
        count = len(sampler.plan.store)
        sampler.check_count(count)
        priorities = self._priorities[number]
        return _StoreRows(number, at, n, count, priorities is not None and priorities.begin(n), state=state[number])

    def _draw_and_gather(
        self, transfer: BatchTransfer, part: _StoreRows, step: int, redraw: Redraw | None, clear: bool
    ) -> list[Any]:
        """Chooses and launches a part, or what is to be replaced of it; returns tensors that the host must learn."""
        sampler, priorities, target = (
            self.samplers[part.number],
            self._priorities[part.number],
            self.targets[part.number],
        )
        rows: Any
        generations: Any
        asked: list[Any] = []
        if priorities is not None and part.on_device:
            rows, generations, probability = priorities.draw(sampler.strategy, part.n, step, redraw)
            asked = [rows, generations, probability]
        else:
            drawn = sampler.draw(part.n, step, part.state, redraw)
            part.state = drawn.state
            self._note(part, redraw, drawn)
            rows, generations = drawn.rows, drawn.generations
        if redraw is not None and target.gather.packed and self.path == "gather":
            self._gather_packed_again(transfer, part, step, redraw, asked)
            return []
        numbers = None if redraw is None else redraw.numbers
        places = None
        if redraw is not None or len(self.samplers) > 1:
            places = part.at + (np.arange(part.n, dtype=np.uint32) if redraw is None else redraw.numbers)
        attempt = 0 if redraw is None else redraw.attempt
        if isinstance(transfer, CopyTransfer):
            which = np.arange(part.n, dtype=np.uint32) if redraw is None else redraw.numbers
            told = self._place(part, step, redraw) if sampler.plan.per_step else self._ends(part, step, attempt, which)
            transfer.launch_copies(rows, generations, told, places=places, target=target, clear=clear)
            return asked
        if sampler.plan.per_step:
            ends = self._place(part, step, redraw)
            transfer.launch_gather(rows, generations, None, ends=ends, places=places, target=target, clear=clear)
            return asked
        draw = (seed_of(sampler.strategy), step, attempt)
        transfer.launch_gather(rows, generations, draw, numbers=numbers, places=places, target=target, clear=clear)
        return asked

    def _place(self, part: _StoreRows, step: int, redraw: Redraw | None) -> NDArray[np.int32]:
        """The steps that the windows of a draw, or of what is replaced of it, are told by; keys name these."""
        assert part.draw is not None
        if part.steps is None or redraw is None:
            part.steps = np.zeros(part.n, np.int32)
        numbers = np.arange(part.n, dtype=np.uint32) if redraw is None else redraw.numbers
        ends = self._ends(part, step, 0 if redraw is None else redraw.attempt, numbers)
        assert ends is not None  # keys name steps of windows alone
        part.steps[numbers] = ends
        placed: NDArray[np.int32] = part.steps[numbers]
        return placed

    def _ends(self, part: _StoreRows, step: int, attempt: int, numbers: NDArray[np.uint32]) -> NDArray[np.int32] | None:
        assert part.draw is not None
        drawn = None if part.draw.steps is None else part.draw.steps[numbers]
        keys = part.draw.rows[numbers], part.draw.generations[numbers]
        return self.samplers[part.number].ends(step, attempt, numbers, *keys, drawn)

    def _gather_packed_again(
        self, transfer: BatchTransfer, part: _StoreRows, step: int, redraw: Redraw, asked: list[Any]
    ) -> None:
        """The whole batch once more: the new rows may be longer, and then everything behind them stands elsewhere."""
        target = self.targets[part.number]
        if asked:
            transfer.read_back(asked)
            self._note(part, redraw, _draw_of(*transfer.wait_read_back()[1:]))
        assert part.draw is not None
        part.attempts[redraw.numbers] = redraw.attempt
        ends = np.zeros(part.n, np.int32)
        if part.steps is not None:
            self._place(part, step, redraw)
            ends = part.steps.copy()
        else:
            for attempt in np.unique(part.attempts):
                these = np.flatnonzero(part.attempts == attempt).astype(np.uint32)
                found = self._ends(part, step, int(attempt), these)
                if found is not None:
                    ends[these] = found
        transfer.launch_gather(part.draw.rows, part.draw.generations, None, ends=ends if target.gather.window else None)

    def _note(self, part: _StoreRows, redraw: Redraw | None, draw: Draw) -> None:
        """Records what was drawn, and counts it in the store."""
        taken = self.samplers[part.number].count_samples(draw.rows, draw.generations)
        if redraw is None:
            part.draw, part.taken, part.attempts = draw, taken.copy(), np.zeros(part.n, np.int64)
            return
        assert part.draw is not None
        assert part.taken is not None
        part.draw = part.draw.with_redrawn(redraw.numbers, draw)
        part.taken[redraw.numbers] = taken

    def _resolve(self, pending: PendingBatch) -> tuple[Keys, Any, Any]:
        """Waits for the device, and redraws torn rows until there are none; returns keys and metadata."""
        transfer, parts = pending.transfer, pending.parts
        assert transfer is not None
        unknown = [part for part in parts if part.on_device]
        torn, *news = transfer.wait_read_back()
        for i, part in enumerate(unknown):
            self._note(part, None, _draw_of(*news[3 * i : 3 * i + 3]))
        for part in parts:
            self._release(part, slice(None))
            self._replace_lost(pending, part, torn[part.at : part.at + part.n])
        draws = [part.draw for part in parts if part.draw is not None]
        keys = [
            Keys(draw.rows, draw.generations, store=self.samplers[part.number].plan.store.id, step=_steps_of(part))
            for part, draw in zip(parts, draws, strict=True)
        ]
        importance_weights = [
            (importance_of(self.samplers[part.number].strategy, draw, part.count, pending.step), part.n)
            for part, draw in zip(parts, draws, strict=True)
        ]
        probability = np.concatenate([draw.probability for draw in draws])
        if self._host.mixed:
            joined = Keys.join([key.of_shard(part.number) for key, part in zip(keys, parts, strict=True)])
        else:
            (joined,) = keys
        return joined, probability, join_importance(importance_weights)

    def _replace_lost(self, pending: PendingBatch, part: _StoreRows, torn: NDArray[np.uint8]) -> None:
        transfer = pending.transfer
        assert transfer is not None
        part.torn = torn
        for redraw in self.samplers[part.number].redraws(part):
            asked = self._draw_and_gather(transfer, part, pending.step, redraw, True)
            transfer.read_back(asked)
            flags, *arrays = transfer.wait_read_back()
            if arrays:
                self._note(part, redraw, _draw_of(*arrays))
            self._release(part, redraw.numbers)
            part.torn = flags[part.at : part.at + part.n]

    def _release(self, part: _StoreRows, which: Any) -> None:
        assert part.draw is not None
        self.samplers[part.number].release(part.draw.rows[which], part.draw.generations[which])

    # --- priorities, figures, closing --------------------------------------------------------------------------

    def submit_updates(self, update: PriorityUpdate, step: int) -> int | None:
        """See `BatchBuilder`."""
        return apply_updates(self.samplers, update, step)

    def settle(self, step: int, updates: list[PriorityUpdate]) -> None:
        """See `BatchBuilder`. None are kept."""

    def restart(self) -> None:
        """See `BatchBuilder`. No updates wait."""

    def rewind(self) -> None:
        """See `BatchBuilder`. Nothing is kept but the state."""

    def stats(self) -> dict[str, float]:
        """See `BatchBuilder`."""
        return build_stats(self._built, self._make_s, self.samplers)

    def describe(self) -> list[dict[str, Any]]:
        """See `BatchBuilder`: the path in use and why, where rows are drawn, pinned bytes."""
        staged = {}
        if self._staged is not None:
            staged = {"pinned_pool_bytes": self.targets[0].pool.nbytes + self._staged.nbytes}
        return [
            {"store": sampler.plan.store.name, **target.describe(), "select": select, **staged}
            for sampler, target, select in zip(self.samplers, self.targets, self._mirrors.describe(), strict=True)
        ]

    def abort(self, reason: str) -> None:
        """See `BatchBuilder`. No other rank waits."""

    def close(self) -> None:
        """See `BatchBuilder`. Waits for the stream, and unpins."""
        self._session.close()


def _steps_of(part: _StoreRows) -> NDArray[np.uint32] | None:
    return None if part.steps is None else part.steps.astype(np.uint32)


def _draw_of(rows: NDArray[Any], generations: NDArray[Any], probability: NDArray[np.float64]) -> Draw:
    """A draw that the device made, which has no types of 32 bits without sign for all of it."""
    return Draw(rows.astype(np.uint32), generations.astype(np.uint32), probability)


__all__ = ["DeviceBatchBuilder", "PendingBatch"]
