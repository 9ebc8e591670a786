"""What is left to say of a job that is over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Summary:
    """How a job went, on this host; summary.json in its folder has the same.

    Attributes:
        outcome: "finished", "failed", "interrupted" or "timed out".
        elapsed_s: of all of it.
        error: what ended it, if it did not finish.
        folder: of the logs.
        parts: for each process: restarts, exit code, totals and figures.
        restarts: of each role.
        store: rows, and counts of the store's life (`Store.stats`); empty without a store.
    """

    outcome: str = "finished"
    elapsed_s: float = 0.0
    error: str = ""
    folder: str = ""
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    store: dict[str, int] = field(default_factory=dict)


__all__ = ["Summary"]
