"""Plot of the selection bench: CPU time per row over N."""

from __future__ import annotations

import re
from pathlib import Path

import geartrain_bench.harness.report as report
from geartrain_bench.harness.timing import BenchResult
from geartrain_bench.selection.names import P_METRIC, case_name, cpu_metric, short


def plot(result: BenchResult, path: Path) -> None:
    """CPU time per row over N, a panel for each kind of call and batch. Needs matplotlib."""
    cases = [re.fullmatch(r"N (\S+), B (\S+)", row.case) for row in result.rows]
    sizes, batches = (tuple(sorted({int(float(case[n])) for case in cases if case})) for n in (1, 2))
    lines = panels(sizes, batches, result)
    report.plot_lines(result, path, lines, "rows N", "CPU ns per row drawn or changed", len(batches))


def panels(
    sizes: tuple[int, ...], batches: tuple[int, ...], result: BenchResult
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Lines of the plot: for each kind of call and batch, the CPU time per row over N."""
    found = {(row.case, row.metric, row.system): row.p50 for row in result.rows}
    systems = list(dict.fromkeys(row.system for row in result.rows if row.metric != P_METRIC))
    shown: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for what in ("sample", "update"):
        for batch in batches:
            lines = {}
            for system in systems:
                cells = [(rows, found.get((case_name(rows, batch), cpu_metric(what), system))) for rows in sizes]
                if points := [(float(rows), value) for rows, value in cells if value is not None]:
                    lines[system] = points
            shown[f"{what}, B = {short(batch)}"] = lines
    return shown


__all__ = ["panels", "plot"]
