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
  bool announce_sleep() override { return true; }
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

}  // namespace
}  // namespace geartrain

RUN_TESTS()
