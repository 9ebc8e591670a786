"""The first rows in an order: heaviest (the older of equals first), oldest, or newest after a sequence number.

Each row gets a distinct key of 63 bits. The first row has the largest key:

    heaviest   priority << 31 | (2^31 - 1 - age)       age: the row's place in the order of sequence numbers
    oldest     2^31 - 1 - age
    newest     age                                   -1: not to be chosen

One pass finds the best key of each tile of 256 rows. The first k rows lie in the k tiles with the best such keys.
Each of these k keys beats any key of another tile. So three steps find the rows:

1. torch.topk picks the k tiles among n / 256 keys.
2. A second kernel computes the 256 k keys of these tiles.
3. torch.topk orders them.

The bound holds for any priorities, even if all are equal.

Bytes:

- 4 N for the heaviest, 1 N more for selectable bits, 4 N for ages,
- 12 N / 256 for the keys of tiles,
- about 7 KB for each requested row.

One torch.topk over the keys of all rows would write 8 N bytes and read several times that. No GPU has timed this yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from geartrain.core.arguments import check_whole
from geartrain.device.kernels.checks import MAX_ROWS, check, interpreted, on_device_of
from geartrain.device.kernels.weighted_draw import TILE

OLDEST, NEWEST, HEAVIEST = range(3)


# --- kernels ---------------------------------------------------------------------------------------------------


@triton.jit
def _keys(
    priorities,
    selectable,
    age_of,
    row,
    inside,
    min_age,
    ORDER: tl.constexpr,
    HAS_SELECTABLE: tl.constexpr,
    HAS_AGES: tl.constexpr,
    MASKED: tl.constexpr,
):
    if HAS_AGES:
        age = tl.load(age_of + row, mask=inside, other=0).to(tl.int64)
    else:
        age = row.to(tl.int64)
    if ORDER == 1:
        key = age
    else:
        key = 0x7FFFFFFF - age
    if ORDER == 2:
        if MASKED:
            priority = tl.load(priorities + row, mask=inside, other=0)
        else:
            priority = tl.load(priorities + row)
        key = (priority.to(tl.int64) << 31) | key
    allowed = age >= min_age
    if MASKED:
        allowed &= inside
    if HAS_SELECTABLE:
        allowed &= tl.load(selectable + row, mask=inside, other=0) != 0
    return tl.where(allowed, key, -1)


@triton.jit(do_not_specialize=["n", "min_age"])
def best_keys_kernel(
    priorities,
    selectable,
    age_of,
    best,
    n: tl.int64,
    min_age: tl.int64,
    ORDER: tl.constexpr,
    HAS_SELECTABLE: tl.constexpr,
    HAS_AGES: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The best key of each tile."""
    tile = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    row = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = row < n
    if (tl.program_id(0).to(tl.int64) + 1) * TILES * TILE <= n:
        key = _keys(priorities, selectable, age_of, row, inside, min_age, ORDER, HAS_SELECTABLE, HAS_AGES, False)
        tl.store(best + tile, tl.max(key, axis=1))
    else:
        key = _keys(priorities, selectable, age_of, row, inside, min_age, ORDER, HAS_SELECTABLE, HAS_AGES, True)
        tl.store(best + tile, tl.max(key, axis=1), mask=tile * TILE < n)


@triton.jit(do_not_specialize=["count", "n", "min_age"])
def tile_keys_kernel(
    priorities,
    selectable,
    age_of,
    tiles,
    keys,
    count: tl.int64,
    n: tl.int64,
    min_age: tl.int64,
    ORDER: tl.constexpr,
    HAS_SELECTABLE: tl.constexpr,
    HAS_AGES: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """All keys of some tiles."""
    at = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    tile = tl.load(tiles + at, mask=at < count, other=0)
    row = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    inside = (row < n) & (at < count)[:, None]
    key = _keys(priorities, selectable, age_of, row, inside, min_age, ORDER, HAS_SELECTABLE, HAS_AGES, True)
    tl.store(keys + at[:, None] * TILE + tl.arange(0, TILE)[None, :], key, mask=(at < count)[:, None])


# --- launch ----------------------------------------------------------------------------------------------------


def first_rows(
    priorities: torch.Tensor,
    selectable: torch.Tensor | None,
    age_of: torch.Tensor | None,
    order: int,
    n: int,
    min_age: int = 0,
) -> torch.Tensor:
    """Up to n rows, int64, the first in `order` first; fewer when there are no more.

    Args:
        priorities: (N,) uint32.
        selectable: (N,) bool, or None where all are.
        age_of: (N,) int32, each row's place in the order of sequence numbers; None where that is its number.
        order: OLDEST, NEWEST or HEAVIEST.
        n: how many.
        min_age: rows of lower places are passed over.

    Raises:
        ArgumentError: a wrong device, dtype or shape, or an order that is none.
    """
    check("priorities", priorities, (torch.uint32,))
    check_whole("order (0 oldest, 1 newest, 2 heaviest)", order, OLDEST, HEAVIEST)
    size = check_whole("the number of priorities", len(priorities), 1, MAX_ROWS)
    for name, tensor, dtype in (("selectable", selectable, torch.bool), ("age_of", age_of, torch.int32)):
        if tensor is not None:
            check(name, tensor, (dtype,), like=priorities, n=size)
    if n <= 0:
        return torch.empty(0, dtype=torch.int64, device=priorities.device)
    tiles = triton.cdiv(size, TILE)
    bits = priorities if selectable is None else selectable.view(torch.uint8)
    ages = priorities if age_of is None else age_of
    kinds = {
        "ORDER": order,
        "HAS_SELECTABLE": selectable is not None,
        "HAS_AGES": age_of is not None,
        "TILE": TILE,
        "TILES": interpreted(8, 1024),
    }
    best = torch.empty(tiles, dtype=torch.int64, device=priorities.device)
    with on_device_of(priorities):
        best_keys_kernel[(triton.cdiv(tiles, kinds["TILES"]),)](priorities, bits, ages, best, size, min_age, **kinds)
        chosen = torch.topk(best, min(n, tiles), sorted=False).indices
        keys = torch.empty(len(chosen) * TILE, dtype=torch.int64, device=priorities.device)
        tile_keys_kernel[(triton.cdiv(len(chosen), kinds["TILES"]),)](
            priorities, bits, ages, chosen, keys, len(chosen), size, min_age, **kinds
        )
    top = torch.topk(keys, min(n, len(keys)))
    at = top.indices[top.values >= 0]
    return chosen[at // TILE] * TILE + at % TILE
