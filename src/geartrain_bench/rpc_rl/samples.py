"""Samples of the RPC benchmark, their metrics, and the original's report of them."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain_bench.harness.timing import BenchResult
from geartrain_bench.rpc_rl.settings import BACKENDS, Settings

METRICS = ("agent latency (seconds)", "agent throughput", "observer latency (seconds)", "observer throughput")
PERCENTILES = (50, 75, 90, 95)
PERCENTILE_NAMES = tuple(f"p{place}" for place in PERCENTILES)


@dataclass
class Samples:
    """Seconds: of each decision (of a batch, or of one state) and of each observer's call."""

    batch_size: int
    agent: list[float] = field(default_factory=list)
    observer: list[float] = field(default_factory=list)

    def metrics(self) -> dict[str, dict[str, float]]:
        """The four metrics of the report, and unrounded latencies in microseconds."""
        agent, observer = np.asarray(self.agent), np.asarray(self.observer)
        rates = (self.batch_size / agent, 1 / observer)
        found: dict[str, dict[str, float]] = {}
        for name, values, places in zip(
            METRICS, (agent, rates[0], observer, rates[1]), (3, None, 3, None), strict=True
        ):
            at = _percentiles(values)
            found[name] = {key: int(v) if places is None else round(v, places) for key, v in at.items()}
        return {
            **found,
            "agent_latency_us": _percentiles(agent * 1e6),
            "observer_latency_us": _percentiles(observer * 1e6),
        }


def _percentiles(values: NDArray[np.float64]) -> dict[str, float]:
    return dict(zip(PERCENTILE_NAMES, np.percentile(values, PERCENTILES).tolist(), strict=True))


#: Samples of each measurement, by backend.
Runs = list[dict[str, Samples]]


def report_path(settings: Settings, backend: str) -> Path:
    """Path of a backend's report."""
    path = Path(settings.values["output_file_path"])
    return path if backend == BACKENDS[settings.backend][0] else path.with_suffix(f".{backend}{path.suffix}")


def as_report(settings: Settings, backend: str, runs: Runs, result: BenchResult) -> dict[str, Any]:
    """The original's JSON, and under "about" the machine, versions and command."""
    found = {name: value for name, value in settings.values.items() if name != settings.x_axis_name}
    if settings.x_axis_name is not None:
        found["x_axis_name"] = settings.x_axis_name
    results = []
    for point, samples in zip(settings.points(), runs, strict=False):  # the last ones may be left out
        at = {} if settings.x_axis_name is None else {settings.x_axis_name: point[settings.x_axis_name]}
        results.append({**samples[backend].metrics(), **at})
    found["benchmark_results"] = results
    found["about"] = {
        "backend": backend,
        "threads": settings.threads,
        "agent_threads": settings.agent_threads,
        "command": result.command,
        "machine": result.machine,
        "versions": result.versions,
    }
    return found


def of_report(written: dict[str, Any]) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """The backend of a report, and its measurements by the value of the x axis, or by the number of processes.

    Raises:
        KeyError, TypeError: it is no report of this benchmark.
    """
    axis = written.get("x_axis_name") or "world_size"
    name = axis.replace("_", " ")
    return written["about"]["backend"], [
        (f"{name} {one.get(axis, written.get(axis))}", one) for one in written["benchmark_results"]
    ]


def show(written: dict[str, Any]) -> None:
    """Prints a report as the original does: its arguments, and a line for every point of the x axis."""
    about = written["about"]
    title = (
        f"Distributed rpc benchmark reinforcement learning suite, {about['backend']}, torch threads {about['threads']}"
    )
    lines = ["-" * len(title), title, "-" * len(title)]
    lines += [f"{key} : {value}" for key, value in written.items() if key not in ("benchmark_results", "about")]
    x_axis_name = written.get("x_axis_name")
    first = "" if x_axis_name is None else f"{x_axis_name} |"
    column, group = 7, 4 * 7 + 2
    lines.append(f"{first} " + "".join(f"{metric:<{group}}" for metric in METRICS))
    heads = "".join(f"{f'p{p}':<{column}}" for p in PERCENTILES)
    lines.append(" " * len(first) + " " + f"{heads:<{group}}" * len(METRICS))
    for one in written["benchmark_results"]:
        x = "" if x_axis_name is None else str(one[x_axis_name])
        cells = ["".join(f"{value:<{column}}" for value in one[metric].values()) for metric in METRICS]
        lines.append(f"{x:<{len(first)}} " + "".join(f"{cell:<{group}}" for cell in cells))
    sys.stdout.write("\n".join(line.rstrip() for line in lines) + "\n\n")
    sys.stdout.flush()
