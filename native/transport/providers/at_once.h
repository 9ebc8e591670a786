// Threads for what waits for the network several times at once: the handshakes of a connection's lanes (tcp_dial.cc),
// and a group's dials (collectives/membership.cc, redial.cc). Work of the processor is for the pool (base/threads.h),
// whose threads must not wait.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/errors.h"

namespace geartrain {

// The first failure of several threads. One that explains others comes before an end of the stream.
class FirstFailure {
 public:
  void note(const Error& what) noexcept;
  void note_no_memory() noexcept;
  // Throws it: an Error of the same kind and text, or bad_alloc. Nothing where there was none.
  void check() const;

 private:
  mutable std::mutex mutex_;
  std::optional<std::pair<ErrorKind, std::string>> error_;
  bool no_memory_ = false;
};

// Calls body(i) for each i below `count`, each on a thread of its own; where no more threads can be had, the rest on
// the caller's, one after the other. Returns when all calls have. The first failure, and what the caller's Interruption
// throws meanwhile, interrupts the waits of the others (base/interruption.h) and is thrown when all have ended.
// A signal's handler that forks within has its child's call end with hung_up: the threads are the parent's.
void at_once(uint32_t count, const std::function<void(uint32_t)>& body);
// The same on so many threads at most, each of which takes the next i. One call alone is the caller's.
void at_once(uint32_t count, uint32_t most_threads, const std::function<void(uint32_t)>& body);

}  // namespace geartrain
