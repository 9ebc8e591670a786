"""`DeviceTarget`: one store's segment, pinned or not, and the path that its rows take to the device."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.arguments import check_keywords
from geartrain.core.schema import round_up
from geartrain.device.device import Device
from geartrain.device.pinned_memory import Pin, pins
from geartrain.errors import ArgumentError, PinError
from geartrain.replay.device.options import Convert, DeviceOptions, Path
from geartrain.replay.device.pinned_pool import PinnedPool
from geartrain.replay.fetch_plan import FetchPlan
from geartrain.store.recorder import shares_rows

if TYPE_CHECKING:
    import torch

    from geartrain.device.kernels.gather import GatherPlan

_log = logging.getLogger("geartrain.replay.device")

MOST_VIEWS = 64
# Batches of less are staged by "auto": one after the other they take less time than a gather, of which launches and the
# wait for the flags of torn rows are 0.5 ms (docs/benchmarks/gpu.md has both up to 16 MB).
SMALL_BATCH_BYTES = 4 << 20
# The same of rows beyond the crossover, whose copies take no CPU time: an estimate.
SMALL_COPIED_BATCH_BYTES = 1 << 20

# Paths on which the device reads the segment itself.
PINNED_PATHS = ("gather", "copy")
# The largest rows that the GPU gathers by itself. On an H100 (PCIe 5) copy engines move pieces of 20 KB at a tenth of
# the link's rate, of 100 KB at 0.98 of it, of 1 MB at all of it. The gather reaches 0.77 for 4 KB, 0.89 and 0.91, and
# takes some of the multiprocessors' time.
CROSSOVER_BYTES = 96 << 10
# Bytes of a field's window, on average over the fields, from which "auto" has copy engines take them.
SMALLEST_PIECE = CROSSOVER_BYTES


def gather_plan_of(plan: FetchPlan, convert: Mapping[str, Convert], packed: bool) -> GatherPlan:
    """A plan as the kernel takes it. Raises `ArgumentError` for a conversion that there is not."""
    from geartrain.device.kernels.gather import GatherPlan
    from geartrain.device.kernels.gather_layout import GatherField, SegmentLayout

    store = plan.store
    check_keywords("convert", convert, plan.names)
    layout = store.native.layout()
    fields = []
    for name, number in zip(plan.names, plan.numbers, strict=True):
        spec = store.fields[name]
        offset, stride = layout["columns"][number]
        into = convert.get(name)
        block_bytes, timed, taken = spec.block_nbytes(store.max_length), not spec.per_row, plan.taken.get(name)
        step_bytes, places = spec.nbytes, None
        if taken is not None:  # staged, where its steps lie in a batch as one block
            step_bytes, timed = plan.row_bytes(name), False
            places = taken[0] or None
        how = () if into is None else (into.dtype, into.scale, into.shift)
        made = GatherField(name, spec.dtype, spec.itemsize, offset, stride, block_bytes, step_bytes, timed, *how)
        fields.append(made if places is None else dataclasses.replace(made, places=places))
    segment = SegmentLayout(
        layout["words"],
        layout["status"],
        layout["status_stride"],
        store.capacity,
        store.max_length,
        layout["content_numbers"],
    )
    return GatherPlan(segment, fields, plan.window, plan.pad_left, packed)


class DeviceTarget:
    """One store's segment and path, for batches on a device.

    Args:
        device, stream: the device, and the stream that its transfers run on.
        plan: the fields and windows to fetch.
        options: as `Replay` was given them.
        copies: whether the code that fills the batches supports copies row by row.
        rows: rows of a batch, if all batches have the same number.

    Raises:
        PinError: path="gather" or "copy" was requested, and the segment cannot be pinned.
        ArgumentError: an unknown conversion.
    """

    def __init__(
        self,
        device: Device,
        stream: Any,
        plan: FetchPlan,
        options: DeviceOptions,
        *,
        copies: bool = True,
        rows: int | None = None,
    ) -> None:
        self.device = device
        self.stream = stream
        self.plan = plan
        self.options = options
        self.gather = gather_plan_of(plan, options.convert, options.packed)
        self.row_bytes = sum(plan.row_bytes(name) for name in plan.names)
        self.pool = PinnedPool(device)
        self.plain = gather_plan_of(plan, {}, False) if options.convert or options.packed else self.gather
        self.views: dict[tuple[Any, int], Any] = {}  # how a batch is cut from its arena, by its plan and rows
        self._pin: Pin | None = None
        self.segment: torch.Tensor | None = None
        self.path, self.why = self._choose(copies, rows)

    def _choose(self, copies: bool, rows: int | None) -> tuple[str, str]:
        asked, store, windows = self.options.path, self.plan.store, self.plan.windows
        if self.options.packed and windows is not None and windows.offsets is not None:
            raise ArgumentError("packed windows have adjacent steps: leave out packed=True, or offsets")
        if not self.plan.plain:
            placed = "first_only" if windows is None or windows.plain else windows
            if asked in PINNED_PATHS:
                raise ArgumentError(
                    f"the GPU takes all steps of windows that are a number of steps, found {placed}; use path='staged'"
                )
            return "staged", f"the CPU places {placed}"
        if shares_rows(store.fields):
            if asked in PINNED_PATHS:
                raise ArgumentError(
                    f"rows of {store.name!r} hold several episodes, which the CPU tells apart; use path='staged'"
                )
            return "staged", "rows hold several episodes, which the CPU tells apart"
        if asked == "staged":
            return "staged", "it was asked for"
        batch_bytes = self.row_bytes * (SMALL_BATCH_BYTES if rows is None else rows)
        asked_bytes = self.options.crossover_bytes
        most = CROSSOVER_BYTES if asked_bytes is None else asked_bytes
        small_bytes = SMALL_BATCH_BYTES if self.row_bytes <= most else min(SMALL_COPIED_BATCH_BYTES, SMALL_BATCH_BYTES)
        if asked == "auto" and self.options.select != "device" and batch_bytes < small_bytes:
            return "staged", f"a batch has {batch_bytes} bytes, which the CPU copies before kernels are launched"
        path: Path = asked if asked != "auto" else "gather" if self.row_bytes <= most else "copy"
        larger = f"rows of {self.row_bytes} bytes are larger than the crossover of {most}"
        piece_bytes = self.row_bytes // max(1, len(self.plan.names))
        small = f", and their {len(self.plan.names)} fields too small to be copied one by one"
        why_not_copy = "" if copies else ", and ranks do not copy rows one by one"
        why_not_copy = why_not_copy or (small if piece_bytes < SMALLEST_PIECE else "")
        if asked == "auto" and path == "copy" and why_not_copy:
            path, larger = "gather", larger + why_not_copy
        try:
            self._pin = pins().hold(store, self.device, self.options.pin_limit_bytes)
        except PinError as error:
            if asked in PINNED_PATHS:
                raise
            _log.warning("batches of %r are staged through the CPU: %s", store.name, error)
            return "staged", str(error)
        self.segment = self.device.host_view(self._pin.memory)
        if asked in PINNED_PATHS:
            return path, "it was asked for"
        if self.row_bytes > most:
            return path, f"the segment is pinned, and {larger}"
        return path, f"the segment is pinned and rows have {self.row_bytes} bytes, at most {most}"

    @property
    def pin(self) -> Pin | None:
        """Its use of the registered segment; None where it is staged, or closed."""
        return self._pin

    def close(self) -> None:
        """Waits for the stream and releases the segment."""
        if self._pin is not None:
            with self.device.on(self.stream):
                self.device.sync(self.device.record())
            self.segment = None
            self._pin.release()
            self._pin = None

    def keep_views(self, of: tuple[Any, int], views: Any) -> None:
        """Keeps the views of a batch like this one, for the next such batch."""
        if len(self.views) >= MOST_VIEWS:
            self.views.clear()
        self.views[of] = views

    def upload(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        """Small host arrays, on the device by one copy."""
        sizes = [round_up(array.nbytes, 16) for array in arrays]
        total = sum(sizes)
        if total == 0:
            return []
        with self.device.on(self.stream):
            uploaded = self.device.empty((total,), _torch_dtype(np.dtype(np.uint8)))
            buffer = self.pool.take(total)
            memory = buffer.numpy()
            at, views = 0, []
            for array, size in zip(arrays, sizes, strict=True):
                nbytes = array.nbytes
                memory[at : at + nbytes].view(array.dtype)[:] = array.reshape(-1)
                view = uploaded[at : at + nbytes].view(_torch_dtype(array.dtype))
                views.append(view if array.ndim == 1 else view.view(array.shape))
                at += size
            self.device.copy(uploaded, buffer[:total])
            self.pool.give(buffer)
        return views

    def describe(self) -> dict[str, Any]:
        """The path in use and why."""
        return {
            "device": self.device.name,
            "path": self.path,
            "why": self.why,
            "row_bytes": self.row_bytes,
            "pinned_bytes": 0 if self._pin is None else self._pin.memory.nbytes,
            "pinned_pool_bytes": self.pool.nbytes,
        }


@functools.cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    """The torch dtype of the same name. NumPy builds the name anew each time, which is slow."""
    import torch

    found: torch.dtype = getattr(torch, dtype.name)
    return found


__all__ = ["PINNED_PATHS", "SMALLEST_PIECE", "DeviceTarget", "gather_plan_of"]
