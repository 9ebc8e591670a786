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
// No exception leaves the thread: what a task, a handler or the timer throws (memory runs out, usually) is handed to
// `failed`, after its stack was unwound, and the loop goes on. After stop(), which any threads may call at once, and
// in a forked child, tasks are refused.
#pragma once

#include <sys/epoll.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/descriptor.h"
#include "base/patience.h"

namespace geartrain {

class EventLoop {
 public:
  class Handler {
   public:
    virtual ~Handler() = default;
    virtual void ready(uint32_t events) = 0;

   private:
    friend class EventLoop;
    std::unique_ptr<Handler> next_discarded_;
  };
  // A source without a descriptor that becomes ready while the loop is awake.
  class Pollable {
   public:
    virtual ~Pollable() = default;
    virtual bool look() = 0;            // handles what is ready; false: nothing was
    virtual bool announce_sleep() = 0;  // false: there is something to handle after all
    virtual void announce_wake() = 0;
  };

  // `failed` runs on the loop, and must not throw.
  using Failed = std::function<void(const std::exception& error)>;
  EventLoop(const char* name, Failed failed);
  ~EventLoop();  // stops
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Any thread. False when the loop has stopped: the task was dropped.
  bool post(std::function<void()> task);
  // Runs it on the loop, and returns then; throws what it throws. False when the loop has stopped.
  bool call(const std::function<void()>& what);
  // Runs what was posted before, then ends the thread. Not from the loop's own thread.
  void stop();
  // Whether this process was forked from the one that the loop runs in.
  bool forked() const;
  bool here() const { return std::this_thread::get_id() == id_.load(); }
  // A descriptor that wakes the loop when it becomes readable: passed to peers that share memory with it.
  int wake_descriptor() const { return wake_.get(); }

  // --- on the loop's thread -----------------------------------------------------------------------------------------
  void watch(int fd, uint32_t events, Handler* handler);
  void change(int fd, uint32_t events, Handler* handler);
  void unwatch(int fd);
  void add(Pollable* pollable) { pollables_.push_back(pollable); }
  void remove(Pollable* pollable) { std::erase(pollables_, pollable); }
  void discard(std::unique_ptr<Handler> handler) noexcept {
    handler->next_discarded_ = std::move(discarded_);
    discarded_ = std::move(handler);
  }
  // Called at least before every sleep; returns the nanoseconds after which to be called again.
  void on_time(std::function<uint64_t()> due) { due_ = std::move(due); }
  // While it is true, rings are polled for a while before a sleep, if there is a core for each process at their ends.
  void poll_while(std::function<bool()> wanted) { wanted_ = std::move(wanted); }

 private:
  void run(const char* name) noexcept;
  bool run_tasks();
  bool look_at_all();
  bool poll();
  void destroy_discarded();
  template <typename Act>
  void guarded(Act&& act);

  Descriptor epoll_, wake_;
  const uint64_t forks_;
  const Failed failed_;
  std::mutex mutex_;
  std::vector<std::function<void()>> tasks_;
  bool stopping_ = false;
  std::atomic<bool> sleeping_{false}, posted_{false};
  std::vector<Pollable*> pollables_;
  std::unique_ptr<Handler> discarded_;  // a list
  std::function<uint64_t()> due_;
  std::function<bool()> wanted_;
  Patience patience_;
  std::atomic<std::thread::id> id_{};
  std::once_flag stopped_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace geartrain
