// A condition variable whose waits follow the monotonic clock, whatever the C library.
#pragma once

#include <pthread.h>
#include <time.h>

#include <chrono>
#include <mutex>

#include "base/clock.h"

namespace geartrain {

// In the place of std::condition_variable, with its calls. Where the C library is older than glibc 2.30,
// std::condition_variable waits by the wall clock, and a step of that clock would lengthen or end every wait; a
// pthread_cond_t that is told its clock when it is made never does.
//
// It is never destroyed as POSIX means it: glibc holds no resource in it, and pthread_cond_destroy waits for the
// threads that wait, which a forked child does not have.
class ConditionVariable {
 public:
  ConditionVariable() noexcept {
    pthread_condattr_t attributes;
    ::pthread_condattr_init(&attributes);
    ::pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    ::pthread_cond_init(&condition_, &attributes);
    ::pthread_condattr_destroy(&attributes);
  }
  ConditionVariable(const ConditionVariable&) = delete;
  ConditionVariable& operator=(const ConditionVariable&) = delete;

  void notify_one() noexcept { ::pthread_cond_signal(&condition_); }
  void notify_all() noexcept { ::pthread_cond_broadcast(&condition_); }

  void wait(std::unique_lock<std::mutex>& lock) { ::pthread_cond_wait(&condition_, lock.mutex()->native_handle()); }
  template <typename Passed>
  void wait(std::unique_lock<std::mutex>& lock, Passed passed) {
    while (!passed()) wait(lock);
  }

  // May return early, as any condition variable.
  void wait_for(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds left) { wait_until(lock, end_of(left)); }
  // Whether passed() held at the end.
  template <typename Passed>
  bool wait_for(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds left, Passed passed) {
    const uint64_t end_ns = end_of(left);
    while (!passed()) {
      if (monotonic_ns() >= end_ns) return false;
      wait_until(lock, end_ns);
    }
    return true;
  }

 private:
  static uint64_t end_of(std::chrono::nanoseconds left) {
    return monotonic_ns() + (left.count() > 0 ? static_cast<uint64_t>(left.count()) : 0);
  }
  void wait_until(std::unique_lock<std::mutex>& lock, uint64_t end_ns) {
    const struct timespec end{static_cast<time_t>(end_ns / 1'000'000'000u), static_cast<long>(end_ns % 1'000'000'000u)};
    ::pthread_cond_timedwait(&condition_, lock.mutex()->native_handle(), &end);
  }
  pthread_cond_t condition_;
};

}  // namespace geartrain
