"""Staging buffer: a batch gathered by the CPU into pinned memory, and its copy to the device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.replay.device.layout import arrangement
from geartrain.replay.device.target import DeviceTarget
from geartrain.replay.device.transfer import BatchTransfer
from geartrain.replay.fetch_plan import FetchedRows


class StagingBuffer:
    """Pinned memory for a batch of n rows as the CPU makes it: raw and padded, laid out as the kernel would."""

    def __init__(self, target: DeviceTarget, n: int) -> None:
        self.target = target
        self.plain = target.plain
        self.layout = self.plain.arena(n)
        self.buffer = target.pool.take(self.layout.nbytes)
        self._memory = self.buffer.numpy()
        plan = target.plan
        self.arrays = [
            self._array(at, plan.raw_dtype(name), plan.shape(name, n))
            for name, at in zip(plan.names, self.layout.fields, strict=True)
        ]

    def _array(self, at: int, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        made: NDArray[Any] = self._memory[at : at + nbytes].view(dtype).reshape(shape)
        return made

    def send(self, raw: FetchedRows) -> BatchTransfer:
        """Copies the batch, whose fields lie in `arrays`, to an arena by one copy, converts and packs there."""
        import torch

        target, layout = self.target, self.layout
        n, steps, device, memory = layout.n, self.plain.steps, target.device, self._memory
        memory[layout.mask : layout.mask + n * steps] = raw.mask.reshape(-1).view(np.uint8)
        memory[layout.starts : layout.starts + 4 * n].view(np.int32)[:] = raw.starts
        memory[layout.lengths : layout.lengths + 4 * n].view(np.int32)[:] = raw.lengths
        memory[layout.versions : layout.versions + 8 * n].view(np.int64)[:] = raw.versions
        memory[layout.torn : layout.torn + n] = 0
        transfer = BatchTransfer(target, n)
        as_it_is = self.plain is target.gather
        end = layout.torn + n
        with device.on(target.stream):
            padded = transfer.arena if as_it_is else device.empty((layout.nbytes,), torch.uint8)
            device.copy(padded[:end], self.buffer[:end])
            target.pool.give(self.buffer)
        if not as_it_is:
            work = arrangement(transfer, padded, self.plain, layout, raw.mask)
            with device.on(target.stream):
                device.run(work)
        return transfer


__all__ = ["StagingBuffer"]
