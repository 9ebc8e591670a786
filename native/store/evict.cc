// Removal of rows: by key, by age, or by the remover to make room.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>

#include "base/clock.h"
#include "base/convert.h"
#include "base/errors.h"
#include "store/remover_heap.h"
#include "store/store.h"
#include "store/tasks.h"

namespace geartrain {

uint64_t Store::remove(std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                       std::span<uint8_t> removed) {
  ensure_client();
  check_rows(rows);
  uint64_t stale = 0;
  {
    Guard guard(*this);
    Sums sums(*this);
    for (size_t i = 0; i < rows.size(); ++i) {
      if (tasks_ != nullptr && tasks_->drop_locked(rows[i], generations[i])) continue;
      const uint64_t word = words()[rows[i]].load(kRelaxed);
      const bool gone = generation_of(word) != generations[i] || status()[rows[i]].state != RowState::committed ||
                        !is_committed(word);
      if (!removed.empty()) removed[i] = !gone;
      if (gone) {
        ++stale;
        continue;
      }
      retire(sums, rows[i]);
      put_free_row(rows[i]);
    }
    count(control().counters.deleted, rows.size() - stale);
    count(control().counters.stale_keys, stale);
  }
  settle_journal("removed");
  return stale;
}

uint64_t Store::expire() {
  if (header().max_age_ns == 0) return 0;
  ensure_client();
  Guard guard(*this);
  Sums sums(*this);
  return expire_locked(sums, wall_ns());
}

uint64_t Store::expire_locked(Sums& sums, uint64_t now_ns) {
  const Control& c = control();
  const uint64_t limit = header().max_age_ns;
  uint64_t expired = 0;
  // The order list is by commit, so the oldest come first.
  while (limit != 0 && c.order_head != kNoRow && status()[c.order_head].inserted_at_ns + limit < now_ns) {
    const uint32_t row = c.order_head;
    if (expired == header().capacity) fail_damaged("the order list is a circle through row", row);
    retire(sums, row);
    put_free_row(row);
    ++expired;
  }
  count(control().counters.expired, expired);
  return expired;
}

// --- priorities and checks ---------------------------------------------------------------------------------------

namespace {

// A 64th of the rows is ranked away at a time, so that an insert pays for looking at 64 rows.
constexpr uint64_t kRankedShare = 64;
constexpr uint64_t kLeastRanked = 64;
// Where fewer than this share of the rows is committed, their list is walked: a row costs more, but only those are
// seen.
constexpr uint64_t kFullShare = 8;

bool ranks(Remover remover) {
  return remover != Remover::fifo && remover != Remover::lifo && remover != Remover::lowest_priority;
}

}  // namespace

uint32_t Store::victim() const {
  const Control& c = control();
  const Remover remover = remover_of(header().remover);
  return remover == Remover::fifo ? c.order_head : remover == Remover::lifo ? c.order_tail : Heap(*this).top();
}

bool Store::evict_one(Sums& sums) {
  if (ranks(remover_of(header().remover))) {
    if (control().order_head == kNoRow) return false;
    evict_worst(sums, 1);
    return true;
  }
  const uint32_t row = victim();
  if (row == kNoRow) return false;
  if (status()[row].state != RowState::committed) fail_damaged("the remover was led to row", row);
  retire(sums, row);
  put_free_row(row);
  count(control().counters.evicted);
  return true;
}

size_t Store::take_victims(Sums& sums, std::span<uint32_t> rows) {
  const Remover remover = remover_of(header().remover);
  if (ranks(remover)) {
    evict_worst(sums, rows.size());
    take_free_rows(rows);
    return rows.size();
  }
  if (remover != Remover::fifo) {
    rows[0] = victim();
    if (rows[0] == kNoRow || status()[rows[0]].state != RowState::committed) {
      fail_damaged("the remover was led to row", rows[0]);
    }
    retire(sums, rows[0]);
    count(control().counters.evicted);
    return 1;
  }
  // The oldest ones, cut off the order list together. Their words first: an exchange waits for the stores before it.
  Control& c = control();
  uint32_t row = c.order_head;
  for (uint32_t& taken : rows) {
    RowStatus& s = status()[row];
    if (s.state != RowState::committed || s.mark != 0) fail_damaged("the remover was led to row", row);
    s.mark = 1;  // until it is held: a list may run in a circle
    taken = row;
    row = s.next;
  }
  for (const uint32_t taken : rows) make_unselectable(sums, taken);
  c.order_head = row;
  (row == kNoRow ? c.order_tail : status()[row].previous) = kNoRow;
  c.committed_count.store(committed_count() - rows.size(), kRelaxed);
  count(c.counters.evicted, rows.size());
  return rows.size();
}

// No memory is taken here: a caller may be in the middle of a commit, which an exception would leave half done.
void Store::evict_worst(Sums& sums, size_t needed) {
  for (size_t evicted = 0; evicted < needed;) evicted += evict_some_of_the_worst(sums, needed - evicted);
}

size_t Store::evict_some_of_the_worst(Sums& sums, size_t needed) {
  const Remover remover = remover_of(header().remover);
  const uint32_t field = remover_field_of(header().remover);
  const auto now = static_cast<uint32_t>(samples_so_far());
  const Conversion as_double = remover == Remover::lowest_value || remover == Remover::highest_value
                                   ? conversion(fields()[field].dtype, 13)
                                   : nullptr;
  const auto score = [&](uint32_t row) -> double {
    RowStatus& s = status()[row];
    if (remover == Remover::least_recently_sampled) {
      // Modulo 2^32, as the time is kept: no row waits for four billion samples.
      return -static_cast<double>(now - std::atomic_ref<uint32_t>(s.heap_slot).load(kRelaxed));
    }
    if (remover == Remover::most_sampled) return -static_cast<double>(s.times_sampled.load(kRelaxed));
    double value = 0;
    as_double(reinterpret_cast<std::byte*>(&value), block(field, row), 1);
    if (std::isnan(value)) return -std::numeric_limits<double>::infinity();
    return remover == Remover::lowest_value ? value : -value;
  };
  const uint64_t committed = removable_count();
  const size_t n = std::min<size_t>(worst_.capacity(), std::max<size_t>(needed, committed / kRankedShare));
  worst_.clear();  // the n worst so far, the best of them at the front
  uint64_t found = 0;
  const auto consider = [&](uint32_t row) {
    const RowStatus& s = status()[row];
    if (s.state != RowState::committed) return;
    ++found;
    const RankedRow candidate{score(row), s.sequence.load(kRelaxed), row};
    if (worst_.size() == n) {
      if (!(candidate < worst_.front())) return;
      std::pop_heap(worst_.begin(), worst_.end());
      worst_.pop_back();
    }
    worst_.push_back(candidate);
    std::push_heap(worst_.begin(), worst_.end());
  };
  if (committed < header().capacity / kFullShare) {
    uint32_t row = control().order_head;
    for (uint64_t walked = 0; row != kNoRow; row = status()[row].next) {
      if (walked++ == header().capacity) fail_damaged("the order list is a circle through row", row);
      consider(row);
    }
  } else {
    for (uint32_t row = 0; row < header().capacity; ++row) consider(row);
  }
  if (found < needed) fail_damaged("fewer rows are committed than the count says:", found);
  std::sort_heap(worst_.begin(), worst_.end());
  for (const RankedRow& each : worst_) {
    retire(sums, each.row);
    put_free_row(each.row);
  }
  count(control().counters.evicted, worst_.size());
  return worst_.size();
}

void Store::reserve_for_ranking() {
  if (ranks(remover_of(header().remover))) worst_.reserve(header().capacity / kRankedShare + kLeastRanked);
}

void Store::note_sampled(uint32_t row, uint64_t samples) const {
  if (remover_of(header().remover) != Remover::least_recently_sampled) return;
  std::atomic_ref<uint32_t>(status()[row].heap_slot).store(static_cast<uint32_t>(samples), kRelaxed);
}

void Store::retire(Sums& sums, uint32_t row) {
  if (header().remover == static_cast<uint32_t>(Remover::lowest_priority)) Heap(*this).erase(row);
  make_unselectable(sums, row);
  unlink_order(row);
  control().committed_count.store(committed_count() - 1, kRelaxed);
}

void Store::make_unselectable(Sums& sums, uint32_t row) {
  if (per_step()) sums.begin(row);
  // One exchange clears the priority and makes every key of the row stale; later updates fail.
  const uint32_t generation = generation_of(words()[row].load(kRelaxed));
  const uint64_t old = words()[row].exchange(make_word(generation + 1, 0), std::memory_order_acq_rel);
  sums.priorities.add(row, uint64_t{0} - priority_of(old));
  if (per_step()) clear_steps(sums, row, generation + 1);
  set_bit(sums, row, false);
}

}  // namespace geartrain
