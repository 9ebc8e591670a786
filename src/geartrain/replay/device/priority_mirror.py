"""`DevicePriorities`: a store's priorities in GPU memory, to draw rows on the GPU that also gathers them.

The copy holds the row words (8 bytes a row) and the selectable bits. When the store has changed, the device's copy
engine reads them again from the pinned segment. `kernels.candidates.DeviceCandidates` draws from the copy the rows that
the CPU would draw. The keys of these rows go to the gather without a detour through the host.

The copy may lag behind the store. A row that was overwritten since is torn, and is drawn again.

Two kinds of changes reach the copy:

- Priorities that this process updates: the updated rows and their values in the store are sent.
- Changes by others: the store's counters and the sum of all priorities reveal them, and all words are copied again.

Cost per batch if others have changed the store:

- 8.1 bytes a row over the link,
- two passes over the priorities in device memory,
- one wait of the prefetch thread for the sum of all priorities.

A store that does not change is copied once
(`CopyRule`). So is a store that only this process updates, plus 12 bytes for each updated row.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.errors import NotEnoughRowsError
from geartrain.replay.device.target import DeviceTarget
from geartrain.replay.device.transfer import Gathering, GatherTransfer
from geartrain.selection.strategy import Strategy, seed_of, traits_of

_log = logging.getLogger("geartrain.replay.device")
_NO_ROWS = np.empty(0, np.uint32)

# When the CPU chooses faster. Nanoseconds of a draw on the CPU: docs/benchmarks/selection.md. The link is a PCIe 4.0
# x16 one (an H100's carries 55 GB/s); launches of a rebuild and a draw took 70 and 105 us of an H100's host.
CPU_DRAW_NS = 60.0
LINK_GB_PER_S = 25.0
LAUNCHES_US = 175.0

# Counters of a store that tell that words have changed.
_CHANGES = ("inserted", "evicted", "expired", "exhausted", "deleted", "abandoned", "priorities_updated", "repairs")


def why_not(strategy: Strategy) -> str | None:
    """What keeps a strategy's rows from being chosen on a device; None when they can be."""
    reason = traits_of(strategy).why_host
    return None if reason is None else f"{type(strategy).__name__} {reason}"


class CopyRule:
    """Decides where a batch is drawn: on the CPU, or on a device from a copy of the priorities.

    A copy pays only if the store does not change for a while, which nobody knows in advance. So the rule adds up the
    time that draws on the CPU have lost since the last change. It makes a copy once that sum exceeds the copy's time.

    - If a single batch loses that much, the copy is made at once.
    - If the store does not change, the copy is made after some batches.
    - If the store changes before that, no copy is made.

    Draws and copies take at most twice the time of the best choice in hindsight (the ski rental problem).

    Args:
        copied_bytes: bytes of a copy.
    """

    def __init__(self, copied_bytes: int) -> None:
        self.copy_us = copied_bytes / (LINK_GB_PER_S * 1e3)
        self._lost_us = 0.0

    def saved_us(self, draws: int) -> float:
        """Time that the draws of a batch save on the device if the copy is up to date; 0 if they save none."""
        return max(draws * CPU_DRAW_NS / 1e3 - LAUNCHES_US, 0.0)

    def on_device(self, draws: int, unchanged: bool) -> bool:
        """Whether the next batch is drawn on the device; `unchanged` since the last one that was asked about."""
        saved_us = self.saved_us(draws)
        self._lost_us = (self._lost_us if unchanged else 0.0) + saved_us
        return saved_us > 0 and self._lost_us > self.copy_us

    def batches(self, draws: int) -> int:
        """So many batches in a row, of a store that does not change, until a copy is made."""
        return int(self.copy_us // self.saved_us(draws)) + 1


class DevicePriorities:
    """A store's priorities in device memory, to draw rows from.

    Args:
        target: the store's target; its segment is pinned.
        ordered: also keep the order of commits (48 bytes a row), which only the ordered strategies need.
        always: draw on the device whatever it costs.

    Attributes:
        refreshed: how often the store's words were copied.
    """

    def __init__(self, target: DeviceTarget, *, ordered: bool, always: bool = True) -> None:
        assert target.segment is not None
        self._target = target
        layout = target.plan.store.native.layout()
        rows = self._rows = target.plan.store.capacity
        segment = target.segment
        self._parts = [segment[layout["words"] :][: 8 * rows], segment[layout["bits"] :][: -(-rows // 64) * 8]]
        if ordered:
            self._parts.append(segment[layout["status"] :][: layout["status_stride"] * rows])
        self._sequence_at = layout["sequence"] // 8
        self._stride = layout["status_stride"] // 8
        self._rule = None if always else CopyRule(sum(len(part) for part in self._parts))
        self._copies: list[Any] = []
        self._candidates: Any = None
        self._seen: tuple[int, ...] | None = None  # of what others changed, the last time that we looked
        self._begun: tuple[int, ...] | None = None  # when the last batch began
        self._copied: tuple[int, ...] | None = None  # when the words were copied
        self._settled = False  # whether no word that had been counted can have come after the copy
        self._total = 0  # of the store, the last time that we looked
        self._lock = threading.RLock()  # updates and their record, against a look at the store
        self._own = 0  # priorities that this process has updated
        self._updated: list[NDArray[np.uint32]] = []  # their rows, since the copy was begun
        self._follows = False  # whether a copy is kept, which they have to reach
        self._store_priorities = _native.Candidates(target.plan.store.native)
        self._why = "device"
        self._no_memory = ""
        self.refreshed = 0

    def begin(self, draws: int) -> bool:
        """Whether the rows of a batch that begins are drawn here; the copy is brought up to date for them."""
        import torch

        rule = self._rule
        if self._no_memory or (rule is not None and not rule.saved_us(draws)):
            self._why = f"host: {self._no_memory or f'{draws} draws take less than the launches of a device'}"
            return False
        same = self._look()
        unchanged, self._begun = self._seen == self._begun, self._seen
        if rule is not None and not rule.on_device(draws, unchanged):
            self._why = (
                f"host: {draws} draws take less than a copy of {self._rows} priorities, until the store has not "
                f"changed for {rule.batches(draws)} batches"
            )
            self._forget()
            return False
        try:
            with self._target.device.on(self._target.stream):
                self._bring_up_to_date(same)
        except torch.cuda.OutOfMemoryError as error:
            if rule is None:
                raise
            self._copies, self._candidates = [], None
            self._forget()
            self._no_memory = f"the device has no memory for a copy of {self._rows} priorities"
            _log.warning(
                "rows of %r are drawn on the host: %s (%s)", self._target.plan.store.name, self._no_memory, error
            )
            return self.begin(draws)
        self._why = "device"
        return True

    # --- what draws over several shards ask `_native.Candidates` (selection/sharded_totals.py) ---------------------

    shares_rows = False

    def follow(self) -> None:
        """Brings the copy up to date within a batch that is drawn here."""
        with self._target.device.on(self._target.stream):
            self._bring_up_to_date(self._look())

    def total_priority(self) -> int:
        """The sum of the priorities of selectable rows, as of the copy."""
        with self._target.device.on(self._target.stream):
            return int(self._candidates.total_priority())

    def count(self) -> int:
        """Selectable rows, as of the copy."""
        with self._target.device.on(self._target.stream):
            return int(self._candidates.count())

    def find(self, by_priority: bool, targets: NDArray[np.uint64]) -> tuple[Any, Any, Any, int]:
        """Rows, generations and priorities (uint32, on the host) that targets fall into; see `DeviceCandidates.find`.

        12 bytes a target come back. Waits for the device.
        """
        import torch

        target, n = self._target, len(targets)
        if n == 0:
            return *np.empty((3, 0), np.uint32), 0
        device, pool = target.device, target.pool
        with device.on(target.stream):
            (given,) = target.upload([targets.view(np.int64)])
            rows, there, priorities, missing = self._candidates.find(by_priority, given)
            generations = (self._words()[torch.where(there != 0, rows, 0)] >> 32) & 0xFFFFFFFF
            found = torch.stack([rows, torch.where(there != 0, generations, 0), priorities]).to(torch.int32)
            flat = found.view(torch.uint8).view(-1)
            buffer = pool.take(len(flat))
            device.copy(buffer[: len(flat)], flat)
            event = device.record()
        device.sync(event)
        arrays = np.array(buffer[: len(flat)].numpy()).view(np.uint32).reshape(3, n)
        pool.give_now(buffer, event)
        return arrays[0], arrays[1], arrays[2], missing

    # --- updates ---------------------------------------------------------------------------------------------------

    def change(self, rows: NDArray[np.uint32], change: Callable[[], int]) -> int:
        """Called by any thread."""
        with self._lock:
            gone = change()
            self._own += len(rows) - gone
            if self._follows:
                self._updated.append(rows)
        return gone

    def describe(self) -> str:
        """Where the last batch's rows were drawn, and why."""
        return self._why

    def draw(self, strategy: Strategy, n: int, step: int) -> tuple[Any, Any, Any]:
        """Rows (int64), generations (int64) and probabilities (float64) of a step, all of them tensors on the device.

        Raises:
            EmptyStoreError, NotEnoughRowsError: there is nothing, or not enough, to choose from.
        """
        target = self._target
        with target.device.on(target.stream):
            candidates = self._candidates
            traits, seed = traits_of(strategy), seed_of(strategy)
            if traits.order is not None:
                rows, _, probability, found = candidates.first(traits.order, n, 0, _NO_ROWS)
                if found < n:
                    raise NotEnoughRowsError(f"{n} rows were asked for, {found} can be chosen")
            elif traits.replacement:
                strata = n if traits.stratified else 0
                rows, _, probability, _ = candidates.draw(traits.by_priority, seed, step, 0, n, strata)
            else:
                rows, _, probability, _ = candidates.draw_distinct(traits.by_priority, seed, step, 0, n, _NO_ROWS)
            generations = (self._words()[rows] >> 32) & 0xFFFFFFFF
        return rows, generations, probability

    def _words(self) -> Any:
        import torch

        return self._copies[0].view(torch.int64)

    def _forget(self) -> None:
        """The copy will be made anew before it is needed again."""
        with self._lock:
            self._copied, self._follows = None, False
            self._updated.clear()

    def _look(self) -> bool:
        """Sees the store as it is now; whether nobody but this process has changed it since the last look."""
        native = self._target.plan.store.native
        with self._lock:
            counters = native.counters()
            counters["priorities_updated"] -= self._own
            before, self._seen = self._seen, tuple(counters[name] for name in _CHANGES)
            self._total = native.total_priority()
        return before == self._seen

    def _bring_up_to_date(self, same: bool) -> None:
        # A counter may move just before its word does: what has changed is copied once more the next time.
        if self._candidates is None or self._copied != self._seen or not self._settled or not self._follow():
            self._copied, self._settled = self._seen, same
            self._refresh()

    def _follow(self) -> bool:
        """Brings this process's updates to the copy; whether it is what the store was at the last look then."""
        with self._lock:
            updated, self._updated = self._updated, []
            if 4 * sum(len(rows) for rows in updated) > self._rows:
                return False  # copied as fast
            if updated:
                rows = np.unique(np.concatenate(updated))
                priorities = self._store_priorities.priorities(rows)
                self._total = self._target.plan.store.native.total_priority()
        if updated:
            on_device = self._target.upload([rows.astype(np.int64), priorities])
            self._candidates.update(*on_device)
        return bool(self._candidates.total_priority() == self._total)

    def _refresh(self) -> None:
        import torch

        from geartrain.device.kernels.candidates import DeviceCandidates

        self.refreshed += 1
        self._candidates = None
        with self._lock:
            self._updated.clear()
            self._follows = True  # what is updated from here on may be in the copy already, and reaches it again
        if not self._copies:
            self._copies = [self._target.device.empty((len(part),), torch.uint8) for part in self._parts]
        for copy, part in zip(self._copies, self._parts, strict=True):
            self._target.device.copy(copy, part)
        words, bits, rows = self._words(), self._copies[1], self._rows
        priorities = words.view(torch.int32)[0::2].contiguous().view(torch.uint32)  # little endian: the low halves
        shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
        selectable = ((bits[:, None] >> shifts) & 1).reshape(-1)[:rows].bool()
        sequence = None
        if len(self._copies) > 2:
            table = self._copies[2].view(torch.int64).view(rows, self._stride)
            sequence = table[:, self._sequence_at].contiguous()
        self._candidates = DeviceCandidates(priorities, selectable, sequence)


class DrawnTransfer:
    """A gather whose rows the device draws, if that pays. The rows reach the kernel without a detour through the host.

    Native code launches and resolves it like a `Transfer`, and redraws torn rows itself.

    Args:
        transfer: the batch's transfer.
        priorities: of the store that the rows are drawn from.
        strategy, step: strategy of the draws, and their step.
    """

    def __init__(self, transfer: GatherTransfer, priorities: DevicePriorities, strategy: Strategy, step: int) -> None:
        self.copies_all = transfer.copies_all
        self._transfer = transfer
        self._priorities = priorities
        self._strategy = strategy
        self._step = step
        self._n = 0

    def draws(self, n: int) -> bool:
        """Whether the device draws the n rows of the batch."""
        self._n = n
        return self._priorities.begin(n)

    def launch(self, store: int, rows: Any, generations: Any, ends: Any, places: Any) -> Gathering:
        """`rows` is None where the device draws them, and places their windows."""
        if rows is not None:
            return self._transfer.launch(store, rows, generations, ends, places)
        drawn = self._priorities.draw(self._strategy, self._n, self._step)
        placed = seed_of(self._strategy), self._step, 0
        return self._transfer.gather(store, *drawn[:2], draw=placed, places=places, told=drawn)

    def resolve(self, launched: Gathering) -> tuple[NDArray[Any], ...]:
        """And of rows that the device has drawn: rows, generations and probabilities (k,)."""
        found = self._transfer.resolve(launched)
        if len(found) == 5:
            return found
        rows, generations, probability = found[5:]
        return *found[:5], rows.astype(np.uint32), generations.astype(np.uint32), probability


__all__ = ["CopyRule", "DevicePriorities", "DrawnTransfer", "why_not"]
