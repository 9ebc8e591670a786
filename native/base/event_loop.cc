#include "base/event_loop.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/clock.h"
#include "base/condition_variable.h"
#include "base/errors.h"

namespace geartrain {
namespace {

constexpr uint64_t kLongestSleepNs = 1'000'000'000;
constexpr uint64_t kPollNs = 50'000;  // a sleep and its end take as long
// Whoever runs the loop in its place: until a peer that waits for nothing is woken, and until the core is offered to
// others. Two that poll on one core, which a scheduler may not mend for seconds, would take turns of milliseconds.
constexpr uint64_t kHeldWakeNs = 20'000, kYieldNs = 10'000;
constexpr uint64_t kCoresNs = 1'000'000'000;  // how long their number is taken to be the same
constexpr int kLastLooks = 4;

}  // namespace

EventLoop::EventLoop(const char* name, Failed failed)
    : epoll_(::epoll_create1(EPOLL_CLOEXEC)), wake_(make_bell()), failed_(std::move(failed)), turn_(new Turn(this)) {
  if (!epoll_) fail(ErrorKind::os, "cannot make an epoll: ", std::strerror(errno));
  watch(wake_.get(), EPOLLIN, nullptr);
  thread_.start("a group's thread", [this, name] { run(name); });
}

EventLoop::~EventLoop() {
  stop();
}

// False when the loop has stopped.
bool EventLoop::push(std::function<void()> task) {
  life_.check_process();
  {
    std::lock_guard lock(mutex_);
    if (life_.closed()) return false;
    tasks_.push_back(std::move(task));
  }
  posted_.store(true);
  return true;
}

bool EventLoop::post(std::function<void()> task) {
  if (!push(std::move(task))) return false;
  if (sleeping_.load()) wake();
  return true;
}

bool EventLoop::post_here(std::function<void()> task, bool soon) {
  if (!push(std::move(task))) return false;
  if (!sleeping_.load()) return true;  // who has the turn finds it before it sleeps
  std::unique_lock lock(turn_->mutex_, std::try_to_lock);
  if (lock.owns_lock() && turn_->loop_.load() != nullptr) {
    drive(nullptr, Deadline::after(0), soon);
  } else {
    wake();
  }
  return true;
}

bool EventLoop::call(const std::function<void()>& what) {
  std::mutex mutex;
  ConditionVariable over;
  bool done = false;
  std::exception_ptr error;
  const bool posted = post([&] {
    try {
      what();
    } catch (...) {
      error = std::current_exception();
    }
    std::lock_guard lock(mutex);
    done = true;
    over.notify_all();
  });
  if (!posted) return false;
  std::unique_lock lock(mutex);
  over.wait(lock, [&] { return done; });
  if (error != nullptr) std::rethrow_exception(error);
  return true;
}

void EventLoop::stop() {
  if (forked()) {
    turn_->loop_.store(nullptr);
    return;
  }
  bool first;
  {
    std::lock_guard lock(mutex_);
    first = life_.close();
  }
  if (!first) {
    life_.wait_until_left();
    return;
  }
  posted_.store(true);
  wake();
  thread_.join();
  life_.left();
}

void EventLoop::watch(int fd, uint32_t events, Handler* handler) {
  struct epoll_event event{};
  event.events = events;
  event.data.ptr = handler;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    fail(ErrorKind::os, "cannot wait for a socket: ", std::strerror(errno));
  }
}

void EventLoop::change(int fd, uint32_t events, Handler* handler) {
  struct epoll_event event{};
  event.events = events;
  event.data.ptr = handler;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void EventLoop::unwatch(int fd) {
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

template <typename Act>
void EventLoop::guarded(Act&& act) {
  try {
    act();
  } catch (const std::exception& error) {
    failed_(error);
  }
}

// True when the loop is to end.
bool EventLoop::run_tasks() {
  if (!posted_.exchange(false)) return false;
  std::vector<std::function<void()>> tasks;
  bool stopping;
  {
    std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
    stopping = life_.closed();
  }
  for (const auto& task : tasks) guarded(task);
  return stopping;
}

// True when there was something.
bool EventLoop::look_at_all() {
  bool busy = false;
  // Looking may remove some: one that is passed over by that is seen before the next sleep.
  for (size_t i = 0; i < pollables_.size(); ++i) busy |= pollables_[i]->look();
  return busy;
}

// False when there is something to look at.
bool EventLoop::announce_sleep(bool waited) {
  bool idle = true;
  for (Pollable* const one : pollables_) idle &= one->announce_sleep(waited);
  return idle;
}

// Whether this host has fewer cores for this thread than processes at the rings' ends.
bool EventLoop::crowded() {
  const uint64_t now = monotonic_ns();
  if (cores_ == 0 || now - cores_at_ns_ > kCoresNs) {
    cores_ = available_cores();
    cores_at_ns_ = now;
  }
  return pollables_.size() >= cores_;
}

// For how long who runs the loop in its place polls.
uint64_t EventLoop::spin_ns(uint64_t now_ns) const {
  if (spin_us_ >= 0) return static_cast<uint64_t>(spin_us_ * 1e3);
  return now_ns < polls_again_ns_ ? 0 : kPollNs;
}

void EventLoop::spin(double spin_us) {
  spin_us_ = spin_us;
}

// --- in the place of the loop's thread ------------------------------------------------------------------------------

void EventLoop::Turn::run_until(const std::atomic<bool>& done, Deadline until) {
  if (owned_.forked()) return;
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;
  if (EventLoop* const loop = loop_.load(); loop != nullptr) loop->drive(&done, until, false);
}

// With the turn. Null: runs what was posted, and no more.
void EventLoop::drive(const std::atomic<bool>* done, Deadline until, bool soon) {
  sleeping_.store(false);
  driven_ = true;
  stages_.turn_to(Stage::protocol);
  for (Pollable* const one : pollables_) {
    one->announce_wake();
    one->hold_wakes(true);
  }
  const bool waited = drive_until(done, until);
  driven_ = false;
  hear_wakes();
  // Its own thread announces itself, and that it is awake.
  if (turn_->claims_.load() == 0) leave(waited, soon);
  stages_.turn_to(Stage::outside);
  sleeping_.store(true);
  // What this thread has posted itself is its own, where it waits next.
  if (posted_.load() && !soon) wake();
}

// Whether it ends before it is done.
bool EventLoop::drive_until(const std::atomic<bool>* done, Deadline until) {
  const auto stops = [this] {
    if (!posted_.load() || !run_tasks()) return false;
    posted_.store(true);  // for the thread that has to end
    return true;
  };
  if (stops() || done == nullptr) return false;
  if (done->load(std::memory_order_acquire)) return false;
  const bool many = crowded();
  uint64_t last_ns = monotonic_ns(), due_ns = 0;
  uint64_t spin_ns = this->spin_ns(last_ns);
  const uint64_t left_ns = until.left_ns(), until_ns = left_ns < ~last_ns ? last_ns + left_ns : ~uint64_t{0};
  core_turns_.begin();
  for (bool sent = false;;) {
    bool busy = false;
    guarded([&] { busy = look_at_all(); });
    if (done->load(std::memory_order_acquire)) return false;
    if (turn_->claims_.load() != 0) return true;
    if (posted_.load()) {
      if (stops()) return true;
      busy = true;
      due_ns = 0;
    }
    const uint64_t now = monotonic_ns();
    if (now >= due_ns) {
      uint64_t next_ns = kLongestSleepNs;
      guarded([&] {
        if (due_) next_ns = std::min(due_(), kLongestSleepNs);
      });
      due_ns = now + next_ns;
    }
    if (busy) {
      stages_.turn_at(Stage::protocol, now);
      core_turns_.worked();
      last_ns = now;
      sent = false;
      continue;
    }
    stages_.turn_at(Stage::poll, now);
    if (now >= until_ns) return true;
    const uint64_t idle_ns = now - last_ns;
    if (idle_ns >= spin_ns) {
      if (sleep_here(std::min(due_ns, until_ns) - now)) last_ns = monotonic_ns();
      spin_ns = this->spin_ns(last_ns);
      sent = false;
      continue;
    }
    if (!sent && idle_ns >= kHeldWakeNs) {
      for (Pollable* const one : pollables_) one->send_wakes();
      sent = true;
    }
    if (many || idle_ns >= kYieldNs) {
      {
        const StageClock::Scope scope(&stages_, Stage::yield);
        ::sched_yield();
      }
      const uint64_t back_ns = monotonic_ns();
      const double ranks_a_core = static_cast<double>(pollables_.size() + 1) / cores_;
      const uint64_t sleep_ns = core_turns_.yielded(now, back_ns, many ? ranks_a_core : 0);
      if (spin_us_ < 0 && sleep_ns != 0) {
        polls_again_ns_ = back_ns + sleep_ns;
        spin_ns = 0;
      } else if (spin_us_ < 0 && many) {
        last_ns += back_ns - now;  // peers have worked meanwhile
      }
    } else {
      pause_briefly();
    }
  }
}

// Sleeps in the place of the loop's thread: whoever wakes that wakes this one, which is not woken by that one in turn.
// True where there was something to wake for, or may be.
bool EventLoop::sleep_here(uint64_t most_ns) {
  if (!deaf_) change(wake_.get(), 0, nullptr);
  deaf_ = true;
  for (Pollable* const one : pollables_) one->hold_wakes(false);
  sleeping_.store(true);
  int woken = 1;
  if (announce_sleep(true) && !posted_.load() && turn_->claims_.load() == 0) {
    const struct timespec most{static_cast<time_t>(most_ns / 1'000'000'000),
                               static_cast<long>(most_ns % 1'000'000'000)};
    struct pollfd wakes{wake_.get(), POLLIN, 0};
    const StageClock::Scope scope(&stages_, Stage::sleep);
    woken = ::ppoll(&wakes, 1, &most, nullptr);
    if (woken > 0) clear_wakes();
  }
  sleeping_.store(false);
  for (Pollable* const one : pollables_) {
    one->announce_wake();
    one->hold_wakes(true);
  }
  return woken > 0;
}

// The loop's thread is woken again.
void EventLoop::hear_wakes() {
  if (!deaf_) return;
  deaf_ = false;
  clear_wakes();
  change(wake_.get(), EPOLLIN, nullptr);
}

void EventLoop::clear_wakes() {
  uint64_t count;
  [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof count);
}

// Gives the loop back to its thread, which goes on sleeping where nothing is left to do. `soon`: what comes is left to
// who is about to wait, and no peer told that it has to wake somebody: the thread that it woke would claim the turn
// from who waits, for the rest of what is waited for. If nobody does, the thread looks when its sleep ends.
void EventLoop::leave(bool waited, bool soon) {
  bool idle = soon;
  if (!soon) {
    for (Pollable* const one : pollables_) one->hold_wakes(false);
    idle = announce_sleep(waited);
  }
  for (int i = 0; !idle && i < kLastLooks; ++i) {
    guarded([&] { look_at_all(); });
    idle = announce_sleep(waited);
  }
  uint64_t sleep_ns = kLongestSleepNs;
  guarded([&] {
    if (due_) sleep_ns = std::min(due_(), kLongestSleepNs);
  });
  if (!idle || discarded_ != nullptr || monotonic_ns() + sleep_ns < sleeps_until_ns_) wake();
}

// --- the loop's thread ----------------------------------------------------------------------------------------------

// Looks until there is something, for a while. True when there was.
bool EventLoop::poll() {
  if (pollables_.empty() || !wanted_ || !wanted_()) return false;
  if (spin_us_ == 0 || crowded() || monotonic_ns() < polls_again_ns_) return false;
  bool found = false;
  const uint64_t until_ns = monotonic_ns() + kPollNs;
  const StageClock::Scope scope(&stages_, Stage::poll);
  while (!(found = look_at_all() || posted_.load()) && monotonic_ns() < until_ns) pause_briefly();
  return found;
}

void EventLoop::destroy_discarded() {
  while (discarded_ != nullptr) discarded_ = std::move(discarded_->next_discarded_);
}

void EventLoop::run(const char* name) noexcept {
  ::pthread_setname_np(::pthread_self(), name);
  struct epoll_event events[64];
  std::unique_lock turn(turn_->mutex_);
  for (;;) {
    if (run_tasks()) break;
    bool busy = false;
    guarded([&] { busy = look_at_all() || poll(); });
    uint64_t sleep_ns = kLongestSleepNs;
    guarded([&] {
      if (due_) sleep_ns = std::min(due_(), kLongestSleepNs);
    });
    sleeping_.store(true);
    if (busy || posted_.load()) sleep_ns = 0;
    bool waited = false;
    if (sleep_ns != 0) {
      guarded([&] { waited = wanted_ && wanted_(); });
      if (!announce_sleep(waited)) sleep_ns = 0;
    }
    // Rounded up: a sleep that ends too early would be followed by others of no length.
    const auto sleep_ms = static_cast<int>((sleep_ns + 999'999) / 1'000'000);
    int ready;
    if (sleep_ms == 0) {
      ready = ::epoll_wait(epoll_.get(), events, 64, 0);
    } else {
      sleeps_until_ns_ = monotonic_ns() + static_cast<uint64_t>(sleep_ms) * 1'000'000;
      stages_.turn_to(waited ? Stage::sleep : Stage::outside);
      turn.unlock();
      ready = ::epoll_wait(epoll_.get(), events, 64, sleep_ms);
      turn_->claims_.fetch_add(1);
      if (!turn.try_lock()) {
        wake();  // who has it may sleep
        turn.lock();
      }
      turn_->claims_.fetch_sub(1);
    }
    stages_.turn_to(Stage::protocol);
    sleeping_.store(false);
    for (Pollable* const one : pollables_) {
      one->announce_wake();
      one->hold_wakes(false);
    }
    for (int i = 0; i < ready; ++i) {
      if (events[i].data.ptr == nullptr) {
        clear_wakes();
      } else {
        guarded([&] { static_cast<Handler*>(events[i].data.ptr)->ready(events[i].events); });
      }
    }
    destroy_discarded();
  }
  turn_->loop_.store(nullptr);
  due_ = nullptr;
  wanted_ = nullptr;
  destroy_discarded();
}

}  // namespace geartrain
