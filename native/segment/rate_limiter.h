// How fast rows come and are drawn, in relation to each other: whoever is ahead sleeps until the other side has moved.
//
// The terms are Reverb's. With `samples_per_insert` s, a minimum of m rows and an error buffer b,
//
//   d = s * rows inserted - rows drawn            must stay in [s * m - b, s * m + b]
//
// An insert that would lift d above that waits, unless fewer than m rows have come; a draw that would push d below it
// waits, and so does one while fewer than m rows can be selected. The counts are of what was let through since the
// limiter was set: a claim is one compare-and-swap, so they are exact whatever the number of processes.
//
// The limiter lives in the segment's Control and works between all its processes. It has no lock to die with. A
// process that dies between its claim and its commit leaves a count that is one row too high.
//
// Waiting is on a futex that every claim and every commit touches; a claim that nobody waits for makes no system call.
#pragma once

#include <atomic>
#include <cstdint>

namespace geartrain {

struct RateLimiterSettings {
  bool enabled = false;
  double samples_per_insert = 0;  // 0: only the minimum counts, and inserts never wait
  uint64_t min_size = 1;
  double error_buffer = 0;
};

struct RateLimiter {
  std::atomic<uint32_t> changes;  // the futex
  std::atomic<uint32_t> waiting;  // threads asleep, and those that were killed asleep
  std::atomic<uint32_t> enabled;
  std::atomic<uint32_t> reserved;
  std::atomic<double> samples_per_insert, error_buffer;
  std::atomic<uint64_t> min_size;
  std::atomic<uint64_t> inserts, samples;  // let through
  std::atomic<uint64_t> insert_wait_ns, sample_wait_ns;
};
static_assert(std::atomic<double>::is_always_lock_free);
static_assert(sizeof(RateLimiter) == 72);

// Any thread of any process, any time: whoever waits looks again. Counts start at zero when `afresh`.
void set_limiter(RateLimiter& limiter, const RateLimiterSettings& settings, bool afresh);

// Whether n rows may be inserted (drawn), and counted as such; sleeps up to timeout_s for it. `selectable` is how many
// rows can be drawn now, and is looked at again on every change. False when it was not to be: count nothing.
bool admit_inserts(RateLimiter& limiter, uint64_t n, double timeout_s);
bool admit_samples(RateLimiter& limiter, uint64_t n, const std::atomic<uint64_t>& selectable, double timeout_s);
// Takes back what was admitted and did not happen.
void give_back(RateLimiter& limiter, uint64_t inserts, uint64_t samples);
// After a commit: who waits for rows can look again.
void announce(RateLimiter& limiter);

}  // namespace geartrain
