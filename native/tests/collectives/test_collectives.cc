// Collectives: sharded and ring all-reduce, over TCP and shared memory, and their failures.

#include <cmath>

#include "collectives/reduce_kernels.h"
#include "collectives/sharded_allreduce.h"
#include "tests/collectives/ranks.h"

namespace geartrain {
namespace {

std::shared_ptr<Work> start(Group& group, const Shape& shape, Array* array, double timeout_s = 60) {
  return group.all_reduce(shape, array->data(), array->data(), timeout_s);
}

void finish(Work& work) {
  CHECK(work.wait(soon(90)));
  if (work.fault().kind != FaultKind::none) testing::failed(__FILE__, __LINE__, "failed: ", work.fault().text);
}

std::vector<double> random_shares(std::mt19937_64& random, size_t members) {
  std::vector<double> shares(members);
  double sum = 0;
  for (double& share : shares) sum += share = random() % 3 == 0 ? 0 : static_cast<double>(random() % 1000 + 1);
  if (sum == 0) sum = shares[random() % members] = 1;
  for (double& share : shares) share /= sum;
  return shares;
}

TEST(shares_cover_the_array_without_gaps) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 300; ++i) {
    const auto shares = random_shares(random, 1 + random() % 20);
    const uint64_t count = i % 4 == 0 ? random() % 6000 : random() % 1'000'000;
    const auto starts = divide_array(count, Dtype::float32, shares, random() % 50);
    CHECK(starts.front() == 0 && starts.back() == count && std::is_sorted(starts.begin(), starts.end()));
    for (size_t owner = 0; owner < shares.size(); ++owner) {
      if (shares[owner] == 0) CHECK_EQ(starts[owner], starts[owner + 1]);
      const double exact = shares[owner] * static_cast<double>(count);
      if (count > 4096) CHECK(std::abs(static_cast<double>(starts[owner + 1] - starts[owner]) - exact) < 64);
    }
  }
}

// --- all-reduce -----------------------------------------------------------------------------------------------------

void reduces_right(const Crew& crew, uint64_t seed, size_t operations) {
  const auto all = shapes(seed, operations);
  std::vector<Array> expected;
  for (size_t i = 0; i < all.size(); ++i) expected.push_back(reference(seed + 100 * i, crew.world, all[i]));
  run_ranks(crew, [&](uint32_t rank, Group& group) {
    std::mt19937_64 random(seed + rank);
    std::vector<Array> arrays;
    for (size_t i = 0; i < all.size(); ++i)
      arrays.push_back(numbers(seed + 100 * i + rank, all[i].dtype, all[i].count));
    std::vector<std::shared_ptr<Work>> works;
    for (size_t i = 0; i < all.size(); ++i) {
      // Ranks start at different times, so parts of every operation come in every order.
      if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
      works.push_back(start(group, all[i], &arrays[i]));
      if (random() % 4 == 0) finish(*works.back());
    }
    for (size_t i = 0; i < all.size(); ++i) {
      finish(*works[i]);
      if (arrays[i] != expected[i]) {
        testing::failed(__FILE__, __LINE__, "rank ", rank, " of ", crew.world, ": wrong ", all[i].text());
      }
    }
  });
}

TEST(every_shape_on_any_number_of_ranks_is_the_rank_order_sum) {
  for (uint32_t world = 1; world <= 8; world += kThreadSanitizer ? 3 : 1) {
    reduces_right({.world = world}, world, 24);
  }
}

TEST(every_vector_of_shares_gives_the_same_bits) {
  std::mt19937_64 random(11);
  for (int i = 0; i < (kThreadSanitizer ? 3 : 8); ++i) {
    const auto world = static_cast<uint32_t>(1 + random() % 5), reducers = static_cast<uint32_t>(random() % 4);
    // The same seed: the same numbers and the same expected bits, whatever the shares.
    reduces_right({world, reducers, random_shares(random, world + reducers)}, 77, 14);
  }
}

TEST(memory_between_ranks_of_one_host_gives_the_same_bits) {
  if (kThreadSanitizer) return;  // it does not see two mappings of one memory as one
  reduces_right({.world = 2, .shm = true}, 21, 40);
  reduces_right({.world = 4, .shm = true}, 22, 30);
  reduces_right({3, 2, {0.1, 0.2, 0.1, 0.3, 0.3}, false, true}, 23, 30);
}

TEST(a_small_window_only_takes_longer) {
  reduces_right({.world = 3, .fixed_window = 4096}, 31, 12);
}

// The ring's documented order, computed plainly: piece p begins at rank p, each hop rounds to the wire.
Array ring_reference(uint64_t seed, uint32_t world, const Shape& shape) {
  std::vector<Array> own;
  for (uint32_t rank = 0; rank < world; ++rank) own.push_back(numbers(seed + rank, shape.dtype, shape.count));
  Array out(shape.count * bytes_of(shape.dtype));
  const uint64_t size = bytes_of(shape.dtype);
  for (uint32_t p = 0; p < world; ++p) {
    const uint64_t first = shape.count / 16 * p / world * 16;
    const uint64_t last = p + 1 == world ? shape.count : shape.count / 16 * (p + 1) / world * 16;
    const uint64_t count = last - first;
    Array sum(own[p].begin() + static_cast<ptrdiff_t>(first * size),
              own[p].begin() + static_cast<ptrdiff_t>(last * size));
    Array wire(count * bytes_of(shape.wire));
    const auto round_to_wire = [&] {
      convert(shape.dtype, sum.data(), shape.wire, wire.data(), count);
      convert(shape.wire, wire.data(), shape.dtype, sum.data(), count);
    };
    for (uint32_t k = 1; k < world; ++k) {
      round_to_wire();
      const std::byte* const both[] = {sum.data(), own[(p + k) % world].data() + first * size};
      reduce(shape.op == Op::avg ? Op::sum : shape.op, shape.dtype, both, sum.data(), count);
    }
    if (shape.op == Op::avg) divide(shape.dtype, sum.data(), count, world);
    if (world > 1) round_to_wire();
    std::copy(sum.begin(), sum.end(), out.begin() + static_cast<ptrdiff_t>(first * size));
  }
  return out;
}

TEST(the_ring_adds_up_in_its_documented_order) {
  for (uint32_t world = 1; world <= 6; world += kThreadSanitizer ? 2 : 1) {
    const auto all = shapes(40 + world, 20);
    run_ranks({.world = world, .ring = true}, [&](uint32_t rank, Group& group) {
      std::vector<Array> arrays;
      std::vector<std::shared_ptr<Work>> works;
      for (size_t i = 0; i < all.size(); ++i) {
        arrays.push_back(numbers(500 * i + rank, all[i].dtype, all[i].count));
      }
      for (size_t i = 0; i < all.size(); ++i) {
        works.push_back(start(group, all[i], &arrays[i]));
        if ((i + rank) % 5 == 0) std::this_thread::sleep_for(std::chrono::microseconds(500));
      }
      for (size_t i = 0; i < all.size(); ++i) {
        finish(*works[i]);
        if (arrays[i] != ring_reference(500 * i, world, all[i])) {
          testing::failed(__FILE__, __LINE__, "rank ", rank, " of ", world, ": wrong ", all[i].text());
        }
      }
    });
  }
}

// --- bytes ----------------------------------------------------------------------------------------------------------

double bytes_per_rank(const Crew& crew, uint64_t count) {
  std::atomic<uint64_t> most{0};
  run_ranks(crew, [&](uint32_t rank, Group& group) {
    Array array = numbers(rank, Dtype::float32, count);
    finish(*start(group, {count, Dtype::float32, Dtype::float32, Op::sum, 0}, &array));
    // What others still need of this rank is sent first.
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const GroupCounts counts = group.counts();
    uint64_t seen = most;
    while (seen < counts.sent_tcp && !most.compare_exchange_weak(seen, counts.sent_tcp)) continue;
  });
  return static_cast<double>(most) / static_cast<double>(count * 4);
}

TEST(a_rank_sends_k_to_reducers_and_the_rings_bytes_to_ranks) {
  constexpr uint64_t kCount = 1 << 20;
  for (const uint32_t world : {2u, 4u}) {
    std::vector<double> shares(world + 2, 0.0);
    shares[world] = shares[world + 1] = 0.5;
    const double dedicated = bytes_per_rank({world, 2, shares}, kCount);
    CHECK(dedicated >= 1.0 && dedicated < 1.003);
    const double ring = 2.0 * (world - 1) / world;
    for (const bool by_ring : {false, true}) {
      const double equal = bytes_per_rank({.world = world, .ring = by_ring}, kCount);
      CHECK(equal >= ring && equal < ring * 1.003);
    }
  }
}

// --- failure --------------------------------------------------------------------------------------------------------

TEST(ranks_that_disagree_all_receive_the_same_fault) {
  for (const bool ring : {false, true}) {
    run_ranks({.world = 3, .ring = ring}, [&](uint32_t rank, Group& group) {
      Array array = numbers(rank, Dtype::float64, 30'000);
      Shape shape{30'000, Dtype::float64, Dtype::float64, Op::sum, 0};
      if (rank == 1) shape.count = 29'999;
      const auto work = start(group, shape, &array, 20);
      CHECK(work->wait(soon(30)));
      CHECK(work->fault().kind == FaultKind::disagree);
      CHECK(work->fault().text.find("29999") != std::string::npos);
      CHECK(work->fault().text.find("30000") != std::string::npos);
      CHECK(work->fault().text.find("rank 1") != std::string::npos);
      const auto next = start(group, shape, &array, 20);
      CHECK(next->wait(soon(5)) && next->fault().kind == FaultKind::disagree);
    });
  }
}

TEST(a_rank_that_does_not_join_is_named_at_the_deadline) {
  for (const bool ring : {false, true}) {
    for (const uint32_t reducers : {0u, 1u}) {
      if (ring && reducers != 0) continue;
      std::vector<double> shares;
      if (reducers != 0) shares = {0, 0, 0, 0, 1};
      std::atomic<int> waiting{3};
      run_ranks({4, reducers, shares, ring}, [&](uint32_t rank, Group& group) {
        if (rank == 2) {
          while (waiting > 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
          return;
        }
        Array array = numbers(rank, Dtype::float32, 100'000);
        const auto work = start(group, {100'000, Dtype::float32, Dtype::float32, Op::sum, 0}, &array, 3);
        CHECK(work->wait(soon(30)));
        CHECK(work->fault().kind == FaultKind::timed_out);
        CHECK(work->fault().members == std::vector<uint32_t>{2});
        --waiting;
      });
    }
  }
}

TEST(a_rank_that_leaves_is_named_by_those_who_go_on) {
  run_ranks({.world = 3}, [&](uint32_t rank, Group& group) {
    Array array = numbers(rank, Dtype::float32, 1000);
    finish(*start(group, {1000, Dtype::float32, Dtype::float32, Op::sum, 0}, &array));
    if (rank == 0) return;  // and closes
    const auto work = start(group, {1000, Dtype::float32, Dtype::float32, Op::sum, 0}, &array, 20);
    CHECK(work->wait(soon(10)));
    CHECK(work->fault().kind == FaultKind::rank_lost);
    CHECK(work->fault().text.find("rank 0") != std::string::npos);
  });
}

TEST(a_reducer_that_stops_is_named) {
  std::vector<std::unique_ptr<Reducer>> reducers;
  for (int i = 0; i < 2; ++i) reducers.push_back(std::make_unique<Reducer>(ReducerOptions{.shm = false}));
  const std::string address = reducers[1]->address();
  std::atomic<int> begun{0};
  run_ranks(
      {2, 2, {0, 0, 0.5, 0.5}},
      [&](uint32_t rank, Group& group) {
        Array array = numbers(rank, Dtype::float32, 100'000);
        const Shape shape{100'000, Dtype::float32, Dtype::float32, Op::sum, 0};
        finish(*start(group, shape, &array));
        for (++begun; begun < 2;) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (rank == 0) reducers[1]->close(Deadline::after(0));
        const auto work = start(group, shape, &array, 20);
        CHECK(work->wait(soon(10)));
        CHECK(work->fault().kind == FaultKind::reducer_lost);
        CHECK(work->fault().text.find(address) != std::string::npos);
      },
      &reducers);
}

TEST(an_abort_ends_the_group_everywhere_with_its_reason) {
  run_ranks({.world = 3}, [&](uint32_t rank, Group& group) {
    Array array = numbers(rank, Dtype::float32, 100'000);
    if (rank == 0) {
      group.abort("out of cheese");
      return;
    }
    const auto work = start(group, {100'000, Dtype::float32, Dtype::float32, Op::sum, 0}, &array, 20);
    CHECK(work->wait(soon(10)));
    CHECK(work->fault().text.find("out of cheese") != std::string::npos);
  });
}

TEST(one_reducer_serves_many_groups_and_a_failed_group_affects_no_other) {
  std::vector<std::unique_ptr<Reducer>> reducers;
  reducers.push_back(std::make_unique<Reducer>(ReducerOptions{.shm = false}));
  std::vector<std::thread> crews;
  for (int crew = 0; crew < 4; ++crew) {
    crews.emplace_back([&, crew] {
      run_ranks(
          {2, 1, {0, 0, 1}},
          [&](uint32_t rank, Group& group) {
            for (int i = 0; i < 20; ++i) {
              Shape shape{20'000, Dtype::float32, Dtype::float32, Op::sum, 0};
              Array array = numbers(rank + 7 * i, Dtype::float32, 20'000);
              if (crew == 0 && i == 3 && rank == 1) shape.count = 19'000;
              const auto work = start(group, shape, &array, 20);
              CHECK(work->wait(soon(30)));
              if (crew == 0 && i >= 3) {
                CHECK(work->fault().kind == FaultKind::disagree);
              } else {
                CHECK(work->fault().kind == FaultKind::none && array == reference(7 * i, 2, shape));
              }
            }
          },
          &reducers);
    });
  }
  for (std::thread& crew : crews) crew.join();
  for (int i = 0; i < 100 && reducers[0]->counts().groups != 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const ReducerCounts counts = reducers[0]->counts();
  CHECK_EQ(counts.groups, 0u);
  CHECK_EQ(counts.groups_served, 4u);
  CHECK_EQ(counts.groups_failed, 1u);
  CHECK_EQ(counts.memory_bytes, 0u);
}

TEST(threads_of_a_reducer_serve_many_groups_at_once_each_with_a_share_on_every_thread) {
  std::vector<std::unique_ptr<Reducer>> reducers;
  reducers.push_back(std::make_unique<Reducer>(ReducerOptions{.shm = false, .threads = 3}));
  std::vector<std::thread> crews;
  for (int crew = 0; crew < 4; ++crew) {
    crews.emplace_back([&, crew] {
      run_ranks(
          {.world = 2, .reducers = 1, .shares = {0, 0, 0.2, 0.3, 0.5}, .reducer_threads = 3},
          [&](uint32_t rank, Group& group) {
            for (int i = 0; i < 20; ++i) {
              const Shape shape{20'000 + 100 * uint64_t(i), Dtype::float32, Dtype::float32, Op::sum, 0};
              Array array = numbers(rank + 7 * i + crew, Dtype::float32, shape.count);
              const auto work = start(group, shape, &array, 20);
              CHECK(work->wait(soon(30)));
              CHECK(work->fault().kind == FaultKind::none && array == reference(7 * i + crew, 2, shape));
            }
          },
          &reducers);
    });
  }
  for (int i = 0; i < 50; ++i) reducers[0]->counts();
  for (std::thread& crew : crews) crew.join();
  for (int i = 0; i < 100 && reducers[0]->counts().groups != 0; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const ReducerCounts counts = reducers[0]->counts();
  CHECK_EQ(counts.groups, 0u);
  CHECK_EQ(counts.groups_served, 4u);
  CHECK_EQ(counts.groups_failed, 0u);
  CHECK_EQ(counts.memory_bytes, 0u);
}

TEST(a_reducer_holds_windows_and_not_arrays) {
  std::vector<std::unique_ptr<Reducer>> reducers;
  reducers.push_back(std::make_unique<Reducer>(ReducerOptions{.shm = false, .max_window_bytes = 1 << 20}));
  std::atomic<uint64_t> most{0};
  std::atomic<bool> over{false};
  std::thread watcher([&] {
    while (!over) {
      most = std::max(most.load(), reducers[0]->counts().memory_bytes);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  run_ranks(
      {2, 1, {0, 0, 1}},
      [&](uint32_t rank, Group& group) {
        Array array = numbers(rank, Dtype::float32, 8 << 20);
        if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
        finish(*start(group, {8 << 20, Dtype::float32, Dtype::float32, Op::sum, 0}, &array));
      },
      &reducers);
  over = true;
  watcher.join();
  CHECK(most > 0 && most < (4u << 20));  // of 64 MB
}

TEST(an_unauthenticated_rank_is_refused_and_counted) {
  ReducerOptions options;
  options.secret = "the right one";
  std::vector<std::unique_ptr<Reducer>> reducers;
  reducers.push_back(std::make_unique<Reducer>(options));
  GroupOptions asks;
  asks.reducers = {reducers[0]->address()};
  asks.shares = {0, 1};
  asks.secret = "the wrong one";
  Group group(asks);
  CHECK_THROWS(untrusted, group.connect({group.address()}, soon(5)));
  // The listener counts once it has seen what the dialer has seen already.
  for (const Deadline late = soon(); reducers[0]->counts().refused == 0 && !late.passed();) ::usleep(1000);
  CHECK(reducers[0]->counts().refused >= 1);
  asks.secret = "the right one";
  Group right(asks);
  right.connect({right.address()}, soon(5));
  Array array = numbers(1, Dtype::float32, 100'000), same = array;
  finish(*start(right, {100'000, Dtype::float32, Dtype::float32, Op::sum, 0}, &array));
  CHECK(array == same);
  right.close(soon(5));
  CHECK_THROWS(untrusted, Reducer(ReducerOptions{.host = "0.0.0.0"}));
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
