"""How many times as fast a sample and an update together are as the best baseline, in CPU time."""

from __future__ import annotations

from geartrain_bench.harness.timing import BenchResult
from geartrain_bench.selection.names import cpu_metric

#: What is compared: by the name in the table, the systems that sample and that update.
OURS = {
    "rows": ("geartrain with importance", "geartrain with alpha"),
    "steps": ("geartrain steps with importance", "geartrain steps with alpha"),
}


def speedups(result: BenchResult, baselines: list[str]) -> dict[str, dict[str, float]]:
    """By case: "rows" and "steps", the best baseline's time over geartrain's; cases without a baseline are left out.

    Args:
        baselines: names of samplers that both sample and update.
    """
    medians = {(row.metric, row.case, row.system): row.p50 for row in result.rows}

    def both(case: str, sampler: str, updater: str) -> float | None:
        sampled = medians.get((cpu_metric("sample"), case, sampler))
        updated = medians.get((cpu_metric("update"), case, updater))
        return None if sampled is None or updated is None else sampled + updated

    found: dict[str, dict[str, float]] = {}
    for case in dict.fromkeys(row.case for row in result.rows):
        theirs = [ns for name in baselines if (ns := both(case, name, name)) is not None]
        ours = {name: ns for name, pair in OURS.items() if (ns := both(case, *pair)) is not None}
        if theirs and ours:
            found[case] = {name: min(theirs) / ns for name, ns in ours.items()}
    return found


__all__ = ["speedups"]
