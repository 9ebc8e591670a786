// Reducers that are lost in groups that outlive them: whenever that is, every rank gets the sums that it would have
// got, to the bit, and no operation fails.

#include "tests/collectives/ranks.h"
#include "tests/collectives/relay.h"

namespace geartrain {
namespace {

struct Losses {
  uint32_t world = 2;
  std::vector<double> shares;
  std::vector<Shape> all;  // operations, of which the first ones are begun at once
  size_t at_once = 4;
  std::vector<std::vector<Relay::Limit>> limits;  // by reducer and rank
  uint64_t fixed_window = 0;
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
    relays.push_back(std::make_unique<Relay>(reducers[i]->address(), losses.limits[i]));
    addresses.push_back(relays.back()->address());
  }
  Crew crew{.world = losses.world, .shares = losses.shares, .fixed_window = losses.fixed_window};
  crew.options = [&](uint32_t, GroupOptions* options) {
    options->reducers = addresses;
    options->outlives_reducers = true;
  };
  std::atomic<uint32_t> lost{0};
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
        return;
      }
      // What becomes of it then is the caller's business.
      if (arrays[ended] != given.expected[ended]) {
        testing::failed(__FILE__, __LINE__, what, ": rank ", rank, " has a wrong sum of operation ", ended);
      }
      std::fill(arrays[ended].begin(), arrays[ended].end(), std::byte{0xff});
    }
    lost = std::max<uint32_t>(lost, static_cast<uint32_t>(group.counts().lost_reducers));
  });
  Outcome out{lost, 0, 0, 0};
  for (const auto& relay : relays) {
    out.up = std::max(out.up, relay->most_up());
    out.down = std::max(out.down, relay->most_down());
    out.cut += relay->cut();
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
  const uint64_t needed = end - (up ? sizeof(WireHeader) : 0);  // the last is a farewell
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
    if (at < needed) CHECK_EQ(outcome.lost, outcome.cut != 0 ? 1u : 0u);
  }
  CHECK_EQ(cut, (end + step - 1) / step);
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
  for (int round = 0; round < (kThreadSanitizer ? 12 : 120); ++round) {
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
  CHECK_EQ(most_lost, 3u);
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
