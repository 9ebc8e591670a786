// Life of groups and reducers: close() beside every other call and beside itself, drops with work under way, and memory
// that runs out on their threads. Each race runs a few rounds at random delays; GEARTRAIN_TEST_ROUNDS=1000 runs as
// many.

#include <cstdlib>
#include <latch>
#include <new>

#include "tests/collectives/ranks.h"

namespace {

// Allocations on threads of the library fail once this many more have succeeded; negative: none fails.
std::atomic<int64_t> allocations_left{-1};
// Test threads allocate as they please.
thread_local bool never_fails = false;

// Only the test sets the count back: a thread that is late must not make the next round's allocations fail.
bool used_up() {
  int64_t left = allocations_left.load();
  while (left > 0 && !allocations_left.compare_exchange_weak(left, left - 1)) {
  }
  return left == 0;
}

}  // namespace

void* operator new(size_t bytes) {
  if (!never_fails && used_up()) throw std::bad_alloc();
  if (void* const found = std::malloc(bytes == 0 ? 1 : bytes)) return found;
  throw std::bad_alloc();
}
void operator delete(void* at) noexcept {
  std::free(at);
}
void operator delete(void* at, size_t) noexcept {
  std::free(at);
}

namespace geartrain {
namespace {

uint64_t rounds(uint64_t otherwise) {
  const char* const given = std::getenv("GEARTRAIN_TEST_ROUNDS");
  return given == nullptr ? otherwise : std::strtoull(given, nullptr, 10);
}

constexpr Shape kShape{20'000, Dtype::float32, Dtype::float32, Op::sum, 0};

std::shared_ptr<Work> start(Group& group, Array* array, double timeout_s = 60) {
  return group.all_reduce(kShape, array->data(), array->data(), timeout_s);
}

// Connected groups of this many ranks, and reducers if any, with a share for each of their threads.
struct Crews {
  explicit Crews(uint32_t world, uint32_t reducer_count = 0, uint32_t reducer_threads = 1) {
    Crew crew{.world = world};
    std::vector<std::string> places, addresses;
    for (uint32_t i = 0; i < reducer_count; ++i) {
      reducers.push_back(std::make_unique<Reducer>(ReducerOptions{.shm = false, .threads = reducer_threads}));
      for (uint32_t thread = 0; thread < reducer_threads; ++thread) places.push_back(reducers.back()->address());
    }
    if (reducer_count != 0) {
      crew.shares.assign(world, 0.0);
      crew.shares.resize(world + places.size(), 1.0 / static_cast<double>(places.size()));
    }
    for (uint32_t rank = 0; rank < world; ++rank) {
      groups.push_back(std::make_unique<Group>(options_of(crew, rank, places)));
      addresses.push_back(groups.back()->address());
    }
    std::vector<std::thread> threads;
    for (const auto& group : groups) threads.emplace_back([&] { group->connect(addresses, soon(60)); });
    for (std::thread& thread : threads) thread.join();
  }
  std::vector<std::unique_ptr<Reducer>> reducers;
  std::vector<std::unique_ptr<Group>> groups;
};

// Runs all at once, each after a random delay of up to `most_us`.
void race(std::mt19937_64& random, uint64_t most_us, const std::vector<std::function<void()>>& calls) {
  std::latch ready(static_cast<ptrdiff_t>(calls.size()));
  std::vector<std::thread> threads;
  for (const auto& call : calls) {
    const uint64_t delay_us = random() % most_us;
    threads.emplace_back([&ready, &call, delay_us] {
      ready.arrive_and_wait();
      std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      call();
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// What a call beside a close may do: succeed, or be refused because the group was closed.
template <typename Call>
void may_be_refused(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.kind == ErrorKind::hung_up);
  }
}

TEST(a_group_is_closed_by_many_threads_at_once_beside_every_other_call) {
  std::mt19937_64 random(1);
  for (uint64_t round = 0; round < rounds(40); ++round) {
    Crews crew(2);
    Group& group = *crew.groups[0];
    std::vector<Array> arrays(3, Array(kShape.count * 4));
    const auto operation = [&](size_t i) {
      return [&, i] {
        may_be_refused([&] {
          const auto work = start(*crew.groups[i % 2], &arrays[i]);
          CHECK(work->wait(soon(20)));
        });
      };
    };
    const auto close = [&] { group.close(soon(20)); };
    race(random, 1500,
         {close, close, close, operation(0), operation(1), operation(2),
          [&] { may_be_refused([&] { group.counts(); }); }, [&] { may_be_refused([&] { group.abort("enough"); }); },
          [&] { static_cast<void>(group.fault().members.size()); }});
    CHECK_THROWS(hung_up, start(group, &arrays[0]));
    CHECK_THROWS(hung_up, group.counts());
    CHECK_THROWS(hung_up, group.connect({group.address(), group.address()}, soon(1)));
    group.close(soon(1));
  }
}

TEST(a_close_beside_a_blocked_wait_returns_within_a_second) {
  for (const uint32_t reducers : {0u, 1u}) {
    Crews crew(3, reducers);
    Array array(kShape.count * 4), done(kShape.count * 4);
    // Rank 2 takes part in nothing; one operation of the others is blocked, and their closes have a minute.
    const auto work = start(*crew.groups[0], &array), other = start(*crew.groups[1], &done);
    std::thread waiter([&] { CHECK(work->wait(soon(60))); });
    const uint64_t began_ns = monotonic_ns();
    crew.groups[0]->close(Deadline::after(60));
    CHECK(testing::within(began_ns, 1));
    waiter.join();
    CHECK(testing::within(began_ns, 1));
    CHECK(work->fault().kind == FaultKind::closed);
    CHECK(other->wait(soon(10)));
    CHECK(other->fault().kind == FaultKind::rank_lost);
    CHECK(other->fault().members == std::vector<uint32_t>{0});
  }
}

TEST(what_is_complete_here_reaches_the_others_before_a_close_ends) {
  std::mt19937_64 random(2);
  for (uint64_t round = 0; round < rounds(20); ++round) {
    Crews crew(2);
    std::vector<Array> arrays{numbers(5, Dtype::float32, kShape.count), numbers(6, Dtype::float32, kShape.count)};
    const auto late = start(*crew.groups[1], &arrays[1]);
    CHECK(start(*crew.groups[0], &arrays[0])->wait(soon(20)));
    crew.groups[0]->close(soon(20));
    CHECK(late->wait(soon(20)));
    CHECK(late->fault().kind == FaultKind::none);
    CHECK(arrays[0] == arrays[1]);
  }
}

TEST(a_group_is_dropped_with_operations_under_way) {
  std::mt19937_64 random(3);
  for (uint64_t round = 0; round < rounds(40); ++round) {
    Crews crew(2, round % 2 == 0 ? 0 : 1);
    std::vector<std::shared_ptr<Work>> works;
    {
      std::vector<std::unique_ptr<Array>> arrays;
      for (size_t i = 0; i < 12; ++i) {
        arrays.push_back(std::make_unique<Array>(kShape.count * 4));
        works.push_back(start(*crew.groups[i % 2], arrays.back().get()));
      }
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 1500));
      crew.groups.clear();
    }  // nothing touches the arrays any more, which ASan would see
    for (const auto& work : works) CHECK(work->done());
  }
}

TEST(a_connect_beside_a_close_ends) {
  std::mt19937_64 random(4);
  for (uint64_t round = 0; round < rounds(20); ++round) {
    Crew crew{.world = 3};
    std::vector<std::unique_ptr<Group>> groups;
    std::vector<std::string> addresses;
    for (uint32_t rank = 0; rank < 3; ++rank) {
      groups.push_back(std::make_unique<Group>(options_of(crew, rank, {})));
      addresses.push_back(groups.back()->address());
    }
    const uint64_t began_ns = monotonic_ns();
    std::vector<std::function<void()>> calls;
    for (uint32_t rank = 0; rank < 2; ++rank) {  // the third never connects
      calls.push_back([&, rank] {
        try {
          groups[rank]->connect(addresses, soon(60));
          testing::failed(__FILE__, __LINE__, "connected");
        } catch (const Error& error) {
          // Of kind frame: another program has the port of a rank that has closed.
          if (error.kind != ErrorKind::hung_up && error.kind != ErrorKind::peer_lost &&
              error.kind != ErrorKind::argument && error.kind != ErrorKind::frame) {
            testing::failed(__FILE__, __LINE__, error.what());
          }
        }
      });
      calls.push_back([&, rank] { groups[rank]->close(soon(30)); });
    }
    race(random, 20'000, calls);
    CHECK(testing::within(began_ns, 5));
  }
}

TEST(a_reducer_is_closed_by_many_threads_at_once_beside_its_groups) {
  std::mt19937_64 random(5);
  for (uint64_t round = 0; round < rounds(40); ++round) {
    Crews crew(2, 2, 1 + round % 3);
    Reducer& reducer = *crew.reducers[0];
    std::vector<Array> arrays(2, Array(kShape.count * 4));
    const auto operation = [&](size_t rank) {
      return [&, rank] { CHECK(start(*crew.groups[rank], &arrays[rank])->wait(soon(20))); };
    };
    const auto close = [&] { reducer.close(Deadline::after(0)); };
    race(random, 1500,
         {close, close, close, operation(0), operation(1), [&] { may_be_refused([&] { reducer.counts(); }); }});
    CHECK_THROWS(hung_up, reducer.counts());
    reducer.close(soon(1));
  }
}

TEST(a_second_close_with_less_time_hurries_the_first) {
  Crews crew(2, 1);
  const uint64_t began_ns = monotonic_ns();
  std::thread patient([&] { crew.reducers[0]->close(Deadline::after(600)); });
  crew.reducers[0]->close(Deadline::after(0.05));
  CHECK(testing::within(began_ns, 5));
  patient.join();
  CHECK(testing::within(began_ns, 5));
}

// Any allocation on a thread of the library may be the one that fails. The group ends, on all ranks, and no wait hangs.
TEST(memory_that_runs_out_ends_the_group_and_not_the_process) {
  never_fails = true;
  for (uint64_t round = 0; round < rounds(60); ++round) {
    Crews crew(2, round % 3 == 0 ? 1 : 0);
    std::vector<Array> arrays(12, Array(kShape.count * 4));
    std::vector<std::shared_ptr<Work>> works;
    allocations_left = static_cast<int64_t>(round);
    for (size_t i = 0; i < arrays.size(); ++i) works.push_back(start(*crew.groups[i % 2], &arrays[i], 20));
    for (const auto& work : works) {
      CHECK(work->wait(soon(30)));
      const FaultKind kind = work->fault().kind;
      CHECK(kind == FaultKind::none || kind == FaultKind::aborted || kind == FaultKind::rank_lost ||
            kind == FaultKind::reducer_lost);
    }
    allocations_left = -1;
    if (round == 0) {
      CHECK(works[0]->fault().kind == FaultKind::aborted || works[0]->fault().kind == FaultKind::reducer_lost);
      CHECK(works[0]->fault().text.find("memory") != std::string::npos);
    }
  }
  never_fails = false;
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
