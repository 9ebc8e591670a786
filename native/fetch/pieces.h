// Pieces: rows of a copy shared out over threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "base/clock.h"
#include "base/threads.h"

namespace geartrain {

// Work is handed to threads in pieces of about this size: small enough to share out evenly, large enough that
// taking a piece costs nothing.
constexpr uint64_t kPieceBytes = 128 << 10;
// How fast one thread copies: 1 MB of rows of 2 to 20 KB takes 100 to 150 us on a Xeon and 100 on a Zen 5, 3.2 MB of
// rows of 100 KB 110 there.
constexpr uint64_t kBytesPerNs = 20;
// A copy is shared where that saves more than what it takes to wake other threads and to wait for them, or to wait for
// them alone while they poll for the next copy (base/threads.h).
constexpr uint64_t kWakeNs = 40'000, kCallNs = 20'000;
// Unless the caller says how many.
constexpr unsigned kDefaultThreads = 4;

inline std::atomic<uint64_t> last_copy_ended_ns{0};  // of this process

// body(first, last) over [0, rows), which are `bytes` in all.
void run_in_pieces(uint64_t rows, uint64_t bytes, unsigned threads, auto&& body) {
  const uint64_t bytes_per_row = std::max<uint64_t>(1, bytes / std::max<uint64_t>(1, rows));
  const uint64_t grain = std::max<uint64_t>(1, kPieceBytes / bytes_per_row);
  if (threads == 0) threads = std::min(kDefaultThreads, available_cores());
  const uint64_t alone_ns = bytes / kBytesPerNs;
  const uint64_t saved_ns = alone_ns - alone_ns / std::max(1U, threads);
  const auto poll = [] { return monotonic_ns() - last_copy_ended_ns.load(std::memory_order_relaxed) < kWorkersPollNs; };
  if (saved_ns < kCallNs || (saved_ns < kWakeNs && !poll())) threads = 1;
  parallel_for(rows, grain, threads, body);
  if (saved_ns >= kCallNs) last_copy_ended_ns.store(monotonic_ns(), std::memory_order_relaxed);
}

}  // namespace geartrain
