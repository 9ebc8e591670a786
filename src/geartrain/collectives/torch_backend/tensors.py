"""Converts arguments of torch's collectives for a `Group`: operations, dtypes, and several tensors into one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from geartrain.collectives.buffers import REDUCED_DTYPES, reduces
from geartrain.core.dtypes import DTYPES as STORE_DTYPES
from geartrain.core.dtypes import torch_dtype

DTYPES = {torch_dtype(STORE_DTYPES[name]): name for name in REDUCED_DTYPES}
# A list, compared with == in this order: torch passes a ReduceOp, which equals a RedOpType; a RedOpType does not equal
# it, so that `op in (ReduceOp.SUM, ...)` is never true.
OPS = [
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.BAND, "band"),
    (dist.ReduceOp.BOR, "bor"),
    (dist.ReduceOp.BXOR, "bxor"),
]


def as_list(tensors: Any) -> list[torch.Tensor]:
    """A tensor, or several, as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def as_options(opts: Any, timeout: timedelta | None, kind: type[Any]) -> Any:
    """What a call gave as operation and timeout, or as options, as options of this kind."""
    if not hasattr(opts, "reduceOp"):  # a ReduceOp, or nothing
        op, opts = opts, kind()
        if op is not None:
            opts.reduceOp = op if isinstance(op, dist.ReduceOp) else dist.ReduceOp(op)
    if timeout is not None:
        opts.timeout = timeout
    return opts


def op_of(given: Any, tensors: list[torch.Tensor]) -> str | None:
    """The name of the operation, if a Group supports it for all of the tensors."""
    names = [name for op, name in OPS if given == op]
    first = tensors[0] if tensors else None
    if not names or first is None or first.dtype not in DTYPES or first.device.type not in ("cpu", "cuda"):
        return None
    if not reduces(names[0], DTYPES[first.dtype]):
        return None
    same = all(t.dtype == first.dtype and t.device == first.device and t.layout == torch.strided for t in tensors)
    return names[0] if same else None


def devices_of(tensors: list[torch.Tensor]) -> list[torch.device]:
    """The GPU that the tensors are on, if it is one."""
    return [tensors[0].device] if tensors[0].is_cuda else []


def flat_of(tensors: list[torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None] | None]:
    """The tensors as one contiguous tensor; and, where that is a copy, the function that copies it back."""
    tensors = [tensor.detach() for tensor in tensors]
    if len(tensors) == 1 and tensors[0].is_contiguous() and not tensors[0].is_neg() and not tensors[0].is_conj():
        return tensors[0].view(-1), None
    flat = torch.empty(sum(t.numel() for t in tensors), dtype=tensors[0].dtype, device=tensors[0].device)
    parts = list(flat.split([tensor.numel() for tensor in tensors]))  # type: ignore[no-untyped-call]
    for part, tensor in zip(parts, tensors, strict=True):
        part.view(tensor.shape).copy_(tensor)

    def copy_back() -> None:
        for part, tensor in zip(parts, tensors, strict=True):
            tensor.copy_(part.view(tensor.shape))

    return flat, copy_back
