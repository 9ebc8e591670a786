"""Reports of a benchmark's result: table, JSON, plot."""

from __future__ import annotations

import argparse
import contextlib
import json
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from geartrain.core.arguments import check_pair
from geartrain.core.shared_files import writing
from geartrain.errors import ArgumentError, MissingDependencyError
from geartrain.tools.plan.report import number
from geartrain.tools.plots import import_pyplot
from geartrain_bench.harness.timing import BenchResult, Row, finish

Result = TypeVar("Result", bound=BenchResult)

#: Columns of a table in a file.
_FILE_COLUMNS = 200
_MARK = "(!)"
#: Of a row: the laps at p95 take so many times as long as those at p50.
_STOOD_STILL = 20
#: Of a plot, each way, whatever a saved result has in it.
_LARGEST_INCHES = 60.0


def report(
    result: Result,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    *,
    overview: Callable[[Result], object] | None = None,
    draw: Callable[[Result, Path], object] | None = None,
) -> None:
    """Prints the result, then what there is to say about it, and writes the requested files.

    Args:
        overview: prints the tables that a benchmark has beside those of all.
        draw: makes the plot, in place of `plot`.
    """
    print_tables(result)
    if overview is not None:
        overview(result)
    print_notes(result)
    if json_path is not None:
        write_json(result, json_path)
    if plot_path is not None:
        (draw or plot)(result, plot_path)


@contextlib.contextmanager
def reported(result: Result, json_path: Path | None, plot_path: Path | None) -> Iterator[Result]:
    """Context of a run whose result is finished and reported at its end; not where it raises."""
    began_s = time.monotonic()
    yield result
    finish(result, began_s)
    report(result, json_path, plot_path)


def _console() -> Any:
    """rich's, as wide as the tables where it is a file: nothing is wrapped or cut there. Raises where there is none."""
    try:
        from rich.console import Console
    except ImportError:
        raise MissingDependencyError("benchmark tables need rich: pip install 'geartrain[cli]'") from None
    console = Console(emoji=False)
    if not console.is_terminal:
        console.width = _FILE_COLUMNS
    return console


def print_tables(result: BenchResult) -> None:
    """The command, and a table per metric; a mark on rows that stood still for a while. Needs rich."""
    console = _console()
    from rich.table import Table

    console.print(f"[bold]{result.command}[/bold]", soft_wrap=True)
    for metric in dict.fromkeys(row.metric for row in result.rows):
        table = Table(title=metric, title_justify="left")
        table.add_column("case", no_wrap=True)
        table.add_column("system", no_wrap=True)
        table.add_column("unit")
        for name in ("p50", "p75", "p90", "p95", "of floor"):
            table.add_column(name, justify="right")
        last = None
        for row in (row for row in result.rows if row.metric == metric):
            if last not in (None, row.case):
                table.add_section()
            numbers = [number(value) for value in (row.p50, row.p75, row.p90, row.p95)]
            shown = row.case if row.case != last else ""
            system = f"{row.system} {_MARK}" if stood_still(row) else row.system
            table.add_row(shown, system, row.unit, *numbers, f"{row.ratio_to_floor:.2f}")
            last = row.case
        console.print(table)


def stood_still(row: Row) -> bool:
    """Whether its slowest laps hardly moved: their rate is zero, or they take twenty times as long as the median."""
    slow, fast = sorted((row.p50, row.p95))
    return slow <= fast / _STOOD_STILL if fast > 0 else row.unit.endswith("/s")


def print_notes(result: BenchResult) -> None:
    """What is behind the tables: the machine, the versions, what was left out, and notes."""
    console = _console()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    for title, facts in (("machine", result.machine), ("versions", result.versions)):
        say(f"{title}: " + ", ".join(f"{key} {value}" for key, value in facts.items()))
    for baseline, reason in result.baselines_missing.items():
        say(f"not measured: {baseline}: {reason}")
    if result.left_out:
        say(f"left out, for --quick ends within a minute: {'; '.join(result.left_out)}")
    load, cores = result.machine.get("load_average_before", [0.0])[0], result.machine["cores"]
    if any(map(stood_still, result.rows)):
        say(
            f"{_MARK}: the slowest laps are {_STOOD_STILL} times slower than the median, or have a rate of zero. "
            "Other programs have taken the processor: run it again on an idle machine"
        )
    if load > cores:
        say(f"note: this machine was busy before the run: load average {load:.1f} on {cores} cores")
    for note in result.notes:
        say(f"note: {note}")


def print_counts(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> None:
    """A further table: a line for each key. On a narrow terminal headings and names go on in the next line."""
    console = _console()
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for place, name in enumerate(columns):
        table.add_column(name, overflow="fold", justify="right" if place else "left")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)


def write_json(result: BenchResult, path: Path) -> None:
    """The result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        path.write_text(json.dumps(result.as_json(), indent=1) + "\n")


#: Metrics that are times, whose ratio to the floor is worth a panel.
_DRAWN_TIMES = ("training step with a new batch",)


def plot(result: BenchResult, path: Path) -> None:
    """Bars of speed relative to the floor: a group per case, a panel per rate and threads. Needs matplotlib.

    Times of training steps are drawn too: the share that the step alone has of them.
    """
    pyplot = import_pyplot()
    panels: dict[str, list[Row]] = {}
    for row in result.rows:
        if row.metric in _DRAWN_TIMES or (row.unit == "GB/s" and "per CPU" not in row.metric):
            _, comma, threads = row.case.rpartition(", ")
            panels.setdefault(f"{row.metric}{comma}{threads}" if "thread" in threads else row.metric, []).append(row)
    if not panels:
        raise ArgumentError(f"the bench {result.bench!r} has no rates to plot")
    systems = list(dict.fromkeys(row.system for rows in panels.values() for row in rows if row.system != "floor"))
    palette = pyplot.get_cmap("tab10")
    colors = {system: palette(i % 10) for i, system in enumerate(systems)}
    widest = max(len({row.case for row in rows}) for rows in panels.values())
    # A bar of every system for each case, and the name of the case below them.
    longest = max(len(row.case) for rows in panels.values() for row in rows)
    wide = max(1.05, 0.16 * len(systems) + 0.3, 0.055 * min(26, longest))
    size = (min(max(9.0, wide * widest + 2), _LARGEST_INCHES), min(4.6 * len(panels) + 0.6, _LARGEST_INCHES))
    figure, axes = pyplot.subplots(len(panels), 1, figsize=size, squeeze=False, layout="constrained")
    for axis, (title, rows) in zip(axes[:, 0], panels.items(), strict=True):
        _panel(axis, title, rows, systems, colors)
    words = textwrap.wrap(result.command, 110, break_on_hyphens=False)
    where = ", ".join(
        filter(None, [result.machine["cpu"], f"{result.machine['cores']} cores", result.machine.get("gpu")])
    )
    figure.suptitle("\n".join([*words, where]), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        figure.savefig(path, dpi=120)
    pyplot.close(figure)


#: As many points of an axis are its ticks.
_MOST_TICKS = 6
#: A panel's lines: system -> its points, with x ascending.
Lines = Mapping[str, Sequence[tuple[float, float]]]


def _tick(value: float) -> str:
    """A tick's label: 200, 1e4, 1e8."""
    return f"{value:g}" if abs(value) < 1e4 else f"{value:.0e}".replace("e+0", "e")


def plot_lines(
    result: BenchResult, path: Path, panels: Mapping[str, Lines], x_label: str, y_label: str, columns: int
) -> None:
    """Lines over two logarithmic axes, a panel for each title, all with the same limits. Needs matplotlib."""
    pyplot = import_pyplot()
    if not panels:
        raise ArgumentError(f"the bench {result.bench!r} has no lines to plot")
    systems = list(dict.fromkeys(system for lines in panels.values() for system in lines))
    palette = pyplot.get_cmap("tab20")
    deep = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(
        deep,
        columns,
        figsize=(4.6 * columns, 3.9 * deep + 1.6),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    found_at = sorted({x for lines in panels.values() for points in lines.values() for x, _ in points})
    heights = [y for lines in panels.values() for points in lines.values() for _, y in points]
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    shown: dict[str, Any] = {}
    for axis, (title, lines) in zip(axes.flat, panels.items(), strict=False):
        for system, points in lines.items():
            ours, floor = system.startswith("geartrain"), system == "floor"
            (shown[system],) = axis.plot(
                [x for x, _ in points],
                [y for _, y in points],
                color="black" if floor else palette(systems.index(system) % 20),
                linestyle="--" if floor else "-",
                linewidth=2.2 if ours else 1.2,
                marker="o" if ours else ".",
                markersize=5,
            )
        axis.set_xscale("log")
        axis.set_yscale("log")
        for one, values in ((axis.xaxis, found_at), (axis.yaxis, heights)):
            subs = (1,) if min(values) <= 0 or max(values) / min(values) > 1e3 else (1, 2, 5)
            one.set_major_locator(pyplot.matplotlib.ticker.LogLocator(subs=subs))
            one.set_major_formatter(pyplot.matplotlib.ticker.FuncFormatter(lambda value, _: _tick(value)))
            one.set_minor_formatter(pyplot.matplotlib.ticker.NullFormatter())
        if len(found_at) <= _MOST_TICKS:
            axis.set_xticks(found_at)
        axis.tick_params(labelleft=True, labelbottom=True)
        axis.grid(alpha=0.25, which="both", linewidth=0.4)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_ylabel(y_label, fontsize=9)
        axis.set_xlabel(x_label, fontsize=9)
    words = textwrap.wrap(result.command, 110, break_on_hyphens=False)
    where = ", ".join(
        filter(None, [result.machine["cpu"], f"{result.machine['cores']} cores", result.machine.get("gpu")])
    )
    figure.suptitle("\n".join([*words, where]), fontsize=9)
    names = [system for system in systems if system in shown]
    figure.legend([shown[name] for name in names], names, fontsize=8, ncols=4, loc="outside lower center")
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(axis: Any, title: str, rows: list[Row], systems: list[str], colors: dict[str, Any]) -> None:
    cases = list(dict.fromkeys(row.case for row in rows))
    floors = {row.case: row.p50 for row in rows if row.system == "floor"}
    here = [system for system in systems if any(row.system == system for row in rows)]
    width = 0.84 / len(here)
    for place, system in enumerate(here):
        found = {row.case: row for row in rows if row.system == system}
        at = [i + (place - (len(here) - 1) / 2) * width for i, case in enumerate(cases) if case in found]
        of_system = [found[case] for case in cases if case in found]
        heights = [row.ratio_to_floor for row in of_system]
        axis.bar(at, heights, 0.92 * width, label=system, color=colors[system])
        for x, row in zip(at, of_system, strict=True):
            inside = row.ratio_to_floor > 0.25
            axis.text(
                x,
                0.02 if inside else row.ratio_to_floor + 0.02,
                number(row.p50),
                rotation=90,
                fontsize=6.5,
                color="white" if inside else "black",
                ha="center",
                va="bottom",
            )
    axis.axhline(1.0, color="black", linewidth=1.2, label="floor")
    shown = {case: "\n".join(textwrap.wrap(_short(case), 26)) for case in cases}
    labels = [f"{shown[case]}\nfloor {number(floors[case])}" if case in floors else shown[case] for case in cases]
    axis.set_xticks(range(len(cases)), labels, fontsize=7)
    axis.set_xlim(-0.6, len(cases) - 0.4)
    axis.set_ylim(0, 1.15 * max(1.1, *(row.ratio_to_floor for row in rows)))
    axis.set_ylabel("speed, floor = 1")
    axis.set_title(f"{title} (numbers: {rows[0].unit}, median)", loc="left", fontsize=10)
    axis.legend(
        fontsize=7,
        ncols=min(9, int(axis.figure.get_figwidth() / 1.7), len(here) + 1),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        frameon=False,
    )


def parse_baselines(given: Sequence[str]) -> dict[str, str]:
    """NAME=PYTHON arguments and the environment's variables, as {name: interpreter}; arguments take precedence."""
    return dict(check_pair("--baseline-python", word, "NAME=/path/to/python") for word in given)


def main_of(folder: str, main: Any) -> None:
    """Command line of `python -m geartrain_bench.FOLDER.bench`."""
    parser = argparse.ArgumentParser(prog=f"python -m geartrain_bench.{folder}.bench")
    parser.add_argument("--quick", action="store_true", help="end within a minute")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--baseline-python", action="append", default=[], metavar="NAME=PYTHON")
    given = parser.parse_args()
    main(
        quick=given.quick,
        json_path=given.json,
        plot_path=given.plot,
        baselines=parse_baselines(given.baseline_python),
    )


def _short(case: str) -> str:
    """A case's name with line breaks, for an axis."""
    return case.rpartition(", ")[0].replace(" x ", "\nx ") if "thread" in case else case
