"""Runs grpo_llm.py on several seeds: starts its processes, kills some of them at random, measures and draws.

    python examples/grpo_llm_run.py --plot grpo.png                              # 3 seeds, about a minute each
    python examples/grpo_llm_run.py --steps 100 --seeds 1 --tool                 # with the calculator
    python examples/grpo_llm_run.py --steps 1000 --seeds 1 --kill-every 20       # ten minutes, two dozen deaths

It tells the share of right answers, tokens trained a second, how long each process waited, how many updates old the
answers were, and the memory of spans. It counts from the learners' logs which rows were trained: steps that were
trained again after a death replace those before, and no row may be there twice.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import geartrain as gt
import grpo_llm
from geartrain import launch
from geartrain.core.counters import SharedCounters
from geartrain.errors import GeartrainError


def make_job(name: str, folder: Path, seed: int, chosen: argparse.Namespace) -> launch.Job:
    """Eight processes. Each may die as often as it likes."""
    place = {"folder": str(folder)}
    problems = {"seed": seed, "tool": chosen.tool, **place}
    learner = {"steps": chosen.steps, "supervised": chosen.supervised, "save_every": chosen.save_every, **problems}
    often: dict[str, Any] = {"max_restarts": 100_000}
    roles = [
        launch.learners(grpo_llm.learn, chosen.learners, args=learner, **often),
        launch.Role("loader", grpo_llm.load, args=problems, **often),
        launch.workers("answer", grpo_llm.Rollout, 2, name="rollout", rows=4, output="numpy", **often),
        launch.workers("reward", grpo_llm.Reward, rows=32, output="numpy", args=place, **often),
        launch.workers("advantage", grpo_llm.advantage, rows=32, output="numpy", **often),
        launch.workers("ref", grpo_llm.Reference, max_items=128, of="tokens", args=place, **often),
    ]
    return launch.Job(name, roles, timeout_s=chosen.timeout_s)


class Watcher(threading.Thread):
    """Looks at a running job four times a second, and kills one of its processes now and then.

    The time to the next kill begins when every process has made progress since the last one.
    """

    def __init__(self, job: launch.Job, kill_every_s: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.job, self.kill_every_s, self.chance = job, kill_every_s, random.Random(seed)
        self.over = threading.Event()
        self.names = [f"{role.name}-{number}" for role in job.roles for number in range(role.processes)]
        self.kills: collections.Counter[str] = collections.Counter()
        self.down_s: list[float] = []  # from a kill until all processes have made progress
        self.samples: list[dict[str, Any]] = []

    def run(self) -> None:
        counters: SharedCounters | None = None
        store: gt.Store | None = None
        made_before = np.zeros(len(self.names))
        up_s, killed_s = None, None
        while not self.over.wait(0.25):
            with contextlib.suppress(GeartrainError):
                counters = counters or SharedCounters.open(f"launch-{self.job.name}")
                store = store or gt.Store.open(self.job.name)
            if counters is None or store is None:
                continue
            now_s, made = time.time(), counters.column("steps") + counters.column("rows")
            self.sample(now_s, counters, store)
            if up_s is None and (made > made_before).all():
                up_s = now_s
                if killed_s is not None:
                    self.down_s.append(now_s - killed_s)
            if up_s is not None and 0 < self.kill_every_s < now_s - up_s:
                number = self.chance.randrange(len(self.names))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(counters.column("pid")[number]), signal.SIGKILL)
                    self.kills[self.names[number]] += 1
                    up_s, killed_s, made_before = None, now_s, made

    def sample(self, now_s: float, counters: SharedCounters, store: gt.Store) -> None:
        figures = store.stats()
        self.samples.append(
            {
                "time": now_s,
                "learner_steps": float(counters.column("steps")[0]),
                "wait_s": counters.column("wait_s").tolist(),
                "span_bytes": figures["span_bytes"] - figures["free_span_bytes"],
            }
        )


def steps_of(folder: Path) -> tuple[dict[int, dict[int, Any]], int, int]:
    """What each rank trained, by step; how many steps were trained again, and how many of those on other rows.

    A step that was trained again after a death replaces the one before.
    """
    steps: dict[int, dict[int, Any]] = collections.defaultdict(dict)
    again = others = 0
    for file in sorted(folder.glob("learner-*.jsonl")):
        rank = int(file.stem.rpartition("-")[2])
        for line in file.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # a death in the middle of the line
                found = json.loads(line)
                before = steps[found["step"]].get(rank)
                again += before is not None
                others += before is not None and before["rows"] != found["rows"]
                steps[found["step"]][rank] = found
    return steps, again, others


def measure(folder: Path, watcher: Watcher, summary: launch.Summary) -> dict[str, Any]:
    """The figures of a run."""
    steps, again, others = steps_of(folder)
    trained = [record for by_rank in steps.values() for record in by_rank.values()]
    rows = collections.Counter(number for record in trained for number in record["rows"])
    rewards: dict[int, list[float]] = collections.defaultdict(list)
    for line in (folder / "rewards.jsonl").read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            version, right = json.loads(line)
            rewards[version].append(right)
    stale = [record["step"] - version for record in trained for version in record["versions"]]
    busy = [each for each in watcher.samples if each["learner_steps"] > 0]
    took_s = max(record["time"] for record in trained) - min(record["time"] for record in trained)
    waits = np.subtract(busy[-1]["wait_s"], busy[0]["wait_s"]) / max(1e-9, busy[-1]["time"] - busy[0]["time"])
    return {
        "reward": {version: float(np.mean(of)) for version, of in sorted(rewards.items())},
        "steps": len(steps),
        "rows": len(rows),
        "rows_twice": sum(times > 1 for times in rows.values()),
        "rows_missing": grpo_llm.PROMPTS * len(steps) - sum(rows.values()),
        "again": again,
        "again_on_other_rows": others,
        "tokens_per_s": sum(record["tokens"] for record in trained) / max(1e-9, took_s),
        "train_s": took_s,
        "waits": dict(zip(watcher.names, waits.tolist(), strict=True)),
        "stale": np.bincount(stale).tolist(),
        "span_mb": [(each["time"] - watcher.samples[0]["time"], each["span_bytes"] / 1e6) for each in watcher.samples],
        "kills": dict(watcher.kills),
        "down_s": watcher.down_s,
        "restarts": dict(summary.restarts),
    }


def run(seed: int, chosen: argparse.Namespace) -> dict[str, Any]:
    folder = chosen.folder / f"seed-{seed}"
    job = make_job(f"{chosen.folder.name}-{seed}", folder, seed, chosen)
    watcher = Watcher(job, chosen.kill_every, seed)
    watcher.start()
    try:
        summary = launch.run(job, folder=folder, live=False, every_s=30)
    finally:
        watcher.over.set()
        watcher.join()
    return measure(folder, watcher, summary)


def ends(result: dict[str, Any]) -> tuple[float, float]:
    """Share of right answers at the first and at the last tenth of the steps."""
    right = list(result["reward"].values())
    some = max(1, len(right) // 10)
    return float(np.mean(right[:some])), float(np.mean(right[-some:]))


def tell(seed: int, result: dict[str, Any]) -> None:
    before, after = ends(result)
    stale = np.array(result["stale"])
    print(f"seed {seed}: {result['steps']} steps in {result['train_s']:.0f} s, {result['tokens_per_s']:,.0f} tokens/s")
    print(
        f"  right answers {before:.2f} -> {after:.2f}; mean staleness {stale @ np.arange(len(stale)) / stale.sum():.2f}"
    )
    print("  waiting: " + ", ".join(f"{name} {share:.0%}" for name, share in result["waits"].items()))
    print(f"  rows {result['rows']}, twice {result['rows_twice']}, missing {result['rows_missing']}")
    if result["kills"]:
        print(
            f"  kills {sum(result['kills'].values())} ({result['kills']}), all processes up again after "
            f"{np.mean(result['down_s'] or [0]):.1f} s; steps trained again {result['again']}, of these on other rows "
            f"{result['again_on_other_rows']}; restarts {sum(result['restarts'].values())}"
        )


def draw(results: dict[int, dict[str, Any]], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((reward, waits), (stale, spans)) = pyplot.subplots(2, 2, figsize=(10, 6.5), layout="constrained")
    for number, (seed, result) in enumerate(results.items()):
        x, y = np.array(list(result["reward"])), np.array(list(result["reward"].values()))
        wide = max(1, len(y) // 20)
        smooth = np.convolve(y, np.ones(wide) / wide, "valid")
        reward.plot(x[: len(smooth)] + wide / 2, smooth, label=f"seed {seed}, {result['tokens_per_s']:,.0f} tokens/s")
        width, stales = 0.8 / len(results), np.array(result["stale"])
        beside = (number - (len(results) - 1) / 2) * width  # the seeds' bars stand side by side
        waits.bar(np.arange(len(result["waits"])) + beside, list(result["waits"].values()), width)
        stale.bar(np.arange(len(stales)) + beside, stales / stales.sum(), width)
        spans.plot(*zip(*result["span_mb"], strict=True))
    reward.set(xlabel="version of the weights", ylabel="share of right answers", ylim=(0, 1))
    reward.legend(frameon=False, fontsize=8)
    waits.set(ylabel="share of the time waited", ylim=(0, 1))
    waits.set_xticks(range(len(result["waits"])), list(result["waits"]), rotation=40, ha="right", fontsize=8)
    stale.set(xlabel="updates between answer and training", ylabel="share of rows")
    stale.set_xticks(range(max(len(result["stale"]) for result in results.values())))
    spans.set(xlabel="s", ylabel="span memory, MB")
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    text = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text.add_argument("--steps", type=int, default=200, help="training steps after the supervised phase (200)")
    text.add_argument("--supervised", type=int, default=200, help="steps of the supervised phase (200)")
    text.add_argument("--seeds", type=int, default=3, help="runs, one after the other (3)")
    text.add_argument("--tool", action="store_true", help="products of two digits each, with a calculator to ask")
    text.add_argument("--learners", type=int, default=2, help="ranks (2)")
    text.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints (10)")
    text.add_argument(
        "--kill-every", type=float, default=0.0, help="seconds from when all processes are up to a SIGKILL; 0: none"
    )
    text.add_argument("--timeout-s", type=float, default=3600.0, help="longest time of a run, in seconds (3600)")
    text.add_argument(
        "--folder",
        type=Path,
        help="of logs and checkpoints (runs/grpo-llm-TIME); with those of a run that was killed, continues it",
    )
    text.add_argument("--json", type=Path, help="write the figures here")
    text.add_argument("--plot", type=Path, help="draw them here (PNG)")
    chosen = text.parse_args(arguments)
    chosen.folder = (chosen.folder or Path("runs", f"grpo-llm-{time.strftime('%Y%m%d-%H%M%S')}")).resolve()
    results = {}
    for seed in range(chosen.seeds):
        results[seed] = run(seed, chosen)
        tell(seed, results[seed])
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1))
    if chosen.plot:
        draw(results, chosen.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
