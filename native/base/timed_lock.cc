#include "base/timed_lock.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "base/clock.h"
#include "base/deadline.h"

// By another name, since a C library's header may or may not declare it; weak, so that the loader leaves it null where
// the library has none. Of the glibc that wheels are built against (2.28) it is no part.
extern "C" int geartrain_mutex_clocklock(pthread_mutex_t*, clockid_t,
                                         const struct timespec*) __asm__("pthread_mutex_clocklock")
    __attribute__((weak));

namespace geartrain {
namespace {

constexpr uint64_t kShortestSliceNs = 1'000;
constexpr uint64_t kLongestSliceNs = 1'000'000;

std::atomic<bool> polling_is_forced{false};

struct timespec timespec_of(uint64_t ns) {
  return {static_cast<time_t>(ns / 1'000'000'000u), static_cast<long>(ns % 1'000'000'000u)};
}

}  // namespace

bool lock_is_polled() {
  return polling_is_forced.load(std::memory_order_relaxed) || geartrain_mutex_clocklock == nullptr;
}

void set_lock_polling(bool polled) {
  polling_is_forced.store(polled, std::memory_order_relaxed);
}

int lock_by_polling(pthread_mutex_t* mutex, double timeout_s) {
  const Deadline deadline = Deadline::after(timeout_s);
  for (uint64_t slice_ns = kShortestSliceNs;; slice_ns = std::min(2 * slice_ns, kLongestSliceNs)) {
    const int error = ::pthread_mutex_trylock(mutex);
    if (error != EBUSY) return error;
    const uint64_t left_ns = deadline.left_ns();
    if (left_ns == 0) return ETIMEDOUT;
    const struct timespec slice = timespec_of(std::min(slice_ns, left_ns));
    ::clock_nanosleep(CLOCK_MONOTONIC, 0, &slice, nullptr);  // a signal ends a slice early, which is no harm
  }
}

int lock_within(pthread_mutex_t* mutex, double timeout_s) {
  if (lock_is_polled()) return lock_by_polling(mutex, timeout_s);
#if defined(__SANITIZE_THREAD__)
  const struct timespec until = timespec_of(clock_ns(CLOCK_REALTIME) + static_cast<uint64_t>(timeout_s * 1e9));
  return ::pthread_mutex_timedlock(mutex, &until);  // ThreadSanitizer knows this call alone
#else
  const struct timespec until = timespec_of(clock_ns(CLOCK_MONOTONIC) + static_cast<uint64_t>(timeout_s * 1e9));
  return geartrain_mutex_clocklock(mutex, CLOCK_MONOTONIC, &until);
#endif
}

}  // namespace geartrain
