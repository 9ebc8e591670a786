// Descent of a sum tree: one step down for many searches at once, in the widest form that the CPU has.
//
// Finding the child that a number falls into means sixteen additions and comparisons whose outcome cannot be
// predicted. With 512-bit vectors that is a handful of instructions, with 256-bit ones a few more, and the portable
// form is written without branches. All give the same answer; the widest is taken.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace geartrain {

constexpr uint64_t kFanout = 16;

// A search: the node it has come to, and how far into that node's sum its target lies.
struct Search {
  uint64_t node;
  uint64_t residual;
};

// What the words of a level count: all of a sum, the low 32 bits (row priorities), or the set bits (row bitmaps).
enum class Count : uint8_t { sum, low_half, bits };

// Moves each of n searches from its node to one of the node's sixteen children, which start at level[16 * node];
// the level has `width` words, padded to a multiple of 16. A search whose children do not add up (they are being
// changed) ends with a residual that no word can hold. `next`, where the children of the new node will start, is
// fetched ahead unless null.
void descend(Count count, const std::atomic<uint64_t>* level, uint64_t width, size_t n, Search* searches,
             const std::atomic<uint64_t>* next);

// Forces "avx512vpopcntdq", "avx512", "avx2" or "portable", for tests; false when this machine does not have it.
bool set_descend_kernel(const char* name);

}  // namespace geartrain
