"""Schedules: numbers that depend on the step, for example to anneal alpha and beta."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from geartrain.errors import ArgumentError
from geartrain.selection.arguments import check_number

Schedule = float | Callable[[int], float]


@dataclass(frozen=True)
class Linear:
    """A linear schedule from `start` to `end` over `steps` steps, constant afterwards.

    Args:
        start: value at step 0.
        end: value from step `steps` on.
        steps: length of the ramp, in batches.

    Examples:
        >>> Linear(0.4, 1.0, steps=100)(50)
        0.7
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        check_number("start", self.start)
        check_number("end", self.end)
        check_number("steps", self.steps, "a finite number >= 0", least=0)

    def __call__(self, step: int) -> float:
        """The schedule's value at a step.

        Args:
            step: number of the batch.
        """
        if step >= self.steps:
            return self.end
        return self.start + (self.end - self.start) * step / self.steps


def at_step(schedule: Schedule, step: int) -> float:
    """A schedule's value: the number itself, or the function's value at the step.

    Raises:
        ArgumentError: the function returned no number.
    """
    value = schedule(step) if callable(schedule) else schedule
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(f"a schedule returned {value!r} at step {step}, which is no number") from None


def check_schedule(what: str, schedule: Any, *, above: bool = False) -> None:
    """Raises `ArgumentError` unless this is a function, or a finite number of at least (or `above`) zero."""
    if not callable(schedule):
        bound = "above zero" if above else ">= 0"
        check_number(what, schedule, f"a finite number {bound}, or a function of the step", least=0, above=above)


__all__ = ["Linear", "Schedule", "at_step", "check_schedule"]
