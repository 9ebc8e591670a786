// Thread pool for copies: one per process, made on first use and again after a fork.
//
// Any thread may call parallel_for; the caller works too, so progress never depends on a free worker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace geartrain {

// Workers poll for their next job for so long before they sleep, and callers for the end of their last pieces: about
// what a sleep and its end take.
constexpr uint64_t kWorkersPollNs = 50'000;

// Runs body(context, first, last) over [0, count) in pieces of `grain`, on up to `threads` threads including the
// caller. Returns when all is done. The body must not throw.
void parallel_for(size_t count, size_t grain, unsigned threads, void (*body)(void*, size_t, size_t), void* context);

template <typename Body>
void parallel_for(size_t count, size_t grain, unsigned threads, Body&& body) {
  parallel_for(
      count, grain, threads,
      [](void* context, size_t first, size_t last) {
        (*static_cast<std::remove_reference_t<Body>*>(context))(first, last);
      },
      &body);
}

// Cores in this process's affinity mask.
unsigned available_cores();

}  // namespace geartrain
