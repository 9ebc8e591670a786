// Event loop: one thread that waits for many sockets, of a Group or a Reducer, and the only thread that touches
// their links.
//
//   EventLoop loop("geartrain group");
//   loop.post([&] { loop.watch(fd, EPOLLIN, &handler); });   // any thread; runs on the loop's
//
// It sleeps in epoll_wait, or not at all: rings in shared memory (Pollable) are polled before every sleep. A sleeper
// announces itself in their memory, and the peer that writes there wakes it. Timers are one function, which returns
// when it has to be called again. No handler may block.
//
// Handlers are destroyed by discard() only, after the round of events that they may still be part of.
//
// No exception ends the loop, or the process. Handlers and tasks catch what they expect; what they do not (no memory)
// goes to on_failure, with its text, and the loop goes on: what it served may be left half done, so the owner should
// end all work that is under way. Without on_failure the text goes to stderr, and deadlines end what waits.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/descriptor.h"

namespace geartrain {

class EventLoop {
 public:
  class Handler {
   public:
    virtual ~Handler() = default;
    virtual void ready(uint32_t events) = 0;
  };
  // A source without a descriptor that becomes ready while the loop is awake.
  class Pollable {
   public:
    virtual ~Pollable() = default;
    virtual bool look() = 0;            // handles what is ready; false: nothing was
    virtual bool announce_sleep() = 0;  // false: there is something to handle after all
    virtual void announce_wake() = 0;
  };

  explicit EventLoop(const char* name);
  ~EventLoop();  // stops
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Any thread. False when the loop has stopped: the task was dropped.
  bool post(std::function<void()> task);
  // Runs what was posted before, then ends the thread. Not from the loop's own thread.
  void stop();
  bool here() const { return std::this_thread::get_id() == id_.load(); }
  // A descriptor that wakes the loop when it becomes readable: passed to peers that share memory with it.
  int wake_descriptor() const { return wake_.get(); }

  // --- on the loop's thread -----------------------------------------------------------------------------------------
  void watch(int fd, uint32_t events, Handler* handler);
  void change(int fd, uint32_t events, Handler* handler);
  void unwatch(int fd);
  void add(Pollable* pollable) { pollables_.push_back(pollable); }
  void remove(Pollable* pollable) { std::erase(pollables_, pollable); }
  void discard(std::unique_ptr<Handler> handler) { discarded_.push_back(std::move(handler)); }
  // Called at least before every sleep; returns the nanoseconds after which to be called again.
  void on_time(std::function<uint64_t()> due) { due_ = std::move(due); }
  // Must not throw.
  void on_failure(std::function<void(const char* why)> failed) { failed_ = std::move(failed); }

 private:
  void run(const char* name) noexcept;
  void run_round();
  bool run_tasks();
  template <typename Act>
  void guarded(Act&& act) noexcept;

  Descriptor epoll_, wake_;
  const uint64_t forks_;
  std::mutex mutex_;
  std::vector<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::atomic<bool> sleeping_{false}, posted_{false};
  std::vector<Pollable*> pollables_;
  std::vector<std::unique_ptr<Handler>> discarded_;
  std::function<uint64_t()> due_;
  std::function<void(const char*)> failed_;
  std::atomic<std::thread::id> id_{};
  std::unique_ptr<std::thread> thread_;
};

}  // namespace geartrain
