"""Batches from shared memory to a device: GB/s compared with the link's copy bandwidth.

Floor: one asynchronous copy of the same bytes from pinned host memory to the device, repeatedly: the link's peak.
Systems: the GPU's gather, copies of rows by its copy engines, the staged path, and the path chosen by default; on a GPU
`gt.fetch(out=)` by two paths, of which the gathered one waits for the device before the next begins; baselines:
`index_select` on the CPU and a pinned copy of the result (hand-tuned user code), and the same without pinned memory.
Times are between an event before and one after a run of batches, so that launches overlap with copies as they do in
training; CPU time is that of this whole process, all threads, a row. Before that small batches are timed (small.py),
and after it training steps with a new batch each (training.py).

Threats to validity: batches of one row size each, uniform draws, nothing else on the link or the multiprocessors; a
model that trains meanwhile uses some of both. With --device cpu a simulated device is used: every path runs, and the
figures do not apply to any GPU.

On a GPU it also times the paths for other sizes, and prints the crossover size, up to which the gather is the fastest:
a value for `DeviceOptions(crossover_bytes=)`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import geartrain as gt
import geartrain_bench.fetch.small as small
import geartrain_bench.fetch.training as training
import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
from geartrain.errors import GeartrainError
from geartrain.replay.device import Convert, DeviceOptions
from geartrain_bench.harness.timing import BenchResult

#: bytes of a row: (steps, floats a step)
ROWS = {4_000: (50, 20), 100_000: (500, 50), 1_000_000: (1000, 250)}
#: others, for the crossover only
CROSSOVER_ROWS = {20_000: (100, 50), 50_000: (250, 50), 4_000_000: (2000, 500), 16_000_000: (4000, 1000)}
CROSSOVER_STORE_BYTES = 1e9
BATCH_BYTES, QUICK_BATCH_BYTES, CPU_BATCH_BYTES = 100e6, 50e6, 4e6
STORE_BYTES, QUICK_STORE_BYTES, CPU_STORE_BYTES = 4e9, 2e9, 40e6
LAPS, QUICK_LAPS, CPU_LAPS = 15, 7, 3
BATCHES_A_LAP = 8
PATHS = ("gather", "copy", "staged")
BY_HAND = "index_select, pinned copy"
CPU_WIDTH = 64  # of the matrices of a step on the simulated device


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
) -> BenchResult:
    """Measures on the CUDA device, prints the table, writes the requested files, and returns the result.

    Raises:
        GeartrainError: there is no GPU; `geartrain bench fetch` without --device cuda runs the paths without one.
    """
    import torch

    if not torch.cuda.is_available():
        raise GeartrainError(f"fetch cannot be timed on a GPU here: torch {torch.__version__} finds no CUDA device")
    seconds: dict[int, dict[str, float]] = {}
    result = run("cuda", quick=quick, seconds=seconds)
    result.notes.append(f"{crossover_note(seconds)}: DeviceOptions(crossover_bytes={found_from(seconds)})")
    report.report(result, json_path, plot_path)
    return result


def main_cpu(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
) -> BenchResult:
    """The same on a simulated device: a check that every path runs, not a measurement."""
    result = run("cpu", quick=quick)
    report.report(result, json_path, plot_path)
    return result


def run(
    device: str,
    *,
    quick: bool,
    rows: dict[int, tuple[int, int]] | None = None,
    crossover_rows: dict[int, tuple[int, int]] | None = None,
    seconds: dict[int, dict[str, float]] | None = None,
) -> BenchResult:
    """All cases. `seconds` receives the medians of the paths by bytes of a row, including those for the crossover."""
    import torch

    began_s = time.monotonic()
    name = "fetch --device cuda" if device == "cuda" else "fetch"
    result = harness.new_result(name, quick=quick, baselines=(), packages=("numpy", "torch", "triton"))
    cpu = device == "cpu"
    if cpu:
        result.notes.append("a simulated device on the CPU: these figures do not apply to any GPU")
    else:
        result.machine["gpu"] = torch.cuda.get_device_name(0)
        result.machine["multiprocessors"] = torch.cuda.get_device_properties(0).multi_processor_count
    target = _target(device)
    laps = CPU_LAPS if cpu else QUICK_LAPS if quick else LAPS
    harness.say("small batches")
    fewer = {"batches": 3, "capacity": 500} if cpu else {}
    small.measure(
        result,
        device,
        target,
        lambda column, batch: _indexed(column, batch, device, pinned=True),
        lambda: _finish(device, target),
        laps=laps,
        **fewer,
    )
    for row_bytes, (steps, width) in (rows or ROWS).items():
        store_bytes = CPU_STORE_BYTES if cpu else QUICK_STORE_BYTES if quick else STORE_BYTES
        batch_bytes = CPU_BATCH_BYTES if cpu else QUICK_BATCH_BYTES if quick else BATCH_BYTES
        batch = max(2, int(batch_bytes / row_bytes))
        capacity = max(batch, int(store_bytes / row_bytes))
        if not result.deadline.allows(f"rows of {row_bytes} bytes"):
            continue
        harness.say(f"rows of {row_bytes} bytes: {capacity} of them, batches of {batch}")
        times = _case(result, device, row_bytes, (steps, width), capacity, batch, quick)
        if seconds is not None:
            seconds[row_bytes] = times
    if seconds is None:
        return harness.finish(result, began_s)
    for row_bytes, shape in (CROSSOVER_ROWS if crossover_rows is None else crossover_rows).items():
        batch = max(2, int((CPU_BATCH_BYTES if cpu else BATCH_BYTES) / row_bytes))
        capacity = max(batch, int((CPU_STORE_BYTES if cpu else CROSSOVER_STORE_BYTES) / row_bytes))
        if not result.deadline.allows(f"rows of {row_bytes} bytes, for the crossover"):
            continue
        harness.say(f"rows of {row_bytes} bytes, for the crossover: {capacity} of them, batches of {batch}")
        seconds[row_bytes] = _case(result, device, row_bytes, shape, capacity, batch, quick, paths_only=True)
    return harness.finish(result, began_s)


def found_from(seconds: Mapping[int, Mapping[str, float]]) -> int:
    """The crossover, from the median seconds of "gather" and of other paths by bytes of a row.

    Between the largest row up to which the gather was never slower and the next one that was measured: their geometric
    mean. Slower is slower than the fastest of the others. Where the gather was never slower, the largest row; where it
    always was, 0. Measured again, a size may fall on the other side, so no path counts as slower by less than 2 %.

    Example:
        >>> found_from({1000: {"gather": 1.0, "copy": 2.0}, 4000: {"gather": 3.0, "copy": 2.0, "staged": 4.0}})
        2000
    """
    last = 0
    for size in sorted(seconds):
        if seconds[size]["gather"] > 1.02 * min(seconds[size].values()):
            return round(math.sqrt(last * size))
        last = size
    return last


def crossover_note(seconds: dict[int, dict[str, float]]) -> str:
    """The crossover of this machine, from the median seconds of the paths by bytes of a row."""
    times = ", ".join(
        f"{size}: "
        + " and ".join(f"{seconds[size][path] / seconds[size]['gather']:.2f}" for path in ("copy", "staged"))
        for size in sorted(seconds)
    )
    found = found_from(seconds)
    return f"copied and staged / gathered time by bytes of a row: {times}; rows of up to {found} bytes are gathered"


def _case(
    result: BenchResult,
    device: str,
    row_bytes: int,
    shape: tuple[int, int],
    capacity: int,
    batch: int,
    quick: bool,
    paths_only: bool = False,
) -> dict[str, float]:
    import torch

    store_name = f"bench-fetch-{os.getpid()}"
    cpu = device == "cpu"
    laps = CPU_LAPS if cpu else QUICK_LAPS if quick else LAPS
    times: dict[str, list[harness.Lap]] = {}
    with gt.Store.create(
        store_name, {"x": gt.Field(shape[1:], "float32")}, max_length=shape[0], capacity=capacity
    ) as store:
        several = max(1, min(64, int(64e6 / row_bytes)))
        piece = np.random.default_rng(0).random((several, *shape), dtype=np.float32)
        for at in range(0, capacity, several):
            store.insert({"x": piece[: min(several, capacity - at)]})
        target = _target(device)
        systems: dict[str, Callable[[], Any]] = {"floor": _copies(device, batch * row_bytes)}
        replays = {}
        for path in PATHS if paths_only else (*PATHS, "auto"):
            name = {"auto": "geartrain (chooser)"}.get(path, f"geartrain {path}")
            options = DeviceOptions(target, path=path)  # type: ignore[arg-type]
            replays[name] = gt.Replay(store, gt.selection.Uniform(seed=0), batch, device=options)
        if not paths_only:
            half = DeviceOptions(target, path="gather", convert={"x": Convert("bfloat16")})
            replays["geartrain gather to bfloat16"] = gt.Replay(store, gt.selection.Uniform(seed=0), batch, device=half)
        systems |= {name: replay.sample for name, replay in replays.items()}
        column = torch.from_numpy(store.column("x"))
        if not paths_only and not cpu:
            systems |= {f"gt.fetch(out=), {path}": _fetched(store, batch, path) for path in ("gather", "staged")}
        if not paths_only:
            systems[BY_HAND] = _indexed(column, batch, device, pinned=True)
            systems["index_select, pageable copy"] = _indexed(column, batch, device, pinned=False)
        try:
            for name, work in systems.items():
                times[name] = _timed(work, device, target, laps)
            for name, replay in replays.items():
                if name == "geartrain (chooser)":
                    result.notes.append(f"{row_bytes} bytes a row: chosen path {replay.describe()[0]['path']}")
        finally:
            for replay in replays.values():
                replay.close()
        if not paths_only:
            copy_s = float(np.median([lap.seconds for lap in times["floor"]]))
            by_hand = (BY_HAND, systems[BY_HAND])
            steps = {"width": CPU_WIDTH} if cpu else {}
            training.measure(result, store, batch, copy_s, device, target, by_hand, laps=laps, **steps)
        del column, systems
    _add(result, f"rows of {row_bytes / 1e3:g} KB, batch {batch}", times, batch, batch * row_bytes)
    return {path: float(np.median([lap.seconds for lap in times[f"geartrain {path}"]])) for path in PATHS}


def _target(device: str) -> Any:
    if device == "cuda":
        return "cuda"
    from geartrain.tools.testing import SimulatedDevice

    return SimulatedDevice()


def _copies(device: str, nbytes: int) -> Callable[[], Any]:
    import torch

    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return lambda: target.copy_(source, non_blocking=True)


def _fetched(store: gt.Store, batch: int, path: Any) -> Callable[[], Any]:
    """Rows by key into the same tensor again and again."""
    import torch

    keys, rng = store.keys(), np.random.default_rng(1)
    spec = store.fields["x"]
    out = {"x": torch.empty((batch, *spec.block_shape(store.max_length)), dtype=torch.float32, device="cuda")}
    return lambda: gt.fetch(store, keys[rng.integers(0, len(keys), batch)], out=out, path=path)


def _indexed(column: Any, batch: int, device: str, *, pinned: bool) -> Callable[[], Any]:
    import torch

    rng = np.random.default_rng(1)
    pin = pinned and device == "cuda"
    # Double buffering: one is filled while the other is copied.
    buffers = [torch.empty((batch, *column.shape[1:]), dtype=column.dtype, pin_memory=pin) for _ in range(2)]
    events: list[Any] = [None, None]
    turn = [0]

    def one() -> Any:
        at = turn[0] = 1 - turn[0]
        if events[at] is not None:
            events[at].synchronize()
        rows = torch.from_numpy(rng.integers(0, len(column), batch))
        torch.index_select(column, 0, rows, out=buffers[at])
        made = buffers[at].to(device, non_blocking=True, copy=True)
        if device == "cuda":
            events[at] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            events[at].record()
        return made

    return one


def _timed(work: Callable[[], Any], device: str, target: Any, laps: int) -> list[harness.Lap]:
    """Laps of some batches each, from the first request until the device has all of them."""

    def body() -> None:
        for _ in range(BATCHES_A_LAP):
            work()
        _finish(device, target)

    for _ in range(3):
        work()
    _finish(device, target)
    return [harness.lap(BATCHES_A_LAP, body) for _ in range(laps)]


def _finish(device: str, target: Any) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    else:
        target.finish()


def _add(result: BenchResult, case: str, times: dict[str, list[harness.Lap]], batch: int, nbytes: int) -> None:
    floor_s = float(np.median([lap.seconds for lap in times["floor"]]))
    for system, laps in times.items():
        seconds = [lap.seconds for lap in laps]
        result.rows.append(
            harness.rate_row(case, system, "batches to the device", "GB/s", seconds, nbytes / 1e9, floor_s)
        )
    floor_cpu_s = max(float(np.median([lap.cpu_seconds for lap in times["floor"]])) / batch, 1e-12)
    for system, laps in times.items():
        per_row = [lap.cpu_seconds / batch for lap in laps]
        result.rows.append(harness.time_row(case, system, "CPU time per row", "us", per_row, floor_cpu_s))


if __name__ == "__main__":
    report.main_of("fetch", main)
