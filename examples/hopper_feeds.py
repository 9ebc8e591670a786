"""One learner, three feeds: does it matter to the Hopper transformer who feeds it?

    python examples/hopper_feeds.py --feed geartrain --seed 0   a geartrain store; keeps the (row, end) of each draw
    python examples/hopper_feeds.py --feed array --seed 0       plain arrays and those numbers, nothing of geartrain
    python examples/hopper_feeds.py --feed torchrl --seed 0     torchrl's SliceSampler over the same episodes
    python examples/hopper_feeds.py --table                     what the runs in --out found, over their seeds

The learner is `hopper_learner.py` each time: the same first weights, the same training loop, the same evaluation.
`geartrain` comes first, because the others read the episodes that it records, and `array` the numbers of its draws:
equal windows in equal order, so losses and weights have to be equal to the bit. torchrl draws by itself: an episode,
each equally likely, and then any step of it as the window's end; geartrain draws every step equally often.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import progress
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hopper_learner as learner

THRESHOLD = 0.95  # of the expert's return
FIELDS = learner.WINDOW_FIELDS


@dataclass
class Episodes:
    """Recorded episodes: (N, T, ...) arrays by name, each episode's steps, and the mean return of the expert's."""

    columns: dict[str, np.ndarray]
    lengths: np.ndarray
    expert: float

    @staticmethod
    def read(file: Path) -> Episodes:
        with np.load(file) as kept:
            columns = {name: kept[name] for name in FIELDS}
            return Episodes(columns, kept["lengths"], float(columns["return_to_go"][~kept["kicked"], 0].mean()))

    @property
    def real(self) -> np.ndarray:
        """(N, T) bool: the steps that are."""
        return np.arange(self.columns["obs"].shape[1]) < self.lengths[:, None]


class Windows(dict[str, Tensor]):
    """(B, CONTEXT, ...) tensors by name, zero where `mask` is False."""

    def __init__(self, columns: dict[str, Tensor], mask: Tensor) -> None:
        super().__init__(columns)
        self.mask = mask


# ----------------------------------------------------------------------------------- the feeds


def from_geartrain(store: Any, seed: int, steps: int, drawn: np.ndarray) -> Iterator[Any]:
    """Batches of a geartrain store; writes each window's row and last step to `drawn`, (steps, BATCH, 2)."""
    import geartrain as gt

    selection = gt.selection.Prioritized(seed=seed)
    how = {"fields": FIELDS, "window": learner.CONTEXT, "num_batches": steps}
    with gt.Replay(store, selection, batch_size=learner.BATCH, **how) as replay:
        for number, batch in enumerate(replay):
            drawn[number, :, 0] = batch.keys.row
            drawn[number, :, 1] = batch.start + batch.mask.sum(1) - 1
            yield batch


def from_array(episodes: Episodes, drawn: np.ndarray) -> Iterator[Windows]:
    """The windows that end at the steps `drawn`, (steps, BATCH, 2), cut out of arrays."""
    past = np.arange(1 - learner.CONTEXT, 1)
    for rows, ends in zip(drawn[..., 0], drawn[..., 1], strict=True):
        known = rows.min() >= 0 and rows.max() < len(episodes.lengths)
        if not known or (ends < 0).any() or (ends >= episodes.lengths[rows]).any():
            raise SystemExit("the numbers of the draws are of other episodes: run --feed geartrain again")
        at = ends[:, None] + past
        mask = at >= 0
        columns = {}
        for name, column in episodes.columns.items():
            window = column[rows[:, None], at.clip(0)]
            window[~mask] = 0
            columns[name] = torch.from_numpy(window)
        yield Windows(columns, torch.from_numpy(mask))


def from_torchrl(episodes: Episodes, seed: int, steps: int) -> Iterator[Windows]:
    """Slices that torchrl draws, with fewer steps at the start of an episode, each at the right end of its window."""
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

    real = episodes.real
    data = {name: torch.from_numpy(column[real]) for name, column in episodes.columns.items()}
    data["episode"] = torch.from_numpy(np.nonzero(real)[0])
    total = int(real.sum())
    sampler = SliceSampler(
        slice_len=learner.CONTEXT, traj_key="episode", strict_length=False, span=(True, False), cache_values=True
    )
    size = learner.BATCH * learner.CONTEXT
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(total), sampler=sampler, batch_size=size)
    buffer.set_rng(torch.Generator().manual_seed(seed))
    buffer.extend(TensorDict(data, batch_size=[total]))
    for _ in range(steps):
        slices = buffer.sample()
        last = slices["next", "truncated"].flatten()  # of its slice
        window = torch.cat([torch.zeros(1, dtype=torch.int64), last.cumsum(0)[:-1]])
        ends = last.nonzero().flatten()
        place = learner.CONTEXT - 1 - (ends[window] - torch.arange(len(last)))
        mask = torch.zeros(len(ends), learner.CONTEXT, dtype=torch.bool)
        mask[window, place] = True
        columns = {}
        for name in FIELDS:
            columns[name] = torch.zeros(*mask.shape, *slices[name].shape[1:])
            columns[name][window, place] = slices[name]
        yield Windows(columns, mask)


# ----------------------------------------------------------------------------------- a run


class Timed:
    """The batches of a feed, and the seconds that the learner waited for all but the first, which sets the feed up."""

    def __init__(self, feed: Iterator[Any]) -> None:
        self.feed = itertools.chain([next(feed)], feed)
        self.wait_s = 0.0

    def __iter__(self) -> Iterator[Any]:
        while True:
            began_s = time.perf_counter()
            batch = next(self.feed, None)
            self.wait_s += time.perf_counter() - began_s
            if batch is None:
                return
            yield batch


def run(
    feed: Iterator[Any],
    episodes: Episodes,
    seed: int,
    steps: int,
    marks: set[int],
    evaluate: Callable[[nn.Module], float],
) -> dict[str, Any]:
    """Trains and evaluates: at the marks until the threshold is passed, and at the end. Seconds are of training alone,
    without the feed's set-up.

    `evaluate` tells the model's return as a share of the expert's.
    """
    model = learner.make_model(seed, episodes.columns["obs"][episodes.real], episodes.expert)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.97))
    timed = Timed(feed)
    losses: list[float] = []
    points: list[dict[str, float]] = []
    passed: dict[str, float] | None = None
    train_s = cpu_s = 0.0
    since_s, since_cpu_s = time.perf_counter(), time.process_time()
    for loss in learner.train(model, timed, steps):
        losses.append(loss)
        average.update_parameters(model)
        if len(losses) == steps or (passed is None and len(losses) in marks):
            train_s += time.perf_counter() - since_s
            cpu_s += time.process_time() - since_cpu_s
            point = {"step": len(losses), "share": evaluate(average), "train_s": train_s, "cpu_s": cpu_s}
            points.append(point)
            if passed is None and point["share"] >= THRESHOLD:
                passed = point
            print(f"step {point['step']}: loss {loss:.5f}, {100 * point['share']:.1f} % of the expert", flush=True)
            since_s, since_cpu_s = time.perf_counter(), time.process_time()
    return {
        "seed": seed,
        "steps": len(losses),
        "losses": losses,
        "weights": digest(average),
        "points": points,
        "passed": passed,
        "wait_s": timed.wait_s,
        "geartrain_imported": "geartrain" in sys.modules,
    }


def digest(model: nn.Module) -> str:
    """SHA-256 of all of a model's values."""
    whole = hashlib.sha256()
    for name, value in model.state_dict().items():
        whole.update(name.encode() + value.numpy().tobytes())
    return whole.hexdigest()


def record(store: Any, file: Path) -> None:
    """Keeps a store's episodes, in the order of their rows, for the feeds that have no store."""
    import geartrain as gt

    keys = store.keys()
    keys = keys[np.argsort(keys.row)]  # they come in order of commits
    rows = gt.fetch(store, keys, fields=[*FIELDS, "kicked"], output="numpy")
    columns = {name: rows[name] for name in FIELDS}
    np.savez(file, lengths=rows.length, kicked=rows["kicked"], **columns)


def main() -> int:
    options = parse_options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds as Ctrl-C does, so the store is taken away
    if options.table:
        return show(options.out)
    torch.set_num_threads(1)  # it repeats bit for bit
    options.out.mkdir(parents=True, exist_ok=True)
    recorded = options.out / f"episodes-{options.seed}.npz"
    numbers = options.out / f"drawn-{options.seed}.npy"
    needed = {"geartrain": [], "array": [recorded, numbers], "torchrl": [recorded]}[options.feed]
    for file in needed:
        if not file.exists():
            raise SystemExit(f"{file} is missing: run --feed geartrain --seed {options.seed} first")
    marks = set(range(options.steps // 5, options.steps, max(1, options.steps // 15)))
    bars = progress.Progress(disable=True)

    def trained(feed: Iterator[Any], episodes: Episodes) -> dict[str, Any]:
        def evaluate(model: nn.Module) -> float:
            found = learner.evaluate(model, range(options.eval_episodes), episodes.expert, bars)
            return float(found.mean()) / episodes.expert

        return run(feed, episodes, options.seed, options.steps, marks, evaluate)

    if options.feed == "geartrain":
        import geartrain as gt
        import offline_gato_hopper as demo

        drawn = np.zeros((options.steps, learner.BATCH, 2), np.int32)
        name = f"hopper-feeds-{os.getpid()}"
        store = gt.Store.create(name, demo.FIELDS, max_length=learner.EPISODE_STEPS, capacity=options.episodes)
        try:
            demo.collect(store, options.episodes, options.seed, bars)
            record(store, recorded)
            found = trained(from_geartrain(store, options.seed, options.steps, drawn), Episodes.read(recorded))
        finally:
            store.unlink()
            store.close()
        np.save(numbers, drawn)
    else:
        episodes = Episodes.read(recorded)
        if options.feed == "array":
            drawn = np.load(numbers)
            if len(drawn) != options.steps:
                raise SystemExit(f"{numbers} has the draws of {len(drawn)} steps, not of {options.steps}")
            found = trained(from_array(episodes, drawn), episodes)
        else:
            found = trained(from_torchrl(episodes, options.seed, options.steps), episodes)
    found["feed"], found["episodes"] = options.feed, options.episodes
    (options.out / f"{options.feed}-{options.seed}.json").write_text(json.dumps(found, indent=1))
    return 0


# ----------------------------------------------------------------------------------- the table


def show(out: Path) -> int:
    """Prints the runs' table as Markdown; 1 where geartrain and the array of a seed are not equal to the bit."""
    runs = [json.loads(file.read_text()) for file in sorted(out.glob("*-*.json"))]
    by_feed = {feed: [one for one in runs if one["feed"] == feed] for feed in ("geartrain", "array", "torchrl")}
    print("| feed | seeds | steps to 95 % | CPU s | wall s | waiting, ms a batch | share of the expert at the end |")
    print("|---|---|---|---|---|---|---|")
    for feed, ours in by_feed.items():
        passed = [one["passed"] for one in ours if one["passed"]]
        cells = [spread([one[key] for one in passed], form) for key, form in (("step", ".0f"), ("cpu_s", ".1f"))]
        cells.append(spread([one["train_s"] for one in passed], ".1f"))
        cells.append(spread([1e3 * one["wait_s"] / one["steps"] for one in ours], ".2f"))
        cells.append(spread([one["points"][-1]["share"] for one in ours], ".3f"))
        print(f"| {feed} | {len(passed)} of {len(ours)} passed | {' | '.join(cells)} |")
    equal = True
    for one in by_feed["geartrain"]:
        for other in by_feed["array"]:
            if one["seed"] == other["seed"]:
                same = one["losses"] == other["losses"] and one["weights"] == other["weights"]
                equal = equal and same
                print(f"seed {one['seed']}: losses and weights of geartrain and array {'equal' if same else 'DIFFER'}")
    return 0 if equal else 1


def spread(values: list[float], form: str) -> str:
    """Mean and sample standard deviation."""
    if not values:
        return "-"
    mean = format(np.mean(values), form)
    return f"{mean} ± {format(np.std(values, ddof=1), form)}" if len(values) > 1 else mean


def parse_options() -> argparse.Namespace:
    text = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = text.add_argument
    add("--feed", choices=("geartrain", "array", "torchrl"), default="geartrain", help="who feeds (geartrain)")
    add("--seed", type=int, default=0, help="episodes, batches and weights follow from it (0)")
    add("--steps", type=int, help=f"training steps, {learner.BATCH} windows of {learner.CONTEXT} steps each (150)")
    add("--episodes", type=int, help="expert episodes to record, up to 1,000 steps each (100)")
    add("--eval-episodes", type=int, help="episodes of each evaluation (3)")
    add("--out", type=Path, default=Path("runs/hopper_feeds"), help="folder of episodes, numbers and results")
    add("--table", action="store_true", help="show what the runs in --out found")
    add("--quick", action="store_true", help="4 episodes, 10 steps, one episode of evaluation: does it run?")
    options = text.parse_args()
    for name, small, usual, least in (("steps", 10, 150, 5), ("episodes", 4, 100, 2), ("eval_episodes", 1, 3, 1)):
        chosen = getattr(options, name)
        if chosen is not None and chosen < least:
            text.error(f"--{name.replace('_', '-')} is {least} at least, found {chosen}")
        setattr(options, name, chosen or (small if options.quick else usual))
    return options


if __name__ == "__main__":
    sys.exit(main())
