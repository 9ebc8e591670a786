"""One learner, three feeds: does it matter to a team of SMAX who feeds it?

    pip install "geartrain[torch,cli,smax]" torchrl
    python examples/mat_feeds.py --feed geartrain --seed 0   # a geartrain store; keeps the (row, end) of each draw
    python examples/mat_feeds.py --feed array --seed 0       # plain arrays and those numbers, nothing of geartrain
    python examples/mat_feeds.py --feed torchrl --seed 0     # torchrl's SliceSampler over the same battles
    python examples/mat_feeds.py --table                     # what the runs in --out found, over their seeds

A scripted team (`focus_fire.py`) fights on 2s3z, two stalkers and three zealots a side, and is recorded. The
Multi-Agent Transformer (`mat_model.py`, `mat_learner.py`) imitates it from what its agents see; the feeds are those of
`feeds.py`. Shares are of the battles that are won.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import numpy as np
from torch import nn

import feeds
import mat_learner as learner
from focus_fire import focus_fire

DISTURBED = 0.1  # of the actions of every second battle


class Battles(feeds.Task):
    """The Multi-Agent Transformer, which imitates a scripted team."""

    name = "mat_feeds"
    fields = learner.FIELDS
    context, batch = learner.CONTEXT, learner.BATCH
    threshold = 0.95
    measure = "the battles won"
    usual: ClassVar = {"steps": (10, 3000, 5), "episodes": (4, 1536, 2), "eval_episodes": (4, 256, 1)}
    help: ClassVar = {
        "steps": f"training steps, {learner.BATCH} windows of {learner.CONTEXT} steps each",
        "episodes": "battles of the scripted team to record",
        "eval_episodes": "battles of each evaluation",
    }

    @contextmanager
    def recorded(self, episodes: int, seed: int) -> Iterator[Any]:
        import geartrain as gt
        from geartrain.actors.envs import make

        battles = make(f"smax/{learner.MAP}", episodes)
        first = battles.reset(seed)
        fields = {
            "agents": gt.Field(first["agents"].shape[1:], "float32"),
            "available": gt.Field(first["available"].shape[1:], "bool"),
            "action": gt.Field((battles.agents,), "int64"),
            "won": gt.Field((), "bool", per_row=True),
            "disturbed": gt.Field((), "bool", per_row=True),
        }
        name = f"mat-feeds-{os.getpid()}"
        with gt.Store.create(name, fields, max_length=learner.STEPS, capacity=episodes) as store:
            record(store, battles, first, seed)
            yield store

    def expert(self, store: Any, keys: Any) -> float:
        import geartrain as gt

        rows = gt.fetch(store, keys, fields=["won", "disturbed"], output="numpy")
        return float(rows["won"][~rows["disturbed"]].mean())

    def make_model(self, seed: int, episodes: feeds.Episodes) -> nn.Module:
        _, _, agents, seen = episodes.columns["agents"].shape
        return learner.make_model(seed, agents, seen, episodes.columns["available"].shape[-1])

    def train(self, model: nn.Module, source: Iterable[Any], steps: int) -> Iterator[float]:
        return learner.train(model, source, steps)

    def player(self, episodes: int, expert: float) -> AbstractContextManager[Callable[[nn.Module], float]]:
        return learner.player(episodes, seed=1_000_000)


def record(store: Any, battles: Any, obs: Any, seed: int) -> None:
    """The scripted team fights all battles side by side, from their first observation; row i holds battle i.

    In every second battle one action in ten is another one than the team wants. What is recorded is what it wants.
    """
    rng = np.random.default_rng(seed)
    steps: list[dict[str, np.ndarray]] = []
    length, won, playing = np.zeros(battles.n, int), np.zeros(battles.n, bool), np.ones(battles.n, bool)
    disturbed = np.arange(battles.n) % 2 == 1
    while playing.any():
        available = obs["available"]
        action = focus_fire(obs["state"], available)
        steps.append({"agents": obs["agents"], "available": available, "action": action})
        any_possible = np.where(available, rng.random(available.shape), -1.0).argmax(-1)
        struck = disturbed[:, None] & (rng.random(action.shape) < DISTURBED)
        stepped = battles.step(np.where(struck, any_possible, action))
        length += playing
        won |= playing & battles.won
        playing &= ~(stepped.terminated | stepped.truncated)
        obs = stepped.next
    for number in range(battles.n):
        with store.row(priority=float(length[number])) as row:
            for t in range(length[number]):
                for name, values in steps[t].items():
                    row[name][t] = values[number]
            row.length, row["won"], row["disturbed"] = int(length[number]), won[number], disturbed[number]


if __name__ == "__main__":
    sys.exit(feeds.main(Battles(), __doc__))
