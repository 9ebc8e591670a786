#include "fetch/windows.h"

#include <algorithm>
#include <vector>

#include "base/errors.h"

namespace geartrain {

void check(const WindowPlan& plan) {
  if (plan.stride == 0 || plan.at > WindowPlan::At::episode) {
    fail(ErrorKind::schema, "windows need a stride of 1 or more");
  }
  if (plan.of_episodes() && (plan.stride != 1 || plan.whole || !plan.from_first || plan.in_place)) {
    fail(ErrorKind::schema, "windows of episodes begin with them, and are padded");
  }
  if (plan.length != 0 && plan.after >= plan.length) {
    fail(ErrorKind::schema, "a window of ", plan.length, " steps has ", plan.after, " behind one of them");
  }
  for (const std::optional<FieldSteps>& field : plan.fields) {
    if (!field) continue;
    uint64_t count = field->runs.empty() ? 1 : 0;
    for (const FieldSteps::Run& run : field->runs) {
      count += run.count;
      if (run.count == 0 || uint64_t{run.place} + run.count > plan.length) {
        fail(ErrorKind::schema, "a field takes ", run.count, " steps at place ", run.place, " of a window of ",
             plan.length);
      }
    }
    if (count != field->count || (!field->axis && count != 1)) {
      fail(ErrorKind::schema, "a field takes ", count, " steps, not ", field->count);
    }
  }
}

void place_windows(const WindowPlan& plan, const DrawKey& key, uint32_t round, std::span<const uint32_t> numbers,
                   std::span<const int32_t> lengths, std::span<int32_t> anchors) {
  if (plan.stride == 1 && !plan.whole && plan.at == WindowPlan::At::drawn) {
    draw_window_ends(key, round, numbers, lengths, anchors);
    return;
  }
  const size_t n = numbers.size();
  std::vector<int32_t> counts(n), drawn(n);
  for (size_t i = 0; i < n; ++i) counts[i] = static_cast<int32_t>(plan.count(std::max(lengths[i], 0)));
  if (plan.at == WindowPlan::At::drawn) {
    draw_window_ends(key, round, numbers, counts, drawn);
  } else if (plan.at == WindowPlan::At::last) {
    for (size_t i = 0; i < n; ++i) drawn[i] = counts[i] - 1;
  }
  for (size_t i = 0; i < n; ++i) {
    anchors[i] =
        counts[i] <= 0
            ? 0
            : static_cast<int32_t>(plan.anchor(static_cast<uint32_t>(lengths[i]), static_cast<uint32_t>(drawn[i])));
  }
}

void place_windows(const Population& from, std::span<const uint32_t> rows, const WindowPlan& plan, const DrawKey& key,
                   uint32_t round, std::span<const uint32_t> numbers, std::span<int32_t> anchors) {
  const size_t n = rows.size();
  for (size_t i = 0; i < n; ++i) {
    anchors[i] =
        static_cast<int32_t>(std::min(from.status[rows[i]].length.load(std::memory_order_relaxed), from.max_steps));
  }
  const StepNeeds needs = plan.needs();
  if (!from.repeats || needs.after == 0) return place_windows(plan, key, round, numbers, anchors, anchors);
  std::vector<int32_t> counts(n), firsts(n);
  for (size_t i = 0; i < n; ++i) {
    const uint32_t first = plan.need_before(), until = first + plan.count(static_cast<uint32_t>(anchors[i]));
    StepRange mine = from.drawn_steps(rows[i], needs);
    mine = {std::max(mine.first, first), std::min(mine.until, until)};
    if (mine.size() == 0) mine = {first, until};
    counts[i] = static_cast<int32_t>(mine.size());
    firsts[i] = static_cast<int32_t>(mine.first);
  }
  draw_window_ends(key, round, numbers, counts, anchors);
  for (size_t i = 0; i < n; ++i) anchors[i] = counts[i] == 0 ? 0 : anchors[i] + firsts[i];
}

}  // namespace geartrain
