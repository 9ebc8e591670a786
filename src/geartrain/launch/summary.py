"""Summary of a job that is over: how it ended, totals of its processes, counts of its store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Summary:
    """How a job went, on this host; summary.json in its folder has the same.

    Attributes:
        outcome: "finished", "failed", "interrupted" or "timed out".
        elapsed_s: of the whole job.
        error: what ended it, if it did not finish.
        folder: of the logs.
        processes: by name: restarts, exit code, totals and metrics.
        restarts: of each role.
        store: rows, and counts of the store's life (`Store.stats`); empty without a store.
    """

    outcome: str = "finished"
    elapsed_s: float = 0.0
    error: str = ""
    folder: str = ""
    processes: dict[str, dict[str, Any]] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    store: dict[str, int] = field(default_factory=dict)


__all__ = ["Summary"]
