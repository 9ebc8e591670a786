// Internal to selection: runs of missing rows, by which the k-th selectable row is found without a descent of the tree.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "segment/segment.h"
#include "segment/sum_tree.h"

namespace geartrain {

// Runs of rows below the last selectable one that cannot be selected, as they are when this is made. A store that is
// being filled from the first row on, and one that is full, have none: the k-th selectable row is row k. In a full
// store whose rows are overwritten they are the few that are being written. Where there are many runs none is listed,
// and the tree is to be descended.
//
// Cost: a descent of the bit tree for the last row, and one for each run. While rows change under it the list may be
// wrong: whoever uses it looks at the row's bit.
class MissingRows {
 public:
  // For so many draws: more of them repay a longer list. `total` is the number of selectable rows, as read before.
  MissingRows(const BitTree& bits, uint64_t rows, uint64_t total, size_t draws);

  // Whether row_of() can be used, for numbers below total().
  bool listed() const { return listed_; }
  uint64_t total() const { return total_; }
  uint64_t row_of(uint64_t number) const {
    uint32_t run = 0;  // how many runs have at most `number` selectable rows before them
    for (uint32_t half = runs_padded_ / 2; half != 0; half /= 2) {
      run += before_[run + half - 1] <= number ? half : 0;
    }
    return number + missing_[run];
  }

 private:
  static constexpr uint32_t kMostRuns = 63;

  bool visit(int level, uint64_t node);
  bool add(uint64_t first, uint64_t count);
  bool add_word(uint64_t at);

  const BitTree& bits_;
  uint64_t total_;
  uint64_t end_ = 0;  // the row behind the last selectable one
  uint64_t last_run_end_ = 0;
  uint32_t most_runs_ = 0, visits_ = 0, runs_ = 0, runs_padded_ = 1;
  bool listed_ = false;
  std::array<uint32_t, kMostRuns + 1> before_{};   // of run i: selectable rows before it
  std::array<uint32_t, kMostRuns + 1> missing_{};  // at i + 1: missing rows up to the end of run i
};

}  // namespace geartrain
