"""The Triton kernels of the gather (gather.py).

They look up the rows, count the steps of packed windows, move the rows, and check at the end which rows are torn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from geartrain.device.kernels.gather_order import behind, first_word, still
from geartrain.device.kernels.philox import below, random_bits


@triton.jit
def _bfloat16(value):
    """The bits of float32 numbers rounded to the nearest bfloat16, of two the even: the interpreter's cast cuts."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(value == value, rounded, 0x7FC0).to(tl.uint16)  # noqa: PLR0124 (NaN)


@triton.jit
def _move(
    segment,
    arena,
    source,
    low,
    high,
    total,
    target,
    first,
    scale,
    shift,
    SOURCE: tl.constexpr,
    SOURCE_BYTES: tl.constexpr,
    RESULT: tl.constexpr,
    RESULT_BYTES: tl.constexpr,
    CONVERT: tl.constexpr,
    WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One piece of one field of one row.

    Bytes are counted from the first byte of the field's window in the batch, which stands at `source` in the segment
    (or would, where there is padding before the first step) and goes to `target`. Bytes [low, high) of the window's
    `total` are steps of the row.
    """
    SIZE: tl.constexpr = CHUNK // SOURCE_BYTES
    PER_GROUP: tl.constexpr = 16 // SOURCE_BYTES
    lane = tl.arange(0, SIZE)
    lead = source & 127
    from_ = (segment + tl.multiple_of((source - lead) + first, 128)).to(tl.pointer_type(SOURCE))
    begin = (first - lead).to(tl.int32)  # of lane 0; a window has less than 2^31 bytes
    at_group = begin + lane // PER_GROUP * 16
    # One comparison for two ends: what lies before the first is a large unsigned number.
    first_group = (low - ((lead + low) & 15)).to(tl.int32)
    wanted = (at_group - first_group).to(tl.uint32) < tl.where(high > low, high - first_group, 0).to(tl.uint32)
    value = tl.load(from_ + lane, mask=wanted, other=0, volatile=True)
    at = begin + lane * SOURCE_BYTES
    real = (at - low.to(tl.int32)).to(tl.uint32) < (high - low).to(tl.uint32)
    if CONVERT != 0:
        exact = value.to(tl.float32) * scale + shift
        if CONVERT == 2:
            result = _bfloat16(exact)
        else:
            result = exact.to(RESULT)
        result = tl.where(real, result, tl.zeros_like(result))
    else:
        result = tl.where(real, value, tl.zeros_like(value))
    room = total.to(tl.uint32)
    start = target + (first - lead) // SOURCE_BYTES * RESULT_BYTES
    if WIDE:  # steps, and so all the other numbers, are multiples of 16 bytes
        to = (arena + tl.multiple_of(start, 16)).to(tl.pointer_type(RESULT))
        tl.store(to + lane, result, mask=at_group.to(tl.uint32) < room)
    else:
        to = (arena + start).to(tl.pointer_type(RESULT))
        tl.store(to + lane, result, mask=at.to(tl.uint32) < room)


@triton.jit(
    do_not_specialize=[
        "n",
        "slots_a_row",
        "window",
        "status_at",
        "mask_at",
        "starts_at",
        "lengths_at",
        "versions_at",
        "torn_at",
        "seed",
        "step",
        "counter",
    ]
)
def gather_rows_kernel(
    segment,
    arena,
    rows,
    lengths,
    ends,
    numbers,
    places,
    cu_seqlens,
    fields,
    slots,
    factors,
    n: tl.int64,
    slots_a_row: tl.int64,
    window: tl.int64,
    status_at: tl.int64,
    mask_at: tl.int64,
    starts_at: tl.int64,
    lengths_at: tl.int64,
    versions_at: tl.int64,
    torn_at: tl.int64,
    seed: tl.uint64,
    step: tl.uint64,
    counter: tl.uint32,
    KINDS: tl.constexpr,
    WINDOWED: tl.constexpr,
    PAD_LEFT: tl.constexpr,
    ENDS: tl.constexpr,
    NUMBERED: tl.constexpr,
    PLACED: tl.constexpr,
    PACKED: tl.constexpr,
    STATUS_STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    MASK_BLOCK: tl.constexpr,
):
    """Slots of a batch, one after the other; see gather.py for what a slot is and what is read in which order."""
    for item in range(tl.program_id(0).to(tl.int64), n * slots_a_row, tl.num_programs(0).to(tl.int64)):
        i = item // slots_a_row
        slot = item % slots_a_row
        row = tl.load(rows + i).to(tl.int64)
        place = i
        if PLACED:
            place = tl.load(places + i).to(tl.int64)
        length = tl.load(lengths + i).to(tl.int64)
        if length >= 0:  # else the row was another one already
            about = segment + tl.multiple_of(status_at + row * STATUS_STRIDE, 8)
            begin = tl.zeros_like(length)
            count = length
            at = tl.zeros_like(length)
            if WINDOWED:
                end = length - 1
                if ENDS == 1:
                    end = tl.minimum(end, tl.maximum(tl.load(ends + i).to(tl.int64), 0))
                if ENDS == 2:
                    number = i.to(tl.uint32)
                    if NUMBERED:
                        number = tl.load(numbers + i).to(tl.uint32)
                    bits_high, bits_low = random_bits(number, counter, seed.to(tl.uint64), step.to(tl.uint64))
                    end = below(bits_high, bits_low, tl.maximum(length, 1).to(tl.uint64)).to(tl.int64)
                    end = tl.minimum(end, length - 1)
                count = tl.minimum(window, end + 1)
                begin = end + 1 - count
                if PAD_LEFT:
                    at = window - count
            room = window
            stands = place * window  # in steps, where the row's window begins in timed fields
            fits = length >= 0
            if PACKED:
                stands = tl.load(cu_seqlens + i).to(tl.int64)
                room = tl.load(cu_seqlens + i + 1).to(tl.int64) - stands
                fits = room == count
                at = tl.zeros_like(length)
            if not fits:
                tl.store(arena + torn_at + place, tl.full([], 1, tl.uint8))
            else:
                field = tl.load(slots + slot * 2).to(tl.int64)
                if field < 0:
                    version = tl.load((about + 8).to(tl.pointer_type(tl.int64)), volatile=True)
                    tl.store((arena + starts_at + place * 4).to(tl.pointer_type(tl.int32)), begin.to(tl.int32))
                    tl.store((arena + lengths_at + place * 4).to(tl.pointer_type(tl.int32)), length.to(tl.int32))
                    tl.store((arena + versions_at + place * 8).to(tl.pointer_type(tl.int64)), version)
                    if not PACKED:
                        for first in range(0, window, MASK_BLOCK):
                            step_of = first + tl.arange(0, MASK_BLOCK)
                            is_real = (step_of >= at) & (step_of < at + count)
                            tl.store(
                                arena + mask_at + place * window + step_of,
                                is_real.to(tl.uint8),
                                mask=step_of < window,
                            )
                else:
                    about_field = fields + field * 8
                    timed = tl.load(about_field + 3)
                    step_bytes = tl.load(about_field + 2)
                    result_bytes = tl.load(about_field + 6)
                    kind = tl.load(about_field + 5)
                    column = tl.load(about_field) + row * tl.load(about_field + 1)
                    target = tl.load(about_field + 4)
                    first = tl.load(slots + slot * 2 + 1).to(tl.int64) * CHUNK
                    source = column
                    low = tl.zeros_like(length)
                    high = step_bytes
                    total = step_bytes
                    if timed != 0:
                        source = column + (begin - at) * step_bytes
                        low = at * step_bytes
                        high = (at + count) * step_bytes
                        total = room * step_bytes
                        target += stands * result_bytes
                    else:
                        target += place * result_bytes
                    scale = tl.load(factors + field * 2)
                    shift = tl.load(factors + field * 2 + 1)
                    for k in tl.static_range(len(KINDS)):
                        if kind == k:
                            _move(
                                segment,
                                arena,
                                source,
                                low,
                                high,
                                total,
                                target,
                                first,
                                scale,
                                shift,
                                KINDS[k][0],
                                KINDS[k][1],
                                KINDS[k][2],
                                KINDS[k][3],
                                KINDS[k][4],
                                KINDS[k][5],
                                CHUNK,
                            )


@triton.jit
def _content_numbers(segment, row, inside, status_at, STATUS_STRIDE: tl.constexpr):
    """Current content numbers of rows (native/segment/segment.h)."""
    about = segment + (status_at + row * STATUS_STRIDE + 16)
    return tl.load(about.to(tl.pointer_type(tl.int64)), mask=inside, other=0, volatile=True)


@triton.jit(do_not_specialize=["n", "max_length", "words_at", "status_at"])
def look_up_rows_kernel(
    segment,
    rows,
    generations,
    lengths,
    contents,
    n: tl.int64,
    max_length: tl.int64,
    words_at: tl.int64,
    status_at: tl.int64,
    KEYED: tl.constexpr,
    CONTENTS: tl.constexpr,
    STATUS_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    ORDER: tl.constexpr,
):
    """lengths[i] = steps of row i, -1 if it is no longer the key's; what later kernels read is at least as new.

    contents[i] = its content number (native/segment/segment.h), where the segment has any.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    row = tl.load(rows + i, mask=inside, other=0).to(tl.int64)
    if CONTENTS:
        tl.store(contents + i, _content_numbers(segment, row, inside, status_at, STATUS_STRIDE), mask=inside)
    lost = i < 0
    if KEYED:
        generation = tl.load(generations + i, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
        word = (segment + (words_at + row * 8)).to(tl.pointer_type(tl.int64))
        found = (first_word(word, ORDER) >> 32) & 0xFFFFFFFF
        lost = (found != generation) | ((generation & 1) == 0)
    about = segment + (status_at + row * STATUS_STRIDE + 24)
    length = tl.load(about.to(tl.pointer_type(tl.int32)), mask=inside, other=0, volatile=True).to(tl.int64)
    length = behind(tl.minimum(tl.maximum(length, 0), max_length), ORDER)
    tl.store(lengths + i, tl.where(lost, -1, length).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["n", "words_at", "status_at", "torn_at"])
def mark_torn_kernel(
    segment,
    arena,
    rows,
    generations,
    places,
    lengths,
    contents,
    n: tl.int64,
    words_at: tl.int64,
    status_at: tl.int64,
    torn_at: tl.int64,
    PLACED: tl.constexpr,
    CONTENTS: tl.constexpr,
    STATUS_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    ORDER: tl.constexpr,
):
    """Marks rows that were not the key's before the gather, are not now, or have been written in place meanwhile."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    row = tl.load(rows + i, mask=inside, other=0).to(tl.int64)
    place = i
    if PLACED:
        place = tl.load(places + i, mask=inside, other=0).to(tl.int64)
    generation = tl.load(generations + i, mask=inside, other=0).to(tl.int64) & 0xFFFFFFFF
    word = (segment + (words_at + row * 8)).to(tl.pointer_type(tl.int64))
    torn = (tl.load(lengths + i, mask=inside, other=0) < 0) | (still(word, generation, ORDER) == 0)
    if CONTENTS:
        before = tl.load(contents + i, mask=inside, other=0)
        after = _content_numbers(segment, row, inside, status_at, STATUS_STRIDE)
        torn = torn | (before != after) | ((before & 1) == 1)
    tl.store(arena + torn_at + place, tl.full([BLOCK], 1, tl.uint8), mask=inside & torn)


@triton.jit(do_not_specialize=["n", "window", "seed", "step", "counter"])
def count_steps_kernel(
    lengths,
    ends,
    numbers,
    counts,
    n: tl.int64,
    window: tl.int64,
    seed: tl.uint64,
    step: tl.uint64,
    counter: tl.uint32,
    WINDOWED: tl.constexpr,
    ENDS: tl.constexpr,
    NUMBERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """counts[i + 1] = steps of the window of row i, as `gather_rows_kernel` will find it if the row stays."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    length = tl.load(lengths + i, mask=inside, other=0).to(tl.int64)
    count = length
    if WINDOWED:
        end = length - 1
        if ENDS == 1:
            end = tl.minimum(end, tl.maximum(tl.load(ends + i, mask=inside, other=0).to(tl.int64), 0))
        if ENDS == 2:
            number = i.to(tl.uint32)
            if NUMBERED:
                number = tl.load(numbers + i, mask=inside, other=0).to(tl.uint32)
            high, low = random_bits(number, counter, seed.to(tl.uint64), step.to(tl.uint64))
            end = tl.minimum(below(high, low, tl.maximum(length, 1).to(tl.uint64)).to(tl.int64), end)
        count = tl.minimum(window, end + 1)
    tl.store(counts + i + 1, count.to(tl.int32), mask=inside)


__all__ = [
    "count_steps_kernel",
    "gather_rows_kernel",
    "look_up_rows_kernel",
    "mark_torn_kernel",
]
