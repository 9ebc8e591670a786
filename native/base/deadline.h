// Deadlines: points on the monotonic clock, so that a wait in several steps ends at one time.
#pragma once

#include <cstdint>

#include "base/clock.h"

namespace geartrain {

// The point in time at which a wait times out.
class Deadline {
 public:
  static Deadline after(double seconds) { return Deadline(monotonic_ns() + ns_of(seconds)); }
  // In time.monotonic().
  static Deadline at(double seconds) { return Deadline(ns_of(seconds)); }
  static Deadline never() { return Deadline(uint64_t{1} << 62); }
  uint64_t left_ns() const {
    const uint64_t now = monotonic_ns();
    return at_ns_ > now ? at_ns_ - now : 0;
  }
  // For poll and epoll_wait: rounded up, so that a wait never spins through its last millisecond.
  int left_ms() const {
    const uint64_t ms = (left_ns() + 999'999) / 1'000'000;
    return ms > 1'000'000 ? 1'000'000 : static_cast<int>(ms);
  }
  bool passed() const { return monotonic_ns() >= at_ns_; }
  Deadline sooner(double seconds) const { return sooner(after(seconds)); }
  Deadline sooner(Deadline other) const { return other.at_ns_ < at_ns_ ? other : *this; }

 private:
  explicit Deadline(uint64_t at_ns) : at_ns_(at_ns) {}
  // A negative or absurdly long time becomes none, or a hundred years.
  static uint64_t ns_of(double seconds) {
    const double most = 3.2e9;
    return static_cast<uint64_t>((seconds > 0 ? (seconds < most ? seconds : most) : 0) * 1e9);
  }
  uint64_t at_ns_;
};

}  // namespace geartrain
