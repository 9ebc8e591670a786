"""Feeding a learner's store from another host: the share of the link that arrives as rows.

Two hosts (network namespaces) are joined by a link of 400 Mbit/s. The learner's serves a store; the other one, which
has none, feeds it in two ways, each lap of 8 MB:

    steps   a `RemoteRecorder` of 8 environments with observations of 84 x 84 x 4 bytes, step by step
    rows    `RemoteStore.insert` of 16 rows of 100 KB

    geartrain bench feed

Floor: the same bytes through a plain socket between the same processes, acknowledged at the end of a lap. A lap ends
when all of its rows can be sampled. Laps of the three alternate.

Threats to validity. The link is a token bucket, which costs less CPU than a real one; both hosts and the link share the
cores, so a busy machine slows all three, the Python in the two more than the kernel in the floor.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
from geartrain.errors import GeartrainError
from geartrain.tools.testing.cluster import Hosts
from geartrain_bench.harness.timing import BenchResult, Row, rate_row

RATE_MBIT = 400.0
LAP_BYTES = 8_000_000
#: Time limit of the measurement.
BUDGET_S = 120.0
_WORKER = [sys.executable, "-m", "geartrain_bench.feeding.worker"]
_CASES = {"steps": "steps of 8 x 84x84x4 B", "rows": "16 rows of 100 KB an insert"}


class FeedError(GeartrainError):
    """A process that did not start, failed, or did not end in time; carries its last words."""


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
) -> BenchResult:
    """Measures, prints, writes the files asked for, and returns the result."""
    empty = harness.new_result("feed", quick=quick, baselines=baselines or {}, packages=("numpy",))
    with report.reported(empty, json_path, plot_path) as result:
        laps = measure(laps=7 if quick else 20, budget_s=result.deadline.left_s())
        if len(laps["floor"]) < 7:
            result.left_out.append(f"{7 - len(laps['floor'])} of 7 laps")
        floor_s = sorted(laps["floor"])[len(laps["floor"]) // 2]
        megabytes = LAP_BYTES / 1e6
        for name, case in _CASES.items():
            for system, seconds in (("geartrain", laps[name]), ("a plain socket", laps["floor"])):
                result.rows.append(rate_row(case, system, "payload", "MB/s", seconds, megabytes, floor_s))
                result.rows.append(_share_row(case, system, seconds, floor_s))
        result.notes.append(f"a link of {RATE_MBIT:g} Mbit/s between two hosts on this machine; {megabytes:g} MB a lap")
    return result


def measure(
    laps: int, lap_bytes: int = LAP_BYTES, rate_mbit: float = RATE_MBIT, budget_s: float = BUDGET_S
) -> dict[str, list[float]]:
    """Seconds of each lap of "floor", "steps" and "rows": of one at least, and of those that fit into `budget_s`.

    Raises:
        FeedError: no hosts can be made here, or a process failed.
    """
    reason = Hosts.viable()
    if reason is not None:
        raise FeedError(f"this benchmark needs network namespaces: {reason}")
    with Hosts(2, rate_mbit=rate_mbit) as hosts:
        learner = hosts.popen(
            0, [*_WORKER, "learner"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert learner.stdout is not None
        told = learner.stdout.readline()  # the process prints, or ends
        if not told:
            raise FeedError(f"the learner's process failed: {learner.communicate()[1][-2000:]}")
        asked: dict[str, Any] = {**json.loads(told), "laps": laps, "lap_bytes": lap_bytes, "host": hosts.address(0)}
        asked["until_s"] = time.monotonic() + min(budget_s, BUDGET_S)
        simulator = hosts.popen(
            1, [*_WORKER, "simulator", json.dumps(asked)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            found, said = simulator.communicate(timeout=BUDGET_S)
        except subprocess.TimeoutExpired:
            raise FeedError(f"the laps were not over within {BUDGET_S:g} s") from None
        if simulator.returncode:
            raise FeedError(f"the simulators' process failed: {said[-2000:]}")
        learner.communicate(timeout=30)
        return {name: list(map(float, seconds)) for name, seconds in json.loads(found).items()}


def _share_row(case: str, system: str, seconds: list[float], floor_s: float) -> Row:
    return rate_row(case, system, "share of the link", "", seconds, LAP_BYTES * 8 / (RATE_MBIT * 1e6), floor_s)


if __name__ == "__main__":
    main()
