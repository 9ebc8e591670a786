"""`DeviceOptions` and `Convert`: how a replay's batches get to a device, and the conversion of fields on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from geartrain.core.arguments import (
    FLAG,
    Options,
    check_choice,
    check_real,
    check_type,
    check_whole,
    checked,
    shown,
)

if TYPE_CHECKING:
    import torch

_LARGEST = float(np.finfo(np.float32).max)
Path = Literal["auto", "gather", "copy", "staged"]
Exchange = Literal["host", "nccl"]


@dataclass(frozen=True)
class Convert(Options):
    """Conversion of a field in transfer: float32(x) * scale + shift, rounded to `dtype`.

    Args:
        dtype: "bfloat16", "float16" or "float32".
        scale, shift: float32 numbers.

    Example:
        >>> Convert("bfloat16", scale=1 / 255)
        Convert(dtype='bfloat16', scale=0.00392156862745098, shift=0.0)
    """

    dtype: str = field(metadata=checked(check_choice, ("bfloat16", "float16", "float32")))
    scale: float = field(default=1.0, metadata=checked(check_real, -_LARGEST, _LARGEST))
    shift: float = field(default=0.0, metadata=checked(check_real, -_LARGEST, _LARGEST))

    def apply(self, values: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        """The same as the kernel does, by torch; where a step is not `real` the result is 0."""
        import torch

        made = (values.to(torch.float32) * self.scale + self.shift).to(getattr(torch, self.dtype))
        if real is not None:
            made.masked_fill_(~real.view(*real.shape, *([1] * (made.ndim - real.ndim))), 0)
        return made


@dataclass(frozen=True)
class DeviceOptions(Options):
    """How batches get to a GPU; `Replay(device="cuda")` is short for `Replay(device=DeviceOptions("cuda"))`.

    Args:
        device: "cuda", "cuda:1", a torch.device, or a `geartrain.device.device.Device`.
        path: how rows get to the device.

            - "auto" (the default) stages batches of less than 4 MB (1 MB for rows beyond the crossover), and batches
              whose segment cannot be pinned. Otherwise it uses "copy" for rows beyond the crossover without small
              fields, and "gather" for the rest.
            - "gather": the GPU's kernel reads the rows from the pinned segment.
            - "copy": the GPU's copy engines take each row's windows from the pinned segment.
            - "staged": the CPU gathers into pinned memory.

            "auto" logs why it stages; "gather" and "copy" raise instead.
        select: where rows are drawn. "device" draws with Triton kernels from a copy of the priorities in device
            memory. "auto" does so if the strategy allows it and the copy pays: the batch is large, or the store does
            not change.
        convert: fields to convert on the way, by name.
        packed: windows are packed one after the other, without padding, with `batch.cu_seqlens`.
        pin_limit_bytes: most pinned bytes on this host, over all processes; half of its memory by default.
        crossover_bytes: largest rows that "auto" gathers, whatever their fields. By default 96 KB, as measured
            on an H100. `geartrain bench fetch --device cuda` measures it for another GPU.
        exchange: over several ranks, how a rank gets rows that other ranks read. The same on all ranks.

            - "host" sends them to pinned host memory over the replay's connections and copies them from there, ahead.
            - "nccl" gathers them ahead on the GPU of the rank that has them. When the batch is taken, an all-to-all
              moves them from GPU to GPU, on the current stream. All ranks must take batches at the same points of
              their collectives.
    """

    device: Any = "cuda"
    path: Path = field(default="auto", metadata=checked(check_choice, get_args(Path)))
    select: Literal["auto", "host", "device"] = field(
        default="auto", metadata=checked(check_choice, ("auto", "host", "device"))
    )
    convert: Mapping[str, Convert] = field(default_factory=dict)
    packed: bool = field(default=False, metadata=FLAG)
    pin_limit_bytes: int | None = field(default=None, metadata=checked(check_whole, 0))
    crossover_bytes: int | None = field(default=None, metadata=checked(check_whole, 0))
    exchange: Exchange = field(default="host", metadata=checked(check_choice, ("host", "nccl")))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_type("convert is a dict of Convert by field", self.convert, Mapping)
        for name, how in self.convert.items():
            check_type(f"convert[{shown(name)}] is a Convert, such as Convert('bfloat16')", how, Convert)


__all__ = ["Convert", "DeviceOptions", "Exchange", "Path"]
