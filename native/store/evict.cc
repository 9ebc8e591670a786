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

bool Store::evict_one(Sums& sums) {
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
  if (victim == kNoRow) return false;
  if (status()[victim].state != RowState::committed) fail_damaged("the remover was led to row", victim);
  retire(sums, victim);
  put_free_row(victim);
  count(control().counters.evicted);
  return true;
}

void Store::retire(Sums& sums, uint32_t row) {
  if (header().remover == static_cast<uint32_t>(Remover::lowest_priority)) Heap(*this).erase(row);
  if (per_step()) sums.begin(row);
  // One exchange clears the priority and makes every key of the row stale; later updates fail.
  const uint32_t generation = generation_of(words()[row].load(kRelaxed));
  const uint64_t old = words()[row].exchange(make_word(generation + 1, 0), std::memory_order_acq_rel);
  sums.priorities.add(row, uint64_t{0} - priority_of(old));
  if (per_step()) clear_steps(sums, row, generation + 1);
  set_bit(sums, row, false);
  unlink_order(row);
  control().committed_count.store(committed_count() - 1, kRelaxed);
}

}  // namespace geartrain
