// Which way arrays are reduced: on made-up machines, and ranks that agree about it.

#include "collectives/tried_ways.h"

#include <algorithm>
#include <random>
#include <vector>

#include "tests/support/check.h"

namespace geartrain {
namespace {

struct Machine {
  double rings_us, reading_us;
  double noise = 0;    // most that an operation takes longer, as a part of its time
  double odd = 0;      // the part of operations that take four times as long
  double slow_ms = 0;  // now and then both ways take three times as long, for so long
};

struct Driven {
  double took_us = 0, best_us = 0;
  uint64_t of_other_way = 0;
};

// Operations as a group does them: a way is used from the next operation on.
Driven drive(TriedWays* ways, const Machine& machine, int operations, uint32_t seed) {
  std::mt19937 random(seed);
  const auto chance = [&random] { return static_cast<double>(random() % 100'000) / 100'000; };
  Driven out;
  Way next = ways->now();
  double slow_us = 0;
  for (int i = 0; i < operations; ++i) {
    const Way now = next;
    next = ways->now();
    double took_us = now == Way::rings ? machine.rings_us : machine.reading_us;
    took_us *= 1 + machine.noise * chance();
    if (chance() < machine.odd) took_us *= 4;
    if (machine.slow_ms != 0 && slow_us <= 0 && chance() < took_us / 100'000) slow_us = 1000 * machine.slow_ms;
    if (slow_us > 0) took_us *= 3;
    slow_us -= took_us;
    out.took_us += took_us;
    out.best_us += took_us / (now == Way::rings ? machine.rings_us : machine.reading_us) *
                   std::min(machine.rings_us, machine.reading_us);
    out.of_other_way += now != ways->kept();
    ways->judge(now, static_cast<uint64_t>(1000 * took_us));
  }
  return out;
}

TEST(the_faster_way_is_found_and_trials_cost_little) {
  for (const double rings_us : {20.0, 400.0, 5000.0}) {
    for (const double ratio : {0.3, 0.6, 0.8, 1.3, 2.5}) {
      for (const bool noisy : {false, true}) {
        double took = 0, best = 0;
        int right = 0;
        constexpr int kTimes = 40;
        for (uint32_t seed = 0; seed < kTimes; ++seed) {
          Machine machine{rings_us, ratio * rings_us};
          if (noisy) machine = {rings_us, ratio * rings_us, 0.5, 0.05, 20};
          TriedWays ways;
          const Driven found = drive(&ways, machine, std::max(5000, static_cast<int>(3e6 / rings_us)), seed);
          took += found.took_us;
          best += found.best_us;
          right += ways.kept() == (ratio < 1 ? Way::reading : Way::rings);
        }
        CHECK(right >= (noisy ? kTimes - 2 : kTimes));
        CHECK(took < 1.03 * best);
      }
    }
  }
}

TEST(ways_that_are_as_fast_stay_as_they_are) {
  int changed = 0;
  for (uint32_t seed = 0; seed < 50; ++seed) {
    TriedWays ways;
    drive(&ways, {100, 97, 0.3, 0.05}, 50'000, seed);
    changed += ways.kept() != Way::rings;
  }
  CHECK_EQ(changed, 0);
}

TEST(a_host_that_changes_is_noticed) {
  TriedWays ways;
  drive(&ways, {400, 250}, 2000, 1);
  CHECK(ways.kept() == Way::reading);
  drive(&ways, {100, 250}, 100'000, 2);
  CHECK(ways.kept() == Way::rings);
  drive(&ways, {400, 250}, 100'000, 3);
  CHECK(ways.kept() == Way::reading);
}

// A host where reading is far slower is spared the rest of a trial.
TEST(a_way_that_is_far_worse_is_left_at_once) {
  TriedWays ways;
  CHECK(drive(&ways, {1000, 2000}, 100, 1).of_other_way <= 6);
  CHECK(ways.kept() == Way::rings);
}

Shape floats(uint64_t bytes, Collective collective = Collective::all_reduce) {
  Shape shape{bytes / 4};
  shape.collective = collective;
  return shape;
}

TEST(small_arrays_and_those_that_are_converted_have_no_choice) {
  AgreedWays ways;
  Shape converted = floats(1 << 20);
  converted.wire = Dtype::bfloat16;
  for (const Shape& shape : {floats(kLeastTried - 4), converted, floats(1 << 20, Collective::broadcast)}) {
    CHECK(!AgreedWays::has_choice(shape));
    CHECK(ways.begin(shape, true) == Way::rings);
    CHECK_EQ(ways.word(shape), 0u);
    ways.heard(shape, 1, 2);
    CHECK(ways.follow(shape, 2) == Way::rings);
  }
  for (const uint64_t bytes : {kLeastTried, uint64_t{1} << 20, uint64_t{1} << 40}) {
    CHECK(AgreedWays::has_choice(floats(bytes)) && AgreedWays::has_choice(floats(bytes, Collective::reduce_scatter)));
  }
}

// Ranks that wait for each operation use one way in each, whether they hear of an operation before they begin it or
// while it is in progress. Sizes are apart.
TEST(ranks_that_wait_for_each_operation_agree) {
  std::mt19937 random(1);
  AgreedWays first;
  std::vector<AgreedWays> others(3);
  uint64_t reading = 0, large_reading = 0;
  for (uint64_t operation = 0; operation < 3000; ++operation) {
    const bool large = random() % 2 == 0;
    const Shape shape = floats(large ? 4 << 20 : 1 << 20);
    std::vector<Way> ways;
    std::vector<bool> early;
    for (const AgreedWays& other : others) {
      early.push_back(random() % 2 == 0);
      if (early.back()) ways.push_back(other.follow(shape, operation));
    }
    const Way way = first.begin(shape, true);
    const uint32_t word = first.word(shape);
    for (size_t i = 0; i < others.size(); ++i) {
      others[i].heard(shape, operation, word);
      if (!early[i]) ways.push_back(others[i].follow(shape, operation));
    }
    for (const Way one : ways) CHECK(one == way);
    reading += !large && way == Way::reading;
    large_reading += large && way == Way::reading;
    // Small ones are read faster, large ones are not.
    first.judge(shape, way, way == Way::rings ? 1'000'000 : large ? 1'300'000 : 500'000);
  }
  CHECK(reading > 1000);
  CHECK(large_reading > 5 && large_reading < 150);
}

TEST(ranks_several_operations_behind_follow_what_was_said) {
  AgreedWays other;
  const Shape shape = floats(1 << 20);
  for (uint64_t operation = 0; operation < 20; ++operation) {
    other.heard(shape, operation + 3, 2);
    if (operation > 0) CHECK(other.follow(shape, operation) == Way::reading);
  }
}

TEST(memory_that_cannot_be_read_is_not_tried) {
  AgreedWays ways;
  const Shape shape = floats(1 << 20);
  for (int i = 0; i < 300; ++i) {
    CHECK(ways.begin(shape, false) == Way::rings);
    CHECK_EQ(ways.word(shape), 1u);
    ways.judge(shape, Way::rings, 1'000'000);
  }
  uint64_t tried = 0;
  for (int i = 0; i < 30; ++i) {
    const Way way = ways.begin(shape, true);
    tried += way == Way::reading;
    ways.judge(shape, way, 1'000'000);
  }
  CHECK(tried > 0);
}

}  // namespace
}  // namespace geartrain
RUN_TESTS()
