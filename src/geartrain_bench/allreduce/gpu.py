"""All-reduce of tensors on GPUs, ranks in processes of one host: `geartrain bench allreduce --device cuda`.

geartrain copies tensors to pinned memory, sums them there and copies them back, as Gloo does; NCCL never leaves the
GPUs and is measured where every rank has one. With fewer GPUs than ranks they share them. The floor is a copy of the
tensor to pinned memory and one back, by torch, while all ranks do the same.

Threats to validity: ranks that share a GPU share its link. Every sum is checked, at its first, middle and last element.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
from geartrain.errors import ArgumentError, GeartrainError
from geartrain_bench.harness.timing import BenchResult, Lap

KB, MB = 1 << 10, 1 << 20
SIZES = (4 * KB, 64 * KB, MB, 16 * MB, 64 * MB)
QUICK_SIZES = (64 * KB, MB, 16 * MB)
RANKS, QUICK_RANKS = (2, 4), (2,)
ROUNDS, QUICK_ROUNDS = 9, 5
TIMEOUT_S = 120.0


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> BenchResult:
    """Measures, prints the table, writes the requested files, and returns the result.

    Raises:
        GeartrainError: there is no GPU here.
        ArgumentError: `arguments` of which there are none.
    """
    import torch

    if arguments:
        raise ArgumentError(f"bench allreduce --device cuda takes no {arguments[0]!r}: its parts are those of CPUs")
    if not torch.cuda.is_available():
        raise GeartrainError(
            f"all-reduce cannot be timed on a GPU here: torch {torch.__version__} finds no CUDA device"
        )
    result = run(quick=quick)
    report.report(result, json_path, plot_path)
    return result


def run(*, quick: bool, device: str = "cuda") -> BenchResult:
    """All cases. `device="cpu"` runs them with tensors in host memory: a check of the benchmark."""
    import torch

    began_s = time.monotonic()
    result = harness.new_result("allreduce --device cuda", quick=quick, baselines=(), packages=("numpy", "torch"))
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if gpus:
        result.machine |= {"gpu": torch.cuda.get_device_name(0), "gpus": gpus}
    sizes, rounds = (QUICK_SIZES, QUICK_ROUNDS) if quick else (SIZES, ROUNDS)
    for n in QUICK_RANKS if quick else RANKS:
        times: dict[str, dict[int, list[Lap]]] = {}
        for system in ("geartrain", "gloo", "nccl"):
            if system == "nccl" and gpus < n:
                result.baselines_missing[f"nccl, {n} ranks"] = f"one GPU a rank is needed, found {gpus}"
                continue
            if not result.deadline.allows(f"{n} ranks of {system}"):
                continue
            harness.say(f"{n} ranks of {system}")
            try:
                times[system] = measure(system, n, sizes, rounds, device)
            except GeartrainError as error:
                result.baselines_missing[f"{system}, {n} ranks"] = str(error)
        _add(result, n, sizes, times)
    return harness.finish(result, began_s)


def _add(result: BenchResult, n: int, sizes: Sequence[int], times: dict[str, dict[int, list[Lap]]]) -> None:
    for nbytes in sizes:
        floors = [lap.seconds for of_system in times.values() for lap in of_system[-nbytes]]
        if not floors:
            continue
        floor_s = harness.quantiles(floors)[0]
        size = f"{nbytes // MB} MB" if nbytes >= MB else f"{nbytes // KB} KB"
        of_all = {"floor": floors}
        of_all |= {system: [lap.seconds for lap in of_system[nbytes]] for system, of_system in times.items()}
        for system, seconds in of_all.items():
            result.rows.append(
                harness.time_row(f"{n} ranks, {size}", system, "all-reduce on GPUs", "us", seconds, floor_s)
            )


def measure(system: str, n: int, sizes: Sequence[int], rounds: int, device: str) -> dict[int, list[Lap]]:
    """Laps of rank 0 by bytes; those of the floor by bytes below zero.

    Raises:
        GeartrainError: a rank ended, found a wrong sum, or was not done in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    processes = [
        context.Process(
            target=_rank,
            args=(system, rank, n, port, sizes, rounds, device, theirs if rank == 0 else None),
            daemon=True,
        )
        for rank in range(n)
    ]
    for process in processes:
        process.start()
    theirs.close()
    try:
        if not mine.poll(TIMEOUT_S):
            raise GeartrainError(f"{n} ranks of {system} were not done within {TIMEOUT_S:g} s")
        found: dict[int, list[Lap]] | str = mine.recv()
    except EOFError:
        raise GeartrainError(f"rank 0 of {n} of {system} ended without a result") from None
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
    if isinstance(found, str):
        raise GeartrainError(found)
    return found


def _rank(
    system: str,
    rank: int,
    n: int,
    port: int,
    sizes: Sequence[int],
    rounds: int,
    device: str,
    answers: Connection | None,
) -> None:
    try:
        found: dict[int, list[Lap]] | str = _timed(system, rank, n, port, sizes, rounds, device)
    except Exception as error:
        found = f"rank {rank} of {n} of {system}: {type(error).__name__}: {error}"
        if answers is None:
            raise
    if answers is not None:
        answers.send(found)


def _timed(
    system: str, rank: int, n: int, port: int, sizes: Sequence[int], rounds: int, device: str
) -> dict[int, list[Lap]]:
    import torch
    from torch import distributed

    dist: Any = distributed  # partly untyped
    if system == "geartrain":
        import geartrain.collectives.torch_backend.process_group  # noqa: F401  # registers it
    store = dist.TCPStore("127.0.0.1", port, n, rank == 0, timeout=timedelta(seconds=TIMEOUT_S))
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(system, store=store, rank=rank, world_size=n, timeout=timedelta(seconds=TIMEOUT_S))

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    found: dict[int, list[Lap]] = {}
    try:
        for nbytes in sizes:
            tensor = torch.empty(nbytes // 4, device=device)
            pinned = torch.empty(nbytes // 4, pin_memory=device == "cuda")
            calls = max(1, min(50, 20_000_000 // nbytes))

            def reduced(tensor: Any = tensor) -> None:
                dist.all_reduce(tensor)
                synchronize()

            def copied(tensor: Any = tensor, pinned: Any = pinned) -> None:
                pinned.copy_(tensor, non_blocking=True)
                tensor.copy_(pinned, non_blocking=True)
                synchronize()

            for sign, one in ((1, reduced), (-1, copied)):
                found[sign * nbytes] = _laps(one, tensor, rank, calls, rounds)
                if sign == 1:
                    _check(tensor, n, rank, reduced)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return found


def _laps(one: Callable[[], None], tensor: Any, rank: int, calls: int, rounds: int) -> list[Lap]:
    import torch.distributed as dist

    def body() -> None:
        for _ in range(calls):
            one()

    laps = []
    for i in range(rounds + 2):
        tensor.zero_()  # sums are summed again
        dist.barrier()
        lap = harness.lap(calls, body)
        if i >= 2:
            laps.append(lap)
    return laps


def _check(tensor: Any, n: int, rank: int, reduced: Callable[[], None]) -> None:
    tensor.fill_(rank + 1)
    reduced()
    for at in (0, len(tensor) // 2, -1):
        if float(tensor[at]) != n * (n + 1) / 2:
            raise GeartrainError(f"element {at} of the sum is {float(tensor[at])}, not {n * (n + 1) / 2}")


__all__ = ["main", "measure", "run"]
