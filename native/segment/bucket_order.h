// Bucket order: large batches touch memory region by region instead of at random.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/buffer_pool.h"

namespace geartrain {

// Batches of this many entries and more are worth ordering; smaller ones fit the caches anyway.
constexpr size_t kOrderFrom = 1 << 15;

// Updates of this many leaves of a tree are worth ordering: fewer where it is so wide that hardly any leaf is in the
// cache.
constexpr size_t order_updates_from(uint64_t leaves) {
  return leaves < uint64_t{1} << 25 ? kOrderFrom : 1 << 12;
}

// The entries make(0..n-1), ordered by the leading bits of key_of(i), which is at most `keys`; equal leading bits keep
// their order. One pass of counting, one of writing: a batch is then read from front to back.
template <typename Entry, typename KeyOf, typename Make>
PooledArray<Entry> bucket_order(size_t n, uint64_t keys, KeyOf key_of, Make make) {
  constexpr int kLeadingBits = 12;
  const int shift = std::bit_width(keys) > kLeadingBits ? static_cast<int>(std::bit_width(keys)) - kLeadingBits : 0;
  std::vector<uint32_t> place((size_t{1} << kLeadingBits) + 1, 0);
  for (size_t i = 0; i < n; ++i) ++place[(key_of(i) >> shift) + 1];
  for (size_t bucket = 1; bucket < place.size(); ++bucket) place[bucket] += place[bucket - 1];
  PooledArray<Entry> ordered(n);
  for (size_t i = 0; i < n; ++i) ordered[place[key_of(i) >> shift]++] = make(i);
  return ordered;
}

}  // namespace geartrain
