"""Small batches of 1 to 64 fields: what a batch costs beyond the copy of its bytes, and beside NumPy and torch.

Rows of 4 KB, whole, in fields of one size each. NumPy and torch do the same work: they draw row numbers, index every
field by them, and make the mask of the rows' lengths. The floor copies the same bytes in C, out of the same memory,
field after field in one call; it draws nothing and makes no arrays. "fields unread" is geartrain's batch without the
arrays that its user would ask for; in all other systems every field and the mask is made.

Systems take turns in laps of some milliseconds; CPU time of all threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import geartrain._native as _native
import geartrain_bench.harness.timing as harness
from geartrain.core.schema import Field
from geartrain.errors import ReplayError
from geartrain.replay.options import ReplayOptions
from geartrain.replay.replay import Replay
from geartrain.selection import Uniform
from geartrain.store.store import Store
from geartrain_bench.harness.timing import BenchResult, System
from geartrain_bench.store.floors import aligned

METRIC = "CPU time per batch"
#: Float32 of a row, in as many steps.
ROW_VALUES, STEPS = 1024, 4
LAP_S = 0.004


def measure(
    result: BenchResult,
    fields: Sequence[int],
    batches: Sequence[int],
    data_bytes: int,
    *,
    repeats: int,
    case_s: Callable[[], float],
    as_torch: bool,
) -> None:
    """Adds a row for every system, number of fields and batch size to the result.

    Args:
        fields: numbers of fields, each a power of two up to 64.
        batches: rows of a batch.
        data_bytes: of each store.
        repeats: laps of each system, where the time is enough.
        case_s: asked before each case, for its time limit in seconds.
        as_torch: torch is there, and takes part.
    """
    for count in fields:
        if not result.deadline.allows(f"small batches of {count} fields"):
            continue
        step = ROW_VALUES // STEPS // count
        made = {f"x{number}": Field((step,), "float32") for number in range(count)}
        rows = data_bytes // (4 * ROW_VALUES)
        with Store.create(f"bench-small-{os.getpid()}", made, max_length=STEPS, capacity=rows) as store:
            noise = np.random.default_rng(0).random((min(rows, 1024), STEPS, step), np.float32)
            while len(store) < rows:
                n = min(len(noise), rows - len(store))
                store.insert(dict.fromkeys(made, noise[:n]))
            for batch in batches:
                _measure_case(result, store, batch, repeats, case_s(), as_torch=as_torch)


def _measure_case(
    result: BenchResult, store: Store, batch: int, repeats: int, budget_s: float, *, as_torch: bool
) -> None:
    count = len(store.fields)
    case = f"4 KB in {count} field{'s' * (count > 1)} x {batch}, small batches"
    harness.say(case)
    systems = [
        _system("floor memcpy", _floor(store, batch, stream=False), floor=True),
        _system("floor streaming", _floor(store, batch, stream=True), floor=True),
        _system("NumPy, same work", _numpy(store, batch)),
    ]
    options: dict[str, Any] = {"prefetch": 0, "options": ReplayOptions(threads=1)}
    with (
        Replay(store, Uniform(seed=1), batch, **options, output="numpy") as arrays,
        Replay(store, Uniform(seed=1), batch, **options, output="torch" if as_torch else "numpy") as tensors,
    ):
        systems.append(_system("geartrain, fields unread", arrays.sample))
        systems.append(_system("geartrain, NumPy", _read(arrays, list(store.fields))))
        if as_torch:
            systems.append(_system("torch, same work", _torch(store, batch)))
            systems.append(_system("geartrain, torch", _read(tensors, list(store.fields))))
        laps = harness.take_turns(systems, repeats=repeats, budget_s=budget_s)
        for replay in (arrays, tensors):
            if replay.stats()["path"] != "native":
                raise ReplayError(f"batches came by another path: {replay.stats()['path']}")
    laps, disturbed = harness.quiet(laps)
    if disturbed:
        result.notes.append(f"{case}: laps with context switches were counted too")
    seconds = {name: [one.cpu_seconds for one in of_one] for name, of_one in laps.items()}
    floor = min(("floor memcpy", "floor streaming"), key=lambda name: float(np.median(seconds[name])))
    floor_s = float(np.median(seconds[floor]))
    for name, each in seconds.items():
        if not name.startswith("floor") or name == floor:
            shown = "floor" if name == floor else name
            result.rows.append(harness.time_row(case, shown, METRIC, "us", each, floor_s))


def _system(name: str, one: Callable[[], object], *, floor: bool = False) -> System:
    """Laps of as many calls as take a few milliseconds."""
    calls = 10

    def body() -> None:
        for _ in range(calls):
            one()

    calls = max(5, min(2000, int(LAP_S / max(harness.lap(calls, body, one).seconds, 1e-6))))
    return System(name, lambda: harness.lap(calls, body, one), floor)


def _floor(store: Store, batch: int, *, stream: bool) -> Callable[[], None]:
    columns = [store.column(name) for name in store.fields]
    outputs = [aligned((batch, *field.block_shape(STEPS)), field) for field in store.fields.values()]
    strides = [column.strides[0] for column in columns]
    row_bytes = outputs[0].nbytes // batch
    drawn = np.random.default_rng(2).integers(0, store.capacity, (4096, batch)).astype(np.uint32)
    at = 0

    def one() -> None:
        nonlocal at
        _native.gather_fields_floor(columns, outputs, drawn[at], row_bytes, strides, stream)
        at = (at + 1) % len(drawn)

    return one


def _numpy(store: Store, batch: int) -> Callable[[], None]:
    columns = {name: store.column(name) for name in store.fields}
    lengths: NDArray[Any] = np.full(store.capacity, STEPS, np.int32)
    random, steps = np.random.default_rng(3), np.arange(STEPS)

    def one() -> None:
        rows = random.integers(0, len(lengths), batch)
        _ = {name: column[rows] for name, column in columns.items()}
        _ = steps < lengths[rows][:, None]

    return one


def _torch(store: Store, batch: int) -> Callable[[], None]:
    import torch

    columns = {name: torch.from_numpy(store.column(name)) for name in store.fields}
    lengths = torch.full((store.capacity,), STEPS, dtype=torch.int32)
    random, steps = torch.Generator().manual_seed(3), torch.arange(STEPS)

    def one() -> None:
        rows = torch.randint(0, len(lengths), (batch,), generator=random)
        _ = {name: column[rows] for name, column in columns.items()}
        _ = steps < lengths[rows][:, None]

    return one


def _read(replay: Replay, names: list[str]) -> Callable[[], None]:
    def one() -> None:
        batch = replay.sample()
        for name in names:
            _ = batch[name]
        _ = batch.mask

    return one


__all__ = ["METRIC", "measure"]
