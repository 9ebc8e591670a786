"""Factories of actors, pools, counters and what else a job is made of."""

from __future__ import annotations

import http.client
import io
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np

import geartrain as gt
from geartrain.actors import (
    Actor,
    EpisodeRecorder,
    LocalPolicy,
    RandomPolicy,
    RemotePolicy,
    RemoteRecorder,
    RemoteStore,
    StepResult,
    StoreServer,
    recorded_fields,
)
from geartrain.core.counters import CounterSlot, SharedCounters
from geartrain.core.progress import Progress
from geartrain.launch import ActorPool, Context
from geartrain.launch.metrics import COUNTS, ProcessMetrics
from geartrain.launch.prometheus import PrometheusEndpoint
from geartrain.rpc import Node, function
from geartrain.store.agents import AgentRecorder
from geartrain.store.recorder import StepRecorder
from geartrain.tools.testing import Hosts
from geartrain.weights import Publisher, Reader
from hostile.subject import NotViableError, Subject, Tools, factory

ENVIRONMENTS = {
    "obs": gt.Field((2,), "float32"),
    "action": gt.Field((), "int64"),
    "reward": gt.Field((), "float32"),
}


class Environments:
    """Two environments whose episodes have five steps."""

    n = 2

    def __init__(self) -> None:
        self._at = 0

    def reset(self, seed: int) -> Any:
        self._at = 0
        return np.zeros((2, 2), np.float32)

    def step(self, actions: Any) -> StepResult:
        self._at += 1
        over = np.full(2, self._at % 5 == 0)
        seen = np.full((2, 2), self._at % 5, np.float32)
        return StepResult(seen, np.ones(2, np.float32), over, np.zeros(2, bool), seen, np.ones(2, bool))

    def fields(self) -> dict[str, gt.Field]:
        return ENVIRONMENTS

    def close(self) -> None:
        pass


class Zeros:
    """A policy, and its space of actions."""

    version = 0

    def seed(self, seed: int) -> None:
        pass

    def sample(self) -> int:
        return 0

    def act(self, obs: Any) -> Any:
        return np.zeros(len(obs), np.int64), {}


def environments(_: object) -> Environments:
    return Environments()


def policy(_: object) -> Zeros:
    return Zeros()


def episodes(tools: Tools) -> gt.Store:
    return gt.Store.create(tools.name(), recorded_fields(ENVIRONMENTS, overlap=True), max_length=8, capacity=64)


ACTOR_ONE_THREAD = "an actor, its environments and its recorders are one thread's, as their docstrings say"


@factory(Actor, one_thread=ACTOR_ONE_THREAD)
def actor(tools: Tools) -> Subject:
    store = tools.enter(episodes(tools))
    one = Actor(Environments(), RandomPolicy(Zeros()), store)
    return Subject(
        calls={"step": one.step, "run": lambda: one.run(steps=20)},
        close=one.close,
        work=one.step,
        owned=[store],
    )


@factory(Actor, "of a store that is closed", one_thread=ACTOR_ONE_THREAD)
def actor_of_a_closed_store(tools: Tools) -> Subject:
    store = episodes(tools)
    one = Actor(Environments(), RandomPolicy(Zeros()), store)
    return Subject(calls={"run": lambda: one.run(steps=20)}, close=store.close, work=one.step)


@factory(EpisodeRecorder, one_thread=ACTOR_ONE_THREAD)
def recorder(tools: Tools) -> Subject:
    store = episodes(tools)
    one = EpisodeRecorder(store, publish_every=2)
    obs = {"obs": np.zeros(2, np.float32)}
    values = {"action": 0, "reward": 1.0}

    def begin() -> None:
        one.begin(obs)
        one.step(values, obs, terminated=False, truncated=False)

    begin()
    return Subject(
        calls={
            "begin": begin,
            "step": lambda: one.step(values, obs, terminated=True, truncated=False) or begin(),
            "discard": lambda: one.discard() or begin(),
        },
        close=store.close,
        work=begin,
    )


@factory(AgentRecorder)
def agent_recorder_of_a_closed_store(tools: Tools) -> Subject:
    return agent_recorder(tools, lambda store, one: store.close)


@factory(AgentRecorder, "closed itself", one_thread=ACTOR_ONE_THREAD)
def closed_agent_recorder(tools: Tools) -> Subject:
    return agent_recorder(tools, lambda store, one: one.close)


def agent_recorder(tools: Tools, close: Callable[[gt.Store, AgentRecorder], Callable[[], None]]) -> Subject:
    store = episodes(tools)
    one = store.agent_recorder(2, publish_every=2)
    first = {agent: np.zeros(2, np.float32) for agent in ("a", "b")}
    no, values = dict.fromkeys(first, False), {"action": dict.fromkeys(first, 0), "reward": dict.fromkeys(first, 1.0)}

    def step() -> None:
        one.reset(first)
        one.step(first, terminated=no, truncated=no, **values)

    def discard() -> None:
        one.reset(first)
        one.discard("a")

    step()
    return Subject(
        calls={
            "reset": lambda: one.reset(first),
            "step": step,
            "cut": one.cut,
            "discard": discard,
            "rows": lambda: one.rows,
            "agents": lambda: one.agents,
        },
        close=close(store, one),
        survives=frozenset({"rows", "agents"}),
        work=step,
    )


@factory(StepRecorder)
def step_recorder_of_a_closed_store(tools: Tools) -> Subject:
    return step_recorder(tools, lambda store, one: store.close)


@factory(StepRecorder, "closed itself", one_thread=ACTOR_ONE_THREAD)
def closed_step_recorder(tools: Tools) -> Subject:
    return step_recorder(tools, lambda store, one: one.close)


def step_recorder(tools: Tools, close: Callable[[gt.Store, StepRecorder], Callable[[], None]]) -> Subject:
    store = episodes(tools)
    one = store.recorder(2, autoreset="disabled", publish_every=2)
    obs, no = np.zeros((2, 2), np.float32), np.zeros(2, bool)

    def step() -> None:
        one.reset(obs)
        one.step(obs, action=np.zeros(2, np.int64), reward=np.ones(2), terminated=no, truncated=no)

    step()
    return Subject(
        calls={
            "reset": lambda: one.reset(obs),
            "step": step,
            "differing": lambda: one.differing({"reward": np.ones(2, np.float32)}),
            "cut": one.cut,
            "discard": lambda: one.discard(1),
            "rows": lambda: one.rows,
            "in_episode": lambda: one.in_episode(1),
        },
        close=close(store, one),
        survives=frozenset({"rows", "in_episode"}),
        work=step,
    )


def served(tools: Tools) -> tuple[Node, StoreServer, RemoteStore]:
    """A host's node, and the server of a store at a peer."""
    store, learner = tools.enter(episodes(tools)), tools.enter(Node("learner"))
    host = tools.enter(Node("host", peers={"learner": learner.address}))
    server = StoreServer(learner, store, "replay")
    return host, server, RemoteStore(host, "learner", "replay", timeout_s=tools.patience(10))


def two_rows() -> dict[str, Any]:
    flags = {name: np.zeros((2, 8), bool) for name in ("terminated", "last")}
    values = {"action": np.zeros((2, 8), np.int64), "reward": np.zeros((2, 8), np.float32)}
    repeats = {"geartrain.repeats": np.zeros((2, 3), np.int32)}
    return {"obs": np.zeros((2, 8, 2), np.float32), **values, **flags, **repeats}


@factory(StoreServer)
def store_server(tools: Tools) -> Subject:
    _, server, there = served(tools)
    return Subject(
        calls={"insert": lambda: there.insert(two_rows()), "repr": lambda: repr(server)},
        close=server.close,
        survives=frozenset({"repr"}),
        owned=[there],
    )


@factory(RemoteStore)
def remote_store(tools: Tools) -> Subject:
    host, server, there = served(tools)
    keys = there.insert(two_rows())
    return Subject(
        calls={
            "insert": lambda: there.insert(two_rows()),
            "fetch": lambda: there.fetch(keys, on_stale="drop", output="numpy"),
            "update_priorities": lambda: there.update_priorities(keys, np.ones(2)),
            "delete": lambda: there.delete(keys),
            "figures": lambda: (len(there), there.stats(), there.keys()),
            "recorder": lambda: there.recorder(1, autoreset="disabled"),
            "repr": lambda: repr(there),
        },
        close=host.close,
        survives=frozenset({"repr"}),
        owned=[server],
    )


@factory(RemoteRecorder, one_thread=ACTOR_ONE_THREAD)
def remote_recorder(tools: Tools) -> Subject:
    host, server, there = served(tools)
    one = there.recorder(2, autoreset="disabled")
    seen, flags = np.zeros((2, 2), np.float32), np.zeros(2, bool)

    def step() -> None:
        one.reset(seen)
        one.step(seen, action=np.zeros(2, np.int64), reward=np.zeros(2), terminated=flags, truncated=flags)

    return Subject(
        calls={"step": step, "cut": one.cut, "discard": lambda: one.discard(0), "rows": lambda: one.rows},
        close=host.close,
        survives=frozenset({"rows"}),
        work=step,
        owned=[server, there],
    )


@factory(LocalPolicy, one_thread=ACTOR_ONE_THREAD)
def local_policy(tools: Tools) -> Subject:
    name = tools.name()
    there = tools.enter(Publisher(name))
    there.publish(1, {"w": np.ones(3, np.float32)})
    reader = Reader(name)

    class Model:
        def load_state_dict(self, state: Any) -> None:
            self.state = state

    one = LocalPolicy(lambda _, obs: np.zeros(len(obs)), Model(), reader)
    return Subject(
        calls={"act": lambda: one.act(np.zeros((2, 2)))}, close=reader.close, in_child=frozenset({"act"}), owned=[there]
    )


@function(name="hostile.act")
def act(obs: Any) -> int:
    return 0


@factory(RemotePolicy)
def remote_policy(tools: Tools) -> Subject:
    agent = tools.enter(Node("agent"))
    mine = Node("actor", peers={"agent": agent.address})
    one = RemotePolicy(mine, "agent", "hostile.act")
    return Subject(calls={"act": lambda: one.act(np.zeros((2, 2)))}, close=mine.close, owned=[agent])


@factory(ActorPool)
def pool(tools: Tools) -> Subject:
    store = tools.enter(episodes(tools))
    one = ActorPool(store, environments, policy, 1)
    return Subject(
        calls={"stats": one.stats, "check": one.check},
        close=one.close,
        survives=frozenset({"stats", "check"}),
        owned=[store],
    )


@factory(Context)
def context(tools: Tools) -> Subject:
    one = Context()
    return Subject(
        calls={
            "node": one.node,
            "report": lambda: one.report(steps=1, loss=0.5),
            "stopping": lambda: one.stopping,
            "repr": lambda: repr(one),
        },
        close=lambda: one.node().close(),
        survives=frozenset({"node", "report", "stopping", "repr"}),
    )


@factory(SharedCounters)
def counters(tools: Tools) -> Subject:
    one = SharedCounters.create(tools.name(), 4, ("steps", "rows"))
    return Subject(
        calls={
            "open": lambda: SharedCounters.open(one.name).close(),
            "slot": lambda: one.slot(1).update(steps=3.0),
            "column": lambda: one.column("steps"),
        },
        close=one.close,
        survives=frozenset({"slot", "column"}),
        in_child=frozenset({"open", "slot", "column"}),
    )


@factory(CounterSlot)
def slot(tools: Tools) -> Subject:
    there = SharedCounters.create(tools.name(), 4, ("steps", "rows"))
    one = there.slot(2)
    return Subject(
        calls={"get": lambda: one["steps"], "set": lambda: one.update(rows=1.0), "dict": lambda: dict(one)},
        close=there.close,
        survives=frozenset({"get", "set", "dict"}),
        in_child=frozenset({"get", "set", "dict"}),
    )


@factory(Progress, one_thread="a progress bar is its loop's")
def progress(tools: Tools) -> Subject:
    one = Progress("rows", 10, stream=io.StringIO())
    one.__enter__()
    return Subject(
        calls={"advance": lambda: one.advance(10), "say": lambda: one.say("hello")},
        close=lambda: one.__exit__(None, None, None),
        survives=frozenset({"advance", "say"}),
    )


@factory(Progress, "on a terminal", one_thread="a progress bar is its loop's")
def progress_on_a_terminal(tools: Tools) -> Subject:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    one = Progress("rows", 10, stream=Terminal())
    one.__enter__()
    return Subject(
        calls={"advance": lambda: one.advance(10), "say": lambda: one.say("hello")},
        close=lambda: one.__exit__(None, None, None),
        survives=frozenset({"advance", "say"}),
    )


@factory(PrometheusEndpoint)
def endpoint(tools: Tools) -> Subject:
    one = PrometheusEndpoint(lambda: {"learner-0": ProcessMetrics(dict.fromkeys(COUNTS, 1.0))}, "127.0.0.1", 0)

    def read() -> None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{one.port}/metrics", timeout=tools.patience(5)).read()
        except (OSError, http.client.HTTPException):  # the latter where the answer is cut off
            raise gt.errors.TransportError("not reached") from None

    return Subject(calls={"read": read, "port": lambda: one.port}, close=one.close, survives=frozenset({"port"}))


@factory(Hosts, one_thread="namespaces are made and removed by one thread")
def hosts(tools: Tools) -> Subject:
    if (reason := Hosts.viable()) is not None:
        raise NotViableError(reason)
    one = Hosts(2)
    return Subject(
        calls={
            "address": lambda: one.address(1),
            "socket": lambda: one.socket(0).close(),
            "run": lambda: one.run(0, ["true"]),
        },
        close=one.close,
        survives=frozenset({"address", "hostname"}),
    )
