"""`DeviceOptions` and `Convert`: how a replay's batches get to a device, and the conversion of fields on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from geartrain.core.arguments import check_choice, check_flag, check_real, check_whole, shown
from geartrain.errors import ArgumentError

if TYPE_CHECKING:
    import torch

_LARGEST = float(np.finfo(np.float32).max)
Path = Literal["auto", "gather", "copy", "staged"]
Exchange = Literal["host", "nccl"]


@dataclass(frozen=True)
class Convert:
    """Conversion of a field in transfer: float32(x) * scale + shift, rounded to `dtype`.

    Args:
        dtype: "bfloat16", "float16" or "float32".
        scale, shift: float32 numbers.

    Example:
        >>> Convert("bfloat16", scale=1 / 255)
        Convert(dtype='bfloat16', scale=0.00392156862745098, shift=0.0)
    """

    dtype: str
    scale: float = 1.0
    shift: float = 0.0

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, ("bfloat16", "float16", "float32"))
        for what, value in (("scale", self.scale), ("shift", self.shift)):
            if abs(check_real(what, value)) > _LARGEST:
                raise ArgumentError(f"{what} is a float32 number, found {shown(value)}")

    def apply(self, values: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        """The same as the kernel does, by torch; where a step is not `real` the result is 0."""
        import torch

        made = (values.to(torch.float32) * self.scale + self.shift).to(getattr(torch, self.dtype))
        if real is not None:
            made.masked_fill_(~real.view(*real.shape, *([1] * (made.ndim - real.ndim))), 0)
        return made


@dataclass(frozen=True)
class DeviceOptions:
    """How batches get to a GPU; `Replay(device="cuda")` is short for `Replay(device=DeviceOptions("cuda"))`.

    Args:
        device: "cuda", "cuda:1", a torch.device, or a `geartrain.device.device.Device`.
        path: "gather": the GPU's kernel reads the rows out of the pinned segment. "copy": its copy engines take each
            row's windows from there. "staged": the CPU gathers into pinned memory. "auto": staged for batches of less
            than 4 MB (1 MB of rows beyond the crossover); for others, where the segment can be pinned, copy for rows
            beyond the crossover that have no small fields, gather for the rest, and staged where it cannot. "gather"
            and "copy" raise where "auto" would say in the log why it stages.
        select: where rows are drawn. "device" draws with Triton kernels from a copy of the priorities in device
            memory; "auto" does so where the strategy allows it and the copy pays: the batch is large, or the store does
            not change.
        convert: fields to convert on the way, by name.
        packed: windows stand one behind the other, without padding, with `batch.cu_seqlens`.
        pin_limit_bytes: most pinned bytes on this host, all processes together; half of its memory by default.
        crossover_bytes: up to which "auto" gathers rows, whatever their fields; by default what was measured on this
            machine, or 96 KB, which an H100 has (gather_threshold.py).
        exchange: over several ranks, how rows come that other ranks read: "host" sends them to pinned host memory over
            the replay's connections and copies them from there, ahead; with "nccl" the GPU of the rank that has them
            gathers them ahead, and an all-to-all takes them from GPU to GPU when the batch is taken, on the stream that
            is current there. The same on all ranks, which take batches at the same points of their collectives.
    """

    device: Any = "cuda"
    path: Path = "auto"
    select: Literal["auto", "host", "device"] = "auto"
    convert: Mapping[str, Convert] = field(default_factory=dict)
    packed: bool = False
    pin_limit_bytes: int | None = None
    crossover_bytes: int | None = None
    exchange: Exchange = "host"

    def __post_init__(self) -> None:
        check_choice("path", self.path, get_args(Path))
        check_choice("select", self.select, ("auto", "host", "device"))
        check_choice("exchange", self.exchange, ("host", "nccl"))
        check_flag("packed", self.packed)
        for what, size in (("pin_limit_bytes", self.pin_limit_bytes), ("crossover_bytes", self.crossover_bytes)):
            if size is not None and check_whole(what, size) < 0:
                raise ArgumentError(f"{what} is at least 0, found {shown(size)}")
        if not isinstance(self.convert, Mapping):
            raise ArgumentError(f"convert is a dict of Convert by field, found {shown(self.convert)}")
        for name, how in self.convert.items():
            if not isinstance(how, Convert):
                raise ArgumentError(
                    f"convert[{shown(name)}] is a Convert, such as Convert('bfloat16'); found {shown(how)}"
                )


__all__ = ["Convert", "Exchange", "DeviceOptions", "Path"]
