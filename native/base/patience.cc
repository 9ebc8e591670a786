#include "base/patience.h"

#include <sched.h>

namespace geartrain {
namespace {

constexpr uint64_t kSleepNs = 50'000;  // what a sleep and its end take on both sides, beside what is waited for
constexpr uint64_t kOthersNs = 1'000;  // an offered core that comes back later had another thread
constexpr uint64_t kRest = 30;         // times as long nobody polls after a core came back late
constexpr uint32_t kMostMisses = 4, kTries = 2, kMostNeeded = 16;

std::atomic<uint64_t> polls_again_ns{0};  // of this process

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
  if (misses_left_ == 0 || now < polls_again_ns.load(std::memory_order_relaxed)) return 0;
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
  if (away_ns >= kForeignNs) polls_again_ns.store(now + kRest * away_ns, std::memory_order_relaxed);
  return away_ns;
}

void Patience::found(uint64_t away_ns) {
  yields_at_once_ = away_ns >= kOthersNs;
  misses_left_ = std::min(misses_left_ + 1, kMostMisses);
  needed_ = 1;
  began_ns_ = 0;
}

void Patience::missed() {
  if (!adapts_ || --misses_left_ != 0) return;
  needed_ = std::min(2 * needed_, kMostNeeded);
  soon_ = 0;
}

void Patience::ended() {
  if (began_ns_ == 0) return;
  const uint64_t waited_ns = monotonic_ns() - began_ns_;
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
