"""Actor: a loop that steps environments with a policy and records the episodes in a store."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from geartrain.actors.answers import read_answer
from geartrain.actors.envs.adapters import Arrays, StepResult, VectorEnv, environments_of, named
from geartrain.actors.policy import Policy
from geartrain.actors.recorder import absent_values, check_fields
from geartrain.actors.remote_store import RemoteRecorder, RemoteStore
from geartrain.core.arguments import check_function, check_whole, optional, shown
from geartrain.errors import ArgumentError, CallCancelledError
from geartrain.store.recorder import OBSERVATIONS, StepRecorder, unfilled_fields
from geartrain.store.store import Store


@dataclass
class ActorStats:
    """Counters and times of an actor. `Actor.run` returns them.

    Attributes:
        steps: steps so far; a step of one environment counts as one.
        episodes: episodes that ended.
        rows: rows completed.
        policy_s: seconds spent in the policy.
        environment_s: seconds spent in the environments.
        store_s: seconds spent in the store, waits for the rate limiter included.
        returns: returns of the last 100 episodes; the mean over agents if there are several.
        version: version of the model that acted last.
    """

    steps: int = 0
    episodes: int = 0
    rows: int = 0
    policy_s: float = 0.0
    environment_s: float = 0.0
    store_s: float = 0.0
    version: int = 0
    returns: deque[float] = field(default_factory=lambda: deque(maxlen=100))


class Actor:
    """Steps environments with a policy and records them in a store.

    Args:
        environments: a `VectorEnv`, or anything that `environments_of` adapts.
        policy: a `Policy`: anything with a `version` and with `act(obs)`, which returns the actions, alone or
            with extras.
        store: a store of this host, or of a peer (`RemoteStore`), with the fields of the environments
            (`recorded_fields`) and one for each extra. Fields without values are zeros.
        seed: seed of the episodes; environment i gets seed + i.
        publish_every, overlap, priority: as for `Store.recorder`.

    Examples:
        >>> import gymnasium as gym
        >>> import geartrain as gt
        >>> from geartrain.actors import Actor, RandomPolicy, environments_of, recorded_fields
        >>> environments = environments_of([gym.make("CartPole-v1") for _ in range(2)])  # a VectorEnv
        >>> fields = recorded_fields(environments.fields())
        >>> store = gt.Store.create("doc-actor", fields, max_length=100, capacity=20)
        >>> actor = Actor(environments, RandomPolicy(gym.make("CartPole-v1").action_space), store, seed=0)
        >>> stats = actor.run(steps=200)  # ActorStats
        >>> stats.steps, len(store) == stats.rows
        (200, True)
        >>> actor.close(); store.close()
    """

    def __init__(
        self,
        environments: Any,
        policy: Policy,
        store: Store | RemoteStore,
        *,
        seed: int = 0,
        publish_every: int | None = None,
        overlap: int = 0,
        priority: float | None = None,
    ) -> None:
        check_whole("seed", seed, 0, 2**63 - 1)
        if not callable(getattr(policy, "act", None)) or not hasattr(policy, "version"):
            raise ArgumentError(f"a policy needs act(obs) and a version, found {shown(policy)}")
        self.environments: VectorEnv = environments_of(environments)
        self.policy = policy
        self.store = store
        self.stats = ActorStats()
        self._seed = seed
        self._options: dict[str, Any] = {"publish_every": publish_every, "overlap": overlap, "priority": priority}
        self._recorder = self._made(store)
        self._rows = 0  # of recorders before this one
        self._partial = np.zeros(self.environments.n, bool)  # a part of the episode was lost with its recorder
        self._returns = np.zeros(self.environments.n)
        self._obs: Arrays | None = None
        self._begins = np.ones(self.environments.n, bool)  # an episode begins with the current observation
        self._checked = False
        self._absent: dict[str, NDArray[Any]] = {}  # zeros, for fields that nobody gives

    def _made(self, store: Store | RemoteStore) -> StepRecorder | RemoteRecorder:
        check_fields(store)
        obs = [name for name in store.fields if name.partition(".")[0] in OBSERVATIONS]
        return store.recorder(
            self.environments.n,
            obs=obs,
            autoreset="disabled",
            zeros=unfilled_fields(store.fields),
            **self._options,
        )

    @property
    def recorder_lost(self) -> bool:
        """Whether the store's peer was lost. Continue with `record_into` and another `RemoteStore`."""
        return isinstance(self._recorder, RemoteRecorder) and self._recorder.lost

    def record_into(self, store: Store | RemoteStore) -> None:
        """Continues with another store of the same fields, or with the same one after its peer was lost.

        The environments keep their state. The rest of their episodes becomes new rows, which do not count among
        `stats.returns`. Steps that were not published are lost with the old recorder.

        Args:
            store: the store to record into.
        """
        recorder = self._made(store)
        self._rows += self._recorder.rows
        self.store, self._recorder = store, recorder
        self._begins[:] = self._partial[:] = True

    def run(
        self,
        *,
        steps: int | None = None,
        episodes: int | None = None,
        until: Callable[[], bool] | None = None,
    ) -> ActorStats:
        """Acts for a number of steps (of all environments together) or episodes, or until a condition holds.

        Episodes continue in the next call; `close` ends them. Give at least one of the three.

        Args:
            steps: steps to take from now on.
            episodes: episodes to end from now on.
            until: a function that is called after each step; True stops the run.

        Returns:
            What the actor has done since it was made.

        Raises:
            ArgumentError: no limit was given, or one is out of range.
            FieldError: the policy's extras and the store's fields differ.
            WaitTimeoutError: the store's rate limiter blocked an insert for too long.
        """
        if steps is None and episodes is None and until is None:
            raise ArgumentError("run needs an end: give steps=, episodes= or until=")
        for what, number in (("steps", steps), ("episodes", episodes)):
            optional(check_whole, what, number, 0)
        if until is not None:
            check_function("until", until)
        stats = self.stats
        last_step = None if steps is None else stats.steps + steps
        last_episode = None if episodes is None else stats.episodes + episodes
        while (
            (last_step is None or stats.steps < last_step)
            and (last_episode is None or stats.episodes < last_episode)
            and not (until is not None and until())
        ):
            self.step()
        return stats

    def step(self) -> None:
        """Takes one step of every environment."""
        began_s = time.perf_counter()
        if self._obs is None:
            self._obs = self.environments.reset(self._seed)
        obs = self._obs
        answer = read_answer(self.policy.act(obs), "the policy", self.environments.n)
        actions, values = answer.actions, {**named("action", answer.actions), **answer.extras}
        version = self.policy.version if answer.version is None else answer.version  # of the model that chose them
        if not self._checked:
            check_fields(self.store, values, self.environments.n)
            given = [*values, "reward", *self._recorder.obs]
            self._absent = absent_values(self.store, given, self.environments.n)
            self._checked = True
        asked_s = time.perf_counter()
        stepped = self.environments.step(actions)
        stepped_s = time.perf_counter()
        self._obs = stepped.next  # whether the step can be recorded or not
        self._record(obs, values, stepped, version)
        stats = self.stats
        stats.version = version
        stats.steps += int(stepped.valid.sum())
        stats.rows = self._rows + self._recorder.rows
        stats.policy_s += asked_s - began_s
        stats.environment_s += stepped_s - asked_s
        stats.store_s += time.perf_counter() - stepped_s

    def close(self) -> None:
        """Ends all episodes, keeps their steps, and closes the environments. The store stays open.

        If `limiter.stopping` is true, rows that the store's rate limiter blocks are abandoned.
        """
        with contextlib.suppress(CallCancelledError):
            self._recorder.cut()
        self.stats.rows = self._rows + self._recorder.rows
        self.environments.close()

    def _record(self, obs: Arrays, values: dict[str, NDArray[Any]], stepped: StepResult, version: int) -> None:
        name = self._recorder.obs[0].partition(".")[0]
        before, after = named(name, obs), named(name, stepped.obs)
        values = {**self._absent, **values, "reward": stepped.reward}
        rewards = stepped.reward.reshape(self.environments.n, -1).mean(1)
        begins = self._begins & stepped.valid
        if begins.any():
            self._recorder.reset(before, mask=begins, version=version)
            self._returns[begins] = 0.0
        self._recorder.step(
            after,
            terminated=stepped.terminated,
            truncated=stepped.truncated,
            mask=None if stepped.valid.all() else stepped.valid,
            version=version,
            **values,
        )
        self._returns[stepped.valid] += rewards[stepped.valid]
        ended = stepped.valid & (stepped.terminated | stepped.truncated)
        self._begins = (self._begins & ~stepped.valid) | ended
        for number in np.flatnonzero(ended):
            self.stats.episodes += 1
            if not self._partial[number]:
                self.stats.returns.append(float(self._returns[number]))
        self._partial &= ~ended


__all__ = ["Actor", "ActorStats"]
