"""Client of baseline_worker.py: another replay buffer in a process and an environment of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from geartrain.core.lifetime import on_error
from geartrain.core.schema import Field
from geartrain_bench.harness.child_process import AnsweringProcess, BaselineError
from geartrain_bench.harness.timing import Lap

WORKER = Path(__file__).with_name("baseline_worker.py")
#: Environment variables that select a variant of a baseline.
VARIANTS = {"torchrl-thp": {"THP_MEM_ALLOC_ENABLE": "1"}}


class BaselineProcess(AnsweringProcess):
    """A baseline that is set up and ready to be timed. A context manager; leaving it kills the baseline.

    `kind` is "rows" for a buffer of rows with these fields, "priorities" for the baseline's sampler of so many
    priorities. Every request raises `BaselineError` on failure, and every wait has a deadline.
    """

    def __init__(
        self,
        name: str,
        python: str,
        rows: int,
        fields: Mapping[str, Field],
        max_length: int = 1,
        *,
        setup_s: float = 240.0,
        kind: str = "rows",
    ) -> None:
        super().__init__(name, python, WORKER, {"OMP_NUM_THREADS": "2", **VARIANTS.get(name, {})})
        shapes = {name: [list(field.block_shape(max_length)), field.dtype] for name, field in fields.items()}
        with on_error(self.close):
            about = self.ask({"do": "setup", "kind": kind, "baseline": name, "rows": rows, "fields": shapes}, setup_s)
        self.versions: dict[str, str] = about["versions"]
        self.rows = int(about["rows"])

    def threads(self, n: int) -> int:
        """Sets the number of threads of the baseline; returns the number it supports."""
        return int(self.ask({"do": "threads", "n": n}, 30)["n"])

    def lap(self, what: str, batch: int, calls: int, timeout_s: float = 120.0) -> Lap:
        """One lap, named as in `laps`."""
        got = self.ask({"do": what, "batch": batch, "calls": calls}, timeout_s)
        return Lap(got["seconds"], got["cpu_seconds"], got["disturbed"])

    def laps(self) -> list[str]:
        """Names of its laps."""
        return [str(what) for what in self.ask({"do": "laps"}, 30)["laps"]]

    def counts(self, draws: int, timeout_s: float = 300.0) -> list[int]:
        """Draws with equal priorities and counts the upper half's row numbers mod 8. Its priorities stay equal."""
        return [int(count) for count in self.ask({"do": "counts", "draws": draws}, timeout_s)["counts"]]


__all__ = ["BaselineError", "BaselineProcess"]
