"""Device copy of a store's priorities, for draws on the GPU that will read the rows.

It is a copy of the words (8 bytes a row) and of the selectable bits, taken out of the pinned segment by the
device's copy engine when the store has changed. From it `kernels.candidates.DeviceCandidates` draws the rows that the
CPU would draw, and the drawn keys go to the gather without having been on the host. The copy may be behind the store by
what was written meanwhile; a row that was overwritten since is torn, and drawn again.

Cost: 8.1 bytes a row over the link for each batch that finds the store changed, two passes over the priorities
in device memory, and one wait of the replay's thread for the sum of all priorities.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from geartrain.errors import NotEnoughRowsError
from geartrain.replay.device.target import DeviceTarget
from geartrain.selection.strategy import Redraw, Strategy, seed_of, traits_of

# When the CPU chooses faster. Nanoseconds of a draw on the CPU: docs/benchmarks.md. The link's rate and the launches
# are assumed (a PCIe 4.0 x16 link, a dozen launches); `geartrain bench selection --device cuda` measures the rest.
CPU_DRAW_NS = 60.0
LINK_GB_PER_S = 25.0
LAUNCHES_US = 60.0

# Counters of a store that tell that words have changed.
_CHANGES = ("inserted", "evicted", "expired", "exhausted", "deleted", "abandoned", "priorities_updated", "repairs")


def why_not(strategy: Strategy) -> str | None:
    """What keeps a strategy's rows from being chosen on a device; None when they can be."""
    reason = traits_of(strategy).why_host
    return None if reason is None else f"{type(strategy).__name__} {reason}"


def pays(rows: int, draws: int) -> bool:
    """Whether keeping a copy of so many rows for each batch of so many draws takes less than drawing on the CPU."""
    copied_us = 8.125 * rows / (LINK_GB_PER_S * 1e3)
    return draws * CPU_DRAW_NS / 1e3 > copied_us + LAUNCHES_US


class DevicePriorities:
    """What can be drawn from a target's store, in device memory.

    Args:
        target: whose segment is pinned.
        ordered: keep the order of commits as well (48 bytes a row), which the ordered strategies and no others need.
    """

    def __init__(self, target: DeviceTarget, *, ordered: bool) -> None:
        import torch

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
        with target.device.on(target.stream):
            self._copies = [target.device.empty((len(part),), torch.uint8) for part in self._parts]
        self._candidates: Any = None
        self._seen: tuple[int, ...] | None = None
        self._settled = False
        self.refreshed = 0  # times

    def draw(self, strategy: Strategy, n: int, step: int, redraw: Redraw | None) -> tuple[Any, Any, Any]:
        """Rows (int64), generations (int64) and probabilities (float64) of a step, or of some draws again, all of them
        tensors on the device.

        Raises:
            EmptyStoreError, NotEnoughRowsError: there is nothing, or not enough, to choose from.
        """
        target = self._target
        with target.device.on(target.stream):
            candidates = self._current()
            attempt = 0 if redraw is None else redraw.attempt
            kept = np.empty(0, np.uint32) if redraw is None else redraw.kept
            wanted = n if redraw is None else len(redraw.numbers)
            traits, seed = traits_of(strategy), seed_of(strategy)
            if traits.order is not None:
                rows, _, probability, found = candidates.first(traits.order, wanted, 0, kept)
                if found < wanted:
                    raise NotEnoughRowsError(f"{n} rows were asked for, {found + len(kept)} can be chosen")
            elif traits.replacement:
                numbers = n if redraw is None else redraw.numbers
                strata = n if traits.stratified else 0
                rows, _, probability, _ = candidates.draw(traits.by_priority, seed, step, attempt, numbers, strata)
            else:
                rows, _, probability, _ = candidates.draw_distinct(
                    traits.by_priority, seed, step, attempt, wanted, kept
                )
            generations = (self._words()[rows] >> 32) & 0xFFFFFFFF
        return rows, generations, probability

    def _words(self) -> Any:
        import torch

        return self._copies[0].view(torch.int64)

    def _current(self) -> Any:
        native = self._target.plan.store.native
        counters = native.counters()
        seen = (native.total_priority(), *(counters[name] for name in _CHANGES))
        # A counter may move just before its word does: what has changed is copied once more the next time.
        if self._candidates is None or seen != self._seen or not self._settled:
            self._settled = seen == self._seen
            self._seen = seen
            self._refresh()
        return self._candidates

    def _refresh(self) -> None:
        import torch

        from geartrain.device.kernels.candidates import DeviceCandidates

        self.refreshed += 1
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


__all__ = ["DevicePriorities", "pays", "why_not"]
