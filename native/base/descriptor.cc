#include "base/descriptor.h"

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <unordered_set>

#include "base/errors.h"

namespace geartrain {
namespace {

struct Table : ForkSafe {
  std::unordered_set<int> open;

  void after_fork(bool in_child) {
    if (in_child) {
      for (const int fd : open) ::close(fd);
      open.clear();
    }
    mutex.unlock();
  }
};

}  // namespace

Descriptor::Descriptor(int fd) : fd_(fd) {
  if (fd < 0) return;
  auto& table = of_process<Table>();
  std::lock_guard lock(table.mutex);
  table.open.insert(fd);
}

void Descriptor::reset() {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0 || owned_.forked()) return;  // in a forked child it is closed, and its number may be another file's
  auto& table = of_process<Table>();
  std::lock_guard lock(table.mutex);
  table.open.erase(fd);
  ::close(fd);
}

void ListeningSocket::reset() {
  if (socket_ && !socket_.owned_.forked()) {
    ::shutdown(socket_.get(), SHUT_RDWR);
    // A Unix socket keeps whom it has not accepted until its last copy is closed. Nobody comes any more.
    while (Descriptor(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC))) continue;
  }
  socket_.reset();
}

Descriptor make_bell() {
  Descriptor bell(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!bell) fail(ErrorKind::os, "cannot make an eventfd: ", std::strerror(errno));
  return bell;
}

void ring_bell(const Descriptor& bell) {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(bell.get(), &one, sizeof one);  // full means: awake anyway
}

}  // namespace geartrain
