"""Gathers chosen rows from mapped host memory into a batch in device memory: all fields and windows in one launch.

The GPU does the work of native/fetch/fetch.cc (GEAR, section 3.4). The rows lie in shared memory that is registered
with the driver. The GPU reads their words and blocks in place, and writes the batch, its padding, mask and metadata. No
CPU touches a row.

Output. native/fetch/fetch.h defines it, row by row. A window of W steps that ends at step t holds steps
max(0, t - W + 1) .. t and nothing later. Missing steps are 0. Fields may be converted on the way:
y = float32(x) * scale + offset, with each operation rounded to float32, then to the output's dtype. Missing steps stay
0 whatever the offset. With `cu_seqlens` the windows are packed one after the other, without padding.

Work split. Each row of the batch is a few *slots*. One slot is for its metadata (mask, start, length, version). Each
field has as many slots, pieces of CHUNK bytes, as its window may touch. One program per multiprocessor takes every
so-many-th slot of the batch. That keeps the link busy (an H100's 132 programs have 540 KB in flight) and leaves the
multiprocessors to the model. Neither 2, 4 and 8 times as many programs nor pieces of 2 to 16 KB move more.

Alignment. Host memory is read in aligned groups of 16 bytes, whatever the window's first byte is. A warp reads 512
adjacent bytes from a multiple of 128, so the link carries full requests. Groups without a wanted byte are not read.
Blocks are aligned to 64 bytes, so a group never leaves its block. The stores undo the shift between source and
destination. They go to device memory, and are as wide as the field's step allows: 16 bytes a thread if steps are a
multiple of 16, else 8, 4, 2 or 1.

Torn rows. A row is torn if a writer overwrote it during the gather. Like native/fetch/fetch.cc, the GPU reads each
row's word once before and once after its blocks, in separate launches. If each slot read the word again, hundreds of
programs would read one address at a time. The link answers such reads one after the other, which gave 0.7 to 16 of 55
GB/s on an H100.

    1  look up    w = ld.acquire.sys(word)     the generation must be the key's
    2             length                       after it, ld.volatile
    3  gather     version, blocks              ld.volatile, which is ld.relaxed.sys
    4  mark       fence.acq_rel.sys            in every thread
    5             ld.volatile(word)            the generation must still be the key's

A launch begins when the one before it on its stream has ended and all of its reads and writes are performed. So the
three launches are ordered like the program of one thread. Why step 5 sees every overwrite:

- A writer changes the word, fences (Store::allocate), and only then writes the block. It commits the next word after
  the block.
- Suppose a load of 3 returns a byte of the next row. Then it has read a store that came after the change of the word.
  By the fences on both sides, step 5 sees the changed word, and the row is torn.
- If step 1 returns the key's word, its acquire makes 3 see the block that was committed with it. Older bytes that a
  cache of the GPU may still hold are not returned.

All of these are at system scope, the only one that includes the CPU's threads. At a narrower scope the multiprocessor's
L1 may answer. The link only needs to carry reads of host memory that snoop the CPU's caches, in the order in which the
GPU waits for them. No atomic operation touches host memory. Without PCIe atomics the device would replace it by a read
and a write, and could undo a CPU's change.

The bytes of torn rows stay in the batch until the rows are drawn again. No batch with torn rows is delivered. The
generation has 32 bits and moves by two when a slot is reused. As on the CPU, a torn row stays unnoticed only if the
slot is rewritten 2^31 times during one copy.

Rows that grow. A row may get longer while its generation stays (Store::publish). Two reads of its length may then
differ, and pieces of one window would not match. So the first launch reads each length once, with a fence after it.
Writers write steps before they count them, so all counted steps are readable.

Rows that are rewritten in place (Store::rewrite) keep their generation and change their content number. Slots of one
row could hold different states of it. So the first launch reads the content numbers, and the last one compares them. A
row whose number was odd or has changed is torn, and drawn again.

Bytes: the window once over the link, and 128 bytes of words and metadata a row, twice. Measured on an H100 (PCIe 5,
copy engine 54.7 GB/s) in batches of 50 MB: whole rows of 4, 20, 100 and 1,000 KB move at 38, 42, 45 and 45 GB/s. A
multiprocessor's requests are 128 bytes each; those of a copy engine are larger.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from geartrain.device.kernels.checks import on_device_of
from geartrain.device.kernels.gather_kernels import (
    count_steps_kernel,
    gather_rows_kernel,
    look_up_rows_kernel,
    mark_torn_kernel,
)
from geartrain.device.kernels.gather_layout import CONVERTED_FROM, CONVERTED_TO, Arena, GatherField, SegmentLayout
from geartrain.device.kernels.gather_order import order_for, warps_of
from geartrain.device.kernels.launch import Launch
from geartrain.device.kernels.philox import WINDOW_STREAM, counter_word
from geartrain.errors import ArgumentError

# Bytes of a piece: 32 a thread, 16 where elements are single bytes, each of which takes a register on its way.
LARGEST_CHUNK, LARGEST_CHUNK_OF_BYTES, SMALLEST_CHUNK = 4096, 2048, 1024
# Offsets of lanes are kept in registers for each kind of field; with more kinds than this, pieces are the smallest.
MANY_KINDS = 4
ALIGNED = 128  # the link's longest request
BLOCK = 128  # rows of a program that looks them up
MOST_LAYOUTS = 64  # that a plan keeps, by the rows of a batch
_LAST, _GIVEN, _DRAWN = 0, 1, 2  # how a window's last step is found


class GatherPlan:
    """Fields, windows and layout of one kind of batch: checked once, launched for every batch.

    Args:
        segment: layout of the store's segment.
        fields: fields to gather.
        window: steps of a window; 0 for whole rows.
        pad_left: whether missing steps are padded before the window.
        packed: windows are packed one after the other, without padding.

    Raises:
        ArgumentError: an unknown conversion, or a window of 2 GB or more.
    """

    def __init__(
        self, segment: SegmentLayout, fields: Sequence[GatherField], window: int, pad_left: bool, packed: bool = False
    ) -> None:
        self.segment = segment
        self.fields = list(fields)
        self.window = window
        self.steps = window or segment.max_length
        self.pad_left = pad_left
        self.packed = packed
        for field in self.fields:
            if field.result is not None and (field.dtype not in CONVERTED_FROM or field.result not in CONVERTED_TO):
                raise ArgumentError(
                    f"field {field.name!r} of {field.dtype} cannot become {field.result}; converted are "
                    f"{', '.join(CONVERTED_FROM)} to {', '.join(CONVERTED_TO)}"
                )
            if self._room(field) >= 2**31:
                raise ArgumentError(f"a window of field {field.name!r} has {self._room(field)} bytes, 2 GB or more")
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
        self._made: tuple[Launch, Launch, Launch] | None = None
        self._programs: dict[torch.device, int] = {}
        self._arenas: dict[int, Arena] = {}
        self._tables: dict[tuple[torch.device, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def _room(self, field: GatherField) -> int:
        return field.step_bytes * self.steps if field.timed else field.step_bytes

    def arena(self, n: int) -> Arena:
        """The layout of a batch of n rows."""
        known = self._arenas.get(n)
        if known is None:
            if len(self._arenas) >= MOST_LAYOUTS:
                self._arenas.clear()
            known = self._arenas[n] = self._layout(n)
        return known

    def _layout(self, n: int) -> Arena:
        at = 0
        offsets = []

        def take(nbytes: int) -> int:
            nonlocal at
            began, at = at, -(-(at + nbytes) // 256) * 256
            return began

        for field in self.fields:
            offsets.append(take(n * (self.steps if field.timed else 1) * field.result_bytes))
        mask = take(0 if self.packed else n * self.steps)
        starts, lengths, versions, torn = take(4 * n), take(4 * n), take(8 * n), take(n)
        return Arena(n, tuple(offsets), mask, starts, lengths, versions, torn, take(8 * n), take(8 * n), at)

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
        known, placed = segment[:1], places is not None
        lengths, contents = self._look_up(segment, rows, generations)
        gather, _, mark = self._launches(arena)
        programs = self._programs.get(arena.device) or self._count_programs(arena.device)
        known_places = known if places is None else places
        with on_device_of(arena):
            gather(
                min(k * len(self.slots), programs),
                arena,
                (
                    segment,
                    arena,
                    rows,
                    lengths,
                    known if ends is None else ends,
                    known if numbers is None else numbers,
                    known_places,
                    known if cu_seqlens is None else cu_seqlens,
                    table,
                    slots,
                    factors,
                ),
                (
                    k,
                    len(self.slots),
                    self.steps,
                    self.segment.status,
                    layout.mask,
                    layout.starts,
                    layout.lengths,
                    layout.versions,
                    layout.torn,
                    seed,
                    step,
                    counter_word(WINDOW_STREAM, attempt),
                ),
                {
                    "ENDS": _DRAWN if draw is not None else _LAST if ends is None else _GIVEN,
                    "NUMBERED": numbers is not None,
                    "PLACED": placed,
                },
            )
            mark(
                -(-k // BLOCK),
                arena,
                (segment, arena, rows, generations, known_places, lengths, known if contents is None else contents),
                (k, self.segment.words, self.segment.status, layout.torn),
                {"PLACED": placed, "CONTENTS": contents is not None},
            )

    def _launches(self, like: torch.Tensor) -> tuple[Launch, Launch, Launch]:
        """Launches of the gather, of the look-up of rows, and of the marking of torn rows."""
        if self._made is None:
            order = order_for(like)
            about = {"STATUS_STRIDE": self.segment.status_stride, "BLOCK": BLOCK, "ORDER": order}
            cut = {
                "KINDS": self.kinds, "WINDOWED": self.window != 0, "PAD_LEFT": self.pad_left, "PACKED": self.packed,
                "STATUS_STRIDE": self.segment.status_stride, "CHUNK": self.chunk, "MASK_BLOCK": 256,
            }  # fmt: skip
            self._made = (
                Launch(gather_rows_kernel, cut, num_warps=warps_of(self.chunk, order), enable_fp_fusion=False),
                Launch(look_up_rows_kernel, about),
                Launch(mark_torn_kernel, about),
            )
        return self._made

    def _look_up(
        self, segment: torch.Tensor, rows: torch.Tensor, generations: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The rows' lengths as they are now, (k,) int32, and content numbers, (k,) int64, where the segment has any.

        One reading for all slots of a row: a row that grows has one length at a time, and its pieces must agree on it.
        With `generations` the length is -1 where the row is not the key's.
        """
        k, known = len(rows), segment[:1]
        lengths = torch.empty(k, dtype=torch.int32, device=rows.device)
        contents = None
        if self.segment.content_numbers and generations is not None:
            contents = torch.empty(k, dtype=torch.int64, device=rows.device)
        _, look_up, _ = self._launches(rows)
        with on_device_of(rows):
            if k:
                look_up(
                    -(-k // BLOCK),
                    rows,
                    (
                        segment,
                        rows,
                        known if generations is None else generations,
                        lengths,
                        known if contents is None else contents,
                    ),
                    (k, self.segment.max_length, self.segment.words, self.segment.status),
                    {"KEYED": generations is not None, "CONTENTS": contents is not None},
                )
        return lengths, contents

    def count_steps(
        self,
        segment: torch.Tensor,
        rows: torch.Tensor,
        *,
        ends: torch.Tensor | None = None,
        draw: tuple[int, int, int] | None = None,
        numbers: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Offsets of the windows of a packed batch, and the total number of steps at the end: (k + 1,) int32."""
        k = len(rows)
        counts = torch.zeros(k + 1, dtype=torch.int32, device=rows.device)
        seed, step, attempt = draw or (0, 0, 0)
        known = segment[:1]
        with on_device_of(rows):
            if k:
                count_steps_kernel[(triton.cdiv(k, 128),)](
                    self._look_up(segment, rows, None)[0],
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

    def _count_programs(self, device: torch.device) -> int:
        """One a multiprocessor: see the text at the top."""
        count = 8 if device.type != "cuda" else int(torch.cuda.get_device_properties(device).multi_processor_count)
        self._programs[device] = count
        return count

    def _tables_on(self, device: torch.device, layout: Arena) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        known = self._tables.get((device, layout.n))
        if known is None:
            if len(self._tables) >= MOST_LAYOUTS:
                self._tables.clear()
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


__all__ = ["GatherPlan"]
