"""Training steps with a new batch each, compared with the same steps on one batch that stays on the device.

The step is a linear layer over the batch's first floats and a chain of bf16 matrix products, as many as take
`STEP_OF_COPY` times as long as a copy of the batch over the link: a fetch that runs beside the model can be hidden.

Floor: the step alone. Systems: `Replay(device=)` by each path and the chosen one; `index_select` on the CPU and a
pinned copy before each step, as written by hand; torch's `DataLoader` with workers and `pin_memory`. The ratio to the
floor is the share of the time in which the device computes: 1.00, and the device never waits for data.

Threats to validity: a step of large matrix products keeps all multiprocessors busy, so that the gather, which runs on
them, costs the step more than it would a model of many small launches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import numpy as np

import geartrain as gt
import geartrain_bench.harness.timing as harness
from geartrain.replay.device import DeviceOptions

STEP_OF_COPY = 2.0
WIDTH = 8192  # of the chain's square matrices
INPUTS = 1000  # floats of a row that the linear layer reads
WORKERS = 4
STEPS_A_LAP = 10


class Model:
    """A training step of a set length on the device."""

    def __init__(self, device: str, width: int = WIDTH) -> None:
        import torch

        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.products = 1
        self._layer = torch.randn(INPUTS, 256, dtype=dtype, device=device)
        self._a, self._b = (torch.randn(width, width, dtype=dtype, device=device) for _ in range(2))
        self._out = torch.empty_like(self._a)

    def step(self, x: Any) -> Any:
        """Reads the batch (n, ...) and multiplies; returns a tensor of one number."""
        import torch

        made = x.reshape(len(x), -1)[:, :INPUTS].to(self._layer.dtype) @ self._layer
        for _ in range(self.products):
            torch.mm(self._a, self._b, out=self._out)
        return made.sum()

    def last(self, x: Any, seconds: float, clock: Callable[[Callable[[], object]], float]) -> None:
        """Sets the number of products so that a step takes about `seconds`."""
        clock(lambda: self.step(x))
        one_s = clock(lambda: self.step(x))
        self.products = 5
        more_s = (clock(lambda: self.step(x)) - one_s) / 4
        self.products = max(1, round(1 + (seconds - one_s) / max(more_s, 1e-6)))


def systems(
    store: gt.Store,
    batch: int,
    device: str,
    target: Any,
    by_hand: tuple[str, Callable[[], Any]],
    stack: contextlib.ExitStack,
) -> dict[str, Callable[[], Any]]:
    """What delivers the next batch's field `x` on the device, by name; opened in `stack`."""
    found: dict[str, Callable[[], Any]] = {}
    for path in ("gather", "copy", "staged", "auto"):
        options = DeviceOptions(target, path=path)  # type: ignore[arg-type]
        replay = stack.enter_context(gt.Replay(store, gt.selection.Uniform(seed=0), batch, device=options))
        found["geartrain (chooser)" if path == "auto" else f"geartrain {path}"] = lambda r=replay: r.sample()["x"]  # type: ignore[misc]
    found[by_hand[0]] = by_hand[1]
    if device == "cuda":
        batches = stack.enter_context(contextlib.closing(_loaded(store.column("x"), batch, device)))
        found[f"DataLoader, {WORKERS} workers"] = lambda: next(batches)
    return found


def _loaded(column: Any, batch: int, device: str) -> Generator[Any, None, None]:
    """Batches of a map-style dataset over the store's memory, collated by index_select in worker processes."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    rows = torch.from_numpy(column)

    class Rows(Dataset[Any]):
        def __getitem__(self, index: Any) -> Any:
            return rows.index_select(0, index)

    def draws() -> Iterator[Any]:
        rng = np.random.default_rng(2)
        while True:
            yield torch.from_numpy(rng.integers(0, len(rows), batch))

    loader: Any = DataLoader(
        Rows(),
        batch_size=None,
        sampler=draws(),
        num_workers=WORKERS,
        pin_memory=True,
        prefetch_factor=2,  # type: ignore[arg-type]
    )
    for made in loader:
        yield made.to(device, non_blocking=True)


def measure(
    result: harness.BenchResult,
    store: gt.Store,
    batch: int,
    copy_s: float,
    device: str,
    target: Any,
    by_hand: tuple[str, Callable[[], Any]],
    *,
    laps: int,
    width: int = WIDTH,
) -> None:
    """Adds the rows of one size of row. `copy_s`: seconds that the link takes for a batch."""
    import torch

    def clock(work: Callable[[], object]) -> float:
        def body() -> None:
            work()
            finish()

        return harness.lap(1, body).seconds

    def finish() -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        else:
            target.finish()

    model = Model(device, width)
    with contextlib.ExitStack() as stack:
        feeds = systems(store, batch, device, target, by_hand, stack)
        first = feeds["geartrain staged"]()
        finish()
        kept = first.clone()
        model.last(kept, STEP_OF_COPY * copy_s, clock)
        times = {}
        for name, next_batch in {"floor": lambda: kept, **feeds}.items():

            def body(next_batch: Callable[[], Any] = next_batch) -> None:
                for _ in range(STEPS_A_LAP):
                    model.step(next_batch())
                finish()

            body()
            times[name] = [harness.lap(STEPS_A_LAP, body) for _ in range(laps)]
    row_bytes = store.column("x")[0].nbytes
    case = f"rows of {row_bytes / 1e3:g} KB, batch {batch}, {model.products} products"
    floor_s = float(np.median([lap.seconds for lap in times["floor"]]))
    for name, of_one in times.items():
        seconds = [lap.seconds for lap in of_one]
        result.rows.append(harness.time_row(case, name, "training step with a new batch", "us", seconds, floor_s))


__all__ = ["Model", "measure"]
