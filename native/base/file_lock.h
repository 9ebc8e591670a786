// Who is alive, as the kernel sees it.
//
// Every attached process holds an open-file-description lock on one byte of the segment's file, far beyond
// its end. The kernel drops the lock when the last descriptor of that open file goes, which is to say when
// the process ends, however it ends. Unlike a pid, a lease cannot be mistaken for another process's: pids
// are reused, and two containers that share a segment can both run as pid 1.
//
// A forked child would share its parent's lease; Store reopens the file in the child (store.cc).
#pragma once

#include <cstdint>

namespace geartrain {

// Byte numbers, counted from the lease area: one per client slot, and one that serialises join and leave.
constexpr uint32_t kGateLease = 1u << 20;

// Takes the lease for this open file; false when another open file holds it. Never waits.
bool take_lease(int fd, uint32_t number);

void drop_lease(int fd, uint32_t number);

// Whether some *other* open file holds the lease.
bool lease_held(int fd, uint32_t number);

// Holds the gate for its lifetime. Waits for it, and throws lock_timeout after timeout_s.
class Gate {
 public:
  Gate(int fd, double timeout_s);
  ~Gate();
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

 private:
  int fd_;
};

}  // namespace geartrain
