r"""A pipeline of two stages under DeepSpeed's PipelineModule, whose grid tells the replay which fields each rank needs.

Learns to imitate a controller in about a minute.

    torchrun --nproc-per-node 2 examples/pipeline_deepspeed.py              # needs pip install "geartrain[deepspeed]"
    torchrun --nproc-per-node 4 examples/pipeline_deepspeed.py --shards 2   # 2 stages x 2 replicas

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   # else a restarted rank may look for dead ones (docs/ranks.md)
    torchrun --standalone --nproc-per-node 2 --max-restarts 1 \
        examples/pipeline_deepspeed.py --prioritize --directory runs/pipeline --crash-at 70

As in pipeline_torch.py, the first stage gets the observations of a batch and the last stage the actions of the same
rows. With --directory `engine.save_checkpoint` and the replay are saved as one step, and a restarted job resumes from
the newest complete one (memory_saving.py). With --prioritize the last stage, which knows the errors, sets priorities.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

import geartrain as gt
import memory_saving
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
    text = task.options(__doc__)
    memory_saving.add_options(text)
    chosen = text.parse_args(arguments)
    # DeepSpeed compiles an all-reduce through shared memory on first use; Gloo's will do.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    task.start(multiple_of=STAGES)
    deepspeed.init_distributed(verbose=False)
    saving = memory_saving.Saving(chosen)
    errors: list[torch.Tensor] = []  # of the rows of each micro-batch, on the tail

    def loss_of(predicted: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        found = task.errors_of(predicted, target)
        errors.append(found.detach())
        return found.mean()

    module = PipelineModule(task.layers(chosen.seed), num_stages=STAGES, loss_fn=loss_of, partition_method="uniform")
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

    losses: list[float] = []
    if saving.found is not None:
        _, kept = engine.load_checkpoint(str(saving.found.path), tag="deepspeed")
        losses = kept["losses"]
    with gt.Replay(
        saving.store,
        gt.selection.Prioritized(seed=chosen.seed),
        task.BATCH,
        window=task.WINDOW,
        group=gt.RankOptions(mesh=engine.grid, inputs=["obs"], targets=["action"]),
        num_batches=max(0, chosen.steps - len(losses)),
    ) as replay:
        if saving.state:
            replay.load_state_dict(saving.state)
        for batch in replay:
            errors.clear()
            losses.append(float(engine.train_batch(microbatches(batch))))  # of the whole batch, told to all ranks
            if chosen.prioritize and errors:
                replay.update_priorities(batch.keys, torch.cat(errors) + 1e-3)
            if dist.get_rank() == 0 and len(losses) % 20 == 0:
                print(f"step {len(losses):>4}  loss {losses[-1]:.4f}", flush=True)
            if saving.is_due(len(losses)):
                # DeepSpeed's files first, of all ranks: a step counts as complete once its rows are there.
                place = str(saving.place(replay))
                engine.save_checkpoint(place, tag="deepspeed", client_state={"losses": losses}, save_latest=False)
                saving.complete(replay, "deepspeed")
            saving.crash(len(losses))
        if dist.get_rank() == 0:
            task.report(losses, replay)
    saving.close()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
