"""Reduce-scatter, all-gather, broadcast and steps of FSDP2 on Gloo and on geartrain, in turns: time and bytes.

    python -m geartrain_bench.allreduce.other_collectives --ranks 2,4 --mb 16 --rate-mbit 200    # one host a rank
    python -m geartrain_bench.allreduce.other_collectives --ranks 2,4 --mb 16                    # all ranks on one host

The lower bound is the bytes that a rank must send, at the link's rate: (N-1)/N K of an array of K bytes, K for the root
of a broadcast; 3(N-1)/N K for a step of FSDP2 with K bytes of parameters, which are gathered for the forward and for
the backward pass, and whose gradients are scattered. The floor next to it is what one-way TCP takes for as many bytes,
by a transfer of K bytes from rank 0 to rank 1 in every round. Bytes are the kernel's count of the busiest rank's
interface; on one host that of loopback for all ranks together, while geartrain's go through shared memory and are its
own count of one rank.

It would mislead where ranks share cores that a real host has for itself: the processor time tells. A step's arithmetic
is next to nothing: four layers, four rows. Needs the right to create network namespaces
(geartrain.tools.testing.Hosts).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from geartrain.tools.testing import Hosts
from geartrain_bench.allreduce.one_way import OneWayTransfer
from geartrain_bench.allreduce.rounds import raise_priority

PORT = 29511
TIMEOUT = timedelta(seconds=300)
LIBRARIES = ("gloo", "geartrain")
LAYERS = 4
ROWS = 4
#: Bytes of an operation that a rank must send, in units of K, by the number of ranks.
LEAST: dict[str, Callable[[int], float]] = {
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "fsdp2_step": lambda n: 3 * (n - 1) / n,
}


def rank_main(rank: int, size: int, place: str, nbytes: int, rounds: int, chosen: list[str]) -> dict[str, Any]:
    """One rank; returns its seconds of each round and its medians, by "operation library"."""
    import torch
    import torch.distributed as dist

    import geartrain.collectives.torch_backend.process_group  # noqa: F401 - registers the backend

    raise_priority()
    torch.set_num_threads(1)
    store = dist.TCPStore(place, PORT, size, rank == 0, timeout=TIMEOUT)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    groups: dict[str, Any] = {library: dist.new_group(backend=library, timeout=TIMEOUT) for library in LIBRARIES}
    count = nbytes // 4 // size
    whole, part = torch.ones(count * size), torch.ones(count)
    steps = {library: _TrainingStep(group, nbytes, rank) for library, group in groups.items()}
    operations: dict[str, Callable[[str], Any]] = {
        "reduce_scatter": lambda library: dist.reduce_scatter_tensor(part, whole, group=groups[library]),
        "all_gather": lambda library: dist.all_gather_into_tensor(whole, part, group=groups[library]),
        "broadcast": lambda library: dist.broadcast(whole, 0, group=groups[library]),
        "fsdp2_step": lambda library: steps[library](),
    }
    found: dict[str, Any] = {"one-way TCP": []}
    wire = OneWayTransfer(place, PORT + 1, sends=rank == 0) if rank < 2 else None
    for name in chosen:
        begin = operations[name]
        walls: dict[str, list[float]] = {library: [] for library in groups}
        processor: dict[str, list[float]] = {library: [] for library in groups}
        moved: dict[str, list[int]] = {library: [] for library in groups}
        for i in range(rounds + 1):
            groups["geartrain"].barrier().wait()
            if wire is not None and i > 0:
                found["one-way TCP"].append(wire.seconds(nbytes))
            for library in LIBRARIES if i % 2 else LIBRARIES[::-1]:
                whole.fill_(1)
                part.fill_(1)
                groups["geartrain"].barrier().wait()
                before, cpu, began = _bytes(groups), time.process_time(), time.perf_counter()
                begin(library)
                wall, cpu = time.perf_counter() - began, time.process_time() - cpu
                groups["geartrain"].barrier().wait()
                if i > 0:
                    walls[library].append(wall)
                    processor[library].append(cpu)
                    moved[library].append(_bytes(groups) - before)
                expected = size if name == "reduce_scatter" else 1
                assert float((part if name == "reduce_scatter" else whole)[-1]) == expected
        if name == "fsdp2_step":
            torch.testing.assert_close(*(step.gradients() for step in steps.values()), rtol=1e-3, atol=1e-6)
        for library in groups:
            found[f"{name} {library}"] = {
                "seconds": walls[library],
                "processor_s": statistics.median(processor[library]),
                "bytes": statistics.median(moved[library]),
            }
    found["inner"] = groups["geartrain"].counters()["inner"]
    groups["geartrain"].barrier().wait()
    dist.destroy_process_group()
    return found


class _TrainingStep:
    """Forward and backward pass of a model of FSDP2, each layer of which is gathered by itself."""

    def __init__(self, group: Any, nbytes: int, rank: int) -> None:
        import torch
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        width = math.isqrt(nbytes // 4 // LAYERS)
        torch.manual_seed(0)
        self._model: Any = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in self._model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self._input = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(rank))

    def __call__(self) -> None:
        self._model.zero_grad()
        self._model(self._input).square().mean().backward()

    def gradients(self) -> list[Any]:
        """This rank's part of each layer's."""
        return [parameter.grad.to_local() for parameter in self._model.parameters()]


def _bytes(groups: dict[str, Any]) -> int:
    """Bytes that this rank's interface has sent, loopback's included, and those through shared memory."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    sent = sum(int(line.split(":")[1].split()[8]) for line in lines)
    return sent + sum(int(group["bytes_sent"]["shm"]) for group in groups["geartrain"].counters()["groups"].values())


def measure(size: int, mb: float, rate_mbit: float | None, rounds: int, chosen: str) -> None:
    """Prints a table of one number of ranks."""
    nbytes = int(mb * 2**20)
    with Hosts(size if rate_mbit else 1, rate_mbit=rate_mbit) as hosts:
        common = [sys.executable, "-m", "geartrain_bench.allreduce.other_collectives", "--place", hosts.address(0)]
        common += ["--of", str(size), "--mb", str(mb), "--rounds", str(rounds), "--operations", chosen]
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
    tcp_s = statistics.median(said[0]["one-way TCP"])
    for one in said:
        del one["one-way TCP"]
    print(f"  one-way TCP                {1e3 * tcp_s:8.1f} ms for {mb:g} MB")
    for case in said[0]:
        laps = [max(ranks) for ranks in zip(*(one[case]["seconds"] for one in said), strict=True)]
        seconds, cpu, moved = (
            statistics.median(laps),
            sum(one[case]["processor_s"] for one in said),
            max(one[case]["bytes"] for one in said),
        )
        least = nbytes * LEAST[case.split()[0]](size)
        bound = f"  {least * 8e-6 / rate_mbit / seconds:6.3f} of the bound, " if rate_mbit else "  "
        floor_s = least / nbytes * tcp_s
        bound += f"{floor_s / seconds:6.3f} of one-way TCP ({floor_s / min(laps):.3f} in the fastest round)"
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
    parser.add_argument("--operations", default=",".join(LEAST), help="some of %(default)s")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        chosen = given.operations.split(",")
        found = rank_main(given.rank, given.of, given.place, int(given.mb * 2**20), given.rounds, chosen)
        print(json.dumps(found), flush=True)
        return
    for size in map(int, given.ranks.split(",")):
        measure(size, given.mb, given.rate_mbit, given.rounds, given.operations)


if __name__ == "__main__":
    main()
