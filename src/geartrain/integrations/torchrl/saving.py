"""Items of torchrl's own storages, out of their state dicts and files, into a `SharedStorage`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, is_tensor_collection, is_tensorclass

from geartrain.errors import SchemaError
from geartrain.integrations.torchrl.items import leaves_of


def items_of_state_dict(state_dict: Mapping[str, Any]) -> tuple[Any, int]:
    """Items, and how many of them count, of a state dict of `SharedStorage` or of torchrl's tensor storages."""
    stored = state_dict["_storage"]
    if isinstance(stored, Mapping) and not is_tensor_collection(stored):
        stored = TensorDict().load_state_dict(stored, strict=False) if stored else None
    return stored, int(state_dict["_len"])


def items_of_files(path: Path) -> tuple[Any, int] | None:
    """The same of what a torchrl storage has saved in a folder; None where it has not.

    Raises:
        SchemaError: its items are no tensordicts.
    """
    told = path / "storage_metadata.json"
    if not told.exists():
        return None
    metadata = json.loads(told.read_text())
    if metadata["is_pytree"]:
        raise SchemaError(f"{path} holds items of torchrl's that are no tensordicts, which are not read")
    return TensorDict.load_memmap(path), int(metadata["len"])


def load_items(storage: Any, items: Any, length: int) -> None:
    """Puts the first items of some, at least one, in the place of all of a storage; the next one goes behind them."""
    if is_tensor_collection(items) and not is_tensorclass(items):
        items = items.exclude("index")  # of torchrl's writers, which store it
    shape = items.shape if is_tensor_collection(items) else next(iter(leaves_of(items).values())).shape
    first = -(-length // prod(shape[1 : storage.ndim]))
    items = items[:first]
    storage.make_for(items, True)
    with storage.locked():
        storage.clear()
        storage.set(torch.arange(first), items)
        storage.move_cursor(len(storage) % storage.max_size)


__all__ = ["items_of_files", "items_of_state_dict", "load_items"]
