// How long to poll before a sleep, and the pause within a loop that polls.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "base/deadline.h"
#include "base/late_cores.h"

namespace geartrain {

// Within a loop that polls.
inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// Polls before a sleep where that pays: where recent waits ended while it polled, or, if it did not poll, soon. One
// thread at a time.
//
//   if (!patience.poll(...)) sleep();     // any number of times, until what is waited for is there
//   patience.ended();
//
// A wait that was slept through counts with the sleep and its end, so that two peers that wait for each other, and both
// sleep, both come to poll: each one's wait is as long as the other's wake-up then, which would not be without
// sleeps. Polls in vain make it sleep, and for longer each time before it tries again.
//
// A poll that lasts offers its core to other threads, as what is waited for may come from one that has no other core;
// where that was so, the next one does it at once. Where it gets the core back after a millisecond, others compute
// there, or the peer does: this thread tries polls and sleeps in turn (late_cores.h).
class Patience {
 public:
  // Between two looks at the clock, where a look is no system call.
  static constexpr int kLooks = 16;

  // At most so long. Without `adapts` all waits are polled, where one knows that they are
  // short.
  explicit Patience(double spin_us, bool adapts = true);

  // look() until it is true, which this returns, or it is time to sleep. As many `looks` are made between two looks at
  // the clock.
  template <typename Look>
  bool poll(int looks, Deadline deadline, Look&& look);
  // What was waited for is there.
  void ended();

 private:
  uint64_t begin(Deadline deadline);
  uint64_t offer_core();
  void found(uint64_t away_ns);
  void missed();

  static constexpr uint64_t kYieldNs = 5'000;

  const uint64_t most_ns_;
  const bool adapts_;
  uint64_t began_ns_ = 0;      // the wait; 0: none has
  uint64_t poll_from_ns_ = 0;  // the poll of now
  bool polled_ = false;        // in this wait
  bool yields_at_once_ = false;
  // How many polls in vain end with a sleep before all do; then, of waits that ended soon, more than of others: how
  // many there were, and how many it takes.
  uint32_t misses_left_;
  uint32_t soon_ = 0, needed_ = 1;
};

template <typename Look>
bool Patience::poll(int looks, Deadline deadline, Look&& look) {
  const uint64_t until_ns = begin(deadline);
  if (until_ns == 0) return false;
  uint64_t away_ns = 0;
  for (bool yields = yields_at_once_;;) {
    for (int i = yields ? looks - 1 : 0; i < looks; ++i) {
      if (look()) {
        found(away_ns);
        return true;
      }
      if (!yields) pause_briefly();
    }
    const uint64_t now = monotonic_ns();
    if (now >= until_ns) break;
    yields = yields || now - poll_from_ns_ >= kYieldNs;
    if (!yields) continue;
    away_ns = offer_core();
    if (away_ns >= LateCores::kLateNs) break;
  }
  if (look()) {
    found(away_ns);
    return true;
  }
  missed();
  return false;
}

}  // namespace geartrain
