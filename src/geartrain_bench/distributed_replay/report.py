"""Tables and plots of `geartrain bench ranks`: a plot for each claim."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import geartrain_bench.harness.report as report
from geartrain.core.shared_files import writing
from geartrain.tools.plan.report import number
from geartrain.tools.plots import import_pyplot
from geartrain_bench.harness.timing import BenchResult

Case = Mapping[str, Any]


def print_cases(cases: Sequence[Case]) -> None:
    """Times of a batch, and bytes, in addition to the quantiles."""
    links = [case for case in cases if case["part"] == "links"]
    if links:
        columns = ["", "samples/s", "of one", "wait ms", "MB expected", "moved", "interfaces", "busiest one"]
        rows = {}
        for case in links:
            rows[f"{case['train_ms']:g} ms, {case['system']}"] = [
                number(case["samples_per_s_host"]),
                f"{of_one_host(case, links):.2f}",
                number(case["wait_ms"]),
                *(
                    number(case[what] / 1e6) if case["hosts"] > 1 and known(case, what) else "-"
                    for what in ("expected_bytes", "moved_bytes", "wire_bytes", "busiest_bytes")
                ),
            ]
        report.print_counts("links, by training: samples/s of a host; MB of a batch, all hosts", columns, rows)
    scaling = [case for case in cases if case["part"] == "scaling"]
    if scaling:
        columns = [
            "",
            "samples/s",
            "GB/s",
            "batch ms",
            "select",
            "fetch",
            "exchange",
            "wait",
            "all-gathered B",
            "moved KB",
        ]
        rows = {
            case["case"]: [
                *(
                    number(case[what])
                    for what in ("samples_per_s", "gb_per_s", "batch_ms", "select_ms", "fetch_ms", "exchange_ms")
                ),
                number(case["wait_ms"]),
                f"{case['selection_bytes']:,.0f}",
                f"{case['moved_bytes'] / 1e3:,.0f}",
            ]
            for case in scaling
        }
        report.print_counts("scaling: ms and bytes of a batch; bytes of all ranks together", columns, rows)


def known(case: Case, what: str) -> bool:
    """Whether a figure is defined: Reverb does not report moved bytes."""
    return case["system"] != "reverb" or what != "moved_bytes"


def of_one_host(case: Case, links: Sequence[Case]) -> float:
    """Samples a second of a host, over what one host by itself gets with the same consumer."""
    for other in links:
        if other["system"] == "one host" and other["train_ms"] == case["train_ms"]:
            return float(case["samples_per_s_host"] / other["samples_per_s_host"])
    return float("nan")


def plot(result: BenchResult, cases: Sequence[Case], path: Path) -> None:
    """FILE.png: the links. FILE-batch.png: over batch sizes. FILE-scale.png: the breakdown of a batch's time."""
    pyplot = import_pyplot()
    path.parent.mkdir(parents=True, exist_ok=True)
    links = [case for case in cases if case["part"] == "links"]
    scaling = [case for case in cases if case["part"] == "scaling"]
    if links:
        _plot_links(pyplot, result, links, path)
    if scaling:
        _plot_batches(result, scaling, path.with_stem(path.stem + "-batch"))
        _plot_stages(pyplot, result, scaling, path.with_stem(path.stem + "-scale"))


def plot_result(result: BenchResult, path: Path) -> None:
    """Plots of a result with its cases."""
    plot(result, result.cases, path)  # type: ignore[attr-defined]


def _plot_links(pyplot: Any, result: BenchResult, links: Sequence[Case], path: Path) -> None:
    """Left: samples a second of a host. Right: bytes that crossed the interfaces. A row for each consumer."""
    consumers = list(dict.fromkeys(case["train_ms"] for case in links))
    figure, axes = pyplot.subplots(
        len(consumers), 2, figsize=(12, 2.6 * len(consumers) + 1.2), squeeze=False, layout="constrained"
    )
    for train_ms, (left, right) in zip(consumers, axes, strict=True):
        here = [case for case in links if case["train_ms"] == train_ms]
        names = [case["system"] for case in here]
        _bars(
            left, names, [case["samples_per_s_host"] for case in here], [f"{of_one_host(c, links):.2f}" for c in here]
        )
        left.set_title(f"training {train_ms:g} ms a batch: samples/s a host (of one host)", loc="left", fontsize=10)
        apart = [case for case in here if case["hosts"] > 1]
        moved = [case["wire_bytes"] / 1e6 for case in apart]
        _bars(right, [case["system"] for case in apart], moved, [""] * len(apart))
        right.set_title("MB a batch over all links", loc="left", fontsize=10)
    _title(figure, result)
    with writing(path):
        figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _bars(axis: Any, names: Sequence[str], values: Sequence[float], notes: Sequence[str]) -> None:
    axis.barh(range(len(names)), values, color=["C0" if name == "local_first" else "0.6" for name in names])
    for place, (value, note) in enumerate(zip(values, notes, strict=True)):
        shown = number(value) + (f"  ({note})" if note else "")
        axis.text(value, place, " " + shown, va="center", fontsize=8)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25 * max([*values, 1e-9]))
    axis.grid(alpha=0.25, axis="x", linewidth=0.4)


def _plot_batches(result: BenchResult, scaling: Sequence[Case], path: Path) -> None:
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for case in sorted(scaling, key=lambda case: case["batch"]):
        lines = panels.setdefault(case["where"], {})
        lines.setdefault(case["strategy"], []).append((case["batch"], case["gb_per_s"]))
        if case["strategy"] == "prioritized":
            lines.setdefault("floor", []).append((case["batch"], case["floor_gb_per_s"]))
    places = list(dict.fromkeys(case["where"] for case in scaling))
    ordered = {_ranks_of(place): panels[place] for place in places}
    report.plot_lines(result, path, ordered, "rows of the global batch", "GB/s of all ranks, mean", 3)


def _ranks_of(place: str) -> str:
    """ "2 on 1 host" as "2 ranks on 1 host", "1 on 1 host" as "1 rank on 1 host"; other places as they are."""
    size, on, rest = place.partition(" on ")
    return f"{size} rank{'s' * (size != '1')}{on}{rest}" if on else place


def _plot_stages(pyplot: Any, result: BenchResult, scaling: Sequence[Case], path: Path) -> None:
    """Milliseconds of a batch, a bar for each place and batch size."""
    cases = [case for case in scaling if case["strategy"] == "prioritized"]
    figure, axis = pyplot.subplots(figsize=(11, 0.34 * len(cases) + 1.8), layout="constrained")
    names = [f"{_ranks_of(case['where'])} x {case['batch']}" for case in cases]
    left = [0.0] * len(cases)
    for stage in ("select", "fetch", "exchange"):
        width = [case[f"{stage}_ms"] for case in cases]
        axis.barh(range(len(cases)), width, left=left, label=stage)
        left = [a + b for a, b in zip(left, width, strict=True)]
    axis.plot([case["batch_ms"] for case in cases], range(len(cases)), "k|", markersize=12, label="whole batch")
    axis.set_yticks(range(len(cases)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("ms a batch, mean over the ranks, prioritized", fontsize=9)
    axis.grid(alpha=0.25, axis="x", linewidth=0.4)
    axis.legend(fontsize=8)
    _title(figure, result)
    with writing(path):
        figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _title(figure: Any, result: BenchResult) -> None:
    words = textwrap.wrap(result.command, 110, break_on_hyphens=False)
    where = f"{result.machine['cpu']}, {result.machine['cores']} cores"
    figure.suptitle("\n".join([*words, where]), fontsize=9)
