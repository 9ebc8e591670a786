"""Saves and loads a `SharedStorage`, and reads items from state dicts and files of torchrl's own storages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, is_tensor_collection, is_tensorclass
from torch.utils._pytree import tree_map
from torchrl.data.replay_buffers.checkpointers import TensorStorageCheckpointer
from torchrl.data.replay_buffers.storages import LazyTensorStorage, TensorStorage

from geartrain.errors import ArgumentError
from geartrain.integrations.torchrl.items import leaves_of
from geartrain.integrations.torchrl.stored_items import CURSOR, WRITES

# What a folder holds: a checkpoint of a store, or this file of torchrl's.
_STORE, _TOLD = "store", "storage_metadata.json"


class StoreCheckpointer(TensorStorageCheckpointer):  # type: ignore[misc]
    """Saves a storage as a checkpoint of its store. With save hooks it saves what they return, as torchrl does."""

    def dumps(self, storage: Any, path: Path) -> None:
        """Saves a storage in a folder."""
        if self._save_hooks:
            super().dumps(storage, path)
            shutil.rmtree(path / _STORE, ignore_errors=True)
        else:
            storage.store.save(path / _STORE)
            (path / _TOLD).unlink(missing_ok=True)


def items_of_state_dict(state_dict: Mapping[str, Any]) -> tuple[Any, int]:
    """Items, and how many of them count, of a state dict of `SharedStorage` or of torchrl's tensor storages."""
    stored = state_dict["_storage"]
    if isinstance(stored, Mapping) and not is_tensor_collection(stored):
        stored = TensorDict().load_state_dict(stored, strict=False) if stored else None
    return stored, int(state_dict["_len"])


def save_items(storage: Any, path: Path) -> dict[str, int] | None:
    """Has a storage's checkpointer save it; returns cursor and count of writes, unless they are saved with it."""
    checkpointer = storage.checkpointer
    checkpointer.dumps(storage, path)
    if type(checkpointer) is StoreCheckpointer and not checkpointer._save_hooks:
        return None
    return {"cursor": storage.shared(CURSOR) // prod(storage.tail), "write_count": storage.shared(WRITES)}


def saved_items(storage: Any, path: Path) -> tuple[Any, int] | None:
    """Items, and how many of them count, that a checkpointer of torchrl's has saved; None of a store's checkpoint.

    Load hooks, and checkpointers of the buffer's own, read into a copy of all items.

    Raises:
        ArgumentError: there are load hooks for a checkpoint of a store. RuntimeError: trees of tensors are read into a
            storage that holds some already.
    """
    checkpointer = storage.checkpointer
    ours, told = type(checkpointer) is StoreCheckpointer, path / _TOLD
    if ours and not told.exists():
        if checkpointer._load_hooks:
            raise ArgumentError(f"{path} was saved without save hooks, so load hooks have nothing to turn back")
        return None
    if ours and not checkpointer._load_hooks:
        metadata = json.loads(told.read_text())
        if not metadata["is_pytree"]:
            return TensorDict.load_memmap(path), int(metadata["len"])
    if storage.initialized:
        into = TensorStorage(tree_map(torch.zeros_like, storage._storage), ndim=storage.ndim)
    else:
        into = LazyTensorStorage(storage.max_size, ndim=storage.ndim)
    checkpointer.loads(into, path)
    return into._storage, len(into)


def load_items(storage: Any, items: Any, length: int) -> None:
    """Puts the first items of some, at least one, in the place of all of a storage; the next one goes behind them."""
    if is_tensor_collection(items) and not is_tensorclass(items):
        items = items.exclude("index")  # of torchrl's writers, which store it
    shape = items.shape if is_tensor_collection(items) else next(iter(leaves_of(items).values())).shape
    first = -(-length // prod(shape[1 : storage.ndim]))
    items = items[:first] if is_tensor_collection(items) else tree_map(lambda leaf: leaf[:first], items)
    storage.make_for(items, True)
    with storage.locked():
        storage.clear()
        storage.set(torch.arange(first), items)
        storage.move_cursor(len(storage) % storage.max_size)


__all__ = ["StoreCheckpointer", "items_of_state_dict", "load_items", "saved_items"]
