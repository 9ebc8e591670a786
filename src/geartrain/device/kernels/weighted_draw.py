"""Draws rows in proportion to their priorities: running sums over tiles of 256 rows, then a search for each draw.

    values   w w w w ... w | w w w w ... w | ...   uint32, or uint8 for selectable bits, one a row
    sums     [ 9314 ]        [ 8120 ]        ...   int64, one a tile of 256                      tile_sums_kernel
    running  [ 9314 ]        [ 17434 ]       ...   int64, sums up to and including the tile      torch.cumsum
    draw     target -> binary search in `running` -> which sixteenth of the tile -> which row    find_*_kernel

The sums are integers, so they do not depend on the order of additions. The drawn rows are those of
native/selection/draw.cc to the bit. Updates change `sums` (scatter_update.py). A new `running` costs 16 bytes a tile,
not a pass over the priorities.

Bytes:

- Rebuild: 4 N (and N with selectable bits), and 24 N / 256 for the sums. At N = 1e9 that is 4 GB.
- A draw: 22 search steps at N = 1e9, the tile's 1 KB, then 64 bytes from the L1. `running` is 31 MB, so the upper steps
  of the search stay in the L2. For B = 1e6 draws that is 1.0-1.7 GB.

Search and scan are two kernels, with 12 bytes a draw between them. A tile needs a warp and a search needs one lane, so
one kernel for both would leave lanes idle. A tile is scanned as 16 x 16: one scan over 16 sums and one over 16
priorities, instead of one over 256 in 64-bit registers. No GPU has timed this yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from geartrain.core.arguments import check_whole
from geartrain.device.kernels.checks import MAX_ROWS, check, interpreted, on_device_of
from geartrain.device.kernels.philox import target_of

TILE = 256
PART = 16  # a tile is PART parts of PART rows


@dataclass(frozen=True)
class DrawKey:
    """The key of the random numbers of some draws, apart from the numbers of the draws."""

    seed: int
    step: int
    word: int  # philox.counter_word


def whole_numbers(values: torch.Tensor) -> torch.Tensor:
    """uint8 or uint32 values as int64; torch has no arithmetic on uint32. A copy."""
    if values.dtype == torch.uint32:
        return values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return values.to(torch.int64)


def as_int(values: torch.Tensor) -> torch.Tensor:
    """A view of uint32 values as int32, for what torch cannot do with uint32."""
    return values.view(torch.int32) if values.dtype == torch.uint32 else values


# --- kernels ---------------------------------------------------------------------------------------------------


@triton.jit
def _counted(values, selectable, offsets, inside, MASKED: tl.constexpr, HAS_SELECTABLE: tl.constexpr):
    """Values as int64, 0 for rows that are not selectable or not there."""
    if MASKED:
        value = tl.load(values + offsets, mask=inside, other=0)
    else:
        value = tl.load(values + offsets)
    if HAS_SELECTABLE:
        if MASKED:
            bit = tl.load(selectable + offsets, mask=inside, other=0)
        else:
            bit = tl.load(selectable + offsets)
        value = tl.where(bit != 0, value, 0)
    return value.to(tl.int64)


@triton.jit(do_not_specialize=["n"])
def tile_sums_kernel(
    values, selectable, sums, n: tl.int64, HAS_SELECTABLE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr
):
    """Each program sums TILES tiles. Only the last program masks: a mask would break up the 16-byte loads."""
    first_tile = tl.program_id(0).to(tl.int64) * TILES
    first = first_tile * TILE
    tile = tl.arange(0, TILES)
    offsets = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    if first + TILES * TILE <= n:
        total = tl.sum(_counted(values + first, selectable + first, offsets, offsets, False, HAS_SELECTABLE), axis=1)
        tl.store(sums + first_tile + tile, total)
    else:
        inside = first + offsets < n
        total = tl.sum(_counted(values + first, selectable + first, offsets, inside, True, HAS_SELECTABLE), axis=1)
        tl.store(sums + first_tile + tile, total, mask=first + tile * TILE < n)


@triton.jit
def _number_of(numbers, first_number, at, inside, HAS_NUMBERS: tl.constexpr):
    if HAS_NUMBERS:
        number = tl.load(numbers + at, mask=inside, other=0).to(tl.uint32)
    else:
        number = (first_number + at).to(tl.uint32)
    return number


@triton.jit(do_not_specialize=["first_number", "draws", "tiles", "top", "strata", "word", "seed", "step"])
def find_tiles_kernel(
    running,
    numbers,
    targets,
    tile_of,
    rest_of,
    first_number: tl.int64,
    draws: tl.int64,
    tiles: tl.int64,
    top: tl.int32,
    strata: tl.uint64,
    word: tl.uint32,
    seed: tl.uint64,
    step: tl.uint64,
    HAS_NUMBERS: tl.constexpr,
    STRATIFIED: tl.constexpr,
    TARGETED: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """The tile that each draw falls into, and how far into it. `top` is the largest power of two <= tiles, as a log.

    With TARGETED the draws' targets are given, int64; those beyond the total end behind the last tile.
    """
    at = tl.program_id(0).to(tl.int64) * DRAWS + tl.arange(0, DRAWS)
    inside = at < draws
    if TARGETED:
        # None is negative; said here, ptxas needs no memory for sm_90's 32 registers.
        target = tl.maximum(tl.load(targets + at, mask=inside, other=0), 0)
    else:
        total = tl.load(running + tiles - 1).to(tl.uint64)
        number = _number_of(numbers, first_number, at, inside, HAS_NUMBERS)
        target = target_of(
            number, word, seed.to(tl.uint64), step.to(tl.uint64), total, strata.to(tl.uint64), STRATIFIED
        ).to(tl.int64)
    # How many running sums are <= target, highest bit first; `passed` is the last of those.
    found = tl.zeros([DRAWS], tl.int64)
    passed = tl.zeros([DRAWS], tl.int64)
    for i in range(0, top + 1):
        next_found = found + (tl.full([DRAWS], 1, tl.int64) << (top - i))
        sum_there = tl.load(running + next_found - 1, mask=next_found <= tiles, other=0x7FFFFFFFFFFFFFFF)
        beyond = sum_there <= target
        found = tl.where(beyond, next_found, found)
        passed = tl.where(beyond, sum_there, passed)
    tl.store(tile_of + at, found.to(tl.int32), mask=inside)
    tl.store(rest_of + at, target - passed, mask=inside)


@triton.jit(do_not_specialize=["draws", "n", "tiles"])
def find_rows_kernel(
    values,
    selectable,
    running,
    tile_of,
    rest_of,
    rows,
    probability,
    draws: tl.int64,
    n: tl.int64,
    tiles: tl.int64,
    HAS_SELECTABLE: tl.constexpr,
    PART: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """The row inside each draw's tile, and its share of the total."""
    at = tl.program_id(0).to(tl.int64) * DRAWS + tl.arange(0, DRAWS)
    inside = at < draws
    tile = tl.load(tile_of + at, mask=inside, other=0).to(tl.int64)
    rest = tl.load(rest_of + at, mask=inside, other=0)
    step = tl.arange(0, PART)
    first = tile * (PART * PART)
    offsets = first[:, None, None] + (step[:, None] * PART + step[None, :])[None, :, :]
    if tl.max(tile, axis=0) * (PART * PART) + PART * PART <= n:  # no mask, so that loads take 16 bytes
        parts = tl.sum(_counted(values, selectable, offsets, offsets, False, HAS_SELECTABLE), axis=2)
    else:
        parts = tl.sum(_counted(values, selectable, offsets, offsets < n, True, HAS_SELECTABLE), axis=2)
    beyond = tl.cumsum(parts, axis=1) <= rest[:, None]
    rest -= tl.sum(tl.where(beyond, parts, 0), axis=1)
    first += tl.sum(beyond.to(tl.int64), axis=1) * PART
    offsets2 = first[:, None] + step[None, :]
    share = _counted(values, selectable, offsets2, offsets2 < n, True, HAS_SELECTABLE)
    index = tl.sum((tl.cumsum(share, axis=1) <= rest[:, None]).to(tl.int64), axis=1)
    mine = tl.sum(tl.where(step[None, :] == index[:, None], share, 0), axis=1)
    total = tl.load(running + tiles - 1).to(tl.float64)
    tl.store(rows + at, first + index, mask=inside)
    tl.store(probability + at, mine.to(tl.float64) / total, mask=inside)


@triton.jit(do_not_specialize=["first_number", "draws", "n", "strata", "word", "seed", "step"])
def any_row_kernel(
    numbers,
    rows,
    first_number: tl.int64,
    draws: tl.int64,
    n: tl.int64,
    strata: tl.uint64,
    word: tl.uint32,
    seed: tl.uint64,
    step: tl.uint64,
    HAS_NUMBERS: tl.constexpr,
    STRATIFIED: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """Draws by row where every row is selectable: the target is the row."""
    at = tl.program_id(0).to(tl.int64) * DRAWS + tl.arange(0, DRAWS)
    inside = at < draws
    number = _number_of(numbers, first_number, at, inside, HAS_NUMBERS)
    target = target_of(
        number, word, seed.to(tl.uint64), step.to(tl.uint64), n.to(tl.uint64), strata.to(tl.uint64), STRATIFIED
    )
    tl.store(rows + at, target.to(tl.int64), mask=inside)


# --- launch ----------------------------------------------------------------------------------------------------


def tile_sums(values: torch.Tensor, selectable: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of each tile of 256 values: int64 (ceil(n / 256),), on the same device.

    Args:
        values: (n,) uint32 priorities or uint8 bits, n from 1 to 2**31 - 1.
        selectable: (n,) bool; rows where it is False count 0.

    Raises:
        ArgumentError: a wrong device, dtype or shape.
    """
    check("values", values, (torch.uint32, torch.uint8))
    n = check_whole("the number of values", len(values), 1, MAX_ROWS)
    if selectable is not None:
        check("selectable", selectable, (torch.bool,), like=values, n=n)
    tiles = triton.cdiv(n, TILE)
    sums = torch.empty(tiles, dtype=torch.int64, device=values.device)
    per_program = interpreted(8, 4096)
    bits = values if selectable is None else selectable.view(torch.uint8)
    with on_device_of(values):
        tile_sums_kernel[(triton.cdiv(tiles, per_program),)](
            values, bits, sums, n, HAS_SELECTABLE=selectable is not None, TILE=TILE, TILES=per_program
        )
    return sums


class RunningSums:
    """Values with their sums by tile, from which rows can be drawn. Views `values` and `selectable`, no copies.

    Attributes:
        sums: (tiles,) int64; add changes to it, then call `rerun`.
        running: (tiles,) int64, the sums up to and including each tile.
    """

    def __init__(self, values: torch.Tensor, selectable: torch.Tensor | None = None) -> None:
        self.values = values
        self.selectable = selectable
        self.sums = tile_sums(values, selectable)
        self.rerun()

    def rerun(self) -> None:
        """Makes the running sums from the sums: 16 bytes a tile."""
        self.running = torch.cumsum(self.sums, 0)
        self._total: int | None = None

    @property
    def total(self) -> int:
        """The sum of all values. Waits for the device, once after each change."""
        if self._total is None:
            self._total = int(self.running[-1])
        return self._total

    def draw(self, key: DrawKey, numbers: torch.Tensor | range, strata: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows (int64) and their probabilities in one draw (float64) for these draw numbers. The total is above 0."""
        return self._found(key, numbers, strata, None)

    def find(self, targets: torch.Tensor) -> torch.Tensor:
        """The rows (int64) that targets (int64) fall into; those beyond the total are in no row that is there."""
        return self._found(DrawKey(0, 0, 0), range(len(targets)), 0, targets)[0]

    def _found(
        self, key: DrawKey, numbers: torch.Tensor | range, strata: int, targets: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        draws = len(numbers)
        device = self.values.device
        rows = torch.empty(draws, dtype=torch.int64, device=device)
        probability = torch.empty(draws, dtype=torch.float64, device=device)
        if draws == 0:
            return rows, probability
        tiles = len(self.sums)
        tile_of = torch.empty(draws, dtype=torch.int32, device=device)
        rest_of = torch.empty(draws, dtype=torch.int64, device=device)
        known = isinstance(numbers, torch.Tensor)
        first = 0 if isinstance(numbers, torch.Tensor) else numbers.start
        bits = self.values if self.selectable is None else self.selectable.view(torch.uint8)
        per_search, per_scan = interpreted(256, 1024), interpreted(16, 256)
        with on_device_of(self.values):
            find_tiles_kernel[(triton.cdiv(draws, per_search),)](
                self.running,
                numbers if known else self.running,
                self.running if targets is None else targets,
                tile_of,
                rest_of,
                first,
                draws,
                tiles,
                tiles.bit_length() - 1,
                strata,
                key.word,
                key.seed,
                key.step,
                HAS_NUMBERS=known,
                STRATIFIED=strata != 0,
                TARGETED=targets is not None,
                DRAWS=per_search,
            )
            find_rows_kernel[(triton.cdiv(draws, per_scan),)](
                self.values,
                bits,
                self.running,
                tile_of,
                rest_of,
                rows,
                probability,
                draws,
                len(self.values),
                tiles,
                HAS_SELECTABLE=self.selectable is not None,
                PART=PART,
                DRAWS=per_scan,
            )
        return rows, probability

    def counted(self) -> torch.Tensor:
        """A copy of what each row counts: values, 0 where it is not selectable."""
        values = self.values.clone()
        if self.selectable is not None:
            as_int(values).masked_fill_(~self.selectable, 0)
        return values


class EveryRow:
    """n rows that are drawn with the same probability, with the draws of `RunningSums` at 16 bytes each."""

    @staticmethod
    def find(targets: torch.Tensor) -> torch.Tensor:
        """The rows that targets (int64) fall into."""
        return targets

    def __init__(self, n: int, device: torch.device) -> None:
        self.total = n
        self.device = device

    def draw(self, key: DrawKey, numbers: torch.Tensor | range, strata: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows (int64) and their probabilities (float64)."""
        draws = len(numbers)
        rows = torch.empty(draws, dtype=torch.int64, device=self.device)
        probability = torch.full((draws,), 1.0 / self.total, dtype=torch.float64, device=self.device)
        known = isinstance(numbers, torch.Tensor)
        block = interpreted(256, 1024)
        if draws:
            with on_device_of(rows):
                any_row_kernel[(triton.cdiv(draws, block),)](
                    numbers if known else rows,
                    rows,
                    0 if isinstance(numbers, torch.Tensor) else numbers.start,
                    draws,
                    self.total,
                    strata,
                    key.word,
                    key.seed,
                    key.step,
                    HAS_NUMBERS=known,
                    STRATIFIED=strata != 0,
                    DRAWS=block,
                )
        return rows, probability

    def counted(self) -> torch.Tensor:
        """A copy of what each row counts: uint8 ones."""
        return torch.ones(self.total, dtype=torch.uint8, device=self.device)
