// Reduce-scatter, all-gather, all-to-all and broadcast: right to the bit, in every order and size, and their failures.

#include <atomic>

#include "tests/collectives/ranks.h"
#include "tests/collectives/readers.h"

namespace geartrain {
namespace {

void finish(Work& work) {
  CHECK(work.wait(soon(90)));
  if (work.fault().kind != FaultKind::none) testing::failed(__FILE__, __LINE__, "failed: ", work.fault().text);
}

// One collective of a random kind, type and sizes, the same on all ranks, and what is expected of it on one.
struct Case {
  Shape shape;
  uint32_t world = 0;
  uint64_t seed = 0;
  std::vector<std::vector<uint64_t>> counts;  // [from][to], elements

  Case(uint64_t seed, uint32_t world) : world(world), seed(seed), counts(world, std::vector<uint64_t>(world)) {
    std::mt19937_64 random(seed);
    shape.collective = static_cast<Collective>(1 + random() % 4);  // those that are asked for
    shape.dtype = shape.wire = static_cast<Dtype>(random() % kDtypes);
    shape.op = static_cast<Op>(random() % kOps);
    if (!reduces(shape.op, shape.dtype)) shape.op = Op::sum;
    shape.root = static_cast<uint32_t>(random() % world);
    const uint64_t sizes[] = {0, 1, 15, 4097, 9001, random() % 20'000};
    const uint64_t even = sizes[random() % 6];
    const bool uneven = random() % 2 == 0;
    for (auto& row : counts) {
      for (uint64_t& count : row) count = uneven ? sizes[random() % 6] : even;
    }
    for (uint32_t from = 0; from < world; ++from) {
      for (uint32_t to = 0; to < world; ++to) {
        if (shape.collective == Collective::reduce_scatter) counts[from][to] = counts[0][to];
        if (shape.collective == Collective::all_gather) counts[from][to] = counts[from][0];
        if (shape.collective == Collective::broadcast) counts[from][to] = counts[0][0];
      }
    }
  }

  Array from(uint32_t rank, uint32_t to) const {
    const bool same = shape.collective == Collective::all_gather || shape.collective == Collective::broadcast;
    return numbers(seed * 100 + rank * 10 + (same ? 0 : to), shape.dtype, counts[rank][to]);
  }

  std::vector<Array> sent(uint32_t rank) const {
    const bool one = shape.collective == Collective::all_gather || shape.collective == Collective::broadcast;
    std::vector<Array> out;
    for (uint32_t to = 0; to < (one ? 1 : world); ++to) out.push_back(from(rank, to));
    return out;
  }

  std::vector<Array> expected(uint32_t rank) const {
    if (shape.collective == Collective::broadcast) return {from(shape.root, rank)};
    std::vector<Array> all;
    for (uint32_t other = 0; other < world; ++other) all.push_back(from(other, rank));
    if (shape.direct()) return all;
    std::vector<const std::byte*> inputs;
    for (const Array& one : all) inputs.push_back(one.data());
    Array sum(all[0].size());
    reduce(shape.op, shape.dtype, inputs, sum.data(), counts[0][rank]);
    return {sum};
  }
};

std::vector<Segment> segments(std::vector<Array>& arrays, Dtype dtype) {
  std::vector<Segment> out;
  for (Array& array : arrays) out.push_back({array.data(), array.size() / bytes_of(dtype)});
  return out;
}

struct Running {
  std::vector<Array> sent, received;
  std::shared_ptr<Work> work;

  Running(Group& group, const Case& given, uint32_t rank, double timeout_s = 60) : sent(given.sent(rank)) {
    for (const Array& array : given.expected(rank)) received.emplace_back(array.size());
    std::vector<Segment> in = segments(sent, given.shape.dtype), out = segments(received, given.shape.dtype);
    if (given.shape.collective == Collective::broadcast) out = in;
    work = group.exchange(given.shape, in, out, timeout_s);
  }
  const std::vector<Array>& result(const Case& given) const {
    return given.shape.collective == Collective::broadcast ? sent : received;
  }
};

void runs_right(const Crew& crew, uint64_t seed, size_t operations) {
  run_ranks(crew, [&](uint32_t rank, Group& group) {
    std::vector<Case> cases;
    std::vector<std::unique_ptr<Running>> running;
    std::vector<std::pair<Array, std::shared_ptr<Work>>> between;
    between.reserve(operations);
    for (size_t i = 0; i < operations; ++i) {
      cases.emplace_back(seed + i, crew.world);
      running.push_back(std::make_unique<Running>(group, cases.back(), rank));
      // All-reduces are in the same order with them.
      between.emplace_back(numbers(seed + i + rank, Dtype::float32, 5000 * (i % 3)), nullptr);
      Array& array = between.back().first;
      between.back().second = group.all_reduce({array.size() / 4, Dtype::float32, Dtype::float32, Op::sum, 0},
                                               array.data(), array.data(), 60);
      if (i % 5 == 4) finish(*running.back()->work);
    }
    for (size_t i = 0; i < operations; ++i) {
      finish(*running[i]->work);
      if (running[i]->result(cases[i]) != cases[i].expected(rank)) {
        testing::failed(__FILE__, __LINE__, cases[i].shape.text(), ", case ", i, " on rank ", rank, " of ", crew.world);
      }
      finish(*between[i].second);
      const uint64_t count = 5000 * (i % 3);
      CHECK(between[i].first == reference(seed + i, crew.world, {count, Dtype::float32, Dtype::float32, Op::sum, 0}));
    }
  });
}

TEST(every_collective_on_any_number_of_ranks_is_right_to_the_bit) {
  for (const uint32_t world : {1u, 2u, 3u, 4u, 7u}) runs_right({.world = world}, 100 * world, world > 4 ? 10 : 25);
  for (const uint32_t world : {2u, 4u}) runs_right({.world = world, .shm = true}, 1000 * world, 25);
}

TEST(a_small_window_and_unequal_shares_only_take_longer) {
  runs_right({.world = 3, .fixed_window = 64 << 10}, 5000, 30);
  runs_right({.world = 3, .shares = {0.7, 0.2, 0.1}}, 6000, 30);
}

TEST(a_part_that_is_in_place_stays_right) {
  run_ranks({.world = 3, .shm = true}, [](uint32_t rank, Group& group) {
    constexpr uint64_t kCount = 30'000;
    const Shape shape{0, Dtype::float32, Dtype::float32, Op::sum, 0, Collective::all_gather, 0};
    Array all(3 * kCount * 4);
    const Array own = numbers(rank, Dtype::float32, kCount);
    std::memcpy(all.data() + rank * own.size(), own.data(), own.size());
    std::vector<Segment> parts;
    for (uint32_t r = 0; r < 3; ++r) parts.push_back({all.data() + r * own.size(), kCount});
    finish(*group.exchange(shape, {parts[rank]}, parts, 60));
    for (uint32_t r = 0; r < 3; ++r) {
      const Array expected = numbers(r, Dtype::float32, kCount);
      CHECK(std::memcmp(expected.data(), parts[r].at, expected.size()) == 0);
    }
    Shape scatter = shape;
    scatter.collective = Collective::reduce_scatter;
    scatter.op = Op::max;
    finish(*group.exchange(scatter, parts, {parts[rank]}, 60));
    CHECK(std::memcmp(numbers(rank, Dtype::float32, kCount).data(), parts[rank].at, own.size()) == 0);
    // Over what is still to be sent: refused.
    bool refused = false;
    try {
      group.exchange(scatter, parts, {{parts[(rank + 1) % 3].at, kCount}}, 60);
    } catch (const Error& error) {
      refused = error.kind == ErrorKind::argument;
    }
    CHECK(refused);
  });
}

TEST(rings_reducers_and_ranks_without_a_share_refuse_them) {
  const Crew crews[] = {{.world = 3, .ring = true}, {2, 1, {0.25, 0.25, 0.5}}, {.world = 2, .shares = {1, 0}}};
  for (const Crew& crew : crews) {
    run_ranks(crew, [&](uint32_t rank, Group& group) {
      const Case given(3, crew.world);
      bool refused = false;
      try {
        Running(group, given, rank);
      } catch (const Error& error) {
        refused = error.kind == ErrorKind::argument;
      }
      CHECK(refused);
    });
  }
}

// Of every kind: three ranks begin, the other does not come, or asks for another size or kind.
TEST(a_rank_that_does_not_come_is_named_and_one_that_disagrees_too) {
  for (const auto& [disagrees, shm] : {std::pair{false, false}, {true, false}, {false, true}, {true, true}}) {
    uint32_t seen = 0;
    for (uint64_t seed = 1; seen != 30; ++seed) {
      const Case given(seed, 4);
      const auto kind = 1u << static_cast<uint32_t>(given.shape.collective);
      const bool matters = given.counts[0][0] > 0 && given.counts[2][0] > 0 && given.shape.root != 2;
      if ((seen & kind) != 0 || !matters) continue;
      seen |= kind;
      std::atomic<int> waiting{3};
      run_ranks({.world = 4, .shm = shm}, [&, disagrees = disagrees](uint32_t rank, Group& group) {
        Case own = given;
        if (rank == 2 && !disagrees) {
          while (waiting > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          return;
        }
        if (rank == 2) own.shape.dtype = own.shape.wire = own.shape.dtype == Dtype::int8 ? Dtype::uint8 : Dtype::int8;
        if (rank == 2 && !reduces(own.shape.op, own.shape.dtype)) own.shape.op = Op::sum;
        const Running running(group, own, rank, disagrees ? 60 : 0.5);
        CHECK(running.work->wait(soon(60)));
        const Fault& fault = running.work->fault();
        // Who only receives may have received all.
        const bool may_succeed = given.shape.collective == Collective::broadcast && rank != given.shape.root;
        if (fault.kind != FaultKind::none || !may_succeed) {
          CHECK(fault.kind == (disagrees ? FaultKind::disagree : FaultKind::timed_out));
          const bool named = fault.text.find("rank 2") != std::string::npos;
          if (disagrees ? !named : fault.members != std::vector<uint32_t>{2}) {
            testing::failed(__FILE__, __LINE__, fault.text);
          }
        }
        --waiting;
      });
    }
  }
}

// On one host, where the root alone would know.
TEST(ranks_that_broadcast_from_two_roots_are_both_named) {
  for (const bool shm : {false, true}) {
    run_ranks({.world = 3, .shm = shm}, [](uint32_t rank, Group& group) {
      Case given(1, 3);
      given.shape = {0, Dtype::int32, Dtype::int32, Op::sum, 0, Collective::broadcast, rank == 1 ? 1u : 0u};
      for (auto& row : given.counts) row.assign(3, 50'000);
      const Running running(group, given, rank, 60);
      CHECK(running.work->wait(soon(60)));
      const Fault& fault = running.work->fault();
      if (rank == 2 && fault.kind == FaultKind::none) return;  // it may have received all from the first root
      if (fault.kind != FaultKind::disagree || fault.text.find("rank 1") == std::string::npos) {
        testing::failed(__FILE__, __LINE__, fault.text);
      }
    });
  }
}

TEST(what_is_exposed_in_pieces_arrives_whole) {
  for (const uint32_t world : {2u, 3u}) {
    run_ranks({.world = world, .shm = true}, [&](uint32_t rank, Group& group) {
      for (const Collective kind : {Collective::broadcast, Collective::all_gather, Collective::all_to_all}) {
        Case given(1, world);
        given.shape = {0, Dtype::uint8, Dtype::uint8, Op::sum, 0, kind, world - 1};
        for (auto& row : given.counts) row.assign(world, 2 * kExposedBytes + 12'345);
        Running running(group, given, rank);
        finish(*running.work);
        CHECK(running.result(given) == given.expected(rank));
      }
      // Each of those bytes was read, and none went through a ring.
      CHECK(group.counts().sent_shm < 100'000);
    });
  }
}

// The ranks that read are told so at once, whatever they were about to read.
TEST(what_was_exposed_is_withdrawn_with_a_fault) {
  for (int round = 0; round < 6; ++round) {
    run_ranks({.world = 3, .shm = true}, [&](uint32_t rank, Group& group) {
      Case given(1, 3);
      given.shape = {0, Dtype::uint8, Dtype::uint8, Op::sum, 0, Collective::broadcast, 0};
      for (auto& row : given.counts) row.assign(3, 4 * kExposedBytes);
      auto running = std::make_unique<Running>(group, given, rank);
      if (rank == 0) {
        if (round % 2 != 0) std::this_thread::yield();
        group.abort("on purpose");
      }
      CHECK(running->work->wait(soon(60)));
      const bool failed = running->work->fault().kind != FaultKind::none;
      if (failed) CHECK_EQ(static_cast<int>(running->work->fault().kind), static_cast<int>(FaultKind::aborted));
      if (!failed) CHECK(running->result(given) == given.expected(rank));
    });
  }
}

TEST(memory_that_was_sent_is_the_callers_again) {
  run_ranks({.world = 3, .shm = true}, [](uint32_t rank, Group& group) {
    for (uint64_t i = 0; i < 60; ++i) {
      Case given(7000 + i, 3);
      auto running = std::make_unique<Running>(group, given, rank);
      finish(*running->work);
      for (Array& array : running->sent) std::fill(array.begin(), array.end(), std::byte{0xAB});
      if (given.shape.collective != Collective::broadcast) CHECK(running->received == given.expected(rank));
    }
  });
}

// The last test: nothing is read from another rank's memory after it.
TEST(a_rank_that_loses_the_right_to_read_its_peers_goes_on_through_the_rings) {
  std::atomic<int> read{0};
  run_ranks({.world = 3, .shm = true}, [&](uint32_t rank, Group& group) {
    Case given(1, 3);
    const auto runs = [&](Collective kind) {
      given.shape = {0, Dtype::uint8, Dtype::uint8, Op::sum, 0, kind, 2};
      for (auto& row : given.counts) row.assign(3, 2 * kExposedBytes + 12'345);
      Running running(group, given, rank);
      finish(*running.work);
      CHECK(running.result(given) == given.expected(rank));
    };
    runs(Collective::all_gather);
    CHECK(group.counts().sent_shm < 100'000);
    ++read;
    if (rank == 0) {
      while (read < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      forbid_reading_across_processes();
      ++read;
    }
    // The others begin at once: it is lost while they read.
    for (const Collective kind : {Collective::all_gather, Collective::all_to_all, Collective::broadcast}) runs(kind);
    while (read < 4) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    runs(Collective::all_gather);
    CHECK_EQ(group.counts().read_denied, uint64_t{2});
    CHECK(group.counts().sent_shm > 4 * kExposedBytes);
  });
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
