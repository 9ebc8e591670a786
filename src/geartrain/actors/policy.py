"""Policies of actors: random, local with the trainer's newest weights, or remote inference by RPC."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from geartrain.actors.answers import join_answers, read_answer
from geartrain.actors.envs.adapters import Arrays
from geartrain.core.arguments import check_calls, check_function, check_text, check_whole, shown, timeout
from geartrain.errors import ArgumentError, PeerLostError, TransportError, WaitTimeoutError

if TYPE_CHECKING:
    from geartrain.rpc import Node

#: Actions, and extras to record with the step: log probabilities, values.
Acted = tuple[Arrays, dict[str, NDArray[Any]]]
#: Pause between calls to an agent that was lost.
_RETRY_EVERY_S = 0.1


class Policy(Protocol):
    """Interface of a policy: it chooses actions for n environments at once.

    Attributes:
        version: version of the model that acts, unless its answers say.
    """

    version: int

    def act(self, obs: Arrays) -> Any:
        """Actions for n environments, alone or with extras: an answer (geartrain/actors/answers.py).

        Args:
            obs: by field, (n, ...).
        """
        ...


class RandomPolicy:
    """A policy that samples from the action space, for the beginning of a run.

    Args:
        action_space: of one environment.
        seed: seed of the actions.

    Examples:
        >>> import gymnasium as gym, numpy as np
        >>> policy = RandomPolicy(gym.spaces.Discrete(2), seed=0)  # a Policy
        >>> policy.act({"obs": np.zeros((4, 3))})[0].shape
        (4,)
    """

    version = 0

    def __init__(self, action_space: Any, seed: int = 0) -> None:
        self._space = action_space
        self._space.seed(seed)

    def act(self, obs: Arrays) -> Acted:
        """Random actions, (n, ...), without extras.

        Args:
            obs: by field, (n, ...); only n counts.
        """
        answer = join_answers([{"action": self._space.sample()} for _ in range(_rows(obs))], "the action space")
        return answer.actions, {}


class LocalPolicy:
    """A model in the actor's own process, which loads the trainer's newest weights.

    Args:
        act: function `act(model, obs)` that returns an answer for n environments: the actions, alone or with
            extras (geartrain/actors/answers.py).
        model: a torch module, or anything with `load_state_dict`.
        reader: a `geartrain.weights.Reader`. None for a model that does not change.
        refresh_every: check for a newer version every this many calls. A check costs a microsecond.
        timeout_s: longest wait for the first version, in seconds.

    Examples:
        >>> import torch
        >>> policy = LocalPolicy(lambda model, seen: model(seen["obs"]).argmax(-1), torch.nn.Linear(3, 2))
        >>> policy.act({"obs": torch.zeros(4, 3)})[0].shape
        (4,)
    """

    def __init__(
        self,
        act: Callable[[Any, Arrays], Any],
        model: Any,
        reader: Any = None,
        *,
        refresh_every: int = 1,
        timeout_s: float = 60.0,
    ) -> None:
        check_function("act", act)
        check_whole("refresh_every", refresh_every, 1)
        timeout(timeout_s)
        if reader is not None and not callable(getattr(reader, "latest", None)):
            raise ArgumentError(f"reader is a geartrain.weights.Reader, or None; found {shown(reader)}")
        self._act, self._model, self._reader = act, model, reader
        self._every = refresh_every
        self._calls = 0
        self.version = 0
        if reader is not None:
            self._load(reader.latest(timeout_s=timeout_s))

    def act(self, obs: Arrays) -> Acted:
        """Actions and extras for n environments, (n, ...) each.

        Args:
            obs: by field, (n, ...).

        Raises:
            ArgumentError: the function returned something that is not an answer.
        """
        self._calls += 1
        if self._reader is not None and self._calls % self._every == 0:
            newest = self._reader.version
            if newest is not None and newest != self.version:
                with suppress(WaitTimeoutError):  # it is being replaced: the next check finds it
                    self._load(self._reader.latest(timeout_s=0.0))
        answer = read_answer(self._act(self._model, obs), "the function of a LocalPolicy", _rows(obs))
        self.version = self.version if answer.version is None else answer.version
        return answer.actions, answer.extras

    def _load(self, snapshot: Any) -> None:
        self._model.load_state_dict(dict(snapshot))
        self.version = snapshot.version


class RemotePolicy:
    """Remote inference: calls an agent over RPC. `@rpc.batched` at the agent merges the calls of many actors.

    The actor calls once for each of its n environments, all at the same time. The agent's function gets the observation
    of one environment, an array or a dict of arrays, and returns an answer for it: its action, alone or with extras
    (geartrain/actors/answers.py). With `@rpc.batched(stack=True)` it gets the observations of many environments, and
    returns their actions, or a dict with "action" and the extras, (n, ...) each.

    Args:
        node: this process's node.
        peer: name of the agent.
        function: name of the agent's function.
        timeout_s: longest wait for a reply, in seconds.
        retry_s: how long to retry after the agent is lost, in seconds, until it is restarted under its name. 0 raises
            `PeerLostError` at once.

    Examples:
        >>> import numpy as np
        >>> from geartrain import rpc
        >>> @rpc.function
        ... def act(obs):
        ...     return np.zeros(2, np.float32)
        >>> agent = rpc.Node("agent")
        >>> actor = rpc.Node("actor", peers={"agent": agent.address})
        >>> policy = RemotePolicy(actor, "agent", "act")
        >>> policy.act({"obs": np.zeros((4, 3), np.float32)})[0].shape
        (4, 2)
        >>> actor.close(); agent.close()
    """

    def __init__(self, node: Node, peer: str, function: str, *, timeout_s: float = 30.0, retry_s: float = 0.0) -> None:
        check_calls("an agent is called by a node of geartrain.rpc", node, "call_async")
        self._node, self._peer = node, check_text("peer", peer)
        self._function, self._timeout_s = check_text("function", function), timeout(timeout_s)
        self._retry_s = timeout(retry_s, "retry_s")
        self.version = 0

    def act(self, obs: Arrays) -> Acted:
        """Actions and extras for n environments, (n, ...) each.

        Args:
            obs: by field, (n, ...).

        Raises:
            ArgumentError: the agent did not return one answer for each environment.
            RemoteError: the agent's function raised.
            PeerLostError: the agent is lost.
            WaitTimeoutError: the agent did not reply in time.
        """
        until_s = time.monotonic() + self._retry_s
        while True:
            try:
                answers = self._ask(obs)
                break
            except (PeerLostError, TransportError):  # TransportError: the address is that of the lost process
                if time.monotonic() >= until_s:
                    raise
                time.sleep(_RETRY_EVERY_S)
        answer = join_answers(answers, f"{self._function!r} of {self._peer!r}")
        self.version = self.version if answer.version is None else answer.version
        return answer.actions, answer.extras

    def _ask(self, obs: Arrays) -> list[Any]:
        asked = [
            self._node.call_async(self._peer, self._function, _row(obs, at), timeout_s=self._timeout_s)
            for at in range(_rows(obs))
        ]
        return [each.result() for each in asked]


def _rows(obs: Arrays) -> int:
    return len(next(iter(obs.values())) if isinstance(obs, dict) else obs)


def _row(obs: Arrays, at: int) -> Any:
    if isinstance(obs, dict):
        return {name: array[at] for name, array in obs.items()}
    return obs[at]


__all__ = ["Acted", "LocalPolicy", "Policy", "RandomPolicy", "RemotePolicy"]
