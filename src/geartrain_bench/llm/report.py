"""Report of `geartrain bench llm`: its targets beside what was found, and a plot."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import geartrain_bench.harness.report as report
import geartrain_bench.llm.links as links
import geartrain_bench.llm.remote as remote
from geartrain.tools.plan.report import number
from geartrain.tools.plots import import_pyplot
from geartrain_bench.harness.timing import BenchResult, Row
from geartrain_bench.llm.memory import GATHER, MEMORY, TAIL
from geartrain_bench.llm.processes import PIPELINE, WAKES
from geartrain_bench.llm.run import CPU, PEER, WALL

OURS, PADDED = "geartrain", "geartrain, padded rows"


class Target(NamedTuple):
    """A promise: what is compared, the limit, and whether more is better."""

    what: str
    limit: float
    found: float
    at_least: bool

    @property
    def met(self) -> bool:
        """Whether the limit is kept."""
        return self.found >= self.limit if self.at_least else self.found <= self.limit


def targets(result: BenchResult) -> list[Target]:
    """Those whose rows the result has, in the order in which they are measured."""
    rows = {(row.case, row.system, row.metric): row for row in result.rows}
    found: list[Target] = []

    def ratio(
        what: str, limit: float, above: tuple[str, str, str], below: tuple[str, str, str], at_least: bool
    ) -> None:
        if above in rows and below in rows:
            found.append(Target(what, limit, rows[above].p50 / rows[below].p50, at_least))

    def value(what: str, limit: float, key: tuple[str, str, str], at_least: bool, of: Callable[[Row], float]) -> None:
        if key in rows:
            found.append(Target(what, limit, of(rows[key]), at_least))

    for per_row, limit in ((16, 40.0), (1, 25.0)):
        case = f"put, rows of {per_row}"
        ratio(f"{case}: its CPU / ours", limit, (case, PEER, CPU), (case, OURS, CPU), True)
    for per_row, limit in ((16, 1.5), (1, 2.0)):
        case = f"packed fetch, rows of {per_row}"
        ratio(f"{case}: its CPU / ours", 80.0, (case, PEER, CPU), (case, OURS, CPU), True)
        ratio(f"{case}: time / memcpy", limit, (case, OURS, WALL), (case, "floor", WALL), False)
    for case in ("a later field, rows of 16", "a later field, rows of 1", "one row"):
        ratio(f"{case}: CPU / padded rows", 1.5, (case, OURS, CPU), (case, PADDED, CPU), False)
    for case in dict.fromkeys(row.case for row in result.rows if row.case.startswith("claim ")):
        ratio(f"{case}: its CPU / ours", 80.0, (case, PEER, CPU), (case, OURS, CPU), True)
    for row in result.rows:
        if row.metric == WAKES and row.system == OURS:
            value(f"{WAKES}, {row.case}, us", 100.0 if row.case.startswith("p50") else 1000.0,
                  (row.case, OURS, WAKES), False, lambda row: row.p50)  # fmt: skip
        elif row.metric == PIPELINE:
            value(f"{row.case}: rows/s", 3000.0, (row.case, OURS, PIPELINE), True, lambda row: row.p50)
        elif row.metric in (MEMORY, TAIL) and "rows of 16" in row.case:
            grows = "growing" in row.case
            limit = (1.10 if grows else 1.05) if row.metric == MEMORY else (1.30 if grows else 1.10)
            value(f"{row.case}: {row.metric}", limit, (row.case, OURS, row.metric), False, lambda row: row.p50)
        elif row.metric == GATHER and row.system == OURS and (limit := gather_limit(row.case)):
            value(
                f"{row.case}: cold gather / memcpy",
                limit,
                (row.case, OURS, GATHER),
                True,
                lambda row: row.ratio_to_floor,
            )
    for case in dict.fromkeys(row.case for row in result.rows if row.metric == links.TIME):
        ratio(
            f"{case}: tokens/s of a rank / one host's",
            0.95,
            (case, links.ONE, links.TIME),
            (case, links.BALANCED, links.TIME),
            True,
        )
    ratio(
        f"{remote.CASE}: share of the link",
        0.8,
        (remote.CASE, remote.BARE, remote.TIME),
        (remote.CASE, remote.SERVER, remote.TIME),
        True,
    )
    ratio(
        f"{remote.CASE}: CPU of its storage units / our server's",
        40.0,
        (remote.CASE, PEER, remote.SERVER_CPU),
        (remote.CASE, remote.SERVER, remote.SERVER_CPU),
        True,
    )
    return found


def gather_limit(case: str) -> float:
    """The share of memcpy that a case must reach; 0 for none."""
    if case.startswith("20 to 400"):
        return 0.4
    if case.startswith("200 to 2,048"):
        return 0.6 if case.endswith("rows of 1") else 0.9
    return 0.9 if float(case.split(maxsplit=1)[0]) >= 12 else 0.0


def print_overview(result: BenchResult) -> None:
    """The targets, after the tables of figures."""
    cells = {
        one.what: [
            f"{'>=' if one.at_least else '<='} {one.limit:g}",
            number(one.found),
            "yes" if one.met else "no",
        ]
        for one in targets(result)
    }
    if cells:
        report.print_counts("targets", ["what", "target", "found", "met"], cells)


def show(result: BenchResult, json_path: Path | None, plot_path: Path | None) -> None:
    """Prints the tables and writes the requested files."""
    report.report(result, json_path, plot_path, overview=print_overview, draw=plot)


#: Panels: title -> metric.
_PANELS = {
    "CPU time of a call, ms (shorter is better)": CPU,
    f"{WAKES}, us": WAKES,
    "memory over payload when full (1 is the floor)": MEMORY,
    "cold gather, share of memcpy by CPU time": GATHER,
}
_COLORS = {"floor": "#888888", OURS: "#0b5fa5", PEER: "#d1495b", PADDED: "#e09f3e", "a memcpy a row, in C": "#888888"}


def plot(result: BenchResult, path: Path) -> None:
    """Bars of each case, a panel for each kind of figure. Needs matplotlib."""
    pyplot = import_pyplot()
    panels = {title: [row for row in result.rows if row.metric == metric] for title, metric in _PANELS.items()}
    panels = {title: rows for title, rows in panels.items() if rows}
    heights = [0.8 + 0.16 * len(rows) + 0.14 * len({row.case for row in rows}) for rows in panels.values()]
    figure, axes = pyplot.subplots(
        max(1, len(panels)), 1, figsize=(11.0, sum(heights) + 0.9), squeeze=False, layout="constrained",
        gridspec_kw={"height_ratios": heights or [1.0]},
    )  # fmt: skip
    for axis, (title, rows) in zip(axes[:, 0], panels.items(), strict=False):
        _bars(axis, title, rows)
    words = textwrap.wrap(result.command, 110, break_on_hyphens=False)
    figure.suptitle("\n".join([*words, f"{result.machine['cpu']}, {result.machine['cores']} cores"]), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(axis: Any, title: str, rows: list[Row]) -> None:
    shares = rows[0].metric == GATHER
    drawn = [row for row in rows if not (shares and row.system == "floor")]
    at, labels, last = 0.0, [], ""
    for row in drawn:
        at += 1.0 if row.case == last or not last else 1.8
        last = row.case
        value = row.ratio_to_floor if shares else _in_ms(row)
        axis.barh(at, value, color=_COLORS.get(row.system, "#5b9bd5"), height=0.85)
        text = f"{row.ratio_to_floor:.2f} ({number(row.p50)} {row.unit})" if shares else number(value)
        axis.text(value, at, f" {text}", va="center", fontsize=7)
        labels.append((at, f"{row.case}: {row.system}"))
    if rows[0].metric in (CPU, WAKES):
        axis.set_xscale("log")
    elif rows[0].metric == MEMORY:
        axis.set_xlim(1.0, None)
    axis.margins(x=0.12, y=0.01)
    axis.set_yticks([place for place, _ in labels], [name for _, name in labels], fontsize=7)
    axis.invert_yaxis()
    axis.set_title(title, loc="left", fontsize=10)
    axis.grid(axis="x", alpha=0.25, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)


def _in_ms(row: Row) -> float:
    """A time of a call in milliseconds, whatever its unit; other numbers as they are."""
    return row.p50 / 1e3 if row.metric == CPU and row.unit == "us" else row.p50


__all__ = ["Target", "plot", "print_overview", "show", "targets"]
