"""`StagedBatches`: one native call samples a batch into pinned memory, and one copy moves it to the device.

The arena has the layout that the native code gave the batch, so nothing is moved a second time. Tensors are views of
the arena, created on first access. So fields that nobody reads cost nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
from geartrain.core.keys import Keys
from geartrain.device.device import Device
from geartrain.replay.device.arena_batch import ArenaViews
from geartrain.replay.device.staging import PinnedRows, StagedTransfer
from geartrain.replay.device.target import DeviceTarget
from geartrain.replay.device.transfer import ReadyBatch
from geartrain.replay.sampler import StoreSampler

if TYPE_CHECKING:
    import torch

    from geartrain.device.kernels.gather_layout import Arena


@dataclass
class PinnedBatch(PinnedRows):
    """A native batch in pinned memory, and the event of its last copy."""

    device: Device
    memory: torch.Tensor
    rows: _native.SampledBatch
    layout: Arena
    views: ArenaViews
    nbytes: int
    weighed: bool = True
    event: Any = None
    transfer: StagedTransfer | None = None  # of one batch after the other, where nothing is converted

    def mask(self) -> NDArray[np.bool_]:
        return self.rows.mask()

    def sent(self) -> Any:
        self.event = self.device.record()
        return self.event


class StagedBatches:
    """Batches of one replay in pinned memory, used again once they have been copied.

    Args:
        target: of the first store; all have fields and windows alike.
        sampler: of the same store.
        n: rows of a batch.
        mixed: whether a batch has rows of several stores.
    """

    MOST = 8  # batches in pinned memory; a copy of an earlier one is waited for where all of them are in flight

    def __init__(self, target: DeviceTarget, sampler: StoreSampler, n: int, mixed: bool) -> None:
        from geartrain.device.kernels.gather_layout import Arena

        self._target = target
        self._first = sampler.empty_batch(n, mixed)
        fields, metadata, nbytes = self._first.places()
        self.layout = Arena(
            n,
            tuple(fields),
            metadata["mask"],
            metadata["start"],
            metadata["length"],
            metadata["version"],
            metadata["torn"],
            metadata["probability"],
            metadata["importance_weights"],
            nbytes,
        )
        self._views = ArenaViews(target.plan, target.plain, self.layout)
        self._waiting: deque[PinnedBatch] = deque()  # the one that was sent longest ago first
        self._made = 0

    @property
    def nbytes(self) -> int:
        """Bytes of pinned memory."""
        return self._made * self.layout.nbytes

    def take(self) -> PinnedBatch:
        """A batch that is in use by no copy, to be filled and sent, or given back."""
        device, waiting = self._target.device, self._waiting
        done = bool(waiting) and device.done(waiting[0].event)
        if waiting and (done or self._made >= self.MOST):
            one = waiting.popleft()
            if not done:
                device.sync(one.event)
            one.rows.forget_weights()
            return one
        memory = device.pinned(self.layout.nbytes)
        self._made += 1
        rows = self._first.placed_in(memory.numpy())
        return PinnedBatch(device, memory, rows, self.layout, self._views, self.layout.nbytes)

    def give_back(self, one: PinnedBatch) -> None:
        """One that was not sent."""
        if one.event is None:
            one.event = self._target.device.record()
        self._waiting.appendleft(one)

    def send(self, one: PinnedBatch, keys: Keys, step: int) -> ReadyBatch:
        """Sends it on the target's stream. `keys` has nothing of its memory, which is used again."""
        rows = one.rows
        transfer = one.transfer
        if transfer is None:
            transfer = StagedTransfer([self._target], self.layout.n, one)
            if self._target.plain is self._target.gather:  # else its conversions may be still to come
                one.transfer = transfer
        ready = transfer.finish(keys, rows.probability(), rows.importance_weights(), step)
        if one.transfer is not None:
            transfer.forget()
        self._waiting.append(one)
        return ready


__all__ = ["PinnedBatch", "StagedBatches"]
