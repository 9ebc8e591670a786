r"""ZeRO without a pipeline: optimizer states, gradients and parameters sharded over the ranks by DeepSpeed.

Learns to imitate a controller in about a minute.

    torchrun --nproc-per-node 2 examples/zero_deepspeed.py --stage 3   # needs pip install "geartrain[deepspeed]"

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   # else a restarted rank may look for dead ones (docs/ranks.md)
    torchrun --standalone --nproc-per-node 2 --max-restarts 1 \
        examples/zero_deepspeed.py --prioritize --directory runs/zero --crash-at 70

Every rank trains on its own part of the batch, so the replay takes the group of all ranks. With --directory
`engine.save_checkpoint` and the replay are saved as one step, as in pipeline_deepspeed.py.
"""

from __future__ import annotations

import os

import torch.distributed as dist
from torch import nn

import geartrain as gt
import memory_saving
import memory_task as task

if not task.on_gpus():
    os.environ["DS_ACCELERATOR"] = "cpu"  # Read when deepspeed is imported, so that comes last.
try:
    import deepspeed
except ModuleNotFoundError:
    raise SystemExit('this example needs DeepSpeed: pip install "geartrain[deepspeed]"') from None


def main(arguments: list[str] | None = None) -> list[float]:
    text = task.options(__doc__)
    text.add_argument("--stage", type=int, choices=(1, 2, 3), default=2, help="of ZeRO (2)")
    memory_saving.add_options(text)
    chosen = text.parse_args(arguments)
    # DeepSpeed compiles an all-reduce through shared memory on first use; Gloo's will do.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    device = task.start()
    deepspeed.init_distributed(verbose=False)
    saving = memory_saving.Saving(chosen)
    model = nn.Sequential(*task.layers(chosen.seed)).to(device)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=task.optimizer_of(model),
        config={
            "train_batch_size": task.BATCH,
            "zero_optimization": {"stage": chosen.stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # 1.0 unless told otherwise; the other examples do without
            "steps_per_print": 1 << 30,
        },
    )

    losses: list[float] = []
    if saving.found is not None:
        _, kept = engine.load_checkpoint(str(saving.found.path), tag="deepspeed")
        losses = kept["losses"]
    selection, left = gt.selection.Prioritized(seed=chosen.seed), max(0, chosen.steps - len(losses))
    with gt.Replay(
        saving.store, selection, task.BATCH, window=task.WINDOW, group=dist.group.WORLD, num_batches=left
    ) as replay:
        if saving.state:
            replay.load_state_dict(saving.state)
        for batch in replay:  # this rank's part of the batch
            part = batch.to(device)
            errors = task.errors_of(engine(part["obs"]), task.target_of(part))
            loss = errors.mean()
            engine.backward(loss)
            engine.step()
            losses.append(task.mean_over(None, loss))
            if chosen.prioritize:
                replay.update_priorities(batch.keys, errors.detach() + 1e-3)
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
