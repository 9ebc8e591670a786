"""Offline imitation on Hopper, end to end: simulator -> shared memory -> transformer -> simulator.

Two processes run a small expert policy in Hopper-v5 and write their episodes in place into one
shared-memory store. A causal transformer over windows of return, observation and action is
trained from that store through geartrain's Replay, and then has to hop in the simulator itself.

    python examples/offline_gato_hopper.py           # about two minutes on two cores
    python examples/offline_gato_hopper.py --quick   # a smoke run: the whole path, no pass mark

It prints a table, writes learning_curve.png and result.json to --out, and exits with 1 if the
model reaches less than 90 % of the expert's return.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

MISSING = 'the demo needs {}; install it with: pip install "geartrain[demo]"'
try:
    import numpy as np
    import torch
    from rich import console, progress, table
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    import geartrain as gt
    from hopper_learner import (
        ACTION,
        BATCH,
        CONTEXT,
        EPISODE_STEPS,
        OBS,
        WINDOW_FIELDS,
        evaluate,
        make_hopper,
        make_model,
        train,
    )
except ModuleNotFoundError as missing:
    raise SystemExit(MISSING.format(missing.name)) from None

EXPERT_FILE = Path(__file__).parent / "data" / "hopper_expert.npz"
EVALUATE_AT = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)  # Of the steps: the early ones fall early.
PASS_MARK = 0.90
FIELDS = {
    "obs": gt.Field((OBS,), "float32"),
    "action": gt.Field((ACTION,), "float32"),
    "return_to_go": gt.Field((), "float32"),
    "kicked": gt.Field((), "bool", per_row=True),
}


# ------------------------------------------------------------------ the expert fills the store


def write_episodes(store_name: str, numbers: range, seed: int, turn: Any, next_turn: Any) -> None:
    """What a collector process runs: expert episodes, each written straight into its row.

    The collectors take their rows one after the other and then fill them side by side, so row i
    holds episode i whoever is faster, and one seed repeats the whole run.
    """
    expert = np.load(EXPERT_FILE)
    env = make_hopper()
    with gt.Store.open(store_name) as store:
        turn.wait()
        rows = [store.row() for _ in numbers]
        next_turn.set()
        for number, row in zip(numbers, rows, strict=True):
            rng = np.random.default_rng([seed, number])
            # Every second episode gets kicks on the way, for the model must see recoveries.
            kicked = number % 2 == 1
            obs, _ = env.reset(seed=int(rng.integers(2**31)))
            with row:
                seen, done, reward = row["obs"], row["action"], row["return_to_go"]
                for t in range(EPISODE_STEPS):
                    action = expert["W"] @ ((obs - expert["mean"]) / expert["std"])
                    if kicked and rng.random() < 0.05:
                        action += rng.normal(0.0, 0.2, ACTION)
                    seen[t], done[t] = obs, action.clip(-1.0, 1.0)
                    obs, reward[t], fell, out_of_time, _ = env.step(done[t])
                    if fell or out_of_time:
                        break
                row.length = t + 1
                reward[: t + 1] = reward[t::-1].cumsum()[::-1]
                row["kicked"] = kicked
                # A row weighs as much as it has steps: every step is equally likely to be drawn.
                row.priority = t + 1


def collect(store: gt.Store, episodes: int, seed: int, bars: progress.Progress) -> None:
    """Fills `store` with episodes from two processes, which attach to it by name."""
    spawn = multiprocessing.get_context("spawn")
    shares = (range(episodes // 2), range(episodes // 2, episodes))
    turns = [spawn.Event() for _ in range(len(shares) + 1)]
    turns[0].set()
    workers = [
        spawn.Process(target=write_episodes, args=(store.name, share, seed, *turn), daemon=True)
        for share, turn in zip(shares, pairwise(turns), strict=True)
    ]
    bar = bars.add_task("expert episodes", total=episodes)
    try:
        # Children inherit "ignore", so Ctrl-C is handled, and cleaned up after, in one place.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        for worker in workers:
            worker.start()
        signal.signal(signal.SIGINT, interrupt)
        while running := [worker.sentinel for worker in workers if worker.is_alive()]:
            multiprocessing.connection.wait(running, timeout=0.1)
            bars.update(bar, completed=len(store))
            if any(worker.exitcode for worker in workers):
                raise SystemExit("a collector process failed; its traceback is above")
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
                worker.join()


def recorded(store: gt.Store) -> dict[str, np.ndarray]:
    """All observations of a store, (steps, OBS), and the returns of the expert's episodes without kicks."""
    keys = store.keys()
    keys = keys[np.argsort(keys.row)]  # They come in order of commits, which differs between runs.
    rows = gt.fetch(store, keys, fields=["obs", "return_to_go", "kicked"], output="numpy")
    return {"obs": rows["obs"][rows.mask], "expert": rows["return_to_go"][~rows["kicked"], 0]}


# ---------------------------------------------------------------------- the job and its report


def run(options: argparse.Namespace, store: gt.Store, bars: progress.Progress) -> dict[str, Any]:
    """The job: collect, read the statistics, train with evaluations on the way, measure."""
    clock = {"collect": -time.perf_counter(), "train": 0.0, "evaluate": 0.0}
    collect(store, options.episodes, options.seed, bars)
    clock["collect"] += time.perf_counter()

    rows = recorded(store)
    seen_obs, expert = rows["obs"], rows["expert"]
    target = float(expert.mean())
    bars.console.print(f"{len(store)} episodes, {len(seen_obs):,} steps; the expert returns {target:,.0f}")
    model = make_model(options.seed, seen_obs, target)
    # A hop forgives little, and one batch can spoil it: the mean of the last weights is evaluated.
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.97))

    selection = gt.selection.Prioritized(seed=options.seed)
    marks = {math.ceil(share * options.steps) for share in (*EVALUATE_AT, 1)}
    source = {"fields": WINDOW_FIELDS, "window": CONTEXT}
    losses: list[float] = []
    curve: list[dict[str, Any]] = []
    with gt.Replay(store, selection, batch_size=BATCH, **source) as replay:
        bar = bars.add_task("training", total=options.steps)
        since = time.perf_counter()
        for loss in train(model, replay, options.steps):
            losses.append(loss)
            average.update_parameters(model)
            bars.update(bar, advance=1, description=f"training, loss {loss:.4f}")
            if len(losses) in marks:
                clock["train"] += time.perf_counter() - since
                since = time.perf_counter()
                few = min(3, options.eval_episodes)
                episodes = options.eval_episodes if len(losses) == options.steps else few
                returns = evaluate(average, range(episodes), target, bars)
                share = f"{100 * returns.mean() / target:5.1f} % of the expert's return"
                bars.console.print(f"step {len(losses):>4}: loss {loss:.4f}, {share}")
                curve.append({"step": len(losses), "returns": returns.tolist()})
                clock["evaluate"] += time.perf_counter() - since
                since = time.perf_counter()
        used = replay.stats()
    # The path by itself, with nobody training: what selection and fetch can deliver.
    with gt.Replay(store, selection, batch_size=1024, **source) as replay:
        since = time.perf_counter()
        for _ in replay:
            if time.perf_counter() - since > 1.0:
                break
        alone = replay.stats()
    return {
        "seed": options.seed,
        "episodes": len(store),
        "recorded_steps": len(seen_obs),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "expert_return": {"mean": target, "std": float(expert.std())},
        "model_return": {"mean": float(returns.mean()), "std": float(returns.std())},
        "share_of_expert": float(returns.mean()) / target,
        "wait_share": used["wait_s"] / clock["train"],
        "training_samples_per_s": used["rows"] / clock["train"],
        "path_gb_per_s": alone["bytes"] / alone["elapsed_s"] / 1e9,
        "path_samples_per_s": alone["rows"] / alone["elapsed_s"],
        "wall_s": clock,
        "evaluations": curve,
        "losses": losses,
    }


def report(result: dict[str, Any]) -> table.Table:
    lines = table.Table("", "", "", title="Hopper-v5 from the replay store", show_header=False)
    expert, model = result["expert_return"], result["model_return"]
    lines.add_row("expert return", f"{expert['mean']:,.0f} ± {expert['std']:,.0f}", "not kicked")
    share = f"{100 * result['share_of_expert']:.1f} % of the expert"
    lines.add_row("model return", f"{model['mean']:,.0f} ± {model['std']:,.0f}", share)
    lines.add_row("data path", f"{result['path_gb_per_s']:.2f} GB/s", "batches of 1,024")
    lines.add_row("", f"{result['path_samples_per_s']:,.0f} samples/s", f"{CONTEXT} steps each")
    lines.add_row("waiting for data", f"{100 * result['wait_share']:.2f} %", "of training time")
    parts = ", ".join(f"{name} {wall:.0f}" for name, wall in result["wall_s"].items())
    lines.add_row("wall time", f"{result['total_s']:.0f} s", parts)
    lines.add_row("processor time", f"{result['cpu_s']:.0f} s", "all processes")
    return lines


def plot(result: dict[str, Any], file: Path) -> None:
    """Two panels: the training loss, and the return as percent of the expert's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses, curve = np.array(result["losses"]), result["evaluations"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    left.semilogy(1 + np.arange(len(losses)), losses, color="#9ecae1", lw=1, label="each batch")
    mean = np.convolve(losses, np.ones(10) / 10, mode="valid")
    left.semilogy(10 + np.arange(len(mean)), mean, color="#08519c", lw=2, label="mean of 10")
    left.set(xlabel="training step", ylabel="mean squared action error", title="Training loss")
    steps = [point["step"] for point in curve]
    unit = result["expert_return"]["mean"] / 100
    percent = [np.array(point["returns"]) / unit for point in curve]
    right.plot(steps, [p.mean() for p in percent], "o-", color="#08519c", label="model, mean")
    low, high = [p.min() for p in percent], [p.max() for p in percent]
    right.vlines(steps, low, high, color="#9ecae1", lw=5, zorder=1, label="its episodes")
    right.axhline(100, color="#31a354", label="expert")
    right.axhline(100 * PASS_MARK, color="#de2d26", ls="--", label="pass mark")
    right.set(xlabel="training step", ylabel="return, % of the expert's", ylim=(0, 112))
    right.set(title="Return in the simulator", xlim=(0, 1.03 * steps[-1]))
    for panel in (left, right):
        panel.legend(frameon=False, loc="upper right" if panel is left else "lower right")
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)


def keep_curve(result: dict[str, Any], options: argparse.Namespace, began_s: float) -> None:
    """The curve in the form that all examples leave behind (`curves.py`)."""
    from curves import Curve

    curve = Curve("Hopper", "training step", "return, % of the expert's", options, expert=100.0, promise=95.0)
    curve.began_s = began_s
    unit = result["expert_return"]["mean"] / 100
    for point in result["evaluations"]:
        percent = [each / unit for each in point["returns"]]
        curve.point(point["step"], sum(percent) / len(percent), min(percent), max(percent), wall_s=None)
    curve.content["losses"] = result["losses"]
    wall = {f"{name}_s": seconds for name, seconds in result["wall_s"].items()}
    curve.finish(share_of_expert=result["share_of_expert"], wait_share=result["wait_share"], **wall)


def parse_options() -> argparse.Namespace:
    text = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = text.add_argument
    add("--seed", type=int, default=0, help="episodes, batches and weights follow from it (0)")
    add("--episodes", type=int, help="expert episodes to collect, up to 1,000 steps each (100)")
    add("--steps", type=int, help=f"training steps, {BATCH} windows of {CONTEXT} steps each (400)")
    add("--eval-episodes", type=int, help="episodes in the final evaluation (10)")
    add("--out", type=Path, default=Path("runs/hopper"), help="result folder (runs/hopper)")
    add("--curve", type=Path, help="write the learning curve here, as the other examples do (JSON)")
    add("--plot", type=Path, help="draw it here (PNG)")
    add("--quick", action="store_true", help="8 episodes, 40 steps, no pass mark: does it run?")
    options = text.parse_args()
    sizes = (8, 40, 2) if options.quick else (100, 400, 10)
    for name, size in zip(("episodes", "steps", "eval_episodes"), sizes, strict=True):
        chosen = getattr(options, name)
        setattr(options, name, size if chosen is None else chosen)
        if chosen is not None and chosen < 1 + (name == "episodes"):
            text.error(f"--{name.replace('_', '-')} {chosen} is too small")
    return options


def main() -> int:
    start = time.perf_counter()
    options = parse_options()
    for module in ("gymnasium", "mujoco", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            raise SystemExit(MISSING.format(module))
    options.out.mkdir(parents=True, exist_ok=True)
    # A polite `kill` unwinds like Ctrl-C does, so the segment below is always taken away.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # One thread: it repeats bit for bit on any machine, and two gain little where cores are shared.
    torch.set_num_threads(1)
    store = gt.Store.create(f"hopper-demo-{os.getpid()}", FIELDS, max_length=EPISODE_STEPS, capacity=options.episodes)
    screen = console.Console()
    try:
        columns = (progress.TextColumn("{task.description:<24}"), progress.BarColumn())
        columns += (progress.MofNCompleteColumn(), progress.TimeElapsedColumn())
        with progress.Progress(*columns, console=screen) as bars:
            result = run(options, store, bars)
    except KeyboardInterrupt:
        screen.print("interrupted; the store is removed")
        return 130
    finally:
        store.unlink()
        store.close()
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    result["cpu_s"] = sum(usage.ru_utime + usage.ru_stime for usage in used)
    result["total_s"] = time.perf_counter() - start
    screen.print(report(result))
    plot(result, options.out / "learning_curve.png")
    (options.out / "result.json").write_text(json.dumps(result, indent=1))
    if options.curve or options.plot:
        keep_curve(result, options, start)
    screen.print(f"wrote {options.out}/learning_curve.png and {options.out}/result.json")
    if not options.quick and result["share_of_expert"] < PASS_MARK:
        screen.print(f"below the pass mark, {100 * PASS_MARK:.0f} % of the expert's return")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
