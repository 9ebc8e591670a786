"""pytest plug-in: LeRobot's replay buffer and what stands beside it are geartrain's, wherever its modules name them.

Whatever adds, samples and converts in the stock class raises, so that a test which passes has not used it. Each case
tells in the report how many of geartrain's buffers it has made, and how often it has called its functions
("substituted"): one that did neither says nothing about ours.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import pytest
import substitutions
from lerobot.rl import buffer

from geartrain.integrations import lerobot as ours


def counted(call: Any) -> Any:
    """The function, which is counted."""

    @functools.wraps(call)
    def called(*arguments: Any, **names: Any) -> Any:
        substitutions.count += 1
        return call(*arguments, **names)

    return called


def refuse_stock_code() -> None:
    """Makes whatever the stock class does raise."""

    def refusal(name: str) -> Any:
        def refused(*_: Any, **__: Any) -> None:
            raise AssertionError(f"{name} of the stock class ran")

        return refused

    for name, value in list(vars(buffer.ReplayBuffer).items()):
        if callable(value) or isinstance(value, (classmethod, staticmethod)):
            setattr(buffer.ReplayBuffer, name, refusal(name))


def substitute() -> None:
    """Puts geartrain's class and functions wherever a module of LeRobot's names the stock ones."""
    ours.LeRobotReplayBuffer.__init__ = counted(ours.LeRobotReplayBuffer.__init__)
    functions = ("random_shift", "random_crop_vectorized", "concatenate_batch_transitions")
    stand_ins = {getattr(buffer, name): counted(getattr(ours, name)) for name in functions}
    stand_ins[buffer.ReplayBuffer] = ours.ReplayBuffer
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "lerobot"]:
        for name, value in list(vars(module).items()):
            if callable(value) and value.__hash__ is not None and value in stand_ins:
                setattr(module, name, stand_ins[value])


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(substitutions.Hooks("buffer"))
    refuse_stock_code()
    substitute()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(
        f"substituted: {substitutions.count} buffers and calls were geartrain's, LeRobot from "
        f"{buffer.__file__.partition('/rl/')[0]}"
    )
