"""Progress reporting: a progress bar on a terminal (with rich), log lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, TextIO

from geartrain.core.printable import printable

LINE_EVERY_S = 5.0


class Progress:
    """Shows the progress of units of work and bytes on stderr. It shows nothing if `enabled` is False.

    Args:
        title: of the work, such as the source's name.
        total: units in all, or None where unknown.
        unit: what is counted, in the plural.
        enabled: False for silence.
        stream: where to write; stderr by default.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        *,
        unit: str = "episodes",
        enabled: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self.title = printable(title)
        self.total = total
        self.unit = unit
        self.enabled = enabled
        self.stream = stream if stream is not None else sys.stderr
        self.done = 0
        self.nbytes = 0
        self._bar: Any = None
        self._task: Any = None
        self._started = self._said = time.monotonic()

    def __enter__(self) -> Progress:
        if self.enabled and self.stream.isatty():
            self._bar = self._rich_bar()
        return self

    def advance(self, nbytes: int, count: int = 1) -> None:
        """`count` more units, of `nbytes` altogether, are done."""
        self.done += count
        self.nbytes += nbytes
        if not self.enabled:
            return
        if (bar := self._bar) is not None:  # once: a signal's handler may close it
            bar.update(self._task, advance=count, mb=f"{self.nbytes / 1e6:,.0f} MB")
        elif time.monotonic() - self._said >= LINE_EVERY_S:
            self._said = time.monotonic()
            of = f" of {self.total:,}" if self.total is not None else ""
            rate = self.nbytes / 1e6 / (self._said - self._started)
            self.say(f"{self.title}: {self.done:,}{of} {self.unit}, {rate:,.0f} MB/s")

    def say(self, line: str) -> None:
        """One line, once."""
        if self.enabled:
            print(printable(line), file=self.stream, flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        bar, self._bar = self._bar, None  # a signal's handler may close it in between
        if bar is not None:
            bar.stop()

    def _rich_bar(self) -> Any:
        try:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as RichProgress
        except ImportError:
            return None
        bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[mb]}"),
            TimeRemainingColumn(),
            console=Console(file=self.stream, emoji=False),
        )
        bar.start()
        self._task = bar.add_task(self.title, total=self.total, mb="0 MB")
        return bar
