// Core turns: what a thread that polls learns from yields about who else has its core, peers or others.
//
// A yield ends when every other thread at the core has had its turn. Peers copy and sum the same arrays as this thread
// does, so that their turns are about as long as its own, and what they do is what it waits for: no idle time. Others
// compute for as long as the scheduler lets them: a thread that sleeps is scheduled sooner than one that polls then.
#pragma once

#include <algorithm>
#include <cstdint>

namespace geartrain {

class CoreTurns {
 public:
  // Away for longer: it may be others. A server's many clients at its core have it for longer than ranks that take
  // turns: 64 on two cores for 1.2 to 1.8 ms, two busy loops for twice a slice.
  static constexpr uint64_t kForeignNs = 1'000'000, kForeignBesideClientsNs = 2'500'000;

  explicit CoreTurns(uint64_t foreign_ns = kForeignNs) : foreign_ns_(foreign_ns) {}

  // For how long nobody polls then: for longer each time that polls are tried again and find others again soon. A host
  // that takes a virtual machine's core for a moment costs the least of it.
  static constexpr uint64_t kLeastSleepNs = 16'000'000, kMostSleepNs = 1'000'000'000, kSoonNs = 100'000'000;
  // Of work, that one peer takes: this thread's own longest of late, without the time that others took from it.
  static constexpr uint64_t kLongestTurnNs = 500'000;

  // A wait begins.
  void begin() { back_at_ns_ = 0; }
  // Something was found, and worked on.
  void worked() { works_ = true; }
  // From, and until: a yield, of as many peers at each core as that. For how long not to poll, since others than these
  // have the core; 0: they do not.
  uint64_t yielded(uint64_t from_ns, uint64_t until_ns, double peers_a_core) {
    if (works_ && back_at_ns_ != 0) {
      turn_ns_ = std::max(std::min(from_ns - back_at_ns_, kLongestTurnNs), turn_ns_ - turn_ns_ / 8);
    }
    works_ = false;
    back_at_ns_ = until_ns;
    const double turns_ns = 2 * static_cast<double>(turn_ns_) * peers_a_core;
    if (until_ns - from_ns <= std::max(foreign_ns_, static_cast<uint64_t>(turns_ns))) return 0;
    const bool again = sleep_ns_ != 0 && until_ns < slept_until_ns_ + std::max(kSoonNs, 2 * sleep_ns_);
    sleep_ns_ = again ? std::min(2 * sleep_ns_, kMostSleepNs) : kLeastSleepNs;
    slept_until_ns_ = until_ns + sleep_ns_;
    return sleep_ns_;
  }

 private:
  const uint64_t foreign_ns_;
  uint64_t turn_ns_ = 0, back_at_ns_ = 0;       // the longest turn of late; when the last yield ended
  bool works_ = false;                          // since then
  uint64_t sleep_ns_ = 0, slept_until_ns_ = 0;  // last
};

}  // namespace geartrain
