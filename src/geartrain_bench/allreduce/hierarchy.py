"""Time, processor time and bytes of a flat and of a hierarchical all-reduce of several ranks a host, in turns.

    python -m geartrain_bench.allreduce.hierarchy --hosts 4 --ranks 4 --mb 8 --rate-mbit 200

The lower bound is what one rank a host must send, at the link's rate: 2 (H-1)/H K for H hosts and an array of K bytes.
Bytes are the kernel's count of the busiest host's interface.

It would mislead where all hosts share the cores of one machine: there the processor time tells. Needs the right to
create network namespaces (geartrain.tools.testing.Hosts).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from geartrain.tools.testing import Hosts

PORT = 29512
KINDS = ("flat", "hierarchical")


def rank_main(rank: int, size: int, place: str, nbytes: int, rounds: int) -> dict[str, Any]:
    """One rank; returns its medians by kind."""
    import numpy as np
    import torch.distributed as dist

    from geartrain.collectives import Group

    store = dist.TCPStore(place, PORT, size, rank == 0, timeout=timedelta(seconds=300))  # type: ignore[attr-defined]
    groups = {
        kind: Group(rank, size, store=store, name=kind, hierarchical=kind == "hierarchical", timeout_s=300.0)
        for kind in KINDS
    }
    array, sync = np.ones(nbytes // 4, np.float32), np.zeros(1, np.float32)
    found: dict[str, dict[str, list[float]]] = {kind: {"seconds": [], "processor_s": [], "bytes": []} for kind in KINDS}
    for i in range(rounds + 1):
        for kind in KINDS if i % 2 else KINDS[::-1]:
            array.fill(1)
            groups["flat"].all_reduce(sync)
            sent, cpu, began = _sent(), time.process_time(), time.perf_counter()
            groups[kind].all_reduce(array)
            wall, cpu = time.perf_counter() - began, time.process_time() - cpu
            groups["flat"].all_reduce(sync)
            if i > 0:
                for name, value in (("seconds", wall), ("processor_s", cpu), ("bytes", _sent() - sent)):
                    found[kind][name].append(value)
            assert float(array[-1]) == size
    for group in groups.values():
        group.close()
    return {kind: {name: statistics.median(values) for name, values in of.items()} for kind, of in found.items()}


def _sent() -> int:
    """Bytes that this host's interface has sent, loopback's not."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if not line.strip().startswith("lo:"))


def host_main(arguments: list[str], first: int, ranks: int) -> None:
    """The ranks of one host, each in a process of its own."""
    each = [
        subprocess.Popen([sys.executable, "-m", "geartrain_bench.allreduce.hierarchy", *arguments, "--rank", str(rank)])
        for rank in range(first, first + ranks)
    ]
    sys.exit(max(process.wait() for process in each))


def measure(n_hosts: int, ranks: int, mb: float, rate_mbit: float, rounds: int) -> None:
    """Prints the table."""
    nbytes, size = int(mb * 2**20), n_hosts * ranks
    with Hosts(n_hosts, rate_mbit=rate_mbit) as hosts:
        common = ["--place", hosts.address(0), "--of", str(size), "--mb", str(mb), "--rounds", str(rounds)]
        module = [sys.executable, "-m", "geartrain_bench.allreduce.hierarchy", *common, "--ranks", str(ranks)]
        each = [
            hosts.popen(
                host,
                [*module, "--first", str(host * ranks)],
                stdout=subprocess.PIPE,
                env={"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
            )
            for host in range(n_hosts)
        ]
        said = [json.loads(line) for process in each for line in process.communicate()[0].decode().splitlines()]
    bound_s = 2 * (n_hosts - 1) / n_hosts * nbytes * 8e-6 / rate_mbit
    load = os.getloadavg()[0]
    print(f"{n_hosts} hosts x {ranks} ranks, {mb:g} MB, {rate_mbit:g} Mbit/s, {rounds} rounds; load {load:.1f}")
    for kind in KINDS:
        seconds = max(one[kind]["seconds"] for one in said)
        cpu = sum(one[kind]["processor_s"] for one in said)
        moved = max(one[kind]["bytes"] for one in said)
        print(
            f"  {kind:14} {1e3 * seconds:8.1f} ms  {1e3 * cpu:8.1f} ms of CPU  {moved / 1e6:8.2f} MB a host  "
            f"{bound_s / seconds:6.3f} of the bound"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=4, help="of a host")
    parser.add_argument("--mb", type=float, default=8.0)
    parser.add_argument("--rate-mbit", type=float, default=200.0)
    parser.add_argument("--rounds", type=int, default=5)
    for hidden in ("--rank", "--of", "--first"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        found = rank_main(given.rank, given.of, given.place, int(given.mb * 2**20), given.rounds)
        os.write(1, (json.dumps(found) + "\n").encode())  # at once: a host's ranks share the pipe
    elif given.first is not None:
        common = ["--place", given.place, "--of", given.of, "--mb", given.mb, "--rounds", given.rounds]
        host_main([str(one) for one in common], given.first, given.ranks)
    else:
        measure(given.hosts, given.ranks, given.mb, given.rate_mbit, given.rounds)


if __name__ == "__main__":
    main()
