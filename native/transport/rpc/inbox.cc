#include "transport/rpc/inbox.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace geartrain {
namespace {

constexpr uint64_t kBell = ~uint64_t{0};
constexpr uint64_t kDormantAfterNs = 50'000'000;

struct epoll_event interest(uint64_t id, bool watched_only, bool edge) {
  struct epoll_event event{};
  event.events = EPOLLRDHUP | (watched_only ? 0u : EPOLLIN) | (edge ? EPOLLET : 0u);
  event.data.u64 = id;
  return event;
}

}  // namespace

Inbox::Inbox(double spin_us, uint32_t at_once)
    : epoll_(::epoll_create1(EPOLL_CLOEXEC)), bell_(make_bell()), at_once_(std::max(at_once, 1u)), patience_(spin_us) {
  struct epoll_event event{};
  event.events = EPOLLIN | EPOLLET;
  event.data.u64 = kBell;
  if (!epoll_ || ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, bell_.get(), &event) != 0) {
    fail(ErrorKind::os, "cannot make an epoll: ", std::strerror(errno));
  }
}

void Inbox::add(uint64_t id, std::shared_ptr<Connection> connection, bool trusted) {
  insert(id, std::move(connection), false, trusted);
}

void Inbox::watch(uint64_t id, std::shared_ptr<Connection> connection) {
  insert(id, std::move(connection), true, false);
}

void Inbox::insert(uint64_t id, std::shared_ptr<Connection> connection, bool watched_only, bool trusted) {
  life_.check_process();
  std::lock_guard lock(mutex_);
  if (id == kBell || !entries_.try_emplace(id, Entry{connection, watched_only, trusted, false, false, false}).second) {
    fail(ErrorKind::argument, "the inbox has a connection number ", id, " already");
  }
  std::vector<Connection::Wake> wakes = {{connection->end_descriptor(), false}};
  if (!watched_only) wakes = connection->wakes();
  for (const Connection::Wake& wake : wakes) {
    struct epoll_event event = interest(id, watched_only, wake.edge);
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake.fd, &event) != 0) {
      const int error = errno;
      entries_.erase(id);
      fail(ErrorKind::os, "cannot watch a connection: ", std::strerror(error));
    }
  }
  if (!watched_only) mark_ready(id);  // and so it is armed before the next sleep
  wake_leader();
}

void Inbox::remove(uint64_t id) {
  if (life_.forked()) return;
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(id);
  if (found == entries_.end()) return;
  const auto& connection = found->second.connection;
  for (const Connection::Wake& wake : connection->wakes()) {
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, wake.fd, nullptr);
  }
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connection->end_descriptor(), nullptr);
  entries_.erase(found);
}

void Inbox::resume(uint64_t id) {
  if (life_.forked()) return;
  std::lock_guard lock(mutex_);
  const auto found = entries_.find(id);
  if (found == entries_.end() || !found->second.paused) return;
  found->second.paused = false;
  if (found->second.muted) listen(id, found->second, false);
  if (found->second.connection->drained()) return;  // the epoll reports what comes: no read in vain
  mark_ready(id);
  if (sleeping_) wake_leader();  // it did not ask this one to wake it
}

void Inbox::close() {
  if (life_.forked()) return;
  std::lock_guard lock(mutex_);
  life_.close();
  deputy_.notify_all();
  reserve_.notify_all();
  wake_leader();
}

bool Inbox::receive(Event* event, Deadline deadline) {
  life_.check_process();
  std::unique_lock lock(mutex_);
  come_back();
  if (!stand_by(lock, deadline)) return false;
  leading_ = true;
  lock.unlock();
  bool found = false;
  try {
    found = lead(event, deadline);
  } catch (...) {
    lock.lock();
    leading_ = false;
    deputy_.notify_one();
    throw;
  }
  lock.lock();
  leading_ = false;
  left_ns_ = monotonic_ns();
  if (found) delivered_ns_ = left_ns_;
  event->standing_by = standing_by_;
  if (found && !event->lost) away_.push_back({std::this_thread::get_id(), left_ns_});
  // A deputy without a timed wait must start one; it has one while messages keep coming.
  if (has_deputy_ && (dormant_ || !found)) {
    dormant_ = false;
    deputy_.notify_one();
  }
  return found;
}

// Until this thread may lead. False at the deadline.
bool Inbox::stand_by(std::unique_lock<std::mutex>& lock, Deadline deadline) {
  bool rested = false, deputy = false;
  ++standing_by_;
  const auto leave = [&](bool leads) {
    --standing_by_;
    if (deputy) {
      has_deputy_ = false;
      reserve_.notify_one();
    }
    return leads;
  };
  for (;;) {
    if (life_.closed()) {
      leave(false);
      life_.refuse();
    }
    const uint64_t now = monotonic_ns();
    const uint64_t from_ns = leading_ ? now + static_cast<uint64_t>(kTakeoverS * 1e9) : may_lead_ns(rested, now);
    if (!leading_ && from_ns <= now) return leave(true);
    const auto left = std::chrono::nanoseconds(deadline.left_ns());
    if (left.count() == 0) return leave(false);
    if (!deputy && has_deputy_) {
      reserve_.wait_for(lock, left);
    } else {
      deputy = has_deputy_ = true;
      if (leading_ && now - delivered_ns_ > kDormantAfterNs) {
        dormant_ = true;
        deputy_.wait_for(lock, left);
      } else {
        deputy_.wait_for(lock, std::min<std::chrono::nanoseconds>(left, std::chrono::nanoseconds(from_ns - now)));
      }
    }
    rested = true;
  }
}

// When a thread may lead, if no other does: a thread that returns from work at once, one that has waited when the last
// leader has been away for kTakeover; and neither while enough others are at work.
uint64_t Inbox::may_lead_ns(bool rested, uint64_t now_ns) const {
  constexpr auto kLongNs = static_cast<uint64_t>(kLongS * 1e9);
  uint64_t from_ns = rested ? left_ns_ + static_cast<uint64_t>(kTakeoverS * 1e9) : 0;
  if (away_.size() < at_once_) return from_ns;
  std::vector<uint64_t> young;
  for (const Away& one : away_) {
    if (now_ns - one.since_ns < kLongNs) young.push_back(one.since_ns);
  }
  if (young.size() < at_once_) return from_ns;
  std::sort(young.begin(), young.end());
  return std::max(from_ns, young[young.size() - at_once_] + kLongNs);
}

void Inbox::come_back() {
  std::erase_if(away_, [](const Away& one) { return one.thread == std::this_thread::get_id(); });
}

void Inbox::yield_slot() {
  if (life_.forked()) return;
  std::lock_guard lock(mutex_);
  come_back();
  dormant_ = false;
  deputy_.notify_one();
}

bool Inbox::lead(Event* event, Deadline deadline) {
  for (;;) {
    if (take_ready(event)) return true;
    if (patience_.poll(1, deadline, [this] { return look_around(); })) continue;
    if (deadline.passed()) return false;
    sleep(deadline);
  }
}

// The next message of the ready connections, each in its turn.
bool Inbox::take_ready(Event* event) {
  std::unique_lock lock(mutex_);
  life_.check();
  while (!ready_.empty()) {
    const uint64_t id = ready_.front();
    ready_.pop_front();
    const auto found = entries_.find(id);
    if (found == entries_.end()) continue;
    found->second.queued = false;
    const std::shared_ptr<Connection> connection = found->second.connection;
    const bool watched_only = found->second.watched_only;
    event->trusted = found->second.trusted;
    lock.unlock();
    Connection::Poll polled = Connection::Poll::nothing;
    bool lost = watched_only;
    std::string reason;
    if (watched_only) reason = "the peer over " + connection->describe() + " is gone";
    try {
      if (!watched_only) polled = connection->poll(&event->message);
    } catch (const Error& error) {
      lost = true;
      reason = error.what();
    }
    if (lost) {
      remove(id);
      event->id = id;
      event->connection = connection;
      event->message = {};
      event->lost = true;
      event->reason = reason;
      return true;
    }
    lock.lock();
    if (polled == Connection::Poll::more) mark_ready(id);
    if (polled == Connection::Poll::message) {
      const auto still = entries_.find(id);
      if (still != entries_.end()) still->second.paused = true;
      event->id = id;
      event->connection = connection;
      event->lost = false;
      return true;
    }
  }
  return false;
}

void Inbox::mark_ready(uint64_t id) {
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second.queued || found->second.paused) return;
  found->second.queued = true;
  ready_.push_back(id);
}

// Polls all connections once, without waiting.
bool Inbox::look_around() {
  bool sockets = false;
  {
    std::lock_guard lock(mutex_);
    for (auto& [id, entry] : entries_) {
      if (entry.watched_only || entry.paused) continue;
      sockets |= !entry.connection->can_look();
      if (entry.connection->can_look() && entry.connection->might_have_data()) mark_ready(id);
    }
    if (!ready_.empty() || life_.closed()) return true;
  }
  if (!sockets) return false;
  sleep(Deadline::after(0));
  std::lock_guard lock(mutex_);
  return !ready_.empty();
}

void Inbox::sleep(Deadline deadline) {
  if (!deadline.passed()) {
    std::lock_guard lock(mutex_);
    life_.check();
    for (auto& [id, entry] : entries_) {
      if (!entry.watched_only && !entry.paused && !entry.connection->arm()) mark_ready(id);
    }
    if (!ready_.empty()) return;
    sleeping_ = true;
  }
  struct epoll_event events[64];
  const int n = ::epoll_wait(epoll_.get(), events, 64, deadline.left_ms());
  std::lock_guard lock(mutex_);
  sleeping_ = false;
  for (int i = 0; i < n; ++i) {
    const uint64_t id = events[i].data.u64;
    const auto found = entries_.find(id);  // none of the bell
    if (found == entries_.end()) continue;
    if (found->second.paused) {
      if (!found->second.muted) listen(id, found->second, true);
    } else {
      mark_ready(id);
    }
  }
}

// A paused connection is not read, so what has come would end every sleep until resume(): those of a thread that waits
// while another one has the last message for long. So it is muted. A change of interest reports what is there anew.
void Inbox::listen(uint64_t id, Entry& entry, bool muted) {
  for (const Connection::Wake& wake : entry.connection->wakes()) {
    if (wake.edge) continue;
    struct epoll_event event = interest(id, false, muted);
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, wake.fd, &event);
  }
  entry.muted = muted;
}

}  // namespace geartrain
