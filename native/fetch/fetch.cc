#include "fetch/fetch.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "base/copy.h"
#include "base/errors.h"
#include "fetch/episodes.h"
#include "fetch/lines.h"
#include "fetch/pieces.h"
#include "store/row_copy.h"

namespace geartrain {
namespace {

// Columns of this size and more do not stay in a cache between two rounds of inserts: of 4 KB rows, a streamed one
// costs 185 ns and a plain one 335 with 245 MB of columns and 32 MB of cache.
constexpr uint64_t kColdFrom = 64 << 20;
// Pieces of rows, one a field, that are asked for before the first of them is copied, and the rows that they are of.
constexpr size_t kAskedPieces = 64;
constexpr size_t kLeastRows = 4, kMostRows = 32;

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
        stream_(batch_bytes(store, request) >= stream_from()) {
    if (request.within_episodes && request.window != 0) marks_ = episode_marks(store);
    for (const FetchField& field : request.fields) {
      const FieldRecord& record = fields_[field.field];
      field_steps_.push_back(record.timed != 0 ? step_bytes(record) : 0);
    }
  }

  uint64_t rows(size_t first, size_t last) const {
    const size_t fields = std::max<size_t>(1, request_.fields.size());
    const size_t together = std::clamp<size_t>(kAskedPieces / fields, kLeastRows, kMostRows);
    uint64_t torn = 0;
    for (size_t at = first; at < last; at += together) {
      const size_t end = std::min(last, at + together);
      ask_for(at, end);
      for (size_t i = at; i < end; ++i) torn += !row(i);
    }
    if (stream_) stream_fence();
    return torn;
  }

 private:
  // The steps [start, start + count) of a row go to [at, at + count) of the batch.
  struct Window {
    uint32_t start, count, at;
  };

  Window window_of(size_t i, uint32_t length) const {
    if (request_.window == 0 || length == 0) return {0, length, 0};
    if (request_.from_first) {
      uint32_t start = 0;
      if (!request_.ends.empty()) {
        start = std::min(length - 1, static_cast<uint32_t>(std::max(0, request_.ends[i])));
      }
      uint32_t count = std::min(steps_, length - start);
      if (marks_) count = marks_.end(request_.rows[i], start, start + count - 1) + 1 - start;
      return {start, count, request_.pad_left ? steps_ - count : 0};
    }
    uint32_t end = length - 1;
    if (!request_.ends.empty()) end = std::min(end, static_cast<uint32_t>(std::max(0, request_.ends[i])));
    uint32_t count = std::min(steps_, end + 1);
    if (marks_) count = end + 1 - marks_.begin(request_.rows[i], end + 1 - count, end);
    return {end + 1 - count, count, request_.pad_left ? steps_ - count : 0};
  }

  uint32_t length_of(uint32_t row) const {
    // Acquire: an open row's steps are written before they are counted.
    return std::min(store_.status()[row].length.load(std::memory_order_acquire), store_.header().max_length);
  }

  // Asks for the words of some rows, then for where their windows begin: loads one right after the other, so that as
  // many page walks as can be are under way. Further lines, whose pages are known by then, where there are few: the
  // rest a processor asks for by itself.
  void ask_for(size_t first, size_t last) const {
    for (size_t i = first; i < last; ++i) {
      __builtin_prefetch(&store_.words()[request_.rows[i]]);
      __builtin_prefetch(&store_.status()[request_.rows[i]].version);
      __builtin_prefetch(&store_.status()[request_.rows[i]].length);
    }
    struct {
      const std::byte* from;
      uint64_t bytes;
    } few[kAskedPieces + kLeastRows * kMaxFields];
    size_t count = 0;
    for (size_t i = first; i < last; ++i) {
      const uint32_t row = request_.rows[i];
      const Window window = window_of(i, length_of(row));
      for (size_t f = 0; f < field_steps_.size(); ++f) {
        const uint32_t field = request_.fields[f].field;
        const uint64_t step = field_steps_[f], bytes = step != 0 ? window.count * step : fields_[field].block_bytes;
        const std::byte* const from = store_.block(field, row) + window.start * step;
        touch(from);
        touch_pages(from, bytes);
        if (bytes <= kFewBytes) few[count++] = {from, bytes};
      }
    }
    for (size_t i = 0; i < count; ++i) prefetch_lines(few[i].from, few[i].bytes);
  }

  bool row(size_t i) const {
    RowCopy one(store_, request_.rows[i], request_.generations[i]);
    const bool whole = one.until_whole([&] { copy(i); });
    request_.torn[i] = !whole;
    return whole;
  }

  void copy(size_t i) const {
    const uint32_t row = request_.rows[i];
    const RowStatus& status = store_.status()[row];
    const uint32_t length = length_of(row);
    const auto [start, count, at] = window_of(i, length);
    const size_t place = request_.places.empty() ? i : request_.places[i];
    for (size_t f = 0; f < field_steps_.size(); ++f) {
      const FetchField& field = request_.fields[f];
      const FieldRecord& record = fields_[field.field];
      const std::byte* from = store_.block(field.field, row);
      if (record.timed == 0) {
        copy_lines(field.out + place * record.block_bytes, from, record.block_bytes, stream_);
        continue;
      }
      const uint64_t step = field_steps_[f];
      std::byte* to = field.out + place * steps_ * step;
      if (at != 0) zero_block(to, at * step);
      copy_lines(to + at * step, from + start * step, count * step, stream_);
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
  EpisodeMarks marks_;
  std::vector<uint64_t> field_steps_;  // bytes of a step; 0: without time
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
