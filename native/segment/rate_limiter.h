// Rate limiter: bounds the ratio of samples to inserts; the side that is ahead sleeps until the other has moved.
//
// The terms are Reverb's. With `samples_per_insert` s, a minimum of m rows and an error buffer b,
//
//   d = s * rows inserted - rows sampled          must stay in [s * m - b, s * m + b]
//
// An insert that would lift d above that waits, unless fewer than m rows have been inserted; a sample that would push d
// below it waits, and so does one while fewer than m rows are selectable. The counts are of admitted claims since the
// limiter was set: a claim is one compare-and-swap, so they are exact whatever the number of processes.
//
// With the unit `steps`, inserts and the minimum are counted in steps; one sample is still one drawn row, window or
// transition. Earlier builds left the unit zero, which is rows.
//
// The limiter lives in the segment's Control and works between all its processes. It has no lock. A
// process that dies between its claim and its commit leaves a count that is one row too high.
//
// Waiting is on a futex that every claim and every commit touches; a claim without waiters makes no system call.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

namespace geartrain {

struct RateLimiterSettings {
  bool enabled = false;
  double samples_per_insert = 0;  // 0: only the minimum counts, and inserts never wait
  uint64_t min_size = 1;
  double error_buffer = 0;
  uint32_t unit = 0;  // RateLimiter::kRows or kSteps
};

struct RateLimiter {
  static constexpr uint32_t kRows = 0, kSteps = 1;

  std::atomic<uint32_t> changes;  // the futex
  std::atomic<uint32_t> waiting;  // threads asleep, and those that were killed asleep
  std::atomic<uint32_t> enabled;
  std::atomic<uint32_t> unit;
  std::atomic<double> samples_per_insert, error_buffer;
  std::atomic<uint64_t> min_size;
  std::atomic<uint64_t> inserts, samples;  // admitted
  std::atomic<uint64_t> insert_wait_ns, sample_wait_ns;
};
static_assert(std::atomic<double>::is_always_lock_free);
static_assert(sizeof(RateLimiter) == 72);

// Any thread of any process, any time: waiters re-evaluate. Counts start at zero when `afresh`.
void set_limiter(RateLimiter& limiter, const RateLimiterSettings& settings, bool afresh);

// Admits n rows or steps to be inserted (n samples), and counts them; sleeps up to timeout_s for it. `enough` tells
// whether so many rows or steps can be sampled now, and is asked again on every change. False when not admitted:
// nothing was counted. `stopped` ends a wait early: it is asked on every change, so whoever makes it true calls
// announce() then.
using Stopped = std::function<bool()>;
using Enough = std::function<bool(uint64_t least)>;
bool admit_inserts(RateLimiter& limiter, uint64_t n, double timeout_s, const Stopped& stopped = {});
bool admit_samples(RateLimiter& limiter, uint64_t n, const Enough& enough, double timeout_s,
                   const Stopped& stopped = {});
// Reverts what was admitted and did not happen.
void give_back(RateLimiter& limiter, uint64_t inserts, uint64_t samples);
// After a commit: wakes all who wait, so that they look again.
void announce(RateLimiter& limiter);

}  // namespace geartrain
