"""A rank on a host of its own that times all-gathers and reduce-scatters of one size, in turns."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import numpy as np
from collectives_crew import group_of
from collectives_worker import DirectoryStore, say

LAPS = 7


def main() -> None:
    root, (rank, size, count, window) = Path(sys.argv[1]), map(int, sys.argv[2:])
    group = group_of(
        rank,
        size,
        store=DirectoryStore(root),
        name="exchanges",
        window_bytes=window,
        host=f"10.77.0.{rank + 1}",
        transport="tcp",
    )
    arrays, own = [np.empty(count, np.float32) for _ in range(size)], np.full(count, rank, np.float32)
    operations = {
        "all_gather": lambda: group.all_gather(own, arrays),
        "reduce_scatter": lambda: group.reduce_scatter(arrays, np.empty(count, np.float32)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    for _ in range(LAPS):
        for name, run in operations.items():
            group.all_reduce(np.zeros(1, np.float32))  # both begin together
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
            assert all((array == other).all() for other, array in enumerate(arrays))
    say(seconds={name: statistics.median(laps) for name, laps in seconds.items()})
    group.close()


main()
