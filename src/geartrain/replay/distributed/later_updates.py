"""Priority updates that take effect so many batches after the one that they came with."""

from __future__ import annotations

from typing import Generic, TypeVar

Updates = TypeVar("Updates")


class LaterUpdates(Generic[Updates]):
    """Updates that have come and are not applied yet, in the order of batches.

    Args:
        lag: batches after which they are.
    """

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._kept: list[tuple[int, Updates]] = []

    def keep(self, step: int, updates: Updates) -> None:
        """Keeps what has come with the batch of a step."""
        self._kept.append((step, updates))

    def due(self, step: int) -> list[Updates]:
        """Those that the batch of a step is drawn with; they are the caller's to apply."""
        count = sum(1 for came, _ in self._kept if came + self._lag <= step)
        due, self._kept = self._kept[:count], self._kept[count:]
        return [updates for _, updates in due]

    def all(self) -> list[Updates]:
        """All of them, which are the caller's now."""
        kept, self._kept = self._kept, []
        return [updates for _, updates in kept]


__all__ = ["LaterUpdates"]
