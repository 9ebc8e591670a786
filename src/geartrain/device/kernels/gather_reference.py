"""Reference of the gather in torch and Python loops: slow and obvious. The kernels have to agree with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from geartrain.device.kernels.gather import GatherPlan
from geartrain.device.kernels.gather_layout import Arena
from geartrain.device.kernels.philox import WINDOW_STREAM, counter_word, reference_below, reference_bits


def reference_gather(
    plan: GatherPlan,
    segment: torch.Tensor,
    arena: torch.Tensor,
    layout: Arena,
    rows: Sequence[int],
    generations: Sequence[int],
    *,
    ends: Sequence[int] | None = None,
    draw: tuple[int, int, int] | None = None,
    numbers: Sequence[int] | None = None,
    places: Sequence[int] | None = None,
    cu_seqlens: Sequence[int] | None = None,
    clear: bool = True,
) -> None:
    """Reference of `GatherPlan.launch`: one row at a time, on the CPU."""
    about = plan.segment
    torn = arena[layout.torn : layout.torn + layout.n]
    if clear:
        torn.zero_()
    for i, (row, generation) in enumerate(zip(rows, generations, strict=True)):
        place = i if places is None else int(places[i])
        if not _is_generation(plan, segment, row, generation):
            torn[place] = 1
            continue
        status = about.status + row * about.status_stride
        content = int(segment[status + 16 : status + 24].view(torch.int64))
        length = min(int(segment[status + 24 : status + 28].view(torch.int32)), about.max_length)
        number = i if numbers is None else int(numbers[i])
        start, count = reference_window(plan, length, None if ends is None else int(ends[i]), draw, number)
        at = plan.steps - count if plan.window and plan.pad_left and not plan.packed else 0
        room, stands = plan.steps, place * plan.steps
        if cu_seqlens is not None:
            stands, room = int(cu_seqlens[i]), int(cu_seqlens[i + 1]) - int(cu_seqlens[i])
            if room != count:
                torn[place] = 1
                continue
        for field, offset in zip(plan.fields, layout.fields, strict=True):
            block = segment[field.offset + row * field.stride :][: field.block_bytes]
            first, steps = (stands, room) if field.timed else (place, 1)
            to = arena[offset + first * field.result_bytes :][: steps * field.result_bytes]
            if field.timed:
                block = block[start * field.step_bytes : (start + count) * field.step_bytes]
                to.zero_()
                to = to[at * field.result_bytes : (at + count) * field.result_bytes]
            if field.result is None:
                to.copy_(block)
            else:
                source = block.view(getattr(torch, field.dtype)).to(torch.float32)
                result = source * torch.tensor(field.scale) + torch.tensor(field.shift)
                to.view(getattr(torch, field.result)).copy_(result)
        if not plan.packed:
            mask = arena[layout.mask + place * plan.steps :][: plan.steps]
            mask.zero_()
            mask[at : at + count] = 1
        for offset, value, dtype in (
            (layout.starts + 4 * place, start, torch.int32),
            (layout.lengths + 4 * place, length, torch.int32),
            (layout.versions + 8 * place, int(segment[status + 8 : status + 16].view(torch.int64)), torch.int64),
        ):
            arena[offset : offset + dtype.itemsize].view(dtype)[0] = value
        same = content == int(segment[status + 16 : status + 24].view(torch.int64))
        written = about.content_numbers and (content % 2 == 1 or not same)
        if written or not _is_generation(plan, segment, row, generation):
            torn[place] = 1


def reference_count_steps(
    plan: GatherPlan,
    segment: torch.Tensor,
    rows: Sequence[int],
    *,
    ends: Sequence[int] | None = None,
    draw: tuple[int, int, int] | None = None,
    numbers: Sequence[int] | None = None,
) -> torch.Tensor:
    """Reference of `GatherPlan.count_steps`."""
    counts = [0]
    for i, row in enumerate(rows):
        status = plan.segment.status + row * plan.segment.status_stride
        length = min(int(segment[status + 24 : status + 28].view(torch.int32)), plan.segment.max_length)
        end = None if ends is None else int(ends[i])
        counts.append(reference_window(plan, length, end, draw, i if numbers is None else int(numbers[i]))[1])
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def reference_window(
    plan: GatherPlan, length: int, end: int | None, draw: tuple[int, int, int] | None, number: int
) -> tuple[int, int]:
    """First step and number of steps of a window."""
    if not plan.window:
        return 0, length
    last = length - 1
    if draw is not None:
        bits = reference_bits(draw[0], draw[1], counter_word(WINDOW_STREAM, draw[2]), number)
        last = min(last, reference_below(bits, max(length, 1)))
    elif end is not None:
        last = min(last, max(end, 0))
    count = min(plan.steps, last + 1)
    return last + 1 - count, count


def _is_generation(plan: GatherPlan, segment: torch.Tensor, row: int, generation: int) -> bool:
    word = int(segment[plan.segment.words + 8 * row :][:8].view(torch.int64))
    return generation % 2 == 1 and (word >> 32) & 0xFFFFFFFF == generation


__all__ = ["reference_count_steps", "reference_gather", "reference_window"]
