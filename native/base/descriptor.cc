#include "base/descriptor.h"

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <unordered_set>

namespace geartrain {
namespace {

std::atomic<uint64_t> fork_count{0};

struct Table {
  std::mutex mutex;
  std::unordered_set<int> open;
};

Table& table() {
  static auto* made = [] {
    static auto* of_process = new Table();  // never deleted: descriptors may outlive main
    ::pthread_atfork([] { of_process->mutex.lock(); }, [] { of_process->mutex.unlock(); },
                     [] {
                       for (const int fd : of_process->open) ::close(fd);
                       of_process->open.clear();
                       fork_count.fetch_add(1);
                       of_process->mutex.unlock();
                     });
    return of_process;
  }();
  return *made;
}

}  // namespace

uint64_t forks() {
  return fork_count.load(std::memory_order_relaxed);
}

void count_forks() {
  table();
}

Descriptor::Descriptor(int fd) : fd_(fd), forks_(forks()) {
  if (fd < 0) return;
  std::lock_guard lock(table().mutex);
  table().open.insert(fd);
}

void Descriptor::reset() {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0 || forks_ != forks()) return;  // in a forked child it is closed, and its number may be another file's
  std::lock_guard lock(table().mutex);
  table().open.erase(fd);
  ::close(fd);
}

void ListeningSocket::reset() {
  if (socket_ && socket_.forks_ == forks()) {
    ::shutdown(socket_.get(), SHUT_RDWR);
    // A Unix socket keeps whom it has not accepted until its last copy is closed. Nobody comes any more.
    while (Descriptor(::accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC))) continue;
  }
  socket_.reset();
}

}  // namespace geartrain
