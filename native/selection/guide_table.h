// Internal to selection: guide table into the running sums of one level of a sum tree, where searches of a large batch
// begin.
//
//   level      [ 40 | 31 | 25 | 8 | ... ]     nodes of the tree
//   sums       [ 0 | 40 | 71 | 96 | 104 ...]  what lies before each
//   table      [ 0 | 0 | 1 | 2 | 4 | ... ]    for every 2^shift of the total the node that holds its first number
//
// A search looks its target up and walks on to its node, half a node on average whatever the sums are, since a number
// is as likely to fall into any one entry of the table (Chen and Asau, "On generating random variates from an empirical
// distribution", 1974). The levels above need no descent. Making it costs a pass over the level for each batch, so the
// level is the widest one that the batch repays.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "base/buffer_pool.h"
#include "segment/sum_tree.h"

namespace geartrain {

// Sums and table are of the instant that they were made at. Where the tree has changed since, a search may end at a
// node with a residual that nothing below it holds, as one that descends from the root may.
template <typename Leaf>
class GuideTable {
 public:
  // For so many searches. Empty where the tree has too few levels above the one that they repay.
  GuideTable(const SumTree<Leaf>& tree, size_t searches) {
    const TreeShape& shape = tree.shape();
    const uint64_t widest = std::min<uint64_t>(searches / kSearchesPerNode, kWidest);
    int level = 0;
    while (level < shape.levels && shape.width[level] > widest) ++level;
    if (level + kLeastSkipped >= shape.levels) return;
    width_ = shape.width[level];
    level_ = level;
    sums_ = PooledArray<uint64_t>(width_ + 2);
    const auto* nodes = tree.nodes() + shape.offset[level];
    uint64_t sum = 0;
    for (uint64_t node = 0; node < width_; ++node) {
      sums_[node] = sum;
      sum += nodes[node].load(std::memory_order_relaxed);
    }
    sums_[width_] = sum;
    sums_[width_ + 1] = std::numeric_limits<uint64_t>::max();  // where the walk ends
    const int bits = static_cast<int>(std::bit_width(kEntriesPerNode * width_));
    shift_ = std::max(static_cast<int>(std::bit_width(sum)) - bits, 0);
    entries_ = (sum >> shift_) + 1;
    table_ = PooledArray<uint32_t>(entries_);
    uint64_t node = 0;
    for (uint64_t entry = 0; entry < entries_; ++entry) {
      const uint64_t first = entry << shift_;
      while (sums_[node + 1] <= first) ++node;
      table_[entry] = static_cast<uint32_t>(node);
    }
  }

  bool empty() const { return level_ < 0; }
  int level() const { return level_; }

  // The nodes of level() that targets[0..n) fall into, at most kMost of them.
  void find(const uint64_t* targets, size_t n, Search* found) const {
    for (size_t i = 0; i < n; ++i) __builtin_prefetch(&table_[entry_of(targets[i])]);
    for (size_t i = 0; i < n; ++i) {
      found[i].node = table_[entry_of(targets[i])];
      __builtin_prefetch(&sums_[found[i].node]);
    }
    for (size_t i = 0; i < n; ++i) {
      uint64_t node = found[i].node;
      node += sums_[node + 1] <= targets[i];  // most walks are this short, and no branch is foreseen
      while (node < width_ && sums_[node + 1] <= targets[i]) ++node;
      found[i] = node < width_ ? Search{node, targets[i] - sums_[node]}
                               : Search{width_ - 1, std::numeric_limits<uint64_t>::max()};
    }
  }

 private:
  static constexpr uint64_t kSearchesPerNode = 2, kEntriesPerNode = 2, kWidest = uint64_t{1} << 15;
  static constexpr int kLeastSkipped = 2;

  uint64_t entry_of(uint64_t target) const { return std::min(target >> shift_, entries_ - 1); }

  int level_ = -1, shift_ = 0;
  uint64_t width_ = 0, entries_ = 0;
  PooledArray<uint64_t> sums_;
  PooledArray<uint32_t> table_;
};

}  // namespace geartrain
