"""Batches made for a GPU, two at a time: while one is on its way, the next is chosen and launched.

    start     choose the rows (on the host, or on the device from a mirror of the priorities), launch the gather
    finish    wait until it is through, draw lost rows again, and let the batch land

Both happen on the replay's own thread, which sleeps while it waits. It has to wait: whether a row was overwritten
during its copy is known when the copy is over, and a torn row must not be anybody's. The consumer's host waits for
nothing but the thread, and its stream for the batch's event.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.keys import Keys
from geartrain.device.device import Device, open_device
from geartrain.errors import ArgumentError, StoreClosedError
from geartrain.replay.builder import HostBatchBuilder, BuiltBatch, State, join_importance
from geartrain.replay.device import DeviceOptions, BatchTransfer, StreamHandoff, ReadyBatch, DeviceTarget, StagingBuffer
from geartrain.replay.device.priority_mirror import DevicePriorities, pays, why_not
from geartrain.replay.distributed.priority_updates import Update
from geartrain.replay.sampler import MAX_ATTEMPTS, StoreSampler
from geartrain.selection.mixture import Selection
from geartrain.selection.strategy import Draw, Redraw, importance_of, seed_of

CLOSE_S = 60.0  # longest wait for the thread to finish what it is at

_log = logging.getLogger("geartrain.replay.device.builder")


@dataclass
class _Part:
    """What one store gives to a batch that is on its way."""

    number: int
    at: int  # its first place in the batch
    n: int
    count: int  # selectable rows
    draw: Draw | None = None  # None while only the device knows it
    taken: NDArray[np.bool_] | None = None  # False where somebody else had the row's last sample
    attempts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # that drew each window
    state: dict[str, int] = field(default_factory=dict)


@dataclass
class Pending:
    """A batch that was started."""

    step: int
    state: State
    transfer: BatchTransfer
    parts: list[_Part]
    made: BuiltBatch | None = None  # when it is finished already


class DeviceBatchBuilder:
    """Makes the batch of a given step on a device.

    Args:
        parts: of the stores; their plans are all alike.
        selection: the strategy, or the mixture.
        batch_size: rows of a batch.
        options: as `Replay` was given them.

    Raises:
        PinError, ArgumentError: what was asked for by name cannot be had.
    """

    def __init__(self, parts: list[StoreSampler], selection: Selection, batch_size: int, options: DeviceOptions) -> None:
        self.parts = parts
        self.selection = selection
        self.batch_size = batch_size
        self.options = options
        self.make_s = 0.0
        self.made = 0
        self.device: Device = open_device(options.device)
        self.device.enter()
        self.stream = self.device.new_stream()
        self._host = HostBatchBuilder(parts, selection, batch_size)
        self._handoff = StreamHandoff(self.device)
        self._lock = threading.Lock()  # against closing while the thread is at work
        self._closed = False
        self.targets: list[DeviceTarget] = []
        try:
            for part in parts:
                self.targets.append(DeviceTarget(self.device, self.stream, part.plan, options))
            self._settle_path()
            self._mirrors = self._make_mirrors()
        except BaseException:
            self.close()
            raise
        # Where a batch may depend on the one before (a cursor, a limit on samples), it is finished before the next one
        # is started.
        self._alone = any(part.limited or part.traits.stateful for part in parts)

    def _settle_path(self) -> None:
        mixed = len(self.targets) > 1
        staged = [one for one in self.targets if one.path == "staged"]
        if mixed and self.options.packed and not staged:
            if self.options.path == "gather":
                raise ArgumentError("a mixture is gathered into padded windows only; use path='staged' or packed=False")
            staged = self.targets[:1]
        self.path = "staged" if staged else "gather"
        if staged:
            for one in self.targets:
                if one.path != "staged":
                    one.why = f"another store of the mixture is: {staged[0].why}" if mixed else one.why
                    one.path = "staged"

    def _make_mirrors(self) -> list[DevicePriorities | None]:
        made: list[DevicePriorities | None] = []
        self.select: list[str] = []
        for part, target in zip(self.parts, self.targets, strict=True):
            reason = why_not(part.strategy) or (None if self.path == "gather" else "batches are staged")
            reason = reason or (None if not part.limited else "samples are limited, and counted on the host")
            reason = reason or self.device.why_no_selection()
            asked = self.options.select
            if asked == "device" and reason is not None:
                raise ArgumentError(f"select='device' was asked for, but {reason}")
            if asked == "auto" and reason is None and not pays(part.plan.store.capacity, self.batch_size):
                reason = f"{self.batch_size} draws cost less than a copy of {part.plan.store.capacity} priorities"
            if asked == "host" or reason is not None:
                made.append(None)
                self.select.append(f"host: {reason or 'it was asked for'}")
                continue
            made.append(DevicePriorities(target, ordered=part.traits.order is not None))
            self.select.append("device")
        return made

    def enter(self) -> None:
        """Called first on the thread that makes batches."""
        self.device.enter()

    # --- a batch -----------------------------------------------------------------------------------------------

    def make(self, step: int, state: State, updates: list[Update]) -> BuiltBatch:
        """Starts a batch and finishes it."""
        return self.finish(self.start(step, state, updates))

    def start(self, step: int, state: State, updates: list[Update]) -> Pending:
        """Chooses the rows of a step and launches what brings them."""
        gathered = self.path == "gather"  # what is staged is admitted where it is sampled
        admitted = self._admit(step) if gathered else []
        try:
            with self._lock:
                if self._closed:
                    raise StoreClosedError("this replay was closed")
                return self._start(step, state)
        except BaseException:
            _give_back(admitted)
            raise

    def _admit(self, step: int) -> list[tuple[StoreSampler, int]]:
        """Waits for the rate limiters of the stores, not holding what `close` waits for."""
        admitted: list[tuple[StoreSampler, int]] = []
        try:
            for sampler, quota in zip(self.parts, self._host.quotas(step), strict=True):
                if quota:
                    sampler.admit(quota)
                    admitted.append((sampler, quota))
        except BaseException:
            _give_back(admitted)
            raise
        return admitted

    def _start(self, step: int, state: State) -> Pending:
        began_s = time.perf_counter()
        self._handoff.hold_back()
        pending = self._stage(step, state) if self.path == "staged" else self._launch(step, state)
        self.make_s += time.perf_counter() - began_s
        if self._alone and pending.made is None:
            pending.made = self._finish(pending)
            pending.state = pending.made.state
        return pending

    def finish(self, pending: Pending) -> BuiltBatch:
        """The batch, once it is known to be whole."""
        if pending.made is not None:
            return pending.made
        with self._lock:
            if self._closed:
                raise StoreClosedError("this replay was closed")
            try:
                return self._finish(pending)
            except BaseException:
                _give_back([(self.parts[part.number], part.n) for part in pending.parts])
                raise

    def _finish(self, pending: Pending) -> BuiltBatch:
        began_s = time.perf_counter()
        books = self._resolve(pending)
        state = list(pending.state)
        for part in pending.parts:
            state[part.number] = part.state
        made = self._ready(pending.transfer.finish(*books, pending.step), state)
        self.make_s += time.perf_counter() - began_s
        return made

    def _ready(self, ready: ReadyBatch, state: State) -> BuiltBatch:
        self.made += 1
        return BuiltBatch(ready.batch, state, self._handoff.of(ready))

    # --- staged ------------------------------------------------------------------------------------------------

    def _stage(self, step: int, state: State) -> Pending:
        target = self.targets[0]
        stage = StagingBuffer(target, self.batch_size)
        rows = self._host.rows(step, state, stage.arrays)
        transfer = stage.send(rows.raw)
        ready = transfer.finish(rows.keys, rows.probability, rows.importance_weights, step)
        return Pending(step, rows.state, transfer, [], self._ready(ready, rows.state))

    # --- gathered ----------------------------------------------------------------------------------------------

    def _launch(self, step: int, state: State) -> Pending:
        transfer = BatchTransfer(self.targets[0], self.batch_size)
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
        return Pending(step, after, transfer, parts)

    def _part(self, number: int, at: int, n: int, step: int, state: State) -> _Part:
        sampler = self.parts[number]
        sampler.expire()
        count = len(sampler.plan.store)
        sampler.check_count(count)
        return _Part(number, at, n, count, state=state[number])

    def _draw_and_gather(self, transfer: BatchTransfer, part: _Part, step: int, redraw: Redraw | None, clear: bool) -> list[Any]:
        """Chooses and launches a part, or what is to be replaced of it; returns tensors that the host must learn."""
        sampler, mirror, target = self.parts[part.number], self._mirrors[part.number], self.targets[part.number]
        rows: Any
        generations: Any
        asked: list[Any] = []
        if mirror is not None:
            rows, generations, probability = mirror.draw(sampler.strategy, part.n, step, redraw)
            asked = [rows, generations, probability]
        else:
            drawn = sampler.draw(part.n, step, part.state, redraw)
            part.state = drawn.state
            self._note(part, redraw, drawn)
            rows, generations = drawn.rows, drawn.generations
        if redraw is not None and target.gather.packed:
            self._gather_packed_again(transfer, part, step, redraw, asked)
            return []
        numbers = None if redraw is None else redraw.numbers
        places = None
        if redraw is not None or len(self.parts) > 1:
            places = part.at + (np.arange(part.n, dtype=np.uint32) if redraw is None else redraw.numbers)
        draw = (seed_of(sampler.strategy), step, 0 if redraw is None else redraw.attempt)
        transfer.launch_gather(rows, generations, draw, numbers=numbers, places=places, target=target, clear=clear)
        return asked

    def _gather_packed_again(self, transfer: BatchTransfer, part: _Part, step: int, redraw: Redraw, asked: list[Any]) -> None:
        """The whole batch once more: the new rows may be longer, and then everything behind them stands elsewhere."""
        sampler, target = self.parts[part.number], self.targets[part.number]
        if asked:
            transfer.read_back(asked)
            self._note(part, redraw, _draw_of(*transfer.wait_read_back()[1:]))
        assert part.draw is not None
        part.attempts[redraw.numbers] = redraw.attempt
        ends = np.zeros(part.n, np.int32)
        for attempt in np.unique(part.attempts):
            these = np.flatnonzero(part.attempts == attempt).astype(np.uint32)
            found = sampler.ends(step, int(attempt), these, part.draw.rows[these])
            if found is not None:
                ends[these] = found
        transfer.launch_gather(part.draw.rows, part.draw.generations, None, ends=ends if target.gather.window else None)

    def _note(self, part: _Part, redraw: Redraw | None, draw: Draw) -> None:
        """Records what was drawn, and counts it in the store."""
        taken = self.parts[part.number].count_samples(draw.rows, draw.generations)
        if redraw is None:
            part.draw, part.taken, part.attempts = draw, taken.copy(), np.zeros(part.n, np.int64)
            return
        assert part.draw is not None
        assert part.taken is not None
        part.draw = part.draw.with_redrawn(redraw.numbers, draw)
        part.taken[redraw.numbers] = taken

    def _resolve(self, pending: Pending) -> tuple[Keys, Any, Any]:
        """Waits for the device, and replaces torn rows until there are none; returns keys and books."""
        transfer, parts = pending.transfer, pending.parts
        unknown = [part for part in parts if self._mirrors[part.number] is not None]
        torn, *news = transfer.wait_read_back()
        for i, part in enumerate(unknown):
            self._note(part, None, _draw_of(*news[3 * i : 3 * i + 3]))
        for part in parts:
            self._release(part, slice(None))
            self._replace_lost(pending, part, torn[part.at : part.at + part.n])
        draws = [part.draw for part in parts if part.draw is not None]
        keys = [Keys(draw.rows, draw.generations) for draw in draws]
        importance_weights = [
            (importance_of(self.parts[part.number].strategy, draw, part.count, pending.step), part.n)
            for part, draw in zip(parts, draws, strict=True)
        ]
        probability = np.concatenate([draw.probability for draw in draws])
        if self._host.mixed:
            joined = Keys.join([key.of_shard(part.number) for key, part in zip(keys, parts, strict=True)])
        else:
            (joined,) = keys
        return joined, probability, join_importance(importance_weights)

    def _replace_lost(self, pending: Pending, part: _Part, torn: NDArray[np.uint8]) -> None:
        sampler, transfer = self.parts[part.number], pending.transfer
        assert part.taken is not None
        bad: NDArray[Any] = torn | ~part.taken
        for attempt in range(1, MAX_ATTEMPTS + 1):
            lost = sampler.with_atoms(bad)
            if lost.size == 0:
                return
            sampler.note_lost(lost.size, attempt)
            assert part.draw is not None
            redraw = Redraw(attempt, lost.astype(np.uint32), np.delete(part.draw.rows, lost))
            asked = self._draw_and_gather(transfer, part, pending.step, redraw, True)
            transfer.read_back(asked)
            flags, *news = transfer.wait_read_back()
            if news:
                self._note(part, redraw, _draw_of(*news))
            self._release(part, lost)
            bad = flags[part.at : part.at + part.n] | ~part.taken

    def _release(self, part: _Part, which: Any) -> None:
        assert part.draw is not None
        self.parts[part.number].release(part.draw.rows[which], part.draw.generations[which])

    # --- figures and leaving -----------------------------------------------------------------------------------

    def describe(self) -> list[dict[str, Any]]:
        """For each store: the path in use and why, and where rows are chosen."""
        return [
            {"store": part.plan.store.name, **target.describe(), "select": select}
            for part, target, select in zip(self.parts, self.targets, self.select, strict=True)
        ]

    def close(self) -> None:
        """Waits for the stream, and unpins."""
        self._closed = True
        if not self._lock.acquire(timeout=CLOSE_S):
            _log.warning("the replay's thread does not come back; what is pinned stays pinned")
            return
        try:
            self._handoff.clear()
            for target in self.targets:
                target.close()
        finally:
            self._lock.release()


def _draw_of(rows: NDArray[Any], generations: NDArray[Any], probability: NDArray[np.float64]) -> Draw:
    """A draw that the device made, which has no types of 32 bits without sign for all of it."""
    return Draw(rows.astype(np.uint32), generations.astype(np.uint32), probability)


def _give_back(admitted: list[tuple[StoreSampler, int]]) -> None:
    for sampler, n in admitted:
        sampler.plan.store.limiter.give_back(samples=n)


__all__ = ["DeviceBatchBuilder", "Pending"]
