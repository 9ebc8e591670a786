"""FSDP2: parameters are sharded over the ranks, and batches come from a store that is sharded over the same ranks.

Learns to imitate a controller in under a minute.

    torchrun --nproc-per-node 2 examples/fsdp2.py --shards 2

Every rank gathers all parameters before it uses them, but reads only its own part of a batch.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import geartrain as gt
import memory_task as task


def main(arguments: list[str] | None = None) -> list[float]:
    chosen = task.options(__doc__).parse_args(arguments)
    device = task.start()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))
    store = task.open_shard(chosen.store, chosen.episodes, chosen.shards)

    model = nn.Sequential(*task.layers(chosen.seed)).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = task.optimizer_of(model)

    losses = []
    selection = gt.selection.Prioritized(seed=chosen.seed)
    with gt.Replay(
        store,
        selection,
        task.BATCH,
        window=task.WINDOW,
        group=gt.RankOptions(mesh=mesh["dp"]),
        num_batches=chosen.steps,
    ) as replay:
        for batch in replay:  # this rank's part of the batch
            part = batch.to(device)
            loss = task.loss_of(model(part["obs"]), task.target_of(part))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(task.mean_over(None, loss))
            if dist.get_rank() == 0 and len(losses) % 20 == 0:
                print(f"step {len(losses):>4}  loss {losses[-1]:.4f}", flush=True)
        if dist.get_rank() == 0:
            task.report(losses, replay)
    store.close()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
