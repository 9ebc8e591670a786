// Callers that wait for operations of ranks of one host, and run the group's loop meanwhile: sums, deadlines, faults
// and ends as without it. As it is by default, never, and for ranks that own their cores.

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <latch>

#include "tests/collectives/ranks.h"

namespace geartrain {
namespace {

constexpr double kOwnCores = 1e6;

Crew spinning(uint32_t world, double spin_us) {
  return {.world = world, .shm = true, .options = [spin_us](uint32_t, GroupOptions* options) {
            options->spin_us = spin_us;
          }};
}

constexpr Shape shape_of(uint64_t count) {
  return {count, Dtype::float32, Dtype::float32, Op::sum, 0};
}

std::shared_ptr<Work> start(Group& group, Array& array, double timeout_s = 60, bool waits = true) {
  return group.all_reduce(shape_of(array.size() / 4), array.data(), array.data(), timeout_s, waits);
}

TEST(sums_are_in_rank_order_whoever_runs_the_loop) {
  for (const double spin_us : {-1.0, 0.0, kOwnCores}) {
    for (const uint32_t world : {2u, 3u, 5u}) {
      const size_t n = kThreadSanitizer ? 40 : 150;
      run_ranks(spinning(world, spin_us), [&](uint32_t rank, Group& group) {
        const std::vector<Shape> all = shapes(7, n);
        std::vector<std::pair<std::shared_ptr<Work>, Array>> begun;
        for (size_t i = 0; i < all.size(); ++i) {
          // One after the other, or several in progress.
          begun.emplace_back(nullptr, numbers(100 * i + rank, all[i].dtype, all[i].count));
          Array& array = begun.back().second;
          begun.back().first = group.all_reduce(all[i], array.data(), array.data(), 60, i % 3 == 0);
          if (i % 3 == 1) continue;
          for (size_t j = 0; j < begun.size(); ++j) {
            CHECK(begun[j].first->wait(soon(60)));
            CHECK(begun[j].first->fault().kind == FaultKind::none);
            const size_t number = i + 1 + j - begun.size();
            CHECK(begun[j].second == reference(100 * number, world, all[number]));
          }
          begun.clear();
        }
      });
    }
  }
}

TEST(who_owns_its_core_does_its_operations_itself) {
  if (kThreadSanitizer) return;  // its threads are too slow for the time that is measured
  // Beside other programs its core is not always its own: a round without them has to come.
  const uint64_t began_ns = monotonic_ns();
  uint64_t most = 0;
  while (most <= 3000 && testing::within(began_ns, 60)) {
    std::atomic<uint64_t> by_callers{0}, operations{0};
    run_ranks(spinning(2, kOwnCores), [&](uint32_t, Group& group) {
      Array array(4096);
      for (int i = 0; i < 2000; ++i) CHECK(start(group, array)->wait(soon(60)));
      by_callers += group.counts().by_callers;
      operations += group.counts().operations;
    });
    CHECK_EQ(operations.load(), 4000u);
    most = std::max(most, by_callers.load());
  }
  CHECK(most > 2000);
}

// Until the threads of all groups' loops sleep.
void let_loops_sleep() {
  const uint64_t began_ns = monotonic_ns();
  for (int quiet = 0; quiet < 3 && testing::within(began_ns, 20);) {
    bool all = true;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name, line;
      std::getline(std::ifstream(task.path() / "comm"), name);
      std::getline(std::ifstream(task.path() / "stat"), line);
      if (name == "geartrain group") all &= line.find(") S ") != std::string::npos;
    }
    quiet = all ? quiet + 1 : 0;
    ::usleep(1000);
  }
}

// Who begins an operation and waits for it at once does all of it, of any size, and with more ranks than cores too:
// nothing in between wakes its loop's thread. That looks by itself once a second, which is all that depends on time.
TEST(large_operations_are_done_by_who_begins_and_waits) {
  if (kThreadSanitizer) return;
  constexpr uint64_t kOperations = 20;
  for (const auto& [world, spin_us] : {std::pair{2u, kOwnCores}, {2u, -1.0}, {available_cores() + 1, -1.0}}) {
    std::vector<std::unique_ptr<Group>> groups;
    std::vector<std::string> addresses;
    const Crew crew = spinning(world, spin_us);
    for (uint32_t rank = 0; rank < world; ++rank) {
      groups.push_back(std::make_unique<Group>(options_of(crew, rank, {})));
      addresses.push_back(groups.back()->address());
    }
    const auto all_at_once = [&](const std::function<void(uint32_t)>& act) {
      std::vector<std::thread> threads;
      for (uint32_t rank = 0; rank < world; ++rank) threads.emplace_back(act, rank);
      for (std::thread& thread : threads) thread.join();
    };
    all_at_once([&](uint32_t rank) { groups[rank]->connect(addresses, soon(60)); });
    std::vector<Array> arrays(world, Array(4 << 20));
    const uint64_t began_ns = monotonic_ns();
    for (uint64_t i = 0; i < kOperations; ++i) {
      std::vector<std::shared_ptr<Work>> works;
      for (uint32_t rank = 0; rank < world; ++rank) {
        let_loops_sleep();  // what the ranks before have sent has been taken
        works.push_back(start(*groups[rank], arrays[rank]));
      }
      all_at_once([&](uint32_t rank) { CHECK(works[rank]->wait(soon(60))); });
    }
    const uint64_t looks = 1 + (monotonic_ns() - began_ns) / 1'000'000'000;
    for (const auto& group : groups) {
      CHECK_EQ(group->counts().operations, kOperations);
      CHECK(group->counts().by_callers + looks >= kOperations);
    }
    all_at_once([&](uint32_t rank) { groups[rank]->close(soon(20)); });
  }
}

// A share that is read is worked on in pieces, which are tasks that the rank posts itself.
TEST(numbers_that_are_read_are_worked_on_by_who_waits) {
  if (kThreadSanitizer) return;
  const uint64_t began_ns = monotonic_ns();
  uint64_t most = 0;
  while (most < 195 && testing::within(began_ns, 60)) {
    std::atomic<uint64_t> by_callers{0};
    Crew crew = spinning(2, kOwnCores);
    crew.options = [](uint32_t, GroupOptions* options) {
      options->spin_us = kOwnCores;
      options->least_exposed_bytes = 1;
    };
    run_ranks(crew, [&](uint32_t, Group& group) {
      Array array(1 << 20);
      for (int i = 0; i < 100; ++i) CHECK(start(group, array)->wait(soon(60)));
      CHECK(group.counts().read_bytes >= 100 * array.size());
      by_callers += group.counts().by_callers;
    });
    most = std::max(most, by_callers.load());
  }
  CHECK(most >= 195);
}

TEST(a_profile_has_the_stages_of_calls) {
  constexpr int kCalls = 20;
  Crew crew = spinning(4, -1);
  run_ranks(crew, [&](uint32_t rank, Group& group) {
    Array array = numbers(rank, Dtype::float32, 1 << 17);
    group.profile(true);
    for (int i = 0; i < kCalls; ++i) CHECK(start(group, array)->wait(soon(60)));
    const StageTimes found = group.counts().stages;
    group.profile(false);
    for (const Stage stage : {Stage::protocol, Stage::copy_out, Stage::copy_in, Stage::sum, Stage::deliver}) {
      CHECK(found.ns[static_cast<size_t>(stage)] > 0);
      CHECK(found.entered[static_cast<size_t>(stage)] >= kCalls);
    }
    CHECK_EQ(found.ns[static_cast<size_t>(Stage::read)], 0u);
    CHECK(start(group, array)->wait(soon(60)));
    CHECK_EQ(group.counts().stages.entered[static_cast<size_t>(Stage::sum)],
             found.entered[static_cast<size_t>(Stage::sum)]);  // not measured any more
  });
}

TEST(operations_that_nobody_waits_for_go_on) {
  for (const double spin_us : {-1.0, kOwnCores}) {
    run_ranks(spinning(2, spin_us), [](uint32_t, Group& group) {
      for (int i = 0; i < 20; ++i) {
        Array array(i % 2 == 0 ? 4096 : 400'000);
        const auto work = start(group, array, 60, false);
        const uint64_t began_ns = monotonic_ns();
        while (!work->done() && testing::within(began_ns, 0.9)) ::usleep(500);
        CHECK(work->done());  // before the loop's thread looks by itself
      }
    });
  }
}

TEST(a_rank_that_does_not_come_is_named_at_the_deadline_by_who_spins) {
  std::latch over(1);
  run_ranks(spinning(2, kOwnCores), [&](uint32_t rank, Group& group) {
    Array array(4096);
    CHECK(start(group, array)->wait(soon(60)));
    if (rank == 1) return over.wait();
    const uint64_t began_ns = monotonic_ns();
    const auto work = start(group, array, 0.6);
    CHECK(work->wait(soon(60)));
    CHECK(work->fault().kind == FaultKind::timed_out);
    CHECK(work->fault().members == std::vector<uint32_t>{1});
    CHECK(testing::within(began_ns, 2));
    over.count_down();
  });
}

TEST(a_rank_that_is_lost_or_leaves_is_named_at_once_by_who_spins) {
  for (const bool leaves : {false, true}) {
    std::vector<std::unique_ptr<Group>> groups;
    std::vector<std::string> addresses;
    const Crew crew = spinning(2, 1e8);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      groups.push_back(std::make_unique<Group>(options_of(crew, rank, {})));
      addresses.push_back(groups.back()->address());
    }
    std::thread other([&] { groups[1]->connect(addresses, soon(60)); });
    groups[0]->connect(addresses, soon(60));
    other.join();
    Array array(4096);
    const auto work = start(*groups[0], array);
    std::thread ends([&] {
      ::usleep(30'000);
      if (leaves) groups[1]->close(soon(5));
      groups[1].reset();
    });
    const uint64_t began_ns = monotonic_ns();
    CHECK(work->wait(soon(60)));
    CHECK(testing::within(began_ns, 2));
    CHECK(work->fault().kind == FaultKind::rank_lost && work->fault().members == std::vector<uint32_t>{1});
    ends.join();
  }
}

TEST(a_group_is_closed_or_destroyed_beside_who_spins) {
  std::mt19937_64 random(3);
  for (int round = 0; round < 40; ++round) {
    std::vector<std::unique_ptr<Group>> groups;
    std::vector<std::string> addresses;
    const Crew crew = spinning(2, round % 2 == 0 ? 1e8 : -1);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      groups.push_back(std::make_unique<Group>(options_of(crew, rank, {})));
      addresses.push_back(groups.back()->address());
    }
    std::thread other([&] { groups[1]->connect(addresses, soon(60)); });
    groups[0]->connect(addresses, soon(60));
    other.join();
    std::vector<Array> arrays(3, Array(4096));
    std::vector<std::shared_ptr<Work>> works;
    for (Array& array : arrays) works.push_back(start(*groups[0], array, 60, false));
    std::vector<std::thread> waits;
    for (const auto& work : works) {
      waits.emplace_back([&] {
        CHECK(work->wait(soon(60)));
        CHECK(work->fault().kind != FaultKind::none);
      });
    }
    ::usleep(random() % 3000);
    const uint64_t began_ns = monotonic_ns();
    if (round % 4 < 2) groups[0]->close(soon(10));
    groups[0].reset();
    for (std::thread& wait : waits) wait.join();
    CHECK(testing::within(began_ns, 2));
  }
}

TEST(many_threads_wait_for_operations_of_one_group) {
  constexpr int kThreads = 4, kEach = kThreadSanitizer ? 25 : 100;
  for (const double spin_us : {-1.0, 0.0, 200.0, kOwnCores}) {
    run_ranks(spinning(2, spin_us), [](uint32_t rank, Group& group) {
      // All ranks begin them in one order; whichever thread does is not the one that waits.
      std::vector<Array> arrays;
      for (int i = 0; i < kThreads * kEach; ++i) arrays.push_back(numbers(i + rank, Dtype::float32, 16 + i));
      std::vector<std::shared_ptr<Work>> works(arrays.size());
      std::atomic<int> begun{0};
      std::vector<std::thread> threads;
      for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([&, t] {
          for (int i = t; i < kThreads * kEach; i += kThreads) {
            while (begun.load() <= i) std::this_thread::yield();
            CHECK(works[i]->wait(soon(60)));
            CHECK(arrays[i] == reference(i, 2, shape_of(16 + i)));
          }
        });
      }
      for (size_t i = 0; i < arrays.size(); ++i) {
        works[i] = start(group, arrays[i], 60, false);
        begun.store(static_cast<int>(i) + 1);
      }
      for (std::thread& thread : threads) thread.join();
    });
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
