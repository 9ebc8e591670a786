"""Scenarios of tests/support/process_group_worker.py whose parameters or optimizers lie in shards: FSDP2, ZeRO."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from process_group_training import Net, batch, say
from torch import nn
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from geartrain.collectives.torch_backend.process_group import ProcessGroup


def hsdp() -> None:
    """FSDP2 that shards and replicates over geartrain; the same losses as all on Gloo."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    losses = {}
    for kind in ("gloo", "geartrain"):
        grid = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("replicate", "shard"), backend_override={"replicate": kind, "shard": kind}
        )
        model = Net()
        for layer in (model.first, model.second, model.third, model):
            fully_shard(layer, mesh=grid)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses[kind] = []
        for step in range(4):
            x, y = batch(step, dist.get_rank())
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses[kind].append(loss.item())
        counters, shard = (getattr(grid[name].get_group(), "counters", dict)() for name in ("replicate", "shard"))
        say(kind=kind, losses=losses[kind], counters=counters, shard=shard)


def fsdp() -> None:
    """FSDP2 and a sharded optimizer on both backends, all in one dimension; what geartrain left to Gloo."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    size, results = dist.get_world_size(), {}
    for kind in ("gloo", "geartrain"):
        grid = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",), backend_override={"shard": kind})
        group = grid["shard"].get_group()
        found: list[float] = []
        model: Any = Net()
        for layer in (model.first, model.second, model.extra, model.third, model):
            fully_shard(layer, mesh=grid)
        replica = DistributedDataParallel(Net(), process_group=group)
        optimizers = [
            torch.optim.Adam(model.parameters(), lr=0.01),
            ZeroRedundancyOptimizer(replica.parameters(), torch.optim.Adam, process_group=group, lr=0.01),
        ]
        for step in range(4):
            x, y = batch(step, dist.get_rank())
            for net, optimizer in zip((model, replica), optimizers, strict=True):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(net(x), y)
                loss.backward()
                optimizer.step()
                found.append(loss.item())
        results[kind] = found
        dist.barrier(group)
        say(kind=kind, losses=found, counters=getattr(group, "counters", dict)())


def counters_of_all() -> dict[str, dict[str, int]]:
    """How often each method ran in any group, by whom: DeepSpeed makes groups of its own."""
    found: dict[str, Counter[str]] = {"ours": Counter(), "inner": Counter()}
    for group in list(distributed_c10d._world.pg_map):
        if isinstance(group, ProcessGroup):
            counters = group.counters()
            for whose, counted in found.items():
                counted.update(counters[whose])
    return {whose: dict(counted) for whose, counted in found.items()}


def zero() -> None:
    """DeepSpeed's ZeRO in its three stages, with DDP's losses beside them; what geartrain left to Gloo."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(dist.get_rank()))
    import deepspeed

    def trained(net: Any, step_of: Any) -> list[float]:
        losses = []
        for step in range(4):
            x, y = batch(step, dist.get_rank())
            losses.append(step_of(net, x, y))
        return losses

    def layers() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(20, 700), nn.ReLU(), nn.Linear(700, 300), nn.ReLU(), nn.Linear(300, 5))

    replica = DistributedDataParallel(layers())
    optimizer = torch.optim.Adam(replica.parameters(), lr=0.01)

    def plain(net: Any, x: Any, y: Any) -> float:
        optimizer.zero_grad()
        (loss := nn.functional.mse_loss(net(x), y)).backward()
        optimizer.step()
        return float(loss.item())

    def engines(net: Any, x: Any, y: Any) -> float:
        net.backward(loss := nn.functional.mse_loss(net(x), y))
        net.step()
        return float(loss.item())

    expected = trained(replica, plain)
    for stage in (1, 2, 3):
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # what DDP does
            "zero_optimization": {
                "stage": stage,
                "reduce_bucket_size": 100_000,
                "stage3_param_persistence_threshold": 0,
            },
        }
        net = layers()
        before = counters_of_all()
        engine, *_ = deepspeed.initialize(
            model=net, optimizer=torch.optim.Adam(net.parameters(), lr=0.01), config=config
        )
        losses = trained(engine, engines)
        say(stage=stage, losses=losses, plain=expected, before=before, counters=counters_of_all())
