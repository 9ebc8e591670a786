#include "base/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <limits>

#include "base/errors.h"

namespace geartrain {

void futex_wait(const std::atomic<uint32_t>& word, uint32_t seen, uint64_t timeout_ns) {
  const struct timespec limit{static_cast<time_t>(timeout_ns / 1'000'000'000u),
                              static_cast<long>(timeout_ns % 1'000'000'000u)};
  if (::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0) == 0) return;
  if (errno != EAGAIN && errno != EINTR && errno != ETIMEDOUT) {
    fail(ErrorKind::os, "cannot wait for a word of memory: ", std::strerror(errno));
  }
}

void futex_wake(const std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr, 0);
}

}  // namespace geartrain
