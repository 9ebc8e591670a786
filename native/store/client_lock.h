// Leases of a segment's clients: each holds the lock of one byte of the segment's file (base/file_lock.h), far
// beyond its end. A forked child would share its parent's; Store opens the file again in the child (store.cc).
#pragma once

#include "base/errors.h"
#include "base/file_lock.h"
#include "base/lifetime.h"

namespace geartrain {

// How often a wait for other processes looks whether another thread closes the handle.
constexpr double kLookEveryS = 0.05;

// Part of the format: one byte per client slot, and one that serialises joining and leaving.
constexpr uint64_t kClientLocks = uint64_t{1} << 61;  // no segment is that long
constexpr uint64_t kGateLock = kClientLocks + (1u << 20);

inline bool take_client_lock(int fd, uint32_t slot) {
  return take_file_lock(fd, kClientLocks + slot);
}

inline void drop_client_lock(int fd, uint32_t slot) {
  drop_file_lock(fd, kClientLocks + slot);
}

// Whether another client holds the slot's lease. When in doubt it does: then no client's rows are reclaimed.
inline bool client_lives(int fd, uint32_t slot) {
  try {
    return file_lock_held(fd, kClientLocks + slot);
  } catch (const Error&) {
    return true;
  }
}

// Holds the gate for its lifetime: one client at a time joins or leaves. Throws lock_timeout, and closed when another
// thread closes the handle meanwhile.
class Gate {
 public:
  Gate(int fd, double timeout_s, const Lifetime& calls) : fd_(fd) {
    for (const Deadline deadline = Deadline::after(timeout_s);
         !wait_for_file_lock(fd_, kGateLock, LockKind::exclusive, deadline.sooner(kLookEveryS));) {
      if (calls.must_end()) fail(ErrorKind::closed, "the store was closed");
      if (!deadline.passed()) continue;  // a signal, or time to look
      fail(ErrorKind::lock_timeout, "another process has been joining or leaving the store for ", timeout_s,
           " s; it may be stopped");
    }
  }
  ~Gate() { drop_file_lock(fd_, kGateLock); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

 private:
  int fd_;
};

}  // namespace geartrain
