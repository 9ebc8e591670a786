"""Time, processor time and bytes of reduce-scatter, all-gather and broadcast on Gloo and on geartrain, in turns.

    python -m geartrain_bench.allreduce.exchanges --ranks 2,4 --mb 16 --rate-mbit 200    # one host a rank
    python -m geartrain_bench.allreduce.exchanges --ranks 2,4 --mb 16                    # all ranks on one host

The lower bound is the bytes that a rank must send, at the link's rate: (N-1)/N K of an array of K bytes, K for the root
of a broadcast. Bytes are the kernel's count of the busiest rank's interface; on one host that of loopback for all ranks
together, while geartrain's go through shared memory and are its own count of one rank.

It would mislead where ranks share cores that a real host has for itself: the processor time tells. Needs the right to
create network namespaces (geartrain.tools.testing.Hosts).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from geartrain.tools.testing import Hosts

PORT = 29511
TIMEOUT = timedelta(seconds=300)
LIBRARIES = ("gloo", "geartrain")


def rank_main(rank: int, size: int, place: str, nbytes: int, rounds: int) -> dict[str, Any]:
    """One rank; returns its medians by "operation library"."""
    import torch
    import torch.distributed as dist

    from geartrain.collectives.torch_backend.process_group import ProcessGroup

    torch.set_num_threads(1)
    store = dist.TCPStore(place, PORT, size, rank == 0, timeout=TIMEOUT)  # type: ignore[attr-defined]
    groups: dict[str, Any] = {
        "gloo": dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout=TIMEOUT),  # type: ignore[attr-defined]
        "geartrain": ProcessGroup(dist.PrefixStore("ours", store), rank, size, TIMEOUT, name="bench"),  # type: ignore[attr-defined]
    }
    count = nbytes // 4 // size
    whole, part = torch.ones(count * size), torch.ones(count)
    operations: dict[str, Callable[[Any], Any]] = {
        "reduce_scatter": lambda group: group._reduce_scatter_base(part, whole),
        "all_gather": lambda group: group._allgather_base(whole, part),
        "broadcast": lambda group: group.broadcast(whole, 0),
    }
    found: dict[str, Any] = {}
    for name, begin in operations.items():
        walls: dict[str, list[float]] = {library: [] for library in groups}
        processor: dict[str, list[float]] = {library: [] for library in groups}
        moved: dict[str, list[int]] = {library: [] for library in groups}
        for i in range(rounds + 1):
            for library in LIBRARIES if i % 2 else LIBRARIES[::-1]:
                whole.fill_(1)
                part.fill_(1)
                groups["geartrain"].barrier().wait()
                before, cpu, began = _bytes(groups), time.process_time(), time.perf_counter()
                begin(groups[library]).wait()
                wall, cpu = time.perf_counter() - began, time.process_time() - cpu
                groups["geartrain"].barrier().wait()
                if i > 0:
                    walls[library].append(wall)
                    processor[library].append(cpu)
                    moved[library].append(_bytes(groups) - before)
                expected = size if name == "reduce_scatter" else 1
                assert float((part if name == "reduce_scatter" else whole)[-1]) == expected
        for library in groups:
            found[f"{name} {library}"] = {
                "seconds": statistics.median(walls[library]),
                "processor_s": statistics.median(processor[library]),
                "bytes": statistics.median(moved[library]),
            }
    found["inner"] = groups["geartrain"].counters()["inner"]
    groups["geartrain"].barrier().wait()
    groups["geartrain"].shutdown()
    return found


def _bytes(groups: dict[str, Any]) -> int:
    """Bytes that this rank's interface has sent, loopback's included, and those through shared memory."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    sent = sum(int(line.split(":")[1].split()[8]) for line in lines)
    return sent + sum(int(group["bytes_sent"]["shm"]) for group in groups["geartrain"].counters()["groups"].values())


def measure(size: int, mb: float, rate_mbit: float | None, rounds: int) -> None:
    """Prints a table of one number of ranks."""
    nbytes = int(mb * 2**20)
    with Hosts(size if rate_mbit else 1, rate_mbit=rate_mbit) as hosts:
        common = [sys.executable, "-m", "geartrain_bench.allreduce.exchanges", "--place", hosts.address(0)]
        common += ["--of", str(size), "--mb", str(mb), "--rounds", str(rounds)]
        ranks = [
            hosts.popen(
                rank if rate_mbit else 0,
                [*common, "--rank", str(rank)],
                stdout=subprocess.PIPE,
                env={"OMP_NUM_THREADS": "1"},
            )
            for rank in range(size)
        ]
        said = [json.loads(rank.communicate()[0].decode().splitlines()[-1]) for rank in ranks]
    where = f"{rate_mbit:g} Mbit/s" if rate_mbit else "one host"
    print(f"{size} ranks, {mb:g} MB, {where}; geartrain left to Gloo: {[one.pop('inner') for one in said]}")
    for case in said[0]:
        seconds, cpu, moved = (
            max(one[case]["seconds"] for one in said),
            sum(one[case]["processor_s"] for one in said),
            max(one[case]["bytes"] for one in said),
        )
        least = nbytes if case.startswith("broadcast") else nbytes * (size - 1) / size
        bound = f"  {least * 8e-6 / rate_mbit / seconds:6.3f} of the bound" if rate_mbit else ""
        print(
            f"  {case:26} {1e3 * seconds:8.1f} ms  {1e3 * cpu:8.1f} ms of CPU  {moved / 1e6:8.2f} MB{bound}", flush=True
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--mb", type=float, default=16.0)
    parser.add_argument("--rate-mbit", type=float, default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        print(json.dumps(rank_main(given.rank, given.of, given.place, int(given.mb * 2**20), given.rounds)), flush=True)
        return
    for size in map(int, given.ranks.split(",")):
        measure(size, given.mb, given.rate_mbit, given.rounds)


if __name__ == "__main__":
    main()
