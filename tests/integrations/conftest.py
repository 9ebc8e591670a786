"""Fixtures for the tests of integrations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


@pytest.fixture
def seeded() -> None:
    """Draws are seeded from NumPy's global generator."""
    np.random.seed(0)


@pytest.fixture
def no_stock_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the stock classes make arrays, add and sample with raises."""
    stock = pytest.importorskip("stable_baselines3.common.buffers")
    her_replay_buffer = pytest.importorskip("stable_baselines3.her.her_replay_buffer")
    classes = [stock.ReplayBuffer, stock.DictReplayBuffer, stock.NStepReplayBuffer, her_replay_buffer.HerReplayBuffer]
    names = ("__init__", "add", "sample", "_get_samples", "_get_real_samples", "_get_virtual_samples", "_sample_goals")

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("code of the stock class ran")

    for cls in classes:
        for name in (*names, "truncate_last_trajectory", "_compute_episode_length"):
            if name in vars(cls):
                monkeypatch.setattr(cls, name, refused)
    for name in ("sample", "add", "reset"):
        monkeypatch.setattr(stock.BaseBuffer, name, refused)
