#include "fetch/row_pieces.h"

#include <cstring>

#include "base/errors.h"
#include "fetch/row_windows.h"
#include "store/row_copy.h"

namespace geartrain {
namespace {

void count_torn_pieces(const Store& store, uint64_t torn) {
  if (torn != 0 && !store.read_only()) store.control().counters.torn.fetch_add(torn, std::memory_order_relaxed);
}

class Locator : RowWindows {
 public:
  Locator(const Store& store, const PieceRequest& request) : RowWindows(store, request.rows), pieces_(request) {}

  PieceCounts all() {
    for (size_t i = 0; i < request_.rows.size(); ++i) row(i);
    return counts_;
  }

 private:
  void row(size_t i) {
    const FetchRequest& rows = request_;
    const uint32_t number = rows.rows[i], steps = steps_;
    RowCopy copy(store_, number, rows.generations[i]);
    const bool there = copy.begin();
    const uint32_t length = there ? length_of(number) : 0;
    const Window window = window_of(i, length);
    pieces_.contents[i] = copy.content();
    rows.torn[i] = !there;
    rows.starts[i] = static_cast<int32_t>(window.start);
    rows.lengths[i] = static_cast<int32_t>(length);
    rows.versions[i] = there ? store_.status()[number].version.load(std::memory_order_relaxed) : 0;
    uint8_t* mask = rows.mask.data() + i * steps;
    std::memset(mask, 0, steps);
    std::memset(mask + window.at, 1, window.count);
    if (!there) {
      ++counts_.torn;
      return;
    }
    const uint64_t place = rows.places.empty() ? i : rows.places[i];
    for (size_t f = 0; f < rows.fields.size(); ++f) {
      const FieldRecord& field = store_.fields()[rows.fields[f].field];
      const uint64_t from = field.offset + number * field.stride, to = pieces_.offsets[f];
      if (field.timed == 0) {
        piece(to + place * field.block_bytes, from, field.block_bytes);
        continue;
      }
      const uint64_t step = field.block_bytes / field.shape[0], begin = to + place * steps * step;
      const uint64_t behind = window.at + window.count;
      gap(begin, window.at * step);
      piece(begin + window.at * step, from + window.start * step, window.count * step);
      gap(begin + behind * step, (steps - behind) * step);
    }
  }

  void piece(uint64_t to, uint64_t from, uint64_t bytes) {
    if (bytes == 0) return;
    pieces_.to[counts_.pieces] = to;
    pieces_.from[counts_.pieces] = from;
    pieces_.bytes[counts_.pieces++] = bytes;
  }

  void gap(uint64_t at, uint64_t bytes) {
    if (bytes == 0) return;
    pieces_.gap_at[counts_.gaps] = at;
    pieces_.gap_bytes[counts_.gaps++] = bytes;
  }

  const PieceRequest& pieces_;
  PieceCounts counts_;
};

void check_pieces(const Store& store, const PieceRequest& request) {
  const FetchRequest& rows = request.rows;
  const size_t n = rows.rows.size(), pieces = n * rows.fields.size();
  for (const FetchField& field : rows.fields) {
    store.check_column(field.field);
    if (field.steps != nullptr) fail(ErrorKind::schema, "a piece is a whole window");
  }
  for (uint32_t row : rows.rows) {
    if (row >= store.header().capacity) {
      fail(ErrorKind::schema, "row ", row, " is beyond the store's capacity of ", store.header().capacity);
    }
  }
  const uint64_t steps = rows.window != 0 ? rows.window : store.header().max_length;
  if (rows.generations.size() != n || (!rows.ends.empty() && rows.ends.size() != n) ||
      (!rows.places.empty() && rows.places.size() != n) || rows.torn.size() != n || rows.starts.size() != n ||
      rows.lengths.size() != n || rows.versions.size() != n || rows.mask.size() != n * steps ||
      request.contents.size() != n || request.offsets.size() != rows.fields.size() || request.to.size() < pieces ||
      request.from.size() < pieces || request.bytes.size() < pieces || request.gap_at.size() < 2 * pieces ||
      request.gap_bytes.size() < 2 * pieces) {
    fail(ErrorKind::schema, "the pieces of ", n, " rows were asked for with arrays of other sizes");
  }
}

}  // namespace

PieceCounts locate_pieces(const Store& store, const PieceRequest& request) {
  check_pieces(store, request);
  const PieceCounts found = Locator(store, request).all();
  count_torn_pieces(store, found.torn);
  return found;
}

uint64_t find_changed(const Store& store, std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                      std::span<const uint64_t> contents, std::span<uint8_t> torn) {
  const size_t n = rows.size();
  if (generations.size() != n || contents.size() != n || torn.size() != n) {
    fail(ErrorKind::schema, "changes of ", n, " rows were asked for with arrays of other sizes");
  }
  uint64_t found = 0;
  for (size_t i = 0; i < n; ++i) {
    if (rows[i] >= store.header().capacity) {
      fail(ErrorKind::schema, "row ", rows[i], " is beyond the store's capacity of ", store.header().capacity);
    }
    if (torn[i] != 0 || RowCopy(store, rows[i], generations[i], contents[i]).whole()) continue;
    torn[i] = 1;
    ++found;
  }
  count_torn_pieces(store, found);
  return found;
}

}  // namespace geartrain
