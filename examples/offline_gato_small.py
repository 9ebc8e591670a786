"""A small Gato: one tokenised transformer learns Hopper, HalfCheetah and Freeway from recorded episodes.

    pip install "geartrain[torch,cli,plot,mujoco,atari]"
    python examples/offline_gato_small.py                # records what is missing, trains, plays all three tasks
    python examples/offline_gato_small.py --minutes 20   # the same, and stops training after so long
    python examples/offline_gato_small.py --tiny         # a few small steps of everything: does it run?

After Reed et al. (2022), without their prompts: the model is told neither the task nor a return; it continues what it
sees. Numbers are mu-law encoded into 1,024 bins, pictures are cut into patches, and the loss is the masked
cross-entropy of action tokens (`gato_model.py`). Experts play into three stores, one a task (`gato_tasks.py`). A
`Mixture` draws windows of steps from all three in fixed shares; tokens come with the batch, and Freeway's frames are
fetched by the keys of its windows.

A checkpoint is one file of model, optimizer, mean of the weights, the replay's state and the losses so far, written
beside the old one and exchanged for it. A run that was cut goes on from it with the losses of one that was not, to the
bit: run the same command again. Freeway's expert takes 100 CPU seconds, the recordings 65 and 97 MB, and training with
its evaluations eight CPU minutes; a checkpoint is 19 MB.

At the end --out has result.json and returns.png: losses, returns and lengths of the episodes of each task, beside the
expert's and those of random actions.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import console, progress, table
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import curves
import gato_tasks as tasks
import geartrain as gt
from gato_model import Gato

WINDOW = 4  # steps of a sequence
SHARES = {"hopper": 0.5, "halfcheetah": 0.35, "freeway": 0.15}  # of a batch's windows
KEEP = 0.99  # of the mean of the weights, which plays


def sizes(chosen: argparse.Namespace) -> dict[str, int]:
    return {"width": chosen.width, "layers": chosen.layers, "heads": 4}


# --------------------------------------------------------------------------------------- what is learned from


def sequences(batch: gt.Batch, stores: list[gt.Store]) -> dict[str, tuple[Tensor, Tensor | None, Tensor]]:
    """Tokens, frames where there are some, and mask of the windows of each task in a batch of the mixture."""
    found: dict[str, tuple[Tensor, Tensor | None, Tensor]] = {}
    shard = torch.from_numpy(batch.keys.shard.astype(np.int64))
    for number, (task, store) in enumerate(zip(tasks.SHAPES, stores, strict=True)):
        mine = (shard == number).nonzero()[:, 0]
        if not len(mine):
            continue
        mask, frames = batch.mask[mine], None
        if tasks.SHAPES[task].frame:
            ends = (batch.start[mine] + mask.sum(1) - 1).numpy()
            keys = batch.keys[mine.numpy()]
            frames = gt.fetch(store, keys, fields=["frame"], window=WINDOW, ends=ends)["frame"]
        found[task] = (batch["tokens"][mine], frames, mask)
    return found


class Learner:
    """Model, optimizer, and the running mean of the weights that plays."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        torch.manual_seed(chosen.seed)
        self.model = Gato(tasks.SHAPES, WINDOW, **sizes(chosen))
        self.mean = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(KEEP))
        decayed = [each for each in self.model.parameters() if each.ndim > 1]
        others = [each for each in self.model.parameters() if each.ndim <= 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=1e-3)
        self.steps, self.peak = chosen.steps, chosen.rate

    def rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to 2 % of the peak."""
        warmup = min(100, max(1, self.steps // 10))
        done = max(0.0, (step - warmup) / max(1, self.steps - warmup))
        return self.peak * min(1.0, (step + 1) / warmup) * (0.51 + 0.49 * math.cos(math.pi * done))

    def train(self, step: int, found: dict[str, tuple[Tensor, Tensor | None, Tensor]]) -> dict[str, float]:
        """One update; the losses of the tasks. Each task counts by its windows, not by its actions' tokens."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate(step)
        losses = {task: self.model.loss(task, *sequence) for task, sequence in found.items()}
        windows = {task: len(mask) for task, (_, _, mask) in found.items()}
        loss = torch.stack([losses[task] * windows[task] for task in found]).sum() / sum(windows.values())
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.mean.update_parameters(self.model)
        return {task: each.item() for task, each in losses.items()}

    def state_dict(self) -> dict[str, Any]:
        parts = {"model": self.model, "mean": self.mean, "optimizer": self.optimizer}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.mean.load_state_dict(state["mean"])
        self.optimizer.load_state_dict(state["optimizer"])


# ------------------------------------------------------------------------------------------------ checkpoints


def setting(chosen: argparse.Namespace) -> dict[str, Any]:
    """What a run's losses follow from; a checkpoint of another one is refused."""
    names = ("seed", "steps", "batch", "rate", "width", "layers", "evaluations", "eval_episodes")
    return {name: getattr(chosen, name) for name in names}


def recordings(chosen: argparse.Namespace) -> dict[str, str]:
    """What the recordings are known by: stores have a new identity whenever they are loaded."""
    files = {task: chosen.data / task / "recorded.json" for task in tasks.SHAPES}
    return {task: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for task, file in files.items()}


def save(file: Path, learner: Learner, replay: gt.Replay, progressed: dict[str, Any]) -> None:
    """The run as one unit: absent, or complete and of one step."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.new")
    with beside.open("wb") as written:
        torch.save({"learner": learner.state_dict(), "replay": replay.state_dict(), "run": progressed}, written)
        written.flush()
        os.fsync(written.fileno())
    beside.replace(file)


def resume(file: Path, learner: Learner, replay: gt.Replay, chosen: argparse.Namespace) -> dict[str, Any] | None:
    """Brings learner and replay to where the checkpoint is; the run so far, or None where there is none."""
    if not file.exists():
        return None
    state = torch.load(file, weights_only=True)
    run: dict[str, Any] = state["run"]
    if run["setting"] != setting(chosen):
        raise SystemExit(f"{file} is of a run with {run['setting']}; remove it, or choose those options again")
    if run["recordings"] != recordings(chosen):
        raise SystemExit(f"{file} is of a run with other recordings than those in {chosen.data}; remove it")
    learner.load_state_dict(state["learner"])
    replay.load_state_dict(state["replay"])
    return run


# -------------------------------------------------------------------------------------------------- the run


def evaluate(
    learner: Learner, episodes: int, chosen: argparse.Namespace, bars: progress.Progress
) -> dict[str, dict[str, list[float]]]:
    """Returns and lengths of so many episodes of each task, of seeds that no recording has."""
    learner.mean.eval()
    found = {}
    for task in tasks.SHAPES:
        limit = min(tasks.LONGEST[task], chosen.longest)
        bar = bars.add_task(f"playing {tasks.TITLES[task]}", total=limit)
        envs = evaluate_task(learner.mean.module, task, [1_000_000 + i for i in range(episodes)], limit, bars, bar)
        bars.remove_task(bar)
        found[task] = {"returns": envs.returns.tolist(), "lengths": envs.lengths.tolist()}
    return found


def evaluate_task(
    model: Gato, task: str, seeds: list[int], limit: int, bars: progress.Progress, bar: progress.TaskID
) -> tasks.Simulators:
    """Plays one episode for each seed, side by side: one call of the model a step for those still playing."""
    shape, envs, n = tasks.SHAPES[task], tasks.simulators(task, seeds), len(seeds)
    past = {
        name: torch.zeros(n, WINDOW, *field.shape, dtype=getattr(torch, str(field.dtype)))
        for name, field in tasks.fields_of(task).items()
    }
    mask = torch.zeros(n, WINDOW, dtype=torch.bool)
    for step in range(limit):
        for window in (*past.values(), mask):
            window[:, :-1] = window[:, 1:].clone()
        for name, value in tasks.steps_of(task, envs.observe()).items():
            past[name][:, -1] = torch.from_numpy(value)
        mask[:, -1] = True
        playing = torch.from_numpy(np.flatnonzero(envs.playing))
        frames = past["frame"][playing] if shape.frame else None
        tokens = model.act(task, past["tokens"][playing], frames, mask[playing])
        past["tokens"][playing, -1, shape.numbers : shape.numbers + shape.actions] = tokens.short()
        done = past["tokens"][:, -1, shape.numbers : shape.numbers + shape.actions].numpy()
        envs.step(tasks.actions_of(task, done))
        bars.update(bar, completed=step + 1)
        if not envs.playing.any():
            break
    envs.close()
    return envs


def share_of_expert(task: str, returns: list[float], recorded: dict[str, Any]) -> float:
    """Percent of the way from random actions to the expert."""
    chance, expert = (float(np.mean(recorded[task][who]["returns"])) for who in ("random", "expert"))
    return 100 * (float(np.mean(returns)) - chance) / (expert - chance) if expert != chance else 0.0


def train(
    chosen: argparse.Namespace,
    stores: list[gt.Store],
    recorded: dict[str, Any],
    curve: curves.Curve,
    screen: console.Console,
) -> dict[str, Any]:
    """The run, from its checkpoint where there is one. It may end before its last step; "done" tells."""
    learner = Learner(chosen)
    parameters = sum(each.numel() for each in learner.model.parameters())
    strategies = [gt.selection.Uniform(over="steps") for _ in stores]
    mixture = gt.selection.Mixture(list(SHARES.values()), strategies)
    marks = {round(chosen.steps * (1 + i) / (1 + chosen.evaluations)) for i in range(chosen.evaluations)}
    run: dict[str, Any] = {"setting": setting(chosen), "recordings": recordings(chosen)}
    run |= {"losses": [], "evaluations": [], "train_s": 0.0, "cpu_s": 0.0}
    how = {"fields": ["tokens"], "window": WINDOW, "options": gt.ReplayOptions(seed=chosen.seed)}
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    with gt.Replay(stores, mixture, chosen.batch, **how) as replay, curves.bars(screen) as bars:
        if before := resume(chosen.checkpoint, learner, replay, chosen):
            run = before
            bars.console.print(f"goes on after step {len(run['losses']):,} of {chosen.checkpoint}")
        else:
            bars.console.print(f"{parameters:,} parameters, {chosen.steps:,} steps of {chosen.batch} windows")
        before_s, before_cpu_s, judged_s = run["train_s"], run["cpu_s"], 0.0
        step = len(run["losses"])
        bar = bars.add_task("training", total=chosen.steps, completed=step)

        def keep() -> None:
            run["train_s"] = before_s + time.perf_counter() - began_s - judged_s
            run["cpu_s"] = before_cpu_s + time.process_time() - began_cpu_s
            save(chosen.checkpoint, learner, replay, run)

        def judged() -> bool:
            return bool(run["evaluations"]) and run["evaluations"][-1]["step"] == step

        def judge(episodes: int) -> None:
            nonlocal judged_s
            since_s = time.perf_counter()
            found = evaluate(learner, episodes, chosen, bars)
            judged_s += time.perf_counter() - since_s
            run["evaluations"].append({"step": step, "episodes": found})
            shares = [share_of_expert(task, found[task]["returns"], recorded) for task in found]
            words = ", ".join(f"{tasks.TITLES[task]} {np.mean(found[task]['returns']):,.1f}" for task in found)
            bars.console.print(f"step {step:,}: {words}; {np.mean(shares):.0f} % of the experts")

        late = False
        while step < chosen.steps and not late:
            if step in marks and not judged():
                judge(chosen.eval_episodes)
                keep()
            losses = learner.train(step, sequences(replay.sample(), stores))
            run["losses"].append(losses)
            step += 1
            words = ", ".join(f"{each:.2f}" for each in losses.values())
            bars.update(bar, completed=step, description=f"training, loss {words}")
            late = time.perf_counter() - began_s > 60 * chosen.minutes
            if late or step % chosen.save_every == 0 or step in marks or step == chosen.steps:
                keep()
        run["done"] = step == chosen.steps
        if not judged():
            judge(chosen.final_episodes)
        if run["done"]:
            keep()  # with its last evaluation: run again, it only reports
        run["wait_s"] = replay.stats()["wait_s"]
    for point in run["evaluations"]:
        shares = [share_of_expert(task, each["returns"], recorded) for task, each in point["episodes"].items()]
        curve.point(point["step"], np.mean(shares), min(shares), max(shares), wall_s=None)
    return run | {"parameters": parameters}


# ------------------------------------------------------------------------------------------------ its report


def report(run: dict[str, Any], recorded: dict[str, Any]) -> table.Table:
    lines = table.Table("task", "", "return", "episode length", title="episodes in the simulators")
    for task, episodes in run["evaluations"][-1]["episodes"].items():
        share = f" ({share_of_expert(task, episodes['returns'], recorded):.0f} %)"
        for who, found in (("model", episodes), *((who, recorded[task][who]) for who in ("expert", "random"))):
            words = [f"{np.mean(found[what]):,.1f} ± {np.std(found[what]):,.1f}" for what in ("returns", "lengths")]
            own, episodes_of = who == "model", f"{who}, {len(found['returns'])}"
            lines.add_row(tasks.TITLES[task] * own, episodes_of, words[0] + share * own, words[1])
    return lines


def plot(run: dict[str, Any], recorded: dict[str, Any], file: Path) -> None:
    """The losses, and the returns of each task over training steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 1 + len(tasks.SHAPES), figsize=(14, 3.9), layout="constrained")
    for (task, title), color in zip(tasks.TITLES.items(), ("#08519c", "#e6550d", "#31a354"), strict=True):
        loss = np.array([each.get(task, np.nan) for each in run["losses"]])
        width = min(50, max(1, len(loss) // 4))
        mean = np.convolve(loss, np.ones(width) / width, mode="valid")
        panels[0].plot(width + np.arange(len(mean)), mean, color=color, lw=1.5, label=f"{title}, mean of {width}")
    panels[0].set(title="Loss of action tokens", xlabel="training step", ylabel="cross-entropy", yscale="log")
    for panel, (task, title) in zip(panels[1:], tasks.TITLES.items(), strict=True):
        steps = [point["step"] for point in run["evaluations"]]
        returns = [np.array(point["episodes"][task]["returns"]) for point in run["evaluations"]]
        panel.plot(steps, [each.mean() for each in returns], "o-", color="#08519c", label="model, mean")
        low, high = [each.min() for each in returns], [each.max() for each in returns]
        panel.vlines(steps, low, high, color="#9ecae1", lw=5, zorder=1, label="its episodes")
        panel.axhline(np.mean(recorded[task]["expert"]["returns"]), color="#31a354", ls="--", label="expert")
        panel.axhline(np.mean(recorded[task]["random"]["returns"]), color="#636363", ls="--", label="random actions")
        panel.set(title=title, xlabel="training step", ylabel="return", xlim=(0, 1.05 * steps[-1]))
    panels[0].legend(frameon=False, fontsize=8, loc="upper right")
    lines, names = panels[1].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower right", ncols=len(names), frameon=False, fontsize=9)
    for panel in panels:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    text = curves.options(__doc__)
    add = text.add_argument
    add("--steps", type=int, help="training steps (3,000)")
    add("--minutes", type=float, default=math.inf, help="stop training after so long; the same command goes on")
    add("--batch", type=int, help="windows of a batch (32)")
    add("--rate", type=float, default=1e-3, help="the highest learning rate (1e-3)")
    add("--width", type=int, help="of a token's embedding (128)")
    add("--layers", type=int, help="of the transformer (3)")
    add("--evaluations", type=int, help="while it trains (2)")
    add("--eval-episodes", type=int, help="of each task in them (2)")
    add("--final-episodes", type=int, help="of each task at the end (5)")
    add("--save-every", type=int, help="training steps from one checkpoint to the next (100)")
    add("--checkpoint", type=Path, help="the run's file, resumed when it is there (OUT/seed-SEED.pt)")
    add("--out", type=Path, help="folder of the results (runs/gato_small)")
    add("--record", action="store_true", help="record what is missing, and end")
    tasks.recording_options(text)
    chosen = text.parse_args(arguments)
    usual = {"steps": (3000, 12), "batch": (32, 8), "width": (128, 32), "layers": (3, 2), "evaluations": (2, 1)}
    usual |= {"eval_episodes": (2, 1), "final_episodes": (5, 2), "save_every": (100, 5)}
    for name, values in usual.items():
        given = getattr(chosen, name)
        setattr(chosen, name, values[chosen.tiny] if given is None else given)
        least = 0 if name == "evaluations" else 1
        if getattr(chosen, name) < least:
            text.error(f"--{name.replace('_', '-')} is at least {least}, found {given}")
    if chosen.width % 8:
        text.error(f"--width is a multiple of 8, found {chosen.width}")
    if not chosen.minutes >= 0:
        text.error(f"--minutes is at least 0, found {chosen.minutes}")
    if not 0 < chosen.rate < 1:
        text.error(f"--rate is above 0 and below 1, found {chosen.rate}")
    if not 0 <= chosen.seed < 2**63:
        text.error(f"--seed is at least 0, found {chosen.seed}")
    chosen.out = chosen.out or Path("runs/gato_tiny" if chosen.tiny else "runs/gato_small")
    chosen.checkpoint = chosen.checkpoint or chosen.out / f"seed-{chosen.seed}.pt"
    tasks.fill_recording_options(chosen, text)
    return chosen


def main(arguments: list[str] | None = None) -> int:
    chosen = parse_options(arguments)
    curves.prepare()
    screen = console.Console()
    try:
        return run_example(chosen, screen)
    except KeyboardInterrupt:
        screen.print(f"interrupted; the same command goes on from {chosen.checkpoint}, where there is one")
        return 130


def run_example(chosen: argparse.Namespace, screen: console.Console) -> int:
    recorded = tasks.record_missing(chosen, screen)
    if chosen.record:
        return 0
    title = "A small Gato on Hopper, HalfCheetah, Freeway"
    curve = curves.Curve(title, "training step", "return, % from random to expert, mean of tasks", chosen, expert=100.0)
    with contextlib.ExitStack() as stack:
        stores = [stack.enter_context(store) for store in tasks.opened(chosen.data)]
        run = train(chosen, stores, recorded, curve, screen)
    screen.print(report(run, recorded))
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "result.json").write_text(json.dumps(run | {"recorded": recorded}, indent=1))
    plot(run, recorded, chosen.out / "returns.png")
    final = run["evaluations"][-1]["episodes"]
    figures = {f"{task}_return": float(np.mean(each["returns"])) for task, each in final.items()}
    figures |= {f"{task}_length": float(np.mean(each["lengths"])) for task, each in final.items()}
    shares = {task: share_of_expert(task, each["returns"], recorded) / 100 for task, each in final.items()}
    curve.finish(**figures, share_of_experts=float(np.mean(list(shares.values()))), train_s=run["train_s"])
    spent = f"{run['cpu_s']:,.0f} CPU s with evaluations, {run['train_s']:,.0f} s of training"
    screen.print(f"{len(run['losses']):,} steps, {spent}; wrote {chosen.out}/result.json and {chosen.out}/returns.png")
    if not run["done"]:
        screen.print(f"stopped before step {chosen.steps:,}; the same command goes on from {chosen.checkpoint}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
