"""SMAX: JaxMARL's battles after the StarCraft multi-agent challenge, with all n battles in one compiled step.

Tasks are the maps: 3m, 8m, 2s3z, 3s5z, 5m_vs_6m, 3s_vs_5z, 25m, smacv2_5_units and JaxMARL's others. A team of agents
fights a team that a heuristic plays.

Observations have three parts. "agents" is each agent's own view, and "available" are its possible actions. "state" is
the global state for critics. The team shares one reward: the damage it does, 1 in total, and 1 more for the victory.

Compiling a map takes 10 s or more. With JAX_COMPILATION_CACHE_DIR set, JAX keeps the result for the next process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.actors.envs import need, quiet
from geartrain.actors.envs.adapters import Arrays, StepResult
from geartrain.core.schema import Field
from geartrain.errors import ArgumentError


def make(task: str, n: int = 1, **options: Any) -> Smax:
    """n battles on a map; `options` go to JaxMARL's `HeuristicEnemySMAX`.

    Raises:
        ArgumentError: JaxMARL does not know the map.
        MissingDependencyError: jaxmarl is not installed.
    """
    need("smax")
    return Smax(task, n, **options)


class Smax:
    """n battles. `reset` clears all state, so a seed repeats every episode.

    Attributes:
        n: battles.
        agents: number of agents in the team.
        actions: number of actions of an agent: north, east, south, west, stop, and one attack for each enemy.
        won: (n,) True for the battles that the last step won.
    """

    def __init__(self, task: str, n: int, **options: Any) -> None:
        import jax

        with quiet():
            from jaxmarl.environments.smax import HeuristicEnemySMAX
            from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO

        if task not in MAP_NAME_TO_SCENARIO:
            raise ArgumentError(f"SMAX has the maps {', '.join(MAP_NAME_TO_SCENARIO)}; found {task!r}")
        game = HeuristicEnemySMAX(scenario=MAP_NAME_TO_SCENARIO[task], **options)
        self.n = n
        self.agents = int(game.num_agents)
        self.actions = int(game.action_space(game.agents[0]).n)
        self.won: NDArray[np.bool_] = np.zeros(n, bool)
        self._sizes = (int(game.observation_space(game.agents[0]).shape[0]), int(game.state_size))
        self._bonus = float(game.won_battle_bonus)
        self._jax = jax
        self._key: Any = None
        self._state: Any = None
        self._first = jax.jit(jax.vmap(lambda key: _first(game, key)))
        self._after = jax.jit(jax.vmap(lambda key, state, actions: _after(game, key, state, actions)))
        self._where = jax.jit(jax.vmap(_pick))

    def reset(self, seed: int) -> Arrays:
        """As `VectorEnv.reset`: "agents" (n, agents, size), "available" (n, agents, actions), "state" (n, size)."""
        self._key, key = self._jax.random.split(self._jax.random.PRNGKey(seed))
        obs, self._state = self._first(self._jax.random.split(key, self.n))
        return _arrays(obs)

    def step(self, actions: Arrays) -> StepResult:
        """As `VectorEnv.step`, for actions (n, agents) of whole numbers."""
        self._key, step_key, reset_key = self._jax.random.split(self._key, 3)
        split = self._jax.random.split
        last, after, reward, over, fought_out = self._after(split(step_key, self.n), self._state, np.asarray(actions))
        following = last
        if np.asarray(over).any():
            following, after = self._where(over, self._first(split(reset_key, self.n)), (last, after))
        self._state = after
        reward, over, fought_out = np.asarray(reward), np.asarray(over), np.asarray(fought_out)
        self.won = over & (reward >= self._bonus)
        return StepResult(
            _arrays(last), reward, over & fought_out, over & ~fought_out, _arrays(following), np.ones(self.n, bool)
        )

    def fields(self) -> dict[str, Field]:
        """As `VectorEnv.fields`."""
        seen, state = self._sizes
        return {
            "obs.agents": Field((self.agents, seen), "float32"),
            "obs.available": Field((self.agents, self.actions), "bool"),
            "obs.state": Field((state,), "float32"),
            "action": Field((self.agents,), "int64"),
            "reward": Field((), "float32"),
        }

    def close(self) -> None:
        """As `VectorEnv.close`."""
        self._state = None


def _observe(game: Any, obs: Any, state: Any) -> dict[str, Any]:
    import jax.numpy as jnp

    possible = game.get_avail_actions(state)
    return {
        "agents": jnp.stack([obs[agent] for agent in game.agents]),
        "available": jnp.stack([possible[agent] for agent in game.agents]).astype(bool),
        "state": obs["world_state"],
    }


def _first(game: Any, key: Any) -> tuple[dict[str, Any], Any]:
    obs, state = game.reset(key)
    return _observe(game, obs, state), state


def _after(game: Any, key: Any, state: Any, actions: Any) -> tuple[Any, ...]:
    """One step of one battle. A battle is over when at most one side is left."""
    given = {agent: actions[at] for at, agent in enumerate(game.agents)}
    obs, after, rewards, dones, _ = game.step_env(key, state, given)
    living = after.state.unit_alive
    both_alive = living[: game.num_agents].any() & living[game.num_agents :].any()
    return _observe(game, obs, after), after, rewards[game.agents[0]], dones["__all__"], ~both_alive


def _pick(over: Any, new: Any, old: Any) -> Any:
    import jax

    return jax.tree.map(lambda one, other: jax.numpy.where(over, one, other), new, old)


def _arrays(obs: Any) -> Arrays:
    return {name: np.array(value) for name, value in obs.items()}  # JAX's own are read-only


__all__ = ["Smax", "make"]
