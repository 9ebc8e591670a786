"""Queue of priority updates that take effect a fixed number of batches after they arrive."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

Updates = TypeVar("Updates")


class LaterUpdates(Generic[Updates]):
    """Updates that have come and are not applied yet, in the order of batches.

    Args:
        lag: batches after which they are applied; with 0 before the batch that they came with.
    """

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._kept: deque[tuple[int, Updates]] = deque()

    def keep(self, step: int, updates: Updates) -> None:
        """Keeps what has come with the batch of a step."""
        self._kept.append((step, updates))

    def due(self, step: int) -> list[Updates]:
        """Removes and returns the updates that the batch of a step is drawn with. The caller applies them."""
        due = []
        while self._kept and self._kept[0][0] + self._lag <= step:
            due.append(self._kept.popleft()[1])
        return due

    def all(self) -> list[Updates]:
        """All of them, which are the caller's now."""
        kept = [updates for _, updates in self._kept]
        self._kept.clear()
        return kept


__all__ = ["LaterUpdates"]
