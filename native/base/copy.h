// Block copies: plain for what the reader will find in its cache, streaming for what is too large for it.
//
// A streaming copy writes around the cache: the destination's lines are not first read from memory, a third of
// the traffic. It pays once a batch outgrows the last-level cache and costs below that (docs/benchmarks/store.md).
// The widest form the CPU has is chosen at run time. `stream_fence` must follow streaming copies, on the thread
// that made them, before the data is published.
#pragma once

#include <cstddef>
#include <cstdint>

namespace geartrain {

// A batch of this many bytes and more is streamed: what no longer fits well into the last-level cache, source and
// destination together. On a machine with 32 MB of it the crossover lies between 13 and 26 MB.
size_t stream_from();

// The source may be overwritten meanwhile by another process (a torn row): the bytes are then invalid, and the
// caller detects it by the row's generation. The pointers may be null where `bytes` is 0.
void copy_block(void* to, const void* from, size_t bytes, bool stream);
void zero_block(void* to, size_t bytes);
void stream_fence();

// "avx512", "avx2", "sse2" or "memcpy": what streaming copies use on this machine.
const char* copy_kernel();
// Forces one of them, for tests; false when this machine does not have it.
bool set_copy_kernel(const char* name);

// A copy that uses several cores and goes around the cache where that is faster.
void copy_large(std::byte* to, const std::byte* from, uint64_t bytes);

}  // namespace geartrain
