"""A rank of a torch job whose groups outlive their reducers: `lost_reducers_torch_worker.py DIRECTORY RANK SIZE`.

It trains a model by DDP and all-reduces arrays beside it; sums are compared with those in rank order, bit by bit.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from collectives_worker import say
from process_group_training import counters_of_world
from torch.nn.parallel import DistributedDataParallel

import geartrain.collectives.torch_backend.process_group  # noqa: F401 - registers the backend


def numbers(rank: int, step: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng((rank, step)).standard_normal(60_001).astype(np.float32))


def main() -> None:
    root, rank, size = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "geartrain",
        store=dist.FileStore(str(root / "store"), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    torch.manual_seed(3)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 200), torch.nn.Tanh(), torch.nn.Linear(200, 4))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    stop, step = torch.zeros(1, dtype=torch.int32), 0
    while not stop[0]:
        optimizer.zero_grad()
        model(numbers(rank, step)[:6400].reshape(100, 64)).square().mean().backward()
        optimizer.step()
        found = numbers(rank, step)
        dist.all_reduce(found)
        expected = numbers(0, step)
        for other in range(1, size):
            expected += numbers(other, step)
        assert torch.equal(found, expected), step
        stop[0] = rank == 0 and (root / "end").exists()
        dist.all_reduce(stop)
        say(step=step, lost=counters_of_world()["groups"]["cpu"]["lost_reducers"])
        step += 1
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyones = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(everyones, weights)
    counters = counters_of_world()["groups"]["cpu"]
    say(
        done=True,
        same=all(torch.equal(weights, other) for other in everyones),
        **{key: counters[key] for key in ("lost_reducers", "reducer_losses", "reducer_returns", "taken_over_bytes")},
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
