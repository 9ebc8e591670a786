// Polls before sleeps: when they are made, for how long, and whose core they take.

#include "base/patience.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "tests/support/check.h"

namespace geartrain {
namespace {

constexpr double kSpinUs = 3;  // too short to offer the core, which others may take

// A poll in which nothing is found. How many looks it made.
int looks_in_vain(Patience& patience) {
  int looks = 0;
  CHECK(!patience.poll(1, soon(), [&] { return ++looks, false; }));
  return looks;
}

bool finds(Patience& patience) {
  return patience.poll(1, soon(), [] { return true; });
}

TEST(every_wait_is_polled_whatever_the_ones_before_found) {
  Patience patience(kSpinUs);
  for (int i = 0; i < 100; ++i) CHECK(looks_in_vain(patience) != 0);
  CHECK(finds(patience));
}

TEST(polls_end_when_they_are_to) {
  Patience none(0);
  CHECK_EQ(looks_in_vain(none), 0);
  Patience patience(20'000);
  const uint64_t began_ns = monotonic_ns();
  CHECK(looks_in_vain(patience) != 0);
  CHECK(monotonic_ns() - began_ns >= 19'000'000 || finds(patience) == false);  // or another had the core
  Patience long_one(1e8);
  const uint64_t again_ns = monotonic_ns();
  CHECK(!long_one.poll(1, Deadline::after(0.02), [] { return false; }));
  CHECK(testing::within(again_ns, 5));
}

void stay_on(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  CHECK_EQ(::pthread_setaffinity_np(::pthread_self(), sizeof set, &set), 0);
}

int a_core() {
  cpu_set_t set;
  CHECK_EQ(::sched_getaffinity(0, sizeof set, &set), 0);
  for (int i = 0; i < CPU_SETSIZE; ++i) {
    if (CPU_ISSET(i, &set)) return i;
  }
  return 0;
}

TEST(nobody_polls_on_a_core_where_another_thread_computes) {
  const int core = a_core();
  std::atomic<bool> over{false};
  std::atomic<int> state{0};
  std::thread computes([&] {
    stay_on(core);
    state = 1;
    while (!over) pause_briefly();
  });
  std::thread polls([&] {
    stay_on(core);
    while (state == 0) ::usleep(100);
    bool rested = false;
    const uint64_t began_ns = monotonic_ns();
    while (!rested && testing::within(began_ns, 10)) {
      Patience patience(1e6);
      looks_in_vain(patience);  // ends when the core comes back late, long before a second has passed
      Patience another(1e6);
      rested = looks_in_vain(another) == 0;  // of the same thread
    }
    CHECK(rested);
    over = true;
    const uint64_t alone_ns = monotonic_ns();
    bool again = false;
    while (!again && testing::within(alone_ns, 20)) {
      Patience patience(kSpinUs);
      again = finds(patience);
      ::usleep(1000);
    }
    CHECK(again);
  });
  polls.join();
  computes.join();
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
