"""Samplers of a torchrl `ReplayBuffer` over a `SharedStorage`: uniform, and by priorities that processes share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrl.data.replay_buffers import samplers as stock
from torchrl.data.replay_buffers.samplers import Sampler

from geartrain.core.arguments import check_real, check_type
from geartrain.core.global_generators import drawing
from geartrain.errors import ArgumentError, EmptyStoreError
from geartrain.integrations.torchrl.indices import cells_of
from geartrain.integrations.torchrl.storage import SharedStorage
from geartrain.replay.replay import Replay
from geartrain.selection.random import Prioritized, checked_beta

_EMPTY = "Cannot sample from an empty storage."
_NONE = float("-inf")
# Of alpha, beta and eps, as torchrl's sampler names it.
_FILE = "sampler_metadata.json"


class StatelessSampler(Sampler):  # type: ignore[misc]
    """Base of samplers without alpha. Their draws depend only on the storage and the buffer's generator.

    Attributes:
        with_alpha: the sampler to use instead if priorities are set.
    """

    with_alpha = "PrioritizedSampler"

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        """Sets nothing.

        Raises:
            ArgumentError: always; the class that `with_alpha` names knows alpha.
        """
        raise ArgumentError(f"a {type(self).__name__} has no alpha for priorities: use a {self.with_alpha}")

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""

    def _empty(self) -> None:
        pass

    def dumps(self, path: Any) -> None:
        """Nothing."""

    def loads(self, path: Any) -> None:
        """Nothing."""


class UniformSampler(StatelessSampler):
    """Draws every item with the same probability, with replacement; seeded by the buffer's generator."""

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Indices (batch_size,), of several axes a tuple of such, and no more information.

        Raises:
            RuntimeError: the storage is empty.
        """
        n = len(storage)
        if n == 0:
            raise RuntimeError(_EMPTY)
        with drawing:
            if storage.ndim > 1:
                return tuple(torch.randint(0, m, (batch_size,), generator=self._rng) for m in storage.shape), {}
            return torch.randint(0, n, (batch_size,), generator=self._rng), {}


class PrioritizedSampler(stock.PrioritizedSampler):  # type: ignore[misc]  # as TensorDictReplayBuffer asks for
    """Draws items with a probability exactly proportional to (priority + eps) ** alpha, by a shared sum tree.

    The sum tree is in the storage's segment, so all processes see each other's priorities. New items get the highest
    priority that any process has set so far. That holds whatever sampler the writing process has.

    Args:
        max_capacity: accepted for compatibility with torchrl; the storage's size counts.
        alpha: how much priorities count: 0 for uniform draws. The same in all processes.
        beta: exponent of the importance weights.
        eps: number added to priorities.
        reduction: how a `TensorDictReplayBuffer` reduces several priorities to one, "max" as in torchrl.

    Attributes:
        alpha, beta: can be set. A new alpha raises all stored priorities to the power of new alpha / old alpha, in one
            pass. Other processes must then make their samplers again with the new alpha.

    Raises:
        ArgumentError: numbers out of range.
    """

    def __init__(
        self,
        max_capacity: int | None = None,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-8,
        reduction: str = "max",
    ) -> None:
        check_real("alpha", alpha, 0)
        check_real("eps", eps, 0)
        self._alpha = float(alpha)
        self._beta = checked_beta(beta)
        self._eps = float(eps)
        self.reduction = reduction
        self._max_capacity = max_capacity
        self._of: SharedStorage | None = None
        self._replays: dict[tuple[int, bool], Replay] = {}

    @property
    def alpha(self) -> float:
        """Exponent of the priorities."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        check_real("alpha", value, 0)
        alpha, storage = float(value), self._of
        if alpha == self._alpha:
            return
        if storage is not None and storage.initialized:
            if self._alpha == 0:
                raise ArgumentError(
                    "with alpha=0 all stored priorities are 1, and no power changes them: set new priorities"
                )
            with storage.locked():
                self._raise_stored(storage, alpha / self._alpha)
        self._alpha = alpha

    def _raise_stored(self, storage: SharedStorage, power: float) -> None:
        if power > 0:
            storage.store.raise_priorities(power)  # type: ignore[union-attr]
        else:
            index = np.arange(len(storage))
            storage.store.update_priorities(storage.keys_at(index), np.ones(len(index)))  # type: ignore[union-attr]
        storage.raise_highest_to(power)

    @property
    def beta(self) -> float:
        """Exponent of the importance weights."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = checked_beta(value)

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        """Indices (batch_size,), of several axes a tuple of such, and importance weights as "priority_weight".

        The largest weight of a batch is 1.

        Raises:
            RuntimeError: the storage is empty, or all priorities are 0.
        """
        _check(storage)
        self._of = storage
        if len(storage) == 0:
            raise RuntimeError(_EMPTY)
        try:
            index, probability = self.draw(storage, batch_size)
        except EmptyStoreError:
            raise RuntimeError("all priorities are 0") from None
        weight = (probability.min() / probability) ** self._beta
        told = {"priority_weight": torch.from_numpy(weight.astype(np.float32))}
        if storage.ndim == 1:
            return torch.from_numpy(index), told
        return tuple(map(torch.from_numpy, np.unravel_index(index, storage.shape_of_all()))), told

    def draw(self, storage: SharedStorage, batch_size: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Indices (batch_size,) and the probability of each in one draw.

        Raises:
            EmptyStoreError: all priorities are 0.
        """
        store = storage.store
        assert store is not None
        # With a generator of the buffer's (`set_rng`) its state decides each batch, not only the first one.
        stepped = self._rng is not None
        replay = self._replays.get((batch_size, stepped))
        if replay is None or replay.stores[0] is not store:
            with drawing:
                seed = 0 if stepped else int(torch.randint(0, 2**31, ()))
            # Only keys are wanted: the smallest field that there is.
            names = [min(storage.names, key=lambda name: store.fields[name].nbytes)]
            replay = self._replays[batch_size, stepped] = Replay(
                store, Prioritized(seed=seed), batch_size, fields=names, window=1, prefetch=0, output="numpy"
            )
        if stepped:
            with drawing:
                step = int(torch.randint(0, 2**62, (), generator=self._rng))
            replay.load_state_dict(replay.state_dict() | {"step": step})
        batch: Any = replay.sample()
        return storage.index_of(batch.keys), batch.probability

    @property
    def max_size(self) -> int | None:
        """The `max_capacity` that was passed."""
        return self._max_capacity

    @property
    def device(self) -> torch.device:
        """The CPU: priorities are in the segment."""
        return torch.device("cpu")

    def add(self, index: Any) -> None:
        """Nothing: the storage gives new items their priorities."""

    def extend(self, index: Any) -> None:
        """Nothing, as `add`."""

    @property
    def default_priority(self) -> float:
        """What torchrl's buffers set for items that bring no priority: minus infinity, which leaves them the storage's.

        They do so for all items of a storage that a buffer is made over, and it would undo what others have set.
        """
        return _NONE

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        """Sets the priorities of items.

        Args:
            index: (n,), or (n, ndim) of several axes; negative ones are left out, and those of items that are gone
                since the storage was emptied.
            priority: a number or (n,), finite and >= 0; or `default_priority`, which leaves an item what it has.

        Raises:
            RuntimeError: shapes that do not fit. ArgumentError: indices that are none, or priorities below 0.
            SchemaError: a priority that is not finite. WaitTimeoutError: another process writes for too long.
        """
        _check(storage)
        self._of = storage
        items = torch.as_tensor(index).cpu().numpy().astype(np.int64)
        if storage.ndim > 1 and items.ndim > 1 and items.shape[-1] == storage.ndim and storage.initialized:
            items, _ = cells_of(tuple(items.reshape(-1, storage.ndim).T), storage.shape_of_all())
        items = items.reshape(-1)
        given = torch.as_tensor(priority).detach().cpu().to(torch.float64).reshape(-1).numpy()
        if (given == _NONE).all():
            return  # of a buffer that is made over a storage; while others write, it may count more items than indices
        if given.size not in (1, len(items)):
            raise RuntimeError(
                f"priority should be a number or an iterable of the same length as index. Got priority of shape "
                f"{given.shape} and index {items.shape}."
            )
        if ((given < 0) & (given != _NONE)).any():
            raise ArgumentError("priorities are numbers >= 0")
        given = np.broadcast_to(given, items.shape)
        if items.size and items.max() >= storage.max_size:
            raise ArgumentError(f"the storage has {storage.max_size} items, found index {items.max()}")
        with storage.locked():
            # A learner's update may come after the storage was emptied: places without an item are never drawn.
            kept = (items >= 0) & (items < len(storage)) & (given != _NONE)
            if kept.any():
                stored = (given[kept] + self._eps) ** self._alpha
                storage.store.update_priorities(storage.keys_at(items[kept]), stored)
                storage.raise_highest(float(stored.max()))

    def mark_update(self, index: Any, *, storage: Any = None) -> None:
        """Nothing: the storage gives new items their priorities."""

    def state_dict(self) -> dict[str, Any]:
        """alpha, beta and eps; priorities are the storage's."""
        return {"_alpha": self._alpha, "_beta": self._beta, "_eps": self._eps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets them."""
        self._alpha, self._beta, self._eps = (state_dict[name] for name in ("_alpha", "_beta", "_eps"))

    def _empty(self) -> None:
        pass

    def dumps(self, path: Any) -> None:
        """Saves alpha, beta and eps; priorities are saved with the storage."""
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / _FILE).write_text(json.dumps(self.state_dict()))

    def loads(self, path: Any) -> None:
        """Loads them, of this class or of torchrl's sampler, whose priorities are not read."""
        if (Path(path) / _FILE).exists():
            self.load_state_dict(json.loads((Path(path) / _FILE).read_text()))

    def __getstate__(self) -> dict[str, Any]:
        state = dict(Sampler.__getstate__(self))
        state["_replays"], state["_of"] = {}, None
        return state

    def __repr__(self) -> str:
        return f"PrioritizedSampler(alpha={self._alpha}, beta={self._beta}, eps={self._eps})"


def _check(storage: Any) -> None:
    check_type("this sampler draws from a SharedStorage", storage, SharedStorage)


__all__ = ["PrioritizedSampler", "UniformSampler"]
