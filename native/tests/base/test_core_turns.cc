// What yields tell of who has a core.

#include "base/core_turns.h"

#include "tests/support/check.h"

namespace geartrain {
namespace {

constexpr uint64_t kUs = 1'000, kMs = 1'000'000;

// A thread that works for so long, and yields for so long, again and again: at which yield it finds others.
int finds_others_at(uint64_t work_ns, uint64_t away_ns, double peers_a_core, int most = 100) {
  CoreTurns turns;
  turns.begin();
  uint64_t now_ns = kMs;
  for (int i = 1; i <= most; ++i) {
    turns.worked();
    now_ns += work_ns;
    const uint64_t from_ns = now_ns;
    now_ns += away_ns;
    if (turns.yielded(from_ns, now_ns, peers_a_core)) return i;
  }
  return 0;
}

TEST(who_keeps_the_core_longer_than_peers_would_is_somebody_else) {
  // A busy loop has its whole slice in every yield.
  for (const uint64_t slice_ns : {1'400 * kUs, 3 * kMs}) {
    CHECK_EQ(finds_others_at(20 * kUs, slice_ns, 1), CoreTurns::kForeignYields);
    CHECK_EQ(finds_others_at(20 * kUs, slice_ns, 4), CoreTurns::kForeignYields);
  }
}

TEST(peers_that_work_as_long_as_this_thread_are_no_others) {
  CHECK_EQ(finds_others_at(330 * kUs, 3 * 330 * kUs, 4), 0);  // 8 ranks on two cores, 1 MB
  CHECK_EQ(finds_others_at(500 * kUs, 3 * 500 * kUs, 4), 0);
  // Whatever has taken this thread's core in the middle of its work does not count as its work.
  CHECK(finds_others_at(20 * kMs, 20 * kMs, 4) != 0);
}

TEST(a_core_that_was_away_once_was_the_hosts) {
  CoreTurns turns;
  turns.begin();
  uint64_t now_ns = kMs;
  for (int i = 0; i < 100; ++i) {
    const uint64_t away_ns = i % CoreTurns::kForeignYields == 0 ? 30 * kUs : 5 * kMs;
    CHECK(!turns.yielded(now_ns, now_ns + away_ns, 4));
    now_ns += away_ns;
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
