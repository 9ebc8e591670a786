// Drawing rows: exact, seeded, many at a time.
//
// Works on trees and words, wherever they live; knows no store. Every draw is a function of (tree contents, seed,
// step, draw number, attempt), so the same contents give the same rows on any machine. While rows change under a
// draw, it is made again with the next attempt; what comes back was selectable when it was looked at.
//
// Cost: one cache miss per level, 16 draws in flight; no locks.
#pragma once

#include <cstdint>
#include <span>

#include "random.h"
#include "sum_tree.h"

namespace geartrain {

struct Draws {
  std::span<uint32_t> rows;
  std::span<uint32_t> generations;
  std::span<double> probability;  // of this row in one draw
};

// Tries within one call before it gives up on a tree whose sums and leaves disagree.
constexpr uint32_t kAttemptsPerRound = 16;

// Draws rows with replacement, in proportion to their weights, for the given draw numbers. `round` starts at 0 and
// grows when the caller draws again for the same numbers (a torn row). Returns how many draws failed for good, which
// only a tree in need of repair causes; their rows are kNoRow. Throws empty when the total is zero.
uint64_t draw_weighted(const WeightTree& tree, const DrawKey& key, uint32_t round, std::span<const uint32_t> numbers,
                       const Draws& out);

// The same for uniform draws over the rows whose bit is set; `words` tells their generations.
uint64_t draw_uniform(const BitTree& tree, const std::atomic<uint64_t>* words, const DrawKey& key, uint32_t round,
                      std::span<const uint32_t> numbers, const Draws& out);

// For each draw, the last step of its window: uniform over [0, length).
void draw_window_ends(const DrawKey& key, uint32_t round, std::span<const uint32_t> numbers,
                      std::span<const int32_t> lengths, std::span<int32_t> ends);

// Position of the set bit with `rank` set bits below it. There must be one.
uint32_t select_bit(uint64_t word, uint32_t rank);

}  // namespace geartrain
