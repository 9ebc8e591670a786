#include "base/event_loop.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "base/clock.h"
#include "base/condition_variable.h"
#include "base/errors.h"

namespace geartrain {
namespace {

constexpr uint64_t kLongestSleepNs = 1'000'000'000;
constexpr double kPollUs = 50;  // a sleep and its end take as long

}  // namespace

EventLoop::EventLoop(const char* name, Failed failed)
    : forks_(forks()), failed_(std::move(failed)), patience_(kPollUs) {
  epoll_ = Descriptor(::epoll_create1(EPOLL_CLOEXEC));
  wake_ = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_ || !wake_) fail(ErrorKind::os, "cannot make an epoll or an eventfd: ", std::strerror(errno));
  watch(wake_.get(), EPOLLIN, nullptr);
  try {
    thread_ = std::make_unique<std::thread>([this, name] { run(name); });
  } catch (const std::system_error& error) {
    fail(ErrorKind::os, "cannot start a thread: ", error.what());
  }
}

EventLoop::~EventLoop() {
  stop();
}

bool EventLoop::forked() const {
  return forks_ != forks();
}

bool EventLoop::post(std::function<void()> task) {
  if (forked()) {
    fail(ErrorKind::hung_up, "this group belongs to the process that this one was forked from; make one here");
  }
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return false;
    tasks_.push_back(std::move(task));
  }
  posted_.store(true);
  if (sleeping_.load()) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
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
    static_cast<void>(thread_.release());  // a forked child never had it
    return;
  }
  std::call_once(stopped_, [this] {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    posted_.store(true);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
    thread_->join();
    thread_.reset();
  });
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
    stopping = stopping_;
  }
  for (const auto& task : tasks) guarded(task);
  return stopping;
}

// True when there was something.
bool EventLoop::look_at_all() {
  bool busy = false;
  // A copy: looking may remove.
  for (Pollable* const one : std::vector<Pollable*>(pollables_)) {
    if (std::find(pollables_.begin(), pollables_.end(), one) != pollables_.end()) busy |= one->look();
  }
  return busy;
}

// Looks until there is something, for a while. True when there was.
bool EventLoop::poll() {
  const double most_us = patience_.spin_us();
  if (pollables_.empty() || pollables_.size() >= available_cores() || !wanted_ || !wanted_()) return false;
  bool found = false;
  if (most_us > 0) {
    const uint64_t until_ns = monotonic_ns() + static_cast<uint64_t>(most_us * 1e3);
    while (!(found = look_at_all() || posted_.load()) && monotonic_ns() < until_ns) pause_briefly();
  }
  if (found) {
    patience_.rewarded();
  } else {
    patience_.in_vain();
  }
  return found;
}

void EventLoop::destroy_discarded() {
  while (discarded_ != nullptr) discarded_ = std::move(discarded_->next_discarded_);
}

void EventLoop::run(const char* name) noexcept {
  id_.store(std::this_thread::get_id());
  ::pthread_setname_np(::pthread_self(), name);
  struct epoll_event events[64];
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
    if (sleep_ns != 0) {
      for (Pollable* const one : pollables_) {
        if (!one->announce_sleep()) sleep_ns = 0;
      }
    }
    // Rounded up: a sleep that ends too early would be followed by others of no length.
    const int ready = ::epoll_wait(epoll_.get(), events, 64, static_cast<int>((sleep_ns + 999'999) / 1'000'000));
    sleeping_.store(false);
    for (Pollable* const one : pollables_) one->announce_wake();
    for (int i = 0; i < ready; ++i) {
      if (events[i].data.ptr == nullptr) {
        uint64_t count;
        [[maybe_unused]] const ssize_t got = ::read(wake_.get(), &count, sizeof count);
      } else {
        guarded([&] { static_cast<Handler*>(events[i].data.ptr)->ready(events[i].events); });
      }
    }
    destroy_discarded();
  }
  due_ = nullptr;
  wanted_ = nullptr;
  destroy_discarded();
}

}  // namespace geartrain
