r"""Data parallel training (DDP) from one replay over all ranks, which resumes after a crash where it was.

Learns to imitate a controller in under a minute.

    torchrun --nproc-per-node 2 examples/ddp.py

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1   # else a restarted rank may look for dead ones (docs/ranks.md)
    torchrun --standalone --nproc-per-node 2 --max-restarts 1 \
        examples/ddp.py --prioritize --directory runs/ddp --crash-at 70

With --prioritize rows are drawn in proportion to the model's last error. With --directory the rows, their priorities,
the replay's state and the model are saved together. A restarted job resumes from the newest complete step and draws
the same batches. Shards that are still in shared memory are adopted instead of being read from disk.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt
import memory_saving
import memory_task as task


def main(arguments: list[str] | None = None) -> list[float]:
    text = task.options(__doc__)
    memory_saving.add_options(text)
    chosen = text.parse_args(arguments)
    device = task.start()
    losses = train(chosen, device)  # which frees the model: after its process group it may hang (docs/ranks.md)
    dist.destroy_process_group()
    return losses


def train(chosen: argparse.Namespace, device: torch.device) -> list[float]:
    rank = dist.get_rank()
    talks = rank == 0
    model = DistributedDataParallel(nn.Sequential(*task.layers(chosen.seed)).to(device))
    optimizer = task.optimizer_of(model)
    losses: list[float] = []
    saving = memory_saving.Saving(chosen)
    if saving.found is not None:
        saved = torch.load(saving.found.path / "model.pt", map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        losses = saved["losses"]

    selection, left = gt.selection.Prioritized(seed=chosen.seed), max(0, chosen.steps - len(losses))
    with gt.Replay(
        saving.store, selection, task.BATCH, window=task.WINDOW, group=dist.group.WORLD, num_batches=left
    ) as replay:
        if saving.state:
            replay.load_state_dict(saving.state)
        for batch in replay:  # this rank's part of the batch
            part = batch.to(device)
            errors = task.errors_of(model(part["obs"]), task.target_of(part))
            loss = errors.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(task.mean_over(None, loss))
            if chosen.prioritize:  # on whichever host the rows are; what is known well is still drawn now and then
                replay.update_priorities(batch.keys, errors + 1e-3)
            if talks and len(losses) % 20 == 0:
                print(f"step {len(losses):>4}  loss {losses[-1]:.4f}", flush=True)

            if saving.is_due(len(losses)):
                # The model first, a copy for every host's disk: a step counts as complete once its rows are.
                place = saving.place(replay)
                if os.environ["LOCAL_RANK"] == "0":
                    draft = place.with_name(f"model-{rank}.tmp")
                    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
                    torch.save(parts, draft)
                    draft.replace(place / "model.pt")
                saving.complete(replay, "model.pt")
            saving.crash(len(losses))
        if talks:
            task.report(losses, replay)
    saving.close()
    return losses


if __name__ == "__main__":
    main()
