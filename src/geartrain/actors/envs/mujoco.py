"""Gymnasium's MuJoCo tasks: Hopper-v5, HalfCheetah-v5, Walker2d-v5, InvertedPendulum-v5 and the others.

Observations are float64 vectors and actions float32 vectors. There is one agent with one reward. Episodes are truncated
after 1,000 steps.
"""

from __future__ import annotations

from typing import Any

from geartrain.actors.envs import need
from geartrain.actors.envs.adapters import SyncVectorEnv
from geartrain.errors import ArgumentError


def make(task: str, n: int = 1, **options: Any) -> SyncVectorEnv:
    """n environments of a task; `options` go to `gymnasium.make`.

    Raises:
        ArgumentError: Gymnasium does not know the task.
        MissingDependencyError: gymnasium or mujoco is not installed.
    """
    need("mujoco")
    return gymnasium_environments(task, n, **options)


def gymnasium_environments(task: str, n: int, **options: Any) -> SyncVectorEnv:
    """n environments that `gymnasium.make` makes, one after the other."""
    import warnings

    import gymnasium

    with warnings.catch_warnings():  # MuJoCo 4 deprecates a name that Gymnasium still uses
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            return SyncVectorEnv([gymnasium.make(task, disable_env_checker=True, **options) for _ in range(n)])
        except gymnasium.error.UnregisteredEnv as error:
            raise ArgumentError(f"{error}") from None


__all__ = ["make"]
