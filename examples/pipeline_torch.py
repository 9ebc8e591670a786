"""A pipeline of two stages (torch.distributed.pipelining, 1F1B), and replicas of it if there are more ranks.

Learns to imitate a controller in under a minute.

    torchrun --nproc-per-node 2 examples/pipeline_torch.py
    torchrun --nproc-per-node 4 examples/pipeline_torch.py --shards 2   # 2 stages x 2 replicas

The first stage gets the observations of a batch, the last stage the actions of the same rows. Fields that a rank does
not use are neither copied nor sent.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt
import memory_task as task

STAGES, MICROBATCHES = 2, 4


def main(arguments: list[str] | None = None) -> list[float]:
    chosen = task.options(__doc__).parse_args(arguments)
    device = task.start(multiple_of=STAGES)
    losses = train(chosen, device)  # which frees the model: after its process group it may hang (docs/ranks.md)
    dist.destroy_process_group()
    return losses


def train(chosen: argparse.Namespace, device: torch.device) -> list[float]:
    mesh = init_device_mesh(device.type, (STAGES, dist.get_world_size() // STAGES), mesh_dim_names=("pp", "dp"))
    place, replicas = mesh["pp"].get_local_rank(), mesh["dp"].get_group()
    is_first_stage, is_last_stage = place == 0, place == STAGES - 1
    talks = is_last_stage and mesh["dp"].get_local_rank() == 0
    store = task.open_shard(chosen.store, chosen.episodes, chosen.shards)

    whole = task.layers(chosen.seed)
    cut = len(whole) // STAGES
    part = nn.Sequential(*whole[place * cut : (place + 1) * cut]).to(device)
    optimizer = task.optimizer_of(part)
    stage = PipelineStage(
        DistributedDataParallel(part, process_group=replicas), place, STAGES, device, group=mesh["pp"].get_group()
    )
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=task.loss_of)

    losses = []
    with gt.Replay(
        store,
        gt.selection.Prioritized(seed=chosen.seed),
        task.BATCH,
        window=task.WINDOW,
        group=gt.RankOptions(mesh=mesh, inputs=["obs"], targets=["action"]),
        num_batches=chosen.steps,
    ) as replay:
        for batch in replay:
            rows, of_parts = batch.to(device), []
            optimizer.zero_grad()
            if is_first_stage:
                schedule.step(rows["obs"])
            elif is_last_stage:
                schedule.step(target=task.target_of(rows), losses=of_parts)
            else:
                schedule.step()
            optimizer.step()
            if is_last_stage:
                losses.append(task.mean_over(replicas, sum(of_parts) / MICROBATCHES))
            if talks and len(losses) % 20 == 0:
                print(f"step {len(losses):>4}  loss {losses[-1]:.4f}", flush=True)
        if talks:
            task.report(losses, replay)
    store.close()
    return losses


if __name__ == "__main__":
    main()
