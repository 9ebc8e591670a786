// How long to poll before a sleep, and the pause within a loop that polls.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "base/core_turns.h"
#include "base/deadline.h"

namespace geartrain {

// Within a loop that polls.
inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// Polls before a sleep: for about as long as a sleep and its end take, so that a poll costs at most what it saves. One
// thread at a time.
//
//   if (!patience.poll(...)) sleep();     // any number of times, until what is waited for is there
//
// A poll that lasts offers its core to other threads, as what is waited for may come from one that has no other core;
// where that was so, the next one does it at once. Where it gets the core back after 2.5 ms, others compute
// there, and a thread that sleeps is scheduled sooner than one that polls: this thread polls no more for a while
// (core_turns.h).
class Patience {
 public:
  // Between two looks at the clock, where a look is no system call.
  static constexpr int kLooks = 16;

  // At most so long.
  explicit Patience(double spin_us);

  // look() until it is true, which this returns, or it is time to sleep. As many `looks` are made between two looks at
  // the clock.
  template <typename Look>
  bool poll(int looks, Deadline deadline, Look&& look);

 private:
  static uint64_t offer_core();
  uint64_t end_of_poll(uint64_t now_ns, Deadline deadline) const;

  static constexpr uint64_t kYieldNs = 5'000;
  static constexpr uint64_t kOthersNs = 1'000;  // an offered core that comes back later had another thread

  const uint64_t most_ns_;
  bool yields_at_once_ = false;
};

template <typename Look>
bool Patience::poll(int looks, Deadline deadline, Look&& look) {
  const uint64_t from_ns = monotonic_ns(), until_ns = end_of_poll(from_ns, deadline);
  if (until_ns == from_ns) return false;
  uint64_t away_ns = 0;
  const auto found = [&] {
    if (!look()) return false;
    yields_at_once_ = away_ns >= kOthersNs;
    return true;
  };
  for (bool yields = yields_at_once_;;) {
    for (int i = yields ? looks - 1 : 0; i < looks; ++i) {
      if (found()) return true;
      if (!yields) pause_briefly();
    }
    const uint64_t now = monotonic_ns();
    if (now >= until_ns) break;
    yields = yields || now - from_ns >= kYieldNs;
    if (!yields) continue;
    away_ns = offer_core();
    if (away_ns > CoreTurns::kForeignBesideClientsNs) break;
  }
  return found();
}

}  // namespace geartrain
