// Sum tree with wide nodes over integer leaves: find the leaf that a number falls into, in a few cache misses.
//
//   level 2            [ 96 ]                      one node, the total
//   level 1      [ 40 | 31 | 25 | ... ]            a node is the sum of 16 below it
//   level 0   [ 9 | 0 | 31 | ... ] [ ... ]         a node is the sum of 16 leaves
//   leaves    w w w w w w w w w w w w w w w w ...  (kept by the owner, in any 64-bit form)
//
// The 16 children of a node lie side by side on two cache lines, so a step down is two misses fetched together.
// Sums are unsigned 64-bit integers, hence associative: an update is one atomic add per level, in any order,
// from any number of processes, without locks and without drift. While an update is under way a reader may see
// a node that does not match its children; `find` then reports it (false) instead of naming a wrong leaf.
//
// The inner nodes are derived: rebuild() makes them from the leaves, audit() compares. Neither may run while
// others update (store.cc excludes them).
//
// `Leaf` defines what a leaf word counts: its low 32 bits (row priorities) or its set bits (row bitmaps).
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#include "segment/descend.h"

namespace geartrain {

constexpr int kMaxLevels = 10;  // 16^9 leaves and more: beyond any segment

// A row's word: generation above, fixed-point priority below (segment.h).
struct PriorityLeaf {
  static constexpr Count kCount = Count::low_half;
  static uint64_t count(uint64_t word) { return word & 0xffffffffu; }
};

// 64 rows' selectable bits.
struct BitLeaf {
  static constexpr Count kCount = Count::bits;
  static uint64_t count(uint64_t word) { return static_cast<uint64_t>(std::popcount(word)); }
};

// How many nodes a tree has and where each level starts. Level 0 is the widest; the last level is one node.
struct TreeShape {
  uint64_t leaves = 0;
  int levels = 0;
  std::array<uint64_t, kMaxLevels> offset{};
  std::array<uint64_t, kMaxLevels> width{};
  uint64_t nodes = 0;

  static TreeShape of(uint64_t leaves) {
    TreeShape shape;
    shape.leaves = leaves;
    uint64_t width = leaves;
    do {
      width = std::max<uint64_t>(1, (width + kFanout - 1) / kFanout);
      shape.offset[shape.levels] = shape.nodes;
      shape.width[shape.levels] = width;
      // Each level is padded to whole nodes, so that a node's children can always be read together.
      shape.nodes += (width + kFanout - 1) / kFanout * kFanout;
      ++shape.levels;
    } while (width > 1);
    return shape;
  }
};

// Leaves a caller must allocate so that the last node's 16 children exist.
constexpr uint64_t padded_leaves(uint64_t leaves) {
  return (leaves + kFanout - 1) / kFanout * kFanout;
}

// Zeroed words for leaves or nodes outside a segment, aligned as the descent's vectors need them; many of them on huge
// pages where they can be had, since a draw looks up a page for every level that is not in the cache.
class Words {
 public:
  explicit Words(uint64_t count = 0) : memory_(allocate(count * 8), &std::free) {
    for (uint64_t i = 0; i < count; ++i) new (memory_.get() + i) std::atomic<uint64_t>(0);
  }
  std::atomic<uint64_t>* get() const { return memory_.get(); }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20, kHugeFrom = 4 * kHugePage;

  static std::atomic<uint64_t>* allocate(size_t bytes) {
    if (bytes == 0) return nullptr;
    const size_t unit = bytes < kHugeFrom ? 64 : kHugePage;
    const size_t size = (bytes + unit - 1) / unit * unit;
    void* const memory = std::aligned_alloc(unit, size);
    if (memory == nullptr) throw std::bad_alloc();
    if (unit == kHugePage) ::madvise(memory, size, MADV_HUGEPAGE);
    return static_cast<std::atomic<uint64_t>*>(memory);
  }

  std::unique_ptr<std::atomic<uint64_t>, void (*)(void*)> memory_;
};

template <typename Leaf>
class SumTree {
 public:
  using Word = std::atomic<uint64_t>;
  // Found: node is the leaf, residual is how far into the leaf's count the target lies.
  using Found = Search;

  SumTree() = default;
  // Views, not copies: `leaves` has padded_leaves(n) words, `nodes` has TreeShape::of(n).nodes, both 64-byte aligned.
  SumTree(Word* leaves, Word* nodes, uint64_t count) : shape_(TreeShape::of(count)), leaves_(leaves), nodes_(nodes) {}

  const TreeShape& shape() const { return shape_; }
  Word* leaves() const { return leaves_; }
  Word* nodes() const { return nodes_; }
  uint64_t total() const { return nodes_[shape_.offset[shape_.levels - 1]].load(std::memory_order_relaxed); }

  // Adds `delta` (modulo 2^64, so a difference may be passed) to every node above `leaf`.
  void add(uint64_t leaf, uint64_t delta) const {
    if (delta == 0) return;
    uint64_t node = leaf;
    for (int level = 0; level < shape_.levels; ++level) {
      node /= kFanout;
      nodes_[shape_.offset[level] + node].fetch_add(delta, std::memory_order_relaxed);
    }
  }

  // Fetches ahead what an update of `leaf` will touch first.
  void prefetch(uint64_t leaf) const {
    __builtin_prefetch(&leaves_[leaf], 1);
    __builtin_prefetch(&nodes_[leaf / kFanout], 1);
  }

  // Adds deltas of many leaves, those under one node together, level by level: neighbours share their way up. Told how
  // many additions will come, it adds up the differences of the lowest level that is much narrower than that on its
  // own, and writes each of its nodes once. The sums lag behind the leaves until flush(), which the destructor does,
  // and for at most kLag additions.
  class Adder {
   public:
    explicit Adder(const SumTree& tree, size_t additions = 0) : tree_(tree) {
      // Not the level above the leaves: that one a descent compares with them.
      for (int level = 1; level < tree_.shape_.levels && additions != 0; ++level) {
        if (tree_.shape_.width[level] > std::min<uint64_t>(additions / 4, kWidest)) continue;
        gathered_level_ = level;
        std::fill_n(gathered_.begin(), tree_.shape_.width[level], uint64_t{0});
        break;
      }
    }
    ~Adder() { flush(); }
    Adder(const Adder&) = delete;
    Adder& operator=(const Adder&) = delete;

    void add(uint64_t leaf, uint64_t delta) {
      if (++added_ == kLag) flush();
      carry(0, leaf / kFanout, delta);
    }
    void flush() {
      for (int level = 0; level < tree_.shape_.levels; ++level) {
        if (level == gathered_level_) {
          for (uint64_t node = 0; node < tree_.shape_.width[level]; ++node) {
            write(level, node, std::exchange(gathered_[node], 0));
          }
        }
        settle(level);
      }
      added_ = 0;
    }

   private:
    static constexpr uint32_t kLag = 4096;
    static constexpr uint64_t kWidest = 1024;

    void carry(int level, uint64_t node, uint64_t delta) {
      if (level == gathered_level_) {
        gathered_[node] += delta;
        return;
      }
      if (node_[level] != node) {
        settle(level);
        node_[level] = node;
      }
      delta_[level] += delta;
    }
    // Writes the pending difference to the node that this level is at, and carries it to the one above.
    void settle(int level) { write(level, node_[level], std::exchange(delta_[level], 0)); }
    void write(int level, uint64_t node, uint64_t delta) {
      if (delta == 0) return;
      tree_.nodes_[tree_.shape_.offset[level] + node].fetch_add(delta, std::memory_order_relaxed);
      if (level + 1 < tree_.shape_.levels) carry(level + 1, node / kFanout, delta);
    }

    const SumTree& tree_;
    std::array<uint64_t, kMaxLevels> node_{};
    std::array<uint64_t, kMaxLevels> delta_{};
    uint32_t added_ = 0;
    int gathered_level_ = kMaxLevels;
    std::array<uint64_t, kWidest> gathered_;  // set where there is such a level
  };

  // Finds the leaves that targets[0..n) fall into, all of them one level at a time, so that their cache misses
  // overlap. When the tree changed on the way, a residual is not below the leaf's count: `inside` reports it.
  void find(const uint64_t* targets, size_t n, Found* found) const {
    for (size_t i = 0; i < n; ++i) found[i] = {0, targets[i]};
    find_below(shape_.levels - 1, n, found);
  }
  // The same from nodes of a level on, which are found already.
  void find_below(int from_level, size_t n, Found* found) const {
    for (int level = from_level - 1; level >= 0; --level) {
      descend(Count::sum, nodes_ + shape_.offset[level], shape_.width[level], n, found,
              level > 0 ? nodes_ + shape_.offset[level - 1] : leaves_);
    }
    descend(Leaf::kCount, leaves_, shape_.leaves, n, found, nullptr);
  }

  bool inside(const Found& found) const {
    return found.node < shape_.leaves &&
           found.residual < Leaf::count(leaves_[found.node].load(std::memory_order_relaxed));
  }

  void rebuild() const {
    uint64_t below = shape_.leaves;
    for (int level = 0; level < shape_.levels; ++level) {
      for (uint64_t node = 0; node < shape_.width[level]; ++node) {
        nodes_[shape_.offset[level] + node].store(sum_of_children(level, node, below), std::memory_order_relaxed);
      }
      below = shape_.width[level];
    }
  }

  // Makes the nodes above leaves [first, last] from what is below them.
  void rebuild_over(uint64_t first, uint64_t last) const {
    uint64_t below = shape_.leaves;
    for (int level = 0; level < shape_.levels; ++level) {
      first /= kFanout;
      last /= kFanout;
      for (uint64_t node = first; node <= last; ++node) {
        nodes_[shape_.offset[level] + node].store(sum_of_children(level, node, below), std::memory_order_relaxed);
      }
      below = shape_.width[level];
    }
  }

  // The number of nodes that differ from the sum of their children.
  uint64_t audit() const {
    uint64_t wrong = 0;
    uint64_t below = shape_.leaves;
    for (int level = 0; level < shape_.levels; ++level) {
      for (uint64_t node = 0; node < shape_.width[level]; ++node) {
        wrong +=
            nodes_[shape_.offset[level] + node].load(std::memory_order_relaxed) != sum_of_children(level, node, below);
      }
      below = shape_.width[level];
    }
    return wrong;
  }

 private:
  uint64_t sum_of_children(int level, uint64_t node, uint64_t below) const {
    const uint64_t first = node * kFanout;
    const uint64_t last = std::min(first + kFanout, below);
    uint64_t sum = 0;
    for (uint64_t child = first; child < last; ++child) {
      sum += level == 0 ? Leaf::count(leaves_[child].load(std::memory_order_relaxed))
                        : nodes_[shape_.offset[level - 1] + child].load(std::memory_order_relaxed);
    }
    return sum;
  }

  TreeShape shape_;
  Word* leaves_ = nullptr;
  Word* nodes_ = nullptr;
};

using PriorityTree = SumTree<PriorityLeaf>;
using BitTree = SumTree<BitLeaf>;

}  // namespace geartrain
