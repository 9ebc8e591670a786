"""Changes the layout of rows in device memory: converts fields, packs windows and scatters rows.

torch does it here, with a few operations per field, for batches that the CPU made and for rows from other ranks. The
gather kernel does the same work while it copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from geartrain.core.dtypes import DTYPES, torch_dtype
from geartrain.replay.device.options import Convert
from geartrain.replay.device.transfer import Transfer

if TYPE_CHECKING:
    import torch

    from geartrain.device.kernels.gather import GatherPlan
    from geartrain.device.kernels.gather_layout import Arena


def arrangement(
    transfer: Transfer, source: torch.Tensor, plan: GatherPlan, layout: Arena, mask: NDArray[np.bool_]
) -> Callable[[], None]:
    """Work for `Device.run` that fills a transfer's arena from an arena of padded rows.

    It converts fields that are not converted yet, and packs windows if the batch is packed. This call uploads its host
    data.

    Args:
        transfer: the transfer whose arena is filled.
        source, plan, layout: a padded batch on the device, its plan and its layout.
        mask: (n, steps) of the batch, on the host.
    """
    import torch

    target, n, steps = transfer.target, layout.n, plan.steps
    packed = transfer.plan.packed
    real = None
    if packed:
        ends = np.concatenate([np.zeros(1, np.int32), mask.sum(1, dtype=np.int32)]).cumsum(dtype=np.int32)
        real, transfer.cu_seqlens = target.upload([np.flatnonzero(mask), ends])
        transfer.steps_packed = int(ends[-1])
    known_steps = source[layout.mask : layout.mask + n * steps].view(torch.bool).view(n, steps)

    def work() -> None:
        for was, becomes, source_at, at in zip(
            plan.fields, transfer.plan.fields, layout.fields, transfer.layout.fields, strict=True
        ):
            size = n * (steps if was.timed else 1) * was.result_bytes
            lines = n * (steps if was.timed else len(was.places or (0,)))
            values = source[source_at : source_at + size].view(lines, -1)  # a line a step
            if real is not None and was.timed:
                values = values[real]
            if becomes.result is not None and was.result is None:
                exact = values.view(torch_dtype(DTYPES[was.dtype]))
                of = None
                if was.places is not None:
                    of = known_steps[:, list(was.places)].reshape(-1)
                elif was.timed and real is None:
                    of = known_steps.reshape(-1)
                values = target.options.convert[was.name].apply(exact, of).view(torch.uint8)
            transfer.arena[at : at + values.numel()].view(values.shape).copy_(values)
        for name, size in (("mask", n * steps), ("starts", 4 * n), ("lengths", 4 * n), ("versions", 8 * n)):
            if name == "mask" and packed:
                continue
            from_, to = getattr(layout, name), getattr(transfer.layout, name)
            transfer.arena[to : to + size].copy_(source[from_ : from_ + size])

    return work


def scatter_lines(to: torch.Tensor, at: int, n: int, places: torch.Tensor, lines: torch.Tensor) -> None:
    """to[at:], seen as n lines, gets `lines` (k, bytes) at `places` (k,): a work for `Device.run`.

    Offsets are multiples of 16; a line may have any number of bytes, and is moved by its widest whole number.
    """
    import torch

    line = lines.shape[1]
    if line == 0:
        return
    wide = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[math.gcd(line, 8)]
    to[at : at + n * line].view(n, line).view(wide)[places] = lines.view(wide)


def convert_rows(
    plan: GatherPlan, number: int, values: torch.Tensor, mask: torch.Tensor, convert: Mapping[str, Convert]
) -> torch.Tensor:
    """Field `number` of k padded rows as it came, (k, bytes) uint8, as it stands in a batch.

    `mask` is (k, steps) on the device.
    """
    import torch

    field, k = plan.fields[number], len(values)
    if field.result is None:
        return values
    exact = values.contiguous().view(torch_dtype(DTYPES[field.dtype]))
    exact = exact.view(k, plan.steps, -1) if field.timed else exact
    made: Any = convert[field.name].apply(exact, mask if field.timed else None)
    lines: torch.Tensor = made.reshape(k, -1).view(torch.uint8)
    return lines


__all__ = ["arrangement", "convert_rows", "scatter_lines"]
