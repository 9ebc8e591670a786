"""Small batches to a device, one after the other, where calls cost more than bytes.

Floor: an index on the device, of rows that all live there, which fits small sets only. Systems: `Replay(device=)` by
the chosen path, ahead on its own thread and with `prefetch=0` on the caller's, and by both other paths; `index_select`
on the CPU and a pinned copy, as written by hand.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np

import geartrain as gt
import geartrain_bench.harness.timing as harness
from geartrain.replay.device import DeviceOptions

#: bytes of a row: (steps, floats a step)
ROWS = {400: (5, 20), 4_000: (50, 20)}
BATCH = 256
CAPACITY = 20_000
BATCHES_A_LAP = 100


def measure(
    result: harness.BenchResult,
    device: str,
    target: Any,
    by_hand: Callable[[Any, int], Callable[[], Any]],
    finish: Callable[[], None],
    *,
    laps: int,
    batches: int = BATCHES_A_LAP,
    capacity: int = CAPACITY,
) -> None:
    """Adds the rows of both sizes. `by_hand(column, batch)` makes the system that is written by hand."""
    import torch

    for row_bytes, shape in ROWS.items():
        name = f"bench-small-{os.getpid()}"
        field = gt.Field(shape[1:], "float32")
        with (
            gt.Store.create(name, {"x": field}, max_length=shape[0], capacity=capacity) as store,
            contextlib.ExitStack() as stack,
        ):
            store.insert({"x": np.random.default_rng(0).random((capacity, *shape), dtype=np.float32)})
            column = torch.from_numpy(store.column("x"))
            there, rng = column.to(device, copy=True), np.random.default_rng(2)
            systems: dict[str, Callable[[], Any]] = {
                "floor": lambda there=there, rng=rng: there[
                    torch.from_numpy(rng.integers(0, capacity, BATCH)).to(device)
                ]  # type: ignore[misc]
            }
            for label, path, ahead in (
                ("geartrain (chooser)", "auto", 2),
                ("geartrain (chooser), prefetch=0", "auto", 0),
                ("geartrain gather", "gather", 2),
                ("geartrain staged", "staged", 2),
            ):
                options = DeviceOptions(target, path=path)  # type: ignore[arg-type]
                strategy = gt.selection.Uniform(seed=0)
                replay = stack.enter_context(gt.Replay(store, strategy, BATCH, device=options, prefetch=ahead))
                systems[label] = replay.sample
            systems["index_select, pinned copy"] = by_hand(column, BATCH)
            times = {}
            for system, one in systems.items():

                def body(one: Callable[[], Any] = one) -> None:
                    for _ in range(batches):
                        one()
                    finish()

                body()
                times[system] = [harness.lap(batches, body) for _ in range(laps)]
            del column, there, systems
        floor_s = float(np.median([lap.seconds for lap in times["floor"]]))
        for system, of_one in times.items():
            case, seconds = f"rows of {row_bytes / 1e3:g} KB, batch {BATCH}", [lap.seconds for lap in of_one]
            result.rows.append(harness.time_row(case, system, "small batches, one by one", "us", seconds, floor_s))


__all__ = ["measure"]
