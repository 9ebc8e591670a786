// Pieces: rows of a copy shared out over threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/threads.h"

namespace geartrain {

// Work is handed to threads in pieces of about this size: small enough to share out evenly, large enough that
// taking a piece costs nothing.
constexpr uint64_t kPieceBytes = 256 << 10;
// Below this a second thread costs more in waking up than it saves in copying: of up to 2 MB, copied in 25 to 45 us, it
// saves no time at all.
constexpr uint64_t kThreadedFrom = 2 << 20;
// Unless the caller says how many.
constexpr unsigned kDefaultThreads = 4;

// body(first, last) over [0, rows), which are `bytes` in all.
void run_in_pieces(uint64_t rows, uint64_t bytes, unsigned threads, auto&& body) {
  const uint64_t bytes_per_row = std::max<uint64_t>(1, bytes / std::max<uint64_t>(1, rows));
  const uint64_t grain = std::max<uint64_t>(1, kPieceBytes / bytes_per_row);
  if (bytes < kThreadedFrom) {
    threads = 1;
  } else if (threads == 0) {
    threads = std::min(kDefaultThreads, available_cores());
  }
  parallel_for(rows, grain, threads, body);
}

}  // namespace geartrain
