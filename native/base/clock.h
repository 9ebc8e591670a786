// Clocks: a monotonic one for waits, a wall clock for ages that must survive a restart.
#pragma once

#include <time.h>

#include <cstdint>

namespace geartrain {

inline uint64_t clock_ns(clockid_t clock) {
  struct timespec now{};
  ::clock_gettime(clock, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

inline uint64_t monotonic_ns() {
  return clock_ns(CLOCK_MONOTONIC);
}

// Wall-clock time since 1970. The coarse clock is good to a few milliseconds and costs a few nanoseconds.
inline uint64_t wall_ns() {
  return clock_ns(CLOCK_REALTIME_COARSE);
}

}  // namespace geartrain
