"""Statistics of a replay: batches delivered, the consumer's waiting time, and the progress of `Epochs` passes."""

from __future__ import annotations

import time
from typing import Any

from geartrain.replay.builder import State
from geartrain.selection.epochs import Epochs
from geartrain.selection.mixture import Mixture, Selection, strategies_of


class ConsumerFigures:
    """Statistics of a consumer. The replay writes the attributes itself, because a call would slow each batch.

    Attributes:
        batches: batches delivered.
        nbytes: bytes of all of them.
        short: rows that the last batches of passes had fewer than others.
        wait_s: how long the consumer has waited for batches.
        started_s: when the first batch was requested; None before that.
        asked_s, last_s: when the newest batch was requested, and when it was ready.
    """

    __slots__ = ("asked_s", "batches", "last_s", "nbytes", "short", "started_s", "wait_s")

    def __init__(self) -> None:
        self.batches = 0
        self.nbytes = 0
        self.short = 0
        self.wait_s = 0.0
        self.started_s: float | None = None
        self.asked_s = self.last_s = 0.0

    def waiting_s(self) -> float:
        """How long the consumer has waited for a batch by now, 0 if it does not."""
        return time.perf_counter() - self.asked_s if self.asked_s > self.last_s else 0.0

    def summary(self, rows: int, built: int, make_s: float) -> dict[str, Any]:
        """The figures that every replay has.

        Args:
            rows: of a batch.
            built, make_s: batches that were built, and what building them took.
        """
        elapsed_s = 0.0 if self.started_s is None else self.last_s - self.started_s
        bytes_per_batch = self.nbytes / self.batches if self.batches else 0.0
        return {
            "batches": self.batches,
            "rows": self.batches * rows - self.short,
            "bytes": self.nbytes,
            "wait_s": self.wait_s,
            "elapsed_s": elapsed_s,
            "wait_share": self.wait_s / elapsed_s if elapsed_s else 0.0,
            "make_s": make_s,
            "gb_per_s": built * bytes_per_batch / make_s / 1e9 if make_s else 0.0,
            "samples_per_s": built * rows / make_s if make_s else 0.0,
        }


def figures_of_passes(selection: Selection, state: State) -> dict[str, int | list[int]]:
    """Which pass the next batch is of, and rows that passes left out: lists for a mixture, empty without `Epochs`."""
    if not any(isinstance(each, Epochs) for each in strategies_of(selection)):
        return {}
    names = ("epoch", "skipped", "dropped")
    if isinstance(selection, Mixture):
        return {name: [each.get(name, 0) for each in state] for name in names}
    return {name: state[0].get(name, 0) for name in names}


__all__ = ["ConsumerFigures", "figures_of_passes"]
