// Cache lines of rows: asked for before they are copied, so that their misses overlap, and copied where they are few.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/copy.h"

namespace geartrain {

constexpr size_t kLine = 64;
// Of a piece up to this size all lines are asked for; of a longer one a processor fetches most by itself. 250 rows of
// 4 KB from memory: 76 us with all of their lines asked for, 102 with one a page (Zen 5).
constexpr uint64_t kAskedBytes = 4096;
constexpr uint64_t kFewBytes = 256;
constexpr uint64_t kPage = 4096;
// Pages of one field that are asked for of a row. With the 2 to 8 rows of a fetch in flight, or the 16 of transitions,
// they are 256 at most: far fewer than a second-level TLB holds.
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
#endif

// Asks for a piece. By prefetches, which walk pages as loads do and hold nothing up, where a load whose line is far
// away keeps what follows from being completed: 256 windows of 20 steps of three fields 56 us with these, 93 with
// loads.
inline void prefetch_piece(const std::byte* from, uint64_t bytes) {
  asm volatile("");  // g++ takes a function that only prefetches for one without effects, and drops calls of it
  const uint64_t pages = std::min(bytes, kPagesAhead * kPage);
  for (uint64_t at = 0; at < pages; at += kPage) __builtin_prefetch(from + at);
  if (bytes > kAskedBytes) return;
  for (uint64_t at = kLine; at < bytes; at += kLine) __builtin_prefetch(from + at);
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
