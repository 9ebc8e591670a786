#include "fetch/fetch.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "base/copy.h"
#include "base/errors.h"
#include "fetch/lines.h"
#include "fetch/pieces.h"
#include "fetch/row_windows.h"
#include "store/row_copy.h"

namespace geartrain {
namespace {

// Columns of this size and more do not stay in a cache between two rounds of inserts: of 4 KB rows, a streamed one
// costs 185 ns and a plain one 335 with 245 MB of columns and 32 MB of cache.
constexpr uint64_t kColdFrom = 64 << 20;
// Rows whose pieces are asked for while an earlier one is copied: about so many pieces, one a field.
constexpr size_t kAskedPieces = 24;
constexpr size_t kLeastRows = 2, kMostRows = 8;

uint64_t step_bytes(const FieldRecord& field) {
  return field.block_bytes / field.shape[0];
}

uint64_t field_bytes(const FieldRecord& field, uint32_t steps) {
  return field.timed != 0 ? step_bytes(field) * steps : field.block_bytes;
}

class Gather : RowWindows {
 public:
  Gather(const Store& store, const FetchRequest& request)
      : RowWindows(store, request), stream_(batch_bytes(store, request) >= stream_from()) {
    for (const FetchField& field : request.fields) {
      const FieldRecord& record = store.fields()[field.field];
      (field.steps == nullptr ? columns_ : some_)
          .push_back({store.block(field.field, 0), field.out, record.stride, record.block_bytes,
                      record.timed != 0 ? step_bytes(record) : 0, field.steps});
    }
  }

  uint64_t rows(size_t first, size_t last) const {
    const size_t ahead =
        std::clamp(kAskedPieces / std::max<size_t>(1, columns_.size() + some_.size()), kLeastRows, kMostRows);
    for (size_t i = first; i < std::min(last, first + 2 * ahead); ++i) ask_for_status(i);
    for (size_t i = first; i < std::min(last, first + ahead); ++i) ask_for(i);
    uint64_t torn = 0;
    for (size_t i = first; i < last; ++i) {
      if (i + 2 * ahead < last) ask_for_status(i + 2 * ahead);
      if (i + ahead < last) ask_for(i + ahead);
      torn += !row(i);
    }
    if (stream_) stream_fence();
    return torn;
  }

 private:
  struct Column {
    const std::byte* from;  // the block of the store's first row
    std::byte* to;
    uint64_t stride, block_bytes;  // from one row's block to the next; of a row without time
    uint64_t step_bytes;           // 0: without time
    const FieldSteps* steps;       // null: all of a window
  };
  // What tells whether a row is whole, and where its window lies.
  void ask_for_status(size_t i) const {
    const RowStatus& status = store_.status()[request_.rows[i]];
    __builtin_prefetch(&store_.words()[request_.rows[i]]);
    __builtin_prefetch(&status.version);
    __builtin_prefetch(&status.length);
  }

  void ask_for(size_t i) const {
    const uint32_t row = request_.rows[i];
    const Window window = widest(i, length_of(row));
    for (const Column& column : columns_) {
      const std::byte* const from = column.from + row * column.stride;
      if (column.step_bytes == 0) {
        prefetch_piece(from, column.block_bytes);
      } else {
        prefetch_piece(from + window.start * column.step_bytes, window.count * column.step_bytes);
      }
    }
    if (!some_.empty()) ask_for_some(row, window);
    if (marks_) __builtin_prefetch(marks_.column + row * marks_.stride + window.start + std::max(window.count, 1U) - 1);
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
    for (const Column& column : columns_) {
      const std::byte* const from = column.from + row * column.stride;
      if (column.step_bytes == 0) {
        copy_lines(column.to + place * column.block_bytes, from, column.block_bytes, stream_);
        continue;
      }
      const uint64_t step = column.step_bytes;
      std::byte* const to = column.to + place * steps_ * step;
      if (at != 0) zero_block(to, at * step);
      copy_lines(to + at * step, from + start * step, count * step, stream_);
      if (at + count < steps_) zero_block(to + (at + count) * step, (steps_ - at - count) * step);
    }
    if (!some_.empty()) copy_some(row, place, {start, count, at});
    if (!request_.mask.empty()) {
      uint8_t* mask = request_.mask.data() + i * steps_;
      std::memset(mask, 0, steps_);
      std::memset(mask + at, 1, count);
    }
    if (!request_.starts.empty()) request_.starts[i] = static_cast<int32_t>(start);
    if (!request_.lengths.empty()) request_.lengths[i] = static_cast<int32_t>(length);
    if (!request_.versions.empty()) request_.versions[i] = status.version.load(std::memory_order_relaxed);
  }

  // The same of fields that have some steps of a window. Apart, so that the loops above stay as short as they are.
  [[gnu::noinline]] void ask_for_some(uint32_t row, Window window) const {
    for (const Column& column : some_) {
      const std::byte* const from = column.from + row * column.stride;
      for_each_run(window, *column.steps, [&](const Piece& piece) {
        if (piece.real != 0) prefetch_piece(from + piece.from * column.step_bytes, piece.real * column.step_bytes);
      });
    }
  }

  [[gnu::noinline]] void copy_some(uint32_t row, size_t place, Window window) const {
    for (const Column& column : some_) {
      const std::byte* const from = column.from + row * column.stride;
      const uint64_t step = column.step_bytes;
      std::byte* to = column.to + place * column.steps->count * step;
      for_each_run(window, *column.steps, [&](const Piece& piece) {
        if (piece.before != 0) zero_block(to, piece.before * step);
        to += piece.before * step;
        if (piece.real != 0) copy_lines(to, from + piece.from * step, piece.real * step, stream_);
        to += piece.real * step;
        if (piece.after != 0) zero_block(to, piece.after * step);
        to += piece.after * step;
      });
    }
  }

  // A run: steps that are missing, `real` ones from a step of the row on, and missing ones.
  struct Piece {
    uint32_t before, from, real, after;
  };
  static void for_each_run(const Window& window, const FieldSteps& steps, auto&& body) {
    const uint32_t end = window.at + window.count;
    if (steps.runs.empty()) {
      const uint32_t real = std::min(window.count, 1U);
      return body(Piece{0, window.start, real, 1 - real});
    }
    for (const FieldSteps::Run& run : steps.runs) {
      const uint32_t first = std::clamp(window.at, run.place, run.place + run.count);
      const uint32_t until = std::clamp(end, first, run.place + run.count);
      body(Piece{first - run.place, window.start + (first - window.at), until - first, run.place + run.count - until});
    }
  }

  const bool stream_;
  std::vector<Column> columns_, some_;  // of the fields that have whole windows, or no time; and of the others
};

void check(const Store& store, std::span<const uint32_t> rows, uint32_t field) {
  store.check_column(field);
  for (uint32_t row : rows) {
    if (row >= store.header().capacity) {
      fail(ErrorKind::schema, "row ", row, " is beyond the store's capacity of ", store.header().capacity);
    }
  }
}

}  // namespace

uint64_t fetched_row_bytes(const Store& store, uint32_t field, uint32_t window, const FieldSteps* steps) {
  const uint32_t of_window = window != 0 ? window : store.header().max_length;
  return field_bytes(store.fields()[field], steps != nullptr ? steps->count : of_window);
}

uint64_t batch_bytes(const Store& store, const FetchRequest& request) {
  uint64_t bytes = 0;
  for (const FetchField& field : request.fields) {
    bytes += fetched_row_bytes(store, field.field, request.window, field.steps);
  }
  return bytes * request.rows.size();
}

uint64_t fetch(const Store& store, const FetchRequest& request) {
  for (const FetchField& field : request.fields) {
    check(store, {}, field.field);
    if (field.steps != nullptr && store.fields()[field.field].timed == 0) {
      fail(ErrorKind::schema, "the field '", store.fields()[field.field].name, "' has no steps");
    }
  }
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
