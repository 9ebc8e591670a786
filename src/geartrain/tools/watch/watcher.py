"""Watcher: snapshots of this host, and of a job's other hosts, one after the other, with their rates and causes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from geartrain.core.shared_files import Trust
from geartrain.launch.host_snapshot import take_snapshot
from geartrain.tools.watch.causes import Diagnosis, find_causes
from geartrain.tools.watch.rates import add_rates


class Watcher:
    """Takes snapshots; any one thread at a time.

    Args:
        trust: whose segments are read.
    """

    def __init__(self, trust: Trust = "user") -> None:
        self._trust = trust
        self._before: dict[str, Mapping[str, Any]] = {}

    def look(self) -> tuple[list[dict[str, Any]], list[Diagnosis], list[str]]:
        """Snapshots with rates since the last look, findings, and hosts that do not answer."""
        found, missing = self._take()
        snapshots = [add_rates(self._before.get(each["host"]), each) for each in found]
        self._before = {each["host"]: each for each in snapshots}
        return snapshots, find_causes(snapshots), missing

    def _take(self) -> tuple[list[dict[str, Any]], list[str]]:
        return [take_snapshot(self._trust)], []

    def close(self) -> None:
        """Nothing is used any more."""


class BackgroundWatcher:
    """A thread that looks every `every_s` seconds and calls `seen` with what `Watcher.look` returns, or its error."""

    def __init__(self, watcher: Watcher, every_s: float, seen: Callable[[Any], None]) -> None:
        self._watcher, self._every_s, self._seen = watcher, every_s, seen
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="geartrain-top", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                self._seen(self._watcher.look())
            except Exception as error:  # for the thread that draws
                self._seen(error)
                return
            if self._stop.wait(self._every_s):
                return

    def close(self) -> None:
        """Ends it; a look under way is waited for, for 5 s."""
        self._stop.set()
        self._thread.join(5.0)


__all__ = ["BackgroundWatcher", "Watcher"]
