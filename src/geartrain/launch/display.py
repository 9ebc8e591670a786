"""Display of a running job: a live table on a terminal, or a line at intervals elsewhere. launch.log has the lines.

process   alive restarts  steps/s  rows/s  samples/s  waits  version behind  metrics

waits     share of the time spent waiting: a learner's for batches, an actor's for actions and for the rate limiter, a
          worker's for due rows
behind    versions between the newest published weights and the oldest in use by the role
"""

from __future__ import annotations

import importlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from geartrain.launch.job_process import JobProcess
from geartrain.launch.job_store import rows_of
from geartrain.launch.metrics import ProcessMetrics
from geartrain.store.store import Store

if TYPE_CHECKING:
    from geartrain.launch.summary import Summary

_LIVE_EVERY_S = 0.5


@dataclass
class JobView:
    """The values that the display shows."""

    elapsed_s: float
    processes: list[JobProcess]
    metrics: list[ProcessMetrics]
    restarts: dict[str, int]
    version: int | None  # the newest published
    store: Store | None


@dataclass
class RoleLine:
    """One role in the display."""

    name: str
    alive: str
    restarts: int
    steps_per_s: float
    rows_per_s: float
    samples_per_s: float
    waits: float | None
    version: int | None
    behind: int | None
    metrics: dict[str, float]


def lines_of(view: JobView) -> list[RoleLine]:
    """A line for each role: rates summed, shares and metrics averaged over its processes."""
    lines = []
    for name in dict.fromkeys(each.role.name for each in view.processes):
        mine = [(p, s) for p, s in zip(view.processes, view.metrics, strict=True) if p.role.name == name]
        kind = mine[0][0].role.kind
        running = [(p, s) for p, s in mine if p.running] or mine
        versions = [found.version for _, found in mine if found.version is not None]
        oldest = min(versions) if versions and (view.version is not None or any(versions)) else None
        metrics: dict[str, list[float]] = {}
        for _, found in running:
            for metric, value in found.metrics.items():
                metrics.setdefault(metric, []).append(value)
        worked = any(found.counts["steps"] or found.counts["wait_s"] for _, found in mine)
        lines.append(
            RoleLine(
                name,
                f"{sum(p.running for p, _ in mine)}/{len(mine)}",
                view.restarts.get(name, 0),
                sum(found.rates["steps"] for _, found in mine),
                sum(found.rates["rows"] for _, found in mine),
                sum(found.rates["samples"] for _, found in mine),
                sum(min(found.rates["wait_s"], 1.0) for _, found in running) / len(running) if worked else None,
                oldest,
                view.version - oldest
                if kind != "learner" and oldest is not None and view.version is not None
                else None,
                {metric: sum(values) / len(values) for metric, values in metrics.items()},
            )
        )
    return lines


class Display:
    """Prints lines every `every_s` seconds. A context manager, and the base class of the live table."""

    def __init__(self, job: str, every_s: float, prefix: str) -> None:
        self.job, self._every_s, self._prefix = job, every_s, prefix
        self._next_s = 0.0
        self._log: Any = None

    def open_log(self, folder: Path) -> None:
        """Writes the lines to launch.log as well."""
        self._log = (folder / "launch.log").open("a", buffering=1)

    def __enter__(self) -> Display:
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
        """Shows an event."""
        text = f"{time.strftime('%H:%M:%S')} {self._prefix}{text}"
        if self._log is not None and not self._log.closed:
            self._log.write(text + "\n")
        self._print(text)

    def draw(self, view: JobView) -> None:
        """Shows the current state."""
        words = [_line_text(line) for line in lines_of(view)]
        if view.store is not None:
            words.append(f"store {rows_of(view.store)}")
        self.say(f"{view.elapsed_s:.0f} s | " + " | ".join(words))

    def last(self, summary: Summary) -> None:
        """Shows the outcome."""
        self.say(f"{self.job} {summary.outcome} after {summary.elapsed_s:.1f} s; logs in {summary.folder}")

    def _print(self, text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


class LiveTable(Display):
    """One table that is redrawn in place, with events above it."""

    def __init__(self, job: str, prefix: str, console: Any = None) -> None:
        super().__init__(job, _LIVE_EVERY_S, prefix)
        console = console or importlib.import_module("rich.console").Console(emoji=False)
        self._live = importlib.import_module("rich.live").Live(console=console, auto_refresh=False)

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.stop()
        super().__exit__(*error)

    def draw(self, view: JobView) -> None:
        """As `Display.draw`."""
        self._live.update(table_of(self.job, view), refresh=True)

    def _print(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)


def table_of(job: str, view: JobView) -> Any:
    """The table (of the package rich)."""
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
        "metrics": ["  ".join(f"{name} {value:.4g}" for name, value in line.metrics.items()) for line in lines],
    }
    shown = {name: words for name, words in columns.items() if name != "restarts" or any(words)}
    for name in shown:
        table.add_column(name, justify="left" if name in ("role", "metrics") else "right", no_wrap=name != "metrics")
    for row in zip(*shown.values(), strict=True):
        table.add_row(*row)
    if view.store is not None:
        store = view.store
        caption = f"store: {rows_of(store)}, room for {store.capacity:,}"
        if store.limiter.state().enabled:
            caption += f"; {store.limiter.state()}"
        table.caption = caption
    return table


def _line_text(line: RoleLine) -> str:
    words = [f"{line.name} {line.alive}"]
    for value, unit in ((line.steps_per_s, "steps/s"), (line.rows_per_s, "rows/s"), (line.samples_per_s, "samples/s")):
        if value:
            words.append(f"{_rate(value)} {unit}")
    if line.waits is not None:
        words.append(f"waits {line.waits:.0%}")
    if line.version is not None:
        words.append(f"version {line.version:,}" + (f" ({line.behind:,} behind)" if line.behind else ""))
    words += [f"{name} {value:.4g}" for name, value in line.metrics.items()]
    return ", ".join(words)


def _rate(value: float) -> str:
    return "" if not value else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def make_display(job: str, live: bool | None, every_s: float, prefix: str) -> Display:
    """A table where there is a terminal and rich, or lines; `live` forces either."""
    if live is None:
        live = sys.stdout.isatty()
        if live:
            try:
                importlib.import_module("rich.live")
            except ModuleNotFoundError:
                live = False
    return LiveTable(job, prefix) if live else Display(job, every_s, prefix)


__all__ = ["Display", "JobView", "LiveTable", "RoleLine", "lines_of", "make_display", "table_of"]
