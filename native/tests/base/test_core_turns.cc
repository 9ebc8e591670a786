// What yields tell of who has a core.

#include "base/core_turns.h"

#include <algorithm>

#include "tests/support/check.h"

namespace geartrain {
namespace {

constexpr uint64_t kUs = 1'000, kMs = 1'000'000;

// A thread that works for so long, and yields for so long, again and again: at which yield it finds others.
int finds_others_at(uint64_t work_ns, uint64_t away_ns, double peers_a_core) {
  CoreTurns turns;
  turns.begin();
  uint64_t now_ns = kMs;
  for (int i = 1; i <= 100; ++i) {
    turns.worked();
    now_ns += work_ns;
    const uint64_t from_ns = now_ns;
    now_ns += away_ns;
    if (turns.yielded(from_ns, now_ns, peers_a_core) != 0) return i;
  }
  return 0;
}

TEST(who_keeps_the_core_longer_than_peers_would_is_somebody_else) {
  // A busy loop has its whole slice.
  for (const uint64_t slice_ns : {1'400 * kUs, 3 * kMs}) {
    for (const double peers : {0.0, 1.0, 4.0}) CHECK_EQ(finds_others_at(20 * kUs, slice_ns, peers), 1);
  }
  // Whatever has taken this thread's core in the middle of its work does not count as its work.
  CHECK(finds_others_at(20 * kMs, 20 * kMs, 4) != 0);
}

TEST(peers_that_work_as_long_as_this_thread_are_no_others) {
  CHECK_EQ(finds_others_at(330 * kUs, 3 * 330 * kUs, 4), 0);  // 8 ranks on two cores, 1 MB
  CoreTurns turns;
  turns.begin();
  uint64_t now_ns = kMs, slept = 0;
  for (int i = 0; i < 100; ++i) {
    turns.worked();
    now_ns += 500 * kUs;
    slept += turns.yielded(now_ns, now_ns + (i == 0 ? 100 * kUs : 1'500 * kUs), 4);  // the first turn is not known yet
    now_ns += i == 0 ? 100 * kUs : 1'500 * kUs;
  }
  CHECK_EQ(slept, 0u);
}

TEST(others_that_stay_are_polled_against_less_and_less) {
  CoreTurns turns;
  turns.begin();
  uint64_t now_ns = kMs, last_ns = 0;
  for (int i = 0; i < 10; ++i) {
    const uint64_t sleep_ns = turns.yielded(now_ns, now_ns + 3 * kMs, 1);
    CHECK_EQ(sleep_ns, last_ns == 0 ? CoreTurns::kLeastSleepNs : std::min(2 * last_ns, CoreTurns::kMostSleepNs));
    last_ns = sleep_ns;
    now_ns += 3 * kMs + sleep_ns + 20 * kMs;
  }
  CHECK_EQ(last_ns, CoreTurns::kMostSleepNs);
  // A core that is away now and then was the host's.
  for (int i = 0; i < 10; ++i) {
    now_ns += 4'000 * kMs;
    CHECK_EQ(turns.yielded(now_ns, now_ns + 3 * kMs, 1), CoreTurns::kLeastSleepNs);
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
