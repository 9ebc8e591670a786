// File locks that the kernel drops when their owner dies: on bytes of a file, which need not exist, owned by an open
// file.
//
// An open file's lock (F_OFD_SETLK) is released with its last descriptor and its last mapping, hence when the process
// ends, however it ends. Unlike a pid it cannot be mistaken for another process's: pids are reused, and two containers
// that share a file can both run as pid 1. A second open of the file owns none of the first open file's locks.
//
// A forked child shares its parent's open file, and so its locks: they are held until both have closed it, and unmapped
// what they mapped from it. A child that wants locks of its own opens the file again, and maps it again from there
// (Mapping::reopen, weights/segment.py).
//
// Any thread and process. A shared lock needs a descriptor that may be read, an exclusive one that may be written, and
// asking needs neither. Which byte means what is the file's format: kClientLocks (store/client_lock.h) is the store's.
#pragma once

#include <cstdint>

#include "base/deadline.h"

namespace geartrain {

enum class LockKind : uint8_t { shared, exclusive };

// Takes the lock for this open file, or changes its kind; false when another open file is in the way. Never waits.
// Throws os: the descriptor or its file system cannot do it.
bool take_file_lock(int fd, uint64_t byte, LockKind kind = LockKind::exclusive);

// Retries until the lock is granted; false at the deadline, or at the first signal that arrives while it waits.
bool wait_for_file_lock(int fd, uint64_t byte, LockKind kind, Deadline deadline);

// Releases a lock that this open file may hold.
void drop_file_lock(int fd, uint64_t byte);

// Whether some *other* open file has the lock, of either kind. Throws os.
bool file_lock_held(int fd, uint64_t byte);

}  // namespace geartrain
