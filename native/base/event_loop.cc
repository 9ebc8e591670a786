#include "base/event_loop.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>

#include "base/errors.h"

namespace geartrain {
namespace {

constexpr uint64_t kLongestSleepNs = 1'000'000'000;

}  // namespace

EventLoop::EventLoop(const char* name) : forks_(forks()) {
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

bool EventLoop::post(std::function<void()> task) {
  if (forks_ != forks()) {
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

void EventLoop::stop() {
  if (thread_ == nullptr) return;
  if (forks_ != forks()) {
    static_cast<void>(thread_.release());  // a forked child never had it
    return;
  }
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  posted_.store(true);
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_.get(), &one, sizeof one);
  thread_->join();
  thread_.reset();
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

template <typename Act>
void EventLoop::guarded(Act&& act) noexcept {
  try {
    act();
  } catch (const std::exception& error) {
    if (failed_) {
      failed_(error.what());
    } else {
      std::fprintf(stderr, "geartrain: a thread that serves sockets: %s\n", error.what());
    }
  }
}

void EventLoop::run(const char* name) noexcept {
  id_.store(std::this_thread::get_id());
  ::pthread_setname_np(::pthread_self(), name);
  for (bool ended = false; !ended;) {
    guarded([&] {
      ended = run_tasks();
      if (!ended) run_round();
    });
  }
  due_ = nullptr;
  failed_ = nullptr;
  discarded_.clear();
}

// Looks at what is polled, sleeps, and handles what woke it.
void EventLoop::run_round() {
  struct epoll_event events[64];
  bool busy = false;
  // A copy: looking may remove.
  for (Pollable* const one : std::vector<Pollable*>(pollables_)) {
    if (std::find(pollables_.begin(), pollables_.end(), one) == pollables_.end()) continue;
    guarded([&] { busy |= one->look(); });
  }
  uint64_t sleep_ns = kLongestSleepNs;
  if (due_) guarded([&] { sleep_ns = std::min(due_(), kLongestSleepNs); });
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
  discarded_.clear();
}

}  // namespace geartrain
