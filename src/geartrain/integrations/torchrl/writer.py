"""Writer of a torchrl `ReplayBuffer` whose cursor all processes share."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import is_tensor_collection
from torchrl.data.replay_buffers.writers import Writer

from geartrain.errors import ArgumentError
from geartrain.integrations.torchrl.storage import CURSOR, WRITES, SharedStorage


class RoundRobinWriter(Writer):  # type: ignore[misc]
    """Writes items one behind the other, and over the oldest ones when the storage is full.

    The cursor is in the storage's segment and moves under its lock, so several processes write to one storage, each to
    places of its own.
    """

    def __init__(self) -> None:
        super().__init__()

    def register_storage(self, storage: Any) -> None:
        """Takes the storage.

        Raises:
            ArgumentError: it is no `SharedStorage`.
        """
        if not isinstance(storage, SharedStorage):
            raise ArgumentError(f"this writer is for a SharedStorage, found {type(storage).__name__}")
        super().register_storage(storage)

    def add(self, data: Any) -> int:
        """Writes an item and returns its index."""
        return int(self._write(data, None)[0])

    def extend(self, data: Any) -> torch.Tensor:
        """Writes items, along the first axis or of a list, and returns their indices (n,).

        Raises:
            RuntimeError: there are none.
        """
        n = len(data) if is_tensor_collection(data) or isinstance(data, torch.Tensor | list) else 0
        if n == 0:
            raise RuntimeError(f"Expected at least one element in extend. Got {data=}")
        index: torch.Tensor = self._write(data, n)
        return index

    def _write(self, data: Any, n: int | None) -> Any:
        if isinstance(data, list):
            data = torch.stack(data)
        storage = self._storage
        if not storage.initialized:
            storage.make_for(data, n is not None)
        with storage.locked():
            first = storage.shared(CURSOR)
            index = torch.arange(first, first + (n or 1)) % storage.max_size
            storage.set(int(index[0]) if n is None else index, data)
            storage.share(WRITES, storage.shared(WRITES) + len(index))
        for buffer in storage._attached_entities_iter():
            buffer.mark_update(index)
        return index

    @property
    def _cursor(self) -> int:
        return 0 if self._storage is None else int(self._storage.shared(CURSOR))

    @_cursor.setter
    def _cursor(self, value: int) -> None:
        self._storage.move_cursor(value)

    @property
    def _write_count(self) -> int:
        return 0 if self._storage is None else int(self._storage.shared(WRITES))

    def _empty(self, empty_write_count: bool = True) -> None:
        self._storage.move_cursor(0)
        if empty_write_count:
            self._storage.share(WRITES, 0)

    def state_dict(self) -> dict[str, Any]:
        """Cursor and count of writes."""
        return {"_cursor": self._cursor, "_write_count": self._write_count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets them."""
        self._storage.move_cursor(state_dict["_cursor"])
        self._storage.share(WRITES, state_dict["_write_count"])

    def dumps(self, path: Any) -> None:
        """Nothing: the cursor is saved with the storage."""

    def loads(self, path: Any) -> None:
        """Nothing: the cursor is loaded with the storage."""

    def __repr__(self) -> str:
        return f"RoundRobinWriter(cursor={self._cursor})"


__all__ = ["RoundRobinWriter"]
