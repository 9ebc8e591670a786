"""DiLoCo: sites train on their own and average their progress now and then.

Takes under a minute with two sites.

    torchrun --nproc-per-node 2 examples/diloco.py
    torchrun --nproc-per-node 4 examples/diloco.py --inner 20 --outer 15

Every site takes `--inner` steps of AdamW on its own data. One all-reduce then averages how far each site has moved,
with 16 bits a number on the wire. An outer optimizer, SGD with Nesterov momentum, takes the average for a gradient
(Douillard et al., arXiv:2311.08105). A site sends half as many bytes in a round as with DDP in one step.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn

from geartrain.collectives import Group


def main() -> None:
    text = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text.add_argument("--inner", type=int, default=20, help="steps of a site in a round (20)")
    text.add_argument("--outer", type=int, default=15, help="rounds (15)")
    chosen = text.parse_args()
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    reducers = tuple(filter(None, os.environ.get("GEARTRAIN_REDUCERS", "").split(",")))
    group = Group(rank, world, init_method="env://", name="diloco", reducers=reducers)

    torch.manual_seed(0)  # all sites begin with the same weights, and have the same thing to learn
    net = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 4))
    target = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    inner = torch.optim.AdamW(net.parameters(), lr=3e-3)
    anchor = nn.utils.parameters_to_vector(net.parameters()).detach().clone()  # where all sites stood
    outer = torch.optim.SGD([anchor], lr=0.7, momentum=0.9, nesterov=True)
    data = torch.Generator().manual_seed(1 + rank)

    for round_ in range(chosen.outer):
        for _ in range(chosen.inner):
            x = torch.randn(64, 16, generator=data) + 0.3 * rank  # a site's data are not like the others'
            loss = nn.functional.mse_loss(net(x), target(x).detach())
            inner.zero_grad()
            loss.backward()
            inner.step()
        moved = anchor - nn.utils.parameters_to_vector(net.parameters()).detach()
        anchor.grad = group.all_reduce(moved, op="avg", wire_dtype="bfloat16")
        outer.step()
        nn.utils.vector_to_parameters(anchor.clone(), net.parameters())

        of_all = torch.tensor([loss.item()])
        group.all_reduce(of_all, op="avg")
        if rank == 0:
            print(f"round {round_:>3}  loss {of_all.item():.4f}", flush=True)
    group.close()


if __name__ == "__main__":
    main()
