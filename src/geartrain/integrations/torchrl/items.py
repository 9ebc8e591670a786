"""Items of a torchrl buffer as fields of a store: tensordicts, nested ones, tensorclasses and plain tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, is_tensor_collection, is_tensorclass

from geartrain.core.schema import Field
from geartrain.errors import SchemaError

#: The field of items that are plain tensors, and the beginning of names that are the storage's own.
TENSOR, OWN = "storage.tensor", "storage."


def leaves_of(data: Any) -> dict[str, torch.Tensor]:
    """The tensors of an item, or of several, by dotted names.

    Raises:
        SchemaError: a leaf is no tensor, or a name has a dot.
    """
    if is_tensorclass(data):
        data = data.to_tensordict()
    if not is_tensor_collection(data):
        if isinstance(data, torch.Tensor):
            return {TENSOR: data.detach()}
        raise SchemaError(
            f"items are tensordicts, tensorclasses or tensors, found {type(data).__name__}: put its parts into a "
            f"TensorDict"
        )
    found = {}
    for key, value in data.items(include_nested=True, leaves_only=True):
        parts = key if isinstance(key, tuple) else (key,)
        name = ".".join(parts)
        if any("." in part for part in parts) or name.startswith(OWN):
            raise SchemaError(f"{key!r}: names of entries have no dot, which is for nested ones, and no {OWN!r}")
        if type(value) is not torch.Tensor and not isinstance(value, torch.Tensor):
            raise SchemaError(f"{key!r} is a {type(value).__name__}, and a store holds tensors: encode it as one")
        found[name] = value.detach()
    if not found:
        raise SchemaError("an item without any tensor cannot be stored")
    return found


def fields_of(leaves: Mapping[str, torch.Tensor], batched: bool) -> dict[str, Field]:
    """The fields for items of these leaves, whose first axis is of several where `batched`."""
    return {name: Field(tuple(leaf.shape)[batched:], leaf.dtype) for name, leaf in leaves.items()}


def item_of(leaves: Mapping[str, torch.Tensor], batch_size: Sequence[int]) -> Any:
    """What `leaves_of` took apart: a tensor, or a tensordict of this batch size."""
    if TENSOR in leaves:
        return leaves[TENSOR]
    root: dict[str, Any] = {}
    for name, leaf in leaves.items():
        at = root
        *parents, last = name.split(".")
        for part in parents:
            at = at.setdefault(part, {})
        at[last] = leaf
    return TensorDict(root, batch_size=list(batch_size))


def batch_dims_of(data: Any, batched: bool) -> int:
    """Batch axes of one item."""
    return len(data.batch_size) - batched if is_tensor_collection(data) else 0


__all__ = ["OWN", "TENSOR", "batch_dims_of", "fields_of", "item_of", "leaves_of"]
