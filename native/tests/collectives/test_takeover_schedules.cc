// Reducers that are lost, and come back, while frames between ranks, and to and from reducers, arrive in any order that
// connections allow: every rank gets the sums that it would have got, to the bit, and none waits for ever.
//
// GEARTRAIN_TEST_SCHEDULES=100000 runs so many seeds of each test; a failure tells its seed, and GEARTRAIN_TEST_SEED
// runs it alone.

#include <cstdlib>

#include "tests/collectives/simulated_group.h"

namespace geartrain {
namespace {

uint64_t number_in(const char* variable, uint64_t otherwise) {
  const char* const given = std::getenv(variable);
  return given == nullptr ? otherwise : std::strtoull(given, nullptr, 10);
}

std::vector<Shape> some_shapes(std::mt19937_64& random, size_t n) {
  constexpr uint64_t counts[] = {0, 1, 3, 15, 17, 300, 2049, 4097, 8200, 13'000};
  std::vector<Shape> out = shapes(random(), n);
  for (Shape& shape : out) shape.count = counts[random() % std::size(counts)];
  return out;
}

Simulation simulation(uint64_t seed) {
  std::mt19937_64 random(seed);
  Simulation out{.seed = seed, .world = static_cast<uint32_t>(1 + random() % 4)};
  const uint32_t reducers = 1 + random() % 3;
  double sum = 0;
  for (uint32_t i = 0; i < out.world + reducers; ++i) {
    const bool owns = i == out.world || random() % 3 != 0;
    out.shares.push_back(owns ? 1.0 + random() % 9 : 0.0);
    sum += out.shares.back();
  }
  for (double& share : out.shares) share /= sum;
  out.all = some_shapes(random, 2 + random() % 12);
  out.at_once = 1 + random() % 6;
  out.fixed_window = random() % 2 == 0 ? 48 << 10 : 1 << 20;
  out.reducer_losses = 1 + static_cast<int>(random() % 6);
  out.closes_early = random() % 2 == 0;
  out.silences = static_cast<int>(random() % 4);
  out.silence_s = random() % 2 == 0 ? 0.4 : 3;
  out.redial_s = random() % 2 == 0 ? 0 : 0.02;
  if (random() % 2 == 0) out.pipe_bytes = 6000 + random() % 40'000;
  out.same_process = reducers > 1 && random() % 3 == 0;
  return out;
}

struct Total {
  uint64_t lost = 0, back = 0, overlapped = 0, silent = 0;
};

Total run_all(uint64_t rounds, void (*change)(Simulation*), size_t groups = 1) {
  const uint64_t only = number_in("GEARTRAIN_TEST_SEED", 0), first = only == 0 ? 1 : only;
  rounds = number_in("GEARTRAIN_TEST_SCHEDULES", only == 0 ? rounds : 1);
  Total total;
  for (uint64_t seed = first; seed < first + rounds; ++seed) {
    SimulatedReducers reducers(seed, 3);
    std::vector<std::unique_ptr<SimulatedGroup>> all;
    std::vector<SimulatedGroup*> running;
    for (size_t i = 0; i < groups; ++i) {
      Simulation given = simulation(seed + (i << 32));
      change(&given);
      all.push_back(std::make_unique<SimulatedGroup>(given, reducers, static_cast<uint8_t>(1 + i)));
      running.push_back(all.back().get());
    }
    SimulatedGroup::run(running);
    for (const SimulatedGroup* const one : running) {
      const SimulatedGroup::Outcome outcome = one->outcome();
      if (!outcome.wrong.empty()) testing::failed(__FILE__, __LINE__, "seed ", seed, ": ", outcome.wrong);
      total.lost += outcome.lost != 0;
      total.back += outcome.lost != 0 && outcome.all_back;
      total.overlapped += outcome.overlapped;
      total.silent += outcome.silent;
    }
  }
  return total;
}

constexpr uint64_t kRounds = kThreadSanitizer ? 100 : kAddressSanitizer ? 300 : 1000;

// Not where few or other seeds are asked for.
bool usual() {
  return std::getenv("GEARTRAIN_TEST_SEED") == nullptr && number_in("GEARTRAIN_TEST_SCHEDULES", kRounds) >= kRounds;
}

TEST(reducers_that_are_lost_and_come_back_in_any_order_of_frames_cost_no_operation) {
  const Total total = run_all(kRounds, [](Simulation*) {});
  if (!usual()) return;
  CHECK(total.lost > kRounds / 2);
  CHECK(total.back > kRounds / 20);
  CHECK(total.overlapped > kRounds / 50);
  CHECK(total.silent > kRounds / 20);
}

// Connections that have become silent stay at the reducer, whose kernel does not find out.
TEST(every_reducer_that_is_there_again_gets_its_share_back) {
  const Total total = run_all(kRounds / 2, [](Simulation* given) {
    given->waits_for_return = true;
    given->silences = 3;
  });
  if (!usual()) return;
  CHECK(total.back > kRounds / 4);
  CHECK(total.silent > kRounds / 20);
}

TEST(several_groups_lose_the_same_reducers_and_get_them_back) {
  const Total total = run_all(kRounds / 4, [](Simulation* given) { given->waits_for_return = true; }, 3);
  if (!usual()) return;
  CHECK(total.back > kRounds / 4);
}

// A reducer that has lost one rank tells the others so, behind results that their connections have not taken yet.
TEST(results_that_wait_to_be_sent_when_another_rank_is_lost_are_whole) {
  run_all(kRounds / 4, [](Simulation* given) {
    given->pipe_bytes = 6001;
    given->fixed_window = 1 << 20;
    given->reducer_losses = 6;
    given->silences = 0;
    given->all.resize(std::min<size_t>(given->all.size(), 5));
    for (Shape& shape : given->all) shape.count = 13'000;
  });
}

// Without any loss. Every owner's frames come in pieces, between those of the others.
TEST(results_of_another_type_from_several_owners_at_once_are_kept_apart) {
  run_all(kRounds / 2, [](Simulation* given) {
    given->reducer_losses = given->silences = 0;
    for (Shape& shape : given->all) {
      shape.dtype = Dtype::float32;
      shape.wire = shape.count % 2 == 0 ? Dtype::bfloat16 : Dtype::float16;
      if (!reduces(shape.op, shape.wire)) shape.op = Op::sum;
    }
  });
}

// A process that is killed after a while of operations, again and again, and is there at once: no reason to keep away
// from it. 4 and more periods of dialling with it, and at most as many without; ranks that are slow to hear of each
// other take up to 3,000 steps.
TEST(a_healthy_reducer_that_is_killed_after_every_return_is_soon_back) {
  constexpr uint64_t kPeriod = 2000;
  for (uint64_t seed = 1; seed <= 10; ++seed) {
    Simulation given{.seed = seed, .world = 2, .shares = {0, 0, 1}};
    given.all.resize(6000);
    for (Shape& shape : given.all) {
      shape.count = 300;
      shape.dtype = shape.wire = Dtype::float32;
    }
    given.fixed_window = 1 << 20;
    given.reducer_losses = 0;
    given.silence_s = 1000;
    given.redial_s = static_cast<double>(kPeriod) / 1000;
    given.kills = 6;
    given.kill_after_steps = 4 * kPeriod;
    SimulatedReducers reducers(seed, 1);
    SimulatedGroup group(given, reducers);
    SimulatedGroup::run({&group});
    const SimulatedGroup::Outcome outcome = group.outcome();
    if (!outcome.wrong.empty()) testing::failed(__FILE__, __LINE__, "seed ", seed, ": ", outcome.wrong);
    CHECK_EQ(outcome.kills, given.kills);
    if (outcome.longest_away_steps > 4 * kPeriod) {
      testing::failed(__FILE__, __LINE__, "seed ", seed, ": the reducer was away for ", outcome.longest_away_steps,
                      " steps");
    }
  }
}

TEST(a_rank_that_dies_while_reducers_are_lost_is_named_by_all_others) {
  run_all(kRounds / 2, [](Simulation* given) { given->rank_dies = true; });
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
