"""RPC benchmark for reinforcement learning: many observers request actions from one agent, over geartrain or torch.

A drop-in for PyTorch's `benchmarks/distributed/rpc/rl/launcher.py`: the same arguments in both spellings, the same
workload (10 episodes of 100 steps; a state of 8 KB, a policy of 7 layers, one action back), the same four metrics,
table and JSON. One argument of `settings.LISTS` may be a list with commas and becomes the x axis. Additional arguments:

    --backend geartrain|torch|both   the backend; torch is torch.distributed.rpc, TensorPipe
    --threads 1                      of torch, in every process. The default would spin and compete with the processes
    --agent-threads N                that decide concurrently; by default geartrain's `max_running`, 1, and torch's 16
                                     threads
    --master-port 0                  rendezvous by a file instead of a port

With both, half of geartrain's episodes run before torch's and half after them, so that a machine that gets slower
affects both alike. They never run at the same time: TensorPipe's processes poll, and take CPU time, while idle. Each
backend has a report of its own: FILE.json is the first's, FILE.torch.json torch's.

In the report, as in the original, p95 of a throughput is that of the best 5 %. In `--json`, as in all benchmarks here,
it is the slow tail. The floor is the agent's work without requests: actions for states in memory.

Threats to validity: see docs/bench-rpc-rl.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
from geartrain.core.shared_files import writing
from geartrain.errors import ArgumentError, GeartrainError, MissingDependencyError
from geartrain.tools.plots import import_pyplot
from geartrain_bench.harness.timing import BenchResult, Row
from geartrain_bench.rpc_rl.samples import PERCENTILE_NAMES, Runs, Samples, as_report, of_report, report_path, show
from geartrain_bench.rpc_rl.settings import BACKENDS, Settings, read
from geartrain_bench.rpc_rl.team import started

EPISODES, STEPS = 10, 100
QUICK_EPISODES, QUICK_STEPS = 2, 25
FLOOR_REPEATS = 200


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> BenchResult:
    """Measures, prints the tables, writes the reports, and returns the result with unrounded values.

    `quick` runs 2 episodes of 25 steps. `arguments` are those of the module's docstring. Raises `ArgumentError` for a
    second list and for values that make no sense.
    """
    if baselines:
        raise ArgumentError(
            "the benchmark 'rpc-rl' runs its baseline in this environment: --backend both, no --baseline-python"
        )
    settings = read(arguments)
    episodes, steps = (QUICK_EPISODES, QUICK_STEPS) if quick else (EPISODES, STEPS)
    result, runs = run(settings, episodes, steps, quick=quick)
    words = ["geartrain bench rpc-rl", *["--quick"] * quick, *arguments]
    result.command = " ".join(words)
    for backend in BACKENDS[settings.backend]:
        written = as_report(settings, backend, runs, result)
        show(written)
        path = report_path(settings, backend)
        with writing(path), path.open("w") as file:
            json.dump(written, file)
        result.notes.append(f"the report of {backend} is in {path}: geartrain bench plot {path} draws it")
    report.report(result, json_path, plot_path, draw=plot)
    return result


def run(settings: Settings, episodes: int, steps: int, *, quick: bool = False) -> tuple[BenchResult, Runs]:
    """All measurements."""
    began_s = time.monotonic()
    _need_torch()
    result = harness.new_result("rpc-rl", quick=quick, baselines=(), packages=("numpy", "torch"))
    result.machine["torch_threads"] = settings.threads
    runs: Runs = []
    for point in settings.points():
        case = settings.case(point)
        if not result.deadline.allows(case):
            continue
        harness.say(f"{case}: {', '.join(BACKENDS[settings.backend])}, {point['world_size']} processes each")
        samples, floor = _measure(settings, point, episodes, steps)
        runs.append(samples)
        result.rows += _rows(case, samples, floor)
        load = ", ".join(f"{one:.2f}" for one in os.getloadavg())
        result.notes.append(f"{case}: load average {load} after it, {episodes} episodes of {steps} steps")
        result.notes += _compared(case, samples)
    return harness.finish(result, began_s), runs


def _measure(
    settings: Settings, point: dict[str, Any], episodes: int, steps: int
) -> tuple[dict[str, Samples], list[float]]:
    """One measurement: its backends interleaved, and the floor's seconds, from the agents of the first backend."""
    batch_size = point["world_size"] - 2 if point["batch"] else 1
    samples = {name: Samples(batch_size) for name in BACKENDS[settings.backend]}
    floor: list[float] = []
    for name, turn in _turns(list(samples), episodes):
        with started(name, settings, point) as team:
            if name == next(iter(samples)):
                floor += team.floor(FLOOR_REPEATS)
            for _ in range(turn):
                agent, observer = team.episode(steps)
                samples[name].agent += agent
                samples[name].observer += observer
    return samples, floor


def _turns(backends: list[str], episodes: int) -> list[tuple[str, int]]:
    """Order of backends and their episodes; the last backend runs between the others' halves."""
    *others, last = backends
    before = [(name, episodes // 2) for name in others]
    after = [(name, episodes - episodes // 2) for name in reversed(others)]
    return [*before, (last, episodes), *after]


def _need_torch() -> None:
    try:
        import torch
    except ImportError:
        raise MissingDependencyError("the benchmark 'rpc-rl' needs torch: pip install 'geartrain[torch]'") from None
    if not torch.distributed.is_available() or not torch.distributed.rpc.is_available():
        raise MissingDependencyError("the benchmark 'rpc-rl' needs a torch with torch.distributed.rpc")


# --- results -------------------------------------------------------------------------------------------------------


def _rows(case: str, samples: dict[str, Samples], floor: list[float]) -> list[Row]:
    """Latencies and rates, of which p95 is the slow tail."""
    floor_s = float(np.median(floor))
    whole = Samples(next(iter(samples.values())).batch_size, floor, floor)
    rows = []
    for name, of_one in {"floor": whole, **samples}.items():
        rows += [
            harness.time_row(case, name, "agent latency", "us", of_one.agent, floor_s),
            harness.rate_row(case, name, "agent throughput", "1/s", of_one.agent, of_one.batch_size, floor_s),
            harness.time_row(case, name, "observer latency", "us", of_one.observer, floor_s),
        ]
        if name != "floor":
            rows.append(harness.rate_row(case, name, "observer throughput", "1/s", of_one.observer, 1.0, floor_s))
    return rows


def _compared(case: str, samples: dict[str, Samples]) -> list[str]:
    if set(samples) != {"geartrain", "torch"}:
        return []
    ours, torchs = samples["geartrain"], samples["torch"]
    latency = np.median(ours.observer) / np.median(torchs.observer)
    throughput = np.median(torchs.agent) / np.median(ours.agent)
    return [
        f"{case}: geartrain's observer latency p50 is {latency:.2f}x of torch's, "
        f"its agent throughput p50 {throughput:.2f}x"
    ]


def result_of_report(written: dict[str, Any]) -> BenchResult:
    """A report that this benchmark has written, as a result without a floor, to be drawn.

    Raises:
        ArgumentError: it is no such report.
    """
    try:
        backend, points = of_report(written)
        about = written["about"]
        result = BenchResult("rpc-rl", about["command"], about["machine"], about["versions"])
        for case, found in points:
            for who in ("agent", "observer"):
                at_us = [float(found[f"{who}_latency_us"][name]) for name in PERCENTILE_NAMES]
                # The report's p95 of a rate is that of the best 5 %; in a row it is the slow tail.
                rate = float(found[f"{who} throughput"]["p50"])
                rates = [rate * at_us[0] / one for one in at_us]
                for metric, unit, values in (("latency", "us", at_us), ("throughput", "1/s", rates)):
                    p50, p75, p90, p95 = values
                    result.rows.append(Row(case, backend, f"{who} {metric}", unit, p50, p75, p90, p95, math.nan))
        return BenchResult.of_json(result.as_json())
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ArgumentError(f"this is no report of geartrain bench rpc-rl: {error!r}") from None


def plot(result: BenchResult, path: Path) -> None:
    """The four metrics over the x axis: p50 as lines, p95 dashed. Needs matplotlib."""
    pyplot = import_pyplot()
    cases = list(dict.fromkeys(row.case for row in result.rows))
    backends = [name for name in dict.fromkeys(row.system for row in result.rows) if name != "floor"]
    found = {(row.metric, row.system, row.case): row for row in result.rows}
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 7.4), layout="constrained")
    metrics = ("agent latency", "agent throughput", "observer latency", "observer throughput")
    labels = [case.replace(", ", "\n") for case in cases]
    for axis, metric in zip(axes.flat, metrics, strict=True):
        for color, backend in zip(("tab:blue", "tab:orange"), backends, strict=False):
            rows = [found[metric, backend, case] for case in cases]
            axis.plot(labels, [row.p50 for row in rows], "o-", color=color, label=f"{backend} p50")
            axis.plot(labels, [row.p95 for row in rows], ".--", color=color, label=f"{backend} p95")
        axis.set_title(f"{metric} ({rows[0].unit})", loc="left", fontsize=10)
        axis.tick_params(axis="x", labelsize=8)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.25, linewidth=0.4)
    axes[0, 0].legend(fontsize=8)
    where = f"{result.machine['cpu']}, {result.machine['cores']} cores"
    figure.suptitle("\n".join([*textwrap.wrap(result.command, 110, break_on_hyphens=False), where]), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _command_line() -> None:
    """Command line of `python -m geartrain_bench.rpc_rl.bench`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    given, arguments = parser.parse_known_args()
    try:
        main(quick=given.quick, json_path=given.json, plot_path=given.plot, arguments=arguments)
    except GeartrainError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    _command_line()
