"""`ArenaBatch`: a batch in one buffer of device memory. Each tensor is a view of it, created on first access."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from geartrain.core.dtypes import DTYPES, torch_dtype
from geartrain.core.keys import Keys
from geartrain.replay.batch import METADATA, Array, Batch, unknown_field
from geartrain.replay.fetch_plan import FetchPlan

if TYPE_CHECKING:
    import torch

    from geartrain.device.kernels.gather import GatherPlan
    from geartrain.device.kernels.gather_layout import Arena

# Dtype, shape, strides and offset, both in elements.
_Place: TypeAlias = tuple[Any, tuple[int, ...], tuple[int, ...], int]


class ArenaViews:
    """Offsets and shapes of a batch's tensors in an arena, computed once for all batches of a kind.

    Args:
        plan: the fields that were fetched.
        gather: conversion and packing of these fields.
        layout: layout of the arena.
        steps: steps of a packed batch.

    Attributes:
        n: rows of the batch.
        nbytes: bytes of its fields.
        names: names of its fields.
    """

    def __init__(self, plan: FetchPlan, gather: GatherPlan, layout: Arena, steps: int | None = None) -> None:
        import torch

        self.n = n = layout.n
        self._fields: dict[str, _Place] = {}
        self.nbytes = 0
        for spec, offset in zip(gather.fields, layout.fields, strict=True):
            schema = plan.store.fields[spec.name]
            shape = plan.shape(spec.name, n)
            if steps is not None and spec.timed:
                shape = (steps, *schema.shape)
            self._fields[spec.name] = place = _place(offset, torch_dtype(DTYPES[spec.result or schema.dtype]), *shape)
            self.nbytes += math.prod(place[1]) * place[0].itemsize
        self._metadata = {
            "start": _place(layout.starts, torch.int32, n),
            "length": _place(layout.lengths, torch.int32, n),
            "version": _place(layout.versions, torch.int64, n),
            "probability": _place(layout.probability, torch.float64, n),
            "importance_weights": _place(layout.importance_weights, torch.float64, n),
        }
        if not gather.packed:
            self._metadata["mask"] = _place(layout.mask, torch.bool, n, gather.steps)

    @property
    def names(self) -> list[str]:
        return list(self._fields)

    def field(self, arena: torch.Tensor, name: Any) -> torch.Tensor:
        """A field's tensor. Raises `FieldError`."""
        try:
            return _cut(arena, self._fields[name])
        except (KeyError, TypeError):
            raise unknown_field(name, self._fields) from None

    def metadata(self, arena: torch.Tensor, name: str) -> torch.Tensor | None:
        """A tensor of metadata; None for the mask of a packed batch."""
        place = self._metadata.get(name)
        return None if place is None else _cut(arena, place)


def _place(at: int, dtype: Any, *shape: int) -> _Place:
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return dtype, tuple(shape), strides, at // dtype.itemsize


def _cut(arena: torch.Tensor, place: _Place) -> torch.Tensor:
    dtype, shape, strides, at = place
    return arena.view(dtype).as_strided(shape, strides, at)


class ArenaBatch(Batch):
    """A batch whose tensors are views of its arena, created on first access. Made by `arena_batch`."""

    __slots__ = ("_absent", "_arena", "_shown", "_views")
    _absent: tuple[str, ...]
    _arena: torch.Tensor
    _shown: dict[str, Array]
    _views: ArenaViews

    def __new__(cls, **values: Any) -> Any:
        """Made of a batch's own attributes, as `dataclasses.replace` does, it is a plain batch."""
        return Batch(**values)

    def __getattr__(self, name: str) -> Any:
        value: Any
        if name == "fields":
            value = {each: self[each] for each in self._views.names}
        elif name in METADATA:
            value = None if name in self._absent else self._views.metadata(self._arena, name)
        else:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        object.__setattr__(self, name, value)
        return value

    def __getitem__(self, name: str) -> Array:
        try:
            found = self._shown.get(name)
        except TypeError:  # no name, and not hashable either
            found = None
        if found is None:
            found = self._views.field(self._arena, name)
            self._shown[name] = found
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._views.names)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._views.names

    def __len__(self) -> int:
        return self._views.n

    @property
    def nbytes(self) -> int:
        return self._views.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        metadata = {name: getattr(self, name) for name in METADATA}
        ordered = [metadata.pop(name) for name in ("mask", "start", "length", "version")]
        ordered += [metadata.pop(name) for name in ("probability", "importance_weights")]
        return Batch, (self.fields, self.keys, *ordered, self.step, metadata["draw"], metadata["cu_seqlens"])


_put_arena, _put_views, _put_shown, _put_absent, _put_keys, _put_step, _put_draw, _put_cu_seqlens = (
    getattr(ArenaBatch, name).__set__
    for name in ("_arena", "_views", "_shown", "_absent", "keys", "step", "draw", "cu_seqlens")
)


def arena_batch(
    arena: torch.Tensor,
    views: ArenaViews,
    keys: Keys,
    step: int | None,
    *,
    absent: tuple[str, ...] = (),
    draw: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> ArenaBatch:
    """A batch over an arena that is filled already, or will be. `absent` names metadata that the batch lacks."""
    made: ArenaBatch = object.__new__(ArenaBatch)
    # The dataclass is frozen, so by the slots themselves.
    _put_arena(made, arena)
    _put_views(made, views)
    _put_shown(made, {})
    _put_absent(made, absent)
    _put_keys(made, keys)
    _put_step(made, step)
    _put_draw(made, draw)
    _put_cu_seqlens(made, cu_seqlens)
    return made


__all__ = ["ArenaBatch", "ArenaViews", "arena_batch"]
