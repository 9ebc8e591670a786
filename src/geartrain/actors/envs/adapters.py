"""Vectorised environment interface, and its adapters for Gymnasium and PettingZoo.

The interface hides two differences: Gymnasium's three autoreset modes, and PettingZoo's agents that join and leave. A
step always returns two observations. The first is the one that the action led to, even at the end of an episode. The
second is the one to act on next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from geartrain.core.schema import Field, of_field
from geartrain.errors import ArgumentError, SchemaError

#: An observation or an action of n environments: an array (n, ...), or arrays by name.
Arrays = NDArray[Any] | dict[str, NDArray[Any]]


@dataclass
class StepResult:
    """Result of one step of n environments.

    Attributes:
        obs: after the action, (n, ...); the last one of an episode that ended.
        reward: (n,) or (n, agents) float32.
        terminated: (n,) the episode ended by its own rules.
        truncated: (n,) the episode was cut off, for example by a time limit.
        next: observation to act on next; the first one of the next episode if an episode ended.
        valid: (n,) False if this was only a reset.

    Examples:
        >>> import gymnasium as gym, numpy as np
        >>> from geartrain.actors import environments_of
        >>> environments = environments_of(gym.make("CartPole-v1"))
        >>> first = environments.reset(seed=0)
        >>> environments.step(np.array([1])).reward.tolist()  # of a StepResult
        [1.0]
        >>> environments.close()
    """

    obs: Arrays
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]
    next: Arrays
    valid: NDArray[np.bool_]


class VectorEnv(Protocol):
    """Interface of n environments that are stepped together. `environments_of` adapts others to it."""

    n: int

    def reset(self, seed: int) -> Arrays:
        """Begins an episode in every environment; returns the first observations by field, (n, ...).

        Args:
            seed: the same seed gives the same episodes.
        """
        ...

    def step(self, actions: Arrays) -> StepResult:
        """Steps every environment once. Environments whose episode ends are reset.

        Args:
            actions: by field, (n, ...).
        """
        ...

    def fields(self) -> dict[str, Field]:
        """Fields of a store for these episodes: observation, action and reward of a step."""
        ...

    def close(self) -> None:
        """Closes the environments."""
        ...


def environments_of(made: Any) -> VectorEnv:
    """Adapts environments to `VectorEnv`.

    Args:
        made: a Gymnasium environment or a list of them, a Gymnasium vector environment, a PettingZoo parallel
            environment or a list of them, or an object with this interface.

    Raises:
        ArgumentError: it is none of these.
    """
    if all(hasattr(made, name) for name in ("n", "fields", "reset", "step")):
        return made  # type: ignore[no-any-return]
    if hasattr(made, "num_envs") and hasattr(made, "single_observation_space"):
        return GymnasiumVectorEnv(made)
    several = list(made) if isinstance(made, Sequence) else [made]
    if several and all(hasattr(one, "possible_agents") and hasattr(one, "step") for one in several):
        return PettingZooVectorEnv(several)
    if several and all(hasattr(one, "observation_space") and hasattr(one, "step") for one in several):
        return SyncVectorEnv(several)
    raise ArgumentError(
        "an environment is one of Gymnasium's, a list of them, a vector environment, or a parallel one of "
        f"PettingZoo's; found {type(made).__name__}"
    )


class SyncVectorEnv:
    """Gymnasium environments, stepped one after the other."""

    def __init__(self, made: Sequence[Any]) -> None:
        self._made = list(made)
        self.n = len(self._made)
        self._observed = Stacked(self._made[0].observation_space, self.n)
        self._next = Stacked(self._made[0].observation_space, self.n)

    def reset(self, seed: int) -> Arrays:
        """As `VectorEnv.reset`."""
        for number, one in enumerate(self._made):
            self._next.put(number, one.reset(seed=seed + number)[0])
        return self._next.arrays

    def step(self, actions: Arrays) -> StepResult:
        """As `VectorEnv.step`."""
        reward = np.zeros(self.n, np.float32)
        terminated, truncated = np.zeros(self.n, bool), np.zeros(self.n, bool)
        for number, one in enumerate(self._made):
            obs, reward[number], terminated[number], truncated[number], _ = one.step(_of(actions, number))
            self._observed.put(number, obs)
            if terminated[number] or truncated[number]:
                obs = one.reset()[0]
            self._next.put(number, obs)
        return StepResult(
            self._observed.arrays, reward, terminated, truncated, self._next.arrays, np.ones(self.n, bool)
        )

    def fields(self) -> dict[str, Field]:
        """As `VectorEnv.fields`."""
        one = self._made[0]
        return {
            **space_fields("obs", one.observation_space),
            **space_fields("action", one.action_space),
            "reward": Field((), "float32"),
        }

    def close(self) -> None:
        """As `VectorEnv.close`."""
        for one in self._made:
            one.close()


class GymnasiumVectorEnv:
    """A Gymnasium vector environment, in any autoreset mode."""

    def __init__(self, made: Any) -> None:
        self._made = made
        self.n = int(made.num_envs)
        mode = getattr(made, "metadata", {}).get("autoreset_mode", "NextStep")
        self._mode = str(getattr(mode, "value", mode))  # NextStep, SameStep or Disabled
        self._ended = np.zeros(self.n, bool)

    def reset(self, seed: int) -> Arrays:
        """As `VectorEnv.reset`."""
        self._ended[:] = False
        obs, _ = self._made.reset(seed=[seed + number for number in range(self.n)])
        return _copied(obs)

    def step(self, actions: Arrays) -> StepResult:
        """As `VectorEnv.step`."""
        obs, reward, terminated, truncated, info = self._made.step(actions)
        obs = _copied(obs)
        terminated, truncated = np.asarray(terminated, bool).copy(), np.asarray(truncated, bool).copy()
        valid = np.ones(self.n, bool)
        over = terminated | truncated
        last = obs
        if self._mode == "SameStep" and over.any():
            last = _replaced(obs, over, info["final_obs"])
        elif self._mode == "NextStep":
            valid = ~self._ended  # this step has reset those that had ended, and ignored their actions
            terminated &= valid
            truncated &= valid
            self._ended = over & valid
        elif self._mode == "Disabled" and over.any():
            obs = _copied(self._made.reset(options={"reset_mask": over})[0])
        return StepResult(last, np.asarray(reward, np.float32), terminated, truncated, obs, valid)

    def fields(self) -> dict[str, Field]:
        """As `VectorEnv.fields`."""
        return {
            **space_fields("obs", self._made.single_observation_space),
            **space_fields("action", self._made.single_action_space),
            "reward": Field((), "float32"),
        }

    def close(self) -> None:
        """As `VectorEnv.close`."""
        self._made.close()


class PettingZooVectorEnv:
    """PettingZoo's parallel environments: the agents become an axis, in the order of `possible_agents`.

    All agents must have the same spaces. An agent that has left observes zeros, its action is ignored, and `alive` is
    False for it. The episode ends when all agents have left. It counts as terminated if any agent was terminated.
    """

    def __init__(self, made: Sequence[Any]) -> None:
        self._made = list(made)
        self.n = len(self._made)
        self.agents = list(self._made[0].possible_agents)
        first = self.agents[0]
        self._obs = self._made[0].observation_space(first)
        self._action = self._made[0].action_space(first)
        for agent in self.agents:
            for what, space, found in (
                ("obs", self._obs, self._made[0].observation_space(agent)),
                ("action", self._action, self._made[0].action_space(agent)),
            ):
                if found != space:
                    raise ArgumentError(f"the {what} of agent {agent!r} is {found}, that of {first!r} is {space}")
        self._step_shape = (self.n, len(self.agents))

    def reset(self, seed: int) -> Arrays:
        """As `VectorEnv.reset`."""
        found = [one.reset(seed=seed + number)[0] for number, one in enumerate(self._made)]
        return np.stack([self._stack(each) for each in found])

    def step(self, actions: Arrays) -> StepResult:
        """As `VectorEnv.step`."""
        observed, following = [], []
        reward = np.zeros(self._step_shape, np.float32)
        terminated, truncated = np.zeros(self.n, bool), np.zeros(self.n, bool)
        for number, one in enumerate(self._made):
            mine = _of(actions, number)
            given = {agent: mine[at] for at, agent in enumerate(self.agents) if agent in one.agents}
            obs, rewards, ends, cuts, _ = one.step(given)
            reward[number] = [rewards.get(agent, 0.0) for agent in self.agents]
            observed.append(self._stack(obs))
            if not one.agents:
                terminated[number] = any(ends.values())
                truncated[number] = not terminated[number] and any(cuts.values())
                obs = one.reset()[0]
            following.append(self._stack(obs))
        return StepResult(np.stack(observed), reward, terminated, truncated, np.stack(following), np.ones(self.n, bool))

    def fields(self) -> dict[str, Field]:
        """As `VectorEnv.fields`."""
        agents = len(self.agents)
        return {
            **space_fields("obs", self._obs, (agents,)),
            **space_fields("action", self._action, (agents,)),
            "reward": Field((agents,), "float32"),
        }

    def close(self) -> None:
        """As `VectorEnv.close`."""
        for one in self._made:
            one.close()

    def _stack(self, obs: Mapping[str, Any]) -> NDArray[Any]:
        out = np.zeros((len(self.agents), *self._obs.shape), self._obs.dtype)
        for at, agent in enumerate(self.agents):
            if agent in obs:
                out[at] = obs[agent]
        return out


class Stacked:
    """Observation buffers of n environments."""

    def __init__(self, space: Any, n: int) -> None:
        parts = space_parts(space)
        self._single = list(parts) == [""]
        self._arrays = {name: np.zeros((n, *shape), dtype) for name, (shape, dtype) in parts.items()}

    @property
    def arrays(self) -> Arrays:
        """A copy, which later steps do not change."""
        copied = {name: array.copy() for name, array in self._arrays.items()}
        return copied[""] if self._single else copied

    def put(self, number: int, obs: Any) -> None:
        if self._single:
            self._arrays[""][number] = obs
        else:
            for name, array in self._arrays.items():
                array[number] = _at_path(obs, name)


def space_parts(space: Any, name: str = "obs") -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Shapes and dtypes of the arrays of a Gymnasium space, by dotted name; "" for a plain one.

    Args:
        name: of the space, for errors.

    Raises:
        ArgumentError: a space without a fixed shape (text, graphs, sequences).
    """
    kind = type(space).__name__
    if hasattr(space, "spaces"):
        inner: Any = space.spaces
        items = inner.items() if isinstance(inner, Mapping) else ((str(at), each) for at, each in enumerate(inner))
        parts = {}
        for key, each in items:
            for below, part in space_parts(each, f"{name}.{key}").items():
                parts[f"{key}.{below}" if below else str(key)] = part
        return parts
    if getattr(space, "shape", None) is None or getattr(space, "dtype", None) is None:
        raise ArgumentError(f"{name!r} is a {kind} space, which has no fixed shape: encode it first")
    dtype = np.dtype(space.dtype)
    return {"": (tuple(space.shape), dtype)}


def space_fields(name: str, space: Any, axes: tuple[int, ...] = ()) -> dict[str, Field]:
    """A field for every array of a space, named `name` or `name.part`.

    Raises:
        ArgumentError: as `space_parts`; SchemaError: a dtype that a store does not hold.
    """
    fields = {}
    for part, (shape, dtype) in space_parts(space, name).items():
        field = f"{name}.{part}" if part else name
        try:
            fields[field] = Field((*axes, *shape), dtype)
        except SchemaError as error:
            raise of_field(field, error) from None
    return fields


def named(name: str, arrays: Arrays) -> dict[str, NDArray[Any]]:
    """The arrays under the names that `space_fields` gives their fields."""
    if isinstance(arrays, dict):
        return {f"{name}.{part}": array for part, array in arrays.items()}
    return {name: arrays}


def _at_path(value: Any, path: str) -> Any:
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, tuple | list) else value[part]
    return value


def _of(actions: Arrays, number: int) -> Any:
    if isinstance(actions, dict):
        return {name: array[number] for name, array in actions.items()}
    one = actions[number]
    return one.item() if isinstance(one, np.generic) and one.dtype.kind in "iub" else one


def _copied(obs: Any) -> Arrays:
    """A copy of a vector environment's observation, by dotted names."""
    if isinstance(obs, Mapping | tuple):
        flat: dict[str, NDArray[Any]] = {}
        items = obs.items() if isinstance(obs, Mapping) else enumerate(obs)
        for name, each in items:
            below = _copied(each)
            flat.update({f"{name}.{k}": v for k, v in below.items()} if isinstance(below, dict) else {str(name): below})
        return flat
    return np.array(obs)


def _replaced(obs: Arrays, where: NDArray[np.bool_], final: Any) -> Arrays:
    """The observation, with the final one where an episode has ended."""

    def put(array: NDArray[Any], path: str | None) -> NDArray[Any]:
        out: NDArray[Any] = array.copy()
        for number in np.flatnonzero(where):
            out[number] = final[number] if path is None else _at_path(final[number], path)
        return out

    if isinstance(obs, dict):
        return {name: put(array, name) for name, array in obs.items()}
    return put(obs, None)


__all__ = [
    "Arrays",
    "GymnasiumVectorEnv",
    "PettingZooVectorEnv",
    "StepResult",
    "SyncVectorEnv",
    "VectorEnv",
    "environments_of",
    "named",
    "space_fields",
]
