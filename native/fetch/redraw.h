// Redraw loop: copies the rows of a batch and has those that were lost on the way drawn again, until all of them are
// whole. The only one: host batches of one store, of several, of passes and over ranks all go through it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/errors.h"

namespace geartrain {

// Rows that are lost this often in a row are drawn from a store that turns over faster than it can be read.
inline constexpr uint32_t kMaxRounds = 64;

struct Redrawn {
  uint64_t rows = 0;   // lost on the way, of all rounds
  uint32_t round = 0;  // the last one
  bool whole = true;   // false: there was no other row for some that were lost
};

// `copy(pending, round)` copies the rows of these draws and returns the draws that are to be made again. `again(lost,
// round)` makes them under the next round and returns whether it found a row for each. Throws turnover for a store of
// `capacity` rows, and what the two throw.
template <typename Copy, typename Again>
Redrawn copy_until_whole(uint64_t capacity, std::vector<uint32_t> pending, uint32_t round, Copy&& copy, Again&& again) {
  Redrawn made;
  for (;; ++round) {
    made.round = round;
    std::vector<uint32_t> lost = copy(std::as_const(pending), round);
    if (lost.empty()) return made;
    if (round + 1 == kMaxRounds) {
      fail(ErrorKind::turnover, lost.size(), " rows were overwritten before they could be copied, ", kMaxRounds,
           " times in a row; the store of ", capacity, " rows is too small for the rate of inserts");
    }
    made.rows += lost.size();
    if (!again(std::as_const(lost), round + 1)) {
      made.whole = false;
      return made;
    }
    pending = std::move(lost);
  }
}

}  // namespace geartrain
