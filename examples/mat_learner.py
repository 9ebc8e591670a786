"""The learner of `mat_feeds.py`, whoever feeds it: a Multi-Agent Transformer that imitates a team, and who judges it.

It knows no replay and imports nothing of geartrain's; the battles of an evaluation are fought by another process.
"""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mat_model import Team, evaluate

MAP, STEPS = "2s3z", 101  # and of a battle at most
CONTEXT, BATCH = 10, 32
FIELDS = ["agents", "available", "action"]


def make_model(seed: int, agents: int, seen: int, actions: int) -> Team:
    torch.manual_seed(seed)
    return Team(agents, seen, actions, discrete=True)


def learning_rate(step: int, steps: int, peak: float = 1e-3, warmup: int = 50) -> float:
    """Linear warm-up to `peak`, then half a cosine down to 2 % of it."""
    done = max(0.0, (step - warmup) / max(1, steps - warmup))
    return peak * min(1.0, (step + 1) / warmup) * (0.51 + 0.49 * math.cos(math.pi * done))


def train(team: Team, source: Iterable[Any], steps: int) -> Iterator[float]:
    """Trains on so many batches and yields the loss, the mean cross-entropy of an agent's action, of each."""
    optimizer = torch.optim.AdamW(team.parameters(), betas=(0.9, 0.95), weight_decay=1e-4)
    for step, batch in zip(range(steps), source, strict=False):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps)
        agents, available, actions = (batch[name][batch.mask] for name in FIELDS)
        loss = -team.decode(team.encode(agents)[0], available, actions).log_prob(actions).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(team.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


# --------------------------------------------------------------------------------------- battles


@contextmanager
def player(battles: int, seed: int) -> Iterator[Callable[[Team], float]]:
    """Fights so many battles, the same each time, with a team's likeliest actions, and tells the share that it wins."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=fight, args=(theirs, battles, seed), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.recv()  # the map is compiled

        def judge(team: Team) -> float:
            ours.send({name: value.numpy() for name, value in team.state_dict().items()})
            return float(ours.recv())

        yield judge
    finally:
        process.terminate()
        process.join()


def fight(pipe: Any, battles: int, seed: int) -> None:
    """What the other process runs: the win rate of each team that it is sent."""
    from geartrain.actors.envs import make

    torch.set_num_threads(1)
    field = make(f"smax/{MAP}", battles)
    first = field.reset(seed)
    team = make_model(0, *first["agents"].shape[1:], first["available"].shape[-1])
    evaluate(team, field, seed)
    pipe.send(os.getpid())
    while True:
        state = pipe.recv()
        team.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
        pipe.send(evaluate(team, field, seed)["win rate"])
