// Writing in place: new contents for committed rows whose keys stay valid, and readers that meet such a write.

#include <time.h>

#include <algorithm>

#include "base/copy.h"
#include "base/deadline.h"
#include "base/errors.h"
#include "segment/validate.h"
#include "store/row_copy.h"
#include "store/store.h"

namespace geartrain {
namespace {

// What is copied under one hold of the lock, unless one row is more: a few microseconds.
constexpr uint64_t kRewritePiece = 64 << 10;
constexpr uint32_t kSpins = 200;
// Of the lock, 20 us apart: many more than what one processor needs to see what another one did first.
constexpr uint32_t kFreeLooks = 50;

}  // namespace

uint64_t Store::rewrite(std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                        std::span<const FieldSource> sources, std::span<const uint32_t> starts,
                        std::span<const uint32_t> lengths) {
  ensure_client();
  const size_t n = rows.size();
  if (content_mask_ == 0) {
    fail(ErrorKind::schema, "rows of ", mapping_->path(),
         " cannot be written in place: an earlier build made the store. Save it, and load the checkpoint");
  }
  if (generations.size() != n || (!starts.empty() && starts.size() != n) || (!lengths.empty() && lengths.size() != n)) {
    fail(ErrorKind::schema, n, " rows were given with ", generations.size(), " generations, ", starts.size(),
         " starts and ", lengths.size(), " lengths");
  }
  check_rows(rows);
  const uint32_t max_length = header().max_length;
  uint64_t bytes = 0;
  uint32_t given = max_length;  // steps of each row in the sources
  for (const FieldSource& source : sources) {
    check_column(source.field);
    const FieldRecord& field = fields()[source.field];
    const uint64_t step = bytes_per_step(field);
    if (source.row_bytes % step != 0 || source.row_bytes == 0 || source.row_bytes > field.block_bytes) {
      fail(ErrorKind::schema, "a row of field '", field.name, "' has ", source.row_bytes, " bytes, in steps of ", step);
    }
    if (field.timed != 0) given = std::min<uint32_t>(given, static_cast<uint32_t>(source.row_bytes / step));
    bytes += source.row_bytes;
  }
  for (const uint32_t start : starts) {
    if (start >= max_length) fail(ErrorKind::schema, "step ", start, " is behind the longest row of ", max_length);
  }
  for (const uint32_t length : lengths) {
    if (length > given)
      fail(ErrorKind::schema, "the longest of `lengths` is ", length, ", ", given, " steps are given");
  }
  uint64_t skipped = 0;
  const size_t piece = std::max<uint64_t>(1, kRewritePiece / std::max<uint64_t>(1, bytes));
  for (size_t first = 0; first < n; first += piece) {
    Guard guard(*this);
    Sums sums(*this);
    for (size_t i = first; i < std::min(n, first + piece); ++i) {
      const uint32_t row = rows[i];
      const uint64_t word = words()[row].load(kRelaxed);
      RowStatus& s = status()[row];
      if (generation_of(word) != generations[i] || !is_committed(word) || s.state != RowState::committed) {
        ++skipped;
        continue;
      }
      if (per_step()) sums.begin(row);  // should this process die, the row's steps go with it
      const uint64_t number = s.inserted_at_ns.load(kRelaxed) | 1;
      s.inserted_at_ns.store(number, kRelaxed);
      std::atomic_thread_fence(std::memory_order_seq_cst);  // readers see it before any of the new bytes
      const uint32_t length = std::min(s.length.load(kRelaxed), max_length);
      const uint32_t start = starts.empty() ? 0 : starts[i];
      const uint32_t wanted = lengths.empty() ? given : lengths[i];
      const uint32_t steps = start >= length ? 0 : std::min(wanted, length - start);
      for (const FieldSource& source : sources) {
        const FieldRecord& field = fields()[source.field];
        const std::byte* from = source.data + i * source.row_bytes;
        if (field.timed == 0) {
          copy_block(block(source.field, row), from, field.block_bytes, false);
          continue;
        }
        const uint64_t step = bytes_per_step(field);
        copy_block(block(source.field, row) + start * step, from, steps * step, false);
      }
      s.inserted_at_ns.store(number + 1, std::memory_order_release);
    }
  }
  if (has_journal() && skipped < n) {
    count(journal_control().rewrites, n - skipped);
    settle_journal("written");
  }
  count(control().counters.stale_keys, skipped);
  return skipped;
}

bool Store::await_content(uint32_t row) const noexcept {
  const Deadline deadline = Deadline::after(lock_timeout_s_);
  const uint64_t number = content_number(row);
  uint32_t free = 0;  // times in a row that nobody held the lock and the number was the same
  for (uint32_t attempt = 0; (content_number(row) & 1) != 0; ++attempt) {
    if (attempt < kSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      continue;
    }
    if (calls_.must_end() || deadline.passed()) return false;
    if (lock_owner_died(control().mutex)) {
      if (read_only()) return false;
      try {
        Guard repairs(*this);
      } catch (...) {
        return false;
      }
      continue;
    }
    free = lock_is_free(control().mutex) && content_number(row) == number ? free + 1 : 0;
    if (free == kFreeLooks) return false;
    const struct timespec pause{0, 20'000};
    ::nanosleep(&pause, nullptr);
  }
  return true;
}

bool RowCopy::begin_later() {
  if (!store_.await_content(row_)) return false;
  return begin();
}

bool RowCopy::copy_locked(const std::function<void()>& copy) {
  if (store_.read_only()) {
    for (const Deadline deadline = Deadline::after(store_.lock_timeout_s()); !deadline.passed();) {
      if (!begin()) return false;
      copy();
      if (whole()) return true;
    }
    return false;
  }
  try {
    Store::Guard nobody_writes(store_);
    if (generation_of(word_.load(std::memory_order_acquire)) != generation_ || (generation_ & 1) == 0) return false;
    copy();
    return true;
  } catch (const Error&) {  // as where a writer stays inside
    return false;
  }
}

}  // namespace geartrain
