"""Parts with several processes: claims by sixteen of them, wakes, and the example's loader, tasks and learner."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import geartrain_bench.harness.timing as harness
from geartrain.core.schema import Field
from geartrain.core.tasks import Task
from geartrain_bench.harness.fleet import Fleet
from geartrain_bench.harness.timing import Lap, System
from geartrain_bench.llm.run import CPU, PEER, WALL, Run
from geartrain_bench.llm.samples import example_tasks, insert_prompts, store_of_tasks
from geartrain_bench.llm.worker import BATCH

ARGV = [sys.executable, "-m", "geartrain_bench.llm.worker"]
CLAIM = 16
PAUSE_S = 0.001
WAKES = "put until a waiting process runs"
ANSWERS, TOKENS = 16, 20
LOOPS = ("load", "answer", "reward", "ref", "advantage", "train")
PIPELINE = "rows through the example"


def claims(run: Run) -> None:
    """Sixteen processes claim rows of the same task and release them; the peer's one client has no competitor."""
    plan = run.plan
    tasks = {"work": Task({"x": Field((), "int32")}), "train": Task(after="work")}
    members = range(plan.claimers)
    with (
        store_of_tasks(run.store_name(), tasks, plan.ready_rows, plan.ready_rows * 512) as store,
        Fleet.here(plan.claimers, ARGV) as fleet,
    ):
        insert_prompts(store, plan.ready_rows)
        fleet.ask(members, do="open", store=store.name)

        def lap(those: range) -> Lap:
            found = fleet.ask(those, do="claim", task="work", n=CLAIM, calls=plan.claims)
            made = plan.claims * len(those)
            return Lap(
                sum(one["seconds"] for one in found) / made,
                sum(one["cpu_s"] for one in found) / made,
            )

        one_process = "geartrain, one process"
        systems = [System("geartrain", lambda: lap(members)), System(one_process, lambda: lap(members[:1]), floor=True)]
        run.take_turns(f"claim {CLAIM} of {plan.ready_rows:,} rows", systems, "get_meta", unit="us")
    run.result.notes.append(
        f"claims have no floor: the ratio is to one process without competitors; {WALL} has the release as well"
    )


def wakes(run: Run) -> None:
    """Microseconds from the begin of a put until another process has the row, on a core each."""
    if len(os.sched_getaffinity(0)) < 2:
        run.result.notes.append(f"{WAKES}: there is one core")
        return
    plan = run.plan
    scalar = {"x": Field((), "int32")}
    tasks = {
        "first": Task(dict(scalar)),
        "second": Task({"y": Field((), "int32")}, after="first"),
        "train": Task(after="second"),
    }
    found: dict[str, list[Any]] = {"floor": [], "geartrain": []}
    with (
        store_of_tasks(run.store_name(), tasks, plan.wakes, 1 << 20) as store,
        Fleet.here(2, ARGV) as fleet,
        tempfile.TemporaryDirectory() as directory,
    ):
        pipe = str(Path(directory) / "pipe")
        os.mkfifo(pipe)
        fleet.ask_each({i: {"do": "open", "store": store.name, "core": i} for i in range(2)}, 60.0)
        for _ in range(plan.wake_laps):
            how: dict[str, Any] = {"wakes": plan.wakes}
            began, came = fleet.ask_each(
                {
                    0: {"do": "wake_pipe", "path": pipe, "pause_s": PAUSE_S, **how},
                    1: {"do": "wait_pipe", "path": pipe, **how},
                },
                60.0,
            )
            found["floor"].append(np.subtract(came["ns"], began["ns"]) / 1e3)
            insert_prompts(store, plan.wakes)
            began, came = fleet.ask_each(
                {
                    0: {"do": "wake", "task": "first", "pause_s": PAUSE_S, **how},
                    1: {"do": "wait", "task": "second", **how},
                },
                60.0,
            )
            found["geartrain"].append(np.subtract(came["ns"], began["ns"]) / 1e3)
    for percent in (50, 99):
        best = 0.0
        for system, laps in found.items():
            values = [float(np.percentile(one, percent)) for one in laps]
            best = best or float(np.median(values))
            run.add(f"p{percent} of {plan.wakes} wakes", system, WAKES, "us", values, best)


def example(run: Run, *, appends: bool) -> None:
    """The example's loops, a process each: rows a second through all of them, and the CPU time of each for a row."""
    laps: list[list[dict[str, Any]]] = []
    counts = [8 * BATCH] + [run.plan.pipeline_rows] * run.plan.pipeline_laps  # the first one imports what it uses
    with Fleet.here(len(LOOPS), ARGV) as fleet:
        for rows in counts:
            with store_of_tasks(run.store_name(), example_tasks(), rows, rows * 16_384) as store:
                fleet.ask(range(len(LOOPS)), do="open", store=store.name)
                how: dict[str, dict[str, Any]] = {
                    "load": {"rows": rows},
                    "answer": {"answers": ANSWERS, "tokens": TOKENS, "appends": appends},
                    "train": {"rows": rows},
                }
                requests = {i: {"do": "loop", "name": name, **how.get(name, {})} for i, name in enumerate(LOOPS)}
                laps.append(fleet.ask_each(requests, 90.0))
    del laps[0]
    rows = run.plan.pipeline_rows
    case = f"{ANSWERS} answers of {TOKENS} tokens, {'each appended' if appends else 'a put a claim'}"
    seconds = [max(one["ended_s"] for one in lap) - min(one["began_s"] for one in lap) for lap in laps]
    result = run.result
    result.rows.append(
        harness.rate_row(case, "geartrain", PIPELINE, "rows/s", seconds, rows, harness.quantiles(seconds)[0])
    )
    for i, name in enumerate(LOOPS):
        each = [lap[i]["cpu_s"] / rows for lap in laps]
        result.rows.append(
            harness.time_row(case, f"geartrain, {name}", "CPU time per row", "us", each, harness.quantiles(each)[0])
        )


__all__ = ["CPU", "PEER", "PIPELINE", "WAKES", "claims", "example", "wakes"]
