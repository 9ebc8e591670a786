// Work: one operation as its caller sees it, its arguments and whether it is complete. Any thread may wait.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/condition_variable.h"
#include "base/event_loop.h"
#include "collectives/protocol.h"
#include "transport/transport.h"

namespace geartrain {

// One rank's part of an operation's numbers in the caller's memory.
struct Segment {
  std::byte* at = nullptr;
  uint64_t count = 0;  // elements
};

class Work {
 public:
  Work(const Shape& shape, const std::byte* in, std::byte* out, double timeout_s)
      : shape(shape),
        in(in),
        out(out),
        deadline(Deadline::after(timeout_s)),
        ask_ns(static_cast<uint64_t>(std::clamp(timeout_s / 3, 0.3, 2.0) * 1e9)) {}
  // Every other collective than all_reduce: what goes to each rank, and what comes from each; or one of either.
  Work(const Shape& shape, std::vector<Segment> sends, std::vector<Segment> receives, double timeout_s)
      : Work(shape, sends.size() == 1 ? sends[0].at : nullptr, receives.size() == 1 ? receives[0].at : nullptr,
             timeout_s) {
    this->sends = std::move(sends);
    this->receives = std::move(receives);
  }
  const Shape shape;
  const std::byte* const in;  // read until a result for the same place has come
  std::byte* const out;       // may be `in`
  std::vector<Segment> sends, receives;
  const Deadline deadline;
  const uint64_t ask_ns;                  // how long before it the owners are queried
  uint64_t number = 0;                    // the loop's, and fixed once it is done
  std::shared_ptr<EventLoop::Turn> turn;  // where who waits may run the loop meanwhile; before it is posted

  bool done() const { return done_.load(std::memory_order_acquire); }
  // False at the deadline; the operation goes on.
  bool wait(Deadline until) {
    if (turn != nullptr && !done()) turn->run_until(done_, until);
    std::unique_lock lock(mutex_);
    while (!done()) {
      const uint64_t left_ns = until.left_ns();
      if (left_ns == 0) return false;
      over_.wait_for(lock, std::chrono::nanoseconds(left_ns));
    }
    return true;
  }
  // Why it failed; kind none when it did not. Once done.
  const Fault& fault() const {
    static const Fault none;
    return fault_ == nullptr ? none : *fault_;
  }

  // By the loop, once: nothing touches `in` and `out` afterwards. Without a fault: it has succeeded.
  void finish(std::shared_ptr<const Fault> fault = nullptr) noexcept {
    std::lock_guard lock(mutex_);
    fault_ = std::move(fault);
    done_.store(true, std::memory_order_release);
    over_.notify_all();
  }

 private:
  std::mutex mutex_;
  ConditionVariable over_;
  std::atomic<bool> done_{false};
  std::shared_ptr<const Fault> fault_;
};

}  // namespace geartrain
