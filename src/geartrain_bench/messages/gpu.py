"""Tensors on a GPU from one process to another on the same host: the CUDA columns of `geartrain bench p2p`.

`geartrain bench p2p --device cuda`. The receiver's function waits until its GPU has the bytes, so a reply means
that they have arrived. geartrain uses `cuda_ipc`, TensorPipe a device map. With two GPUs or more tensors go
from the first to the second, else they stay on the only one.

The floor of a transfer is one copy of the tensor by torch on the sender's stream, to the receiver's GPU, waited for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import geartrain_bench.harness.report as report
import geartrain_bench.harness.timing as harness
import geartrain_bench.messages.bench as p2p
import geartrain_bench.messages.report as p2p_report
from geartrain.errors import GeartrainError
from geartrain_bench.harness.timing import BenchResult, Clock, System, lap, take_turns
from geartrain_bench.messages.worker import landed


class Gpus:
    """Devices of the columns: the sender's GPU is `near`, the receiver's `far`."""

    transport = "cuda_ipc"  # of geartrain's

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise GeartrainError("there is no GPU that torch can use, and p2p has no CUDA columns without one")
        self.near, self.far = "cuda:0", f"cuda:{min(1, torch.cuda.device_count() - 1)}"
        self.name = torch.cuda.get_device_name(0)

    @property
    def map(self) -> str | None:
        """The device map of geartrain's node, from here to the peer `server`."""
        return f"server_{self.near.removeprefix('cuda:')}_{self.far.removeprefix('cuda:')}"

    def torch_maps(self) -> dict[str, dict[Any, Any]] | None:
        """TensorPipe's."""
        return {"server": {self.near: self.far}}

    def tensor(self, nbytes: int, device: str) -> Any:
        """Float32 ones."""
        import torch

        return torch.ones(nbytes // 4, dtype=torch.float32, device=device)

    def wait(self) -> None:
        """Waits until both devices have completed their work."""
        import torch

        torch.cuda.synchronize(self.near)
        torch.cuda.synchronize(self.far)


def main(
    *,
    quick: bool = False,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    baselines: dict[str, str] | None = None,
) -> BenchResult:
    """Measures, prints the tables, writes the requested files, and returns the result.

    Raises:
        GeartrainError: there is no GPU here.
    """
    result = run(p2p.QUICK if quick else p2p.FULL, Gpus(), quick=quick)
    p2p_report.show(result, json_path, plot_path)
    return result


def run(plan: p2p.Plan, gpus: Gpus, *, quick: bool = False) -> BenchResult:
    """All sizes, systems interleaved. A channel that is not viable here is named with the reason, and left out."""
    began_s = time.monotonic()
    result = harness.new_result("p2p --device cuda", quick=quick, baselines=(), packages=("numpy", "torch"))
    result.machine["gpu"] = f"{gpus.name}, {gpus.near} to {gpus.far}"
    with contextlib.ExitStack() as stack:
        clients = {}
        for name, opened in {f"geartrain {gpus.transport}": _rpc, "TensorPipe": _torch}.items():
            try:
                clients[name] = stack.enter_context(opened(gpus))
            except (GeartrainError, ImportError, RuntimeError) as error:
                result.baselines_missing[name] = str(error).partition("\n")[0]
        clock = Clock(plan.budget_s, len(plan.sizes))
        for size in plan.sizes:
            if result.deadline.allows(f"tensors of {p2p.size_name(size)}"):
                _transfer(plan, size, clients, gpus, clock, result)
    return harness.finish(result, began_s)


def _transfer(
    plan: p2p.Plan, size: int, clients: dict[str, Callable[[Any], Any]], gpus: Gpus, clock: Clock, result: BenchResult
) -> None:
    harness.say(f"tensors of {p2p.size_name(size)} on {gpus.near}")
    value, there = gpus.tensor(size, gpus.near), gpus.tensor(size, gpus.far)
    gpus.wait()
    calls = max(1, min(50, 200_000_000 // size))

    def copied(_: Any) -> None:
        there.copy_(value)
        gpus.wait()

    def one_lap(send: Callable[[Any], Any]) -> harness.Lap:
        return lap(calls, lambda: [send(value) for _ in range(calls)])

    systems = [System(name, lambda send=send: one_lap(send)) for name, send in clients.items()]  # type: ignore[misc]
    systems.append(System("copy", lambda: one_lap(copied), floor=True))
    laps = take_turns(systems, repeats=plan.repeats, budget_s=clock.next_case_s(40.0), warmups=2)
    floor_s = p2p.median_s(laps["copy"])
    for name, of_one in laps.items():
        p2p.add_transfer(result, name, size, [one.seconds for one in of_one], floor_s)


@contextlib.contextmanager
def _rpc(gpus: Gpus) -> Iterator[Callable[[Any], Any]]:
    import geartrain.rpc as rpc

    way = gpus.transport
    rpc.Node("client", transport=way, device_map=gpus.map).close()  # says why where the channel is not viable here
    with p2p.worker("rpc", way, "0", "views") as address:
        peers = {"server": address}
        with rpc.Node("client", peers=peers, transport=way, device_map=gpus.map, timeout_s=120) as node:
            node.call("server", "landed", gpus.tensor(4096, gpus.near))  # checks whether the channel is viable
            yield lambda value: node.call("server", "landed", value)


@contextlib.contextmanager
def _torch(gpus: Gpus) -> Iterator[Callable[[Any], Any]]:
    from torch.distributed import rpc

    with p2p.joined_torch(gpus.torch_maps()):
        yield lambda value: rpc.rpc_sync("server", landed, args=(value,))


if __name__ == "__main__":
    report.main_of("p2p", main)
