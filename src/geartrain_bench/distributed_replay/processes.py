"""Processor time of a batch: of a replay alone, of a group of one, and of each of two processes of this host.

    python -m geartrain_bench.distributed_replay.processes [BLOCKS]

Rows of 1 KB and of 100 KB, 32 a process, prioritized, drawn without anything else, and with importance weights and
priority updates after every batch. The three replays take turns in blocks, so that all of them meet the same load.
Printed are the medians over blocks of microseconds of processor time a batch (of two processes the mean of both, all
threads), and what follows: a group of one in units of a replay alone, and the rows that two processes deliver together
for each row of one alone, each on a core of its own: 2 alone / each.

Threats to validity: processor time leaves out waits for the other process; a spinning wait counts.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import uuid
from typing import Any

import numpy as np

from geartrain.core.schema import Field
from geartrain.ranks.rank_group import SingleRank
from geartrain.replay.replay import Replay
from geartrain.selection.random import Prioritized
from geartrain.store.store import Store
from geartrain_bench.distributed_replay.two_processes import run

ROWS = 32
BATCHES = 100
CAPACITY = {1_000: 4_000, 100_000: 1_000}

# By row bytes and whether weights and updates are wanted: medians of a replay alone, a group of one, two processes.
Found = dict[tuple[int, bool], dict[str, float]]


def measure(rank: int, meeting: str, blocks: int) -> Found:
    """Runs one rank; processor time of a batch in microseconds."""
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{meeting}", world_size=2, rank=rank)
    found: Found = {}
    for row_bytes, capacity in CAPACITY.items():
        fields = {"x": Field((row_bytes // 4,), "float32", per_row=True)}
        with Store.create(f"processes-{uuid.uuid4().hex[:12]}", fields, capacity=capacity) as store:
            random = np.random.default_rng(rank)
            for _ in range(0, capacity, 100):
                rows = np.ones((100, row_bytes // 4), np.float32)
                store.insert({"x": rows}, priorities=random.standard_exponential(100) + 0.05)
            for learns in (False, True):
                found[row_bytes, learns] = _measure_replays(store, learns, blocks)
    dist.destroy_process_group()
    return found


def _measure_replays(store: Store, learns: bool, blocks: int) -> dict[str, float]:
    import torch.distributed as dist

    def strategy() -> Prioritized:
        return Prioritized(seed=1, beta=0.4) if learns else Prioritized(seed=1)

    options: Any = {"output": "numpy", "prefetch": 0}
    replays = {
        "alone": Replay(store, strategy(), ROWS, **options),
        "group of one": Replay(store, strategy(), ROWS, group=SingleRank(), **options),
        "two processes": Replay(store, strategy(), 2 * ROWS, group=dist.group.WORLD, **options),
    }
    took: dict[str, list[float]] = {name: [] for name in replays}
    priorities = np.random.default_rng(0).standard_exponential(ROWS) + 0.05
    for block in range(blocks + 1):
        for name, replay in replays.items():
            began_s = time.process_time()
            for _ in range(BATCHES):
                batch = replay.sample()
                batch["x"]
                if learns:
                    replay.update_priorities(batch.keys, priorities)
            if block:  # the first one warms up
                took[name].append((time.process_time() - began_s) / BATCHES * 1e6)
    every: list[dict[str, list[float]]] = [{}, {}]
    dist.all_gather_object(every, took)
    for replay in replays.values():
        replay.close()
    two = [statistics.fmean(pair) for pair in zip(*(each["two processes"] for each in every), strict=True)]
    return {name: statistics.median(two if name == "two processes" else values) for name, values in took.items()}


def main(arguments: list[str]) -> None:
    """Prints a table; raises `ArgumentError` for a number of blocks that is none."""
    measured = run(__spec__.name, measure, arguments, 10)
    if measured is None:  # the other rank
        return
    found, blocks = measured
    print(f"us of processor time a batch of {ROWS} rows, {blocks} blocks of {BATCHES}, load {os.getloadavg()[0]:.1f}")
    print(f"{'rows':28} {'alone':>9} {'group of 1':>11} {'each of 2':>10} {'1 / alone':>10} {'sum of 2':>9}")
    for (row_bytes, learns), each in found.items():
        alone, one, two = each["alone"], each["group of one"], each["two processes"]
        name = f"{row_bytes // 1000} KB{', weights, updates' if learns else ''}"
        print(f"{name:28} {alone:9.1f} {one:11.1f} {two:10.1f} {one / alone:10.2f} {2 * alone / two:9.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
