"""Staged batches: drawn and gathered by one native call into pinned memory, and brought to the device by one copy.

The arena has the layout that the native code has given the batch, so that nothing is moved twice and no field costs
anything: its tensors are cut from the arena when they are asked for. Where fields are converted or windows packed, that
is done on the device, from one arena to another.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import geartrain._native as _native
from geartrain.core.keys import Keys
from geartrain.replay.device.arena_batch import ArenaViews, arena_batch
from geartrain.replay.device.layout import arrangement
from geartrain.replay.device.target import DeviceTarget
from geartrain.replay.device.transfer import BatchTransfer, ReadyBatch
from geartrain.replay.sampler import StoreSampler

if TYPE_CHECKING:
    import torch


@dataclass
class PinnedBatch:
    """A batch in pinned memory, and the event of its last copy."""

    memory: torch.Tensor
    rows: _native.SampledBatch
    event: Any = None


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
        return PinnedBatch(memory, self._first.placed_in(memory.numpy()))

    def give_back(self, one: PinnedBatch) -> None:
        """One that was not sent."""
        if one.event is None:
            one.event = self._target.device.record()
        self._waiting.appendleft(one)

    def send(self, one: PinnedBatch, keys: Keys, step: int) -> ReadyBatch:
        """Copies it to an arena of its own, on the target's stream, where fields are converted and packed.

        `keys` has nothing of its memory, which is used again.
        """
        import torch

        target, layout, plain = self._target, self.layout, self._target.plain
        device, rows = target.device, one.rows
        with device.on(target.stream):
            arena = device.empty((layout.nbytes,), torch.uint8)
            device.copy(arena, one.memory)
            if plain is not target.gather:
                told = rows.probability().copy(), rows.importance_weights()
                transfer = BatchTransfer(target, layout.n)
                device.run(arrangement(transfer, arena, plain, layout, rows.mask()))
                ready = transfer.finish(keys, *told, step)
                one.event = ready.event
            else:
                one.event = device.record()
                absent = () if rows.weighed else ("importance_weights",)
                ready = ReadyBatch(arena_batch(arena, self._views, keys, step, absent=absent), one.event, [arena])
        self._waiting.append(one)
        return ready


__all__ = ["PinnedBatch", "StagedBatches"]
