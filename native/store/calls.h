// Calls in flight on a handle: what lets one thread close a handle that others are using.
//
//   bit 31       closed: no call begins any more, and those in flight end their waits
//   bit 30       left: whoever closed the handle has left the segment
//   bit 29       drained: whoever closed the handle is alone with it
//   bits 0..28   calls in flight
//
// A call is one atomic addition at its beginning and one at its end. Whoever closes sets the bit, waits until the
// count is zero, and is then alone with the handle. Any thread; nothing here is in shared memory.
#pragma once

#include <atomic>
#include <cstdint>

#include "base/deadline.h"
#include "base/futex.h"

namespace geartrain {

class CallsInFlight {
 public:
  // False when the handle is closed; otherwise leave() ends the call.
  bool enter() {
    // Refused calls do not count, so that a thread that goes on trying cannot keep the count above zero. One that comes
    // between this look and the addition is counted for a moment, which nobody takes for a call once drained() is said.
    if (closed()) return false;
    if ((word_.fetch_add(1) & kClosed) == 0) return true;
    leave();
    return false;
  }
  void leave() {
    const uint32_t before = word_.fetch_sub(1);
    if ((before & kClosed) != 0 && (before & kCount) == 1) futex_wake(word_);
  }

  bool closed() const { return (word_.load(std::memory_order_acquire) & kClosed) != 0; }
  // Whether a call in flight must end its wait, because another thread closes the handle. Never true for that thread,
  // which waits for other things once no call is in flight.
  bool must_end() const {
    const uint32_t word = word_.load(std::memory_order_acquire);
    return (word & (kClosed | kDrained)) == kClosed && (word & kCount) != 0;
  }

  // True for the one caller that closes the handle.
  bool close() { return (word_.fetch_or(kClosed) & kClosed) == 0; }
  // After close(): waits until no call is in flight; false at the deadline.
  bool drain(Deadline deadline) const {
    return wait_until(deadline, [](uint32_t word) { return (word & kCount) == 0; });
  }
  // After drain(), by the same thread: its own waits are not to end because of calls.
  void drained() { word_.fetch_or(kDrained); }
  void left() {
    word_.fetch_or(kLeft);
    futex_wake(word_);
  }
  // For the other callers of close(): waits until the first has left.
  bool wait_until_left(Deadline deadline) const {
    return wait_until(deadline, [](uint32_t word) { return (word & kLeft) != 0; });
  }

  // In a forked child no thread but one exists, and that one is in no call.
  void forget_other_threads(bool close) { word_.store(close || closed() ? kClosed | kLeft : 0); }

 private:
  static constexpr uint32_t kClosed = 1u << 31, kLeft = 1u << 30, kDrained = 1u << 29, kCount = kDrained - 1;

  template <typename Done>
  bool wait_until(Deadline deadline, Done done) const {
    for (uint32_t word = word_.load(); !done(word); word = word_.load()) {
      const uint64_t left_ns = deadline.left_ns();
      if (left_ns == 0) return false;
      futex_wait(word_, word, left_ns);
    }
    return true;
  }

  std::atomic<uint32_t> word_{0};
};

}  // namespace geartrain
