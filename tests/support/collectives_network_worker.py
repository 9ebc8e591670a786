"""A rank on a host of its own that times all-reduces under several windows, in turns."""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from collectives_crew import group_of
from collectives_worker import DirectoryStore, say


def main() -> None:
    root, rank, size, options = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    windows, sizes, host = options["windows"], options["sizes"], f"10.77.0.{rank + 1}"
    groups = {
        window: group_of(
            rank,
            size,
            store=DirectoryStore(root),
            name=f"w{window}",
            window_bytes=window,
            host=host,
            reducers=options["reducers"],
            shares=options["shares"],
            secret="shared",
            transport="tcp",
        )
        for window in windows
    }
    found = {}
    for nbytes in sizes:
        array, seconds = np.ones(nbytes // 4, np.float32), {window: [] for window in windows}
        for _ in range(3):
            for window, group in groups.items():
                group.all_reduce(array)
                for _ in range(2):
                    group.all_reduce(np.zeros(1, np.float32))  # all begin together
                    array.fill(1)
                    began = time.perf_counter()
                    group.all_reduce(array)
                    seconds[window].append(time.perf_counter() - began)
                    assert (array == size).all()
        found[nbytes] = {str(window): statistics.median(values) for window, values in seconds.items()}
    say(seconds=found, window_bytes=groups[None].counters()["window_bytes"])
    for group in groups.values():
        group.close()


main()
