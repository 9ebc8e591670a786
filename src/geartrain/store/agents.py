"""Agent recorder: records agents that join and leave, as in PettingZoo's parallel environments.

    with store.agent_recorder(len(env.possible_agents)) as recorder:
        obs, _ = env.reset(seed=0)
        recorder.reset(obs)
        while env.agents:
            actions = {agent: policy(obs[agent]) for agent in env.agents}
            obs, rewards, terminations, truncations, _ = env.step(actions)
            recorder.step(
                obs, action=actions, reward=rewards, terminated=terminations, truncated=truncations,
            )

One episode lasts from an agent's first observation to its end. Each agent's episodes go to rows of their own;
recorder.py describes their contents.

- An agent that is observed and has no open episode starts one with that observation.
- An agent whose `terminated` or `truncated` flag is set ends its episode with that step.
- If an agent is no longer observed, its episode ends with its last recorded step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.arguments import check_type, check_unmasked, shown
from geartrain.core.keys import Keys
from geartrain.core.lifetime import Closing
from geartrain.errors import ArgumentError, CallCancelledError, FieldError, SchemaError, WaitTimeoutError
from geartrain.store.recorder import RecorderPriority, StepRecorder

#: What each agent has, by agent.
ByAgent = Mapping[Any, Any]


class AgentRecorder(Closing, RecorderPriority, elsewhere="make another one there, with store.agent_recorder(...)"):
    """Records agents that join and leave. `Store.agent_recorder` makes one. Use it from one thread at a time.

    As a context manager, leaving it ends all episodes and keeps their steps.

    Args:
        recorder: a recorder with autoreset="disabled", of as many environments as agents can be in an episode at once.

    Examples:
        >>> import numpy as np
        >>> import geartrain as gt
        >>> fields = gt.recorded_fields({"obs": gt.Field((1,), "float32"), "reward": gt.Field((), "float32")})
        >>> store = gt.Store.create(fields, max_length=10, capacity=8)
        >>> with store.agent_recorder(2) as recorder:  # an AgentRecorder
        ...     recorder.reset({"ann": np.zeros(1), "bob": np.zeros(1)})
        ...     for t, seen in enumerate(("ann bob", "ann bob", "ann cleo"), 1):  # bob ends with his second step
        ...         agents = seen.split()
        ...         keys = recorder.step(
        ...             {agent: np.full(1, t) for agent in agents},
        ...             reward=dict.fromkeys(agents, 1.0),
        ...             terminated={agent: agent == "bob" and t == 2 for agent in agents},
        ...             truncated=dict.fromkeys(agents, False),
        ...         )
        ...     sorted(recorder.agents)
        ['ann', 'cleo']
        >>> sorted(store.status()["length"].tolist())
        [3, 4]
        >>> store.close()
    """

    def __init__(self, recorder: StepRecorder) -> None:
        self._recorder = recorder
        self._lanes: dict[Hashable, int] = {}  # the environment of the recorder that each agent in an episode is
        self._ended: dict[Hashable, int] = {}  # the same of agents whose last episode has ended there
        self._completed: list[Keys] = []  # of calls that were not finished

    # --- recording --------------------------------------------------------------------------------------------

    def reset(self, obs: ByAgent, *, version: int = 0) -> Keys | None:
        """Begins an episode for each agent that has an observation. Episodes in progress are ended and kept.

        Args:
            obs: first observations by agent.
            version: version of the model that acts.

        Returns:
            Keys of the rows that this completes; None if there are none.

        Raises:
            ArgumentError: something is not a dict by agent, or there are more agents than the recorder was made for.
        """
        agents = list(_checked("obs", obs))
        if not agents:
            raise ArgumentError("an episode begins with the observation of at least one agent, found none")
        lanes = self._with_lanes({}, agents)
        first = self._stacked("obs", obs, lanes)
        keys = self._recorder.reset(first, mask=self._mask(lanes.values()), version=version)
        self._keep(keys)
        left = {agent: lane for agent, lane in self._lanes.items() if lane >= len(agents)}
        self._cut(list(left.values()))
        self._note_ended({**self._ended, **left}, lanes)
        self._lanes = lanes
        return self._all_completed()

    def step(
        self, obs: ByAgent, /, *, terminated: ByAgent, truncated: ByAgent, version: int = 0, **values: ByAgent
    ) -> Keys | None:
        """Records what `env.step` returned, each value by agent.

        If it raises, nothing was recorded and you can pass the same step again. The one exception: if the rate limiter
        does not admit the row of an agent that left, all episodes are abandoned and you must call `reset`.

        Args:
            obs: observations of the agents that are there, or left in this step.
            terminated, truncated: bool by agent.
            version: version of the model that chose the actions.
            values: action, reward and the other fields, by field and then by agent. Values of agents that arrive in
                this step are ignored.

        Returns:
            Keys of the rows that this completes; None if there are none.

        Raises:
            ArgumentError: something is not a dict by agent, or there are more agents than the recorder was made for.
            FieldError: an agent lacks a value, or there is no such field.
            SchemaError: a shape or dtype does not fit.
            StoreFullError: there is no room for the row that begins.
            WaitTimeoutError: the store's rate limiter did not admit a row in time.
            CallCancelledError: the process is stopping.
        """
        given = {"terminated": terminated, "truncated": truncated, **values}
        for what, by_agent in (("obs", obs), *given.items()):
            _checked(what, by_agent)
        acting = {agent: lane for agent, lane in self._lanes.items() if agent in obs}
        gone = {agent: lane for agent, lane in self._lanes.items() if agent not in obs}
        flags = {"terminated": terminated, "truncated": truncated}
        ended = {agent for agent in obs if any(_is_set(name, agent, flags[name]) for name in flags)}
        new = [agent for agent in obs if agent not in acting and agent not in ended]
        staying = {agent: lane for agent, lane in acting.items() if agent not in ended}
        stacked = {name: self._stacked(name, by_agent, acting) for name, by_agent in given.items()} if acting else {}
        seen = self._stacked("obs", obs, acting) if acting else None
        # The lanes of those that end now are free from the next step on.
        lanes = self._with_lanes(acting, new, [*self._ended.values(), *gone.values()])
        begun = {agent: lanes[agent] for agent in new}
        self._cut(list(gone.values()))
        for agent, lane in gone.items():
            del self._lanes[agent]
            self._ended[agent] = lane
        if begun:
            first = self._stacked("obs", obs, begun)
            self._keep(self._recorder.reset(first, mask=self._mask(begun.values()), version=version))
        if acting:
            ends = stacked.pop("terminated"), stacked.pop("truncated")
            mask = self._mask(acting.values())
            self._keep(self._recorder.record(seen, stacked, *ends, None, mask, version))
        self._lanes = {**staying, **begun}
        self._note_ended({**self._ended, **{agent: acting[agent] for agent in acting if agent in ended}}, begun)
        return self._all_completed()

    def cut(self) -> Keys | None:
        """Ends all episodes and keeps their steps. Returns keys as `step` does."""
        self._cut(range(self._recorder.n_envs))
        self._ended, self._lanes = {**self._ended, **self._lanes}, {}
        return self._all_completed()

    def discard(self, agent: Hashable) -> Keys | None:
        """Takes back an agent's episode: the one in progress, or the last one.

        `StepRecorder.discard` says what that means. If the agent is observed again, a new episode begins with that
        observation.

        Args:
            agent: the agent, as in `Keys.env`.

        Returns:
            Keys of rows that hold other episodes as well and therefore stay; None if there are none.

        Raises:
            ArgumentError: the agent is in no episode, and its last one cannot be taken back any more, because another
                agent has begun one in its place.
            LockTimeoutError: another process holds the store's lock. Call `discard` again.
        """
        try:
            lane = self._lanes.get(agent, self._ended.get(agent))
        except TypeError:  # not hashable
            lane = None
        if lane is None:
            raise ArgumentError(
                f"agent {shown(agent)} has no episode to take back; agents in an episode are {list(self._lanes)}"
            )
        keys = self._named(self._recorder.discard(lane))
        self._lanes.pop(agent, None)
        self._ended.pop(agent, None)
        return keys

    def close(self) -> None:
        """Ends all episodes and keeps their steps. Later calls raise `StoreClosedError`.

        Raises:
            WaitTimeoutError, CallCancelledError: as for `StepRecorder.close`.
        """
        self._recorder.close()
        self._ended, self._lanes = {**self._ended, **self._lanes}, {}

    @property
    def agents(self) -> list[Any]:
        """Agents that are in an episode."""
        return list(self._lanes)

    @property
    def rows(self) -> int:
        """Number of rows completed so far."""
        return self._recorder.rows

    def __exit__(self, *exc: object) -> None:
        self._recorder.__exit__(*exc)

    # --- agents and lanes -------------------------------------------------------------------------------------

    def _with_lanes(
        self, taken: Mapping[Hashable, int], new: Sequence[Hashable], last: Sequence[int] = ()
    ) -> dict[Hashable, int]:
        """The lanes that are taken, and a free one for each new agent: the lowest ones, but those of `last`, which
        have episodes that may be taken back, only when no others are free, in their order.
        """
        n, lanes = self._recorder.n_envs, dict(taken)
        if len(taken) + len(new) > n:
            raise ArgumentError(
                f"{len(taken) + len(new)} agents are in an episode at once, but the recorder was made for {n}: call "
                f"agent_recorder(agents={len(taken) + len(new)})"
            )
        used = set(taken.values())
        order = dict.fromkeys([*(lane for lane in range(n) if lane not in last), *last])
        free = (lane for lane in order if lane not in used)
        lanes.update(zip(new, free, strict=False))
        return lanes

    def _cut(self, lanes: Sequence[int]) -> None:
        if not lanes:
            return
        try:
            self._keep(self._recorder.cut(self._mask(lanes)))
        except (WaitTimeoutError, CallCancelledError):
            self._lanes, self._ended = {}, {}  # all rows were given back
            raise

    def _note_ended(self, ended: Mapping[Hashable, int], begun: Mapping[Hashable, int]) -> None:
        """Notes where agents' last episodes are, but for those of whom, or where, another one has begun."""
        taken = set(begun.values())
        self._ended = {agent: lane for agent, lane in ended.items() if agent not in begun and lane not in taken}

    def _mask(self, lanes: Any) -> NDArray[np.bool_]:
        mask = np.zeros(self._recorder.n_envs, bool)
        mask[list(lanes)] = True
        return mask

    def _keep(self, keys: Keys | None) -> None:
        if (named := self._named(keys)) is not None:
            self._completed.append(named)

    def _named(self, keys: Keys | None) -> Keys | None:
        """The keys with the agents in the place of their lanes."""
        if keys is None or keys.env is None:
            return keys
        agents = {lane: agent for by_agent in (self._ended, self._lanes) for agent, lane in by_agent.items()}
        named = np.empty(len(keys), object)
        named[:] = [agents.get(lane) for lane in keys.env.tolist()]
        return replace(keys, env=named)

    def _all_completed(self) -> Keys | None:
        if not self._completed:
            return None
        found, self._completed = self._completed, []
        return Keys.join(found)

    def _stacked(self, name: str, by_agent: ByAgent, lanes: Mapping[Hashable, int]) -> Any:
        """The values of some agents in arrays (n_envs, ...), each in its lane, dicts as they are nested."""
        missing = [agent for agent in lanes if agent not in by_agent]
        if missing:
            raise FieldError(
                f"agent {missing[0]!r} acted but has no {name!r}; agents with a value are {list(by_agent)}"
            )
        return _stack(name, {agent: by_agent[agent] for agent in lanes}, lanes, self._recorder.n_envs)


def _checked(what: str, by_agent: object) -> ByAgent:
    """Raises `ArgumentError` unless something is by agent."""
    found: ByAgent = check_type(f"{what} must be a dict by agent", by_agent, Mapping)
    return found


def _is_set(name: str, agent: Hashable, flags: ByAgent) -> bool:
    flag = np.asarray(flags.get(agent, False))
    if flag.shape != () or flag.dtype != np.bool_:
        raise SchemaError(f"{name!r} of agent {agent!r} must be a bool, found {flags[agent]!r}")
    return bool(flag)


def _parts_of(value: object) -> set[Any] | int | None:
    """The parts of a nested observation; None for an array."""
    return set(value) if isinstance(value, Mapping) else len(value) if isinstance(value, tuple) else None


def _stack(name: str, values: ByAgent, lanes: Mapping[Hashable, int], n: int) -> Any:
    some = next(iter(values.values()))
    if isinstance(some, Mapping | tuple):
        keys = list(some) if isinstance(some, Mapping) else range(len(some))
        parts: dict[str, Any] = {}
        for key in keys:
            of_part = {}
            for agent, value in values.items():
                if _parts_of(value) != _parts_of(some):
                    raise SchemaError(
                        f"{name!r} of agent {agent!r} has other parts than that of {next(iter(values))!r}"
                    )
                of_part[agent] = value[key]
            parts[str(key)] = _stack(f"{name}.{key}", of_part, lanes, n)
        return parts
    for agent, value in values.items():
        check_unmasked(f"{name!r} of agent {agent!r}", value)
    try:
        arrays = {agent: np.asarray(value) for agent, value in values.items()}
    except (TypeError, ValueError) as error:
        raise SchemaError(f"{name!r} is not an array: {error}") from None
    shape = np.shape(next(iter(arrays.values())))
    for agent, array in arrays.items():
        if array.shape != shape or array.dtype == object:
            raise SchemaError(
                f"{name!r} of agent {agent!r} is {array.dtype} {array.shape}, but that of {next(iter(arrays))!r} has "
                f"the shape {shape}"
            )
    stacked = np.zeros((n, *shape), np.result_type(*arrays.values()))
    for agent, array in arrays.items():
        stacked[lanes[agent]] = array
    return stacked


__all__ = ["AgentRecorder", "ByAgent"]
