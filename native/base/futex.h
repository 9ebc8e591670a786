// Futex: sleep until another thread or process changes a shared word. Linux's system call has no wrapper in the
// C library.
//
// The words are in shared mappings or private memory, 4-byte aligned; both calls work on mappings that may only be
// read. A waker changes the word first and wakes then, so that no thread goes to sleep on an old value.
#pragma once

#include <atomic>
#include <cstdint>

namespace geartrain {

// Sleeps while the word is `seen`, at most so long. Returns early when woken, when a signal came, or for no reason:
// look at the word again. Throws os.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t seen, uint64_t timeout_ns);

// Wakes all threads that sleep on the word, in any process; a sleeper that died does no harm.
void futex_wake(const std::atomic<uint32_t>& word);

}  // namespace geartrain
