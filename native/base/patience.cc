#include "base/patience.h"

#include <sched.h>

namespace geartrain {
namespace {

struct Core {
  CoreTurns turns{CoreTurns::kForeignBesideClientsNs};
  uint64_t polls_again_ns = 0;
};
thread_local Core core;

}  // namespace

Patience::Patience(double spin_us) : most_ns_(static_cast<uint64_t>(std::clamp(spin_us, 0.0, 1e15) * 1e3)) {}

// The time of now: not to poll.
uint64_t Patience::end_of_poll(uint64_t now_ns, Deadline deadline) const {
  return now_ns < core.polls_again_ns ? now_ns : now_ns + std::min(most_ns_, deadline.left_ns());
}

// For how long others had it.
uint64_t Patience::offer_core() {
  const uint64_t from_ns = monotonic_ns();
  ::sched_yield();
  const uint64_t now_ns = monotonic_ns();
  const uint64_t sleep_ns = core.turns.yielded(from_ns, now_ns, 0);
  if (sleep_ns != 0) core.polls_again_ns = now_ns + sleep_ns;
  return now_ns - from_ns;
}

}  // namespace geartrain
