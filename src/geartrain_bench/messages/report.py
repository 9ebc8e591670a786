"""Report of `geartrain bench p2p`: one table in the form of the torchrpc page's, and a plot."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import geartrain_bench.harness.report as report
from geartrain.core.shared_files import writing
from geartrain.tools.plots import import_pyplot
from geartrain_bench.harness.timing import BenchResult

ONE_WAY, INTEGER, TENSOR = "one way, acknowledged", "an integer", "a tensor of 8 KB"
#: Families of systems, in the order and the colours in which they are shown.
COLOURS = {
    "geartrain shm": "#0b5fa5",
    "geartrain shm, copied": "#5b9bd5",
    "geartrain shm, spinning": "#08306b",
    "geartrain tcp": "#2ca089",
    "geartrain cuda_ipc": "#0b5fa5",
    "TensorPipe": "#d1495b",
    "ZeroMQ ipc": "#e09f3e",
    "ZeroMQ tcp": "#f2cc8f",
    "gRPC unix": "#7b5ea7",
    "gRPC tcp": "#b9a3d6",
    "Ray actor": "#8d6e63",
    "raw unix": "#6b6b6b",
    "raw tcp": "#a8a8a8",
    "memcpy": "#000000",
    "copy": "#000000",
}


def overview(result: BenchResult) -> dict[str, tuple[list[str], dict[str, list[str]]]]:
    """A row for each system: milliseconds by size and, if measured, the cost of small calls; all p50."""
    found = {(row.system, row.metric, row.case): row.p50 for row in result.rows}
    sizes = list(dict.fromkeys(row.case for row in result.rows if row.metric == ONE_WAY))
    tables = {
        "one way, acknowledged: p50, ms": {(ONE_WAY, size): _short_size(size) for size in sizes},
        "calls: p50": {
            ("call", INTEGER): "integer, us",
            ("call", TENSOR): "8 KB tensor, us",
            ("calls", "1 in flight"): "1 in flight, 1/s",
            ("calls", "64 in flight"): "64 in flight, 1/s",
        },
    }
    shown = {}
    for title, columns in tables.items():
        rows = {}
        for system in sorted({row.system for row in result.rows}, key=_place):
            cells = [found.get((system, *column)) for column in columns]
            if any(cell is not None for cell in cells):
                rows[system] = ["" if cell is None else _digits(cell) for cell in cells]
        if rows:
            shown[title] = (["system", *columns.values()], rows)
    return shown


def print_overview(result: BenchResult) -> None:
    """All systems in one table, after the detailed tables."""
    for title, (columns, rows) in overview(result).items():
        report.print_counts(title, columns, rows)


def show(result: BenchResult, json_path: Path | None, plot_path: Path | None) -> None:
    """Prints the tables and writes the requested files."""
    report.report(result, json_path, plot_path, overview=print_overview, draw=plot)


def plot(result: BenchResult, path: Path) -> None:
    """Time over size and, where they were measured, small calls and calls a second. Needs matplotlib."""
    pyplot = import_pyplot()
    if any(row.metric == "call" for row in result.rows):
        figure = pyplot.figure(figsize=(13.5, 9.6), layout="constrained")
        grid = figure.add_gridspec(2, 2, height_ratios=(1.25, 1))
        _times(figure.add_subplot(grid[0, :]), result)
        small = {INTEGER: "an integer", TENSOR: "an 8 KB tensor"}
        title = "a call and its reply, us (shorter is better)"
        _bars(figure.add_subplot(grid[1, 0]), result, "call", small, title)
        in_flight = {"64 in flight": "64 in flight", "1 in flight": "1 in flight"}
        _bars(figure.add_subplot(grid[1, 1]), result, "calls", in_flight, "calls a second (longer is better)")
    else:  # tensors on GPUs
        figure = pyplot.figure(figsize=(13.5, 5.4), layout="constrained")
        _times(figure.add_subplot(), result)
    words = textwrap.wrap(result.command, 110, break_on_hyphens=False)
    load = result.machine.get("load_average_before", ["?"])[0]
    where = f"{result.machine['cpu']}, {result.machine['cores']} cores, load {load} at the start"
    figure.suptitle("\n".join([*words, where]), fontsize=9, color="#444444")
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _times(axis: Any, result: BenchResult) -> None:
    rows = [row for row in result.rows if row.metric == ONE_WAY]
    cases = list(dict.fromkeys(row.case for row in rows))
    sizes = [1e6 * float(case.split()[0].replace(",", "")) for case in cases]
    ends: list[tuple[float, str]] = []
    for system in sorted({row.system for row in rows}, key=_place):
        found = {row.case: row.p50 for row in rows if row.system == system}
        points = [(size, found[case]) for size, case in zip(sizes, cases, strict=True) if case in found]
        floor = system in ("memcpy", "copy") or system.startswith("raw")
        axis.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=COLOURS.get(system, "#999999"),
            linestyle="--" if floor else "-",
            linewidth=2.6 if system.startswith("geartrain") else 1.4,
            marker="o" if system.startswith("geartrain") else None,
            markersize=4,
        )
        ends.append((points[-1][1], system))
    axis.set_xscale("log")
    axis.set_yscale("log")
    _name_lines(axis, sizes[-1], ends)
    axis.set_xticks(sizes, [_short_size(case) for case in cases])
    axis.minorticks_off()
    axis.set_xlim(sizes[0] * 0.8, sizes[-1] * 1.15)
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title("a tensor one way, acknowledged, ms (lower is better; dashed: floors)", loc="left", fontsize=11)


def _name_lines(axis: Any, x: float, ends: list[tuple[float, str]]) -> None:
    """A label at each line's end, moved apart where they would overlap."""
    low, high = (math.log10(end) for end in axis.get_ylim())
    apart = (high - low) * 0.052
    ends = sorted(ends)
    at: list[float] = []
    for value, _ in ends:
        at.append(max(math.log10(value), at[-1] + apart if at else -math.inf))
    top = high
    for place in reversed(range(len(at))):
        top = at[place] = min(at[place], top)
        top -= apart
    for (value, system), where in zip(ends, at, strict=True):
        axis.annotate(
            f"{system}  {_digits(value)}",
            xy=(x, value),
            xytext=(x * 1.35, 10**where),
            fontsize=8.5,
            va="center",
            color=COLOURS.get(system, "#666666"),
            fontweight="bold" if system.startswith("geartrain") else "normal",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "linewidth": 0.5, "color": "#bbbbbb"},
        )


def _bars(axis: Any, result: BenchResult, metric: str, cases: dict[str, str], title: str) -> None:
    rows = [row for row in result.rows if row.metric == metric]
    systems = sorted({row.system for row in rows}, key=_place)
    thick = 0.8 / len(cases)
    most = max(row.p50 for row in rows)
    for number, (case, words) in enumerate(cases.items()):
        found = {row.system: row.p50 for row in rows if row.case == case}
        for place, system in enumerate(systems):
            if system not in found:
                continue
            y = place + (number - (len(cases) - 1) / 2) * thick
            colour = COLOURS.get(system, "#999999")
            axis.barh(y, found[system], 0.92 * thick, color=colour, alpha=1.0 if number == 0 else 0.55)
            axis.text(
                found[system] * 1.06, y, f"{_digits(found[system])}  {words}", fontsize=7, va="center", color="#333333"
            )
    axis.set_xscale("log")
    axis.set_xlim(right=most * 9)
    axis.set_yticks(range(len(systems)), systems, fontsize=8.5)
    axis.invert_yaxis()
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="x", alpha=0.25, linewidth=0.5)
    axis.set_title(title, loc="left", fontsize=11)


def _place(system: str) -> int:
    return list(COLOURS).index(system) if system in COLOURS else len(COLOURS)


def _short_size(case: str) -> str:
    megabytes = float(case.split(maxsplit=1)[0].replace(",", ""))
    if megabytes >= 1000:
        return f"{megabytes / 1000:.3g} GB"
    return f"{megabytes:.3g} MB" if megabytes >= 0.1 else f"{1000 * megabytes:.3g} KB"


def _digits(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
