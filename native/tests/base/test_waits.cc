// Timed waits by the monotonic clock: a mutex with and without the C library's call for it, and condition variables.

#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/condition_variable.h"
#include "base/event_loop.h"
#include "base/threads.h"
#include "base/timed_lock.h"
#include "tests/support/check.h"

namespace geartrain {
namespace {

// A robust mutex in memory that forked children share, as a store's.
class SharedMutex {
 public:
  SharedMutex()
      : mutex_(static_cast<pthread_mutex_t*>(
            ::mmap(nullptr, sizeof(pthread_mutex_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    pthread_mutexattr_t attributes;
    ::pthread_mutexattr_init(&attributes);
    ::pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    ::pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    ::pthread_mutex_init(mutex_, &attributes);
    ::pthread_mutexattr_destroy(&attributes);
  }
  ~SharedMutex() { ::munmap(mutex_, sizeof(pthread_mutex_t)); }
  SharedMutex(const SharedMutex&) = delete;
  SharedMutex& operator=(const SharedMutex&) = delete;
  pthread_mutex_t* get() { return mutex_; }

 private:
  pthread_mutex_t* mutex_;
};

// Each promise of lock_within, by the C library's call and by polling.
template <typename Body>
void both_ways(Body body) {
  for (const bool polled : {false, true}) {
    set_lock_polling(polled);
    CHECK(lock_is_polled() || !polled);
    body();
  }
  set_lock_polling(false);
}

TEST(a_held_mutex_times_out_and_not_too_early) {
  both_ways([] {
    SharedMutex mutex;
    CHECK_EQ(lock_within(mutex.get(), 1), 0);
    std::thread([&] {
      const uint64_t began = monotonic_ns();
      CHECK_EQ(lock_within(mutex.get(), 0.05), ETIMEDOUT);
      CHECK(monotonic_ns() - began >= 50'000'000u);
      CHECK_EQ(lock_within(mutex.get(), 0), ETIMEDOUT);
    }).join();
    ::pthread_mutex_unlock(mutex.get());
    CHECK_EQ(lock_within(mutex.get(), 0), 0);
    ::pthread_mutex_unlock(mutex.get());
  });
}

TEST(a_mutex_that_is_released_is_had_before_the_time_is_over) {
  both_ways([] {
    SharedMutex mutex;
    CHECK_EQ(lock_within(mutex.get(), 1), 0);
    std::thread waiter([&] {
      CHECK_EQ(lock_within(mutex.get(), 600), 0);
      ::pthread_mutex_unlock(mutex.get());
    });
    ::usleep(5'000);
    ::pthread_mutex_unlock(mutex.get());
    waiter.join();
  });
}

TEST(threads_that_contend_exclude_each_other) {
  both_ways([] {
    SharedMutex mutex;
    uint64_t counted = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int j = 0; j < 200; ++j) {
          if (lock_within(mutex.get(), 600) != 0) return;
          counted = counted + 1;
          ::pthread_mutex_unlock(mutex.get());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(counted, uint64_t{800});
  });
}

TEST(an_owner_that_died_is_reported) {
  if (kThreadSanitizer) return;  // forks
  both_ways([] {
    SharedMutex mutex;
    const pid_t child = ::fork();
    if (child == 0) {
      ::pthread_mutex_lock(mutex.get());
      ::_exit(0);
    }
    int status = 0;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    CHECK_EQ(lock_within(mutex.get(), 1), EOWNERDEAD);
    CHECK_EQ(::pthread_mutex_consistent(mutex.get()), 0);
    ::pthread_mutex_unlock(mutex.get());
  });
}

TEST(a_condition_wakes_and_times_out) {
  std::mutex mutex;
  ConditionVariable changed;
  bool done = false;
  std::unique_lock lock(mutex);
  const uint64_t began = monotonic_ns();
  CHECK(!changed.wait_for(lock, std::chrono::milliseconds(20), [&] { return done; }));
  CHECK(monotonic_ns() - began >= 20'000'000u);
  CHECK(!changed.wait_for(lock, std::chrono::milliseconds(-5), [&] { return done; }));
  std::thread other([&] {
    const std::lock_guard held(mutex);
    done = true;
    changed.notify_all();
  });
  CHECK(changed.wait_for(lock, std::chrono::minutes(10), [&] { return done; }));
  changed.wait(lock, [&] { return done; });
  lock.unlock();
  other.join();
}

TEST(a_forked_child_destroys_a_condition_on_which_threads_of_its_parent_wait) {
  if (kThreadSanitizer) return;
  auto* changed = new ConditionVariable;
  std::mutex mutex;
  bool waiting = false, over = false;
  std::thread waiter([&] {
    std::unique_lock lock(mutex);
    waiting = true;
    changed->wait(lock, [&] { return over; });
  });
  for (bool seen = false; !seen;) {
    const std::lock_guard lock(mutex);  // once it waits, the mutex is free
    seen = waiting;
  }
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);  // ends it where it would hang
    delete changed;
    ::_exit(0);
  }
  int status = 0;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  CHECK(WIFEXITED(status));
  {
    const std::lock_guard lock(mutex);
    over = true;
    changed->notify_all();
  }
  waiter.join();
  delete changed;
}

// Ready at the second look after it was armed, and nothing wakes the loop for it.
struct ReadyAtTheSecondLook final : EventLoop::Pollable {
  int left = 0;
  std::atomic<bool> seen{false};
  bool look() override {
    if (left == 0 || --left != 0) return false;
    seen = true;
    return true;
  }
  bool announce_sleep(bool) override { return true; }
  void announce_wake() override {}
};

TEST(a_loop_polls_before_a_sleep_while_that_is_wanted_and_there_are_cores) {
  for (const bool wanted : {true, false}) {
    for (const size_t rings : {size_t{1}, size_t{available_cores()}}) {
      EventLoop loop("test", [](const std::exception&) {});
      std::vector<ReadyAtTheSecondLook> all(rings);
      loop.call([&] {
        for (auto& one : all) loop.add(&one);
        loop.poll_while([&] { return wanted; });
        all[0].left = 2;
      });
      const bool polls = wanted && rings < available_cores();
      const uint64_t began_ns = monotonic_ns();
      while (!all[0].seen && monotonic_ns() - began_ns < (polls ? 10'000'000'000u : 200'000'000u)) ::usleep(100);
      CHECK_EQ(all[0].seen.load(), polls);
      loop.stop();
    }
  }
}

TEST(a_loop_that_has_polled_in_vain_a_hundred_times_polls_before_its_next_sleep_too) {
  if (available_cores() < 2) return;
  EventLoop loop("test", [](const std::exception&) {});
  ReadyAtTheSecondLook ring;
  loop.call([&] {
    loop.add(&ring);
    loop.poll_while([] { return true; });
  });
  for (int i = 0; i < 100; ++i) {
    loop.call([] {});
    ::usleep(300);  // it polls, finds nothing, and sleeps
  }
  const uint64_t began_ns = monotonic_ns();
  loop.call([&] { ring.left = 2; });
  while (!ring.seen && testing::within(began_ns, 0.5)) ::usleep(100);
  CHECK(ring.seen);
  loop.stop();
}

// What tells at the so-manieth look that something is over, to which thread, and what it was told of sleeps.
struct OverAtALook final : EventLoop::Pollable {
  explicit OverAtALook(std::atomic<bool>& over) : over(over) {}
  std::atomic<bool>& over;
  std::atomic<int> left{0}, looks{0};
  std::atomic<std::thread::id> by{};
  std::atomic<bool> holds{false}, asleep{false}, sent{false};
  bool arrives = false;  // what is there to be looked at, as long as something is left
  bool look() override {
    ++looks;
    if (left == 0 || --left != 0) return arrives && left != 0;
    by = std::this_thread::get_id();
    over = true;
    return true;
  }
  bool announce_sleep(bool) override {
    asleep = true;
    return !arrives || left == 0;
  }
  void announce_wake() override { asleep = false; }
  void hold_wakes(bool hold) override { holds = hold; }
  void send_wakes() override { sent = true; }
};

// Until the loop's thread sleeps.
void settle(EventLoop& loop, OverAtALook& ring) {
  loop.call([&] { loop.add(&ring); });
  const uint64_t began_ns = monotonic_ns();
  while (!ring.asleep && testing::within(began_ns, 10)) ::usleep(100);
  CHECK(ring.asleep);
}

TEST(who_waits_runs_a_loop_whose_thread_sleeps) {
  EventLoop loop("test", [](const std::exception&) {});
  std::atomic<bool> over{false};
  OverAtALook ring(over);
  settle(loop, ring);
  loop.call([&] { loop.spin(1e7); });
  while (!ring.asleep) ::usleep(100);
  ring.left = 1000;
  std::thread::id posted_by{};
  bool driven = false;
  CHECK(loop.post_here([&] { posted_by = std::this_thread::get_id(), driven = loop.driven(); }, true));
  CHECK(posted_by == std::this_thread::get_id() && driven);
  CHECK(ring.holds);                         // a wait follows
  const uint64_t began_ns = monotonic_ns();  // its own thread wakes every second, and takes the turn back
  while (!over && testing::within(began_ns, 10)) loop.turn()->run_until(over, soon(60));
  CHECK(over);
  CHECK(ring.by.load() == std::this_thread::get_id());
  while (!(!ring.holds && ring.asleep) && testing::within(began_ns, 10)) ::usleep(100);  // by either thread
  CHECK(!ring.holds && ring.asleep);
  loop.stop();
  const int looks = ring.looks;
  loop.turn()->run_until(over, soon(60));  // it has ended: nobody runs it
  CHECK_EQ(ring.looks.load(), looks);
}

TEST(what_arrives_between_a_post_and_its_wait_is_left_to_who_waits) {
  for (const bool waits : {true, false}) {
    EventLoop loop("test", [](const std::exception&) {});
    std::atomic<bool> over{false};
    OverAtALook ring(over);
    settle(loop, ring);
    loop.call([&] { loop.spin(1e8); });
    while (!ring.asleep) ::usleep(100);
    const uint64_t began_ns = monotonic_ns();
    CHECK(loop.post_here([&] { ring.arrives = true, ring.left = 1000; }, true));
    if (waits) {
      ::usleep(10'000);
      loop.turn()->run_until(over, soon(60));
      CHECK(ring.by.load() == std::this_thread::get_id());
    }
    // By the loop's thread at the end of its sleep, where nobody waits.
    while (!over && testing::within(began_ns, 10)) ::usleep(100);
    CHECK(over);
    loop.stop();
  }
}

TEST(who_runs_a_loop_runs_the_tasks_of_others_calls_its_timer_and_sends_wakes_that_it_held) {
  EventLoop loop("test", [](const std::exception&) {});
  std::atomic<bool> over{false}, elsewhere{false};
  std::atomic<int> called{0};
  OverAtALook ring(over);
  settle(loop, ring);
  loop.call([&] {
    loop.spin(1e8);
    loop.on_time([&]() -> uint64_t {
      if (!loop.driven()) return 1'000'000'000;
      ++called;
      return 1'000'000;
    });
  });
  // Its own thread wakes every second, and takes the turn back.
  std::thread waiter([&] {
    while (!over) loop.turn()->run_until(over, soon(60));
  });
  const std::thread::id id = waiter.get_id();
  const uint64_t began_ns = monotonic_ns();
  while (!(elsewhere && ring.sent && called > 5) && testing::within(began_ns, 10)) {
    loop.call([&] { elsewhere = elsewhere || std::this_thread::get_id() == id; });
    ::usleep(1000);
  }
  CHECK(called > 5);
  CHECK(elsewhere);
  CHECK(ring.sent);
  ring.left = 1;
  waiter.join();
  loop.stop();
}

TEST(the_loops_thread_has_the_turn_for_a_socket_and_ends_who_runs_it) {
  EventLoop loop("test", [](const std::exception&) {});
  std::atomic<bool> over{false};
  OverAtALook ring(over);
  settle(loop, ring);
  loop.call([&] { loop.spin(1e9); });
  int ends[2];
  CHECK_EQ(::pipe(ends), 0);
  struct Reader final : EventLoop::Handler {
    std::atomic<bool> ran{false};
    std::thread::id by{};
    int fd = -1;
    void ready(uint32_t) override {
      char byte;
      CHECK_EQ(::read(fd, &byte, 1), 1);
      by = std::this_thread::get_id();
      ran = true;
    }
  } reader;
  reader.fd = ends[0];
  loop.call([&] { loop.watch(ends[0], EPOLLIN, &reader); });
  while (!ring.asleep) ::usleep(100);
  const uint64_t began_ns = monotonic_ns();
  std::thread writer([&] {
    ::usleep(20'000);
    CHECK_EQ(::write(ends[1], "x", 1), 1);
  });
  loop.turn()->run_until(over, soon(60));  // not done: the loop's thread wanted it
  CHECK(testing::within(began_ns, 0.9));
  while (!reader.ran && testing::within(began_ns, 10)) ::usleep(100);
  CHECK(reader.ran && reader.by != std::this_thread::get_id());
  writer.join();
  // A loop that is stopped ends who runs it.
  while (!ring.asleep) ::usleep(100);
  std::thread stopper([&] {
    ::usleep(20'000);
    loop.stop();
  });
  const uint64_t again_ns = monotonic_ns();
  loop.turn()->run_until(over, soon(60));
  stopper.join();
  CHECK(testing::within(again_ns, 0.9));
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST(who_waits_polls_for_as_long_as_it_was_told_to_on_few_cores_too) {
  for (const double spin_us : {-1.0, 0.0, 1e8}) {
    for (const size_t more : {size_t{0}, size_t{available_cores()}}) {
      EventLoop loop("test", [](const std::exception&) {});
      std::atomic<bool> over{false};
      OverAtALook ring(over);
      std::vector<ReadyAtTheSecondLook> others(more);
      settle(loop, ring);
      loop.call([&] {
        loop.spin(spin_us);
        for (auto& one : others) loop.add(&one);
      });
      while (!ring.asleep) ::usleep(100);
      int looks = 0, later = 0;
      std::thread ends([&] {
        ::usleep(200'000);
        looks = ring.looks;
        ::usleep(100'000);
        later = ring.looks;
        ring.left = 1;
        loop.call([] {});
      });
      const uint64_t began_ns = monotonic_ns();
      while (!over && testing::within(began_ns, 10)) loop.turn()->run_until(over, soon(60));
      ends.join();
      CHECK(over);
      CHECK_EQ(later > looks, spin_us > 0);
      loop.stop();
    }
  }
}

TEST(who_waits_sleeps_in_the_place_of_the_loops_thread_and_is_woken_in_its_place) {
  for (const bool by_a_peer : {true, false}) {
    EventLoop loop("test", [](const std::exception&) {});
    std::atomic<bool> over{false};
    OverAtALook ring(over);
    settle(loop, ring);
    loop.call([&] { loop.spin(0); });
    while (!ring.asleep) ::usleep(100);
    std::thread::id ran_by{};
    std::thread peer([&] {
      ::usleep(50'000);
      const uint64_t one = 1;
      CHECK(ring.asleep && !ring.holds);
      if (by_a_peer) {
        ring.left = 1;
        CHECK_EQ(::write(loop.wake_descriptor(), &one, sizeof one), static_cast<ssize_t>(sizeof one));
      } else {
        loop.call([&] { ran_by = std::this_thread::get_id(), ring.left = 1; });
      }
    });
    const uint64_t began_ns = monotonic_ns();
    loop.turn()->run_until(over, soon(60));
    peer.join();
    CHECK(over && testing::within(began_ns, 0.9));
    CHECK(ring.by.load() == std::this_thread::get_id());
    if (!by_a_peer) CHECK(ran_by == std::this_thread::get_id());
    // Its own thread hears of what comes next.
    while (!ring.asleep) ::usleep(100);
    over = false;
    ring.left = 1;
    const uint64_t one = 1, next_ns = monotonic_ns();
    CHECK_EQ(::write(loop.wake_descriptor(), &one, sizeof one), static_cast<ssize_t>(sizeof one));
    while (!over && testing::within(next_ns, 10)) ::usleep(100);
    CHECK(ring.by.load() != std::this_thread::get_id() && testing::within(next_ns, 0.5));
    loop.stop();
  }
}

}  // namespace
}  // namespace geartrain

RUN_TESTS()
