"""The columns of `bench p2p --device cuda`, on the CPU: what they say of times means nothing.

A process of its own, because TensorPipe joins once in a process.
"""

from __future__ import annotations

import sys
from pathlib import Path

import geartrain_bench.harness.report as report
import geartrain_bench.messages.gpu as p2p_gpu
import geartrain_bench.messages.report as p2p_report
from geartrain_bench.messages.bench import Plan


class NoGpus(p2p_gpu.Gpus):
    """The CPU in the place of two GPUs."""

    transport, name, near, far, map = "shm", "none", "cpu", "cpu", None  # type: ignore[assignment]

    def __init__(self) -> None:
        pass

    def torch_maps(self) -> None:  # type: ignore[override]
        return None

    def wait(self) -> None:
        pass


def measure(folder: Path) -> None:
    """Measures, prints the tables, and writes the result and its plot into a folder."""
    result = p2p_gpu.run(Plan((20_480, 1_310_720), 1, 0.5, 0.3), NoGpus())
    report.write_json(result, folder / "p2p.json")
    p2p_report.print_overview(result)
    p2p_report.plot(result, folder / "p2p.png")


if __name__ == "__main__":
    measure(Path(sys.argv[1]))
