"""One learner, three feeds: what `hopper_feeds.py` and `mat_feeds.py` share, all but the task and its learner.

A task is recorded into a geartrain store, and its learner is trained from it, from arrays or from torchrl: the same
first weights, the same training loop, the same evaluation. `geartrain` comes first, because the others read the
episodes that it records, and `array` the numbers of its draws: equal windows in equal order, so losses and weights have
to be equal to the bit. torchrl draws by itself: an episode, each equally likely, and then any step of it as the
window's end; geartrain draws every step equally often.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@dataclass
class Episodes:
    """Recorded episodes: (N, T, ...) arrays by name, each episode's steps, and what the expert reaches in them."""

    columns: dict[str, np.ndarray]
    lengths: np.ndarray
    expert: float

    @staticmethod
    def read(file: Path) -> Episodes:
        with np.load(file) as kept:
            columns = {name: kept[name] for name in kept.files if name not in ("lengths", "expert")}
            return Episodes(columns, kept["lengths"], float(kept["expert"]))

    def write(self, file: Path) -> None:
        np.savez(file, lengths=self.lengths, expert=self.expert, **self.columns)

    @property
    def real(self) -> np.ndarray:
        """(N, T) bool: the steps that are."""
        return np.arange(next(iter(self.columns.values())).shape[1]) < self.lengths[:, None]


class Task(ABC):
    """What is learned, and who learns it.

    Attributes:
        name: of the folder of its runs.
        fields: of a step of a window.
        context, batch: steps of a window, and windows of a batch.
        threshold: the share of what `measure` names that is to be reached.
        measure: what a share of 1 is.
        usual: of --steps, --episodes and --eval-episodes: with --quick, without, and the least.
        help: of the same options.
    """

    name: ClassVar[str]
    fields: ClassVar[list[str]]
    context: ClassVar[int]
    batch: ClassVar[int]
    threshold: ClassVar[float]
    measure: ClassVar[str]
    usual: ClassVar[dict[str, tuple[int, int, int]]]
    help: ClassVar[dict[str, str]]

    @abstractmethod
    def recorded(self, episodes: int, seed: int) -> AbstractContextManager[Any]:
        """A geartrain store of so many episodes, which goes when the context ends. A row's priority is its length."""

    @abstractmethod
    def expert(self, store: Any, keys: Any) -> float:
        """What the expert reaches in the recorded episodes."""

    @abstractmethod
    def make_model(self, seed: int, episodes: Episodes) -> nn.Module:
        """The model with its first weights, which follow from the seed."""

    @abstractmethod
    def train(self, model: nn.Module, source: Iterable[Any], steps: int) -> Iterator[float]:
        """Trains on so many batches and yields the loss of each."""

    @abstractmethod
    def player(self, episodes: int, expert: float) -> AbstractContextManager[Callable[[nn.Module], float]]:
        """Whoever plays so many episodes with a model, the same each time, and tells the share that it reaches."""


class Windows(dict[str, Tensor]):
    """(B, context, ...) tensors by name, zero where `mask` is False."""

    def __init__(self, columns: dict[str, Tensor], mask: Tensor) -> None:
        super().__init__(columns)
        self.mask = mask


# ----------------------------------------------------------------------------------- the feeds


def from_geartrain(task: Task, store: Any, seed: int, steps: int, drawn: np.ndarray) -> Iterator[Any]:
    """Batches of a geartrain store; writes each window's row and last step to `drawn`, (steps, batch, 2)."""
    import geartrain as gt

    selection = gt.selection.Prioritized(seed=seed)
    how = {"fields": task.fields, "window": task.context, "num_batches": steps}
    with gt.Replay(store, selection, batch_size=task.batch, **how) as replay:
        for number, batch in enumerate(replay):
            drawn[number, :, 0] = batch.keys.row
            drawn[number, :, 1] = batch.start + batch.mask.sum(1) - 1
            yield batch


def from_array(task: Task, episodes: Episodes, drawn: np.ndarray) -> Iterator[Windows]:
    """The windows that end at the steps `drawn`, (steps, batch, 2), cut out of arrays."""
    past = np.arange(1 - task.context, 1)
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


def from_torchrl(task: Task, episodes: Episodes, seed: int, steps: int) -> Iterator[Windows]:
    """Slices that torchrl draws, with fewer steps at the start of an episode, each at the right end of its window."""
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer

    real = episodes.real
    data = {name: torch.from_numpy(column[real]) for name, column in episodes.columns.items()}
    data["episode"] = torch.from_numpy(np.nonzero(real)[0])
    total = int(real.sum())
    sampler = SliceSampler(
        slice_len=task.context, traj_key="episode", strict_length=False, span=(True, False), cache_values=True
    )
    size = task.batch * task.context
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(total), sampler=sampler, batch_size=size)
    buffer.set_rng(torch.Generator().manual_seed(seed))
    buffer.extend(TensorDict(data, batch_size=[total]))
    for _ in range(steps):
        slices = buffer.sample()
        last = slices["next", "truncated"].flatten()  # of its slice
        window = torch.cat([torch.zeros(1, dtype=torch.int64), last.cumsum(0)[:-1]])
        ends = last.nonzero().flatten()
        place = task.context - 1 - (ends[window] - torch.arange(len(last)))
        mask = torch.zeros(len(ends), task.context, dtype=torch.bool)
        mask[window, place] = True
        columns = {}
        for name in task.fields:
            columns[name] = torch.zeros(*mask.shape, *slices[name].shape[1:], dtype=slices[name].dtype)
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
    task: Task,
    feed: Iterator[Any],
    episodes: Episodes,
    seed: int,
    steps: int,
    marks: set[int],
    evaluate: Callable[[nn.Module], float],
) -> dict[str, Any]:
    """Trains and evaluates: at the marks until the threshold is passed, and at the end. Seconds are of training alone,
    without the feed's set-up.

    `evaluate` tells the share that a model reaches.
    """
    model = task.make_model(seed, episodes)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.97))
    timed = Timed(feed)
    losses: list[float] = []
    points: list[dict[str, float]] = []
    passed: dict[str, float] | None = None
    train_s = cpu_s = 0.0
    since_s, since_cpu_s = time.perf_counter(), time.process_time()
    for loss in task.train(model, timed, steps):
        losses.append(loss)
        average.update_parameters(model)
        if len(losses) == steps or (passed is None and len(losses) in marks):
            train_s += time.perf_counter() - since_s
            cpu_s += time.process_time() - since_cpu_s
            point = {"step": len(losses), "share": evaluate(average.module), "train_s": train_s, "cpu_s": cpu_s}
            points.append(point)
            if passed is None and point["share"] >= task.threshold:
                passed = point
            print(f"step {point['step']}: loss {loss:.5f}, {100 * point['share']:.1f} % of {task.measure}", flush=True)
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


def kept(task: Task, store: Any) -> Episodes:
    """A store's episodes, in the order of their rows, for the feeds that have no store."""
    import geartrain as gt

    keys = store.keys()
    keys = keys[np.argsort(keys.row)]  # they come in order of commits
    rows = gt.fetch(store, keys, fields=task.fields, output="numpy")
    return Episodes({name: rows[name] for name in task.fields}, rows.length, task.expert(store, keys))


def main(task: Task, about: str | None) -> int:
    options = parse_options(task, about)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds as Ctrl-C does, so the store is taken away
    if options.table:
        if options.plot:
            plot(options.out, options.plot, task)
        return show(task, options.out)
    torch.set_num_threads(1)  # it repeats bit for bit
    options.out.mkdir(parents=True, exist_ok=True)
    recorded = options.out / f"episodes-{options.seed}.npz"
    numbers = options.out / f"drawn-{options.seed}.npy"
    needed = {"geartrain": [], "array": [recorded, numbers], "torchrl": [recorded]}[options.feed]
    for file in needed:
        if not file.exists():
            raise SystemExit(f"{file} is missing: run --feed geartrain --seed {options.seed} first")
    marks = set(range(options.steps // 5, options.steps, max(1, options.steps // 15)))

    def trained(feed: Iterator[Any], episodes: Episodes) -> dict[str, Any]:
        with task.player(options.eval_episodes, episodes.expert) as evaluate:
            return run(task, feed, episodes, options.seed, options.steps, marks, evaluate)

    if options.feed == "geartrain":
        drawn = np.zeros((options.steps, task.batch, 2), np.int32)
        with task.recorded(options.episodes, options.seed) as store:
            episodes = kept(task, store)
            episodes.write(recorded)
            found = trained(from_geartrain(task, store, options.seed, options.steps, drawn), episodes)
        np.save(numbers, drawn)
    else:
        episodes = Episodes.read(recorded)
        if options.feed == "array":
            drawn = np.load(numbers)
            if len(drawn) != options.steps:
                raise SystemExit(f"{numbers} has the draws of {len(drawn)} steps, not of {options.steps}")
            found = trained(from_array(task, episodes, drawn), episodes)
        else:
            found = trained(from_torchrl(task, episodes, options.seed, options.steps), episodes)
    found |= {"feed": options.feed, "episodes": len(episodes.lengths), "expert": episodes.expert}
    (options.out / f"{options.feed}-{options.seed}.json").write_text(json.dumps(found, indent=1))
    return 0


# ----------------------------------------------------------------------------------- what the runs found

FEEDS = {"geartrain": "#08519c", "array": "#e6550d", "torchrl": "#31a354"}  # and their colors


def read_runs(out: Path) -> dict[str, list[dict[str, Any]]]:
    """The finished runs in a folder, by feed."""
    runs = [json.loads(file.read_text()) for file in sorted(out.glob("*-*.json"))]
    return {feed: [one for one in runs if one["feed"] == feed] for feed in FEEDS}


def show(task: Task, out: Path) -> int:
    """Prints the runs' table as Markdown; 1 where geartrain and the array of a seed are not equal to the bit."""
    by_feed = read_runs(out)
    print(
        f"| feed | seeds | steps to {100 * task.threshold:.0f} % | CPU s | wall s | waiting, ms a batch "
        f"| share of {task.measure} at the end |"
    )
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


def plot(out: Path, picture: Path, task: Task) -> None:
    """Loss and share over training steps, a line for each run; the array's lie on geartrain's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.6, 3.8), layout="constrained")
    for feed, ours in read_runs(out).items():
        look = {"color": FEEDS[feed], "ls": "--" if feed == "array" else "-", "lw": 1.4}
        for number, one in enumerate(ours):
            width = max(1, one["steps"] // 50)
            losses = np.convolve(one["losses"], np.ones(width) / width, mode="valid")
            left.plot(width + np.arange(len(losses)), losses, label=None if number else feed, **look)
            steps, shares = zip(*((point["step"], point["share"]) for point in one["points"]), strict=True)
            right.plot(steps, shares, "o", ms=4, **look | {"alpha": 0.8})
    right.axhline(task.threshold, color="#636363", ls=":", lw=1)
    left.set(xlabel="training step", ylabel=f"loss, means over {width} steps", yscale="log")
    right.set(xlabel="training step", ylabel=f"share of {task.measure}")
    left.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def parse_options(task: Task, about: str | None) -> argparse.Namespace:
    text = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = text.add_argument
    add("--feed", choices=tuple(FEEDS), default="geartrain", help="who feeds (geartrain)")
    add("--seed", type=int, default=0, help="episodes, batches and weights follow from it (0)")
    for name, words in task.help.items():
        add(f"--{name.replace('_', '-')}", type=int, help=f"{words} ({task.usual[name][1]})")
    add("--out", type=Path, default=Path("runs") / task.name, help="folder of episodes, numbers and results")
    add("--table", action="store_true", help="show what the runs in --out found")
    add("--plot", type=Path, help="with --table: draw it, too (PNG)")
    add("--quick", action="store_true", help="a few steps and episodes: does it run?")
    options = text.parse_args()
    for name, (small, usual, least) in task.usual.items():
        chosen = getattr(options, name)
        if chosen is not None and chosen < least:
            text.error(f"--{name.replace('_', '-')} is {least} at least, found {chosen}")
        setattr(options, name, chosen or (small if options.quick else usual))
    return options
