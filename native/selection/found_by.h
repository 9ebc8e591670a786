// Internal to selection: what is drawn from, by priority or by row. Where targets fall, what a row's share of the total
// is, and whether it can be drawn.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "segment/segment.h"
#include "segment/sum_tree.h"
#include "selection/guide_table.h"
#include "selection/missing_rows.h"
#include "selection/selection.h"

namespace geartrain {

struct ByPriority {
  ByPriority(const Population& population, uint64_t /*total*/, size_t draws)
      : from(population), guide(population.priorities, draws) {}

  const Population& from;
  const PriorityTree& tree = from.priorities;
  const GuideTable<PriorityLeaf> guide;

  // The first attempt of a batch, which the guide table was made for.
  void find_first(const uint64_t* targets, size_t n, Search* found, uint32_t* rows) const {
    if (guide.empty()) return find(targets, n, found, rows);
    guide.find(targets, n, found);
    prefetch_children(guide.level(), n, found);
    tree.find_below(guide.level(), n, found);
    name(n, found, rows);
  }
  void find(const uint64_t* targets, size_t n, Search* found, uint32_t* rows) const {
    tree.find(targets, n, found);
    name(n, found, rows);
  }
  double share(uint64_t word) const { return priority_of(word); }
  bool has(uint64_t word) const { return is_committed(word) && priority_of(word) != 0; }

 private:
  void prefetch_children(int level, size_t n, const Search* found) const {
    const auto* children = level == 0 ? tree.leaves() : tree.nodes() + tree.shape().offset[level - 1];
    for (size_t i = 0; i < n; ++i) {
      __builtin_prefetch(children + found[i].node * kFanout);
      __builtin_prefetch(children + found[i].node * kFanout + 8);
    }
  }
  void name(size_t n, const Search* found, uint32_t* rows) const {
    for (size_t i = 0; i < n; ++i) rows[i] = tree.inside(found[i]) ? static_cast<uint32_t>(found[i].node) : kNoRow;
  }
};

struct ByRow {
  ByRow(const Population& population, uint64_t total, size_t draws)
      : from(population), missing(population.bits, population.rows(), total, draws) {
    int level = 0;
    while (tree.shape().width[level] > kMostSummed) ++level;
    sums_ = tree.nodes() + tree.shape().offset[level];
    shift_ = 6 + 4 * (level + 1);
  }

  const Population& from;
  const BitTree& tree = from.bits;
  MissingRows missing;

  // Whether the list of missing rows says where targets fall.
  bool listed() const { return missing.listed() && tree.total() == missing.total(); }
  void find_first(const uint64_t* targets, size_t n, Search* found, uint32_t* rows) const {
    find(targets, n, found, rows);
  }
  void find(const uint64_t* targets, size_t n, Search* found, uint32_t* rows) const {
    aim(targets, n, found, rows);
    const auto* words = tree.leaves();
    for (size_t i = 0; i < n; ++i) {  // its bit tells what the list was too old for
      if (rows[i] == kNoRow) continue;
      if ((words[rows[i] / 64].load(std::memory_order_relaxed) >> (rows[i] % 64) & 1) == 0) rows[i] = kNoRow;
    }
  }
  // The rows that targets fall into, by the list or the tree, whose bits and words are fetched ahead.
  void aim(const uint64_t* targets, size_t n, Search* found, uint32_t* rows) const {
    if (listed()) {
      const auto* words = tree.leaves();
      for (size_t i = 0; i < n; ++i) {
        rows[i] = targets[i] < missing.total() ? static_cast<uint32_t>(missing.row_of(targets[i])) : kNoRow;
        if (rows[i] == kNoRow) continue;
        if (!all_around(rows[i])) __builtin_prefetch(&words[rows[i] / 64]);
        __builtin_prefetch(&from.words[rows[i]]);
      }
      return;
    }
    tree.find(targets, n, found);
    for (size_t i = 0; i < n; ++i) rows[i] = row_of(found[i]);
  }
  // Whether a row's bit is set. Where all rows below a node of the tree are selectable the node says so, and is in the
  // cache where a bit of 1e8 is not. Sums lag behind the bits while a call of another thread removes rows: such a draw
  // is one of before, and the row's word tells whether the row is still there.
  bool selectable(uint32_t row) const {
    return all_around(row) || (tree.leaves()[row / 64].load(std::memory_order_relaxed) >> (row % 64) & 1) != 0;
  }
  double share(uint64_t) const { return 1.0; }
  bool has(uint64_t word) const { return is_committed(word); }

 private:
  static constexpr uint64_t kMostSummed = uint64_t{1} << 14;  // nodes of one level, 128 KB

  bool all_around(uint32_t row) const {
    return sums_[row >> shift_].load(std::memory_order_relaxed) == uint64_t{1} << shift_;
  }
  uint32_t row_of(const Search& found) const {
    if (!tree.inside(found)) return kNoRow;
    const uint64_t bits = tree.leaves()[found.node].load(std::memory_order_relaxed);
    if (found.residual >= BitLeaf::count(bits)) return kNoRow;
    const auto row = static_cast<uint32_t>(found.node * 64 + select_bit(bits, static_cast<uint32_t>(found.residual)));
    if (row >= from.rows()) return kNoRow;  // a bit behind the last row, in a damaged segment
    __builtin_prefetch(&from.words[row]);
    return row;
  }

  const std::atomic<uint64_t>* sums_;  // of the lowest level with few nodes
  int shift_;                          // from a row to its node there
};

}  // namespace geartrain
