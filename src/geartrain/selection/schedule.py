"""Schedules: numbers that follow the step, such as the annealing of alpha and beta."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Schedule = float | Callable[[int], float]


@dataclass(frozen=True)
class Linear:
    """A schedule from `start` to `end` over `steps` steps, constant afterwards.

    Example:
        >>> Linear(0.4, 1.0, steps=100)(50)
        0.7
    """

    start: float
    end: float
    steps: int

    def __call__(self, step: int) -> float:
        """The schedule's value at a step."""
        if step >= self.steps:
            return self.end
        return self.start + (self.end - self.start) * step / self.steps


def at_step(schedule: Schedule, step: int) -> float:
    """A schedule's value: the number itself, or the function's value at the step."""
    return float(schedule(step)) if callable(schedule) else float(schedule)


__all__ = ["Linear", "Schedule", "at_step"]
