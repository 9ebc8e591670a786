"""Factory of LeRobot's replay buffer over a store."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from geartrain.errors import StaleKeyError
from hostile.subject import Subject, Tools, factory


@factory("LeRobotReplayBuffer")
def lerobot_replay_buffer(tools: Tools) -> Subject:
    import torch

    from geartrain.integrations.lerobot import ReplayBuffer

    buffer = ReplayBuffer(100, "cpu", store=tools.name(), writers=4)
    state = {"observation.state": torch.zeros(3), "observation.image": torch.zeros(3, 8, 8)}

    def add() -> None:
        buffer.add(state, torch.zeros(2), 0.0, state, False, True, {"penalty": 0.5})

    for _ in range(20):
        add()
    waiting: list[Any] = []  # threads that sample ahead go on until the buffer is closed

    def prefetch() -> object:
        waiting.append(buffer.get_iterator(8))
        return next(waiting.pop())

    def read_rewards() -> None:
        # Forked children leave rows of a step each, which evict the parent's: a documented error.
        with contextlib.suppress(StaleKeyError):
            np.asarray(buffer.rewards)

    return Subject(
        {
            "add": add,
            "sample": lambda: buffer.sample(8),
            "prefetch": prefetch,
            "rewards": read_rewards,
            "size": lambda: buffer.size,
            "position": lambda: buffer.position,
        },
        buffer.close,
        survives=frozenset({"position"}),
        work=lambda: buffer.get_iterator(8),
    )
