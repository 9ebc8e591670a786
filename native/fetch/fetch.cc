#include "fetch/fetch.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/copy.h"
#include "base/errors.h"
#include "fetch/pieces.h"
#include "store/row_copy.h"

namespace geartrain {
namespace {

// Columns of this size and more do not stay in a cache between two rounds of inserts: of 4 KB rows, a streamed one
// costs 185 ns and a plain one 335 with 245 MB of columns and 32 MB of cache.
constexpr uint64_t kColdFrom = 64 << 20;

uint64_t step_bytes(const FieldRecord& field) {
  return field.block_bytes / field.shape[0];
}

uint64_t field_bytes(const FieldRecord& field, uint32_t steps) {
  return field.timed != 0 ? step_bytes(field) * steps : field.block_bytes;
}

class Gather {
 public:
  Gather(const Store& store, const FetchRequest& request)
      : store_(store),
        request_(request),
        fields_(store.fields()),
        steps_(request.window != 0 ? request.window : store.header().max_length),
        stream_(batch_bytes(store, request) >= stream_from()) {}

  uint64_t rows(size_t first, size_t last) const {
    uint64_t torn = 0;
    for (size_t i = first; i < last; ++i) {
      if (i + 1 < last) prefetch(request_.rows[i + 1]);
      torn += !row(i);
    }
    if (stream_) stream_fence();
    return torn;
  }

 private:
  void prefetch(uint32_t row) const {
    __builtin_prefetch(&store_.words()[row]);
    __builtin_prefetch(&store_.status()[row].length);
    for (const FetchField& field : request_.fields) __builtin_prefetch(store_.block(field.field, row));
  }

  bool row(size_t i) const {
    RowCopy one(store_, request_.rows[i], request_.generations[i]);
    while (one.begin()) {
      copy(i);
      if (!one.whole()) continue;
      request_.torn[i] = 0;
      return true;
    }
    request_.torn[i] = 1;
    return false;
  }

  void copy(size_t i) const {
    const uint32_t row = request_.rows[i];
    const RowStatus& status = store_.status()[row];
    // Acquire: an open row's steps are written before they are counted.
    const uint32_t length = std::min(status.length.load(std::memory_order_acquire), store_.header().max_length);
    // The steps [start, start + count) of the row go to [at, at + count) of the batch.
    uint32_t start = 0, count = length, at = 0;
    if (request_.window != 0 && request_.from_first && length != 0) {
      if (!request_.ends.empty()) {
        start = std::min(length - 1, static_cast<uint32_t>(std::max(0, request_.ends[i])));
      }
      count = std::min(steps_, length - start);
      at = request_.pad_left ? steps_ - count : 0;
    } else if (request_.window != 0 && length != 0) {
      uint32_t end = length - 1;
      if (!request_.ends.empty()) end = std::min(end, static_cast<uint32_t>(std::max(0, request_.ends[i])));
      count = std::min(steps_, end + 1);
      start = end + 1 - count;
      at = request_.pad_left ? steps_ - count : 0;
    }
    const size_t place = request_.places.empty() ? i : request_.places[i];
    for (const FetchField& field : request_.fields) {
      const FieldRecord& record = fields_[field.field];
      const std::byte* from = store_.block(field.field, row);
      if (record.timed == 0) {
        copy_block(field.out + place * record.block_bytes, from, record.block_bytes, stream_);
        continue;
      }
      const uint64_t step = step_bytes(record);
      std::byte* to = field.out + place * steps_ * step;
      if (at != 0) zero_block(to, at * step);
      copy_block(to + at * step, from + start * step, count * step, stream_);
      if (at + count < steps_) zero_block(to + (at + count) * step, (steps_ - at - count) * step);
    }
    if (!request_.mask.empty()) {
      uint8_t* mask = request_.mask.data() + i * steps_;
      std::memset(mask, 0, steps_);
      std::memset(mask + at, 1, count);
    }
    if (!request_.starts.empty()) request_.starts[i] = static_cast<int32_t>(start);
    if (!request_.lengths.empty()) request_.lengths[i] = static_cast<int32_t>(length);
    if (!request_.versions.empty()) request_.versions[i] = status.version.load(std::memory_order_relaxed);
  }

  const Store& store_;
  const FetchRequest& request_;
  const FieldRecord* fields_;
  const uint32_t steps_;
  const bool stream_;
};

void check(const Store& store, std::span<const uint32_t> rows, uint32_t field) {
  if (field >= store.header().field_count) {
    fail(ErrorKind::schema, "field number ", field, " is beyond the store's ", store.header().field_count);
  }
  for (uint32_t row : rows) {
    if (row >= store.header().capacity) {
      fail(ErrorKind::schema, "row ", row, " is beyond the store's capacity of ", store.header().capacity);
    }
  }
}

}  // namespace

uint64_t fetched_row_bytes(const Store& store, uint32_t field, uint32_t window) {
  return field_bytes(store.fields()[field], window != 0 ? window : store.header().max_length);
}

uint64_t batch_bytes(const Store& store, const FetchRequest& request) {
  uint64_t bytes = 0;
  for (const FetchField& field : request.fields) bytes += fetched_row_bytes(store, field.field, request.window);
  return bytes * request.rows.size();
}

uint64_t fetch(const Store& store, const FetchRequest& request) {
  for (const FetchField& field : request.fields) check(store, {}, field.field);
  check(store, request.rows, 0);
  if (request.generations.size() != request.rows.size() || request.torn.size() != request.rows.size() ||
      (!request.ends.empty() && request.ends.size() != request.rows.size()) ||
      (!request.places.empty() && request.places.size() != request.rows.size())) {
    fail(ErrorKind::schema, "a fetch of ", request.rows.size(), " rows was given arrays of other sizes");
  }
  const Gather gather(store, request);
  std::atomic<uint64_t> torn{0};
  run_in_pieces(request.rows.size(), batch_bytes(store, request), request.threads, [&](size_t first, size_t last) {
    torn.fetch_add(gather.rows(first, last), std::memory_order_relaxed);
  });
  const uint64_t count = torn.load();
  if (count != 0 && !store.read_only()) store.control().counters.torn.fetch_add(count, std::memory_order_relaxed);
  return count;
}

void fill(const Store& store, std::span<const uint32_t> rows, std::span<const InsertField> fields,
          std::span<const uint32_t> lengths, unsigned threads) {
  for (const InsertField& field : fields) check(store, rows, field.field);
  uint64_t bytes = 0;
  for (const InsertField& field : fields) bytes += store.fields()[field.field].block_bytes;
  bytes *= rows.size();
  // A store larger than any cache: the blocks are cold, and their next reader will find them in memory.
  const bool stream = bytes >= stream_from() || store.header().regions[kColumnsRegion].bytes >= kColdFrom;
  run_in_pieces(rows.size(), bytes, threads, [&](size_t first, size_t last) {
    for (size_t i = first; i < last; ++i) {
      for (const InsertField& field : fields) {
        const FieldRecord& record = store.fields()[field.field];
        const uint64_t size = lengths.empty() ? record.block_bytes : field_bytes(record, lengths[i]);
        copy_block(store.block(field.field, rows[i]), field.data + i * field.row_bytes, size, stream);
      }
    }
    if (stream) stream_fence();
  });
}

}  // namespace geartrain
