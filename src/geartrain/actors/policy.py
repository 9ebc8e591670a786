"""Policies of actors: random, local with weights that follow a trainer's, or remote by RPC to an agent."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from geartrain.actors.envs.adapters import Arrays
from geartrain.core.arguments import check_function, check_text, check_whole, shown, timeout
from geartrain.errors import ArgumentError, PeerLostError, TransportError, WaitTimeoutError

if TYPE_CHECKING:
    from geartrain.rpc import Node

#: Actions, and extras to record with the step: log probabilities, values.
Acted = tuple[Arrays, dict[str, NDArray[Any]]]
#: Pause between calls to an agent that was lost.
_RETRY_EVERY_S = 0.1


class Policy(Protocol):
    """Actions for n environments at once."""

    version: int

    def act(self, observation: Arrays) -> Acted:
        """The actions, (n, ...), and extras (n, ...) by the names of their fields."""
        ...


class RandomPolicy:
    """Actions sampled from the action space, as at the beginning of a run."""

    version = 0

    def __init__(self, action_space: Any, seed: int = 0) -> None:
        self._space = action_space
        self._space.seed(seed)

    def act(self, observation: Arrays) -> Acted:
        """As `Policy.act`."""
        return np.stack([self._space.sample() for _ in range(_rows(observation))]), {}


class LocalPolicy:
    """A model in the actor's own process, which loads the trainer's newest weights.

    Args:
        act: `act(model, observation)` gives the actions, or (actions, extras).
        model: a torch module, or anything with `load_state_dict`.
        reader: of the weights (`geartrain.weights.Reader`). None for a model that stays as it is.
        refresh_every: check for a newer version every so many calls. A check costs a microsecond.
        timeout_s: longest wait for the first version.
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
        if check_whole("refresh_every", refresh_every) < 1:
            raise ArgumentError(f"refresh_every must be at least 1, found {refresh_every}")
        timeout(timeout_s)
        if reader is not None and not callable(getattr(reader, "latest", None)):
            raise ArgumentError(f"reader is a geartrain.weights.Reader, or None; found {shown(reader)}")
        self._act, self._model, self._reader = act, model, reader
        self._every = refresh_every
        self._calls = 0
        self.version = 0
        if reader is not None:
            self._load(reader.latest(timeout_s=timeout_s))

    def act(self, observation: Arrays) -> Acted:
        """As `Policy.act`."""
        self._calls += 1
        if self._reader is not None and self._calls % self._every == 0:
            newest = self._reader.version
            if newest is not None and newest != self.version:
                with suppress(WaitTimeoutError):  # it is being replaced: the next check finds it
                    self._load(self._reader.latest(timeout_s=0.0))
        return acted(self._act(self._model, observation))

    def _load(self, snapshot: Any) -> None:
        self._model.load_state_dict(dict(snapshot))
        self.version = snapshot.version


class RemotePolicy:
    """Remote inference: calls an agent by `geartrain.rpc`; `@rpc.batched` there turns calls of many actors into one.

    The agent's function takes an observation of one environment, or a dict of them, and returns the action, or a dict
    with "action", the extras by name, and "version" if it has one. The n environments of an actor call at the same
    time.

    Args:
        node: this process's node.
        peer: the agent's name.
        function: its name there.
        timeout_s: longest wait for a reply.
        retry_s: how long to retry when the agent is lost, until it is started again under its name. 0 raises
            `PeerLostError` at once.
    """

    def __init__(self, node: Node, peer: str, function: str, *, timeout_s: float = 30.0, retry_s: float = 0.0) -> None:
        if not callable(getattr(node, "call_async", None)):
            raise ArgumentError(f"an agent is called by a node of geartrain.rpc, found {shown(node)}")
        self._node, self._peer = node, check_text("peer", peer)
        self._function, self._timeout_s = check_text("function", function), timeout(timeout_s)
        self._retry_s = timeout(retry_s, "retry_s")
        self.version = 0

    def act(self, observation: Arrays) -> Acted:
        """As `Policy.act`."""
        until_s = time.monotonic() + self._retry_s
        while True:
            try:
                answers = self._ask(observation)
                break
            except (PeerLostError, TransportError):  # TransportError: the address is that of the lost process
                if time.monotonic() >= until_s:
                    raise
                time.sleep(_RETRY_EVERY_S)
        if not isinstance(answers[0], Mapping):
            return _stack(answers), {}
        columns = {name: _stack([answer[name] for answer in answers]) for name in answers[0]}
        if "version" in columns:
            self.version = int(columns.pop("version").min())
        if "action" not in columns:
            raise ArgumentError(f"{self._peer}'s {self._function} returned {sorted(answers[0])}, without an action")
        return columns.pop("action"), columns

    def _ask(self, observation: Arrays) -> list[Any]:
        asked = [
            self._node.call_async(self._peer, self._function, _row(observation, at), timeout_s=self._timeout_s)
            for at in range(_rows(observation))
        ]
        return [each.result() for each in asked]


def acted(result: Any) -> Acted:
    """Actions and extras of a user's function, as arrays."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        actions, extras = result
    else:
        actions, extras = result, {}
    as_arrays = {str(name): as_array(value) for name, value in extras.items()}
    if isinstance(actions, Mapping):
        return {str(name): as_array(value) for name, value in actions.items()}, as_arrays
    return as_array(actions), as_arrays


def as_array(value: Any) -> NDArray[Any]:
    """A NumPy array of a tensor or an array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value)


def _rows(observation: Arrays) -> int:
    return len(next(iter(observation.values())) if isinstance(observation, dict) else observation)


def _row(observation: Arrays, at: int) -> Any:
    if isinstance(observation, dict):
        return {name: array[at] for name, array in observation.items()}
    return observation[at]


def _stack(values: list[Any]) -> NDArray[Any]:
    return np.stack([as_array(value) for value in values])


__all__ = ["Acted", "LocalPolicy", "Policy", "RandomPolicy", "RemotePolicy"]
