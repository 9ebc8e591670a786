"""Chosen rows out of mapped host memory into a batch in device memory: all fields and windows in one launch.

native/fetch.cc's work, done by the GPU itself (GEAR, section 3.4): it reads the rows' words and blocks where they are,
in shared memory that is registered with the driver, and writes the batch, its padding, its mask and its books. No CPU
touches a row.

What is written, row by row, is native/fetch.h's: a window of W steps that ends at step t holds steps max(0, t - W + 1)
.. t and nothing later; missing steps are 0. Fields may be converted on the way: y = float32(x) * scale + offset, each
step rounded to float32, then to the output's dtype. Where it is 0 because there is no step, it is 0 whatever the
offset. With `cu_seqlens` the windows stand one behind the other instead, without padding.

How it is cut. A row of the batch is a few *slots*: one for its books (mask, start, length, version) and, for each
field, as many pieces of CHUNK bytes as its window may touch. There are `programs` programs, each of which takes every
programs-th slot of the batch: enough to keep the link busy (a few hundred KB in flight; a link of 64 GB/s and 1.5 us
needs 100 KB), few enough to leave the multiprocessors to the model.

Alignment. Host memory is read in whole, aligned groups of 16 bytes, a warp's 512 bytes side by side and from a multiple
of 128 on, whatever the window's first byte is: what the link carries are full requests. Groups that hold no wanted byte
are not read; blocks are aligned to 64 bytes, so a group never leaves its block. The shift between source and
destination is undone in the stores, which go to device memory and can be as narrow as the field's step demands: 16
bytes a thread where steps are a multiple of 16, else 8, 4, 2 or 1.

Torn rows. Every slot reads the row's word before and after it reads the block, as native/fetch.cc does:

    1  w = ld.acquire.sys(word)        the generation must be the key's
    2  version, blocks                 ld.volatile, which is ld.relaxed.sys
    3  fence.acq_rel.sys               in every thread, for its own loads
    4  ld.volatile(word)               the generation must be the key's still
    5  store to the batch              only then

A writer changes the word, fences (Store::allocate), and only then writes the block; it commits the next word after the
block. If a load of 2 returns a byte of the next row, it has read a store that came after the change of the word; by the
fences on both sides, step 4 then sees the changed word, and the slot says torn. If step 1 returns the key's word, its
acquire makes 2 see the block that was committed with it, not older bytes that a cache of the GPU may still hold. All of
them are at system scope, which is the one that includes the CPU's threads; at any narrower one the multiprocessor's L1
may answer. Nothing is asked of the link but that it carries reads of host memory that snoop the CPU's caches, in the
order in which the GPU waits for them: step 3 waits for the data of 2 before the read of 4 goes out. No atomic operation
is made on host memory: without PCIe atomics the device would do it as a read and a write, and could undo a CPU's
change. Each slot checks for itself. A row is whole if all its slots are: each of them read its part while the
generation was the key's. (The generation has 32 bits and moves by two a life; to be fooled, a row has to be rewritten
2^31 times during one copy, as on the CPU.)

Rows that grow. A row may get longer while its generation stays (Store::publish), so that two reads of its length may
differ, and pieces of one window would not fit together. A small launch before this one reads each length once, with a
fence behind it: steps are written before they are counted, so those that were counted are there to be read.

Bytes: the window once over the link, and 128 bytes of words and books a slot. Versions: 1. (this) not timed on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from geartrain.errors import SchemaError
from geartrain.kernels import interpreting
from geartrain.kernels.door import on_device_of
from geartrain.kernels.philox import WINDOW_STREAM, below, counter_word, random_bits, reference_below, reference_bits

# Bytes of a piece: 32 a thread, 16 where elements are single bytes, each of which takes a register on its way.
LARGEST_CHUNK, LARGEST_CHUNK_OF_BYTES, SMALLEST_CHUNK = 4096, 2048, 1024
# Offsets of lanes are kept in registers for each kind of field; with more kinds than this, pieces are the smallest.
MANY_KINDS = 4
ALIGNED = 128  # the link's longest request
GROUP = 16  # the widest load of a thread

#: Fields that can be converted, and what they can become.
CONVERTED_FROM = ("bool", "uint8", "int8", "int16", "int32", "float16", "bfloat16", "float32", "float64")
CONVERTED_TO = ("float16", "bfloat16", "float32")

# How a word is read before and after: PTX, AMD's instructions, or nothing, where the interpreter runs alone.
PLAIN, NVIDIA, AMD = 0, 1, 2

_RAW = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
_TYPED = {
    "bool": tl.uint8,
    "uint8": tl.uint8,
    "int8": tl.int8,
    "int16": tl.int16,
    "int32": tl.int32,
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "float32": tl.float32,
    "float64": tl.float64,
}

_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "float64": 8,
}
_LAST, _GIVEN, _DRAWN = 0, 1, 2  # how a window's last step is found


@dataclass(frozen=True)
class GatherField:
    """One column of a segment, and what is to become of it in a batch.

    Attributes:
        name: of the field.
        dtype: as `geartrain.schema.DTYPES` names it.
        itemsize: bytes of one element.
        offset, stride: of the column's first block in the segment, and from one block to the next; multiples of 64.
        block_bytes, step_bytes: of a block and of one step; the same for a field without time.
        timed: whether its first axis is time.
        result: dtype to convert to; None to keep bytes as they are.
        scale, shift: result = float32(x) * scale + shift.
    """

    name: str
    dtype: str
    itemsize: int
    offset: int
    stride: int
    block_bytes: int
    step_bytes: int
    timed: bool
    result: str | None = None
    scale: float = 1.0
    shift: float = 0.0

    @property
    def result_bytes(self) -> int:
        """Bytes of one step in the batch."""
        return self.step_bytes if self.result is None else self.step_bytes // self.itemsize * _BYTES[self.result]

    @property
    def kind(self) -> tuple[Any, int, Any, int, int, bool]:
        """The element a thread moves and what it becomes, with their bytes; by which arithmetic; are stores wide."""
        if self.result is None:
            unit = math.gcd(self.step_bytes, 8)
            return (_RAW[unit], unit, _RAW[unit], unit, 0, self.step_bytes % GROUP == 0)
        out = _BYTES[self.result]
        wide = self.step_bytes % (GROUP * max(1, self.itemsize // out)) == 0
        how = 2 if self.result == "bfloat16" else 1
        return (_TYPED[self.dtype], self.itemsize, tl.uint16 if how == 2 else _TYPED[self.result], out, how, wide)


@dataclass(frozen=True)
class Segment:
    """Where the books of a segment are: `_native.Store.layout`."""

    words: int
    status: int
    status_stride: int
    rows: int
    max_length: int


@dataclass(frozen=True)
class Arena:
    """Where in the one buffer of a batch of n rows everything stands: offsets in bytes, all of them aligned to 256."""

    n: int
    fields: tuple[int, ...]
    mask: int
    starts: int
    lengths: int
    versions: int
    torn: int
    nbytes: int


class GatherRows:
    """One kind of batch: which fields, which windows, which layout; checked once, launched for every batch.

    Args:
        segment: the store's.
        fields: what is gathered.
        window: steps of a window; 0 for whole rows.
        pad_left: where missing steps go.
        packed: windows one behind the other, without padding.

    Raises:
        SchemaError: a conversion that there is not, or a window of 2 GB and more.
    """

    def __init__(
        self, segment: Segment, fields: Sequence[GatherField], window: int, pad_left: bool, packed: bool = False
    ) -> None:
        self.segment = segment
        self.fields = list(fields)
        self.window = window
        self.steps = window or segment.max_length
        self.pad_left = pad_left
        self.packed = packed
        for field in self.fields:
            if field.result is not None and (field.dtype not in CONVERTED_FROM or field.result not in CONVERTED_TO):
                raise SchemaError(
                    f"field {field.name!r} of {field.dtype} cannot become {field.result}; converted are "
                    f"{', '.join(CONVERTED_FROM)} to {', '.join(CONVERTED_TO)}"
                )
            if self._room(field) >= 2**31:
                raise SchemaError(f"a window of field {field.name!r} has {self._room(field)} bytes, 2 GB or more")
        kinds = list(dict.fromkeys(field.kind for field in self.fields))
        self._kind_of = [kinds.index(field.kind) for field in self.fields]
        self.kinds = tuple(kinds)
        of_bytes = any(kind[1] == 1 for kind in kinds)
        most = LARGEST_CHUNK_OF_BYTES if of_bytes else LARGEST_CHUNK
        if len(kinds) > MANY_KINDS:
            most = SMALLEST_CHUNK
        # A piece begins at a multiple of 128 in the segment, so a window may touch 127 bytes more than it has.
        touched = max((self._room(field) + ALIGNED - 1 for field in self.fields), default=0)
        self.chunk = min(most, max(SMALLEST_CHUNK, triton.next_power_of_2(touched)))
        self.slots = [(-1, 0)] + [
            (number, piece)
            for number, field in enumerate(self.fields)
            for piece in range(-(-(self._room(field) + ALIGNED - 1) // self.chunk))
        ]
        self._tables: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def _room(self, field: GatherField) -> int:
        return field.step_bytes * self.steps if field.timed else field.step_bytes

    def arena(self, n: int) -> Arena:
        """The layout of a batch of n rows."""
        at = 0
        offsets = []

        def take(nbytes: int) -> int:
            nonlocal at
            began, at = at, -(-(at + nbytes) // 256) * 256
            return began

        for field in self.fields:
            offsets.append(take(n * (self.steps if field.timed else 1) * field.result_bytes))
        mask = take(0 if self.packed else n * self.steps)
        return Arena(n, tuple(offsets), mask, take(4 * n), take(4 * n), take(8 * n), take(n), at)

    # --- launch ------------------------------------------------------------------------------------------------

    def launch(
        self,
        segment: torch.Tensor,
        arena: torch.Tensor,
        layout: Arena,
        rows: torch.Tensor,
        generations: torch.Tensor,
        *,
        ends: torch.Tensor | None = None,
        draw: tuple[int, int, int] | None = None,
        numbers: torch.Tensor | None = None,
        places: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
        clear: bool = True,
    ) -> None:
        """Gathers on the current stream; returns at once.

        Args:
            segment: (bytes,) uint8, host memory that the device can read.
            arena: (layout.nbytes,) uint8 on the device.
            rows, generations: (k,) whole numbers on the device. Rows are below the capacity.
            ends: (k,) int32, the last step of each window.
            draw: (seed, step, attempt) of windows whose last step is drawn, instead.
            numbers: (k,) uint32, the draws' numbers; 0, 1, 2, ... by default.
            places: (k,) uint32, which place of the arena each row goes to; 0, 1, 2, ... by default.
            cu_seqlens: (k + 1,) int32 where the layout is packed: `count_steps`' running sums.
            clear: set all of `torn` in the arena to 0 before; a row that is torn gets a 1.
        """
        table, slots, factors = self._tables_on(arena.device, layout)
        if clear:
            arena[layout.torn : layout.torn + layout.n].zero_()
        k = len(rows)
        if k == 0:
            return
        seed, step, attempt = draw or (0, 0, 0)
        known, order = segment[:1], _order(arena)
        items = k * len(self.slots)
        with on_device_of(arena):
            gather_rows_kernel[(min(items, _programs(arena)),)](
                segment,
                arena,
                rows,
                generations,
                self.read_lengths(segment, rows),
                known if ends is None else ends,
                known if numbers is None else numbers,
                known if places is None else places,
                known if cu_seqlens is None else cu_seqlens,
                table,
                slots,
                factors,
                k,
                len(self.slots),
                self.steps,
                self.segment.words,
                self.segment.status,
                layout.mask,
                layout.starts,
                layout.lengths,
                layout.versions,
                layout.torn,
                seed,
                step,
                counter_word(WINDOW_STREAM, attempt),
                KINDS=self.kinds,
                WINDOWED=self.window != 0,
                PAD_LEFT=self.pad_left,
                ENDS=_DRAWN if draw is not None else _LAST if ends is None else _GIVEN,
                NUMBERED=numbers is not None,
                PLACED=places is not None,
                PACKED=self.packed,
                STATUS_STRIDE=self.segment.status_stride,
                CHUNK=self.chunk,
                MASK_BLOCK=256,
                ORDER=order,
                num_warps=warps_of(self.chunk, order),
                enable_fp_fusion=False,
            )

    def read_lengths(self, segment: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The rows' lengths as they are now, (k,) int32 on the device.

        One reading for all slots of a row: a row that grows has one length at a time, and its pieces must agree on it.
        """
        lengths = torch.empty(len(rows), dtype=torch.int32, device=rows.device)
        with on_device_of(rows):
            if len(rows):
                read_lengths_kernel[(triton.cdiv(len(rows), 128),)](
                    segment,
                    rows,
                    lengths,
                    len(rows),
                    self.segment.max_length,
                    self.segment.status,
                    STATUS_STRIDE=self.segment.status_stride,
                    BLOCK=128,
                    ORDER=_order(rows),
                )
        return lengths

    def count_steps(
        self,
        segment: torch.Tensor,
        rows: torch.Tensor,
        *,
        ends: torch.Tensor | None = None,
        draw: tuple[int, int, int] | None = None,
        numbers: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Where each window of a packed batch begins, and at last how many steps there are: (k + 1,) int32."""
        k = len(rows)
        counts = torch.zeros(k + 1, dtype=torch.int32, device=rows.device)
        seed, step, attempt = draw or (0, 0, 0)
        known = segment[:1]
        with on_device_of(rows):
            if k:
                count_steps_kernel[(triton.cdiv(k, 128),)](
                    self.read_lengths(segment, rows),
                    known if ends is None else ends,
                    known if numbers is None else numbers,
                    counts,
                    k,
                    self.steps,
                    seed,
                    step,
                    counter_word(WINDOW_STREAM, attempt),
                    WINDOWED=self.window != 0,
                    ENDS=_DRAWN if draw is not None else _LAST if ends is None else _GIVEN,
                    NUMBERED=numbers is not None,
                    BLOCK=128,
                )
        return torch.cumsum(counts, 0, dtype=torch.int32)

    def _tables_on(self, device: torch.device, layout: Arena) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        known = self._tables.get((device, layout.n))
        if known is None:
            table = [
                [field.offset, field.stride, field.step_bytes, int(field.timed), at, kind, field.result_bytes, 0]
                for field, at, kind in zip(self.fields, layout.fields, self._kind_of, strict=True)
            ]
            known = (
                torch.tensor(table, dtype=torch.int64).to(device),
                torch.tensor(self.slots, dtype=torch.int32).to(device),
                torch.tensor([[f.scale, f.shift] for f in self.fields], dtype=torch.float32).to(device),
            )
            self._tables[(device, layout.n)] = known
        return known


def warps_of(chunk: int, order: int) -> int:
    """As many warps as load a piece with 16 bytes a thread, and no more than read 32 of them."""
    lanes = 64 if order == AMD else 32
    return max(1, min(128 // lanes, chunk // (GROUP * lanes)))


def _order(arena: torch.Tensor) -> int:
    if interpreting() or arena.device.type != "cuda":
        return PLAIN
    return AMD if torch.version.hip else NVIDIA


def _programs(arena: torch.Tensor) -> int:
    """Two a multiprocessor: see the text at the top."""
    if arena.device.type != "cuda":
        return 8
    return 2 * torch.cuda.get_device_properties(arena.device).multi_processor_count


# --- reference -------------------------------------------------------------------------------------------------


def reference_gather(
    plan: GatherRows,
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
    """What `GatherRows.launch` does, a row at a time, on the CPU."""
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
        if not _is_generation(plan, segment, row, generation):
            torn[place] = 1


def reference_count_steps(
    plan: GatherRows,
    segment: torch.Tensor,
    rows: Sequence[int],
    *,
    ends: Sequence[int] | None = None,
    draw: tuple[int, int, int] | None = None,
    numbers: Sequence[int] | None = None,
) -> torch.Tensor:
    """What `GatherRows.count_steps` does."""
    counts = [0]
    for i, row in enumerate(rows):
        status = plan.segment.status + row * plan.segment.status_stride
        length = min(int(segment[status + 24 : status + 28].view(torch.int32)), plan.segment.max_length)
        end = None if ends is None else int(ends[i])
        counts.append(reference_window(plan, length, end, draw, i if numbers is None else int(numbers[i]))[1])
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def reference_window(
    plan: GatherRows, length: int, end: int | None, draw: tuple[int, int, int] | None, number: int
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


def _is_generation(plan: GatherRows, segment: torch.Tensor, row: int, generation: int) -> bool:
    word = int(segment[plan.segment.words + 8 * row :][:8].view(torch.int64))
    return generation % 2 == 1 and (word >> 32) & 0xFFFFFFFF == generation


# --- kernel ----------------------------------------------------------------------------------------------------


@triton.jit
def _first_word(word, ORDER: tl.constexpr):
    """A row's word, before anything else of the row is read."""
    if ORDER == 1:
        value = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [word.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
        )
    elif ORDER == 2:
        value = _behind(tl.load(word, volatile=True), ORDER)
    else:
        value = tl.load(word, volatile=True)
    return value


@triton.jit
def _behind(value, ORDER: tl.constexpr):
    """The value itself, behind everything that this thread has read before: what it reads next is read later."""
    if ORDER == 1:
        value = tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b64 $0, $1;", "=l,l", [value], dtype=tl.int64, is_pure=False, pack=1
        )
    elif ORDER == 2:
        value = tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0) lgkmcnt(0)\nbuffer_inv sc0 sc1\nv_mov_b32 $0, $1",
            "=v,v",
            [value.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        ).to(tl.int64)
    return value


@triton.jit
def _still(word, generation, ORDER: tl.constexpr):
    """Whether the row's generation is what it was, once everything before has been read."""
    behind = _behind(generation, ORDER)
    return ((tl.load(word, volatile=True) >> 32) & 0xFFFFFFFF) == behind


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
    word,
    generation,
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
    ORDER: tl.constexpr,
):
    """One piece of one field of one row; returns whether the row was whole.

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
    whole = _still(word, generation, ORDER)
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
    room = tl.where(whole, total, 0).to(tl.uint32)
    start = target + (first - lead) // SOURCE_BYTES * RESULT_BYTES
    if WIDE:  # steps, and so all the other numbers, are multiples of 16 bytes
        to = (arena + tl.multiple_of(start, 16)).to(tl.pointer_type(RESULT))
        tl.store(to + lane, result, mask=at_group.to(tl.uint32) < room)
    else:
        to = (arena + start).to(tl.pointer_type(RESULT))
        tl.store(to + lane, result, mask=at.to(tl.uint32) < room)
    return whole


@triton.jit(
    do_not_specialize=[
        "n",
        "slots_a_row",
        "window",
        "words_at",
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
    generations,
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
    words_at: tl.int64,
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
    ORDER: tl.constexpr,
):
    """Slots of a batch, one after the other; see the text above for what a slot is and what is read in which order."""
    for item in range(tl.program_id(0).to(tl.int64), n * slots_a_row, tl.num_programs(0).to(tl.int64)):
        i = item // slots_a_row
        slot = item % slots_a_row
        row = tl.load(rows + i).to(tl.int64)
        generation = tl.load(generations + i).to(tl.int64) & 0xFFFFFFFF
        place = i
        if PLACED:
            place = tl.load(places + i).to(tl.int64)
        word = (segment + tl.multiple_of(words_at + row * 8, 8)).to(tl.pointer_type(tl.int64))
        before = (_first_word(word, ORDER) >> 32) & 0xFFFFFFFF
        whole = (before == generation) & ((generation & 1) == 1)
        if whole:
            about = segment + tl.multiple_of(status_at + row * STATUS_STRIDE, 8)
            length = tl.load(lengths + i).to(tl.int64)
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
            if PACKED:
                stands = tl.load(cu_seqlens + i).to(tl.int64)
                room = tl.load(cu_seqlens + i + 1).to(tl.int64) - stands
                whole = room == count
                at = tl.zeros_like(length)
            if whole:
                field = tl.load(slots + slot * 2).to(tl.int64)
                if field < 0:
                    version = tl.load((about + 8).to(tl.pointer_type(tl.int64)), volatile=True)
                    whole = _still(word, generation, ORDER)
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
                            whole = _move(
                                segment,
                                arena,
                                word,
                                generation,
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
                                ORDER,
                            )
        if not whole:
            tl.store(arena + torn_at + place, tl.full([], 1, tl.uint8))


@triton.jit(do_not_specialize=["n", "max_length", "status_at"])
def read_lengths_kernel(
    segment,
    rows,
    lengths,
    n: tl.int64,
    max_length: tl.int64,
    status_at: tl.int64,
    STATUS_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    ORDER: tl.constexpr,
):
    """lengths[i] = steps of row i; what is read after this kernel is at least as new."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    row = tl.load(rows + i, mask=inside, other=0).to(tl.int64)
    about = segment + (status_at + row * STATUS_STRIDE + 24)
    length = tl.load(about.to(tl.pointer_type(tl.int32)), mask=inside, other=0, volatile=True).to(tl.int64)
    length = _behind(tl.minimum(tl.maximum(length, 0), max_length), ORDER)
    tl.store(lengths + i, length.to(tl.int32), mask=inside)


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
