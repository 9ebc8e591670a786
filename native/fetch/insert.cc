#include "fetch/insert.h"

#include <algorithm>
#include <array>

#include "base/errors.h"

namespace geartrain {
namespace {

// One field's rows, from row `at` on.
InsertField from_row(InsertField field, size_t at) {
  field.data += at * field.row_bytes;
  return field;
}

template <typename T>
std::span<const T> part(std::span<const T> values, size_t at, size_t count) {
  return values.empty() ? values : values.subspan(at, count);
}

void insert_piece(Store& store, std::span<const InsertField> fields, const CommitValues& values, unsigned threads,
                  std::span<uint32_t> rows, std::span<uint32_t> generations) {
  store.allocate(rows);
  try {
    fill(store, rows, fields, values.lengths, threads);
    store.commit(rows, values, generations);
  } catch (...) {
    try {
      store.abandon(rows);
    } catch (const Error&) {
      // The first error is the cause. Where the lock was not to be had, the rows are freed by the next allocate.
    }
    throw;
  }
}

}  // namespace

void insert(Store& store, std::span<const InsertField> fields, const CommitValues& values, unsigned threads,
            std::span<uint32_t> rows, std::span<uint32_t> generations) {
  const size_t n = rows.size();
  store.check_values(n, values);  // before a row is evicted for nothing
  const uint64_t piece = std::clamp<uint64_t>(store.header().max_rows / 2, 1, kInsertPiece);
  if (n <= piece) {
    insert_piece(store, fields, values, threads, rows, generations);
    return;
  }
  if (fields.size() > kMaxFields) fail(ErrorKind::schema, "a store has at most ", kMaxFields, " fields");
  std::array<InsertField, kMaxFields> shifted;
  for (size_t at = 0; at < n; at += piece) {
    const size_t count = std::min<size_t>(piece, n - at);
    for (size_t f = 0; f < fields.size(); ++f) shifted[f] = from_row(fields[f], at);
    insert_piece(
        store, std::span(shifted).first(fields.size()),
        {part(values.lengths, at, count), part(values.priorities, at, count), part(values.versions, at, count)},
        threads, rows.subspan(at, count), generations.subspan(at, count));
  }
}

}  // namespace geartrain
