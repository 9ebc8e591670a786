"""The robot arms of gymnasium-robotics: FetchReach-v4, FetchPush-v4, FetchSlide-v4, FetchPickAndPlace-v4, and others.

They observe a dict: "observation", "achieved_goal" and "desired_goal" (float64). These become the fields
"obs.observation", "obs.achieved_goal" and "obs.desired_goal" of a store, so hindsight relabelling can replace the
desired goal when rows are fetched. The reward of a Fetch task is 0 at the goal
and -1 elsewhere. Episodes are truncated after 50 steps.
"""

from __future__ import annotations

from typing import Any

from geartrain.actors.envs import need
from geartrain.actors.envs.adapters import SyncVectorEnv
from geartrain.actors.envs.mujoco import gymnasium_environments
from geartrain.errors import MissingDependencyError

#: gymnasium-robotics 1.4.2 runs with MuJoCo 3.3 to 3.11 and fails with 3.13 and newer, where it sets joints.
TOO_NEW = (3, 12)


def make(task: str, n: int = 1, **options: Any) -> SyncVectorEnv:
    """n robot arms; `options` go to `gymnasium.make`.

    Raises:
        ArgumentError: gymnasium-robotics does not know the task.
        MissingDependencyError: gymnasium-robotics is not installed, or MuJoCo is too new for it.
    """
    need("fetch")
    import gymnasium
    import gymnasium_robotics
    import mujoco

    found = tuple(int(part) for part in mujoco.__version__.split(".")[:2])
    if found >= TOO_NEW:
        raise MissingDependencyError(
            f"robot arms need MuJoCo below {'.'.join(map(str, TOO_NEW))}, found {mujoco.__version__}: "
            "pip install 'geartrain[fetch]'"
        )
    gymnasium.register_envs(gymnasium_robotics)
    return gymnasium_environments(task, n, **options)


__all__ = ["make"]
