// The choice of a form for large draws: it changes no row, is measured by draws that were asked for, and can be named.

#include "selection/draw_tuning.h"

#include <atomic>
#include <cstdlib>
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
  std::vector<uint32_t> draw_some(uint64_t step = 0) const {
    std::vector<uint32_t> numbers(kDraws), rows(kDraws), generations(kDraws);
    std::vector<double> probability(kDraws);
    for (uint32_t i = 0; i < kDraws; ++i) numbers[i] = i;
    const DrawPlan plan{.key = {3, step, kRowStream}, .limits = {}};
    CHECK_EQ(draw(from, plan, numbers, {rows, generations, probability}), uint64_t{0});
    return rows;
  }

  Words words, nodes;
  Population from;
};

void name(const char* given) {
  given == nullptr ? ::unsetenv("GEARTRAIN_DESCENT") : ::setenv("GEARTRAIN_DESCENT", given, 1);
  DrawTuning::forget();
}

TEST(large_draws_are_measured_until_a_form_is_chosen_and_are_the_same_rows_meanwhile) {
  const Rows all;
  name("portable:64");
  const std::vector<uint32_t> expected = all.draw_some();
  name(nullptr);
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
  name("portable:64");
  const std::vector<uint32_t> expected = all.draw_some();
  name(nullptr);
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

TEST(the_environment_names_a_form_and_a_number_and_nothing_is_measured) {
  const Rows all;
  name(nullptr);
  const std::vector<uint32_t> expected = all.draw_some();
  for (const char* given : {"portable", "portable:1", "portable:7", ":256"}) {
    name(given);
    CHECK(all.draw_some() == expected);
    const auto found = DrawTuning::choice();
    CHECK_EQ(std::string(found.because), std::string("GEARTRAIN_DESCENT"));
    CHECK(found.candidates.empty());
    const std::string text = given;
    if (text[0] == 'p') CHECK_EQ(std::string(found.chosen.form), std::string("portable"));
    const size_t colon = text.find(':');
    CHECK_EQ(found.chosen.in_flight, colon == std::string::npos ? kUsualInFlight : std::stoul(text.substr(colon + 1)));
  }
  for (const char* given : {"sse9", "avx2:0", "portable:257", "portable:x", "portable:", "portable:7 ", ":-1"}) {
    ::setenv("GEARTRAIN_DESCENT", given, 1);
    CHECK_THROWS(schema, DrawTuning::forget());
  }
  name(nullptr);
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
