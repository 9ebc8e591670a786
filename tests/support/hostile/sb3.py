"""Factories of Stable-Baselines3's replay buffers over a store."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import spaces

from hostile.subject import Subject, Tools, factory

BOX = spaces.Box(-1, 1, (3,), np.float32)
GOALS = spaces.Dict({"observation": BOX, "achieved_goal": BOX, "desired_goal": BOX})
ACTION = spaces.Box(-1, 1, (2,), np.float32)
ONE_THREAD = "a buffer is added to and sampled from by its learner's thread, as in Stable-Baselines3"


class Rewards:
    """The environment of a hindsight buffer, of which only rewards are asked."""

    def env_method(self, _: str, achieved: Any, *__: Any, **___: Any) -> list[Any]:
        return [np.zeros(len(achieved), np.float32)]


def add(buffer: Any, done: bool = True) -> None:
    given = np.zeros((1, 3), np.float32)
    given = dict.fromkeys(GOALS.spaces, given) if isinstance(buffer.observation_space, spaces.Dict) else given
    buffer.add(given, given, np.zeros((1, 2), np.float32), np.zeros(1), np.array([done]), [{}])


def subject(buffer: Any) -> Subject:
    for _ in range(20):
        add(buffer)
    calls: dict[str, Callable[[], object]] = {
        "add": lambda: add(buffer),
        "sample": lambda: buffer.sample(8),
        "rewards": lambda: buffer.rewards,
        "dones": lambda: np.asarray(buffer.dones),
        "pickle": lambda: len(pickle.dumps(buffer)),
        "size": buffer.size,
    }
    return Subject(calls, buffer.close, survives=frozenset({"size"}))


@factory("ReplayBuffer", one_thread=ONE_THREAD)
def replay_buffer(tools: Tools) -> Subject:
    from geartrain.integrations.sb3 import ReplayBuffer

    return subject(ReplayBuffer(100, BOX, ACTION, store=tools.name(), writers=4))


@factory("DictReplayBuffer", one_thread=ONE_THREAD)
def dict_replay_buffer(tools: Tools) -> Subject:
    from geartrain.integrations.sb3 import DictReplayBuffer

    return subject(DictReplayBuffer(100, GOALS, ACTION, store=tools.name(), writers=4))


@factory("NStepReplayBuffer", one_thread=ONE_THREAD)
def n_step_replay_buffer(tools: Tools) -> Subject:
    from geartrain.integrations.sb3 import NStepReplayBuffer

    return subject(NStepReplayBuffer(100, BOX, ACTION, store=tools.name(), writers=4))


@factory("PrioritizedReplayBuffer", one_thread=ONE_THREAD)
def prioritized_replay_buffer(tools: Tools) -> Subject:
    from geartrain.integrations.sb3 import PrioritizedReplayBuffer

    buffer = PrioritizedReplayBuffer(100, BOX, ACTION, store=tools.name(), writers=4)
    found = subject(buffer)
    batch = buffer.sample(8)
    found.calls["update_priorities"] = lambda: buffer.update_priorities(batch.keys, np.ones(8))
    return found


@factory("HerReplayBuffer", one_thread=ONE_THREAD)
def her_replay_buffer(tools: Tools) -> Subject:
    from geartrain.integrations.sb3 import HerReplayBuffer

    return subject(HerReplayBuffer(100, GOALS, ACTION, Rewards(), store=tools.name(), writers=4))
