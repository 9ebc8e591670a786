"""Plots of `geartrain bench allreduce`, one for each measured part."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

from geartrain.tools.plots import import_pyplot
from geartrain_bench.allreduce.report import FRAMING, Case, Cases, find, short, size_text
from geartrain_bench.harness.timing import BenchResult

COLORS = {
    "gloo": "C3",
    "geartrain ring": "C1",
    "geartrain workers": "C0",
    "geartrain workers, tcp": "C9",
    "geartrain workers, spinning": "C6",
    "geartrain workers, C": "C8",
    "geartrain workers, C, spinning": "C7",
    "geartrain dedicated": "C2",
    "geartrain weighted": "C4",
    "mpich": "C5",
    "openmpi": "C6",
    "baidu on mpich": "C7",
    "baidu on openmpi": "C8",
}


def plot(result: BenchResult, path: Path) -> None:
    """A file for each part that was measured: FILE.png for the first, FILE-PART.png for the others."""
    pyplot = import_pyplot()
    path.parent.mkdir(parents=True, exist_ok=True)
    cases: list[Case] = result.cases  # type: ignore[attr-defined]
    drawings = {
        "shaped": _plot_shaped,
        "slow-link": _plot_slow_link,
        "delay": _plot_delay,
        "loopback": _plot_loopback,
        "throughput": _plot_throughput,
    }
    first = True
    for part, draw in drawings.items():
        here = [case for case in cases if case["part"] == part]
        if not here:
            continue
        figure = draw(pyplot, here)
        words = textwrap.wrap(result.command, int(12 * figure.get_figwidth()), break_on_hyphens=False)
        figure.suptitle("\n".join([*words, f"{result.machine['cpu']}, {result.machine['cores']} cores"]), fontsize=9)
        figure.savefig(path if first else path.with_stem(f"{path.stem}-{part}"), dpi=120)
        pyplot.close(figure)
        first = False


def _color(configuration: str) -> str:
    return COLORS.get(configuration, "0.5")


def _finish(axis: Any, title: str, x: str, y: str) -> None:
    if axis.get_yscale() == "log":  # 20, not 2 x 10^1
        axis.yaxis.set_major_formatter("{x:g}")
        least, most = axis.get_ylim()
        axis.yaxis.set_minor_formatter("{x:g}" if most < 20 * least else "")
        axis.tick_params(axis="y", which="minor", labelsize=6)
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_xlabel(x, fontsize=9)
    axis.set_ylabel(y, fontsize=9)
    axis.grid(alpha=0.25, linewidth=0.4)
    axis.legend(fontsize=8)


def _plot_shaped(pyplot: Any, cases: Cases) -> Any:
    """K/B against N and against the array's size; hybrids and the planner, where they were measured."""
    hybrid = any("hybrid" in case["arm"] for case in cases)
    figure, grid = pyplot.subplots(
        1, 2 + hybrid, figsize=(6.2 * (2 + hybrid), 4.8), squeeze=False, layout="constrained"
    )
    over_n, over_size = grid[0][0], grid[0][1]
    nbytes = max(case["nbytes"] for case in cases)
    counts = sorted({case["workers"] for case in cases if case["nbytes"] == nbytes})
    most = max(counts)
    dense = [min(counts) + i * (most - min(counts)) / 50 for i in range(51)]
    over_n.plot(dense, [2 * (n - 1) / n for n in dense], "k:", linewidth=1, label="theory: ring's bytes")
    over_n.plot(dense, [1.0] * len(dense), "k--", linewidth=1, label="theory: dedicated")
    for configuration in ("gloo", "geartrain ring", "geartrain workers", "geartrain dedicated"):
        of_one = [case for case in cases if case["arm"] == configuration]
        for axis, x, points in (
            (over_n, "workers", [case for case in of_one if case["nbytes"] == nbytes]),
            (over_size, "nbytes", [case for case in of_one if case["workers"] == most]),
        ):
            if points:
                at = sorted((case[x], case["units"]) for case in points)
                axis.plot(*zip(*at, strict=True), "o-", color=_color(configuration), label=configuration)
    over_n.set_ylim(0.9, None)
    over_n.set_xticks(counts)
    _finish(over_n, f"{size_text(nbytes)}: time against N", "workers", "K/B")
    over_size.set_xscale("log", base=2)
    over_size.set_yscale("log")
    sizes = sorted({case["nbytes"] for case in cases if case["workers"] == most})
    over_size.set_xticks(sizes, [size_text(one) for one in sizes])
    _finish(over_size, f"N = {most}: time against the array", "array", "K/B")
    if hybrid:
        _plot_hybrids(grid[0][2], cases, nbytes)
    return figure


def _plot_slow_link(pyplot: Any, cases: Cases) -> Any:
    """A bar for each configuration, the largest array."""
    figure, axis = pyplot.subplots(figsize=(6.5, 4.8), layout="constrained")
    largest = max(case["nbytes"] for case in cases)
    bars = [case for case in cases if case["nbytes"] == largest]
    axis.bar([short(case) for case in bars], [case["units"] for case in bars], color=[_color(c["arm"]) for c in bars])
    for place, case in enumerate(bars):
        axis.text(place, case["units"], f"{case['units']:.2f}", ha="center", va="bottom", fontsize=8)
    axis.axhline(1.0, color="k", linestyle="--", linewidth=1, label="floor: the slow worker's own array")
    axis.set_ylim(0, 1.3 * max([1.0, *(case["units"] for case in bars)]))
    rates = " + ".join(f"{rate:g}" for rate in bars[0]["rates_mbit"])
    _finish(axis, f"links of {rates} Mbit/s, {size_text(largest)}", "", "K / the slowest rate")
    return figure


def _plot_hybrids(axis: Any, shaped: Cases, nbytes: int) -> None:
    hybrids = [case for case in shaped if "hybrid" in case["arm"]]
    n = hybrids[0]["workers"] if hybrids else 4
    planned = [(m, 2 * (n - 1) / (n + (n - 2) * m / n)) for m in range(n + 1)]
    axis.plot([m for m, _ in planned], [max(1.0, t) for _, t in planned], "k:", label="planner")
    axis.plot(
        [m for m, _ in planned], [FRAMING * max(1.0, t) for _, t in planned], "k-", linewidth=0.8,
        label=f"planner and headers ({FRAMING - 1:.1%})",
    )  # fmt: skip
    alone = find(shaped, arm="geartrain workers", workers=n, nbytes=nbytes)
    full = find(shaped, arm="geartrain dedicated", workers=n, nbytes=nbytes)
    points = [(case["reducers"], case["units"]) for case in hybrids]
    points += [(0, alone["units"])] if alone else []
    points += [(n, full["units"])] if full else []
    if points:
        axis.plot(*zip(*sorted(points), strict=True), "o", color="C0", label="measured")
    others = find(shaped, arm="gloo", workers=n, nbytes=nbytes)
    if others:
        axis.axhline(others["units"], color="C3", linewidth=1, label="gloo")
    axis.set_xticks(range(n + 1))
    axis.set_ylim(0.9, None)
    _finish(axis, f"N = {n}: reducers", "reducers", "K/B")


def _plot_delay(pyplot: Any, cases: Cases) -> Any:
    """A panel for each size and round trip: milliseconds against N."""
    sizes = sorted({case["nbytes"] for case in cases})
    rtts = sorted({case["rtt_ms"] for case in cases})
    figure, axes = pyplot.subplots(
        1, len(sizes) * len(rtts), figsize=(4.5 * len(sizes) * len(rtts), 4.4), squeeze=False, layout="constrained"
    )
    panels = [(nbytes, rtt_ms) for nbytes in sizes for rtt_ms in rtts]
    for axis, (nbytes, rtt_ms) in zip(axes[0], panels, strict=True):
        here = [case for case in cases if case["nbytes"] == nbytes and case["rtt_ms"] == rtt_ms]
        for configuration in dict.fromkeys(case["arm"] for case in here):
            points = sorted((case["workers"], 1e3 * case["p50_s"]) for case in here if case["arm"] == configuration)
            axis.plot(*zip(*points, strict=True), "o-", color=_color(configuration), label=configuration)
        axis.axhline(rtt_ms, color="k", linestyle="--", linewidth=1, label="one round trip")
        axis.set_yscale("log")
        axis.set_xticks(sorted({case["workers"] for case in here}))
        _finish(axis, f"{size_text(nbytes)}, round trip {rtt_ms:g} ms", "workers", "ms")
    return figure


def _plot_loopback(pyplot: Any, cases: Cases) -> Any:
    """Multiples of a memcpy against the array's size, a panel for each number of ranks."""
    counts = sorted({case["workers"] for case in cases})
    figure, axes = pyplot.subplots(1, len(counts), figsize=(7 * len(counts), 5), squeeze=False, layout="constrained")
    for axis, n in zip(axes[0], counts, strict=True):
        here = [case for case in cases if case["workers"] == n]
        for configuration in dict.fromkeys(case["arm"] for case in here):
            points = sorted(
                (case["nbytes"], case["p50_s"] / case["floor_s"]) for case in here if case["arm"] == configuration
            )
            wide = 2.2 if configuration == "geartrain workers" else 1.2
            axis.plot(
                *zip(*points, strict=True),
                "o-",
                color=_color(configuration),
                label=configuration,
                linewidth=wide,
                markersize=4,
            )
        sizes = sorted({case["nbytes"] for case in here})
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sizes, [size_text(one) for one in sizes])
        _finish(axis, f"{n} ranks of one host", "array", "time, in memcpys of the array")
    return figure


def _plot_throughput(pyplot: Any, cases: Cases) -> Any:
    """Samples a second against workers, during and after backward."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for axis, overlap in zip(axes, (True, False), strict=True):
        here = [case for case in cases if case["overlap"] is overlap]
        for configuration in dict.fromkeys(case["arm"] for case in here):
            points = sorted((case["workers"], case["samples_per_s"]) for case in here if case["arm"] == configuration)
            axis.plot(*zip(*points, strict=True), "o-", color=_color(configuration), label=configuration)
        most = max((case["workers"] for case in here), default=1)
        rate = here[0]["one_worker_bound"] if here else math.nan
        axis.plot([1, most], [rate, rate * most], "k--", linewidth=1, label="without all-reduce")
        axis.set_xticks(sorted({case["workers"] for case in here}))
        _finish(axis, f"all-reduced {'during' if overlap else 'after'} backward", "workers", "samples/s")
    return figure
