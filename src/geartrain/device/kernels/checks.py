"""Checks of a kernel's arguments before its launch, and helpers for launches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from geartrain.device.kernels import interpreting
from geartrain.errors import ArgumentError

# Rows have to fit 31 bits: sums of 2^31 priorities of 32 bits stay below 2^63, torch's largest whole number.
MAX_ROWS = 2**31 - 1


def check(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    like: torch.Tensor | None = None,
    n: int | None = None,
) -> None:
    """Raises `ArgumentError` unless `tensor` is contiguous, (n,), of one of the dtypes, and on a usable device.

    With `like`, it has to be on the same device.
    """
    if tensor.ndim != 1 or tensor.dtype not in dtypes or not tensor.is_contiguous():
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        layout = "" if tensor.is_contiguous() else ", not contiguous"
        raise ArgumentError(f"{name} is {wanted} (n,), contiguous; found {tensor.dtype} {tuple(tensor.shape)}{layout}")
    if tensor.device.type != "cuda" and not (interpreting() and tensor.device.type == "cpu"):
        raise ArgumentError(
            f"{name} is on {tensor.device}; kernels take CUDA tensors, or CPU tensors where TRITON_INTERPRET=1 was set "
            "before the first import. On a CPU use geartrain.selection.Candidates"
        )
    if like is not None and tensor.device != like.device:
        raise ArgumentError(f"{name} is on {tensor.device}, the priorities are on {like.device}")
    if n is not None and len(tensor) != n:
        raise ArgumentError(f"{name} has {len(tensor)} values, {n} are needed")


def check_rows(name: str, rows: torch.Tensor, n: int) -> None:
    """Raises `ArgumentError` when a row is not from 0 to n - 1. Waits for the device."""
    if len(rows) == 0:
        return
    low, high = (int(end) for end in torch.aminmax(rows))
    if low < 0 or high >= n:
        raise ArgumentError(f"{name}: there is no row {low if low < 0 else high}")


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device the one that kernels are launched on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def interpreted(compiled: int, interpreted_: int) -> int:
    """Chooses a launch parameter. The interpreter is slow per program, a GPU per element of a program."""
    return interpreted_ if interpreting() else compiled
