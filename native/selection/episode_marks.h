// Marks of rows that hold several episodes: a byte a step, not 0 where it ends one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/copy.h"

namespace geartrain {

struct EpisodeMarks {
  const std::byte* column = nullptr;  // of all rows, one block after the other; nullptr: a row is one episode
  uint64_t stride = 0;                // from one row's block to the next
  uint32_t row_steps = 0;             // of a block

  explicit operator bool() const { return column != nullptr; }

  // Whether one of `count` steps from `first` on ends an episode, or none is there to do so.
  bool any(uint32_t row, uint64_t first, uint64_t count) const {
    if (first > row_steps || count > row_steps - first) return true;
    const std::byte* const at = column + row * stride + first;
    for (uint64_t i = 0; i < count; ++i) {
      if (marked(at + i)) return true;
    }
    return false;
  }

  // Of the first `steps` steps of a row, how many have none marked among themselves and the `after - 1` behind them.
  uint64_t unmarked(uint32_t row, uint64_t steps, uint64_t after) const {
    const uint64_t until = std::min<uint64_t>(steps + after - std::min<uint64_t>(after, 1), row_steps);
    const std::byte* const at = column + row * stride;
    uint64_t count = 0, since = 0;  // since: the last mark
    for (uint64_t step = 0; step < until; ++step) {
      since = marked(at + step) ? 0 : since + 1;
      count += step + 1 >= after && step + 1 - after < steps && since >= after;
    }
    return count;
  }

  // Whether a step begins an episode, where the row has it; and how many of a row's first `steps` steps do.
  bool begins(uint32_t row, uint64_t step) const {
    return step == 0 || (column != nullptr && step <= row_steps && marked(column + row * stride + step - 1));
  }
  uint64_t beginnings(uint32_t row, uint64_t steps) const {
    uint64_t count = steps != 0;
    if (column == nullptr) return count;
    const std::byte* const at = column + row * stride;
    for (uint64_t step = 1; step < std::min<uint64_t>(steps, row_steps); ++step) count += marked(at + step - 1);
    return count;
  }

  // Where the part of [first, end] begins that is of the last step's episode; where that of [first, last] ends which is
  // of the first one's.
  uint32_t begin(uint32_t row, uint32_t first, uint32_t end) const {
    const std::byte* const at = column + row * stride;
    uint32_t begin = end;
    while (begin > first && !marked(at + begin - 1)) --begin;
    return begin;
  }
  uint32_t end(uint32_t row, uint32_t first, uint32_t last) const {
    const std::byte* const at = column + row * stride;
    uint32_t end = first;
    while (end < last && !marked(at + end)) ++end;
    return end;
  }

  // Episodes of which the first `steps` steps of a row have any.
  uint32_t episodes(uint32_t row, uint64_t steps) const {
    const uint64_t until = std::min<uint64_t>(steps, row_steps);
    const std::byte* const at = column + row * stride;
    uint32_t count = 0;
    for (uint64_t step = 0; step < until; ++step) count += step == 0 || marked(at + step - 1);
    return count;
  }

  static bool marked(const std::byte* at) {
#if defined(__SANITIZE_THREAD__)
    // Readers race with writers by design, which only copy_block hides from ThreadSanitizer.
    std::byte value;
    copy_block(&value, at, 1, false);
    return value != std::byte{0};
#else
    return *at != std::byte{0};
#endif
  }
};

}  // namespace geartrain
