"""Samplers of a torchrl `ReplayBuffer` over a `SharedStorage`: uniform, and prioritized in all of its processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrl.data.replay_buffers import samplers as stock
from torchrl.data.replay_buffers.samplers import Sampler

from geartrain.errors import ArgumentError, EmptyStoreError
from geartrain.integrations.torchrl.storage import SharedStorage
from geartrain.replay.replay import Replay
from geartrain.selection.arguments import check_number
from geartrain.selection.random import Prioritized, checked_beta

_EMPTY = "Cannot sample from an empty storage."
_NONE = float("-inf")


class StatelessSampler(Sampler):  # type: ignore[misc]
    """Base of the samplers that draw by the storage and the buffer's generator alone, and know no alpha.

    Attributes:
        with_alpha: the sampler to use instead where priorities are set.
    """

    with_alpha = "PrioritizedSampler"

    def update_priority(self, index: Any, priority: Any, *, storage: Any = None) -> None:
        """Sets nothing.

        Raises:
            ArgumentError: always; the class that `with_alpha` names knows alpha.
        """
        raise ArgumentError(f"a {type(self).__name__} has no alpha to store priorities with: use a {self.with_alpha}")

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

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Indices (batch_size,), and no more information.

        Raises:
            RuntimeError: the storage is empty.
        """
        n = len(storage)
        if n == 0:
            raise RuntimeError(_EMPTY)
        return torch.randint(0, n, (batch_size,), generator=self._rng), {}


class PrioritizedSampler(stock.PrioritizedSampler):  # type: ignore[misc]  # as TensorDictReplayBuffer asks for
    """Draws items in proportion to (priority + eps) ** alpha, exactly, by the sum tree in the storage's segment.

    Every process that has the storage draws by the priorities that any of them has set. New items have the highest
    priority that any of them has set so far, whatever sampler the process has that writes them.

    Args:
        max_capacity: accepted as torchrl's sampler has it; the storage's size counts.
        alpha: how much priorities count: 0 for uniform draws. The same in all processes.
        beta: of the importance weights.
        eps: what is added to priorities.
        reduction: how a `TensorDictReplayBuffer` makes one priority of several, "max" as in torchrl.

    Attributes:
        alpha, beta: `beta` can be set.

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
        check_number("alpha", alpha, "a finite number >= 0", least=0)
        check_number("eps", eps, "a finite number >= 0", least=0)
        self._alpha = float(alpha)
        self._beta = checked_beta(beta)
        self._eps = float(eps)
        self.reduction = reduction
        self._max_capacity = max_capacity
        self._replays: dict[int, Replay] = {}

    @property
    def alpha(self) -> float:
        """See the class."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        raise ArgumentError("alpha is that of the stored priorities and stays: make another sampler and storage")

    @property
    def beta(self) -> float:
        """See the class."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._beta = checked_beta(value)

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Indices (batch_size,), and their importance weights as "priority_weight", the largest of a batch being 1.

        Raises:
            RuntimeError: the storage is empty, or all priorities are 0.
        """
        _check(storage)
        if len(storage) == 0:
            raise RuntimeError(_EMPTY)
        try:
            index, probability = self.draw(storage, batch_size)
        except EmptyStoreError:
            raise RuntimeError("all priorities are 0") from None
        weight = (probability.min() / probability) ** self._beta
        return torch.from_numpy(index), {"priority_weight": torch.from_numpy(weight.astype(np.float32))}

    def draw(self, storage: SharedStorage, batch_size: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Indices (batch_size,) and the probability of each in one draw.

        Raises:
            EmptyStoreError: all priorities are 0.
        """
        store = storage.store
        assert store is not None
        replay = self._replays.get(batch_size)
        if replay is None or replay.stores[0] is not store:
            seed = int(torch.randint(0, 2**31, (), generator=self._rng))
            # Only keys are wanted: the smallest field that there is.
            names = [min(storage.names, key=lambda name: _bytes(store.fields[name]))]
            replay = self._replays[batch_size] = Replay(
                store, Prioritized(seed=seed), batch_size, fields=names, window=1, prefetch=0, output="numpy"
            )
        batch: Any = replay.sample()
        return storage.index_of(batch.keys), batch.probability

    @property
    def max_size(self) -> int | None:
        """What was given as max_capacity."""
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
            index: (n,); negative ones are left out, and those of items that are gone since the storage was emptied.
            priority: a number or (n,), finite and >= 0; or `default_priority`, which leaves an item what it has.

        Raises:
            RuntimeError: shapes that do not fit. ArgumentError: indices that are none, or priorities below 0.
            SchemaError: a priority that is not finite. WaitTimeoutError: another process writes for too long.
        """
        _check(storage)
        items = torch.as_tensor(index).reshape(-1).cpu().numpy().astype(np.int64)
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
        """Nothing: priorities are saved with the storage."""

    def loads(self, path: Any) -> None:
        """Nothing: priorities are loaded with the storage."""

    def __getstate__(self) -> dict[str, Any]:
        state = dict(Sampler.__getstate__(self))
        state["_replays"] = {}
        return state

    def __repr__(self) -> str:
        return f"PrioritizedSampler(alpha={self._alpha}, beta={self._beta}, eps={self._eps})"


def _check(storage: Any) -> None:
    if not isinstance(storage, SharedStorage):
        raise ArgumentError(f"this sampler draws from a SharedStorage, found {type(storage).__name__}")


def _bytes(field: Any) -> int:
    return int(np.prod(field.shape)) * int(field.itemsize)


__all__ = ["PrioritizedSampler", "UniformSampler"]
