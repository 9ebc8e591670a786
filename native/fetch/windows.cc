#include "fetch/windows.h"

#include <algorithm>
#include <vector>

#include "base/errors.h"

namespace geartrain {

void check(const WindowPlan& plan) {
  if (plan.stride == 0 || plan.at > WindowPlan::At::episode) {
    fail(ErrorKind::schema, "windows need a stride of 1 or more");
  }
  if (plan.of_episodes() && (plan.stride != 1 || plan.whole || !plan.from_first)) {
    fail(ErrorKind::schema, "windows of episodes begin with them, and are padded");
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

}  // namespace geartrain
