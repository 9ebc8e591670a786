"""Sets new priorities of many rows at once: priorities[rows] = values. The last of duplicates wins, and sums follow.

A plain scatter with duplicates is a race. Here the duplicates of a row use the row's own priority to settle which one
is last. So no scratch memory of the size of the table is needed. The update takes four launches, because each step
needs the whole previous step to be finished:

    1. take    old[i] = exchange(priorities[rows[i]], 0)      one duplicate of a row gets the priority, the others 0
    2. bid     priorities[rows[i]] = max(itself, i + 1)
    3. settle  won[i] = priorities[rows[i]] == i + 1
    4. write   winners write their value; every i adds (won ? value : 0) - old to its tile's sum

Until the last launch is done the priorities are meaningless. So draws have to run on the same stream, or wait. The
atomic operations are relaxed, because the launches order the steps.

Bytes: about 240 a row, which is 0.24 GB for B = 1e6 rows. That is five visits to a 32-byte sector of the priorities,
one to a sector of the sums, and 45 bytes of arguments.

An atomic max of i into an array of 4 N bytes would have to clear that array before each update: 4 GB at N = 1e9 for
B = 1e6 rows. No GPU has timed this yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from geartrain.core.arguments import check_whole
from geartrain.device.kernels.checks import check, check_rows, interpreted, on_device_of
from geartrain.device.kernels.weighted_draw import TILE


@triton.jit(do_not_specialize=["count"])
def take_kernel(priorities, rows, old, count: tl.int64, BLOCK: tl.constexpr):
    """Step 1."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, mask=inside, other=0)
    tl.store(
        old + at,
        tl.atomic_xchg(priorities + row, tl.zeros([BLOCK], tl.uint32), mask=inside, sem="relaxed"),
        mask=inside,
    )


@triton.jit(do_not_specialize=["count"])
def bid_kernel(priorities, rows, count: tl.int64, BLOCK: tl.constexpr):
    """Step 2."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, mask=inside, other=0)
    tl.atomic_max(priorities + row, (at + 1).to(tl.uint32), mask=inside, sem="relaxed")


@triton.jit(do_not_specialize=["count"])
def settle_kernel(priorities, rows, won, count: tl.int64, BLOCK: tl.constexpr):
    """Step 3."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, mask=inside, other=0)
    bid = tl.load(priorities + row, mask=inside, other=0)
    tl.store(won + at, (bid == (at + 1).to(tl.uint32)).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["count"])
def write_kernel(
    priorities,
    selectable,
    sums,
    rows,
    values,
    old,
    won,
    count: tl.int64,
    HAS_SELECTABLE: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Step 4."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = tl.load(rows + at, mask=inside, other=0)
    value = tl.load(values + at, mask=inside, other=0)
    winner = inside & (tl.load(won + at, mask=inside, other=0) != 0)
    change = tl.where(winner, value, 0).to(tl.int64) - tl.load(old + at, mask=inside, other=0).to(tl.int64)
    if HAS_SELECTABLE:
        change = tl.where(tl.load(selectable + row, mask=inside, other=0) != 0, change, 0)
    tl.store(priorities + row, value, mask=winner)
    tl.atomic_add(sums + row // TILE, change, mask=inside & (change != 0), sem="relaxed")


def scatter_update(
    priorities: torch.Tensor,
    rows: torch.Tensor,
    values: torch.Tensor,
    sums: torch.Tensor,
    selectable: torch.Tensor | None = None,
) -> None:
    """Writes priorities[rows] = values in place (the last of duplicates wins); adds the changes to the tiles' sums.

    Args:
        priorities: (n,) uint32.
        rows: (b,) int64, 0 to n - 1, b below 2**32 - 1.
        values: (b,) uint32.
        sums: (ceil(n / 256),) int64; see `weighted_draw.tile_sums`. Pass zeros to have the changes alone.
        selectable: (n,) bool; rows where it is False take their priorities, but count 0 in the sums.

    Raises:
        ArgumentError: a wrong device, dtype or shape, or a row that is not there; nothing was changed.
    """
    check("priorities", priorities, (torch.uint32,))
    check("rows", rows, (torch.int64,), like=priorities)
    check("values", values, (torch.uint32,), like=priorities, n=len(rows))
    check("sums", sums, (torch.int64,), like=priorities, n=triton.cdiv(len(priorities), TILE))
    if selectable is not None:
        check("selectable", selectable, (torch.bool,), like=priorities, n=len(priorities))
    count = check_whole("the number of rows", len(rows), 0, 2**32 - 2)
    check_rows("rows", rows, len(priorities))
    if count == 0:
        return
    old = torch.empty(count, dtype=torch.uint32, device=priorities.device)
    won = torch.empty(count, dtype=torch.uint8, device=priorities.device)
    bits = won if selectable is None else selectable.view(torch.uint8)
    block = interpreted(256, 1024)
    grid = (triton.cdiv(count, block),)
    with on_device_of(priorities):
        take_kernel[grid](priorities, rows, old, count, BLOCK=block)
        bid_kernel[grid](priorities, rows, count, BLOCK=block)
        settle_kernel[grid](priorities, rows, won, count, BLOCK=block)
        write_kernel[grid](
            priorities,
            bits,
            sums,
            rows,
            values,
            old,
            won,
            count,
            HAS_SELECTABLE=selectable is not None,
            TILE=TILE,
            BLOCK=block,
        )
