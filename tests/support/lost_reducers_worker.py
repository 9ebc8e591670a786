"""A rank whose group outlives its reducers: `lost_reducers_worker.py DIRECTORY RANK SIZE OPTIONS`.

It reduces random numbers, several arrays at once, and compares the sums bit by bit with those in rank order.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from collectives_crew import group_of
from collectives_worker import DirectoryStore, say

from geartrain.errors import GeartrainError

SIZES = (50_001, 17, 4096, 130_000)


class Numbers:
    """The same numbers in every process; a few arrays that later steps use again, rotated."""

    def __init__(self, size: int) -> None:
        random = np.random.default_rng(7)
        self.base = [[random.standard_normal(n).astype(np.float32) for n in SIZES] for _ in range(size)]

    def of(self, rank: int, step: int, i: int) -> Any:
        return np.roll(self.base[rank][i], step + rank)

    def total(self, step: int, i: int) -> Any:
        total = self.of(0, step, i).copy()
        for rank in range(1, len(self.base)):
            total += self.of(rank, step, i)
        return total


def resident_bytes() -> int:
    """Memory of this process, without what it shares with others or maps from files."""
    total, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (total - shared) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    root, rank, size, options = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
    until, lasts_s = root / "end", options.pop("lasts_s", 0.0)
    numbers, stop = Numbers(size), np.zeros(1, np.int32)
    group = group_of(rank, size, store=DirectoryStore(root), timeout_s=60.0, on_reducer_loss="continue", **options)
    took_s, began_s = [], time.monotonic()
    try:
        step = 0
        while not stop[0]:
            arrays = [numbers.of(rank, step, i) for i in range(len(SIZES))]
            stop[0] = rank == 0 and until.exists() and time.monotonic() - began_s >= lasts_s
            begin_s = time.monotonic()
            works = [group.all_reduce_async(array) for array in (*arrays, stop)]
            for work in works:
                work.wait()
            took_s.append(time.monotonic() - begin_s)
            for i, array in enumerate(arrays):
                assert array.tobytes() == numbers.total(step, i).tobytes(), (step, i)
            say(step=step, lost=group.counters()["lost_reducers"], took_s=took_s[-1], resident=resident_bytes())
            step += 1
        found = group.counters()
        say(
            done=True,
            steps=step,
            longest_s=max(took_s),
            median_s=float(np.median(took_s)),
            lost=found["lost_reducers"],
            taken_over_bytes=found["taken_over_bytes"],
            epoch=group.epoch,
        )
    except GeartrainError as error:
        say(error=type(error).__name__, text=str(error))
    group.close(5.0)


if __name__ == "__main__":
    main()
