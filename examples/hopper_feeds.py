"""One learner, three feeds: does it matter to the Hopper transformer who feeds it?

    python examples/hopper_feeds.py --feed geartrain --seed 0   # a geartrain store; keeps the (row, end) of each draw
    python examples/hopper_feeds.py --feed array --seed 0       # plain arrays and those numbers, nothing of geartrain
    python examples/hopper_feeds.py --feed torchrl --seed 0     # torchrl's SliceSampler over the same episodes
    python examples/hopper_feeds.py --table                     # what the runs in --out found, over their seeds

The learner is `hopper_learner.py` each time, the feeds are those of `feeds.py`. Shares are of the expert's return.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
from rich import progress
from torch import nn

import feeds
import hopper_learner as learner


class Hopper(feeds.Task):
    """The transformer of the demo, which imitates episodes of a linear policy."""

    name = "hopper_feeds"
    fields = learner.WINDOW_FIELDS
    context, batch = learner.CONTEXT, learner.BATCH
    threshold = 0.95
    measure = "the expert"
    usual: ClassVar = {"steps": (10, 150, 5), "episodes": (4, 100, 2), "eval_episodes": (1, 3, 1)}
    help: ClassVar = {
        "steps": f"training steps, {learner.BATCH} windows of {learner.CONTEXT} steps each",
        "episodes": "expert episodes to record, up to 1,000 steps each",
        "eval_episodes": "episodes of each evaluation",
    }

    @contextmanager
    def recorded(self, episodes: int, seed: int) -> Iterator[Any]:
        import geartrain as gt
        import offline_gato_hopper as demo

        name = f"hopper-feeds-{os.getpid()}"
        store = gt.Store.create(name, demo.FIELDS, max_length=learner.EPISODE_STEPS, capacity=episodes)
        try:
            demo.collect(store, episodes, seed, progress.Progress(disable=True))
            yield store
        finally:
            store.unlink()
            store.close()

    def expert(self, store: Any, keys: Any) -> float:
        import geartrain as gt

        rows = gt.fetch(store, keys, fields=["return_to_go", "kicked"], output="numpy")
        return float(rows["return_to_go"][~rows["kicked"], 0].mean())

    def make_model(self, seed: int, episodes: feeds.Episodes) -> nn.Module:
        return learner.make_model(seed, episodes.columns["obs"][episodes.real], episodes.expert)

    def train(self, model: nn.Module, source: Iterable[Any], steps: int) -> Iterator[float]:
        return learner.train(model, source, steps)

    @contextmanager
    def player(self, episodes: int, expert: float) -> Iterator[Callable[[nn.Module], float]]:
        bars = progress.Progress(disable=True)
        yield lambda model: float(np.mean(learner.evaluate(model, range(episodes), expert, bars))) / expert


if __name__ == "__main__":
    sys.exit(feeds.main(Hopper(), __doc__))
