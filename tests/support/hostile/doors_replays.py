"""Calls of fetch, replays, views, placements and checkpoints of a job, each with arguments that it takes."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
from replay_calls import replay_of

import geartrain as gt
from geartrain.selection import (
    Candidates,
    Epochs,
    Fifo,
    GroupSampling,
    Lifo,
    Limits,
    Linear,
    Mixture,
    Prioritized,
    TopK,
    Uniform,
)
from geartrain.tools.testing import SimulatedDevice
from hostile.doors_recorders import recorded
from hostile.stores import STEPS, new_store
from hostile.subject import Tools
from hostile.values import SECONDS, Door, choice, door, flag, nothing, number, one_or_array, path, whole

FIELDS = choice(None, "x")


@door(
    "fetch",
    store=nothing,
    keys=nothing,
    window=whole(1, 2**31 - 1, none=True),
    ends=one_or_array(nothing, 2),
    pad=choice(),
    output=choice(),
    threads=whole(1, 4096, none=True),
    on_stale=choice(),
)
def fetch(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))
    given = {"fields": None, "window": 2, "ends": None, "starts": None, "pad": "left", "output": "numpy"}
    return gt.fetch, {"store": there, "keys": there.keys()[:2], **given, "out": None, "threads": 1, "on_stale": "raise"}


@door("fetch, of several stores", store=nothing, keys=nothing)
def fetch_several(tools: Tools) -> Door:
    stores = [tools.enter(new_store(tools)) for _ in range(2)]
    keys = stores[0].keys()[:2] + stores[1].keys()[:2]
    return gt.fetch, {"store": stores, "keys": keys, "output": "numpy", "threads": 1}


@door("fetch, into an array")
def fetch_into(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))
    keys = there.keys()[:2]

    def call(x: Any) -> None:
        gt.fetch(there, keys, fields=["x"], output="numpy", threads=1, out={"x": x})

    return call, {"x": np.zeros((2, STEPS, 4), np.float32)}


@door("Replay", store=nothing, selection=nothing, group=choice(None), mesh=choice(None))
def replay(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))
    direct = {name: each.default for name, each in inspect.signature(gt.Replay).parameters.items()}
    given = {**direct, **vars(gt.ReplayOptions()), **vars(gt.RankOptions())}
    given |= {"batch_size": 2, "output": "numpy", "threads": 1, "prefetch": 0, "timeout_s": 1.0}
    del given["options"]
    return replay_of, {**given, "store": there, "selection": Uniform(seed=1)}


@door("Replay, what it is asked")
def replay_calls(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))
    one = tools.enter(replay_of(there, Prioritized(seed=1), 2, output="numpy", threads=1, prefetch=0))
    keys, state = one.sample().keys, one.state_dict()

    def call(keys: Any, priorities: Any, state: Any) -> None:
        one.update_priorities(keys, priorities)
        one.load_state_dict(state)

    return call, {"keys": keys, "priorities": [1.0, 2.0], "state": state}


@door("Windows")
def windows(tools: Tools) -> Door:
    return gt.Windows, {"length": 2, "at": "any", "anchor": "last", "stride": 1, "whole": False}


@door("Windows, offsets")
def windows_with_offsets(tools: Tools) -> Door:
    return lambda steps: gt.Windows(offsets={"x": steps}), {"steps": [0, 2]}


@door("Windows, what a function returns")
def windows_at(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    def call(at: Any) -> None:
        replay_of(
            there, Uniform(seed=1), 2, window=gt.Windows(2, at=lambda *_: at), output="numpy", threads=1, prefetch=0
        ).sample()

    return call, {"at": np.array([1, 2])}


@door("Transitions", n_step=whole(1, 2**31), gamma=number(0, most=1), frame_stack=whole(1, 2**31))
def transitions(tools: Tools) -> Door:
    there = recorded(tools)

    def call(**arguments: Any) -> None:
        view = gt.Transitions(**arguments)
        replay_of(there, Uniform(seed=1, over="steps"), 2, view=view, output="numpy", threads=1).close()

    return call, {"n_step": 1, "gamma": 0.9, "frame_stack": 1, "obs": None, "hindsight": None}


@door("Hindsight", k=whole(0, 2**31 - 1))
def hindsight(tools: Tools) -> Door:
    given = {"terminated": None, "achieved_goal": None, "desired_goal": None}
    return gt.Hindsight, {"strategy": "future", "k": 4, "reward": print, **given}


@door("Cost", per_item=whole(0, 2**31 - 1), per_square=whole(0, 2**31 - 1))
def cost(tools: Tools) -> Door:
    return gt.Cost, {"axis": "tokens", "per_item": 1, "per_square": 1}


@door("Epochs", drop_last=flag)
def epochs(tools: Tools) -> Door:
    return Epochs, {}


@door("Uniform.select")
def select(tools: Tools) -> Door:
    one = Candidates([1, 2, 3])
    return Uniform(seed=1).select, {"candidates": one, "n": 2, "step": 0}


@door("Candidates")
def candidates(tools: Tools) -> Door:
    return Candidates, {"priorities": [1, 2, 3], "columns": None}


@door("strategies")
def strategies(tools: Tools) -> Door:
    def call(**given: Any) -> None:
        TopK(seed=given["seed"]), Fifo(limits=given["limits"]), Lifo(seed=given["seed"])
        GroupSampling(given["by"], given["size"], attempt=given["attempt"])
        Linear(given["start"], 1.0, 10), Limits(given["version"])
        Mixture(given["shares"], [Uniform(), Uniform()])

    given = {"seed": 1, "limits": None, "by": "tag", "size": 3, "start": 0.5, "version": None, "shares": [1, 1]}
    return call, {**given, "attempt": "try"}


@door("Batch")
def batch(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))
    one = gt.fetch(there, there.keys()[:2], output="numpy", threads=1)

    def call(name: Any, inside: Any) -> None:
        one[name]
        assert (inside in one) in (True, False)

    return call, {"name": "x", "inside": "x"}


@door("Batch.to", device=choice("cpu"), non_blocking=flag)
def batch_to(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))
    return gt.fetch(there, there.keys()[:2], threads=1).to, {"device": "cpu", "non_blocking": False}


@door(
    "DeviceOptions",
    path=choice(),
    select=choice(),
    packed=flag,
    pin_limit_bytes=whole(0, 10**400, none=True),
    crossover_bytes=whole(0, 10**400, none=True),
    exchange=choice(),
)
def device_options(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))

    def call(**arguments: Any) -> None:
        replay_of(there, Uniform(seed=1), 2, device=gt.DeviceOptions(**arguments), threads=1).close()

    given = {"path": "staged", "select": "host", "convert": {}, "packed": False, "exchange": "host"}
    return call, {"device": SimulatedDevice(), **given, "pin_limit_bytes": None, "crossover_bytes": None}


@door("Convert", dtype=choice(), scale=number(-1e39), shift=number(-1e39))
def convert(tools: Tools) -> Door:
    from geartrain.replay.device import Convert

    there = tools.enter(new_store(tools))

    def call(**arguments: Any) -> None:
        options = gt.DeviceOptions(SimulatedDevice(), path="staged", convert={"x": Convert(**arguments)})
        replay_of(there, Uniform(seed=1), 2, device=options, threads=1).close()

    return call, {"dtype": "bfloat16", "scale": 1.0, "shift": 0.0}


@door("Placement", store=nothing, by=nothing, timeout_s=SECONDS, group=choice(None), mesh=choice(None))
def placement(tools: Tools) -> Door:
    given = {"group": None, "mesh": None, "inputs": None, "targets": None, "window": None, "by": "priority"}
    return gt.Placement, {"store": tools.enter(new_store(tools)), **given, "timeout_s": 1.0}


@door("Placement.deal", priorities=lambda value: len(value) in (0, 1, 2, 3) and not isinstance(value, str))
def deal(tools: Tools) -> Door:
    one = tools.enter(gt.Placement(tools.enter(new_store(tools))))

    def call(priorities: Any) -> None:
        one.deal(priorities)
        one.mine(priorities)

    return call, {"priorities": [1.0, 2.0]}


@door("Placement.report", batch_size=whole(1, 2**31 - 1, none=True), replay=choice(None))
def report(tools: Tools) -> Door:
    one = tools.enter(gt.Placement(tools.enter(new_store(tools))))
    return one.report, {"replay": None, "batch_size": 4}


@door("Placement.rebalance", tolerance=number(0), max_bytes=whole(0, 10**400, none=True), progress=flag)
def rebalance(tools: Tools) -> Door:
    one = tools.enter(gt.Placement(tools.enter(new_store(tools))))
    return one.rebalance, {"tolerance": 0.05, "max_bytes": None, "progress": False}


@door(
    "save_checkpoint",
    store=nothing,
    directory=path,
    group=choice(None),
    step=whole(0, 10**18),
    keep=whole(1, 10**400),
    timeout_s=SECONDS,
    progress=flag,
)
def save_checkpoint(tools: Tools) -> Door:
    there = tools.enter(new_store(tools))
    folder, numbers = tools.folder(), itertools.count()

    def call(directory: Any, **rest: Any) -> None:
        gt.save_checkpoint(directory=folder / str(next(numbers)) if directory is folder else directory, **rest)

    given = {"group": None, "step": 1, "shard": None, "state": {"seed": 1}, "keep": 2, "companions": ()}
    return call, {"store": there, "directory": folder, **given, "timeout_s": 5.0, "progress": False}


@door(
    "load_checkpoint",
    directory=nothing,
    name=path,
    group=choice(None),
    reshard=flag,
    adopt=flag,
    timeout_s=SECONDS,
    progress=flag,
)
def load_checkpoint(tools: Tools) -> Door:
    folder = tools.folder()
    with new_store(tools) as there:
        gt.save_checkpoint(there, folder, step=1)

    def call(**arguments: Any) -> None:
        made, _, _ = gt.load_checkpoint(**arguments)
        made.unlink()
        made.close()

    given = {"group": None, "shard": None, "step": None, "reshard": False, "together": None, "capacity": None}
    more = {"part": 0, "adopt": False, "timeout_s": 5.0, "progress": False, "persist": None, "reserve": False}
    return call, {"directory": folder, "name": tools.name(), **given, **more}


@door("load_checkpoint, resharded", together=choice(None))
def load_resharded(tools: Tools) -> Door:
    # Without `capacity`: 2**31 rows are allowed, and what is kept of each fills the memory of a small machine.
    folder = tools.folder()
    with new_store(tools) as there:
        gt.save_checkpoint(there, folder, step=1)

    def call(**arguments: Any) -> None:
        made, _, _ = gt.load_checkpoint(**arguments)
        made.unlink()
        made.close()

    given = {"reshard": True, "together": "tag", "part": 0, "reserve": False}
    return call, {"directory": folder, "name": tools.name(), **given}
