// Self-checking rows, every element of which follows from one tag that the row carries, and stores for them.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "fetch/fetch.h"
#include "store/store.h"
#include "tests/support/check.h"

namespace geartrain {

constexpr uint32_t kTaggedSteps = 128, kTaggedWidth = 4;

inline std::vector<FieldSpec> tagged_fields() {
  return {{"tag", 8, 8, false, {}}, {"steps", 8, 8, true, {kTaggedSteps, kTaggedWidth}}, {"late", 8, 8, false, {3}}};
}

inline StoreOptions store_options(uint64_t capacity) {
  StoreOptions options;
  options.capacity = capacity;
  options.lock_timeout_s = 30;
  return options;
}

inline void check_sound(Store& store) {
  for (const std::string& problem : store.audit()) testing::failed(__FILE__, __LINE__, problem);
}

inline uint64_t tagged_step(uint64_t tag, uint64_t step, uint64_t at) {
  return tag * 0x9e3779b97f4a7c15u + step * kTaggedWidth + at;
}
// Rows of such tags may be found shorter than they are going to be.
constexpr uint64_t kOpenTag = uint64_t{1} << 63;

inline uint32_t tagged_length(uint64_t tag) {
  return 1 + static_cast<uint32_t>(tag * 0x2545f4914f6cdd1du >> 32) % kTaggedSteps;
}

// Writes rows of these tags, which were allocated by this process; returns their lengths.
inline std::vector<uint32_t> fill_tagged(Store& store, std::span<const uint32_t> rows, std::span<const uint64_t> tags) {
  const size_t n = rows.size();
  std::vector<uint64_t> steps(n * kTaggedSteps * kTaggedWidth), late(n * 3);
  std::vector<uint32_t> lengths(n);
  for (size_t i = 0; i < n; ++i) {
    lengths[i] = tagged_length(tags[i]);
    for (uint32_t t = 0; t < kTaggedSteps; ++t) {
      for (uint32_t k = 0; k < kTaggedWidth; ++k) {
        steps[(i * kTaggedSteps + t) * kTaggedWidth + k] = tagged_step(tags[i], t, k);
      }
    }
    for (uint32_t k = 0; k < 3; ++k) late[i * 3 + k] = tags[i] ^ k;
  }
  const InsertField fields[3] = {{0, reinterpret_cast<const std::byte*>(tags.data()), 8},
                                 {1, reinterpret_cast<const std::byte*>(steps.data()), kTaggedSteps * kTaggedWidth * 8},
                                 {2, reinterpret_cast<const std::byte*>(late.data()), 24}};
  fill(store, rows, fields, lengths, 1);
  return lengths;
}

// An open row: its first step, and all fields without time, after which it can be published with length 1.
inline void begin_tagged(Store& store, uint32_t row, uint64_t tag) {
  std::memcpy(store.block(0, row), &tag, 8);
  auto* late = reinterpret_cast<uint64_t*>(store.block(2, row));
  for (uint32_t k = 0; k < 3; ++k) late[k] = tag ^ k;
}
// Its steps [from, to), which need not be published yet.
inline void grow_tagged(Store& store, uint32_t row, uint64_t tag, uint32_t from, uint32_t to) {
  auto* steps = reinterpret_cast<uint64_t*>(store.block(1, row));
  for (uint32_t t = from; t < to; ++t) {
    for (uint32_t k = 0; k < kTaggedWidth; ++k) steps[t * kTaggedWidth + k] = tagged_step(tag, t, k);
  }
}

inline void commit_tagged(Store& store, std::span<const uint32_t> rows, std::span<const uint64_t> tags,
                          std::span<uint32_t> generations, double priority = 1) {
  const std::vector<uint32_t> lengths = fill_tagged(store, rows, tags);
  const std::vector<double> priorities(rows.size(), priority);
  const std::vector<int64_t> versions(tags.begin(), tags.end());
  store.commit(rows, {lengths, priorities, versions}, generations);
}

inline void insert_tagged(Store& store, std::span<const uint64_t> tags, std::span<uint32_t> rows,
                          std::span<uint32_t> generations, double priority = 1) {
  store.allocate(rows);
  commit_tagged(store, rows, tags, generations, priority);
}

// The rows of the keys (whole, or windows ending at `ends`), checked: counts those that were fetched, torn and mixed.
struct TaggedBatch {
  uint64_t whole = 0, torn = 0, mixed = 0;
};

inline TaggedBatch fetch_tagged(const Store& store, std::span<const uint32_t> rows,
                                std::span<const uint32_t> generations, uint32_t window = 0,
                                std::span<const int32_t> ends = {}, unsigned threads = 1) {
  const size_t n = rows.size();
  const uint32_t width = window != 0 ? window : kTaggedSteps;
  std::vector<uint64_t> tags(n), steps(n * width * kTaggedWidth), late(n * 3);
  std::vector<uint8_t> torn(n), mask(n * width);
  std::vector<int32_t> starts(n), lengths(n);
  std::vector<int64_t> versions(n);
  const FetchField fields[3] = {{0, reinterpret_cast<std::byte*>(tags.data())},
                                {1, reinterpret_cast<std::byte*>(steps.data())},
                                {2, reinterpret_cast<std::byte*>(late.data())}};
  FetchRequest request;
  request.rows = rows;
  request.generations = generations;
  request.fields = fields;
  request.window = window;
  request.ends = ends;
  request.threads = threads;
  request.torn = torn;
  request.mask = mask;
  request.starts = starts;
  request.lengths = lengths;
  request.versions = versions;
  fetch(store, request);
  TaggedBatch out;
  for (size_t i = 0; i < n; ++i) {
    if (torn[i] != 0) {
      ++out.torn;
      continue;
    }
    ++out.whole;
    const uint64_t tag = tags[i];
    const auto full = static_cast<int32_t>(tagged_length(tag));
    const bool may_grow = (tag & kOpenTag) != 0 && lengths[i] > 0 && lengths[i] < full;
    bool good = versions[i] == static_cast<int64_t>(tag) && (lengths[i] == full || may_grow);
    for (uint32_t k = 0; k < 3; ++k) good &= late[i * 3 + k] == (tag ^ k);
    int32_t step = starts[i];
    for (uint32_t t = 0; t < width; ++t) {
      const bool real = mask[i * width + t] != 0;
      for (uint32_t k = 0; k < kTaggedWidth; ++k) {
        const uint64_t expected = real ? tagged_step(tag, static_cast<uint64_t>(step), k) : 0;
        good &= steps[(i * width + t) * kTaggedWidth + k] == expected;
      }
      step += real;
    }
    if (window == 0) good &= step == lengths[i];
    if (window != 0 && !ends.empty()) good &= step == std::min(ends[i], lengths[i] - 1) + 1;
    out.mixed += !good;
  }
  return out;
}

inline TaggedBatch fetch_all_tagged(Store& store) {
  std::vector<uint32_t> rows, generations;
  store.keys(&rows, &generations);
  return fetch_tagged(store, rows, generations);
}

}  // namespace geartrain
