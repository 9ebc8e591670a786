"""Batches a second over two processes of this host, for each kind of strategy.

    python -m geartrain_bench.distributed_replay.strategies [BLOCKS]

A global batch has 64 rows of 100 KB from a store a process; the mixture draws from two. All replays take turns in
blocks, so that all of them meet the same load. Printed are medians over blocks: batches a second, that as a share of
`Uniform`'s, processor time a batch and rank, messages that a rank sends for a batch, rows that it gets from the other
one, and what the batch asks of Python code. The floor is a copy of a rank's part of the batch by NumPy.

Threats to validity: batches are used at once, so every wait for the other process shows; a loop that trains meanwhile
would hide most of it. On two cores the processes share them with whatever else runs.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import uuid
from typing import Any, NamedTuple

import numpy as np

from geartrain.core.schema import Field
from geartrain.ranks.torch_rank_group import TorchRankGroup
from geartrain.replay.replay import Replay
from geartrain.selection.groups import GroupSampling
from geartrain.selection.mixture import Mixture
from geartrain.selection.ordered import Lifo, TopK
from geartrain.selection.random import Prioritized, Uniform
from geartrain.selection.strategy import Limits
from geartrain.store.store import Store
from geartrain_bench.distributed_replay.two_processes import run

ROWS = 64
STEPS = 1_000
WIDTH = 25  # float32: 100 KB a row
CAPACITY = 1_000
BATCHES = 40


class Row(NamedTuple):
    """What one strategy reached."""

    name: str
    per_s: float
    cpu_ms: float
    messages: float
    moved: float
    path: str


def measure(rank: int, meeting: str, blocks: int) -> tuple[list[Row], float]:
    """Runs one rank. A row for each strategy, and the floor in batches a second."""
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{meeting}", world_size=2, rank=rank)
    one, other = _store(rank), _store(rank)
    selections: dict[str, Any] = {
        "Uniform": Uniform(seed=1),
        "Prioritized, weights": Prioritized(seed=1, beta=0.4),
        "Mixture of two stores": Mixture([0.5, 0.5], [Uniform(seed=1), Uniform(seed=2)]),
        "Lifo": Lifo(),
        "TopK": TopK(),
        "Limits": Uniform(seed=1, limits=Limits(min_length=2)),
        "without replacement": Uniform(seed=1, replacement=False),
        "groups of 4": GroupSampling(by="group", size=4, seed=1),
    }
    groups = {name: TorchRankGroup(range(2)) for name in selections}
    replays = {
        name: _replay([one, other] if isinstance(each, Mixture) else one, each, groups[name])
        for name, each in selections.items()
    }
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in replays}
    sent: dict[str, float] = {}
    source, floor = np.ones((ROWS // 2, STEPS * WIDTH), np.float32), list[float]()
    into = np.empty_like(source)
    for block in range(blocks + 1):
        began_s = time.perf_counter()
        for _ in range(BATCHES):
            np.copyto(into, source)
        floor.append(BATCHES / (time.perf_counter() - began_s))
        for name, replay in replays.items():
            dist.barrier()
            group = groups[name]
            messages, began_s, cpu_s = group.sent_messages, time.perf_counter(), time.process_time()
            for _ in range(BATCHES):
                replay.sample()
            if block:  # the first one warms up
                took[name].append((time.perf_counter() - began_s, time.process_time() - cpu_s))
                sent[name] = (group.sent_messages - messages) / BATCHES
    rows = []
    for name, replay in replays.items():
        stats = replay.stats()
        wall_s, cpu_s = (statistics.median(each) for each in zip(*took[name], strict=True))
        moved = stats["received_bytes"] / (4 * STEPS * WIDTH) / stats["batches"]
        rows.append(Row(name, BATCHES / wall_s, 1e3 * cpu_s / BATCHES, sent[name], moved, stats["path"]))
        replay.close()
    one.close()
    other.close()
    dist.destroy_process_group()
    return rows, statistics.median(floor[1:])


def _store(rank: int) -> Store:
    fields = {"x": Field((WIDTH,), "float32"), "group": Field((), "int64", per_row=True)}
    store = Store.create(f"strategies-{uuid.uuid4().hex[:12]}", fields, max_length=STEPS, capacity=CAPACITY)
    for first in range(0, CAPACITY, 100):
        groups = np.arange(first, first + 100) // 4 + CAPACITY * rank
        store.insert({"x": np.ones((100, STEPS, WIDTH), np.float32), "group": groups})
    return store


def _replay(store: Any, selection: Any, group: TorchRankGroup) -> Replay:
    return Replay(store, selection, ROWS, group=group, prefetch=0, output="numpy", fields=["x"])


def main(arguments: list[str]) -> None:
    """Prints a table; raises `ArgumentError` for a number of blocks that is none."""
    measured = run(__spec__.name, measure, arguments, 10)
    if measured is None:  # the other rank
        return
    (rows, floor), blocks = measured
    print(f"two processes, {ROWS} rows of 100 KB, {blocks} blocks of {BATCHES}, load {os.getloadavg()[0]:.1f}")
    print(f"floor, a copy of {ROWS // 2} rows: {floor:.0f}/s")
    print(f"{'':24} {'batches/s':>9} {'share':>6} {'CPU ms':>7} {'sent':>5} {'moved':>6}  path")
    for row in rows:
        figures = (
            f"{row.per_s:9.0f} {row.per_s / rows[0].per_s:6.2f} {row.cpu_ms:7.2f} {row.messages:5.0f} {row.moved:6.2f}"
        )
        print(f"{row.name:24} {figures}  {row.path}")


if __name__ == "__main__":
    main(sys.argv[1:])
