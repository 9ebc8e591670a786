"""Writer of a torchrl `ReplayBuffer` with one cursor for all processes."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from torchrl.data.replay_buffers.writers import Writer

from geartrain.core.arguments import check_flag, check_type
from geartrain.integrations.torchrl.indices import is_number
from geartrain.integrations.torchrl.items import count_of, stacked
from geartrain.integrations.torchrl.storage import SharedStorage
from geartrain.integrations.torchrl.stored_items import CURSOR, WRITES


class RoundRobinWriter(Writer):  # type: ignore[misc]
    """Writes items one behind the other, and over the oldest ones when the storage is full.

    The cursor is in the storage's segment and moves under its lock, so several processes write to one storage, each to
    places of its own.

    Args:
        track_generations: count in the segment how often each entry along the storage's first axis is written, so that
            who holds an index can tell whether it still is of what was sampled, in any process: samples have
            "index_generation", and the buffer's `update_if_present` works. The process that makes the storage's store
            decides; its other processes may track or not, and all that write count.
    """

    def __init__(self, *, track_generations: bool = False) -> None:
        super().__init__()
        self._track_generations = check_flag("track_generations", track_generations)

    def register_storage(self, storage: Any) -> None:
        """Takes the storage.

        Raises:
            ArgumentError: it is no `SharedStorage`. IncompatibleStoreError: generations are to be tracked, and it has
                items without.
        """
        check_type("this writer is for a SharedStorage", storage, SharedStorage)
        if self._track_generations:
            storage.track_generations()
        super().register_storage(storage)

    def add(self, data: Any) -> Any:
        """Writes an item and returns its index; of several axes those (n, ndim) of all its cells."""
        if isinstance(data, list):
            data = stacked(data)
        return self._write(data, None)

    def extend(self, data: Any) -> torch.Tensor:
        """Writes items, along the first axis or of a list, and returns their indices (n,), or (n, ndim) of cells.

        Raises:
            RuntimeError: there are none.
        """
        n = count_of(data)
        if n == 0:
            raise RuntimeError(f"Expected at least one element in extend. Got {data=}")
        if isinstance(data, list):
            data = stacked(data)
        index: torch.Tensor = self._write(data, n)
        return index

    def write_at(self, index: Any, data: Any) -> Any:
        """Writes new items at places, and leaves the cursor where it is; returns indices as `extend`."""
        storage = self._storage
        index = index if is_number(index) else torch.as_tensor(index, dtype=torch.long)
        with storage.locked():
            storage.write_at(index, data)
            storage.share(WRITES, storage.shared(WRITES) + (1 if is_number(index) else len(index)))
        return self._told(index)

    def _write(self, data: Any, n: int | None) -> Any:
        storage = self._storage
        if not storage.initialized:
            storage.make_for(data, n is not None)
        entries, cells = storage.shape_of_all()[0], prod(storage.tail)
        with storage.locked():
            first = storage.shared(CURSOR) // cells
            index: Any = torch.arange(first, first + (n or 1)) % entries
            if n is None:
                index = int(index[0])
            storage.set(index, data)
            storage.share(WRITES, storage.shared(WRITES) + (n or 1))
        return self._told(index)

    def _told(self, index: Any) -> Any:
        """Indices of all cells, which the storage's buffers are told of."""
        index = self._replicate_index(index)
        for buffer in self._storage._attached_entities_iter():
            buffer.mark_update(index)
        return index

    # --- generations ------------------------------------------------------------------------------------------

    @property
    def tracks_generations(self) -> bool:
        """Whether samples have generations."""
        return self._track_generations

    def generations_of(self, index: Any) -> torch.Tensor:
        """How often entries were written before: 0 once they were, -1 never or where that is not tracked.

        Args:
            index: along the first axis; of several axes a tuple of indices, or (..., ndim), of which the first counts.
        """
        if isinstance(index, tuple):
            index = index[0]
        index = torch.as_tensor(index, dtype=torch.long)
        if self._storage is None or not self._track_generations:
            return torch.full(index.shape, -1, dtype=torch.int64)
        ndim = self._storage.ndim
        if ndim > 1 and index.ndim > 1 and index.shape[-1] == ndim:
            index = index[..., 0]
        found: torch.Tensor = self._storage.generations_along(index)
        return found

    @property
    def _cursor(self) -> int:
        return 0 if self._storage is None else int(self._storage.shared(CURSOR)) // prod(self._storage.tail or (1,))

    @_cursor.setter
    def _cursor(self, value: int) -> None:
        self._storage.move_cursor(value * prod(self._storage.tail or (1,)))

    @property
    def _write_count(self) -> int:
        return 0 if self._storage is None else int(self._storage.shared(WRITES))

    def _empty(self, empty_write_count: bool = True) -> None:
        self._storage.move_cursor(0)
        if empty_write_count:
            self._storage.share(WRITES, 0)

    def state_dict(self) -> dict[str, Any]:
        """Cursor, count of writes, and generations where they are tracked."""
        found: dict[str, Any] = {"_cursor": self._cursor, "_write_count": self._write_count}
        if self._track_generations and self._storage.initialized:
            found["_generation"] = self.generations_of(torch.arange(self._storage.shape_of_all()[0]))
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Sets them, of this class or of torchrl's writers."""
        self._cursor = state_dict["_cursor"]
        if (count := state_dict.get("_write_count")) is not None:
            self._storage.share(WRITES, count)
        if self._track_generations and (generations := state_dict.get("_generation")) is not None:
            self._storage.set_generations(generations)

    def dumps(self, path: Any) -> None:
        """Cursor and count, as torchrl's writers, where the storage's checkpoint has none; else nothing."""
        told = Path(path) / "metadata.json"
        if self._storage.cursor_to_save is None:
            told.unlink(missing_ok=True)
        else:
            told.parent.mkdir(exist_ok=True)
            told.write_text(json.dumps(self._storage.cursor_to_save))

    def loads(self, path: Any) -> None:
        """The cursor and count of torchrl's writers, where they have saved; else they are loaded with the storage."""
        told = Path(path) / "metadata.json"
        if told.exists():
            metadata = json.loads(told.read_text())
            self.load_state_dict({"_cursor": metadata["cursor"], "_write_count": metadata.get("write_count")})

    def __repr__(self) -> str:
        return f"RoundRobinWriter(cursor={self._cursor})"


__all__ = ["RoundRobinWriter"]
