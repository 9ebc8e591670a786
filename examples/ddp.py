r"""Plain data parallelism (DDP) from one replay over all ranks, which goes on after a crash where it was.

    torchrun --nproc-per-node 2 examples/ddp.py
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1     # or a second life may meet the first (docs/ranks.md)
    torchrun --standalone --nproc-per-node 2 --max-restarts 1 \
        examples/ddp.py --prioritize --directory runs/ddp --crash-at 70

With --prioritize rows are drawn as often as the model was wrong about them when it saw them last. With --directory the
rows, their weights, the replay's step and the model are saved together, and a job that is started again goes on from
the newest complete step, with the batches it would have had. Shards that are still in shared memory are taken over
instead of being read from disk.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt
import memory_task as task
from geartrain.replay.distributed.checkpoint import load_checkpoint, newest_step, save_checkpoint
from geartrain.replay.distributed.torch_rank_group import TorchRankGroup


def main(arguments: list[str] | None = None) -> list[float]:
    text = task.options(__doc__)
    text.add_argument("--prioritize", action="store_true", help="weigh rows by the model's errors")
    text.add_argument("--directory", type=Path, help="where to save, and to go on from")
    text.add_argument("--save-every", type=task.count, default=20, help="steps between two saves (20)")
    text.add_argument("--crash-at", type=task.count, help="kill the last rank after this step, in the job's first life")
    chosen = text.parse_args(arguments)
    device = task.start()
    rank, world = dist.get_rank(), dist.get_world_size()
    talks = rank == 0

    model = DistributedDataParallel(nn.Sequential(*task.layers(chosen.seed)).to(device))
    optimizer = task.optimizer_of(model)
    losses: list[float] = []
    where, resumed = chosen.directory, None
    ranks = TorchRankGroup(range(world))  # for saving; the replay has its own
    # The segments outlive a crash of all their processes, so they are removed by hand in the end.
    keep = {"persist": where is not None}
    if where and newest_step(where, ranks) is not None:
        shard = task.shard_of(chosen.shards)
        store, resumed, found = load_checkpoint(
            where, f"{chosen.store}-{shard[0]}", ranks, shard=shard, adopt=True, **keep
        )
        saved = torch.load(found.path / "model.pt", map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        losses = saved["losses"]
        if talks:
            print(f"going on from step {found.step}: {found.adopted} of {found.rows} rows were still in memory")
    else:
        store = task.open_shard(chosen.store, chosen.episodes, chosen.shards, **keep)

    selection, left = gt.selection.Prioritized(seed=chosen.seed), max(0, chosen.steps - len(losses))
    with gt.Replay(
        store, selection, task.BATCH, window=task.WINDOW, group=dist.group.WORLD, num_batches=left
    ) as replay:
        if resumed:
            replay.load_state_dict(resumed)
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

            if where and len(losses) % chosen.save_every == 0:
                replay.settle()  # brings the rows' weights to where the replay is
                # The model first, a copy for every host's disk: a step counts as complete once its rows are.
                if os.environ["LOCAL_RANK"] == "0":
                    place, draft = where / f"step-{replay.step:08d}", where / f"model-{rank}.tmp"
                    place.mkdir(parents=True, exist_ok=True)
                    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
                    torch.save(parts, draft)
                    draft.replace(place / "model.pt")
                save_checkpoint(store, where, ranks, state=replay.state_dict(), companions=["model.pt"])
            first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            if len(losses) == chosen.crash_at and first_life and rank == world - 1:
                os.kill(os.getpid(), signal.SIGKILL)
        if talks:
            task.report(losses, replay)
    dist.barrier()
    store.unlink()
    store.close()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
