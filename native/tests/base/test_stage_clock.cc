// Stage clock: time is counted once, in the innermost stage.

#include "base/stage_clock.h"

#include <numeric>

#include "tests/support/check.h"

namespace geartrain {
namespace {

uint64_t ns_of(const StageClock& clock, Stage stage) {
  return clock.times().ns[static_cast<size_t>(stage)];
}

uint64_t entered(const StageClock& clock, Stage stage) {
  return clock.times().entered[static_cast<size_t>(stage)];
}

TEST(a_stage_within_another_is_no_part_of_it) {
  StageClock clock;
  clock.start();
  const uint64_t began_ns = monotonic_ns();
  clock.turn_at(Stage::protocol, began_ns);
  uint64_t inner_ns = 0;
  {
    const StageClock::Scope copies(&clock, Stage::copy_out);
    const StageClock::Scope wakes(&clock, Stage::wake);
    const uint64_t from_ns = monotonic_ns();
    while (monotonic_ns() - from_ns < 3'000'000) {
    }
    inner_ns = monotonic_ns() - from_ns;
  }
  const uint64_t ended_ns = monotonic_ns();
  clock.turn_at(Stage::outside, ended_ns);
  CHECK(ns_of(clock, Stage::wake) >= 3'000'000);
  CHECK(ns_of(clock, Stage::copy_out) + ns_of(clock, Stage::protocol) <= ended_ns - began_ns - 3'000'000);
  CHECK(inner_ns >= 3'000'000);
  const StageTimes& times = clock.times();
  const uint64_t all = std::accumulate(times.ns.begin(), times.ns.end(), uint64_t{0});
  CHECK_EQ(all - ns_of(clock, Stage::outside), ended_ns - began_ns);
  CHECK_EQ(entered(clock, Stage::wake), 1u);
  CHECK_EQ(entered(clock, Stage::protocol), 1u);  // going on after another is no entry
}

TEST(a_look_that_finds_something_is_no_poll) {
  StageClock clock;
  clock.start();
  clock.turn_at(Stage::poll, monotonic_ns());
  clock.found();
  CHECK_EQ(entered(clock, Stage::protocol), 1u);
  clock.found();
  CHECK_EQ(entered(clock, Stage::protocol), 1u);
}

TEST(a_clock_that_is_off_counts_nothing) {
  StageClock clock;
  clock.turn_to(Stage::sum);
  {
    const StageClock::Scope scope(&clock, Stage::read);
  }
  {
    const StageClock::Scope scope(nullptr, Stage::read);
  }
  CHECK_EQ(entered(clock, Stage::sum) + entered(clock, Stage::read), 0u);
  clock.start();
  clock.turn_to(Stage::sum);
  clock.stop();
  const uint64_t before = ns_of(clock, Stage::sum);
  clock.turn_to(Stage::poll);
  CHECK_EQ(ns_of(clock, Stage::sum), before);
  CHECK_EQ(entered(clock, Stage::sum), 1u);
  clock.start();  // from zero
  CHECK_EQ(entered(clock, Stage::sum), 0u);
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
