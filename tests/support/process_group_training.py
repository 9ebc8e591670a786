"""What ranks of tests/support/process_group_worker.py train, and what they tell about it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def say(**words: Any) -> None:
    print(json.dumps(words), flush=True)


def checksum(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


class Net(nn.Module):
    """Some layers, one of which is used in even steps only."""

    def __init__(self, part: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(20, 700), nn.Linear(700, 300), nn.Linear(300, 5)
        self.extra = nn.Linear(700, 300)
        self.norm = nn.BatchNorm1d(700)
        self.part = part
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(torch.relu(self.first(x)))
        second = self.second(hidden)
        if not self.part or self.step % 2:
            second = second + self.extra(hidden)
        self.step += 1
        return self.third(torch.relu(second))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 20, generator=generator), torch.randn(16, 5, generator=generator)


def train(group: Any, steps: int = 4, hook: Any = None, part: bool = False, compile: str = "", **options: Any) -> str:
    """DDP of a small net; returns the checksum of its weights."""
    rank = group.rank()
    net: Any = Net(part)
    if compile == "module":
        net = torch.compile(net, backend="aot_eager")
    buckets_mb = 1.0 if compile else 0.3  # the compiler wants no bucket below the first
    model: Any = DistributedDataParallel(net, process_group=group, bucket_cap_mb=buckets_mb, **options)
    parameters = list(model.parameters())
    if compile == "ddp":
        model = torch.compile(model, backend="aot_eager")
    if hook is not None:
        model.register_comm_hook(group, hook)
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return checksum(parameters)


def counters_of_world() -> dict[str, Any]:
    return dist.group.WORLD.counters()


def reference(size: int, steps: int = 4) -> str:
    """What the ranks should get, in one process: gradients added in the order of ranks, then divided."""
    models = [Net() for _ in range(size)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
    for step in range(steps):
        for rank, model in enumerate(models):
            x, y = batch(step, rank)
            optimizers[rank].zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
        for parameters in zip(*(m.parameters() for m in models), strict=True):
            # DDP divides first, and the group adds.
            total = parameters[0].grad / size
            for other in parameters[1:]:
                total = total + other.grad / size
            for parameter in parameters:
                parameter.grad = total.clone()
        for optimizer in optimizers:
            optimizer.step()
        for model in models[1:]:  # DDP broadcasts buffers, which do not enter into the weights here
            model.load_state_dict({**model.state_dict(), **dict(models[0].named_buffers())})
    return checksum(models[0].parameters())
