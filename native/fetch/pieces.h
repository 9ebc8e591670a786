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
// What it takes to wake other threads and to wait for them: a copy is shared where that saves more. 1 MB of rows of 2
// to 20 KB takes one thread of a Xeon 100 to 150 us and four 53 to 81; of a Zen 5 100, and two the same.
constexpr uint64_t kWakeNs = 40'000;
// Of threads that poll for the next copy (base/threads.cc), which they do where copies follow each other within such a
// share of what one takes.
constexpr uint64_t kCallNs = 20'000, kSoonShare = 4;
// Unless the caller says how many.
constexpr unsigned kDefaultThreads = 4;

// How fast one thread copies, as a running mean over the process's copies: memory, caches and rows differ by ten times.
class CopyRate {
 public:
  uint64_t ns(uint64_t bytes) const {
    return static_cast<uint64_t>(static_cast<double>(bytes) * ns_per_byte_.load(std::memory_order_relaxed));
  }
  void note(uint64_t bytes, uint64_t ns) {
    if (bytes < kLeastBytes) return;
    const double known = ns_per_byte_.load(std::memory_order_relaxed);
    // A thread that lost its core for a while counts as twice as slow, no more.
    const double seen = std::min(static_cast<double>(ns) / static_cast<double>(bytes), 2 * known);
    ns_per_byte_.store(known + (seen - known) / 8, std::memory_order_relaxed);
  }

 private:
  static constexpr uint64_t kLeastBytes = 64 << 10;  // of less, what is not copying counts too much
  std::atomic<double> ns_per_byte_{1.0 / 40};
};

inline CopyRate copy_rate;
inline std::atomic<uint64_t> last_copy_ended_ns{0};  // of this process

// body(first, last) over [0, rows), which are `bytes` in all.
void run_in_pieces(uint64_t rows, uint64_t bytes, unsigned threads, auto&& body) {
  const uint64_t bytes_per_row = std::max<uint64_t>(1, bytes / std::max<uint64_t>(1, rows));
  const uint64_t grain = std::max<uint64_t>(1, kPieceBytes / bytes_per_row);
  if (threads == 0) threads = std::min(kDefaultThreads, available_cores());
  const uint64_t alone_ns = copy_rate.ns(bytes);
  const uint64_t saved_ns = alone_ns - alone_ns / std::max(1U, threads);
  if (saved_ns >= kCallNs && saved_ns < kWakeNs) {
    const uint64_t since_ns = monotonic_ns() - last_copy_ended_ns.load(std::memory_order_relaxed);
    if (since_ns > alone_ns / kSoonShare) threads = 1;
  } else if (saved_ns < kCallNs) {
    threads = 1;
  }
  parallel_for(rows, grain, threads, [&](size_t first, size_t last) {
    if (first != 0) return body(first, last);
    const uint64_t began_ns = monotonic_ns();
    body(first, last);
    copy_rate.note((last - first) * bytes_per_row, monotonic_ns() - began_ns);
  });
  if (saved_ns >= kCallNs) last_copy_ended_ns.store(monotonic_ns(), std::memory_order_relaxed);
}

}  // namespace geartrain
