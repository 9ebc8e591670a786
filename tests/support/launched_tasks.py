"""Parts of a job whose rows pass through tasks: a loader, an async and a plain function, a learner (grpo.py)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import grpo
import numpy as np

import geartrain as gt
from geartrain import launch

STORE = {"tasks": grpo.TASKS, "capacity": 64, "span_bytes": 1 << 20, "reserve": False}


def load(context, rows):
    store = context.store()
    for number in range(rows):
        grpo.insert(store, [number])
    store.finish()


async def answer(claim):
    """Puts the rows itself, after a wait in which other claims are answered."""
    await asyncio.sleep(0.01)
    grpo.work(None, "answer", claim)


class Judge:
    """Puts by what it returns; the first process is killed within its first claim."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, claim):
        if launch.context().restart == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        numbers = [(number, item) for number in claim["id"].tolist() for item in range(grpo.ANSWERS)]
        sums = [float(grpo.answer_of(*each).sum()) * self.factor for each in numbers]
        return {"reward": np.asarray(sums, np.float32)}


def rest(claim):
    """The tasks that are left."""
    grpo.work(None, claim.task, claim)


def learn(context, rows):
    store = context.store(grpo.FIELDS, **STORE)
    drawn = []
    with context.watch(gt.Replay(store, gt.selection.Fifo(), batch_size=3, output="numpy")) as replay:
        for batch in replay:
            drawn += grpo.check(batch)
            context.report(steps=len(drawn))
    assert sorted(drawn) == list(range(rows)), drawn
    assert store.stats()["given_up"] == 0
    print("drew all")


def learn_long(context):
    context.store(grpo.FIELDS, **STORE)
    while not context.stopping:
        time.sleep(0.01)


# --- a job that goes on after crashes -------------------------------------------------------------------------------


def load_rest(context, rows):
    """Inserts what was not inserted before."""
    store = context.store()
    while (number := store.stats()["inserted"]) < rows:
        grpo.insert(store, [number])
    store.finish()


def learn_kept(context, rows, folder):
    """Notes each batch, saves every third step, and goes on from there."""
    store = context.store(grpo.FIELDS, **STORE)
    store.limiter.set(in_flight=12)
    state, record = Path(folder) / "state.json", Path(folder) / "record"
    kept = gt.ReplayOptions(keep="saved")
    with context.watch(gt.Replay(store, gt.selection.Fifo(), 3, output="numpy", options=kept)) as replay:
        if state.exists():
            replay.load_state_dict(json.loads(state.read_text()))
        for batch in replay:
            with record.open("a") as file:
                file.write(json.dumps([batch.step, grpo.check(batch)]) + "\n")
            if batch.step % 3 == 2:
                state.with_suffix(".new").write_text(json.dumps(replay.state_dict()))
                state.with_suffix(".new").rename(state)
                replay.saved(batch.step)
            context.report(steps=replay.step)
            time.sleep(0.02)
    figures = store.task_stats()
    done = {task: figures[task]["done"] for task in ("answer", "reward", "ref", "advantage")}
    print("done", json.dumps({"inserted": store.stats()["inserted"], **done}))
