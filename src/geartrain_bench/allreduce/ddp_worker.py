"""One rank of a DistributedDataParallel job, for `geartrain bench allreduce`: the time of its steps.

    python -m geartrain_bench.allreduce.ddp_worker --backend geartrain --steps 12 --params 25e6 --overlap on

Configured by RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME, as torchrun sets them, it prints one
line of JSON: the time of each step after the warm-up, samples/s, a checksum of the weights at the end, and the bytes
that crossed the interface meanwhile (/sys/class/net/<interface>/statistics). Weights start the same on all ranks by
their seed and are not broadcast.

Threats to validity. The network is a chain of square layers, so that gradients of the last layers are ready early, as
in a transformer. `--compute-s` adds time to every step in which the rank sleeps, a third in the forward and the rest
in the backward pass, in equal parts by layer: the time of an accelerator, which many ranks on few cores
cannot emulate by computing; samples/s with it measure the overlap of communication and computation, not a CPU's speed.
With `--overlap off` gradients are all-reduced after the backward pass, in the buckets that DDP makes by default.

`--reference N` is no rank: it computes the same steps for N ranks in one process, sums gradients in rank order, and
prints the expected checksum of all ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LAYERS = 12
BUCKET_BYTES = 25 << 20  # DDP's default
WARMUP_STEPS = 2  # DDP makes its final buckets after the first


class Chain(nn.Module):
    """Square layers; each sleeps its share of the computing time."""

    def __init__(self, parameters: float, compute_s: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width = max(8, round(math.sqrt(parameters / LAYERS)))
        self.layers = nn.ModuleList(nn.Linear(self.width, self.width) for _ in range(LAYERS))
        self.forward_s, self.backward_s = compute_s / 3 / LAYERS, compute_s * 2 / 3 / LAYERS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, width) to the same."""
        for layer in self.layers:
            time.sleep(self.forward_s)
            x = torch.tanh(layer(x))
            if self.backward_s and x.requires_grad:
                x.register_hook(lambda grad: time.sleep(self.backward_s))  # type: ignore[no-untyped-call]
        return x


def main(arguments: list[str] | None = None) -> None:
    """Runs the rank that the environment says, or the reference."""
    text = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text.add_argument("--backend", choices=["geartrain", "gloo"], default="geartrain")
    text.add_argument("--steps", type=int, default=10, help="timed steps, after a warm-up of 2 (10)")
    text.add_argument("--params", type=float, default=25e6, help="of the model, about (25e6)")
    text.add_argument("--overlap", choices=["on", "off"], default="on")
    text.add_argument("--batch", type=int, default=4, help="samples of a rank and step (4)")
    text.add_argument("--compute-s", type=float, default=0.0, help="computing time of a step that is slept (0)")
    text.add_argument("--timeout-s", type=float, default=300.0)
    text.add_argument(
        "--reference", type=int, metavar="N", help="compute the expected result of N ranks, in this process"
    )
    chosen = text.parse_args(arguments)
    torch.set_num_threads(1)
    if chosen.reference is not None:
        print(json.dumps(_reference(chosen)), flush=True)
        return
    if chosen.backend == "geartrain":
        import geartrain.collectives.torch_backend.process_group  # noqa: F401  registers the backend
    dist.init_process_group(chosen.backend, timeout=timedelta(seconds=chosen.timeout_s))
    print(json.dumps(_run(chosen)), flush=True)
    dist.destroy_process_group()


def _run(chosen: argparse.Namespace) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    net = Chain(chosen.params, chosen.compute_s)
    model = DistributedDataParallel(net, init_sync=False, gradient_as_bucket_view=True)
    optimizer = _optimizer(net)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    took_s: list[float] = []
    before = _bytes_of(interface)
    for step in range(WARMUP_STEPS + chosen.steps):
        if step == WARMUP_STEPS:
            dist.barrier()
            before = _bytes_of(interface)
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        with nullcontext() if chosen.overlap == "on" else model.no_sync():
            _loss(model, net.width, chosen.batch, step, rank).backward()  # type: ignore[no-untyped-call]
        if chosen.overlap == "off":
            _reduce(net, world)
        optimizer.step()
        took_s.append(time.perf_counter() - began)
    after = _bytes_of(interface)
    timed = took_s[WARMUP_STEPS:]
    counters: dict[str, Any] = getattr(dist.group.WORLD, "counters", dict)()
    return {
        "rank": rank,
        "world_size": world,
        "backend": chosen.backend,
        "overlap": chosen.overlap,
        "params": _count(net),
        "batch": chosen.batch,
        "compute_s": chosen.compute_s,
        "step_s": timed,
        "steps_per_s": len(timed) / sum(timed),
        "samples_per_s": chosen.batch * world * len(timed) / sum(timed),
        "checksum": _checksum(net),
        "interface": interface,
        "sent_bytes": after[0] - before[0],
        "received_bytes": after[1] - before[1],
        "operations": counters.get("operations"),
    }


def _reduce(net: nn.Module, world: int) -> None:
    """Averages gradients as DDP does: from the last layer on, bucket by bucket."""
    gradients = [p.grad for p in reversed(list(net.parameters())) if p.grad is not None]
    buckets: list[list[torch.Tensor]] = [[]]
    for gradient in gradients:
        if buckets[-1] and sum(g.nbytes for g in buckets[-1]) + gradient.nbytes > BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(gradient)
    flats = [torch.cat([g.view(-1) for g in bucket]).mul_(1.0 / world) for bucket in buckets]
    works = [dist.all_reduce(flat, async_op=True) for flat in flats]
    for bucket, flat, work in zip(buckets, flats, works, strict=True):
        work.wait()
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):  # type: ignore[no-untyped-call]
            gradient.copy_(part.view_as(gradient))


def _reference(chosen: argparse.Namespace) -> dict[str, Any]:
    net = Chain(chosen.params, 0.0)
    optimizer = _optimizer(net)
    for step in range(WARMUP_STEPS + chosen.steps):
        totals: list[torch.Tensor] = []
        for rank in range(chosen.reference):
            optimizer.zero_grad()
            _loss(net, net.width, chosen.batch, step, rank).backward()  # type: ignore[no-untyped-call]
            parts = [p.grad * (1.0 / chosen.reference) for p in net.parameters() if p.grad is not None]
            totals = [total + part for total, part in zip(totals, parts, strict=True)] if totals else parts
        for parameter, total in zip(net.parameters(), totals, strict=True):
            parameter.grad = total
        optimizer.step()
    return {"reference": chosen.reference, "params": _count(net), "checksum": _checksum(net)}


def _optimizer(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01)


def _loss(model: nn.Module, width: int, batch: int, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    x = torch.randn(batch, width, generator=generator)
    return (model(x) - x).square().mean()  # type: ignore[no-any-return]


def _count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def _checksum(net: nn.Module) -> str:
    digest = hashlib.sha256()
    for parameter in net.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def _bytes_of(interface: str) -> tuple[int, int]:
    """Sent and received since the interface came up."""
    folder = Path("/sys/class/net") / interface / "statistics"
    sent, received = (int((folder / f"{way}_bytes").read_text()) for way in ("tx", "rx"))
    return sent, received


if __name__ == "__main__":
    main()
