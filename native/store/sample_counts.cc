// Sample counts of rows, and max_times_sampled.

#include "base/errors.h"
#include "store/remover_heap.h"
#include "store/store.h"
#include "store/tasks.h"

namespace geartrain {

uint64_t Store::count_samples(std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                              std::span<uint8_t> taken, const Taking* taking) {
  check_rows(rows);
  if (taking != nullptr) check_taking(*taking, rows.size());
  if (read_only() && header().max_times_sampled == 0) {  // not counted
    check_open();
    for (size_t i = 0; i < rows.size(); ++i) {
      taken[i] = generation_of(words()[rows[i]].load(kRelaxed)) == generations[i];
    }
    return 0;
  }
  ensure_client();
  uint64_t counted = 0, used_up = 0;
  const uint64_t now = samples_so_far() + rows.size();
  const uint32_t limit = header().max_times_sampled;
  if (limit == 0) {
    constexpr size_t kAhead = 16;
    for (size_t i = 0; i < rows.size(); ++i) {
      if (i + kAhead < rows.size()) __builtin_prefetch(&status()[rows[i + kAhead]].times_sampled, 1);
      taken[i] = generation_of(words()[rows[i]].load(kRelaxed)) == generations[i];
      if (taken[i] != 0) {
        status()[rows[i]].times_sampled.fetch_add(1, kRelaxed);
        note_sampled(rows[i], now);
      }
      counted += taken[i];
    }
  } else {
    Guard guard(*this);
    Sums sums(*this);
    for (size_t i = 0; i < rows.size(); ++i) {
      const uint32_t row = rows[i];
      RowStatus& s = status()[row];
      const uint64_t word = words()[row].load(kRelaxed);
      taken[i] = generation_of(word) == generations[i] && is_committed(word) && s.state == RowState::committed;
      if (taken[i] == 0) continue;
      ++counted;
      note_sampled(row, now);
      if (s.times_sampled.fetch_add(1, kRelaxed) + 1 < limit) continue;
      ++used_up;
      // The last sample: no longer selectable, but readable under its generation until release_exhausted.
      if (header().remover == static_cast<uint32_t>(Remover::lowest_priority)) Heap(*this).erase(row);
      if (per_step()) sums.begin(row);
      unlink_order(row);
      set_bit(sums, row, false);
      control().committed_count.fetch_sub(1, kRelaxed);
      if (taking != nullptr) {
        tasks_->take(row, {taking->step, taking->places[i]}, priority_of(word));
      } else {
        hold(row, client_slot_, RowState::exhausted);
      }
      set_priority_locked(row, 0);
      if (per_step()) clear_steps(sums, row, generation_of(word) + 1);
    }
    if (tasks_ != nullptr) tasks_->drawn(used_up);
  }
  count(control().counters.sampled, counted);
  return tasks_ == nullptr ? 0 : used_up;
}

void Store::check_taking(const Taking& taking, size_t rows) const {
  if (tasks_ == nullptr || tasks_->count() == 0 || header().max_times_sampled != 1) {
    fail(ErrorKind::schema, "rows are kept until they are saved in stores with tasks and max_times_sampled=1 alone");
  }
  if (taking.places.size() != rows) fail(ErrorKind::schema, "as many places as rows are needed");
  if (taking.step >= kMaxTakenSteps) fail(ErrorKind::schema, "steps are below 2^40, found ", taking.step);
  for (const uint32_t place : taking.places) {
    if (place >= kMaxPlaces) fail(ErrorKind::schema, "a batch has up to 2^22 places, found ", place);
  }
}

void Store::release_exhausted(std::span<const uint32_t> rows, std::span<const uint32_t> generations) {
  if (header().max_times_sampled == 0) return;
  ensure_client();
  check_rows(rows);
  Guard guard(*this);
  for (size_t i = 0; i < rows.size(); ++i) {
    const RowStatus& s = status()[rows[i]];
    if (s.state != RowState::exhausted || s.owner != client_slot_ ||
        generation_of(words()[rows[i]].load(kRelaxed)) != generations[i]) {
      continue;
    }
    unhold(rows[i]);
    free_spent(rows[i]);
    put_free_row(rows[i]);
  }
}

void Store::set_times_sampled(std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                              std::span<const uint32_t> counts) {
  ensure_client();
  check_rows(rows);
  if (generations.size() != rows.size() || counts.size() != rows.size()) {
    fail(ErrorKind::schema, "as many generations and counts as rows are needed");
  }
  Guard guard(*this);
  for (size_t i = 0; i < rows.size(); ++i) {
    const uint32_t generation = generation_of(words()[rows[i]].load(kRelaxed));
    if (generation == generations[i] && (generation & 1) != 0)
      status()[rows[i]].times_sampled.store(counts[i], kRelaxed);
  }
}

void Store::free_spent(uint32_t row) {
  const uint32_t generation = generation_of(words()[row].load(kRelaxed));
  words()[row].store(make_word(generation + 1, 0), std::memory_order_release);  // its priority is zero already
  count(control().counters.exhausted);
}

}  // namespace geartrain
