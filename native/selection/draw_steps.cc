// Draws of steps that rejection has not settled: a pass over the steps that count.

#include <algorithm>
#include <vector>

#include "base/errors.h"
#include "selection/allowed_rows.h"

namespace geartrain {
namespace {

// Steps of a row that count, with the first `skip`, which do not: all but the last `need`.
uint32_t counted_steps(const Population& from, const DrawPlan& plan, uint32_t row) {
  const uint32_t length = std::min(from.status[row].length.load(std::memory_order_relaxed), from.row_steps);
  return length > plan.need ? length - plan.need : 0;
}

}  // namespace

uint64_t draw_from_allowed_steps(const Population& from, const DrawPlan& plan, std::span<const uint32_t> numbers,
                                 const Draws& out) {
  struct RowSum {
    uint64_t until;  // the sum up to the row's end
    uint32_t row, steps;
  };
  const auto word_of = [&](const RowSum& sum, uint32_t step) {
    return from.words[uint64_t{sum.row} * from.row_steps + step].load(std::memory_order_acquire);
  };
  std::vector<RowSum> sums;
  uint64_t total = 0;
  for_each_selectable(from, plan.limits, [&](uint32_t row) {
    if (uint64_t{row} * from.row_steps >= from.rows()) return;  // a bit behind the last row, in a damaged segment
    RowSum sum{0, row, counted_steps(from, plan, row)};
    const uint64_t before = total;
    for (uint32_t step = plan.skip; step < sum.steps; ++step) total += priority_of(word_of(sum, step));
    sum.until = total;
    if (total != before) sums.push_back(sum);
  });
  if (total == 0) fail_empty(plan);
  const uint64_t whole = from.priorities.total();
  uint64_t failed = 0;
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (out.rows[i] != kNoRow) continue;
    uint64_t target = 0;
    draw_targets(plan.key, plan.round * kAttemptsPerRound + kRefusals, plan.strata, total, numbers.subspan(i, 1),
                 {&target, 1});
    const auto sum = std::upper_bound(sums.begin(), sums.end(), target,
                                      [](uint64_t value, const RowSum& some) { return value < some.until; });
    uint64_t left = target - (sum == sums.begin() ? 0 : (sum - 1)->until);
    for (uint32_t step = plan.skip; step < sum->steps; ++step) {
      const uint64_t word = word_of(*sum, step);
      if (left >= priority_of(word)) {
        left -= priority_of(word);
        continue;
      }
      out.rows[i] = sum->row;
      out.steps[i] = step;
      out.generations[i] = generation_of(word);
      out.probability[i] = priority_of(word) / static_cast<double>(whole);
      break;
    }
    failed += out.rows[i] == kNoRow;  // priorities were lowered meanwhile
  }
  return failed;
}

}  // namespace geartrain
