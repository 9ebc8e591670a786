// Draws of steps that rejection has not settled: a pass over the steps that count.

#include <algorithm>
#include <vector>

#include "base/errors.h"
#include "selection/allowed_rows.h"

namespace geartrain {
namespace {

// Steps of a row that count, with the first `skip`, which do not: all but the last `need`.
uint32_t counted_steps(const Population& from, const DrawPlan& plan, uint32_t row) {
  const uint32_t most = from.row_steps != 0 ? from.row_steps : plan.max_steps;
  const uint32_t length = std::min(from.status[row].length.load(std::memory_order_relaxed), most);
  return length > plan.need ? length - plan.need : 0;
}

}  // namespace

AllowedSteps::AllowedSteps(const Population& from, const DrawPlan& plan) : from_(from), plan_(plan) {
  for_each_selectable(from, plan.limits, [&](uint32_t row) {
    // A bit behind the last row, in a damaged segment.
    if (uint64_t{row} * std::max(from.row_steps, 1U) >= from.rows()) return;
    RowSum sum{0, row, counted_steps(from, plan, row)};
    const uint64_t before = total_;
    for (uint32_t step = plan_.skip; step < sum.steps; ++step) total_ += share_of(word_of(row, step), row, step);
    sum.until = total_;
    if (total_ != before) sums_.push_back(sum);
  });
}

uint64_t AllowedSteps::word_of(uint32_t row, uint32_t step) const {
  const uint64_t leaf = from_.row_steps != 0 ? uint64_t{row} * from_.row_steps + step : row;
  return from_.words[leaf].load(std::memory_order_acquire);
}

uint32_t AllowedSteps::share_of(uint64_t word, uint32_t row, uint32_t step) const {
  if (plan_.crosses(from_, row, step) || plan_.elsewhere(from_, row, step)) return 0;
  return from_.row_steps != 0 ? priority_of(word) : is_committed(word) ? 1 : 0;
}

AllowedSteps::Step AllowedSteps::find(uint64_t target) const {
  const auto sum = std::upper_bound(sums_.begin(), sums_.end(), target,
                                    [](uint64_t value, const RowSum& some) { return value < some.until; });
  if (sum == sums_.end()) return {};
  uint64_t left = target - (sum == sums_.begin() ? 0 : (sum - 1)->until);
  for (uint32_t step = plan_.skip; step < sum->steps; ++step) {
    const uint64_t word = word_of(sum->row, step);
    const uint32_t share = share_of(word, sum->row, step);
    if (left < share) return {word, sum->row, step};
    left -= share;
  }
  return {};  // priorities were lowered meanwhile
}

uint64_t draw_from_allowed_steps(const Population& from, const DrawPlan& plan, std::span<const uint32_t> numbers,
                                 const Draws& out) {
  const AllowedSteps allowed(from, plan);
  if (allowed.total() == 0) fail_empty(plan);
  const uint64_t whole = from.priorities.total();
  uint64_t failed = 0;
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (out.rows[i] != kNoRow) continue;
    uint64_t target = 0;
    draw_targets(plan.key, plan.round * kAttemptsPerRound + kRefusals, plan.strata, allowed.total(),
                 numbers.subspan(i, 1), {&target, 1});
    const AllowedSteps::Step step = allowed.find(target);
    failed += step.row == kNoRow;
    if (step.row == kNoRow) continue;
    out.rows[i] = step.row;
    out.steps[i] = step.step;
    out.generations[i] = generation_of(step.word);
    out.probability[i] = plan.max_steps != 0 ? std::numeric_limits<double>::quiet_NaN()
                                             : priority_of(step.word) / static_cast<double>(whole);
  }
  return failed;
}

}  // namespace geartrain
