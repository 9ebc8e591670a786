"""Cost of one round between two ranks of this host: an all-gather of 64 bytes by each carrier of a rank group.

    python -m geartrain_bench.distributed_replay.agreement [BLOCKS]

Both ranks run blocks of 100 rounds by each carrier, one carrier after the other within a block, so that all of them
meet the same load. Printed for each: microseconds of a round (median and 90th percentile over blocks of their medians)
and of processor time of rank 0, all threads. The lower bound is a round by bare connections, without a rank group.

Threats to validity: two processes on two cores; on a busy machine a round waits for the other process to be scheduled.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np

from geartrain.ranks.torch_rank_group import TorchRankGroup
from geartrain.transport.connection import Connection, connect, listen
from geartrain_bench.distributed_replay.two_processes import run

CARRIERS = ("gloo", "auto", "tcp")
ROUNDS = 100
NBYTES = 64


def measure(rank: int, meeting: str, blocks: int) -> dict[str, tuple[float, float, float]]:
    """Runs one rank; for each carrier median and p90 of a round, and processor time of one, in microseconds."""
    import torch.distributed as dist

    dist.init_process_group("gloo", f"file://{meeting}", world_size=2, rank=rank)
    word = np.zeros(NBYTES, np.uint8)
    connection = _connected(rank, dist.distributed_c10d._get_default_store())

    def bare() -> None:
        connection.send(word.tobytes())
        connection.receive()

    rounds: dict[str, Callable[[], object]] = {"connection": bare}
    groups = {}
    for carrier in CARRIERS:
        os.environ["GEARTRAIN_RANK_CARRIER"] = carrier
        groups[carrier] = TorchRankGroup([0, 1])
        rounds[carrier] = lambda group=groups[carrier]: group.all_gather(word)  # type: ignore[misc]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in rounds}
    for _ in range(blocks):
        for name, once in rounds.items():
            once()
            took_s, cpu_s = [], time.process_time()
            for _ in range(ROUNDS):
                began_s = time.perf_counter()
                once()
                took_s.append(time.perf_counter() - began_s)
            found[name].append((statistics.median(took_s) * 1e6, (time.process_time() - cpu_s) / ROUNDS * 1e6))
    for group in groups.values():
        group.close()
    connection.close()
    dist.destroy_process_group()
    return {
        name: (
            statistics.median(wall for wall, _ in each),
            float(np.percentile([wall for wall, _ in each], 90)),
            statistics.median(cpu for _, cpu in each),
        )
        for name, each in found.items()
    }


def _connected(rank: int, store: object) -> Connection:
    if rank == 0:
        listener = listen()
        store.set("bench/agreement", listener.address)  # type: ignore[attr-defined]
        return listener.accept()
    return connect(bytes(store.get("bench/agreement")).decode())  # type: ignore[attr-defined]


def main(arguments: list[str]) -> None:
    """Prints a table; raises `ArgumentError` for a number of blocks that is none."""
    measured = run(__spec__.name, measure, arguments, 20)
    if measured is None:  # the other rank
        return
    found, blocks = measured
    names = {"connection": "bare connection, shared memory", "auto": "shared memory", "tcp": "TCP", "gloo": "Gloo"}
    print(f"one round of 2 ranks, {NBYTES} bytes each, {blocks} blocks of {ROUNDS}, load {os.getloadavg()[0]:.1f}")
    for name, (median_us, p90_us, cpu_us) in found.items():
        print(f"{names[name]:32} {median_us:8.1f} us  p90 {p90_us:8.1f} us  CPU {cpu_us:7.1f} us")


if __name__ == "__main__":
    main(sys.argv[1:])
