"""DistributedDataParallel that knows nothing of geartrain: the same file with Gloo's all-reduce and with geartrain's.

    torchrun --nproc-per-node 4 examples/allreduce_ddp.py
    torchrun --nproc-per-node 4 -m geartrain_autoload examples/allreduce_ddp.py

and with reducers, on machines with spare CPUs and links (docs/collectives-torch.md):

    geartrain reducer --bind 10.0.0.9:7777 --secret-file secret
    GEARTRAIN_REDUCERS=10.0.0.9:7777 GEARTRAIN_SECRET_FILE=secret torchrun ... -m geartrain_autoload ...
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    text = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text.add_argument("--steps", type=int, default=30)
    text.add_argument("--width", type=int, default=512, help="of the hidden layers (512: 0.6 M parameters)")
    text.add_argument("--batch", type=int, default=64, help="samples of a rank and step (64)")
    chosen = text.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group()
    train(chosen)  # which frees the model: after its process group it may hang (docs/ranks.md)
    dist.destroy_process_group()


def train(chosen: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    width = chosen.width
    net = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 8))
    target = nn.Linear(32, 8)  # what the net is to learn
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(1 + rank)

    first, began = 0.0, 0.0
    for step in range(chosen.steps):
        x = torch.randn(chosen.batch, 32, generator=data)
        loss = nn.functional.mse_loss(model(x), target(x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 0:  # connections were made
            first, began = loss.item(), time.perf_counter()
    took = time.perf_counter() - began

    mean = torch.tensor([first, loss.item()])
    dist.all_reduce(mean)
    first, last = (mean / world).tolist()
    if rank == 0:
        rate = (chosen.steps - 1) * chosen.batch * world / took
        print(f"{dist.get_backend()}, {world} ranks: {rate:.0f} samples/s, loss {first:.4f} to {last:.4f}", flush=True)


if __name__ == "__main__":
    main()
