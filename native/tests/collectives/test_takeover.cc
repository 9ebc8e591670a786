// Reducers that are lost in groups that outlive them: whenever that is, every rank gets the sums that it would have
// got, to the bit, and no operation fails.

#include <deque>

#include "collectives/redial.h"
#include "tests/collectives/ranks.h"
#include "tests/collectives/relay.h"

namespace geartrain {
namespace {

void finish(Work& work) {
  CHECK(work.wait(soon(60)));
  CHECK_EQ(work.fault().text, std::string());
}

struct Losses {
  uint32_t world = 2;
  std::vector<double> shares;
  std::vector<Shape> all;  // operations, of which the first ones are begun at once
  size_t at_once = 4;
  std::vector<std::vector<Relay::Limit>> limits;  // by reducer and rank
  uint64_t fixed_window = 0;
  double redial_s = 60;
};

struct Outcome {
  uint32_t lost = 0;  // reducers, as a rank counts them
  uint64_t up = 0, down = 0;
  uint32_t cut = 0;
};

Shape shape_of(uint64_t count, Dtype dtype, Op op = Op::sum, Dtype wire = Dtype::float64) {
  Shape shape;
  shape.count = count;
  shape.dtype = dtype;
  shape.wire = wire == Dtype::float64 ? dtype : wire;
  shape.op = op;
  return shape;
}

// The same numbers and expected results in every run of a test.
class Numbers {
 public:
  Numbers(uint32_t world, const std::vector<Shape>& all) {
    for (size_t i = 0; i < all.size(); ++i) {
      expected.push_back(reference(900 + 100 * i, world, all[i]));
      for (uint32_t rank = 0; rank < world; ++rank) {
        own.push_back(numbers(900 + 100 * i + rank, all[i].dtype, all[i].count));
      }
    }
  }
  std::vector<Array> expected, own;  // own by operation and rank
};

Outcome sums_are_right(const Losses& losses, const Numbers& given,
                       const std::vector<std::unique_ptr<Reducer>>& reducers, const std::string& what) {
  std::vector<std::unique_ptr<Relay>> relays;
  std::vector<std::string> addresses;
  for (size_t i = 0; i < losses.limits.size(); ++i) {
    relays.push_back(
        std::make_unique<Relay>(reducers[i]->address(), std::vector<std::vector<Relay::Limit>>{losses.limits[i]}));
    addresses.push_back(relays.back()->address());
  }
  Crew crew{.world = losses.world, .shares = losses.shares, .fixed_window = losses.fixed_window};
  crew.options = [&](uint32_t, GroupOptions* options) {
    options->reducers = addresses;
    options->outlives_reducers = true;
    options->redial_s = losses.redial_s;
  };
  std::atomic<uint32_t> lost{0}, cut{0};
  std::barrier<> done(losses.world);
  const auto relays_cut = [&] {
    uint32_t count = 0;
    for (const auto& relay : relays) count += relay->cut();
    return count;
  };
  run_ranks(crew, [&](uint32_t rank, Group& group) {
    std::vector<Array> arrays;
    std::vector<std::shared_ptr<Work>> works;
    for (size_t i = 0; i < losses.all.size(); ++i) arrays.push_back(given.own[i * losses.world + rank]);
    for (size_t i = 0, ended = 0; ended < losses.all.size(); ++ended) {
      for (; i < losses.all.size() && i < ended + losses.at_once; ++i) {
        works.push_back(group.all_reduce(losses.all[i], arrays[i].data(), arrays[i].data(), 30));
      }
      CHECK(works[ended]->wait(soon(60)));
      if (works[ended]->fault().kind != FaultKind::none) {
        testing::failed(__FILE__, __LINE__, what, ": ", works[ended]->fault().text);
        return done.arrive_and_drop();
      }
      // What becomes of it then is the caller's business.
      if (arrays[ended] != given.expected[ended]) {
        testing::failed(__FILE__, __LINE__, what, ": rank ", rank, " has a wrong sum of operation ", ended);
      }
      std::fill(arrays[ended].begin(), arrays[ended].end(), std::byte{0xff});
    }
    const auto here = static_cast<uint32_t>(group.counts().lost_reducers);
    for (uint32_t most = lost; here > most && !lost.compare_exchange_weak(most, here);) continue;
    done.arrive_and_wait();
    if (rank == 0) cut = relays_cut();  // and not in a farewell
    done.arrive_and_wait();
  });
  Outcome out{lost, 0, 0, cut};
  for (const auto& relay : relays) {
    out.up = std::max(out.up, relay->most_up());
    out.down = std::max(out.down, relay->most_down());
  }
  return out;
}

std::vector<std::unique_ptr<Reducer>> some_reducers(uint32_t n) {
  std::vector<std::unique_ptr<Reducer>> reducers;
  for (uint32_t i = 0; i < n; ++i) reducers.push_back(std::make_unique<Reducer>(ReducerOptions{.shm = false}));
  return reducers;
}

std::vector<Shape> small_shapes() {
  return {shape_of(13, Dtype::float32),
          shape_of(0, Dtype::float32),
          shape_of(9, Dtype::float32, Op::avg, Dtype::bfloat16),
          shape_of(21, Dtype::int8),
          shape_of(3, Dtype::float64, Op::max),
          shape_of(17, Dtype::bfloat16)};
}

// All of an array is the reducer's, small arrays too: every byte of every frame either way.
void cut_at_every_byte(uint32_t world, bool up, bool all_ranks) {
  Losses losses{.world = world, .shares = std::vector<double>(world + 1, 0.0), .all = small_shapes()};
  losses.shares.back() = 1;
  const Numbers given(world, losses.all);
  const auto reducers = some_reducers(1);
  losses.limits.assign(1, std::vector<Relay::Limit>(world));
  const Outcome whole = sums_are_right(losses, given, reducers, "none");
  CHECK_EQ(whole.lost + whole.cut, 0u);
  const uint64_t end = up ? whole.up : whole.down, step = kThreadSanitizer ? 29 : 1;
  CHECK(end > 6 * sizeof(WireHeader));
  uint64_t cut = 0;
  for (uint64_t at = 0; at < end; at += step) {
    for (uint32_t rank = 0; rank < world; ++rank) {
      // The reducer's process is gone for all, who have more or less of what it sent; or one connection ends.
      Relay::Limit& limit = losses.limits[0][rank];
      limit = {};
      if (rank != at % world && !all_ranks) continue;
      (up ? limit.up : limit.down) = rank == at % world ? at : (at * 7 + rank * 131) % end;
    }
    const Outcome outcome = sums_are_right(losses, given, reducers, "cut at byte " + std::to_string(at));
    cut += outcome.cut != 0;
    CHECK_EQ(outcome.lost, outcome.cut != 0 ? 1u : 0u);
  }
  CHECK(cut * step + 3 * sizeof(WireHeader) > end);  // less a farewell, and a query in a slow first run
}

TEST(a_connection_that_ends_at_any_byte_from_a_reducer_costs_no_operation) {
  cut_at_every_byte(2, false, false);
  cut_at_every_byte(4, false, false);
}

TEST(a_connection_that_ends_at_any_byte_to_a_reducer_costs_no_operation) {
  cut_at_every_byte(2, true, false);
  cut_at_every_byte(4, true, false);
}

TEST(a_reducer_that_dies_after_any_byte_for_each_rank_costs_no_operation) {
  cut_at_every_byte(2, false, true);
  cut_at_every_byte(4, false, true);
}

// Shares of ranks and of several reducers, arrays of many chunks, and more than one reducer that is lost, also while
// ranks do the work of the first.
TEST(reducers_lost_one_after_the_other_leave_the_sums_of_large_arrays_as_they_are) {
  std::mt19937_64 random(5);
  const auto reducers = some_reducers(3);
  uint32_t most_lost = 0;
  for (int round = 0; round < (kThreadSanitizer ? 20 : 200); ++round) {
    Losses losses{.world = static_cast<uint32_t>(1 + random() % 4)};
    const uint32_t count = 1 + random() % 3, members = losses.world + count;
    double sum = 0;
    for (uint32_t i = 0; i < members; ++i)
      losses.shares.push_back(i >= losses.world || random() % 2 ? 1.0 + random() % 9 : 0.0);
    for (const double share : losses.shares) sum += share;
    for (double& share : losses.shares) share /= sum;
    losses.all = shapes(random(), 14);
    losses.at_once = 1 + random() % 8;
    if (random() % 2 == 0) losses.fixed_window = 48 << 10;
    if (random() % 2 == 0) losses.redial_s = 1e-4;
    const Numbers given(losses.world, losses.all);
    for (uint32_t i = 0; i < count; ++i) {
      std::vector<Relay::Limit>& limits = losses.limits.emplace_back(losses.world);
      const uint64_t about = random() % 400'000;
      for (Relay::Limit& limit : limits) {
        if (random() % 4 != 0) (random() % 2 == 0 ? limit.up : limit.down) = about + random() % 40'000;
      }
    }
    most_lost = std::max(most_lost, sums_are_right(losses, given, reducers, "round " + std::to_string(round)).lost);
  }
  CHECK(most_lost >= (kThreadSanitizer ? 1u : 3u));
}

// Ranks go on until all of them have the reducer back, as often as it was lost.
bool comes_back(Reducer& reducer, uint32_t world, std::vector<std::vector<Relay::Limit>> limits, const Numbers& given,
                const std::vector<Shape>& all, const std::string& what) {
  std::atomic<uint32_t> used{0};
  Relay relay(reducer.address(), std::move(limits));
  std::vector<double> shares(world + 1, 0.1 / world);
  shares.back() = 0.9;
  Crew crew{.world = world, .shares = shares};
  crew.options = [&](uint32_t, GroupOptions* options) {
    options->reducers = {relay.address()};
    options->outlives_reducers = true;
    options->redial_s = 0.003;
    options->reducer_silence_s = 0.3;
  };
  run_ranks(crew, [&](uint32_t rank, Group& group) {
    Shape flag = shape_of(1, Dtype::int32, Op::max);
    int32_t lost = 1;
    std::vector<Array> arrays(all.size());
    std::deque<std::shared_ptr<Work>> works;
    const uint64_t began_ns = monotonic_ns();
    while (lost != 0) {
      for (size_t i = 0; i < all.size(); ++i) {
        arrays[i] = given.own[i * world + rank];
        works.push_back(group.all_reduce(all[i], arrays[i].data(), arrays[i].data(), 30));
      }
      lost = relay.cut() == 0 || group.counts().lost_reducers != 0;
      works.push_back(group.all_reduce(flag, &lost, &lost, 30));
      for (; !works.empty(); works.pop_front()) {
        CHECK(works.front()->wait(soon(60)));
        if (works.front()->fault().kind == FaultKind::none) continue;
        testing::failed(__FILE__, __LINE__, what, ": ", works.front()->fault().text);
        return;
      }
      for (size_t i = 0; i < all.size(); ++i) {
        if (arrays[i] != given.expected[i]) {
          testing::failed(__FILE__, __LINE__, what, ": rank ", rank, " has a wrong sum of operation ", i);
        }
      }
      if (testing::within(began_ns, 30)) continue;
      testing::failed(__FILE__, __LINE__, what, ": the reducer is not back");
      return;
    }
    const uint64_t before = reducer.counts().bytes_received;
    Array last = given.own[rank];
    finish(*group.all_reduce(all[0], last.data(), last.data(), 30));
    CHECK(last == given.expected[0]);
    used += reducer.counts().bytes_received > before;
  });
  return used != 0;
}

// What was cut off once, or twice, at any byte: also where ranks have just got it back.
TEST(a_reducer_that_comes_back_gets_its_share_again) {
  const std::vector<Shape> all = {shape_of(5000, Dtype::float32), shape_of(21, Dtype::int8),
                                  shape_of(9000, Dtype::bfloat16), shape_of(33, Dtype::float32)};
  std::mt19937_64 random(9);
  Reducer reducer({.shm = false});
  int used = 0, rounds = 0;
  for (const uint32_t world : {1u, 2u, 4u}) {
    const Numbers given(world, all);
    for (int round = 0; round < (kThreadSanitizer ? 8 : 60); ++round) {
      ++rounds;
      std::vector<std::vector<Relay::Limit>> limits(1 + round % 4, std::vector<Relay::Limit>(world));
      for (auto& of_ranks : limits) {
        const uint64_t about = random() % 3 == 0 ? 0 : random() % 60'000;
        for (Relay::Limit& limit : of_ranks) {
          if (&limit == &of_ranks[0] || random() % 3 != 0) {
            (random() % 2 == 0 ? limit.up : limit.down) = random() % 4 == 0 ? random() % 300 : about + random() % 5000;
          }
        }
      }
      used += comes_back(reducer, world, limits, given, all,
                         std::to_string(world) + " ranks, round " + std::to_string(round));
    }
  }
  CHECK(used > rounds / 2);  // in the others it was lost once more meanwhile
}

// Neither side of a connection is told that it is over: the reducer has it still when the rank comes again.
TEST(a_rank_whose_connection_has_become_silent_is_let_in_again) {
  const std::vector<Shape> all = {shape_of(5000, Dtype::float32), shape_of(33, Dtype::float32)};
  for (const uint32_t world : {1u, 2u, 3u}) {
    const Numbers given(world, all);
    Reducer reducer({.shm = false});
    std::vector<std::vector<Relay::Limit>> limits(2, std::vector<Relay::Limit>(world));
    for (uint32_t rank = 0; rank < world; rank += 2) limits[0][rank] = {.up = 9000, .silent = true};
    // On a busy machine it may be silent for so long once more; that it is back at all is what fails there.
    comes_back(reducer, world, limits, given, all, std::to_string(world) + " ranks, one silent");
  }
}

TEST(a_return_that_was_worth_its_loss_is_dialled_at_once) {
  constexpr uint64_t kPeriodNs = 1'000'000'000;
  const auto after_returns = [](int returns, uint64_t stays_ns, bool carried, uint64_t cost_ns) {
    RedialPause pause(1);
    uint64_t now_ns = 1000 * kPeriodNs;
    pause.lost(now_ns, true);
    for (int i = 0; i < returns; ++i) {
      pause.reached(now_ns += 40 * kPeriodNs);
      pause.lost(now_ns += stays_ns, true, carried, cost_ns);
    }
    return pause.pause_s();
  };
  CHECK_EQ(after_returns(1, 3 * kPeriodNs, true, 0), 0.0);
  CHECK_EQ(after_returns(9, 3 * kPeriodNs, true, 0), 0.0);
  CHECK_EQ(after_returns(1, 2 * kPeriodNs, true, 0), 2.0);  // too short a while
  CHECK_EQ(after_returns(9, 2 * kPeriodNs, true, 0), 32.0);
  CHECK_EQ(after_returns(3, 20 * kPeriodNs, false, 0), 8.0);  // nothing came of it
  CHECK_EQ(after_returns(3, 20 * kPeriodNs, true, 3 * kPeriodNs), 8.0);
  CHECK_EQ(after_returns(3, 33 * kPeriodNs, true, 3 * kPeriodNs), 0.0);
}

// A path that lets a handshake through, and no more. Each return costs a loss; there are fewer and fewer.
TEST(a_reducer_that_never_stays_is_dialled_less_and_less_and_told_of_as_one) {
  constexpr double kRedialS = 0.02;
  constexpr size_t kBroken = 7;  // after which the path is as it should be
  Reducer reducer({.shm = false});
  std::vector<std::vector<Relay::Limit>> limits(kBroken, std::vector<Relay::Limit>(3));
  for (auto& of_ranks : limits) of_ranks[1].up = 40;
  Relay relay(reducer.address(), limits);
  Crew crew{.world = 3, .shares = {0, 0, 0, 1}};
  crew.options = [&](uint32_t, GroupOptions* options) {
    options->reducers = {relay.address()};
    options->outlives_reducers = true;
    options->redial_s = kRedialS;
  };
  std::atomic<uint64_t> stayed_ns{0};
  const uint64_t began_ns = monotonic_ns();
  run_ranks(crew, [&](uint32_t, Group& group) {
    std::vector<std::string> events;
    for (int32_t stayed = 0; stayed == 0 && testing::within(began_ns, 60);) {
      std::vector<float> array(5000, 1.0F);
      finish(*group.all_reduce(shape_of(array.size(), Dtype::float32), array.data(), array.data(), 30));
      CHECK(array == std::vector<float>(5000, 3.0F));
      for (std::string& event : group.reducer_events()) events.push_back(std::move(event));
      stayed = !events.empty() && events.back().find("has stayed for") != std::string::npos;
      finish(*group.all_reduce(shape_of(1, Dtype::int32, Op::min), &stayed, &stayed, 30));
      if (stayed != 0) stayed_ns = monotonic_ns();
    }
    const auto having = [&](const char* text) {
      return std::count_if(events.begin(), events.end(),
                           [&](const auto& one) { return one.find(text) != std::string::npos; });
    };
    const GroupCounts counts = group.counts();
    CHECK_EQ(counts.lost_reducers, 0u);
    CHECK(counts.reducer_losses > RedialPause::kMany + 1);
    CHECK_EQ(having(" is lost ("), static_cast<ptrdiff_t>(RedialPause::kMany + 1));
    CHECK_EQ(having("has not stayed for"), 1);
    CHECK_EQ(having("has stayed for"), 1);
  });
  // 2 + 4 + 8 + 16 + 32 + 32 periods before the path was whole.
  CHECK(static_cast<double>(stayed_ns - began_ns) > 60 * kRedialS * 1e9);
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
