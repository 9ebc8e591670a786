"""VMAS: cooperative tasks of several bodies in a plane, with all n worlds in one set of torch tensors.

Tasks are VMAS's scenarios: balance, navigation, transport, wheel, simple_spread and others. All agents of a scenario
must have observations of the same size and actions of the same size. Observations are float32 (n, agents, size).
Actions are float32 (n, agents, size) within -1 and 1. Every agent has its own reward.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.actors.envs import need
from geartrain.actors.envs.adapters import Arrays, StepResult
from geartrain.core.schema import Field
from geartrain.errors import ArgumentError


def make(task: str, n: int = 1, *, max_steps: int = 200, **options: Any) -> Vmas:
    """n worlds of a scenario.

    Args:
        task: the scenario.
        n: how many.
        max_steps: an episode is cut off after so many.
        options: for `vmas.make_env`: device, and the scenario's own, as n_agents.

    Raises:
        ArgumentError: VMAS does not know the scenario, or its agents differ.
        MissingDependencyError: vmas is not installed.
    """
    need("vmas")
    return Vmas(task, n, max_steps=max_steps, **options)


class Vmas:
    """n worlds. A world is reset when its episode ends.

    Attributes:
        n: worlds.
        agents: number of agents in each world.
        actions: size of an agent's action.
    """

    def __init__(self, task: str, n: int, *, max_steps: int, **options: Any) -> None:
        import vmas

        if task not in (known := [*vmas.scenarios, *vmas.mpe_scenarios]):
            raise ArgumentError(f"VMAS has the scenarios {', '.join(known)}; found {task!r}")
        self._world = vmas.make_env(
            scenario=task, num_envs=n, max_steps=max_steps, terminated_truncated=True, clamp_actions=True, **options
        )
        spaces = [
            (o.shape, a.shape) for o, a in zip(self._world.observation_space, self._world.action_space, strict=True)
        ]
        if len(set(spaces)) != 1 or len(spaces[0][0]) != 1:
            raise ArgumentError(f"the agents of {task!r} must observe and do vectors of the same sizes; found {spaces}")
        self.n = n
        self.agents = len(spaces)
        (self._seen,), (self.actions,) = spaces[0]

    def reset(self, seed: int) -> Arrays:
        """As `VectorEnv.reset`: (n, agents, size)."""
        return _stack(self._world.reset(seed=seed))

    def step(self, actions: Arrays) -> StepResult:
        """As `VectorEnv.step`, for actions (n, agents, size)."""
        import torch

        given = torch.from_numpy(np.ascontiguousarray(actions, dtype=np.float32)).to(self._world.device)
        observed, rewards, terminated, truncated, _ = self._world.step(list(given.unbind(1)))
        last = following = _stack(observed)
        terminated, truncated = terminated.cpu().numpy(), truncated.cpu().numpy()
        over = terminated | truncated
        if over.all():
            following = _stack(self._world.reset())
        elif over.any():
            following = last.copy()
            for number in np.flatnonzero(over):
                following[number] = _stack(self._world.reset_at(int(number)))[0]
        return StepResult(last, _stack(rewards), terminated, truncated & ~terminated, following, np.ones(self.n, bool))

    def fields(self) -> dict[str, Field]:
        """As `VectorEnv.fields`."""
        return {
            "obs": Field((self.agents, self._seen), "float32"),
            "action": Field((self.agents, self.actions), "float32"),
            "reward": Field((self.agents,), "float32"),
        }

    def close(self) -> None:
        """As `VectorEnv.close`."""


def _stack(tensors: Any) -> NDArray[Any]:
    """Of every agent's (n, ...) one array (n, agents, ...)."""
    stacked: NDArray[Any] = np.stack([each.detach().cpu().numpy() for each in tensors], axis=1)
    return stacked


__all__ = ["Vmas", "make"]
