"""Selection on a GPU: rebuild, draw and update, compared with plain reads as the lower bound.

Floors, in the same run: for a rebuild torch's sum over all priorities; for draws and updates a gather of B priorities
at random places. Baselines on the device: `torch.multinomial` (up to 2^24 rows) and cumsum + searchsorted in float64.

    GPU time    between two events on a stream that was busy until all was launched, so that Python's time is not in it
                (calls that wait for the device between launches excepted: draws without replacement)
    call        what a program waits for that needs the answer: launches from Python, and the GPU's time
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import geartrain.device.kernels as kernels
import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
from geartrain.errors import GeartrainError
from geartrain_bench.harness.timing import BenchResult

SIZES, QUICK_SIZES = (10**6, 10**7, 10**8, 10**9), (10**6, 10**7)
BATCHES = (256, 10**4, 10**6)
LAPS = 20
LAUNCH_CYCLES = 2_000_000  # of the GPU's clock: about a millisecond, in which Python launches what is timed
MULTINOMIAL_MOST = 2**24


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
) -> BenchResult:
    """Measures, prints the table, writes the requested files, and returns the result.

    Raises:
        GeartrainError: there is no GPU that the kernels can run on; with the reason.
    """
    reason = kernels.why_not_viable()
    if reason is not None or kernels.interpreting():
        raise GeartrainError(f"selection cannot be timed on a GPU here: {reason or 'TRITON_INTERPRET is set'}")
    result = run(QUICK_SIZES if quick else SIZES, BATCHES, "cuda", quick=quick)
    report.report(result, json_path, plot_path)
    return result


def run(sizes: tuple[int, ...], batches: tuple[int, ...], device: str, *, quick: bool, laps: int = LAPS) -> BenchResult:
    """All cases. On a CPU, which only the interpreter can run on, the times mean nothing."""
    import torch

    from geartrain.device.kernels.candidates import DeviceCandidates

    began_s = time.monotonic()
    result = harness.new_result(
        "selection --device cuda", quick=quick, baselines=(), packages=("numpy", "torch", "triton")
    )
    if device == "cuda":
        result.machine["gpu"] = torch.cuda.get_device_name(0)
    for n in sizes:
        if not result.deadline.allows(f"N {n:.0e}"):
            continue
        priorities = torch.randint(1, 2**31 - 1, (n,), dtype=torch.int32, device=device)
        candidates = DeviceCandidates(priorities.view(torch.uint32))
        floor = timed(_sum_of(priorities), device, laps)
        add(result, f"N {n:.0e}", "rebuild", {"floor": floor, "geartrain": timed(candidates.rebuild, device, laps)})
        for b in batches:
            if b <= n:
                _batch(result, candidates, priorities, n, b, device, laps)
    return harness.finish(result, began_s)


def _batch(result: BenchResult, candidates: Any, priorities: Any, n: int, b: int, device: str, laps: int) -> None:
    import torch

    case = f"N {n:.0e}, B {b:.0e}"
    places = torch.randint(0, n, (b,), device=device)
    values = torch.randint(1, 2**31 - 1, (b,), dtype=torch.int32, device=device).view(torch.uint32)
    floor = timed(lambda: priorities[places], device, laps)
    draws = {
        "floor": floor,
        "geartrain": timed(lambda: candidates.draw(True, 0, 1, 0, b), device, laps),
        "geartrain stratified": timed(lambda: candidates.draw(True, 0, 1, 0, b, b), device, laps),
        "geartrain without replacement": timed(lambda: candidates.draw_distinct(True, 0, 1, 0, b), device, laps)
        if b <= n // 4
        else ([], []),
    }
    as_double = priorities.double()
    draws["torch cumsum+searchsorted"] = timed(lambda: _searchsorted(as_double, b), device, laps)
    if n <= MULTINOMIAL_MOST:
        draws["torch.multinomial"] = timed(lambda: torch.multinomial(as_double, b, replacement=True), device, laps)
    add(result, case, "sample", draws)
    update = timed(lambda: candidates.update(places, values), device, laps)
    add(result, case, "update", {"floor": floor, "geartrain": update})


def _sum_of(priorities: Any) -> Callable[[], object]:
    import torch

    return lambda: priorities.sum(dtype=torch.int64)


def _searchsorted(priorities: Any, b: int) -> Any:
    import torch

    sums = priorities.cumsum(0)
    return torch.searchsorted(sums, torch.rand(b, dtype=torch.float64, device=priorities.device) * sums[-1])


def timed(work: Callable[[], object], device: str, laps: int) -> tuple[list[float], list[float]]:
    """Seconds of each of `laps` runs, after two that are not counted: the GPU's time, and the call's."""
    import torch

    gpu, call = [], []
    for lap in range(laps + 2):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            torch.cuda._sleep(LAUNCH_CYCLES)  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            seconds = start.elapsed_time(end) / 1e3
        began_s = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        called = time.perf_counter() - began_s
        if lap >= 2:
            gpu.append(seconds if device == "cuda" else called)
            call.append(called)
    return gpu, call


def add(result: BenchResult, case: str, metric: str, systems: dict[str, tuple[list[float], list[float]]]) -> None:
    """Two rows for each system that ran."""
    for i, what in enumerate(("GPU time", "call")):
        floor_s = float(np.median(systems["floor"][i]))
        for system, seconds in systems.items():
            if seconds[i]:
                result.rows.append(harness.time_row(case, system, f"{metric}, {what}", "us", seconds[i], floor_s))


if __name__ == "__main__":
    report.main_of("selection-gpu", main)
