"""What test_di_engine_itself.py runs with the Python of an environment that has DI-engine: `... CASE DIRECTORY`.

Each node writes what it found into DIRECTORY as JSON.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from deadlines import until
from ding.framework import Parallel, task
from ding.framework.context import OnlineRLContext
from easydict import EasyDict

from geartrain.integrations.di_engine import PEER_JOINED, PEER_LOST


def tell(directory: str, **found: Any) -> None:
    place = Path(directory) / f"node-{Parallel().node_id}"
    place.with_suffix(".new").write_text(json.dumps(found))
    place.with_suffix(".new").rename(place.with_suffix(".json"))


def meet(parallel: Any, others: int) -> None:
    """Until so many others are there and listen."""
    until(lambda: sum(bool(topics) for topics in parallel._mq._bus.peers.values()) >= others)


# --- cases ------------------------------------------------------------------------------------------------------------


def events(directory: str) -> None:
    import treetensor.torch as ttorch

    parallel = Parallel()
    if parallel.node_id == 1:
        done = threading.Event()
        parallel.on("value", lambda *args, **kwargs: parallel.emit("back", *args, **kwargs))
        parallel.on("done", done.set)
        assert done.wait(60)
        tell(directory, labels=sorted(parallel.labels))
        return
    back: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    parallel.on("back", lambda *args, **kwargs: back.append((args, kwargs)))
    meet(parallel, 1)
    grown = torch.nn.Parameter(torch.ones(3))
    context = OnlineRLContext(train_iter=7, trajectories=[ttorch.as_tensor({"obs": torch.ones(5000)})])
    tree = ttorch.as_tensor({"a": torch.arange(3), "b": {"c": torch.zeros(2, 2)}})
    config = EasyDict({"policy": {"eps": 0.1}})
    parallel.emit("value", torch.arange(100_000), 1, "text", None, grown=grown, config=config)
    until(lambda: len(back) == 1)
    parallel.emit("value", tree, context=context, model=torch.nn.Linear(40, 40).state_dict())
    until(lambda: len(back) == 2)
    (args, kwargs), (more, others) = back
    once: list[int] = []
    parallel.once("back", once.append)
    parallel.emit("value", 1)
    until(lambda: once)
    parallel.emit("value", 2)
    until(lambda: len(back) == 4)
    parallel.off("back")
    parallel.emit("value", 3)
    meanwhile = len(back)
    time.sleep(0.3)
    tell(
        directory,
        args=[torch.equal(args[0], torch.arange(100_000)), *args[1:]],
        grown=torch.equal(kwargs["grown"], grown),
        config=[type(kwargs["config"]).__name__, kwargs["config"].policy.eps],
        tree=[type(more[0]) is type(tree), bool((more[0] == tree).all())],
        context=[type(others["context"]).__name__, others["context"].train_iter],
        trajectories=float(others["context"].trajectories[0].obs.sum()),
        model=[type(others["model"]).__name__, sorted(others["model"])],
        once=once,
        after_off=len(back) - meanwhile,
        way=next(iter(parallel._mq._bus.node.connections().values())).split()[0],
        ran=type(parallel._mq).__name__,
    )
    parallel.emit("done")


def tasks(directory: str) -> None:
    """As DI-engine's own tests of a task in parallel: what is local stays, what is remote arrives once."""
    parallel = Parallel()
    got: list[str] = []
    with task.start():
        task.on("local", lambda word: got.append(f"local {word}"))
        task.on("remote", lambda word: got.append(f"remote {word}"))
        task.on("both", lambda word: got.append(f"both {word}"))
        meet(parallel, 1)
        me = parallel.node_id

        def emit(ctx: Any) -> None:
            if ctx.total_step == 0:
                task.emit("local", me, only_local=True)
                task.emit("remote", me, only_remote=True)
                task.emit("both", me)
            until(lambda: len(got) == 4)

        task.use(lambda ctx: time.sleep(0.01))
        task.use(emit)
        task.run(max_step=4)
    tell(directory, got=sorted(got), labels=sorted(task.labels))


_runs = 0


def recover(directory: str) -> None:
    """A listener of node 0's raises, and so does its main; the second run hears again."""
    global _runs
    _runs += 1
    parallel, heard = Parallel(), []
    with task.start():

        def hear(n: int) -> None:
            heard.append(n)
            if _runs == 1:
                raise ValueError("a listener's own fault")

        task.on("n", hear)
        enough = threading.Event()
        task.on("enough", lambda _: enough.set())
        if parallel.node_id == 1:
            meet(parallel, 1)
            ends = time.monotonic() + 40
            n = 0
            while not enough.wait(0.02) and time.monotonic() < ends:  # node 0's first end is a "finish" to all
                task.emit("n", n, only_remote=True)
                task.sync()
                n += 1
            tell(directory, ended=enough.is_set())
            return
        until(lambda: heard)
        if _runs == 1:
            time.sleep(0.2)
            raise RuntimeError("the first run fails")
        task.emit("enough", True, only_remote=True)
        time.sleep(0.2)
        tell(directory, runs=_runs, heard=len(heard))


def killed(directory: str) -> None:
    """Node 2 is killed while it is sent 40 MB again and again; the two others go on, and know."""
    parallel = Parallel()
    lost: list[int] = []
    words: list[Any] = []
    parallel.on(PEER_LOST, lambda node_id, reason: lost.append(node_id))
    parallel.on(PEER_JOINED, lambda node_id, reason: None)
    parallel.on("big", lambda tensor: None)
    parallel.on("word", words.append)
    meet(parallel, 2)
    if parallel.node_id == 2:
        Path(directory, "pid").write_text(str(os.getpid()))
        threading.Event().wait()
    tensor = torch.ones(10_000_000)
    began = time.monotonic()
    while not lost and time.monotonic() - began < 40:
        parallel.emit("big", tensor)
    noticed = time.monotonic() - began
    parallel.emit("word", parallel.node_id)
    until(lambda: words)
    tell(directory, lost=lost, words=words, noticed=noticed)
    time.sleep(0.5)


CASES = {"events": events, "tasks": tasks, "recover": recover, "killed": killed}

if __name__ == "__main__":
    logging.getLogger().setLevel(logging.INFO)
    case, directory, *given = sys.argv[1:]
    Parallel.runner(**{"mq_type": "geartrain", "startup_interval": 0, **json.loads(given[0])})(CASES[case], directory)
