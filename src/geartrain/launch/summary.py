"""`Summary`: how a job ended, the totals of its processes, and the counters of its store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Summary:
    """The result of a job on this host. `launch.run` returns it. summary.json in the job's folder has the same content.

    Attributes:
        outcome: "finished", "failed", "interrupted" or "timed out".
        elapsed_s: duration of the whole job, in seconds.
        error: what ended it; "" if it finished.
        folder: folder of the logs.
        processes: for each process by name: restarts, exit code, totals and metrics.
        restarts: restarts of each role.
        store: rows and counters of the store (`Store.stats`); empty without a store.
    """

    outcome: str = "finished"
    elapsed_s: float = 0.0
    error: str = ""
    folder: str = ""
    processes: dict[str, dict[str, Any]] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    store: dict[str, int] = field(default_factory=dict)


__all__ = ["Summary"]
