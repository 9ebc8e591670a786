"""Calls of actors, remote stores, pools and job descriptions, each with arguments that it takes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np

import hostile.tasks as tasks
from geartrain import launch, rpc
from geartrain.actors import (
    Actor,
    JobStores,
    LocalPolicy,
    RandomPolicy,
    RemotePolicy,
    RemoteStore,
    StoreServer,
)
from geartrain.launch import ActorPool
from geartrain.launch.launcher import Launcher
from hostile.jobs import Environments, Zeros, environments, episodes, policy, served, two_rows
from hostile.subject import Tools
from hostile.values import SECONDS, Door, choice, door, flag, no_names, nothing, number, path, whole

# --- actors -----------------------------------------------------------------------------------------------------------


@door("Actor", store=nothing, seed=whole(0, 2**63), priority=number(0, none=True))
def actor(tools: Tools) -> Door:
    given = {"seed": 1, "publish_every": 2, "overlap": 1, "priority": 1.0}
    return Actor, {
        "environments": Environments(),
        "policy": RandomPolicy(Zeros()),
        **given,
        "store": tools.enter(episodes(tools)),
    }


@door("Actor.run")
def actor_run(tools: Tools) -> Door:
    one = Actor(Environments(), RandomPolicy(Zeros()), tools.enter(episodes(tools)))
    return lambda steps, episodes: one.run(steps=steps, episodes=episodes, until=lambda: True), {
        "steps": 2,
        "episodes": 1,
    }


@door("LocalPolicy", refresh_every=whole(1, 10**400))
def local_policy(tools: Tools) -> Door:
    return LocalPolicy, {"act": print, "model": object(), "reader": None, "refresh_every": 1, "timeout_s": 1.0}


@door("RemotePolicy", node=nothing, timeout_s=SECONDS, retry_s=SECONDS)
def remote_policy(tools: Tools) -> Door:
    node = tools.enter(rpc.Node("one"))
    return RemotePolicy, {"node": node, "peer": "two", "function": "act", "timeout_s": 1.0, "retry_s": 0.0}


@door("StoreServer", node=nothing, store=nothing)
def store_server(tools: Tools) -> Door:
    node, store = tools.enter(rpc.Node("one")), tools.enter(episodes(tools))
    return StoreServer, {"node": node, "store": store, "name": "replay"}


def near(tools: Tools) -> RemoteStore:
    _, server, there = served(tools)
    tools.enter(server)
    return there


@door("RemoteStore", node=nothing, timeout_s=SECONDS)
def remote_store(tools: Tools) -> Door:
    host, server, _ = served(tools)
    tools.enter(server)
    tools.enter(host)

    def call(peer: Any, **rest: Any) -> None:
        RemoteStore(peer=peer if not isinstance(peer, str) or peer == "learner" else "x", **rest)

    return call, {
        "node": host,
        "peer": "learner",
        "name": "replay",
        "timeout_s": 1.0,
    }


@door("RemoteStore.insert", fields=nothing)
def remote_insert(tools: Tools) -> Door:
    given = {"lengths": None, "priorities": None, "versions": None, "casting": "no"}
    return near(tools).insert, {"fields": two_rows(), **given}


@door("RemoteStore.insert, a field")
def remote_insert_a_field(tools: Tools) -> Door:
    there = near(tools)
    return lambda reward: there.insert({**two_rows(), "reward": reward}), {"reward": two_rows()["reward"]}


@door("RemoteStore.fetch", keys=nothing, output=nothing, on_stale=nothing)
def remote_fetch(tools: Tools) -> Door:
    there = near(tools)
    given = {"fields": None, "window": 2, "ends": None, "pad": "left", "output": "numpy", "on_stale": "drop"}
    return there.fetch, {"keys": there.insert(two_rows()), **given}


@door("RemoteStore, the rest", keys=nothing)
def remote_rest(tools: Tools) -> Door:
    there = near(tools)

    def call(keys: Any, priorities: Any) -> None:
        there.update_priorities(keys, priorities)
        there.delete(keys)

    return call, {"keys": there.insert(two_rows()), "priorities": np.ones(2)}


def fields_to_read(value: Any) -> bool:
    """None, or names of no other field than the one that the task may read."""
    if value is None or no_names(value):
        return True
    many = isinstance(value, list | tuple | dict | set) or (isinstance(value, np.ndarray) and value.ndim == 1)
    return many and all(isinstance(each, str) and each == "x" for each in value)


@door("RemoteStore, with tasks", fields=fields_to_read, timeout_s=SECONDS)
def remote_claim(tools: Tools) -> Door:
    store, learner = tools.enter(tasks.new_store(tools)), tools.enter(rpc.Node("learner"))
    host = tools.enter(rpc.Node("host", peers={"learner": learner.address}))
    tools.enter(StoreServer(learner, store, "tasks"))
    there = RemoteStore(host, "learner", "tasks", timeout_s=tools.patience(10))

    def call(y: Any, fields: Any, timeout_s: Any) -> None:
        if not there.task_stats()["work"]["due"]:  # the row of a call that was refused is due again
            there.insert(tasks.rows(1))
        with there.claim("work", 1, fields=fields, output="numpy") as one:
            one.put(y=y, timeout_s=timeout_s)
            there.delete(one.keys)

    return call, {"y": [np.ones(2, np.float32)], "fields": [], "timeout_s": 1.0}


@door("RemoteStore.recorder", n_envs=whole(1, 64), max_in_flight=whole(0, 2**31), zeros=no_names)
def remote_recorder(tools: Tools) -> Door:
    given = {"obs": ["obs"], "publish_every": None, "overlap": 0, "priority": 1.0}
    return near(tools).recorder, {"n_envs": 1, **given, "autoreset": "disabled", "zeros": [], "max_in_flight": 0}


@door("RemoteRecorder.step")
def remote_step(tools: Tools) -> Door:
    one = near(tools).recorder(2, autoreset="disabled", max_in_flight=0)
    seen, no = np.zeros((2, 2), np.float32), np.zeros(2, bool)

    def call(reset: Any, mask: Any, **given: Any) -> None:
        one.reset(reset, mask=mask, version=given["version"])
        one.step(**given)

    values = {"action": np.zeros(2, np.int64), "reward": np.zeros(2, np.float32), "version": 0}
    return call, {"reset": seen, "mask": None, "obs": seen, "terminated": no, "truncated": no, **values}


@door("RemoteRecorder.discard", env=whole(0, 1))
def remote_discard(tools: Tools) -> Door:
    return near(tools).recorder(2, autoreset="disabled", max_in_flight=0).discard, {"env": 1}


@door("JobStores", stores=nothing)
def job_stores(tools: Tools) -> Door:
    return JobStores, {"stores": {"here": tools.enter(episodes(tools))}}


# --- launch -----------------------------------------------------------------------------------------------------------


@door("Role", name=choice("x", "nan"), processes=whole(1, 2**31), max_restarts=whole(0, 2**31))
def role(tools: Tools) -> Door:
    given: dict[str, Any] = {"processes": 1, "kind": "other", "args": {}, "max_restarts": 0, "threads": 1, "env": {}}
    more = {"hosts": "all", "silent_s": None, "cpus": None, "gpus": 0, "memory_gb": None}
    return launch.Role, {"name": "role", "run": "module:function", **given, **more}


@door("launch.actors")
def launch_actors(tools: Tools) -> Door:
    given = {"seed": 0, "publish_every": None, "overlap": 0, "priority": 1.0, "steps": None, "max_restarts": 10}
    return launch.actors, {"environments": "a:b", "policy": "a:b", "processes": 1, "name": "actor", **given}


@door("launch.learners")
def launch_learners(tools: Tools) -> Door:
    return launch.learners, {"run": "a:b", "processes": 1, "name": "learner", "args": {}, "max_restarts": 0}


@door("launch.agents")
def launch_agents(tools: Tools) -> Door:
    return launch.agents, {"run": "a:b", "processes": 1, "name": "agent", "max_restarts": 1}


@door("launch.reducers", processes=whole(1, 2**31), window_bytes=whole(1, 2**48))
def launch_reducers(tools: Tools) -> Door:
    return launch.reducers, {"processes": 1, "name": "reducer", "window_bytes": 1 << 20, "max_restarts": 1}


@door("Job", roles=nothing, keep_store=nothing, serve_stores=flag, trust=nothing)
def job(tools: Tools) -> Door:
    roles = [launch.learners("a:b")]
    given = {"timeout_s": 1.0, "stop_s": 1.0, "keep_store": "never", "directory": ".", "trust": "user"}
    more: dict[str, Any] = {"hosts": {}, "serve_stores": False, "shared_memory_gb": None}
    return launch.Job, {"name": "job", "roles": roles, **given, **more}


@door("launch.load", description=nothing)
def launch_load(tools: Tools) -> Door:
    description = tools.folder() / "job.toml"
    description.write_text('name = "doors"\n[role.one]\nrun = ["/bin/true"]\n')
    return launch.load, {"description": str(description)}


@door(
    "launch.run",
    job=nothing,
    folder=lambda value: value is None or path(value),
    position=choice(None),
    fresh=flag,
    every_s=number(0, above=True),
)
def launch_run(tools: Tools) -> Door:
    tools.enter(mock.patch.object(Launcher, "run", lambda self: None))  # a job of its own is for other tests
    one = launch.Job("hostile-doors", [launch.Role("one", ["/bin/true"])], stop_s=1.0, keep_store="never")
    given = {
        "position": None,
        "fresh": False,
        "live": False,
        "every_s": 10.0,
        "metrics_port": None,
        "metrics_host": "127.0.0.1",
    }
    return launch.run, {"job": one, "folder": tools.folder(), **given, "metrics_host": "127.0.0.1"}


@door("ActorPool", store=nothing, actors=whole(1, 255), max_restarts=whole(0, 2**31))
def pool(tools: Tools) -> Door:
    given = {"seed": 0, "publish_every": None, "overlap": 0, "max_restarts": 0, "threads": 1}
    tools.enter(mock.patch.object(ActorPool, "_supervise", lambda self: self._started.set()))  # nothing starts
    made = {"make_environments": environments, "make_policy": policy}
    return ActorPool, {"store": tools.enter(episodes(tools)), **made, "actors": 1, **given}
