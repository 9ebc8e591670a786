// Removal of rows: by key, by age, or by the remover to make room.

#include "base/clock.h"
#include "base/errors.h"
#include "store/remover_heap.h"
#include "store/store.h"

namespace geartrain {

uint64_t Store::remove(std::span<const uint32_t> rows, std::span<const uint32_t> generations) {
  ensure_client();
  check_rows(rows);
  Guard guard(*this);
  Sums sums(*this);
  uint64_t stale = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const uint64_t word = words()[rows[i]].load(kRelaxed);
    if (generation_of(word) != generations[i] || status()[rows[i]].state != RowState::committed ||
        !is_committed(word)) {
      ++stale;
      continue;
    }
    retire(sums, rows[i]);
    put_free_row(rows[i]);
  }
  count(control().counters.deleted, rows.size() - stale);
  count(control().counters.stale_keys, stale);
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

uint32_t Store::victim() const {
  const Control& c = control();
  uint32_t victim = kNoRow;
  switch (static_cast<Remover>(header().remover)) {
    case Remover::fifo:
      victim = c.order_head;
      break;
    case Remover::lifo:
      victim = c.order_tail;
      break;
    case Remover::lowest_priority:
      victim = Heap(*this).top();
      break;
  }
  return victim;
}

bool Store::evict_one(Sums& sums) {
  const uint32_t row = victim();
  if (row == kNoRow) return false;
  if (status()[row].state != RowState::committed) fail_damaged("the remover was led to row", row);
  retire(sums, row);
  put_free_row(row);
  count(control().counters.evicted);
  return true;
}

size_t Store::take_victims(Sums& sums, std::span<uint32_t> rows) {
  const auto remover = static_cast<Remover>(header().remover);
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
