"""Layout of a version: the names, dtypes, shapes and offsets of its tensors in a buffer.

A name is a path, so nested mappings such as `{"policy": module.state_dict(), "steps": array}` are restored. Each tensor
starts at a multiple of 64 bytes.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from geartrain.core.arguments import check_type, is_masked, shown
from geartrain.core.json_values import parse_json
from geartrain.core.schema import round_up
from geartrain.errors import ArgumentError, IncompatibleStoreError

ALIGNMENT = 64


class Entry(NamedTuple):
    """A tensor or array: its path in the nesting, dtype, shape, and place in the buffer."""

    path: tuple[str, ...]
    dtype: str  # "torch.bfloat16", or NumPy's, "<f4"
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def is_torch(self) -> bool:
        """Whether it is a torch tensor, and not a NumPy array."""
        return self.dtype.startswith("torch.")

    def __str__(self) -> str:
        return f"{'.'.join(self.path)}: {self.dtype} {list(self.shape)}"


class Schema:
    """All entries of a version, in their order of insertion."""

    def __init__(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.nbytes = max((e.offset + e.nbytes for e in entries), default=0)

    @classmethod
    def of(cls, leaves: Mapping[tuple[str, ...], Any]) -> Schema:
        """Schema of the leaves of `leaves_of`."""
        entries, offset = [], 0
        for path, leaf in leaves.items():
            dtype, itemsize = _dtype_of(path, leaf)
            shape = tuple(int(n) for n in leaf.shape)
            nbytes = math.prod(shape) * itemsize
            entries.append(Entry(path, dtype, shape, offset, nbytes))
            offset += round_up(nbytes, ALIGNMENT)
        return cls(entries)

    @classmethod
    def from_json(cls, text: bytes) -> Schema:
        """Inverse of `to_json`.

        Raises:
            IncompatibleStoreError: the bytes are no schema: no JSON, unknown dtypes, or sizes that do not fit.
        """
        try:
            found = parse_json(text)
            entries = [Entry(tuple(path), dtype, tuple(shape), o, n) for path, dtype, shape, o, n in found]
            for entry in entries:
                _check_entry(entry)
            nested([entry.path for entry in entries], [None] * len(entries))
        except (ValueError, TypeError, AttributeError, SyntaxError) as error:
            raise IncompatibleStoreError(f"a schema of weights that cannot be read: {str(error)[:300]}") from None
        return cls(entries)

    def to_json(self) -> bytes:
        """The bytes in a segment."""
        return json.dumps([list(entry) for entry in self.entries], separators=(",", ":")).encode()

    def check(self, other: Schema) -> None:
        """Raises `ArgumentError`, which names the difference from the first version."""
        if self.entries == other.entries:
            return
        mine = {e.path: e for e in self.entries}
        theirs = {e.path: e for e in other.entries}
        differences = [f"{'.'.join(path)} is missing" for path in mine if path not in theirs]
        differences += [f"{entry} is new" for path, entry in theirs.items() if path not in mine]
        for path, entry in mine.items():
            now = theirs.get(path)
            if now is not None and (now.dtype, now.shape) != (entry.dtype, entry.shape):
                differences.append(f"{entry} has become {now.dtype} {list(now.shape)}")
        if not differences:
            differences = ["the order of the names has changed"]
        more = f", and {len(differences) - 8} more" if len(differences) > 8 else ""
        raise ArgumentError(
            f"every version has the names, dtypes and shapes of the first; here {'; '.join(differences[:8])}{more}. "
            "Publish other weights under another name, or with a new publisher"
        )

    def views(self, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> Iterator[Any]:
        """Each entry as a tensor or array in a buffer's memory."""
        torch = importlib.import_module("torch") if any(e.is_torch for e in self.entries) else None
        for entry in self.entries:
            raw = memory[entry.offset : entry.offset + entry.nbytes]
            if torch is None or not entry.is_torch:
                yield raw.view(np.dtype(entry.dtype)).reshape(entry.shape)
            else:
                yield torch.from_numpy(raw).view(getattr(torch, entry.dtype[6:])).view(entry.shape)


def leaves_of(weights: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """Tensors and arrays by path. Raises `ArgumentError`, which names any other value."""
    leaves: dict[tuple[str, ...], Any] = {}

    def walk(mapping: Mapping[str, Any], path: tuple[str, ...]) -> None:
        if len(path) > 32:
            raise ArgumentError(f"weights are nested up to 32 deep, and {'.'.join(path[:4])}... is deeper")
        if not mapping:
            raise ArgumentError(f"there are no weights{' in ' + '.'.join(path) if path else ''}")
        for key, value in mapping.items():
            if not isinstance(key, str):
                raise ArgumentError(f"weights have names, and {'.'.join(path) or 'the mapping'} has the key {key!r}")
            here = (*path, key)
            if isinstance(value, Mapping):
                walk(value, here)
            else:
                leaves[here] = value

    check_type("weights are a mapping from names to tensors", weights, Mapping)
    walk(weights, ())
    return leaves


def nested(paths: list[tuple[str, ...]], values: list[Any]) -> dict[str, Any]:
    """Inverse of `leaves_of`."""
    whole: dict[str, Any] = {}
    for path, value in zip(paths, values, strict=True):
        at = whole
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return whole


def _check_entry(entry: Entry) -> None:
    """Raises `ValueError` (or what a wrong type raises) unless `views` can make the entry from memory."""
    if not entry.path or not all(isinstance(name, str) for name in entry.path):
        raise ValueError(f"the path {shown(entry.path)}")
    if not all(type(n) is int and n >= 0 for n in (*entry.shape, entry.offset, entry.nbytes)) or len(entry.shape) > 64:
        raise ValueError(f"the shape or place of {shown(entry)}")
    if entry.is_torch:
        torch = importlib.import_module("torch")
        dtype = getattr(torch, entry.dtype[6:])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"the dtype of {entry}")
        itemsize = dtype.itemsize
    else:
        plain = np.dtype(entry.dtype)
        if plain.hasobject or plain.names is not None or plain.subdtype is not None or plain.itemsize == 0:
            raise ValueError(f"the dtype of {entry}")  # objects would be pointers that the file chooses
        itemsize = plain.itemsize
    if itemsize * math.prod(n for n in entry.shape if n) >= 2**63:  # too many for NumPy, also where an axis has none
        raise ValueError(f"the shape of {entry}")
    if entry.nbytes != math.prod(entry.shape) * itemsize or entry.offset % ALIGNMENT:
        raise ValueError(f"the size of {entry}")


def _dtype_of(path: tuple[str, ...], leaf: Any) -> tuple[str, int]:
    name = ".".join(path)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
            raise ArgumentError(
                f"{name} is a {type(leaf).__name__}; give the plain tensor (full_tensor(), to_dense(), ...)"
            )
        if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_meta:
            what = "quantized" if leaf.is_quantized else "without memory (meta)" if leaf.is_meta else str(leaf.layout)
            raise ArgumentError(f"{name} is {what}; weights are dense tensors")
        return str(leaf.dtype), leaf.element_size()
    if is_masked(leaf):
        raise ArgumentError(f"{name} is a masked array, whose mask would be lost: give its .filled(value) or its .data")
    if isinstance(leaf, (np.ndarray, np.generic)):
        if leaf.dtype.hasobject or leaf.dtype.names is not None or leaf.dtype.itemsize == 0:
            raise ArgumentError(f"{name} has dtype {leaf.dtype}; weights are plain numbers")
        return leaf.dtype.str, leaf.dtype.itemsize
    raise ArgumentError(f"{name} is a {type(leaf).__name__}; weights are tensors and NumPy arrays")
