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
// While the loop's thread sleeps, a thread that posts a task (post_here) or waits for what the loop does
// (Turn::run_until) may run the loop in its place: no thread is woken then, in this process or, as long as both poll,
// in a peer's. When it has nothing to do it sleeps there, too, and is woken in that thread's place. One thread has the
// turn at a time, and "the loop's thread" below is the one that has it. Sockets are the own thread's: where epoll
// reports one it asks for the turn, and gets it at once.
//
// Handlers are destroyed by discard() only, after the round of events that they may still be part of, on the own
// thread.
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
#include <vector>

#include "base/core_turns.h"
#include "base/deadline.h"
#include "base/descriptor.h"
#include "base/lifetime.h"
#include "base/patience.h"
#include "base/stage_clock.h"
#include "base/threads.h"

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
    virtual bool look() = 0;  // handles what is ready; false: nothing was
    // False: there is something to handle after all. `waited`: something is in progress here that nobody polls for.
    virtual bool announce_sleep(bool waited) = 0;
    virtual void announce_wake() = 0;
    // Whether a peer that sleeps, and waits for nothing, is left asleep by what is written to it, until send_wakes():
    // it may be about to look by itself.
    virtual void hold_wakes([[maybe_unused]] bool hold) {}
    virtual void send_wakes() {}
  };
  // The right to run the loop. Of what is waited for, too, which may outlive the loop.
  class Turn {
   public:
    // Runs the loop on this thread, where its own sleeps: until `done`, or until the loop's thread has to run it. When
    // nothing has happened for as long as spin() says it sleeps. May return at once.
    void run_until(const std::atomic<bool>& done, Deadline until);

   private:
    friend class EventLoop;
    explicit Turn(EventLoop* loop) : loop_(loop) {}
    const Owned owned_;
    std::mutex mutex_;
    std::atomic<uint32_t> claims_{0};  // of the loop's own thread
    std::atomic<EventLoop*> loop_;     // null once it has ended
  };

  // `failed` runs on the loop, and must not throw.
  using Failed = std::function<void(const std::exception& error)>;
  EventLoop(const char* name, Failed failed);
  ~EventLoop();  // stops
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Any thread. False when the loop has stopped: the task was dropped.
  bool post(std::function<void()> task);
  // The same, but on this thread where the loop's sleeps; for what takes no longer than a thread's waking. `soon`: this
  // thread calls Turn::run_until() next.
  bool post_here(std::function<void()> task, bool soon);
  // Runs it on the loop, and returns then; throws what it throws. False when the loop has stopped.
  bool call(const std::function<void()>& what);
  // Runs what was posted before, then ends the thread. Not from the loop's own thread.
  void stop();
  // Whether this process was forked from the one that the loop runs in.
  bool forked() const { return life_.forked(); }
  const std::shared_ptr<Turn>& turn() const { return turn_; }
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
  // While it is true, rings are polled before a sleep, if there is a core for each process at their ends: for about as
  // long as a sleep and its end take, so that it costs at most twice what it saves. It does not adapt to what it finds:
  // peers that both poll less since the other one sleeps would never poll again.
  void poll_while(std::function<bool()> wanted) { wanted_ = std::move(wanted); }
  // How long who runs the loop in its place polls after the last thing that happened. Below 0: some 50 us, and where
  // there are fewer cores than processes at the rings' ends it offers the core to others meanwhile; not while others
  // than these take it. At 0 nobody polls.
  void spin(double spin_us);
  // Whether that is who runs it now.
  bool driven() const { return driven_; }
  // Where the time goes of who has the turn, once it was started.
  StageClock& stages() { return stages_; }

 private:
  void run(const char* name) noexcept;
  void wake() { ring_bell(wake_); }
  bool push(std::function<void()> task);
  void drive(const std::atomic<bool>* done, Deadline until, bool soon);
  bool drive_until(const std::atomic<bool>* done, Deadline until);
  bool sleep_here(uint64_t most_ns);
  void hear_wakes();
  void clear_wakes();
  void leave(bool waited, bool soon);
  bool run_tasks();
  bool look_at_all();
  bool announce_sleep(bool waited);
  bool crowded();
  uint64_t spin_ns(uint64_t now_ns) const;
  bool poll();
  void destroy_discarded();
  template <typename Act>
  void guarded(Act&& act);

  Descriptor epoll_, wake_;
  const Failed failed_;
  std::mutex mutex_;
  std::vector<std::function<void()>> tasks_;
  Lifetime life_{"group"};
  std::atomic<bool> sleeping_{false}, posted_{false};
  const std::shared_ptr<Turn> turn_;
  // Of who has the turn.
  std::vector<Pollable*> pollables_;
  std::unique_ptr<Handler> discarded_;  // a list
  std::function<uint64_t()> due_;
  std::function<bool()> wanted_;
  double spin_us_ = -1;
  unsigned cores_ = 0;
  uint64_t cores_at_ns_ = 0, sleeps_until_ns_ = 0, polls_again_ns_ = 0;
  CoreTurns core_turns_;
  StageClock stages_;
  bool driven_ = false;
  bool deaf_ = false;  // `wake_` is not reported to the loop's thread, but to who runs it in its place
  OwnThread thread_;
};

}  // namespace geartrain
