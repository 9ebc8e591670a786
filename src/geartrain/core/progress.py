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
        delay_s: shows nothing for work that takes less time, in seconds.
        stream: where to write; stderr by default.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        *,
        unit: str = "episodes",
        enabled: bool = True,
        delay_s: float = 0.0,
        stream: TextIO | None = None,
    ) -> None:
        self.title = printable(title)
        self.total = total
        self.unit = unit
        self.enabled = enabled
        self.stream = stream if stream is not None else sys.stderr
        self.done = 0
        self.nbytes = 0
        self._delay_s = delay_s
        self._bar: Any = None
        self._task: Any = None
        self._started = self._said = time.monotonic()

    def __enter__(self) -> Progress:
        self._begin_bar()
        return self

    def advance(self, nbytes: int, count: int = 1) -> None:
        """`count` more units, of `nbytes` altogether, are done."""
        self.done += count
        self.nbytes += nbytes
        if not self.enabled:
            return
        if self._delay_s:
            self._begin_bar()
        if (bar := self._bar) is not None:  # once: a signal's handler may close it
            bar.update(self._task, completed=self.done, mb=self._megabytes())
        elif time.monotonic() - self._said >= LINE_EVERY_S:
            self._said = time.monotonic()
            of = f" of {self.total:,}" if self.total is not None else ""
            rate = f", {self.nbytes / 1e6 / (self._said - self._started):,.0f} MB/s" if self.nbytes else ""
            self.say(f"{self.title}: {self.done:,}{of} {self.unit}{rate}")

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
        self._delay_s = 0.0  # no bar begins any more
        bar, self._bar = self._bar, None  # a signal's handler may close it in between
        if bar is not None:
            bar.stop()

    def _megabytes(self) -> str:
        return f"{self.nbytes / 1e6:,.0f} MB" if self.nbytes else ""

    def _begin_bar(self) -> None:
        """Shows the bar, on a terminal and once the delay is over."""
        if self.enabled and time.monotonic() - self._started >= self._delay_s and self.stream.isatty():
            self._delay_s = 0.0
            self._bar = self._rich_bar()

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
        self._task = bar.add_task(self.title, total=self.total, mb=self._megabytes())
        return bar
