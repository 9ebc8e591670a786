"""Random bits from counters, and whole numbers below a bound: native/base/random.h as Triton device functions.

The 128 bits of a draw are Philox4x32-10 (Salmon et al., 2011). The counter is (draw, stream << 24 | attempt, step), and
the key is the seed. below(x) = floor(bits * x / 2^128), from two 64-bit high products and a carry.

Cost: no memory access, about 90 integer instructions a draw. The ten rounds are unrolled with 32 x 32 -> 64 products
(mul.wide.u32). No GPU has timed this yet.
"""

from __future__ import annotations

import triton
import triton.language as tl

_MASK32 = 0xFFFFFFFF

# Streams, as in native/base/random.h.
ROW_STREAM = 0
WINDOW_STREAM = 1
DISTINCT_STREAM = 2
ATTEMPTS_PER_ROUND = 64


def counter_word(stream: int, round: int, attempt: int = 0) -> int:
    """The second word of the counter: what is drawn, and which try at it this is."""
    return stream << 24 | (round * ATTEMPTS_PER_ROUND + attempt) & _MASK32


# --- reference -------------------------------------------------------------------------------------------------


def reference_bits(seed: int, step: int, word: int, draw: int) -> int:
    """A draw's 128 bits as one number, as the published algorithm has it."""
    counter = [draw, word, step & _MASK32, step >> 32]
    key = [seed & _MASK32, seed >> 32]
    for _ in range(10):
        product0, product1 = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (product1 >> 32) ^ counter[1] ^ key[0],
            product1 & _MASK32,
            (product0 >> 32) ^ counter[3] ^ key[1],
            product0 & _MASK32,
        ]
        key = [(key[0] + 0x9E3779B9) & _MASK32, (key[1] + 0xBB67AE85) & _MASK32]
    return counter[0] << 96 | counter[1] << 64 | counter[2] << 32 | counter[3]


def reference_below(bits: int, bound: int) -> int:
    """floor(bits * bound / 2^128)."""
    return bits * bound >> 128


# --- device functions ------------------------------------------------------------------------------------------


@triton.jit
def random_bits(draw, word, seed, step):
    """128 bits for each draw: (high, low), uint64. `seed` and `step` are uint64, `word` uint32."""
    c0 = draw.to(tl.uint64)
    c1 = word.to(tl.uint64)
    c2 = step & 0xFFFFFFFF
    c3 = step >> 32
    k0 = seed & 0xFFFFFFFF
    k1 = seed >> 32
    for _ in tl.static_range(10):  # 32-bit numbers in 64-bit registers: products need all 64
        product0 = c0 * 0xD2511F53
        product1 = c2 * 0xCD9E8D57
        c0 = (product1 >> 32) ^ c1 ^ k0
        c1 = product1 & 0xFFFFFFFF
        c2 = (product0 >> 32) ^ c3 ^ k1
        c3 = product0 & 0xFFFFFFFF
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0 << 32 | c1, c2 << 32 | c3


@triton.jit
def below(high, low, bound):
    """floor((high * 2^64 + low) * bound / 2^128), uint64."""
    upper = tl.umulhi(high, bound)
    middle = high * bound
    return upper + (middle + tl.umulhi(low, bound) < middle).to(tl.uint64)


@triton.jit
def target_of(draw, word, seed, step, total, strata, STRATIFIED: tl.constexpr):
    """What native/selection/selection.h calls the target of a draw: below(total), or inside the draw's share of it.

    draw * total / strata needs 96 bits. With total = q * strata + r it is draw * q + draw * r / strata, which needs 64,
    because draw and r are below 2^32.
    """
    high, low = random_bits(draw, word, seed, step)
    if STRATIFIED:
        number = draw.to(tl.uint64)
        share = total // strata
        rest = total % strata
        first = number * share + number * rest // strata
        last = (number + 1) * share + (number + 1) * rest // strata
        width = last - first
        target = first + below(high, low, tl.where(width == 0, width + 1, width))
        target = tl.where(target < total, target, total - 1)
    else:
        target = below(high, low, total + tl.zeros_like(high))
    return target
