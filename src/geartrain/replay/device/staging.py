"""Staging buffer: a batch gathered by the CPU into pinned memory, and its copy to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.replay.device.layout import arrangement
from geartrain.replay.device.target import DeviceTarget, gather_plan_of
from geartrain.replay.device.transfer import BatchTransfer
from geartrain.replay.fetch_plan import FetchedRows


class StagingBuffer:
    """Pinned memory for a batch of n rows as the CPU makes it: raw and padded, laid out as the kernel would."""

    def __init__(self, target: DeviceTarget, n: int) -> None:
        self.target = target
        self.plain = gather_plan_of(target.plan, {}, False)
        self.layout = self.plain.arena(n)
        self.buffer = target.pool.take(self.layout.nbytes)
        plan = target.plan
        self.arrays = [
            self._array(at, plan.raw_dtype(name), plan.shape(name, n))
            for name, at in zip(plan.names, self.layout.fields, strict=True)
        ]

    def _array(self, at: int, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        made: NDArray[Any] = self.buffer.numpy()[at : at + nbytes].view(dtype).reshape(shape)
        return made

    def send(self, raw: FetchedRows) -> BatchTransfer:
        """Copies the batch, whose fields lie in `arrays`, to an arena by one copy, converts and packs there."""
        import torch

        target, layout = self.target, self.layout
        n, steps, device = layout.n, self.plain.steps, target.device
        self._array(layout.mask, np.bool_, (n, steps))[...] = raw.mask
        self._array(layout.starts, np.int32, (n,))[...] = raw.starts
        self._array(layout.lengths, np.int32, (n,))[...] = raw.lengths
        self._array(layout.versions, np.int64, (n,))[...] = raw.versions
        self._array(layout.torn, np.uint8, (n,))[...] = 0
        transfer = BatchTransfer(target, n)
        as_it_is = not target.gather.packed and not target.options.convert
        with device.on(target.stream):
            padded = transfer.arena if as_it_is else device.empty((layout.nbytes,), torch.uint8)
            device.copy(padded, self.buffer[: layout.nbytes])
            target.pool.give(self.buffer)
        if not as_it_is:
            work = arrangement(transfer, padded, self.plain, layout, raw.mask)
            with device.on(target.stream):
                device.run(work)
        return transfer


__all__ = ["StagingBuffer"]
