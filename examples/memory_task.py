"""Imitation of a controller with a memory by a small transformer: the task of the examples of training engines.

An expert steers a noisy linear system by what it sees and by what it saw a step before. An episode is a row of the
store. The model reads windows of observations and tells the expert's action at every step; to be right it must learn
to look back, which takes it some dozen batches. It is a list of layers, so that a pipeline may cut it.
"""

from __future__ import annotations

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import geartrain as gt

OBS, ACTION, LENGTH = 6, 2, 64
WINDOW, BATCH, WIDTH = 8, 64, 64  # BATCH is the whole job's: every replica gets its share of it.
FIELDS = {"obs": gt.Field((OBS,), "float32"), "action": gt.Field((ACTION,), "float32")}


def options(about: str | None) -> argparse.ArgumentParser:
    text = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    text.add_argument("--steps", type=count, default=120, help=f"training steps, {BATCH} windows each (120)")
    text.add_argument("--episodes", type=count, default=256, help="rows in all shards together (256)")
    text.add_argument("--store", default="imitation", help="name of the store, the same on every host (imitation)")
    text.add_argument("--shards", type=count, help="shards of the store; one on every host unless told otherwise")
    text.add_argument("--seed", type=int, default=0, help="of the batches and of the model's first weights (0)")
    return text


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above zero")
    return int(text)


def on_gpus() -> bool:
    """Whether every rank of this host has a GPU of its own."""
    return torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def start(multiple_of: int = 1) -> torch.device:
    """Joins the job that torchrun started; returns the device to train on."""
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("start this with torchrun: torchrun --nproc-per-node 2 examples/...")
    check_restart()
    if int(os.environ["WORLD_SIZE"]) % multiple_of:
        raise SystemExit(f"this needs {multiple_of} ranks or a multiple, there are {os.environ['WORLD_SIZE']}")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # The ranks of a host share its cores.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return device


def check_restart() -> None:
    """Ends a rank that torchrun restarted on the key-value store of the run before."""
    by_torchrun = "TORCHELASTIC_ERROR_FILE" in os.environ  # and not by another launcher with the same variables
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if by_torchrun and restarted and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        raise SystemExit(
            "torchrun restarted this job on the key-value store of the run before, which still has the addresses of "
            "dead ranks: joining fails or hangs. Run `export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` and start the job "
            "again, with --standalone or --rdzv-backend c10d (docs/ranks.md)"
        )


def shard_of(shards: int | None = None) -> tuple[int, int]:
    """(k, n): the number of this rank's shard, and how many there are: one on every host unless told otherwise.

    One a host is what a cluster has. Several on one host show on a laptop what a cluster does.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = shards or world // int(os.environ["LOCAL_WORLD_SIZE"])
    if shards > world:
        raise SystemExit(f"{shards} shards need a rank each, there are {world}")
    return rank * shards // world, shards


def open_shard(name: str, episodes: int, shards: int | None = None, **how: object) -> gt.Store:
    """This rank's shard, filled with its part of the episodes by the first of the ranks that share it."""
    k, n = shard_of(shards)
    part = range(k * episodes // n, (k + 1) * episodes // n)
    store = gt.Store.open(
        f"{name}-{k}", FIELDS, max_length=LENGTH, create="missing", adopt=True, capacity=len(part), **how
    )
    dist.barrier()
    found = len(store)  # the same for all that share it: none, or what a run left that was killed
    dist.barrier()
    if not found and dist.get_rank() * n % dist.get_world_size() < n:
        write_episodes(store, part)
    dist.barrier()
    if len(store) != len(part):
        raise SystemExit(f"{store} holds another run's rows: `geartrain remove {store.name}` first")
    return store


def expert(state: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """(..., ACTION): what the expert does on seeing `state`, (..., OBS), with `seen` a step before."""
    now, before = 0.2 * np.random.default_rng(0).normal(size=(2, ACTION, OBS))
    return np.tanh(state @ now.T + seen @ before.T)


def write_episodes(store: gt.Store, numbers: range) -> None:
    """Writes episodes in place, one after the other. What is in an episode depends on its number alone."""
    system = np.random.default_rng(1)
    drift, push = system.normal(size=(OBS, OBS)), 0.1 * system.normal(size=(OBS, ACTION))
    drift *= 0.9 / np.abs(np.linalg.eigvals(drift)).max()
    for number in numbers:
        rng = np.random.default_rng([2, number])
        with store.row() as row:
            obs, action = row["obs"], row["action"]
            # A row weighs as much as it has steps: every step is equally likely to be drawn.
            row.priority = row.length = int(rng.integers(LENGTH // 2, LENGTH + 1))
            state, seen = rng.normal(size=OBS), np.zeros(OBS)
            for t in range(row.length):
                obs[t], action[t] = state, expert(state, seen)
                state, seen = drift @ state + push @ action[t] + rng.normal(size=OBS), state


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.obs, self.place = nn.Linear(OBS, WIDTH), nn.Parameter(torch.randn(WINDOW, WIDTH))

    def forward(self, obs: Tensor) -> Tensor:
        return self.obs(obs) + self.place


class Block(nn.TransformerEncoderLayer):
    def __init__(self) -> None:
        super().__init__(WIDTH, 4, 2 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.ones(WINDOW, WINDOW, dtype=torch.bool, device=x.device).triu(1)
        return super().forward(x, src_mask=hidden, is_causal=True)


def layers(seed: int = 0) -> list[nn.Module]:
    """The model, (B, W, OBS) to (B, W, ACTION), with the same first weights on every rank."""
    torch.manual_seed(seed)
    readout = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, ACTION), nn.Tanh())  # actions lie within -1 and 1
    return [Embed(), Block(), Block(), readout]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.0)


def target_of(batch: gt.Batch) -> Tensor:
    """(B, W, ACTION + 1): the actions, and the mask beside them, since pipelines take one tensor."""
    return torch.cat([batch["action"], batch.mask[..., None]], -1)


def errors_of(predicted: Tensor, target: Tensor) -> Tensor:
    """(B,): every row's mean squared error; steps before its start count as right."""
    action, mask = target.split([ACTION, 1], -1)
    return ((predicted - action) * mask).square().mean((1, 2))


def loss_of(predicted: Tensor, target: Tensor) -> Tensor:
    """Their mean, so that parts of a batch average to the whole."""
    return errors_of(predicted, target).mean()


def mean_over(group: dist.ProcessGroup | None, loss: Tensor) -> float:
    """The loss of the whole batch, from that of every replica's part."""
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    return total.item() / dist.get_world_size(group)


def report(losses: list[float], replay: gt.Replay) -> None:
    """How it went, in a few lines, from a rank that has the losses."""
    figures = replay.stats()
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")
    here, moved = figures["local_bytes"] / 1e6, figures["received_bytes"] / 1e6
    print(f"{figures['rows']:.0f} rows: {here:.2f} MB read in place, {moved:.2f} MB from other ranks")
    print(f"waited for data {100 * figures['wait_share']:.1f} % of the time")
