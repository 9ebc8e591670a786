"""Draws rows without replacement: the first distinct rows of a sequence of draws with replacement.

Draws 0, 1, 2, ... run in parallel: 1.25 n + 64 of them, or 4 n + 64 if those are too few. A stable sort by row shows
which of several equal rows came first.

If even 4 n + 64 draws give fewer than n distinct rows, the remaining rows are drawn one at a time
(native/selection/selection.h). These draws use a copy of the values without the rows chosen so far. Each drawn row is
removed from the copy before the next draw:

    total    [ 1 ]       carried along
    top      [ 8 ]       groups of 1024 groups
    groups   [ 8192 ]    groups of 1024 tiles
    tiles    [ 8 Mi ]    sums of 256 values
    values   [ 2 Gi ]

Bytes: those of the draws, and 24 a draw for the sort. The one-at-a-time draws need 8 N for the copy and its sums. One
program makes them, with four dependent steps of 2 to 8 KB a row. Expect some microseconds a row. They only happen if n
is close to the number of rows, or if the priorities are very uneven.

No GPU has timed this yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from geartrain.core.arguments import check_whole
from geartrain.device.kernels.checks import interpreted, on_device_of
from geartrain.device.kernels.philox import (
    ATTEMPTS_PER_ROUND,
    DISTINCT_STREAM,
    below,
    counter_word,
    random_bits,
)
from geartrain.device.kernels.weighted_draw import TILE, DrawKey, EveryRow, RunningSums, as_int, tile_sums
from geartrain.errors import EmptyStoreError, NotEnoughRowsError

GROUP = 1024
MAX_DISTINCT = 2**29  # 5 n + 64 draws have 32-bit numbers


# --- kernels ---------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["first_number", "count", "word", "seed", "step"])
def bits_kernel(
    bits,
    first_number: tl.int64,
    count: tl.int64,
    word: tl.uint32,
    seed: tl.uint64,
    step: tl.uint64,
    BLOCK: tl.constexpr,
):
    """The random bits of consecutive draws, high and low side by side."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    high, low = random_bits((first_number + at).to(tl.uint32), word, seed.to(tl.uint64), step.to(tl.uint64))
    tl.store(bits + 2 * at, high.to(tl.int64, bitcast=True), mask=at < count)
    tl.store(bits + 2 * at + 1, low.to(tl.int64, bitcast=True), mask=at < count)


@triton.jit
def _child(sums, first, target, WIDTH: tl.constexpr):
    """Which of WIDTH sums from `first` holds the target: (its index, the target inside it, its sum)."""
    at = tl.arange(0, WIDTH)
    there = tl.load(sums + first + at).to(tl.int64)
    beyond = tl.cumsum(there, axis=0) <= target
    index = tl.sum(beyond.to(tl.int64), axis=0)
    rest = target - tl.sum(tl.where(beyond, there, 0), axis=0)
    return first + index, rest, tl.sum(tl.where(at == index, there, 0), axis=0)


@triton.jit(do_not_specialize=["count", "total"])
def take_rows_kernel(
    values,
    tiles,
    groups,
    top,
    bits,
    rows,
    shares,
    count: tl.int64,
    total: tl.int64,
    TOP: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """One program: draws a row in proportion to the values and sets its value to 0, `count` times."""
    left = total
    for i in range(count):
        high = tl.load(bits + 2 * i).to(tl.uint64, bitcast=True)
        low = tl.load(bits + 2 * i + 1).to(tl.uint64, bitcast=True)
        target = below(high, low, left.to(tl.uint64)).to(tl.int64)
        at_top, target, top_sum = _child(top, 0, target, TOP)
        at_group, target, group_sum = _child(groups, at_top * GROUP, target, GROUP)
        at_tile, target, tile_sum = _child(tiles, at_group * GROUP, target, GROUP)
        row, target, share = _child(values, at_tile * TILE, target, TILE)
        tl.debug_barrier()  # all threads have read what is about to change
        tl.store(top + at_top, top_sum - share)
        tl.store(groups + at_group, group_sum - share)
        tl.store(tiles + at_tile, tile_sum - share)
        tl.store(values + row, 0)
        tl.store(rows + i, row)
        tl.store(shares + i, share)
        tl.debug_barrier()  # and see it when they look again
        left -= share


# --- launch ----------------------------------------------------------------------------------------------------


def take_rows(values: torch.Tensor, key: DrawKey, numbers: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws rows one after the other, each in proportion to its value among those left.

    Args:
        values: (n,) uint32 or uint8, with at least as many positive ones as draws. Changed: rows drawn become 0.
        key, numbers: of the random numbers.

    Returns:
        rows and their values, int64 (len(numbers),).
    """
    count = len(numbers)
    device = values.device
    padded = torch.nn.functional.pad(as_int(values), (0, -len(values) % TILE))
    if values.dtype == torch.uint32:
        padded = padded.view(torch.uint32)
    sums = tile_sums(padded)
    tiles = torch.nn.functional.pad(sums, (0, -len(sums) % GROUP))
    groups = tiles.reshape(-1, GROUP).sum(1)
    groups = torch.nn.functional.pad(groups, (0, -len(groups) % GROUP))
    top = groups.reshape(-1, GROUP).sum(1)
    top = torch.nn.functional.pad(top, (0, triton.next_power_of_2(len(top)) - len(top)))
    bits = torch.empty(2 * count, dtype=torch.int64, device=device)
    rows = torch.empty(count, dtype=torch.int64, device=device)
    shares = torch.empty(count, dtype=torch.int64, device=device)
    block = interpreted(256, 1024)
    with on_device_of(values):
        bits_kernel[(triton.cdiv(count, block),)](bits, numbers.start, count, key.word, key.seed, key.step, BLOCK=block)
        take_rows_kernel[(1,)](
            padded,
            tiles,
            groups,
            top,
            bits,
            rows,
            shares,
            count,
            int(top.sum()),
            TOP=len(top),
            GROUP=GROUP,
            TILE=TILE,
        )
    return rows, shares


def draw_distinct(
    population: RunningSums | EveryRow, seed: int, step: int, round: int, n: int, excluded: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """n different rows (int64), none of `excluded`, and their probabilities in one draw (float64).

    Args:
        population: what is drawn from.
        seed, step, round: of the random numbers; `round` is 0, and one more each time the caller draws again.
        n: up to 2**29.
        excluded: (e,) int64 rows that are there.

    Raises:
        EmptyStoreError: all values are 0.
        NotEnoughRowsError: fewer than n rows have a value above 0.
    """
    check_whole("the number of different rows", n, most=MAX_DISTINCT)
    nothing = torch.empty(0, dtype=torch.int64, device=excluded.device)
    if n == 0:
        return nothing, nothing.to(torch.float64)
    if population.total == 0:
        raise EmptyStoreError("no selectable row has a priority above zero")
    key = DrawKey(seed, step, counter_word(DISTINCT_STREAM, round))
    most = 4 * n + 64
    drawn, probability = nothing, nothing.to(torch.float64)
    chosen = nothing
    for until in (min(n + n // 4 + 64, most), most):
        more, share = population.draw(key, range(len(drawn), until))
        drawn, probability = torch.cat((drawn, more)), torch.cat((probability, share))
        chosen = torch.nonzero(_first_of_equals(drawn, excluded)).flatten()[:n]
        if len(chosen) == n:
            return drawn[chosen], probability[chosen]
    rows, probability = drawn[chosen], probability[chosen]
    left = population.counted()
    as_int(left)[torch.cat((excluded, rows))] = 0
    positive = int(torch.count_nonzero(as_int(left)))
    missing = n - len(rows)
    if positive < missing:
        raise NotEnoughRowsError(f"{n} different rows were asked for, {len(rows) + positive} can be drawn")
    key = DrawKey(seed, step, counter_word(DISTINCT_STREAM, round, ATTEMPTS_PER_ROUND - 1))
    last, shares = take_rows(left, key, range(most, most + missing))
    # By a tensor on the device: of a Python number torch's GPU kernel takes the reciprocal, and rounds twice.
    total = torch.full((), population.total, dtype=torch.float64, device=shares.device)
    last_probability = shares.to(torch.float64) / total
    return torch.cat((rows, last)), torch.cat((probability, last_probability))


def _first_of_equals(drawn: torch.Tensor, excluded: torch.Tensor) -> torch.Tensor:
    """For each draw whether its row is not excluded and was not drawn before."""
    together = torch.cat((excluded, drawn))
    in_order, order = torch.sort(together, stable=True)
    starts = torch.ones_like(in_order, dtype=torch.bool)
    starts[1:] = in_order[1:] != in_order[:-1]
    first = torch.empty_like(starts)
    first[order] = starts
    return first[len(excluded) :]
