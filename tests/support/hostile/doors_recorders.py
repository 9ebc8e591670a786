"""Calls of recorders of steps, agents and episodes, each with arguments that it takes."""

from __future__ import annotations

from typing import Any

import numpy as np

import geartrain as gt
from geartrain.actors import EpisodeRecorder, recorded_fields
from hostile.stores import CAPACITY, STEPS
from hostile.subject import Tools
from hostile.values import PRIORITY, VERSION, Door, choice, door, flag, no_names, nothing, whole

RECORDED = {
    "obs": gt.Field((2,), "float32"),
    "action": gt.Field((), "int64"),
    "reward": gt.Field((), "float32"),
}


def an_end(value: Any) -> bool:
    """One number that equals 0 or 1."""
    array = np.asarray(value)
    return array.dtype.kind in "biuf" and array.size == 1 and array.item() in (0, 1)


def recorded(tools: Tools, **options: Any) -> gt.Store:
    fields = recorded_fields(RECORDED, overlap=True, **options)
    return tools.enter(gt.Store.create(tools.name(), fields, max_length=STEPS, capacity=CAPACITY))


@door("recorded_fields", fields=lambda value: value == {}, share_rows=flag, overlap=flag)
def recorded_fields_of(tools: Tools) -> Door:
    return recorded_fields, {"fields": RECORDED, "share_rows": False, "overlap": False}


@door(
    "Store.recorder",
    n_envs=whole(1, CAPACITY),
    obs=choice(None),
    publish_every=whole(1, 2**32 - 1, none=True),
    overlap=whole(0, STEPS),
    priority=PRIORITY,
    autoreset=choice(None),
    share_rows=nothing,
    zeros=no_names,
)
def recorder(tools: Tools) -> Door:
    there = recorded(tools)
    given = {"obs": ["obs"], "publish_every": 2, "overlap": 1, "priority": 1.0, "autoreset": None}
    return there.recorder, {"n_envs": 2, **given, "share_rows": False, "zeros": []}


@door("StepRecorder.reset", obs=nothing, mask=choice(None), version=VERSION)
def reset(tools: Tools) -> Door:
    one = recorded(tools).recorder(2, autoreset="disabled")
    return one.reset, {"obs": np.zeros((2, 2), np.float32), "mask": None, "version": 0}


def a_step() -> dict[str, Any]:
    no = np.zeros(2, bool)
    given: dict[str, Any] = {"obs": np.ones((2, 2), np.float32), "terminated": no, "truncated": no}
    more = {"final_obs": None, "mask": None, "version": 0}
    return {**given, **more, "action": np.zeros(2, np.int64), "reward": np.ones(2, np.float32)}


@door("StepRecorder.step", obs=nothing, terminated=nothing, mask=choice(None), version=VERSION)
def step(tools: Tools) -> Door:
    one = recorded(tools).recorder(2, autoreset="disabled")
    one.reset(np.zeros((2, 2), np.float32))
    return one.step, a_step()


@door("StepRecorder.step, of one environment", terminated=flag, truncated=flag)
def step_of_one(tools: Tools) -> Door:
    one = recorded(tools).recorder(1, autoreset="disabled")

    def call(**given: Any) -> None:
        one.reset(np.zeros(2, np.float32))
        one.step(**given)

    values = {"action": 1, "reward": 0.5}
    return call, {"obs": np.ones(2, np.float32), "terminated": False, "truncated": False, **values}


@door("StepRecorder.step, that ends an episode")
def last_step(tools: Tools) -> Door:
    one = recorded(tools).recorder(2, autoreset="same_step")
    one.reset(np.zeros((2, 2), np.float32))
    return one.step, {**a_step(), "terminated": np.ones(2, bool), "final_obs": np.ones((2, 2), np.float32)}


@door("StepRecorder.record")
def record(tools: Tools) -> Door:
    one = recorded(tools).recorder(2, autoreset="disabled")
    one.reset(np.zeros((2, 2), np.float32))
    given = a_step()
    values = {name: given.pop(name) for name in ("action", "reward")}
    return one.record, {**given, "values": values}


@door("StepRecorder.differing")
def differing(tools: Tools) -> Door:
    one = recorded(tools).recorder(2, autoreset="disabled")
    one.reset(np.zeros((2, 2), np.float32))
    one.step(**a_step())
    return one.differing, {"values": {"action": np.zeros(2, np.int64), "reward": np.zeros(2, np.float32)}}


@door("StepRecorder, the rest", mask=choice(None), env=whole(0, 1), priority=PRIORITY)
def recorder_rest(tools: Tools) -> Door:
    one = recorded(tools).recorder(2, autoreset="disabled")

    def call(mask: Any, env: Any, priority: Any) -> None:
        one.reset(np.zeros((2, 2), np.float32))
        one.in_episode(env)
        one.priority = priority
        one.step(**a_step())
        one.discard(env)
        one.cut(mask)

    return call, {"mask": None, "env": 1, "priority": 1.0}


@door("Store.agent_recorder")
def agent_recorder(tools: Tools) -> Door:
    there = recorded(tools)
    given = {"obs": ["obs"], "publish_every": 2, "overlap": 1, "priority": 1.0}
    return there.agent_recorder, {"agents": 2, **given, "share_rows": False}


@door("AgentRecorder.step")
def agents_step(tools: Tools) -> Door:
    one = recorded(tools).agent_recorder(2)
    first = {agent: np.zeros(2, np.float32) for agent in ("a", "b")}

    def call(reset: Any, obs: Any, **given: Any) -> None:
        one.reset(reset, version=given["version"])
        one.step(obs, **given)

    no = dict.fromkeys(first, False)
    values = {"action": dict.fromkeys(first, 0), "reward": dict.fromkeys(first, 1.0), "version": 0}
    return call, {"reset": first, "obs": first, "terminated": no, "truncated": no, **values}


@door("AgentRecorder.discard", agent=choice("a"))
def agents_discard(tools: Tools) -> Door:
    one = recorded(tools).agent_recorder(2)

    def call(agent: Any) -> None:
        one.reset({"a": np.zeros(2, np.float32)})
        one.discard(agent)

    return call, {"agent": "a"}


@door("AgentRecorder.step, of one agent", terminated=flag)
def one_agents_step(tools: Tools) -> Door:
    one = recorded(tools).agent_recorder(2)

    def call(first: Any, obs: Any, terminated: Any, action: Any, reward: Any) -> None:
        one.reset({"a": first})
        flags = {"terminated": {"a": terminated}, "truncated": {"a": False}}
        one.step({"a": obs}, **flags, action={"a": action}, reward={"a": reward})

    seen = np.zeros(2, np.float32)
    return call, {"first": seen, "obs": seen, "terminated": False, "action": 1, "reward": 0.5}


@door("EpisodeRecorder", store=nothing, priority=PRIORITY)
def episode_recorder(tools: Tools) -> Door:
    return EpisodeRecorder, {"store": recorded(tools), "publish_every": 2, "overlap": 1, "priority": 1.0}


@door("EpisodeRecorder.step", begin=nothing, obs=nothing, terminated=an_end, truncated=an_end, version=VERSION)
def episode_step(tools: Tools) -> Door:
    one = EpisodeRecorder(recorded(tools))
    first = {"obs": np.zeros(2, np.float32)}

    def call(begin: Any, at: Any, **given: Any) -> None:
        one.begin(begin, given["version"], index=at)
        one.step(**given)

    given = {"values": {"action": 1, "reward": 0.5}, "obs": first, "terminated": False, "truncated": False}
    return call, {"begin": first, "at": None, **given, "version": 0, "index": None}


@door("EpisodeRecorder.step, its values")
def episode_values(tools: Tools) -> Door:
    one = EpisodeRecorder(recorded(tools))
    first = {"obs": np.zeros(2, np.float32)}

    def call(first_obs: Any, obs: Any, action: Any, reward: Any) -> None:
        one.begin({"obs": first_obs})
        one.step({"action": action, "reward": reward}, {"obs": obs}, terminated=False, truncated=False)

    return call, {"first_obs": first["obs"], "obs": first["obs"], "action": 1, "reward": 0.5}
