"""pytest plug-in: Stable-Baselines3's replay buffers are geartrain's, wherever its modules name them.

What the stock classes add and sample with raises, so that a test which passes has not used it. The report says how many
buffers were made.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import stable_baselines3
from stable_baselines3.common import buffers
from stable_baselines3.her import her_replay_buffer

from geartrain.integrations import sb3 as ours

STOCK = {
    name: getattr(her_replay_buffer if name.startswith("Her") else buffers, name)
    for name in ("ReplayBuffer", "DictReplayBuffer", "NStepReplayBuffer", "HerReplayBuffer")
}
REFUSED = ("__init__", "add", "sample", "_get_samples", "_get_real_samples", "_get_virtual_samples", "_sample_goals")
made = 0


def refuse_stock_code() -> None:
    """Makes whatever adds and samples in the stock classes raise."""

    def refusal(name: str) -> Any:
        def refused(*_: Any, **__: Any) -> None:
            raise AssertionError(f"{name} of the stock class ran")

        return refused

    for cls in STOCK.values():
        for name in REFUSED:
            if name in vars(cls):
                setattr(cls, name, refusal(f"{cls.__name__}.{name}"))
    buffers.BaseBuffer.sample = refusal("BaseBuffer.sample")


def substitute() -> None:
    """Puts geartrain's classes wherever a module of Stable-Baselines3 names a stock one."""
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "stable_baselines3"]:
        for name, value in list(vars(module).items()):
            for stock in STOCK.values():
                if value is stock:
                    setattr(module, name, getattr(ours, stock.__name__))


def pytest_configure(config: pytest.Config) -> None:
    refuse_stock_code()
    substitute()
    opened = ours.ReplayBuffer._open

    def counted(self: Any, store: Any) -> None:
        global made
        made += 1
        opened(self, store)

    ours.ReplayBuffer._open = counted


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(
        f"substituted: {made} replay buffers of geartrain's were made, "
        f"Stable-Baselines3 {stable_baselines3.__version__} from {stable_baselines3.__path__[0]}"
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    if made == 0 and session.testscollected:
        session.exitstatus = 1
        raise AssertionError("no buffer of geartrain's was made: nothing was substituted")
