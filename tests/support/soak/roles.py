"""Processes of the soak: the learner, the second rank of its all-reduce, actors, and those of a store with tasks."""

from __future__ import annotations

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

import grpo
import numpy as np

import geartrain as gt
from geartrain import rpc
from geartrain.collectives import Group
from geartrain.errors import GeartrainError

STORE, SECRET = "soak", b"of the soak"
FIELDS = {"obs": gt.Field((64,), "float32"), "tag": gt.Field((), "int64", per_row=True)}
STEPS, CAPACITY = 50, 2_000
GRADIENT = 20_000
#: A store with tasks: its rows in flight, and steps between two checkpoints.
TASKS, IN_FLIGHT, SAVE_EVERY = "soak-tasks", 32, 10
#: Rows are numbered up to here, and then from 0 again: float32 holds what is computed from smaller numbers.
NUMBERS = 4096


def learner(folder: Path) -> None:
    """Rank 0: serves the policy, draws batches, sums gradients. Prints its figures when it gets SIGTERM."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    asked = _Epochs()
    figures = {"batches": 0, "all_reduces": 0, "lost_ranks": 0, "calls": 0, "mixed": 0, "task_rows": 0}

    @rpc.batched(max_size=4, max_wait_us=500, stack=True)
    def policy(obs: Any) -> Any:
        figures["calls"] += len(obs)
        return obs.sum(axis=1)

    rpc.function(name="next_epoch")(asked.next)
    store = gt.Store.create(
        STORE,
        FIELDS,
        max_length=STEPS,
        capacity=CAPACITY,
        journal=folder / "journal",
        journal_sync_s=5.0,
        timeout_s=120,
    )
    with store, tasks() as tasked, rpc.Node("learner", secret=SECRET) as node:
        taught = threading.Thread(target=learn_tasks, args=(tasked, figures))
        taught.start()
        tags = np.arange(CAPACITY)  # every page of the store is there from the beginning on
        filled = np.broadcast_to((tags % 1000).astype(np.float32)[:, None, None], (CAPACITY, STEPS, 64))
        store.insert({"obs": filled, "tag": tags}, threads=1)
        (folder / "address.new").write_text(node.address)
        (folder / "address.new").rename(folder / "address")
        group: Group | None = None
        epoch = 0
        with gt.Replay(store, gt.selection.Prioritized(seed=0), batch_size=64, window=10, output="numpy") as replay:
            for batch in replay:
                if stop.is_set():
                    break
                expected = batch["tag"][:, None, None] % 1000
                figures["mixed"] += int(((batch["obs"] != expected) & batch.mask[:, :, None]).any())
                replay.update_priorities(batch.keys, np.random.default_rng(epoch).random(64) + 0.1)
                figures["batches"] += 1
                if asked.newest != epoch:
                    if group is not None:
                        group.close()
                    epoch, group = asked.newest, None
                    with contextlib.suppress(GeartrainError):
                        group = join(folder, epoch, rank=0)
                if group is not None:
                    try:
                        summed = group.all_reduce(np.full(GRADIENT, 1.0, np.float32))
                        figures["all_reduces"] += 1
                        figures["mixed"] += int((summed != 3.0).any())
                    except GeartrainError:
                        figures["lost_ranks"] += 1
                        group.close()
                        group = None
                stop.wait(0.005)
        if group is not None:
            group.close()
        figures |= {f"store_{name}": store.stats()[name] for name in ("inserted", "sampled", "reclaimed", "torn")}
        figures["journal_rows"] = 0 if store.journal is None else store.journal.rows
        problems = store.audit() + tasked.audit()
        stats = tasked.stats()
        figures |= {f"tasks_{name}": stats[name] for name in ("inserted", "set_back", "given_up")}
        tasked.close()
        taught.join()
        if (lost := stats["inserted"] - stats["given_up"] - figures["task_rows"]) > tasked.capacity:
            problems.append(f"{lost} rows of the store with tasks are lost")
    print(json.dumps({"figures": figures, "problems": problems}), flush=True)


def tasks() -> gt.Store:
    """The store with tasks."""
    store = grpo.new_store(TASKS, capacity=128, timeout_s=120)
    store.limiter.set(in_flight=IN_FLIGHT)
    return store


def learn_tasks(store: gt.Store, figures: dict[str, int]) -> None:
    """Draws the rows of the store with tasks, each of them once and whole, until the store is closed."""
    recent = collections.deque[int](maxlen=NUMBERS // 2)
    with store.expect_writers(), contextlib.suppress(GeartrainError):
        options = gt.ReplayOptions(keep="saved", timeout_s=3600)
        with gt.Replay(store, gt.selection.Fifo(), 4, output="numpy", options=options) as replay:
            for batch in replay:
                try:
                    numbers = grpo.check(batch)
                    figures["mixed"] += len(numbers) - len(set(numbers).difference(recent))
                except AssertionError:
                    numbers, figures["mixed"] = [], figures["mixed"] + 4
                recent.extend(numbers)
                figures["task_rows"] += len(numbers)
                if batch.step % SAVE_EVERY == SAVE_EVERY - 1:
                    replay.saved(batch.step)
                time.sleep(0.02)


def load(folder: Path) -> None:
    """Inserts numbered rows until it is killed."""
    with tasks() as store:
        while True:
            grpo.insert(store, [store.stats()["inserted"] % NUMBERS])


def answer(folder: Path) -> None:
    """Answers in turns until it is killed."""
    with tasks() as store:
        for claim in store.claims("answer", 4, output="numpy"):
            grpo.work(store, "answer", claim)


def judge(folder: Path) -> None:
    """All other tasks, for as long as the soak lasts."""
    with tasks() as store:

        def work(task: str) -> None:
            for claim in store.claims(task, 8, output="numpy"):
                grpo.work(store, task, claim)

        threads = [threading.Thread(target=work, args=(task,), daemon=True) for task in ("reward", "ref", "advantage")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class _Epochs:
    """Numbers of groups, given to whoever is to be the second rank of the next one."""

    def __init__(self) -> None:
        self.newest = 0

    def next(self) -> int:
        self.newest += 1
        return self.newest


def join(folder: Path, epoch: int, rank: int) -> Group:
    """The group of one epoch."""
    return Group(rank, 2, init_method=f"file://{folder}/epoch-{epoch}", name=f"epoch-{epoch}", timeout_s=20)


def second_rank(folder: Path) -> None:
    """Rank 1: sums with the learner until it is killed; a group that fails is followed by another one."""
    with _node(folder, f"rank-{os.getpid()}") as node:
        while True:
            with contextlib.suppress(GeartrainError):
                epoch = int(node.call("learner", "next_epoch", timeout_s=30))
                with join(folder, epoch, rank=1) as group:
                    while True:
                        group.all_reduce(np.full(GRADIENT, 2.0, np.float32))
            time.sleep(0.05)


def actor(folder: Path) -> None:
    """Writes episodes, whose actions the learner decides, until it is killed."""
    chosen = random.Random(os.getpid())
    with _node(folder, f"actor-{os.getpid()}") as node, gt.Store.open(STORE, timeout_s=120) as store:
        while True:
            tag = chosen.randrange(1 << 40)
            with contextlib.suppress(GeartrainError), store.row(priority=1.0, version=tag) as row:
                length = chosen.randrange(10, STEPS)
                for step in range(length):
                    row["obs"][step] = tag % 1000
                    if step % 10 == 0:
                        action = node.call("learner", "policy", row["obs"][step], timeout_s=60)
                        assert abs(float(action) - 64.0 * (tag % 1000)) < 1, "another one's answer"
                row["tag"] = tag
                row.length = length


def _node(folder: Path, name: str) -> rpc.Node:
    while not (folder / "address").exists():
        time.sleep(0.05)
    return rpc.Node(name, peers={"learner": (folder / "address").read_text()}, secret=SECRET)


if __name__ == "__main__":
    roles = {"learner": learner, "second-rank": second_rank, "actor": actor}
    roles |= {"loader": load, "answer": answer, "judge": judge}
    roles[sys.argv[1]](Path(sys.argv[2]))
