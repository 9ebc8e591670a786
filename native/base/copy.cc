#include "base/copy.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/threads.h"
#include "base/widest_form.h"

namespace geartrain {
namespace {

using Kernel = void (*)(unsigned char* to, const unsigned char* from, size_t bytes);

#if defined(__SANITIZE_THREAD__)
// Readers race with writers by design (the generation detects it afterwards). ThreadSanitizer must not see that
// race, and must see every other: so the copy is made by code it does not instrument.
__attribute__((no_sanitize("thread"), noinline)) void plain(unsigned char* to, const unsigned char* from,
                                                            size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    to[i] = *const_cast<const volatile unsigned char*>(from + i);
  }
}
#else
void plain(unsigned char* to, const unsigned char* from, size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);  // memcpy does not take a null pointer, not even for no bytes
}
#endif

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)

// Each kernel gets a 64-byte aligned destination and a multiple of 256 bytes.
void stream_sse2(unsigned char* to, const unsigned char* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) {
    for (size_t j = i; j < i + 64; j += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + j), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j)));
    }
  }
}

__attribute__((target("avx2"))) void stream_avx2(unsigned char* to, const unsigned char* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 128) {
    for (size_t j = i; j < i + 128; j += 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + j),
                          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + j)));
    }
  }
}

__attribute__((target("avx512f"))) void stream_avx512(unsigned char* to, const unsigned char* from, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 256) {
    for (size_t j = i; j < i + 256; j += 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + j),
                          _mm512_loadu_si512(reinterpret_cast<const void*>(from + j)));
    }
  }
}

struct Named {
  const char* name;
  Kernel kernel;
  bool (*viable)();
};
constexpr Named kKernels[] = {
    {"avx512", stream_avx512, [] { return __builtin_cpu_supports("avx512f") != 0; }},
    {"avx2", stream_avx2, [] { return __builtin_cpu_supports("avx2") != 0; }},
    {"sse2", stream_sse2, [] { return true; }},
    {"memcpy", plain, [] { return true; }},
};

#else

struct Named {
  const char* name;
  Kernel kernel;
  bool (*viable)();
};
constexpr Named kKernels[] = {{"memcpy", plain, [] { return true; }}};

#endif

constinit WidestForm<Named> copy_form{kKernels};

}  // namespace

void copy_block(void* to, const void* from, size_t bytes, bool stream) {
  auto* out = static_cast<unsigned char*>(to);
  const auto* in = static_cast<const unsigned char*>(from);
  if (!stream || bytes < 1024) {
    plain(out, in, bytes);
    return;
  }
  const size_t head = (64 - reinterpret_cast<uintptr_t>(out) % 64) % 64;
  const size_t body = (bytes - head) / 256 * 256;
  if (head != 0) plain(out, in, head);
  copy_form.get().kernel(out + head, in + head, body);
  const size_t done = head + body;
  if (done != bytes) plain(out + done, in + done, bytes - done);
}

size_t stream_from() {
  static const size_t threshold = [] {
    const long cache = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
    // A virtual machine may report the caches of the whole host, of which it has a slice.
    constexpr size_t kMost = size_t{20} << 20;
    return cache > 0 ? std::min(static_cast<size_t>(cache) / 5 * 3, kMost) : kMost;
  }();
  return threshold;
}

void zero_block(void* to, size_t bytes) {
  std::memset(to, 0, bytes);
}

void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

const char* copy_kernel() {
  return copy_form.get().name;
}

bool set_copy_kernel(const char* name) {
  return copy_form.force(name);
}

void copy_large(std::byte* to, const std::byte* from, uint64_t bytes) {
  constexpr uint64_t kPiece = uint64_t{4} << 20;
  if (bytes < 2 * kPiece) {
    if (bytes != 0) std::memcpy(to, from, bytes);
    return;
  }
  static const unsigned threads = std::min(available_cores(), 4u);
  const bool stream = bytes >= stream_from();
  parallel_for(bytes, kPiece, threads, [&](size_t first, size_t last) {
    copy_block(to + first, from + first, last - first, stream);
    if (stream) stream_fence();
  });
}

}  // namespace geartrain
