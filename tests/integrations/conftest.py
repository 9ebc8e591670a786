"""Fixtures for the tests of integrations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import exported
import imports
import numpy as np
import pytest

from geartrain.store.store import Store


@pytest.fixture
def seeded() -> None:
    """Draws are seeded from NumPy's global generator."""
    np.random.seed(0)


def refuse(monkeypatch: pytest.MonkeyPatch, classes: Iterable[type], names: Iterable[str]) -> None:
    """What these classes define themselves, by these names, raises."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("code of the stock class ran")

    wanted = set(names)
    for cls in classes:
        defined = wanted & vars(cls).keys()
        assert defined, f"{cls} has none of {sorted(wanted)}"
        for name in defined:
            monkeypatch.setattr(cls, name, refused)


@pytest.fixture
def no_stock_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the stock classes of Stable-Baselines3 make arrays, add and sample with raises."""
    stock = pytest.importorskip("stable_baselines3.common.buffers")
    her_replay_buffer = pytest.importorskip("stable_baselines3.her.her_replay_buffer")
    classes = [stock.ReplayBuffer, stock.DictReplayBuffer, stock.NStepReplayBuffer, her_replay_buffer.HerReplayBuffer]
    names = ("__init__", "add", "sample", "_get_samples", "_get_real_samples", "_get_virtual_samples", "_sample_goals")
    refuse(monkeypatch, classes, (*names, "truncate_last_trajectory", "_compute_episode_length"))
    refuse(monkeypatch, [stock.BaseBuffer], ("sample", "add", "reset"))


@pytest.fixture
def no_stock_torchrl_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrl's own storages, samplers and writers add and sample with raises."""
    samplers = pytest.importorskip("torchrl.data.replay_buffers.samplers")
    storages = pytest.importorskip("torchrl.data.replay_buffers.storages")
    writers = pytest.importorskip("torchrl.data.replay_buffers.writers")
    stored = [storages.TensorStorage, storages.LazyTensorStorage, storages.StoreStorage]
    refuse(monkeypatch, stored, ("__init__", "_init", "set", "get", "_get_new_len", "__len__", "_empty"))
    sampled = [samplers.RandomSampler, samplers.PrioritizedSampler]
    refuse(monkeypatch, sampled, ("__init__", "sample", "update_priority", "add", "extend"))
    refuse(monkeypatch, [writers.RoundRobinWriter, writers.TensorDictRoundRobinWriter], ("__init__", "add", "extend"))


@pytest.fixture
def no_stock_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrl's own slice samplers sample with raises."""
    samplers = pytest.importorskip("torchrl.data.replay_buffers.samplers")
    classes = [samplers.SliceSampler, samplers.PrioritizedSliceSampler, samplers.PrioritizedSampler]
    refuse(monkeypatch, classes, ("__init__", "sample", "_get_stop_and_length", "_get_index", "_finalize_index"))


@pytest.fixture
def store() -> Iterator[Store]:
    """A store of a dozen ragged rows of random bits, to be exported."""
    with Store.create(imports.store_name(), exported.FIELDS, max_length=7, capacity=20) as made:
        exported.fill(made, 12)
        yield made


@pytest.fixture
def run_command() -> Callable[..., Any]:
    """Runs the command line with these words, in this process."""
    pytest.importorskip("typer")
    import typer.testing

    from geartrain.tools.cli import app

    return lambda *words: typer.testing.CliRunner().invoke(app, list(words))
