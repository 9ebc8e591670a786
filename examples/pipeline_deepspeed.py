"""A pipeline of two stages under DeepSpeed's PipelineModule, whose grid tells the replay which rank is what.

    torchrun --nproc-per-node 2 examples/pipeline_deepspeed.py              needs pip install "geartrain[deepspeed]"
    torchrun --nproc-per-node 4 examples/pipeline_deepspeed.py --shards 2   2 stages x 2 replicas

As in pipeline_torch.py, a head is given the observations of a batch and the tail the actions of the same rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

import geartrain as gt
import memory_task as task

if not task.on_gpus():
    os.environ["DS_ACCELERATOR"] = "cpu"  # Read when deepspeed is imported, so that comes last.
try:
    import deepspeed
    from deepspeed.pipe import PipelineModule
except ModuleNotFoundError:
    raise SystemExit('this example needs DeepSpeed: pip install "geartrain[deepspeed]"') from None

STAGES, MICROBATCHES = 2, 4


def microbatches(batch: gt.Batch) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Pairs of inputs and targets, as DeepSpeed pulls them: only a head looks at the first, a tail at the second."""
    inputs = batch["obs"].chunk(MICROBATCHES) if "obs" in batch else [None] * MICROBATCHES
    targets = task.target_of(batch).chunk(MICROBATCHES) if "action" in batch else [None] * MICROBATCHES
    return zip(inputs, targets, strict=True)


def main(arguments: list[str] | None = None) -> list[float]:
    chosen = task.options(__doc__).parse_args(arguments)
    # DeepSpeed compiles an all-reduce through shared memory on first use; Gloo's will do.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    task.start(multiple_of=STAGES)
    deepspeed.init_distributed(verbose=False)
    store = task.open_shard(chosen.store, chosen.episodes, chosen.shards)

    module = PipelineModule(
        task.layers(chosen.seed), num_stages=STAGES, loss_fn=task.loss_of, partition_method="uniform"
    )
    replicas = dist.get_world_size() // STAGES
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=task.optimizer_of(module),
        config={
            "train_batch_size": task.BATCH,
            "train_micro_batch_size_per_gpu": task.BATCH // replicas // MICROBATCHES,
            "gradient_accumulation_steps": MICROBATCHES,
            "gradient_clipping": 0.0,  # 1.0 unless told otherwise; the other examples do without
            "steps_per_print": 1 << 30,
        },
    )

    losses = []
    with gt.Replay(
        store,
        gt.selection.Prioritized(seed=chosen.seed),
        task.BATCH,
        window=task.WINDOW,
        mesh=engine.grid,
        inputs=["obs"],
        targets=["action"],
        num_batches=chosen.steps,
    ) as replay:
        for batch in replay:
            losses.append(float(engine.train_batch(microbatches(batch))))  # of the whole batch, told to all ranks
            if dist.get_rank() == 0 and len(losses) % 20 == 0:
                print(f"step {len(losses):>4}  loss {losses[-1]:.4f}", flush=True)
        if dist.get_rank() == 0:
            task.report(losses, replay)
    store.close()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
