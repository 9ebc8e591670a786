// How long to poll before a sleep, and the pause within a loop that polls.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/threads.h"

namespace geartrain {

// How long to poll before a sleep. Polling takes the core from other threads, perhaps from the one that is waited for,
// so it gets shorter while it finds nothing, and is tried again now and then. One thread at a time.
class Patience {
 public:
  explicit Patience(double spin_us) : most_us_(available_cores() == 1 ? 0 : spin_us) {}
  double spin_us() const { return most_us_ * share_; }
  void rewarded() { share_ = share_ * 2 + 0.1 < 1 ? share_ * 2 + 0.1 : 1; }
  void in_vain() {
    share_ = share_ < 0.05 ? 0 : share_ / 2;
    if (++vain_ % 64 == 0) share_ = 0.5;
  }

 private:
  double most_us_;
  double share_ = 1.0;
  uint32_t vain_ = 0;
};

// Within a loop that polls.
inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace geartrain
