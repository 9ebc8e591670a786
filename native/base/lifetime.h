// Lifetime of what a process makes: whose it is after a fork, its calls and its one end, its threads and its mutexes.
//
// Fork. A forked child has a copy of every object of its parent's, and none of the threads. The copies stay the
// parent's (Owned): their calls throw hung_up (Lifetime::check) or do nothing, and their destructors tell no peer, take
// no lock, which a thread of the parent's may have held, and join no thread (OwnThread). What lives as long as the
// process is taken before a fork and given back after it (of_process), or made anew in the child (of_this_process).
// Descriptors are closed in the child (descriptor.h). Stores alone go on there (store/open_stores.h).
//
// Close. The first caller closes; the others wait until it has left, or return at once, as the object says. No call
// begins from then on. Those in progress are counted (enter, leave) where the object's memory is theirs, and end their
// waits (must_end, closed); whoever closes waits for them (drain). Elsewhere the end of a socket wakes them.
//
// Any thread. Nothing here is in shared memory.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "base/deadline.h"
#include "base/futex.h"

namespace geartrain {

// The number of forks between this process and the one that loaded the library.
extern std::atomic<uint64_t> fork_count;
inline uint64_t forks() {
  return fork_count.load(std::memory_order_relaxed);
}

// Belongs to the process that made it.
class Owned {
 public:
  // Whether this process is a forked child of that one.
  bool forked() const { return forks_ != forks(); }

 private:
  uint64_t forks_ = forks();
};

// One atomic word of an object:
//
//   bit 31       closed: no call begins any more, and those in progress end their waits
//   bit 30       left: whoever closed the object is done
//   bit 29       drained: whoever closed the object is alone with it
//   bits 0..28   calls in progress
class Lifetime : public Owned {
 public:
  // For errors: what the object is, and what a forked child does instead.
  explicit Lifetime(const char* name, const char* in_child = "make one here") : name_(name), in_child_(in_child) {}

  bool closed() const { return (word_.load(std::memory_order_acquire) & kClosed) != 0; }
  // Both throw hung_up: in a forked child; and once it is closed.
  void check_process() const {
    if (forked()) [[unlikely]]
      refuse();
  }
  void check() const {
    if (forked() || closed()) [[unlikely]]
      refuse();
  }
  [[noreturn]] void refuse() const;

  // False when it is closed; otherwise leave() ends the call.
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
  // Whether a call in progress must end its wait, because another thread closes. Never true for that thread, which
  // waits for other things once no call is in progress.
  bool must_end() const {
    const uint32_t word = word_.load(std::memory_order_acquire);
    return (word & (kClosed | kDrained)) == kClosed && (word & kCount) != 0;
  }

  // True for the one caller that closes. Of several callers the nearest deadline counts, as deadline() says.
  bool close() { return (word_.fetch_or(kClosed) & kClosed) == 0; }
  bool close(Deadline deadline);
  Deadline deadline() const { return deadline_.load(); }
  // After close(): waits until no call is in progress; false at the deadline.
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
  bool wait_until_left(Deadline deadline = Deadline::never()) const {
    return wait_until(deadline, [](uint32_t word) { return (word & kLeft) != 0; });
  }

  // In a forked child that goes on with the object: no thread but one exists, and that one is in no call.
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

  const char* const name_;
  const char* const in_child_;
  std::atomic<uint32_t> word_{0};
  std::atomic<Deadline> deadline_{Deadline::never()};
};

// A thread of an object's. It gets none of the process's signals but those of its own faults: a program's thread that
// waits for a signal by sigwait is not to lose it to one that it knows nothing of.
class OwnThread {
 public:
  OwnThread() = default;
  OwnThread(const OwnThread&) = delete;
  OwnThread& operator=(const OwnThread&) = delete;
  ~OwnThread() { join(); }
  // Once. Throws os, with `what` could not be started.
  void start(const char* what, std::function<void()> body);
  // Nothing in a forked child, which never had it, nor where it did not start.
  void join();

 private:
  std::unique_ptr<std::thread> thread_;
  const Owned owned_;
};

// Base of what of_process() makes, with a mutex that no fork leaves held. `after_fork` may be hidden by one's own.
struct ForkSafe {
  std::mutex mutex;
  void before_fork() { mutex.lock(); }
  void after_fork([[maybe_unused]] bool in_child) { mutex.unlock(); }
};

// The process's one T, which its forked children go on with. Never deleted: threads may outlive main.
template <typename T>
T& of_process() {
  static T* const made = [] {
    static T* one = new T();
    ::pthread_atfork([] { one->before_fork(); }, [] { one->after_fork(false); }, [] { one->after_fork(true); });
    return one;
  }();
  return *made;
}

// The process's one T that has threads: a forked child leaves its parent's as it is, and makes another.
template <typename T>
T& of_this_process() {
  struct Place : ForkSafe {
    T* made = nullptr;
    void after_fork(bool in_child) {
      if (in_child) made = nullptr;
      mutex.unlock();
    }
  };
  auto& place = of_process<Place>();
  std::lock_guard lock(place.mutex);
  if (place.made == nullptr) place.made = new T();
  return *place.made;
}

}  // namespace geartrain
