"""Small batches to a device, where calls cost more than bytes: one after the other, and with a training step each.

Floor of the first: an index on the device, of rows that all live there, which fits small sets only; of the second: the
step on one batch that stays there. The step is forward, backward and Adam of a multilayer perceptron, which takes the
host longer to launch than the device to compute. Systems: `Replay(device=)` by the chosen path, ahead of the consumer
and with `prefetch=0`, and by both other paths; `index_select` on the CPU and a pinned copy, as written by hand.
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
STEPS_A_LAP = 50
WIDTH = 256  # of the perceptron's layers


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
        if not result.deadline.allows(f"small batches of rows of {row_bytes} bytes"):
            continue
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
            case = f"rows of {row_bytes / 1e3:g} KB, batch {BATCH}"
            _add(result, case, "small batches, one by one", systems, batches, laps, finish)
            if device == "cuda":  # a simulated device is late by design
                _add(
                    result, case, "training step with a small batch", _steps(systems, shape), STEPS_A_LAP, laps, finish
                )
            del column, there, systems


def _steps(systems: dict[str, Callable[[], Any]], shape: tuple[int, int]) -> dict[str, Callable[[], Any]]:
    """A training step with a batch of each system, and as floor with one that stays."""
    import torch

    torch.manual_seed(0)
    layers = [torch.nn.Linear(shape[0] * shape[1], WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)]
    model = torch.nn.Sequential(*layers, torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1)).to("cuda")
    adam = torch.optim.Adam(model.parameters(), 1e-4, fused=True)

    def step(next_batch: Callable[[], Any]) -> None:
        batch = next_batch()
        x = batch["x"] if isinstance(batch, gt.Batch) else batch
        adam.zero_grad(set_to_none=True)
        model(x.reshape(len(x), -1)).square().mean().backward()
        adam.step()

    kept = torch.randn(BATCH, *shape, device="cuda")
    feeds: dict[str, Callable[[], Any]] = {**systems, "floor": lambda: kept}
    return {system: lambda feed=feed: step(feed) for system, feed in feeds.items()}  # type: ignore[misc]


def _add(
    result: harness.BenchResult,
    case: str,
    metric: str,
    systems: dict[str, Callable[[], Any]],
    calls: int,
    laps: int,
    finish: Callable[[], None],
) -> None:
    times = {}
    for system, one in systems.items():

        def body(one: Callable[[], Any] = one) -> None:
            for _ in range(calls):
                one()
            finish()

        body()
        times[system] = [harness.lap(calls, body) for _ in range(laps)]
    floor_s = float(np.median([lap.seconds for lap in times["floor"]]))
    for system, of_one in times.items():
        seconds = [lap.seconds for lap in of_one]
        result.rows.append(harness.time_row(case, system, metric, "us", seconds, floor_s))


__all__ = ["measure"]
