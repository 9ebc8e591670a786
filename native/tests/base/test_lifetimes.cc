// Calls, closes, threads and forks of an object (base/lifetime.h), without the objects that build on it.

#include "base/lifetime.h"

#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/errors.h"
#include "tests/support/check.h"
#include "tests/support/child.h"

namespace geartrain {
namespace {

std::string refusal(const Lifetime& life) {
  try {
    life.check();
  } catch (const Error& error) {
    if (error.kind == ErrorKind::hung_up) return error.what();
  }
  return "";
}

struct Counter {
  uint64_t made_by = static_cast<uint64_t>(::getpid());
};

TEST(a_forked_child_is_refused_joins_no_thread_and_makes_its_own_object) {
  if (kThreadSanitizer) return;  // it ends a child that is forked beside threads
  std::atomic<bool> began{false}, over{false};
  Lifetime life("handle", "open it here");
  auto thread = std::make_unique<OwnThread>();
  thread->start("a thread", [&] {
    began = true;
    while (!over) ::usleep(1000);
  });
  // A thread that is starting may hold the lock of AddressSanitizer's allocator, which the child would wait for.
  while (!began) ::usleep(100);
  of_this_process<Counter>();
  CHECK_EQ(refusal(life), std::string());
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string said = refusal(life);
    life.close();
    thread.reset();
    const bool own = of_this_process<Counter>().made_by == static_cast<uint64_t>(::getpid());
    const bool told = said == "this handle belongs to the process that this one was forked from; open it here";
    ::_exit(own && told && forks() == 1 ? 0 : 1);
  }
  CHECK(testing::child_succeeds(child, 20));
  CHECK(!life.closed() && !life.forked());
  CHECK_EQ(of_this_process<Counter>().made_by, static_cast<uint64_t>(::getpid()));
  over = true;
  thread.reset();
}

TEST(of_two_that_close_one_waits_for_the_other_and_brings_its_deadline_nearer) {
  Lifetime life("handle");
  CHECK(life.close(Deadline::after(60)));
  CHECK_EQ(refusal(life), std::string("the handle was closed"));
  std::atomic<bool> returned{false};
  std::thread other([&] {
    CHECK(!life.close(Deadline::after(0)));
    CHECK(life.wait_until_left());
    returned = true;
  });
  const uint64_t began_ns = monotonic_ns();
  while (!life.deadline().passed() && testing::within(began_ns, 10)) ::usleep(100);
  CHECK(life.deadline().passed() && !returned);
  life.left();
  other.join();
  CHECK(returned);
}

TEST(a_call_that_begins_beside_a_close_ends_none_of_the_closers_own_waits) {
  const int rounds = 100;
  for (int round = 0; round < rounds; ++round) {
    Lifetime calls("handle");
    std::atomic<int> began{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&] {
        ++began;
        while (calls.enter()) calls.leave();
      });
    }
    while (began < 2) std::this_thread::yield();
    calls.close();
    CHECK(calls.drain(Deadline::after(60)));
    calls.drained();
    bool ends = false;
    for (int look = 0; look < 200; ++look) ends |= calls.must_end();
    CHECK(!ends);
    for (std::thread& thread : threads) thread.join();
    if (ends) return;
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
