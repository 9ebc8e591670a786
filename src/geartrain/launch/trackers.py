"""Callbacks that log a host's metrics to an experiment tracker (TensorBoard, Weights & Biases).

    callback = TensorBoardCallback(SummaryWriter("runs/1"))
    for step, batch in enumerate(replay):
        ...
        callback(step)

The metrics are the same as for Prometheus. A curve's name is the name in `host_metrics.METRICS`, followed by the
labels: `geartrain/store_rows/hopper`. A counter becomes a rate per second since the previous snapshot, so it appears
from the second snapshot on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from geartrain.core.arguments import check_calls, check_function, check_real, check_whole
from geartrain.core.shared_files import Trust, check_trust
from geartrain.launch.host_metrics import METRICS, values_of
from geartrain.launch.host_snapshot import take_snapshot

_MOST_STEPS = 2**63 - 1


class TrackerCallback:
    """Passes a host's metrics to a function, at most once in `every_s` seconds. Call it from one thread only.

    Args:
        write: function of the scalars by name and the step.
        every_s: seconds between snapshots. A call in between reads only the clock. The calling thread takes the
            snapshot, and opens a file for each store, weights and process of the host.
        trust: whose segments are read, as for `Store.open`.

    Raises:
        ArgumentError: `write` is not a function, `every_s` is below zero, or `trust` is unknown.

    Examples:
        >>> curves = []
        >>> callback = TrackerCallback(lambda scalars, step: curves.append((step, scalars)), every_s=0)
        >>> callback(step=100)
        True
    """

    def __init__(
        self, write: Callable[[dict[str, float], int], object], every_s: float = 10.0, trust: Trust = "user"
    ) -> None:
        check_function("write", write, "a function of scalars and the step")
        self._write = write
        self._every_s = check_real("every_s", every_s, 0)
        self._trust = check_trust(trust)
        self._due_s = 0.0
        self._counted: tuple[float, dict[str, float]] = (0.0, {})

    def __call__(self, step: int) -> bool:
        """Writes the present metrics if `every_s` seconds have passed; returns whether it did.

        Args:
            step: step of the training, for the axis of the curves.

        Raises:
            ArgumentError: `step` is not a whole number from 0 to 2^63 - 1.
        """
        step = check_whole("step", step, 0, _MOST_STEPS)
        now_s = time.monotonic()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + self._every_s
        found = values_of(take_snapshot(self._trust))
        counters = _named(found, "counter")
        before_s, before = self._counted
        self._counted = now_s, counters
        scalars = _named(found, "gauge")
        for name, value in counters.items():
            if name in before and now_s > before_s:
                # One that is below what it was has begun anew: another process has its name.
                scalars[f"{name}_per_s"] = max(0.0, value - before[name]) / (now_s - before_s)
        self._write(scalars, step)
        return True


class TensorBoardCallback(TrackerCallback):
    """Writes a host's metrics to TensorBoard.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`, or one of tensorboardX. Close it yourself.
        every_s, trust: as for `TrackerCallback`.

    Raises:
        ArgumentError: `writer` has no `add_scalar`.

    Examples:
        >>> def train(replay, writer):  # writer = SummaryWriter("runs/1")
        ...     callback = TensorBoardCallback(writer)
        ...     for step, batch in enumerate(replay):
        ...         callback(step)
    """

    def __init__(self, writer: Any, every_s: float = 10.0, trust: Trust = "user") -> None:
        check_calls("writer is a SummaryWriter", writer, "add_scalar")

        def write(scalars: Mapping[str, float], step: int) -> None:
            for name, value in scalars.items():
                writer.add_scalar(name, value, step)

        super().__init__(write, every_s, trust)


class WandbCallback(TrackerCallback):
    """Logs a host's metrics to a run of Weights & Biases.

    Args:
        run: what `wandb.init` returns; finish it yourself. The metrics go into the row of `step`: call the callback
            before `run.log(..., step=step)` of later steps.
        every_s, trust: as for `TrackerCallback`.

    Raises:
        ArgumentError: `run` has no `log`.

    Examples:
        >>> def train(replay, run):  # run = wandb.init(...)
        ...     callback = WandbCallback(run)
        ...     for step, batch in enumerate(replay):
        ...         callback(step)
    """

    def __init__(self, run: Any, every_s: float = 10.0, trust: Trust = "user") -> None:
        check_calls("run is what wandb.init() returns", run, "log")
        super().__init__(lambda scalars, step: run.log(scalars, step=step), every_s, trust)


def _named(found: Mapping[str, Mapping[tuple[str, ...], float]], kind: str) -> dict[str, float]:
    """The values of metrics of a kind, by `geartrain/METRIC/LABELS`; a slash in a label would look like two labels."""
    return {
        "/".join(["geartrain", name.removeprefix("geartrain_"), *(label.replace("/", "|") for label in labels)]): value
        for name, values in found.items()
        if METRICS[name].kind == kind
        for labels, value in values.items()
    }


__all__ = ["TensorBoardCallback", "TrackerCallback", "WandbCallback"]
