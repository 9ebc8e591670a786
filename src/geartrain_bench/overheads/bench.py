"""Overheads of a journal, of reports and of traces: CPU time with each and without, as ratios.

    geartrain bench overheads

Every system is a process that lives as long as the run; a lap is half a second of one thing in one of them:

    batches     `Replay` of 256 transitions of 68 bytes, by priority, and new priorities for each
    calls       of a function of a node of the same process, of 1 KB
    inserts     of 10 rows of 100 KB each, at 100 MB/s, into 2,000 rows

of "plain" (neither reports nor a journal), "reports" (once a second, as by default), "trace" (`GEARTRAIN_TRACE`,
and reports) and "journal" (in a file system of `TMPDIR`). The floor is plain. What counts is the CPU time of the thread
that makes batches, calls or inserts, and apart from it that of all threads of the process: a journal is written, and
reports are, by threads of their own.

Threats to validity. Laps of the processes alternate, but a process that others displace finds colder caches. Inserts at
more than the disk takes are bounded by the disk, and compare nothing. A trace keeps 100,000 events and drops
what is beyond: laps without a pause are more than that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
from geartrain.errors import GeartrainError
from geartrain_bench.harness.timing import BenchResult, time_row

LAP_S = 0.5
LEAST_ROUNDS = 3
_WORKER = [sys.executable, "-m", "geartrain_bench.overheads.worker"]
#: What each system is measured in.
SYSTEMS = {
    "plain": ("batches", "calls", "inserts"),
    "reports": ("batches", "calls"),
    "trace": ("batches", "calls"),
    "journal": ("inserts",),
}
_CASES = {
    "batches": "batches of 256 transitions",
    "calls": "calls of 1 KB within a process",
    "inserts": "10 rows of 100 KB, at 100 MB/s",
}


class OverheadError(GeartrainError):
    """A process that did not start, or failed; carries its last words."""


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
) -> BenchResult:
    """Measures, prints, writes the files asked for, and returns the result."""
    empty = harness.new_result("overheads", quick=quick, baselines=baselines or {}, packages=("numpy",))
    with report.reported(empty, json_path, plot_path) as result:
        laps = measure(rounds=7 if quick else 31, budget_s=result.deadline.left_s())
        if quick and (missing := 7 - len(laps["plain", "calls"])) > 0:
            result.left_out.append(f"{missing} of 7 rounds")
        for case, text in _CASES.items():
            for place, metric in enumerate(("CPU of the thread", "CPU of the process")):
                floor = [lap[place] for lap in laps["plain", case]]
                floor_s = sorted(floor)[len(floor) // 2]
                for system, cases in SYSTEMS.items():
                    if case in cases:
                        seconds = [lap[place] for lap in laps[system, case]]
                        result.rows.append(time_row(text, system, metric, "us", seconds, floor_s))
    return result


def measure(
    rounds: int, lap_s: float = LAP_S, budget_s: float = float("inf")
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """CPU seconds an operation, of the thread and of the process, of each lap of each system and case.

    Once `budget_s` seconds have passed, the start of the processes among them, `LEAST_ROUNDS` rounds are enough.

    Raises:
        OverheadError: a process failed.
    """
    laps: dict[tuple[str, str], list[tuple[float, float]]] = {}
    ends_s = time.monotonic() + budget_s
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="geartrain-overheads-")))
        workers = {system: stack.enter_context(_worker(system, folder)) for system in SYSTEMS}
        try:
            longest_s = 0.0
            for number in range(rounds + 1):
                began_s = time.monotonic()
                if number > LEAST_ROUNDS and began_s + longest_s > ends_s:
                    break
                for case in _CASES:
                    order = [system for system, cases in SYSTEMS.items() if case in cases]
                    at = number % len(order)
                    for system in order[at:] + order[:at]:
                        lap = _lap(workers[system], case, lap_s)
                        if number:  # the first warms up
                            laps.setdefault((system, case), []).append(lap)
                longest_s = max(longest_s, time.monotonic() - began_s)
        finally:
            for worker in workers.values():
                worker.kill()
    return laps


def _worker(system: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "GEARTRAIN_REPORT_S": "1" if system in ("reports", "trace") else "0"}
    environment.pop("GEARTRAIN_TRACE", None)
    if system == "trace":
        environment["GEARTRAIN_TRACE"] = str(folder / "trace.json")
    words = [*_WORKER, *((str(folder / "journal"),) if system == "journal" else ())]
    return subprocess.Popen(
        words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _lap(worker: subprocess.Popen[str], case: str, lap_s: float) -> tuple[float, float]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    assert worker.stderr is not None
    try:
        worker.stdin.write(json.dumps([case, lap_s]) + "\n")
        worker.stdin.flush()
        told = worker.stdout.readline()  # the process prints, or ends
    except BrokenPipeError:
        told = ""
    if not told:
        raise OverheadError(f"a process of the benchmark failed: {worker.stderr.read()[-2000:]}")
    found: Any = json.loads(told)
    return float(found[0]), float(found[1])


if __name__ == "__main__":
    main()
