#include "base/file_lock.h"

#include <fcntl.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/errors.h"

namespace geartrain {
namespace {

constexpr uint64_t kMostPauseNs = 2'000'000;

struct flock one_byte(uint64_t byte, short type) {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = static_cast<off_t>(byte);
  lock.l_len = 1;
  return lock;
}

}  // namespace

bool take_file_lock(int fd, uint64_t byte, LockKind kind) {
  struct flock lock = one_byte(byte, kind == LockKind::exclusive ? F_WRLCK : F_RDLCK);
  if (::fcntl(fd, F_OFD_SETLK, &lock) == 0) return true;
  if (errno == EAGAIN || errno == EACCES) return false;
  fail(ErrorKind::io, "cannot lock a byte of the file: ", std::strerror(errno));
}

bool wait_for_file_lock(int fd, uint64_t byte, LockKind kind, Deadline deadline) {
  // The kernel's own wait (F_OFD_SETLKW) knows no deadline. Soon first: most locks are held for microseconds.
  for (uint64_t pause_ns = 50'000; !take_file_lock(fd, byte, kind); pause_ns = std::min(2 * pause_ns, kMostPauseNs)) {
    const uint64_t left_ns = deadline.left_ns();
    if (left_ns == 0) return false;
    const struct timespec pause{0, static_cast<long>(std::min(pause_ns, left_ns))};
    if (::nanosleep(&pause, nullptr) != 0 && errno == EINTR) return take_file_lock(fd, byte, kind);
  }
  return true;
}

void drop_file_lock(int fd, uint64_t byte) {
  struct flock lock = one_byte(byte, F_UNLCK);
  ::fcntl(fd, F_OFD_SETLK, &lock);
}

bool file_lock_held(int fd, uint64_t byte) {
  struct flock lock = one_byte(byte, F_WRLCK);
  if (::fcntl(fd, F_OFD_GETLK, &lock) != 0) {
    fail(ErrorKind::io, "cannot ask for a lock of the file: ", std::strerror(errno));
  }
  return lock.l_type != F_UNLCK;
}

}  // namespace geartrain
