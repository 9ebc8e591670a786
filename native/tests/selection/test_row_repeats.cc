// Rows that repeat steps of the row before: which steps are drawn from a row, by the numbers that it has.

#include "selection/row_repeats.h"

#include <algorithm>
#include <string>
#include <vector>

#include "tests/support/check.h"

namespace geartrain {
namespace {

TEST(a_row_has_the_steps_that_its_numbers_and_the_view_leave_to_it) {
  constexpr SharedSteps kAlone{}, kFirst{0, 4, false, true}, kMiddle{4, 4, true, true}, kEnd{4, 0, true, false};
  struct Case {
    const char* what;
    SharedSteps shared;
    uint32_t length;
    StepNeeds needs;
    uint32_t first, until;
  };
  const Case cases[] = {
      {"a row that shares nothing", kAlone, 8, {0, 1}, 0, 8},
      {"such a row, whatever is needed", kAlone, 8, {3, 5}, 0, 8},
      {"an episode's first row leaves its last step to the next one", kFirst, 8, {0, 1}, 0, 7},
      {"it leaves one step more for each that has to follow", kFirst, 8, {0, 3}, 0, 5},
      {"it leaves the shared steps at most, and the last one", kFirst, 8, {0, 9}, 0, 3},
      {"a row in the middle has the rest of what it repeats", kMiddle, 8, {0, 1}, 4, 7},
      {"three steps have to follow", kMiddle, 8, {2, 3}, 2, 5},
      {"as many have to follow as are shared", kMiddle, 8, {0, 4}, 1, 4},
      {"all shared steps, and one more, have to follow", kMiddle, 8, {0, 5}, 0, 3},
      {"an episode's last row", kEnd, 6, {2, 3}, 2, 6},
      {"the whole episode is repeated", {3, 0, false, false}, 6, {3, 2}, 2, 6},
      {"a row that is shorter than what it leaves", {0, 9, false, true}, 3, {0, 5}, 0, 0},
      {"a row without steps", kMiddle, 0, {0, 1}, 4, 0},
      {"the next row repeats nothing", {0, 0, false, true}, 8, {0, 4}, 0, 7},
  };
  for (const Case& each : cases) {
    const StepRange found = RowRepeats::drawn(each.shared, each.length, each.needs);
    if (found.first != each.first || found.until != each.until) {
      testing::failed(__FILE__, __LINE__, each.what, ": [", found.first, ", ", found.until, ")");
    }
    CHECK_EQ(found.size(), each.until > each.first ? each.until - each.first : 0);
  }
}

// By a slow look: an episode of so many actions is cut into rows as a recorder does it.
TEST(rows_of_an_episode_have_each_step_once_with_all_that_is_needed_around_it) {
  constexpr uint32_t kLength = 9;
  for (const uint32_t overlap : {0u, 1u, 2u, 5u, 7u}) {
    for (const uint32_t actions : {1u, 8u, 9u, 30u}) {
      for (const StepNeeds needs : {StepNeeds{0, 1}, StepNeeds{2, 1}, StepNeeds{0, 3}, StepNeeds{3, 3}}) {
        if (overlap < needs.least()) continue;
        std::vector<uint32_t> found(actions + 1);
        for (uint32_t begin = 0, before = 0;;) {
          const uint32_t here = std::min(actions - begin, kLength - 1);
          const bool goes_on = begin + here < actions;
          const SharedSteps shared{before, goes_on ? overlap : 0, begin != 0, goes_on};
          const StepRange mine = RowRepeats::drawn(shared, here + 1, needs);
          for (uint32_t step = mine.first; step < mine.until; ++step) {
            ++found[begin + step];
            CHECK(step >= std::min(begin + step, needs.before));
            CHECK(here - step >= std::min(actions - begin - step, needs.after - 1));
          }
          if (!goes_on) break;
          begin += here - overlap;
          before = overlap;
        }
        CHECK(std::ranges::all_of(found, [](uint32_t times) { return times == 1; }));
      }
    }
  }
}

TEST(a_rows_numbers_are_read_at_its_place_and_none_is_negative) {
  const int32_t column[3][4] = {{0, 3, RowRepeats::kGoesOnThere, -1},
                                {3, 2, RowRepeats::kGoesOnHere | RowRepeats::kGoesOnThere, -1},
                                {-7, -1, RowRepeats::kGoesOnHere, -1}};
  const RowRepeats repeats{reinterpret_cast<const std::byte*>(column), sizeof column[0]};
  CHECK(static_cast<bool>(repeats) && !RowRepeats{});
  const SharedSteps expected[3] = {{0, 3, false, true}, {3, 2, true, true}, {0, 0, true, false}};
  for (uint32_t row = 0; row < 3; ++row) {
    const SharedSteps found = repeats.of(row);
    CHECK_EQ(found.first, expected[row].first);
    CHECK_EQ(found.last, expected[row].last);
    CHECK_EQ(found.goes_on_here, expected[row].goes_on_here);
    CHECK_EQ(found.goes_on_there, expected[row].goes_on_there);
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
