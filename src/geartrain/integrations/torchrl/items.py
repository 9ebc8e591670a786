"""Items of a torchrl buffer as fields of a store: tensordicts, tensorclasses, plain tensors, and trees of tensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, is_tensor_collection, is_tensorclass

from geartrain.core.schema import Field, nested, of_field
from geartrain.errors import SchemaError

#: The field of items that are plain tensors, and the beginning of names that are the storage's own.
TENSOR, OWN = "storage.tensor", "storage."
# The beginning of names of leaves of dicts, lists and tuples. Parts follow: a key, {30} for a number as key, [0] in
# lists and (0) in tuples.
_TREE = OWN + "tree."


def leaves_of(data: Any) -> dict[str, torch.Tensor]:
    """The tensors of an item, or of several, by dotted names.

    Raises:
        SchemaError: a leaf is no tensor, or a name has a dot.
    """
    if is_tensorclass(data):
        data = data.to_tensordict()
    found: dict[str, torch.Tensor] = {}
    if not is_tensor_collection(data):
        if isinstance(data, torch.Tensor):
            return {TENSOR: data.detach()}
        _add_leaves(data, _TREE[:-1], found)
        return found
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


def fields_of(leaves: Mapping[str, torch.Tensor], lead: int) -> dict[str, Field]:
    """The fields for items of these leaves, whose first axes are of several."""
    fields = {}
    for name, leaf in leaves.items():
        try:
            fields[name] = Field(tuple(leaf.shape)[lead:], leaf.dtype)
        except SchemaError as error:
            raise of_field(name, error) from None
    return fields


def name_of(key: Any) -> str:
    """The dotted name of an entry."""
    return key if isinstance(key, str) else ".".join(key)


def item_of(leaves: Mapping[str, torch.Tensor], batch_size: Sequence[int]) -> Any:
    """Rebuilds an item from its leaves: a tensor, or a tensordict of this batch size."""
    if TENSOR in leaves:
        return leaves[TENSOR]
    if next(iter(leaves)).startswith(_TREE):
        return _tree_of({tuple(name.split(".")[2:]): leaf for name, leaf in leaves.items()})
    return TensorDict(nested(leaves), batch_size=list(batch_size))


def is_items_field(name: str) -> bool:
    """Whether a field of a store is of its items, and not the storage's own."""
    return not name.startswith(OWN) or name == TENSOR or name.startswith(_TREE)


def count_of(data: Any) -> int:
    """Of several items: how many."""
    if is_tensor_collection(data) or isinstance(data, torch.Tensor | list):
        return len(data)
    first = next(iter(leaves_of(data).values()))
    return len(first) if first.ndim else 0


def stacked(items: list[Any]) -> Any:
    """Items as one with a further axis at first.

    Raises:
        RuntimeError: they are not alike.
    """
    first = items[0] if items else None
    if first is None or is_tensor_collection(first) or isinstance(first, torch.Tensor):
        try:
            return torch.stack(items)
        except RuntimeError as error:
            raise RuntimeError(f"Stacking the elements of the list resulted in an error: {error}") from error
    each = [leaves_of(item) for item in items]
    if any(set(leaves) != set(each[0]) for leaves in each):
        raise RuntimeError("Stacking the elements of the list resulted in an error: they have different entries")
    return item_of({name: torch.stack([leaves[name] for leaves in each]) for name in each[0]}, ())


def _add_leaves(node: Any, name: str, found: dict[str, torch.Tensor]) -> None:
    """Adds the leaves of a tree."""
    if isinstance(node, torch.Tensor) and not is_tensor_collection(node):
        found[name] = node.detach()
        return
    parts: dict[str, Any] = {}
    if type(node) in (dict, OrderedDict):
        for key, value in node.items():
            if type(key) is int:
                parts[f"{{{key}}}"] = value
            elif isinstance(key, str) and key and "." not in key and key[0] not in "([{":
                parts[key] = value
            else:
                raise SchemaError(f"{key!r}: keys are names without a dot and a bracket at first, or numbers")
    elif type(node) in (list, tuple):
        form = "[{}]" if type(node) is list else "({})"
        parts = {form.format(place): value for place, value in enumerate(node)}
    else:
        raise SchemaError(
            f"items are tensordicts, tensorclasses, tensors, or dicts, lists and tuples of tensors, found "
            f"{type(node).__name__}: put its parts into a TensorDict"
        )
    if not parts:
        raise SchemaError(f"an empty {type(node).__name__} in an item cannot be stored")
    for part, value in parts.items():
        _add_leaves(value, f"{name}.{part}", found)


def _tree_of(leaves: Mapping[tuple[str, ...], torch.Tensor]) -> Any:
    """Rebuilds a tree from its leaves."""
    if () in leaves:
        return leaves[()]
    below: dict[str, dict[tuple[str, ...], torch.Tensor]] = {}
    for path, leaf in leaves.items():
        below.setdefault(path[0], {})[path[1:]] = leaf
    nodes = {part: _tree_of(under) for part, under in below.items()}
    bracket = next(iter(nodes))[0]
    if bracket in "([":
        return (list if bracket == "[" else tuple)(nodes.values())
    return {int(part[1:-1]) if part[0] == "{" else part: node for part, node in nodes.items()}


def batch_dims_of(data: Any, lead: int) -> int:
    """Batch axes of one item, behind the first ones."""
    return max(0, len(data.batch_size) - lead) if is_tensor_collection(data) else 0


__all__ = [
    "OWN",
    "batch_dims_of",
    "count_of",
    "fields_of",
    "is_items_field",
    "item_of",
    "leaves_of",
    "name_of",
    "stacked",
]
