#include "transport/sideband/sideband_thread.h"

#include <sys/epoll.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/errors.h"

namespace geartrain {
namespace {

constexpr auto kHeartbeatNs = static_cast<uint64_t>(kHeartbeatS * 1e9);

}  // namespace

SidebandThread::SidebandThread() : epoll_(::epoll_create1(EPOLL_CLOEXEC)), bell_(make_bell()) {
  struct epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  if (!epoll_ || ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, bell_.get(), &event) != 0) {
    fail(ErrorKind::os, "cannot make an epoll: ", std::strerror(errno));
  }
  thread_.start("the sideband thread", [this] { serve(); });
}

void SidebandThread::add(const std::shared_ptr<SidebandLine>& line) {
  {
    std::lock_guard lock(mutex_);
    lines_[line.get()] = line;
  }
  struct epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = line.get();
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, line->socket(), &event) != 0) {
    const int error = errno;
    remove(line.get());
    fail(ErrorKind::os, "cannot watch a socket: ", std::strerror(error));
  }
  wake();
}

void SidebandThread::remove(const SidebandLine* line) {
  std::shared_ptr<SidebandLine> last;  // released without the lock
  std::lock_guard lock(mutex_);
  const auto found = lines_.find(line);
  if (found == lines_.end()) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, line->socket(), nullptr);
  last = std::move(found->second);
  lines_.erase(found);
}

void SidebandThread::watch(const SidebandLine* line, bool write) const {
  struct epoll_event event{};
  event.events = EPOLLIN | (write ? EPOLLOUT : 0u);
  event.data.ptr = const_cast<SidebandLine*>(line);
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, line->socket(), &event);  // fails when it is closed
}

void SidebandThread::unwatch(const SidebandLine* line) const {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, line->socket(), nullptr);
}

struct SidebandThread::Round {
  uint64_t next_beat_ns;
  bool busy = false;
  std::vector<std::shared_ptr<SidebandLine>> all{}, ready{};
};

void SidebandThread::serve() noexcept {
  Round round{monotonic_ns() + kHeartbeatNs};
  for (;;) {
    try {
      serve_round(round);
    } catch (const std::exception&) {
      // No memory for the lists: events and heartbeats are still due in the next round.
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    round.all.clear();  // now, and not at the next event: the last reference closes the line
    round.ready.clear();
  }
}

void SidebandThread::serve_round(Round& round) {
  struct epoll_event events[64];
  int wait_ms = -1;
  {
    std::lock_guard lock(mutex_);
    const uint64_t now = monotonic_ns();
    const uint64_t next = round.next_beat_ns;
    if (!lines_.empty()) wait_ms = next > now ? static_cast<int>((next - now) / 1'000'000 + 1) : 0;
  }
  const int n = ::epoll_wait(epoll_.get(), events, 64, round.busy ? 0 : wait_ms);
  {
    std::lock_guard lock(mutex_);
    for (int i = 0; i < n; ++i) {
      const auto found = lines_.find(static_cast<const SidebandLine*>(events[i].data.ptr));
      if (found != lines_.end()) round.ready.push_back(found->second);
    }
    for (const auto& [line, held] : lines_) round.all.push_back(held);
  }
  const auto guarded = [](SidebandLine& line, void (SidebandLine::*act)()) {
    try {
      (line.*act)();
    } catch (const std::exception& error) {
      line.fail_line(error.what());
    }
  };
  for (const auto& line : round.ready) guarded(*line, &SidebandLine::on_ready);
  if (monotonic_ns() >= round.next_beat_ns) {
    for (const auto& line : round.all) guarded(*line, &SidebandLine::tick);
    round.next_beat_ns = monotonic_ns() + kHeartbeatNs;
  }
  round.busy = false;
  for (const auto& line : round.all) {
    if (line->has_work()) guarded(*line, &SidebandLine::work);
    round.busy |= line->has_work();
  }
}

}  // namespace geartrain
