#include "base/patience.h"

#include <sched.h>

namespace geartrain {
namespace {

constexpr uint64_t kSleepNs = 50'000;  // what a sleep and its end take on both sides, beside what is waited for
constexpr uint64_t kOthersNs = 1'000;  // an offered core that comes back later had another thread
constexpr uint32_t kMostMisses = 4, kTries = 2, kMostNeeded = 16;

thread_local LateCores late_cores;

}  // namespace

Patience::Patience(double spin_us, bool adapts)
    : most_ns_(static_cast<uint64_t>(std::clamp(spin_us, 0.0, 1e15) * 1e3)),
      adapts_(adapts),
      misses_left_(kMostMisses) {}

// Until when to poll; 0: not now.
uint64_t Patience::begin(Deadline deadline) {
  if (most_ns_ == 0) return 0;
  const uint64_t now = monotonic_ns();
  if (began_ns_ == 0) {
    began_ns_ = now;
    polled_ = false;
  }
  if (misses_left_ == 0 || !late_cores.polls(now)) return 0;
  const uint64_t left_ns = deadline.left_ns();
  if (left_ns == 0) return 0;
  polled_ = true;
  poll_from_ns_ = now;
  return now + std::min(most_ns_, left_ns);
}

// For how long others had it.
uint64_t Patience::offer_core() {
  const uint64_t from_ns = monotonic_ns();
  ::sched_yield();
  const uint64_t now = monotonic_ns();
  const uint64_t away_ns = now - from_ns;
  if (away_ns >= LateCores::kLateNs) late_cores.late(now, away_ns);
  return away_ns;
}

void Patience::found(uint64_t away_ns) {
  yields_at_once_ = away_ns >= kOthersNs;
  misses_left_ = std::min(misses_left_ + 1, kMostMisses);
  needed_ = 1;
  if (!late_cores.counts()) began_ns_ = 0;
}

void Patience::missed() {
  if (!adapts_ || --misses_left_ != 0) return;
  needed_ = std::min(2 * needed_, kMostNeeded);
  soon_ = 0;
}

void Patience::ended() {
  if (began_ns_ == 0) {
    if (late_cores.counts()) late_cores.waited(0);
    return;
  }
  const uint64_t waited_ns = monotonic_ns() - began_ns_;
  if (late_cores.counts()) late_cores.waited(waited_ns);
  began_ns_ = 0;
  if (polled_ || misses_left_ != 0) return;
  if (waited_ns > most_ns_ + kSleepNs) {
    soon_ -= soon_ != 0;
  } else if (++soon_ >= needed_) {
    misses_left_ = kTries;
    soon_ = 0;
  }
}

}  // namespace geartrain
