"""Loads of host memory in the order that detects torn rows. The docstring of gather.py explains this order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from geartrain.device.kernels import interpreting
from geartrain.device.kernels.gather_layout import GROUP

# How a word is read before and after: PTX, AMD's instructions, or nothing, where the interpreter runs alone.
PLAIN, NVIDIA, AMD = 0, 1, 2


def warps_of(chunk: int, order: int) -> int:
    """As many warps as load a piece with 16 bytes a thread, and no more than read 32 of them."""
    lanes = 64 if order == AMD else 32
    return max(1, min(128 // lanes, chunk // (GROUP * lanes)))


def order_for(arena: torch.Tensor) -> int:
    """The order of reads for launches that write to this arena, by the GPU's vendor."""
    if interpreting() or arena.device.type != "cuda":
        return PLAIN
    return AMD if torch.version.hip else NVIDIA


@triton.jit
def first_word(word, ORDER: tl.constexpr):
    """A row's word, before anything else of the row is read."""
    if ORDER == 1:
        value = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [word.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1
        )
    elif ORDER == 2:
        value = tl.load(word, volatile=True)
        value = (behind(value >> 32, ORDER) << 32) | (value & 0xFFFFFFFF)
    else:
        value = tl.load(word, volatile=True)
    return value


@triton.jit
def behind(value, ORDER: tl.constexpr):
    """The value itself, ordered after all earlier reads of this thread. Reads that use it come later.

    An int64; on AMD its low 32 bits, with their sign.
    """
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
def still(word, generation, ORDER: tl.constexpr):
    """Whether the row's generation is unchanged after all earlier reads."""
    expected = behind(generation, ORDER) & 0xFFFFFFFF
    return ((tl.load(word, volatile=True) >> 32) & 0xFFFFFFFF) == expected


__all__ = ["AMD", "NVIDIA", "PLAIN", "behind", "first_word", "order_for", "still", "warps_of"]
