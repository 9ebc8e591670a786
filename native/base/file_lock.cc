#include "base/file_lock.h"

#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/errors.h"

namespace geartrain {
namespace {

constexpr off_t kLeaseArea = off_t{1} << 61;  // no segment is that long

struct flock one_byte(uint32_t number, short type) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = kLeaseArea + static_cast<off_t>(number);
  lock.l_len = 1;
  return lock;
}

}  // namespace

bool take_lease(int fd, uint32_t number) {
  struct flock lock = one_byte(number, F_WRLCK);
  if (::fcntl(fd, F_OFD_SETLK, &lock) == 0) return true;
  if (errno == EAGAIN || errno == EACCES) return false;
  fail(ErrorKind::os, "this file system cannot lock the segment's file: ", std::strerror(errno));
}

void drop_lease(int fd, uint32_t number) {
  struct flock lock = one_byte(number, F_UNLCK);
  ::fcntl(fd, F_OFD_SETLK, &lock);
}

bool lease_held(int fd, uint32_t number) {
  // F_OFD_GETLK needs no write permission, so a read-only reader can ask too.
  struct flock lock = one_byte(number, F_WRLCK);
  if (::fcntl(fd, F_OFD_GETLK, &lock) != 0) return true;  // when in doubt nobody's rows are taken away
  return lock.l_type != F_UNLCK;
}

Gate::Gate(int fd, double timeout_s) : fd_(fd) {
  const uint64_t deadline = monotonic_ns() + static_cast<uint64_t>(timeout_s * 1e9);
  while (!take_lease(fd_, kGateLease)) {
    if (monotonic_ns() > deadline) {
      fail(ErrorKind::lock_timeout, "another process has been joining or leaving the store for ", timeout_s,
           " s; it may be stopped");
    }
    struct timespec pause{0, 1'000'000};
    ::nanosleep(&pause, nullptr);
  }
}

Gate::~Gate() {
  drop_lease(fd_, kGateLease);
}

}  // namespace geartrain
