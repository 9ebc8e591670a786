// The sum tree against a linear scan, and under a storm of updates.

#include "segment/sum_tree.h"

#include <memory>
#include <numeric>
#include <random>
#include <thread>

#include "segment/segment.h"
#include "tests/support/check.h"

namespace geartrain {
namespace {

struct TreeMemory {
  explicit TreeMemory(uint64_t leaves)
      : leaf_words(make(padded_leaves(leaves))),
        nodes(make(TreeShape::of(leaves).nodes)),
        tree(leaf_words.get(), nodes.get(), leaves) {}

  static std::unique_ptr<std::atomic<uint64_t>[], void (*)(void*)> make(uint64_t count) {
    void* memory = std::aligned_alloc(64, (count * 8 + 63) / 64 * 64);
    std::memset(memory, 0, count * 8);
    return {static_cast<std::atomic<uint64_t>*>(memory), &std::free};
  }

  std::unique_ptr<std::atomic<uint64_t>[], void (*)(void*)> leaf_words,
      nodes;
  PriorityTree tree;
};

// The reference of find: adds up one leaf after the other.
PriorityTree::Found slow_find(const PriorityTree& tree, uint64_t target) {
  for (uint64_t leaf = 0; leaf < tree.shape().leaves; ++leaf) {
    const uint64_t count = PriorityLeaf::count(tree.leaves()[leaf].load());
    if (target < count) return {leaf, target};
    target -= count;
  }
  return {~uint64_t{0}, target};
}

TEST(a_target_falls_into_the_leaf_that_a_linear_scan_finds) {
  std::mt19937_64 random(1);
  for (uint64_t leaves : {1, 2, 15, 16, 17, 255, 256, 257, 4095, 4096, 4097, 5000}) {
    TreeMemory memory(leaves);
    for (uint64_t i = 0; i < leaves; ++i) {
      const uint32_t priority = random() % 3 == 0 ? 0 : static_cast<uint32_t>(random() % 1000);
      memory.leaf_words[i] = make_word(static_cast<uint32_t>(random()), priority);
    }
    memory.leaf_words[random() % leaves] = make_word(1, 5);
    memory.tree.rebuild();
    CHECK_EQ(memory.tree.audit(), uint64_t{0});
    const uint64_t total = memory.tree.total();
    std::vector<uint64_t> targets{0, total - 1};
    for (int i = 0; i < 400; ++i) targets.push_back(random() % total);
    std::vector<PriorityTree::Found> found(targets.size());
    memory.tree.find(targets.data(), targets.size(), found.data());
    for (size_t i = 0; i < targets.size(); ++i) {
      const auto expected = slow_find(memory.tree, targets[i]);
      CHECK_EQ(found[i].node, expected.node);
      CHECK_EQ(found[i].residual, expected.residual);
      CHECK(memory.tree.inside(found[i]));
    }
  }
}

TEST(a_target_beyond_the_total_is_never_inside_a_leaf) {
  for (uint64_t leaves : {1, 3, 16, 40, 300}) {
    TreeMemory memory(leaves);
    for (uint64_t i = 0; i < leaves; ++i) memory.leaf_words[i] = make_word(1, 7);
    memory.tree.rebuild();
    for (uint64_t beyond : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 40, ~uint64_t{0} - memory.tree.total()}) {
      const uint64_t target = memory.tree.total() + beyond;
      PriorityTree::Found found;
      memory.tree.find(&target, 1, &found);
      CHECK(found.node < leaves);
      CHECK(!memory.tree.inside(found));
    }
  }
}

TEST(the_largest_priorities_add_up_without_loss) {
  constexpr uint64_t kLeaves = 70'000;
  TreeMemory memory(kLeaves);
  for (uint64_t i = 0; i < kLeaves; ++i) memory.leaf_words[i] = make_word(3, 0xffffffffu);
  memory.tree.rebuild();
  CHECK_EQ(memory.tree.total(), kLeaves * 0xffffffffu);
  for (uint64_t leaf : {uint64_t{0}, uint64_t{17}, kLeaves - 1}) {
    const uint64_t targets[2] = {leaf * 0xffffffffu, (leaf + 1) * 0xffffffffu - 1};
    PriorityTree::Found found[2];
    memory.tree.find(targets, 2, found);
    CHECK_EQ(found[0].node, leaf);
    CHECK_EQ(found[1].node, leaf);
  }
}

TEST(differences_gathered_by_level_leave_every_sum_exact) {
  std::mt19937_64 random(4);
  for (uint64_t leaves : {1, 17, 300, 5000, 70'000}) {
    // What the adder is told, and what comes: as many, more than told, and beyond its longest lag.
    for (auto [told, additions] : {std::pair{0, 500}, {300, 300}, {64, 5000}, {10'000, 10'000}}) {
      TreeMemory memory(leaves);
      for (uint64_t i = 0; i < leaves; ++i) memory.leaf_words[i] = make_word(1, 100);
      memory.tree.rebuild();
      {
        PriorityTree::Adder sums(memory.tree, static_cast<size_t>(told));
        for (int i = 0; i < additions; ++i) {
          const uint64_t leaf = random() % leaves;
          const uint32_t priority = random() % 1000;
          const uint64_t old = memory.leaf_words[leaf].exchange(make_word(1, priority));
          sums.add(leaf, uint64_t{priority} - priority_of(old));
        }
      }
      CHECK_EQ(memory.tree.audit(), uint64_t{0});
    }
  }
}

TEST(updates_from_many_threads_leave_every_sum_exact) {
  constexpr uint64_t kLeaves = 1000;
  constexpr int kThreads = 4, kUpdates = 50'000;
  TreeMemory memory(kLeaves);
  for (uint64_t i = 0; i < kLeaves; ++i) memory.leaf_words[i] = make_word(1, 100);
  memory.tree.rebuild();
  std::atomic<int> writers{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < kUpdates; ++i) {
        const uint64_t leaf = random() % kLeaves;
        const uint32_t priority = random() % 1000;
        const uint64_t old = memory.leaf_words[leaf].exchange(make_word(1, priority));
        memory.tree.add(leaf, uint64_t{priority} - priority_of(old));
      }
      --writers;
    });
  }
  std::mt19937_64 random(99);
  uint64_t inside = 0;
  do {  // a concurrent reader stays in bounds, whatever the sums are meanwhile
    uint64_t targets[16];
    PriorityTree::Found found[16];
    for (uint64_t& target : targets) target = random() % (memory.tree.total() | 1);
    memory.tree.find(targets, 16, found);
    for (const auto& each : found) {
      CHECK(each.node < kLeaves);
      inside += memory.tree.inside(each);
    }
  } while (writers != 0);
  for (auto& thread : threads) thread.join();
  CHECK(inside > 0);
  CHECK_EQ(memory.tree.audit(), uint64_t{0});
  uint64_t expected = 0;
  for (uint64_t i = 0; i < kLeaves; ++i) expected += priority_of(memory.leaf_words[i]);
  CHECK_EQ(memory.tree.total(), expected);
}

TEST(an_audit_counts_every_wrong_sum) {
  TreeMemory memory(300);
  memory.leaf_words[299] = make_word(1, 9);
  memory.tree.rebuild();
  CHECK_EQ(memory.tree.audit(), uint64_t{0});
  memory.leaf_words[0] = make_word(1, 1);  // no sum includes it
  CHECK_EQ(memory.tree.audit(), uint64_t{1});
  memory.tree.add(0, 1);
  CHECK_EQ(memory.tree.audit(), uint64_t{0});
  memory.nodes[0] += 5;  // its parent disagrees as well
  CHECK_EQ(memory.tree.audit(), uint64_t{2});
}

TEST(every_tree_size_has_one_root_and_room_for_whole_nodes) {
  for (uint64_t leaves : {uint64_t{1}, uint64_t{16}, uint64_t{17}, uint64_t{1} << 20, kMaxRows}) {
    const TreeShape shape = TreeShape::of(leaves);
    CHECK(shape.levels <= kMaxLevels);
    CHECK_EQ(shape.width[shape.levels - 1], uint64_t{1});
    CHECK_EQ(shape.nodes % kFanout, uint64_t{0});
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
