"""Metrics of a job's processes: each process writes counters, and the launcher derives rates and shares from them."""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from geartrain.core.counters import CounterSlot, SharedCounters
from geartrain.errors import ArgumentError

#: Totals, which continue when a process is restarted.
COUNTS = ("steps", "samples", "rows", "episodes", "wait_s", "policy_s", "environment_s", "store_s")
#: Columns of metrics that a process names itself: losses, returns.
METRICS = tuple(f"own{i}" for i in range(16))
COLUMNS = (*COUNTS, "version", "pid", "beat_s", "stop", "own", *METRICS)
#: Rates are averages over the last seconds of this window.
WINDOW_S = 5.0


class Reporter:
    """A process's side: writes counters and metrics to the process's slot.

    Args:
        slot: of this process; None outside of a launch, where reports go nowhere.
        names: file for the names of its metrics; None to keep them to itself.
    """

    def __init__(self, slot: CounterSlot | None, names: Path | None) -> None:
        self._slot = slot
        self._names_path = names
        self._names: list[str] = []
        if names is not None and names.exists():  # of this process before it was started again
            self._names = json.loads(names.read_text())
        self._before = {} if slot is None else {name: slot[name] for name in COUNTS}

    def count(self, name: str, value: float) -> None:
        """Total of this process since it was started."""
        if self._slot is not None:
            self._slot[name] = self._before[name] + value

    def version(self, version: int) -> None:
        """Version of the weights that it acts with, or has trained last."""
        if self._slot is not None:
            self._slot["version"] = version

    def metric(self, name: str, value: float) -> None:
        """Latest value of a metric. Raises `ArgumentError` for more than 16 names."""
        if name not in self._names:
            if len(self._names) == len(METRICS):
                raise ArgumentError(f"a process reports at most {len(METRICS)} metrics, and {name!r} is one more")
            self._names.append(name)
            if self._names_path is not None:
                beside = self._names_path.with_suffix(".new")
                beside.write_text(json.dumps(self._names))
                beside.replace(self._names_path)
        if self._slot is not None:
            self._slot[METRICS[self._names.index(name)]] = float(value)
            self._slot["own"] = len(self._names)

    def heartbeat(self) -> None:
        """The process is alive and makes progress."""
        if self._slot is not None:
            self._slot["beat_s"] = time.time()

    @property
    def stop_requested(self) -> bool:
        """Whether the launcher wants the process to end."""
        return self.stop_requests > 0

    @property
    def stop_requests(self) -> int:
        """How often the launcher has asked it to end: once, and a last time before it kills."""
        return 0 if self._slot is None else int(self._slot["stop"])


@dataclass
class ProcessMetrics:
    """Metrics of one process at one time.

    Attributes:
        counts: COUNTS, since the job began.
        rates: the same per second, of the last seconds.
        version: None before there was one.
        metrics: those that the process named itself.
    """

    counts: dict[str, float] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    version: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class MetricsReader:
    """The launcher's side: reads all slots at intervals, and keeps earlier values to compute rates.

    Args:
        counters: of the job.
        names: for each slot, the file that its `Reporter` writes names to.
    """

    def __init__(self, counters: SharedCounters, names: list[Path]) -> None:
        self._slots = [counters.slot(number) for number in range(counters.slots)]
        self._paths = names
        self._known_names: list[list[str]] = [[] for _ in names]
        self._past: deque[tuple[float, list[dict[str, float]]]] = deque()

    def read(self) -> list[ProcessMetrics]:
        """Metrics of all processes, now."""
        now_s = time.monotonic()
        counts = [{name: slot[name] for name in COUNTS} for slot in self._slots]
        self._past.append((now_s, counts))
        while len(self._past) > 2 and self._past[1][0] < now_s - WINDOW_S:
            self._past.popleft()
        then_s, before = self._past[0]
        elapsed_s = max(now_s - then_s, 1e-9)
        found = []
        for number, slot in enumerate(self._slots):
            rates = {
                name: (counts[number][name] - before[number][name]) / elapsed_s if len(self._past) > 1 else 0.0
                for name in COUNTS
            }
            version = int(slot["version"]) if slot["beat_s"] else None
            names = self._names(number, int(slot["own"]))
            metrics = {name: slot[column] for name, column in zip(names, METRICS, strict=False)}
            found.append(ProcessMetrics(counts[number], rates, version, metrics))
        return found

    def _names(self, number: int, n: int) -> list[str]:
        if len(self._known_names[number]) < n:
            self._known_names[number] = json.loads(self._paths[number].read_text())
        return self._known_names[number][:n]


__all__ = ["COLUMNS", "COUNTS", "METRICS", "MetricsReader", "ProcessMetrics", "Reporter"]
