// Cache lines of rows: asked for before they are copied, so that their misses overlap, and copied where they are few.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/copy.h"

namespace geartrain {

constexpr size_t kLine = 64;
// Lines of one field that are asked for; a processor fetches further ones by itself.
constexpr uint64_t kLinesAhead = 8;
constexpr uint64_t kFewBytes = 256;
constexpr uint64_t kPage = 4096;
// Pages of one field that are asked for: with 64 rows in flight a third of what a second-level TLB holds.
constexpr uint64_t kPagesAhead = 16;

#if defined(__SANITIZE_THREAD__)
// Readers race with writers by design, which only copy_block hides from ThreadSanitizer.
inline void copy_few(std::byte* to, const std::byte* from, uint64_t bytes) {
  copy_block(to, from, bytes, false);
}
inline uint8_t read_byte(const std::byte* from) {
  uint8_t value;
  copy_block(&value, from, 1, false);
  return value;
}
inline void touch(const std::byte* at) {
  __builtin_prefetch(at);
}
#else
// At what a call of memcpy costs before its first byte.
inline void copy_few(std::byte* to, const std::byte* from, uint64_t bytes) {
  struct Lane {
    uint64_t low, high;
  };
  if (bytes >= sizeof(Lane)) {
    Lane lane;
    for (uint64_t at = 0; at + sizeof lane <= bytes; at += sizeof lane) {
      std::memcpy(&lane, from + at, sizeof lane);
      std::memcpy(to + at, &lane, sizeof lane);
    }
    std::memcpy(&lane, from + bytes - sizeof lane, sizeof lane);  // the rest, and some of it again
    std::memcpy(to + bytes - sizeof lane, &lane, sizeof lane);
  } else if (bytes >= 4) {
    uint32_t word;
    for (uint64_t at = 0; at + sizeof word <= bytes; at += sizeof word) {
      std::memcpy(&word, from + at, sizeof word);
      std::memcpy(to + at, &word, sizeof word);
    }
    std::memcpy(&word, from + bytes - sizeof word, sizeof word);
    std::memcpy(to + bytes - sizeof word, &word, sizeof word);
  } else {
    for (uint64_t at = 0; at < bytes; ++at) to[at] = from[at];
  }
}
inline uint8_t read_byte(const std::byte* from) {
  return static_cast<uint8_t>(*from);
}
// A load and not a prefetch, which processors drop where it needs a page walk: rows lie in pages of 4 KB.
inline void touch(const std::byte* at) {
  (void)*reinterpret_cast<const volatile uint8_t*>(at);
}
#endif

// The pages behind the first, which was touched: as many as a processor still knows when the piece is copied. Of 32
// pieces of 35 KB in shared memory of 4 KB pages, a copy takes 62 us with this and 70 without, as long as one out of
// huge pages (64).
inline void touch_pages(const std::byte* from, uint64_t bytes) {
  const uint64_t near = std::min(bytes, kPagesAhead * kPage);
  for (uint64_t at = kPage; at < near; at += kPage) touch(from + at);
}

// The lines behind the first, which was touched.
inline void prefetch_lines(const std::byte* from, uint64_t bytes) {
  touch_pages(from, bytes);
  const uint64_t near = std::min(bytes, kLinesAhead * kLine);
  for (uint64_t at = kLine; at < near; at += kLine) __builtin_prefetch(from + at);
  if (bytes > 1) __builtin_prefetch(from + bytes - 1);
}

// A copy of one piece of a batch.
inline void copy_lines(std::byte* to, const std::byte* from, uint64_t bytes, bool stream) {
  if (bytes <= kFewBytes) {
    copy_few(to, from, bytes);
  } else {
    copy_block(to, from, bytes, stream);
  }
}

}  // namespace geartrain
