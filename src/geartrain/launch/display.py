"""How a job looks while it runs: one live table on a terminal, a line now and then elsewhere; launch.log has the lines.

process   alive restarts  steps/s  rows/s  samples/s  waits  version behind  figures

waits     share of the time spent waiting: a learner's for batches, an actor's for actions and for the rate limiter
behind    how many versions the newest published weights are ahead of the oldest that acts
"""

from __future__ import annotations

import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from geartrain.launch.metrics import Seen
from geartrain.launch.process import Process
from geartrain.store.store import Store

if TYPE_CHECKING:
    from geartrain.launch.summary import Summary

_LIVE_EVERY_S = 0.5


@dataclass
class View:
    """What there is to show."""

    elapsed_s: float
    processes: list[Process]
    seen: list[Seen]
    restarts: dict[str, int]
    version: int | None  # the newest published
    store: Store | None


@dataclass
class Line:
    """A role, or one rank of the learners, in words."""

    name: str
    alive: str
    restarts: int
    steps_per_s: float
    rows_per_s: float
    samples_per_s: float
    waits: float | None
    version: int | None
    behind: int | None
    figures: dict[str, float]


def lines_of(view: View) -> list[Line]:
    """A line for each role: rates summed, shares and figures averaged over its processes."""
    lines = []
    for name in dict.fromkeys(each.role.name for each in view.processes):
        mine = [(p, s) for p, s in zip(view.processes, view.seen, strict=True) if p.role.name == name]
        kind = mine[0][0].role.kind
        running = [(p, s) for p, s in mine if p.running] or mine
        versions = [seen.version for _, seen in mine if seen.version is not None]
        oldest = min(versions) if versions and (view.version is not None or any(versions)) else None
        figures: dict[str, list[float]] = {}
        for _, seen in running:
            for figure, value in seen.own.items():
                figures.setdefault(figure, []).append(value)
        worked = any(seen.counts["steps"] for _, seen in mine)
        lines.append(
            Line(
                name,
                f"{sum(p.running for p, _ in mine)}/{len(mine)}",
                view.restarts.get(name, 0),
                sum(seen.rates["steps"] for _, seen in mine),
                sum(seen.rates["rows"] for _, seen in mine),
                sum(seen.rates["samples"] for _, seen in mine),
                sum(min(seen.rates["wait_s"], 1.0) for _, seen in running) / len(running) if worked else None,
                oldest,
                view.version - oldest
                if kind != "learner" and oldest is not None and view.version is not None
                else None,
                {figure: sum(values) / len(values) for figure, values in figures.items()},
            )
        )
    return lines


class Shown:
    """Lines, every `every_s` seconds; also what the live table builds on. A context manager."""

    def __init__(self, job: str, every_s: float, prefix: str) -> None:
        self.job, self._every_s, self._prefix = job, every_s, prefix
        self._next_s = 0.0
        self._log: Any = None

    def into(self, folder: Path) -> None:
        """Writes the lines to launch.log as well."""
        self._log = (folder / "launch.log").open("a", buffering=1)

    def __enter__(self) -> Shown:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._log.close()

    def due(self) -> bool:
        """Whether it is time to draw."""
        if time.monotonic() < self._next_s:
            return False
        first = self._next_s == 0.0
        self._next_s = time.monotonic() + (min(2.0, self._every_s) if first else self._every_s)
        return not first

    def say(self, text: str) -> None:
        """Something has happened."""
        text = f"{time.strftime('%H:%M:%S')} {self._prefix}{text}"
        if self._log is not None and not self._log.closed:
            self._log.write(text + "\n")
        self._print(text)

    def draw(self, view: View) -> None:
        """How it stands now."""
        parts = [_worded(line) for line in lines_of(view)]
        if view.store is not None:
            parts.append(f"store {len(view.store):,} rows")
        self.say(f"{view.elapsed_s:.0f} s | " + " | ".join(parts))

    def last(self, summary: Summary) -> None:
        """It is over."""
        self.say(f"{self.job} {summary.outcome} after {summary.elapsed_s:.1f} s; logs in {summary.folder}")

    def _print(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


class LiveTable(Shown):
    """One table that is drawn again and again, with what happens above it."""

    def __init__(self, job: str, prefix: str, console: Any = None) -> None:
        super().__init__(job, _LIVE_EVERY_S, prefix)
        console = console or importlib.import_module("rich.console").Console()
        self._live = importlib.import_module("rich.live").Live(console=console, auto_refresh=False)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.stop()
        super().__exit__(*error)

    def draw(self, view: View) -> None:
        """As `Shown.draw`."""
        self._live.update(table_of(self.job, view), refresh=True)

    def _print(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)


def table_of(job: str, view: View) -> Any:
    """The table, of rich."""
    minutes, seconds = divmod(int(view.elapsed_s), 60)
    title = f"{job}, {minutes}:{seconds:02d}"
    if view.version is not None:
        title += f", weights {view.version:,}"
    table = importlib.import_module("rich.table").Table(
        title=title, title_justify="left", caption_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    lines = lines_of(view)
    columns = {
        "role": [line.name for line in lines],
        "alive": [line.alive for line in lines],
        "restarts": [str(line.restarts or "") for line in lines],
        "steps/s": [_rate(line.steps_per_s) for line in lines],
        "rows/s": [_rate(line.rows_per_s) for line in lines],
        "samples/s": [_rate(line.samples_per_s) for line in lines],
        "waits": ["" if line.waits is None else f"{line.waits:.0%}" for line in lines],
        "version": ["" if line.version is None else f"{line.version:,}" for line in lines],
        "behind": ["" if line.behind is None else f"{line.behind:,}" for line in lines],
        "figures": ["  ".join(f"{name} {value:.4g}" for name, value in line.figures.items()) for line in lines],
    }
    shown = {name: words for name, words in columns.items() if name != "restarts" or any(words)}
    for name in shown:
        table.add_column(name, justify="left" if name in ("role", "figures") else "right", no_wrap=name != "figures")
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    if view.store is not None:
        store = view.store
        told = f"store: {len(store):,} of {store.capacity:,} rows"
        if store.limiter.state().enabled:
            told += f"; {store.limiter.state()}"
        table.caption = told
    return table


def _worded(line: Line) -> str:
    words = [f"{line.name} {line.alive}"]
    for value, unit in ((line.steps_per_s, "steps/s"), (line.rows_per_s, "rows/s"), (line.samples_per_s, "samples/s")):
        if value:
            words.append(f"{_rate(value)} {unit}")
    if line.waits is not None:
        words.append(f"waits {line.waits:.0%}")
    if line.version is not None:
        words.append(f"version {line.version:,}" + (f" ({line.behind:,} behind)" if line.behind else ""))
    words += [f"{name} {value:.4g}" for name, value in line.figures.items()]
    return ", ".join(words)


def _rate(value: float) -> str:
    return "" if not value else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def show_for(job: str, live: bool | None, every_s: float, prefix: str) -> Shown:
    """A table where there is a terminal and rich, or lines; `live` forces either."""
    if live is None:
        live = sys.stdout.isatty()
        if live:
            try:
                importlib.import_module("rich.live")
            except ModuleNotFoundError:
                live = False
    return LiveTable(job, prefix) if live else Shown(job, every_s, prefix)


__all__ = ["Line", "LiveTable", "Shown", "View", "lines_of", "show_for", "table_of"]
