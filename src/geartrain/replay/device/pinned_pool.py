"""`PinnedPool`: reusable pinned host buffers for copies between host and device."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from geartrain.device.device import Device

if TYPE_CHECKING:
    import torch


class PinnedPool:
    """Pinned buffers for copies between host and device, used again once their copy is done."""

    MOST = 16  # that are not in use; more copies than that in flight are waited for

    def __init__(self, device: Device) -> None:
        self._device = device
        self._given: deque[tuple[torch.Tensor, Any]] = deque()
        self.nbytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A pinned buffer of at least this many bytes. Give it back when its last copy was queued on the stream."""
        for i, (buffer, event) in enumerate(self._given):
            if nbytes <= len(buffer) <= max(4096, 4 * nbytes) and self._device.done(event):
                del self._given[i]
                return buffer
        while len(self._given) >= self.MOST:
            buffer, event = self._given.popleft()
            self._device.sync(event)
            self.nbytes -= len(buffer)
        size = max(4096, 1 << (max(1, nbytes) - 1).bit_length())
        self.nbytes += size
        return self._device.pinned(size)

    def give(self, buffer: torch.Tensor) -> None:
        """Back, for when everything that the current stream was given so far is done."""
        self._given.append((buffer, self._device.record()))

    def give_now(self, buffer: torch.Tensor, event: Any) -> None:
        """Back; `event` has come, and nothing has used the buffer since."""
        self._given.appendleft((buffer, event))


__all__ = ["PinnedPool"]
