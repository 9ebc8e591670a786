// The choice of a form for large draws: it changes no row, and is measured by draws that were asked for.

#include "selection/draw_tuning.h"

#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "segment/descend.h"
#include "segment/segment.h"
#include "selection/selection.h"
#include "tests/support/check.h"

namespace geartrain {
namespace {

constexpr uint64_t kRows = DrawTuning::kRowsFrom + 3;
constexpr size_t kDraws = 20'000;

// Rows with random priorities, from as many as draws are measured over.
struct Rows {
  Rows() : words(padded_leaves(kRows)), nodes(TreeShape::of(kRows).nodes) {
    std::mt19937_64 random(1);
    for (uint64_t row = 0; row < kRows; ++row) words.get()[row] = make_word(1, static_cast<uint32_t>(random() % 900));
    from.priorities = PriorityTree(words.get(), nodes.get(), kRows);
    from.words = words.get();
    from.priorities.rebuild();
  }
  std::vector<uint32_t> draw_some(size_t at_once = kDraws) const {
    std::vector<uint32_t> numbers(kDraws), rows(kDraws), generations(kDraws);
    std::vector<double> probability(kDraws);
    for (uint32_t i = 0; i < kDraws; ++i) numbers[i] = i;
    const DrawPlan plan{.key = {3, 0, kRowStream}, .limits = {}};
    for (size_t first = 0; first < kDraws; first += at_once) {
      const size_t n = std::min(at_once, kDraws - first);
      const std::span all(numbers);
      const Draws out{std::span(rows).subspan(first, n), std::span(generations).subspan(first, n),
                      std::span(probability).subspan(first, n)};
      CHECK_EQ(draw(from, plan, all.subspan(first, n), out), uint64_t{0});
    }
    return rows;
  }
  // In draws that are too small to be measured, by the form that every machine has.
  std::vector<uint32_t> draw_portably() const {
    set_descend_kernel("portable");
    return draw_some(DrawTuning::kPiece - 1);
  }

  Words words, nodes;
  Population from;
};

TEST(large_draws_are_measured_until_a_form_is_chosen_and_are_the_same_rows_meanwhile) {
  const Rows all;
  const std::vector<uint32_t> expected = all.draw_portably();
  DrawTuning::forget();
  CHECK_EQ(std::string(DrawTuning::choice().because), std::string("not measured yet"));
  for (int batch = 0; batch < 20; ++batch) CHECK(all.draw_some() == expected);
  const auto found = DrawTuning::choice();
  CHECK_EQ(std::string(found.because), std::string("measured"));
  CHECK(found.candidates.size() >= 4);
  double usual = found.candidates.front().ns_per_draw, chosen = 0, least = usual;
  for (const auto& some : found.candidates) {
    CHECK(some.ns_per_draw > 0);
    least = std::min(least, some.ns_per_draw);
    if (std::string(some.form) == found.chosen.form && some.in_flight == found.chosen.in_flight)
      chosen = some.ns_per_draw;
  }
  CHECK(chosen == usual || chosen == least);
  CHECK(chosen == least || least >= 0.9 * usual);
  CHECK_EQ(std::string(descend_kernel()), std::string(found.chosen.form));
}

TEST(draws_of_several_threads_choose_one_form_and_are_the_same_rows) {
  const Rows all;
  const std::vector<uint32_t> expected = all.draw_portably();
  DrawTuning::forget();
  std::vector<std::thread> threads;
  std::atomic<int> same{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int batch = 0; batch < 10; ++batch) same += all.draw_some() == expected;
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK_EQ(same.load(), 40);
  for (int batch = 0; batch < 20; ++batch) all.draw_some();  // trials that met another thread's were left out
  CHECK_EQ(std::string(DrawTuning::choice().because), std::string("measured"));
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
