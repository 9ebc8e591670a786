"""A batch as the CPU makes it, in pinned memory, and one copy that takes it to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.replay.device.layout import arranging
from geartrain.replay.device.target import Landing, gather_rows_of
from geartrain.replay.device.transfer import Flight
from geartrain.replay.fetch import Raw


class Stage:
    """Pinned memory for a batch of n rows as the CPU makes it: raw and padded, laid out as the kernel would."""

    def __init__(self, landing: Landing, n: int) -> None:
        self.landing = landing
        self.plain = gather_rows_of(landing.plan, {}, False)
        self.layout = self.plain.arena(n)
        self.buffer = landing.bounce.take(self.layout.nbytes)
        plan = landing.plan
        self.arrays = [
            self._array(at, plan.raw_dtype(name), plan.shape(name, n))
            for name, at in zip(plan.names, self.layout.fields, strict=True)
        ]

    def _array(self, at: int, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        made: NDArray[Any] = self.buffer.numpy()[at : at + nbytes].view(dtype).reshape(shape)
        return made

    def send(self, raw: Raw) -> Flight:
        """Copies the batch, whose fields lie in `arrays`, to an arena by one copy, converts and packs there."""
        import torch

        landing, layout = self.landing, self.layout
        n, steps, device = layout.n, self.plain.steps, landing.device
        self._array(layout.mask, np.bool_, (n, steps))[...] = raw.mask
        self._array(layout.starts, np.int32, (n,))[...] = raw.starts
        self._array(layout.lengths, np.int32, (n,))[...] = raw.lengths
        self._array(layout.versions, np.int64, (n,))[...] = raw.versions
        self._array(layout.torn, np.uint8, (n,))[...] = 0
        flight = Flight(landing, n)
        as_it_is = not landing.gather.packed and not landing.options.convert
        with device.on(landing.stream):
            target = flight.arena if as_it_is else device.empty((layout.nbytes,), torch.uint8)
            device.copy(target, self.buffer[: layout.nbytes])
            landing.bounce.give(self.buffer)
        if not as_it_is:
            work = arranging(flight, target, self.plain, layout, raw.mask)
            with device.on(landing.stream):
                device.run(work)
        return flight


__all__ = ["Stage"]
