"""Schedules: numbers that depend on the step, for example to anneal alpha and beta."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from geartrain.core.arguments import Options, check_real, checked
from geartrain.errors import ArgumentError

Schedule = float | Callable[[int], float]


@dataclass(frozen=True)
class Linear(Options):
    """A linear schedule from `start` to `end` over `steps` steps, constant afterwards.

    Args:
        start: value at step 0.
        end: value from step `steps` on.
        steps: length of the ramp, in batches.

    Examples:
        >>> Linear(0.4, 1.0, steps=100)(50)
        0.7
    """

    start: float = field(metadata=checked(check_real))
    end: float = field(metadata=checked(check_real))
    steps: int = field(metadata=checked(check_real, 0))

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


def check_schedule(what: str, schedule: Any, least: float | None = None, *, above: float | None = None) -> Any:
    """The schedule: a function of the step, or a finite number within the limits."""
    return schedule if callable(schedule) else check_real(what, schedule, least, above=above)


__all__ = ["Linear", "Schedule", "at_step", "check_schedule"]
