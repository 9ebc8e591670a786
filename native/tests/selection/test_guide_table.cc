// Searches that begin at a guide table, against those that descend from the root.

#include "selection/guide_table.h"

#include <array>
#include <functional>
#include <random>
#include <vector>

#include "segment/segment.h"
#include "selection/selection.h"
#include "tests/support/check.h"

namespace geartrain {
namespace {

struct Tree {
  explicit Tree(uint64_t leaves)
      : words(padded_leaves(leaves)), nodes(TreeShape::of(leaves).nodes), tree(words.get(), nodes.get(), leaves) {}

  void set(uint64_t leaf, uint32_t priority) { words.get()[leaf] = make_word(1, priority); }

  Words words, nodes;
  PriorityTree tree;
};

std::vector<Search> searches_by(const GuideTable<PriorityLeaf>& guide, const PriorityTree& tree,
                                const std::vector<uint64_t>& targets) {
  std::vector<Search> found(targets.size());
  guide.find(targets.data(), targets.size(), found.data());
  tree.find_below(guide.level(), targets.size(), found.data());
  return found;
}

TEST(a_search_from_the_guide_table_ends_where_one_from_the_root_does) {
  std::mt19937_64 random(1);
  const auto shapes = std::to_array<std::function<uint32_t()>>({
      [&] { return 65536u; },                                                         // alike
      [&] { return static_cast<uint32_t>(random() % 1000); },                         // of one size
      [&] { return random() % 50 != 0 ? 0u : static_cast<uint32_t>(random() % 9); },  // mostly none
      [&] { return random() % 999 != 0 ? 1u : ~0u; },                                 // a few of everything
  });
  size_t made = 0;
  for (const uint64_t leaves : {300, 4096, 4097, 70'001}) {
    for (const auto& priority : shapes) {
      Tree memory(leaves);
      for (uint64_t leaf = 0; leaf < leaves; ++leaf) memory.set(leaf, priority());
      memory.set(leaves - 1, 3);
      memory.tree.rebuild();
      const uint64_t total = memory.tree.total();
      for (const size_t searches : {16, 256, 9000, 200'000}) {
        const GuideTable guide(memory.tree, searches);
        if (guide.empty()) continue;
        ++made;
        std::vector<uint64_t> targets{0, total - 1};
        while (targets.size() < 2000) targets.push_back(random() % total);
        std::vector<Search> expected(targets.size());
        memory.tree.find(targets.data(), targets.size(), expected.data());
        const auto found = searches_by(guide, memory.tree, targets);
        for (size_t i = 0; i < targets.size(); ++i) {
          CHECK_EQ(found[i].node, expected[i].node);
          CHECK_EQ(found[i].residual, expected[i].residual);
          CHECK(memory.tree.inside(found[i]));
        }
      }
    }
  }
  CHECK(made >= 32);
}

TEST(a_table_is_made_for_a_level_that_the_searches_repay) {
  Tree memory(70'001);  // levels of 4376, 274, 18, 2 and 1 nodes
  memory.set(7, 1);
  memory.tree.rebuild();
  CHECK(GuideTable(memory.tree, 0).empty());
  CHECK(GuideTable(memory.tree, 35).empty());
  CHECK_EQ(GuideTable(memory.tree, 36).level(), 2);
  CHECK_EQ(GuideTable(memory.tree, 548).level(), 1);
  CHECK_EQ(GuideTable(memory.tree, 1'000'000).level(), 0);
}

TEST(a_search_from_a_table_that_is_older_than_the_tree_never_leaves_it) {
  std::mt19937_64 random(2);
  constexpr uint64_t kLeaves = 5000;
  for (int round = 0; round < 60; ++round) {
    Tree memory(kLeaves);
    for (uint64_t leaf = 0; leaf < kLeaves; ++leaf) memory.set(leaf, static_cast<uint32_t>(random() % 100));
    memory.tree.rebuild();
    const GuideTable guide(memory.tree, 5000);
    for (uint64_t leaf = 0; leaf < kLeaves; ++leaf) {  // others have none, or more, or much more
      if (random() % 2 == 0)
        memory.set(leaf, round % 3 == 0 ? 0 : static_cast<uint32_t>(random() % 5 * random() % 900));
    }
    memory.tree.rebuild();
    std::vector<uint64_t> targets{0, ~uint64_t{0}, ~uint64_t{0} - 1};  // beyond the total too
    while (targets.size() < 1000) targets.push_back(random() % 300'000);
    for (const Search& found : searches_by(guide, memory.tree, targets)) {
      CHECK(found.node < kLeaves);
      if (!memory.tree.inside(found)) continue;
      CHECK(found.residual < priority_of(memory.words.get()[found.node].load()));
    }
  }
}

TEST(sums_of_no_tree_are_searched_within_their_memory) {
  std::mt19937_64 random(3);
  constexpr uint64_t kLeaves = 5000;
  for (int round = 0; round < 60; ++round) {  // what a damaged segment may hold
    Tree memory(kLeaves);
    for (uint64_t node = 0; node < TreeShape::of(kLeaves).nodes; ++node) {
      memory.nodes.get()[node] = round == 0 ? 0 : round == 1 ? ~uint64_t{0} : random() >> (random() % 64);
    }
    const GuideTable guide(memory.tree, 5000);
    std::vector<uint64_t> targets{0, ~uint64_t{0}};
    while (targets.size() < 1000) targets.push_back(random() >> (random() % 64));
    for (const Search& found : searches_by(guide, memory.tree, targets)) CHECK(found.node < kLeaves);
  }
}

TEST(a_batch_in_the_order_of_its_targets_is_that_of_small_ones) {
  constexpr uint64_t kRows = (uint64_t{1} << 22) + 70;  // as many as large batches are ordered over
  std::mt19937_64 random(4);
  Tree memory(kRows);
  const uint64_t bit_words = (kRows + 63) / 64;
  const Words bits(padded_leaves(bit_words)), bit_nodes(TreeShape::of(bit_words).nodes);
  for (uint64_t row = 0; row < kRows; ++row) {
    memory.set(row, static_cast<uint32_t>(random() % 300));
    bits.get()[row / 64] |= uint64_t{1} << (row % 64);
    // Rows that have left, and are in the sums all the same: what is drawn in an instant like that.
    if (row % 64 < 3) memory.words.get()[row] = make_word(2, static_cast<uint32_t>(random() % 300));
  }
  memory.tree.rebuild();
  const Population from{memory.tree, {bits.get(), bit_nodes.get(), bit_words}, memory.words.get()};
  from.bits.rebuild();
  constexpr size_t kMany = 40'000, kFew = 50;
  std::vector<uint32_t> numbers(kMany), rows(kMany), generations(kMany), row(kFew), generation(kFew);
  std::vector<double> probabilities(kMany), probability(kFew);
  for (uint32_t i = 0; i < kMany; ++i) numbers[i] = i;
  for (const By by : {By::priority, By::row}) {
    for (const uint32_t strata : {uint32_t{0}, uint32_t{kMany}}) {
      const DrawPlan plan{{5, 6, kRowStream}, by, 0, strata};
      CHECK_EQ(draw(from, plan, numbers, {rows, generations, probabilities}), uint64_t{0});
      for (size_t first = 0; first < kMany; first += kFew) {
        const std::span few = std::span(numbers).subspan(first, kFew);
        CHECK_EQ(draw(from, plan, few, {row, generation, probability}), uint64_t{0});
        for (size_t i = 0; i < kFew; ++i) {
          CHECK_EQ(rows[first + i], row[i]);
          CHECK_EQ(generations[first + i], generation[i]);
          CHECK_EQ(probabilities[first + i], probability[i]);
          CHECK(row[i] % 64 >= 3);
        }
      }
    }
  }
}

// Draws that a plan may refuse, and those of steps, go the same way.
TEST(a_batch_of_steps_in_the_order_of_its_targets_is_that_of_small_ones) {
  constexpr uint32_t kRowSteps = 8;
  constexpr uint64_t kRows = uint64_t{1} << 22, kLongRows = kRows / kRowSteps;
  std::mt19937_64 random(5);
  Tree memory(kRows);
  std::vector<RowStatus> status(kRows);
  const uint64_t bit_words = kRows / 64, long_bit_words = kLongRows / 64;
  const Words bits(padded_leaves(bit_words)), bit_nodes(TreeShape::of(bit_words).nodes),
      long_bits(padded_leaves(long_bit_words)), long_bit_nodes(TreeShape::of(long_bit_words).nodes);
  for (uint64_t row = 0; row < kRows; ++row) {
    status[row].length = static_cast<uint32_t>(random() % kRowSteps + 1);
    bits.get()[row / 64] |= uint64_t{1} << (row % 64);
  }
  for (uint64_t leaf = 0; leaf < kRows; ++leaf) {
    if (leaf % kRowSteps < status[leaf / kRowSteps].length) memory.set(leaf, static_cast<uint32_t>(random() % 300));
    long_bits.get()[leaf / kRowSteps / 64] |= uint64_t{1} << (leaf / kRowSteps % 64);
  }
  memory.tree.rebuild();
  const Population rows_of_steps{
      memory.tree, {bits.get(), bit_nodes.get(), bit_words}, memory.words.get(), status.data()};
  const Population steps{memory.tree,
                         {long_bits.get(), long_bit_nodes.get(), long_bit_words},
                         memory.words.get(),
                         status.data(),
                         kRowSteps};
  rows_of_steps.bits.rebuild();
  steps.bits.rebuild();
  // The plans: all steps, those inside of rows, those of long rows; rows of some length; rows by their steps.
  std::vector<std::pair<const Population*, DrawPlan>> cases(5, {&steps, {{5, 6, kRowStream}, By::priority}});
  cases[1].second.need = 2;
  cases[1].second.skip = 1;
  cases[2].second.limits.min_length = kRowSteps;
  cases[3].first = cases[4].first = &rows_of_steps;
  cases[3].second.limits.min_length = kRowSteps / 2;
  cases[4].second.by = By::row;
  cases[4].second.max_steps = kRowSteps;
  for (uint64_t row = 0; row < kRows; ++row) {  // rows without steps have left
    if (memory.words.get()[row] == 0) bits.get()[row / 64] &= ~(uint64_t{1} << (row % 64));
  }
  rows_of_steps.bits.rebuild();
  constexpr size_t kMany = 40'000, kFew = 50;
  std::vector<uint32_t> numbers(kMany), rows(kMany), generations(kMany), drawn(kMany);
  std::vector<uint32_t> row(kFew), generation(kFew), step(kFew);
  std::vector<double> probabilities(kMany), probability(kFew);
  for (uint32_t i = 0; i < kMany; ++i) numbers[i] = i;
  for (const auto& [from, plan] : cases) {
    CHECK_EQ(draw(*from, plan, numbers, {rows, generations, probabilities, drawn}), uint64_t{0});
    for (size_t first = 0; first < kMany; first += kFew) {
      const std::span few = std::span(numbers).subspan(first, kFew);
      CHECK_EQ(draw(*from, plan, few, {row, generation, probability, step}), uint64_t{0});
      for (size_t i = 0; i < kFew; ++i) {
        CHECK_EQ(rows[first + i], row[i]);
        CHECK_EQ(generations[first + i], generation[i]);
        CHECK(probabilities[first + i] == probability[i] || plan.max_steps != 0);  // over steps unknown: NaN
        const uint32_t length = status[row[i]].length;
        CHECK(length >= plan.limits.min_length);
        if (from != &steps) continue;
        CHECK_EQ(drawn[first + i], step[i]);
        CHECK(step[i] >= plan.skip && step[i] + plan.need < length);
      }
    }
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
