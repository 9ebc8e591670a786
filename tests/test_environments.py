"""Environments of each family: really stepped, and what an actor records of them is what happened."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import geartrain as gt
from geartrain.actors import Actor, RandomPolicy, recorded_fields
from geartrain.errors import MissingDependencyError, SchemaError
from geartrain.integrations import environments


def test_a_name_without_a_family_is_an_error_that_lists_them():
    for name in ("Hopper-v5", "nothing/Hopper-v5", "mujoco/", ""):
        with pytest.raises(SchemaError, match="mujoco"):
            environments.make(name)
    with pytest.raises(SchemaError, match="at least 1"):
        environments.make("mujoco/Hopper-v5", 0)


@pytest.mark.parametrize("family", environments.FAMILIES)
def test_what_is_missing_is_an_error_with_the_line_that_installs_it(family, monkeypatch):
    monkeypatch.setitem(sys.modules, environments.FAMILIES[family], None)  # an import of it fails
    with pytest.raises(MissingDependencyError, match=rf"pip install 'geartrain\[{family}\]'"):
        environments.make(f"{family}/anything")


def test_hopper_episodes_are_recorded_whole(store_name):
    pytest.importorskip("mujoco", reason="MuJoCo is an extra: pip install 'geartrain[mujoco]'")
    made = environments.make("mujoco/Hopper-v5", n=3)
    import gymnasium

    space = gymnasium.make("Hopper-v5", disable_env_checker=True).action_space
    with gt.Store.create(store_name(), recorded_fields(made.fields(200), 200), capacity=50) as store:
        assert store.fields["observation"] == gt.Field((200, 11), "float64")
        actor = Actor(made, RandomPolicy(space), store, seed=3)
        stats = actor.run(episodes=6)
        assert stats.rows >= 6
        batch = gt.fetch(store, store.keys(), as_="numpy")
        assert np.isfinite(batch["observation"]).all()
        ends = batch["terminated"].sum(1)
        assert (ends == 1).all(), "a random policy falls within 200 steps, once an episode"
        actor.close()


def test_an_unknown_task_is_an_error():
    pytest.importorskip("mujoco", reason="MuJoCo is an extra: pip install 'geartrain[mujoco]'")
    with pytest.raises(SchemaError, match="Hoppper"):
        environments.make("mujoco/Hoppper-v5")
