// Priorities of rows: fixed-point, in the words, their sums in the priority tree.

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/errors.h"
#include "segment/bucket_order.h"
#include "store/priority_writer.h"
#include "store/remover_heap.h"
#include "store/store.h"

namespace geartrain {
namespace {

constexpr size_t kAhead = 12;  // rows whose words are fetched ahead of their update

}  // namespace

// --- the calls ------------------------------------------------------------------------------------------------

uint64_t Store::update_priorities(std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                                  std::span<const double> priorities) {
  ensure_client();
  if (rows.size() != priorities.size() || rows.size() != generations.size()) {
    fail(ErrorKind::schema, rows.size(), " rows were given with ", priorities.size(), " priorities");
  }
  check_rows(rows);
  validate_priorities(priorities);
  if (per_step()) {
    fail(ErrorKind::schema, "the store ", mapping_->path(),
         " keeps a priority for every step, and these keys name rows; those of batches drawn from it name steps");
  }
  uint64_t stale = 0;
  const bool ordered = header().remover == static_cast<uint32_t>(Remover::lowest_priority);
  if (ordered || header().max_times_sampled != 0) {
    // The heap follows the priorities; and an exhausted or taken row keeps its generation, so that only its state shows
    // that its priority is zero.
    Guard guard(*this);
    for (size_t i = 0; i < rows.size(); ++i) {
      if (generation_of(words()[rows[i]].load(kRelaxed)) != generations[i] || (generations[i] & 1) == 0 ||
          status()[rows[i]].state == RowState::exhausted || status()[rows[i]].state == RowState::taken) {
        ++stale;
        continue;
      }
      set_priority_locked(rows[i], given(priorities[i]));
      if (ordered && status()[rows[i]].state == RowState::committed) Heap(*this).moved(rows[i]);
    }
  } else {
    struct Update {
      uint32_t row, generation, priority;
    };
    const auto update = [&](size_t i) { return Update{rows[i], generations[i], fixed_point(priorities[i])}; };
    PooledArray<Update> ordered;  // the same row's updates keep their order, so the last one wins
    if (rows.size() >= order_updates_from(header().capacity)) {
      ordered = bucket_order<Update>(rows.size(), header().capacity, [&](size_t i) { return rows[i]; }, update);
    }
    const bool keeps_largest = largest_ != nullptr;
    PriorityWriter writer(*this);
    PriorityTree::Adder sums(priority_tree_, rows.size());
    for (size_t i = 0; i < rows.size(); ++i) {
      const size_t ahead = i + kAhead;
      if (ahead < rows.size()) priority_tree_.prefetch(ordered.empty() ? rows[ahead] : ordered[ahead].row);
      const auto [row, generation, priority] = ordered.empty() ? update(i) : ordered[i];
      uint64_t old = words()[row].load(kRelaxed);
      bool changed = false;
      while (!changed && generation_of(old) == generation && is_committed(old)) {
        if (keeps_largest) [[unlikely]]
          raise_largest(priority);
        changed = words()[row].compare_exchange_weak(old, make_word(generation, priority), kRelaxed);
      }
      // The updater of a word also updates the sums by the difference, even if the row is evicted in between: the
      // eviction subtracts the priority it found.
      if (changed) sums.add(row, uint64_t{priority} - priority_of(old));
      stale += !changed;
    }
  }
  count(control().counters.priorities_updated, rows.size() - stale);
  count(control().counters.stale_keys, stale);
  return stale;
}

void Store::raise_priorities(double power) {
  ensure_client();
  const auto raise = [&] { per_step() ? raise_step_priorities(power) : raise_row_priorities(power); };
  if (largest_ != nullptr) {
    // All of them and the largest together: what others set meanwhile would have to be larger than either of it.
    Guard guard(*this);
    WritersOut out(*this);
    wait_for_priority_writers();
    const uint32_t largest = raised(largest_->load(kRelaxed), power);
    raise_largest(largest);
    raise();
    largest_->store(largest, kRelaxed);
  } else if (header().remover == static_cast<uint32_t>(Remover::lowest_priority)) {
    Guard guard(*this);
    raise();
  } else {
    std::lock_guard one_at_a_time(journal_mutex_);
    PriorityWriter writer(*this);
    raise();
  }
}

void Store::restore_max_priority(uint32_t largest) {
  ensure_client();
  if (largest_ != nullptr) largest_->store(largest, kRelaxed);
}

void Store::reset_max_priority() {
  ensure_client();
  if (largest_ == nullptr) {
    fail(ErrorKind::schema, "the store ", mapping_->path(),
         " keeps no largest priority: its new rows get 1; create it with new_priority='max'");
  }
  Guard guard(*this);
  WritersOut out(*this);
  wait_for_priority_writers();
  const PriorityTree& tree = per_step() ? step_tree_ : priority_tree_;
  uint32_t largest = 0;
  for (uint64_t leaf = 0; leaf < tree.shape().leaves; ++leaf) {
    largest = std::max(largest, priority_of(tree.leaves()[leaf].load(kRelaxed)));
  }
  largest_->store(std::min(largest, largest_->load(kRelaxed)), kRelaxed);
}

uint32_t Store::raised(uint32_t priority, double power) {
  return fixed_point(std::pow(priority / priority_scale_, power));  // 0 stays 0
}

void Store::raise_row_priorities(double power) {
  const uint64_t rows = header().capacity;
  if (header().remover == static_cast<uint32_t>(Remover::lowest_priority)) {
    Heap heap(*this);
    for (uint32_t row = 0; row < rows; ++row) {
      const uint64_t word = words()[row].load(kRelaxed);
      if (priority_of(word) == 0) continue;
      set_priority_locked(row, raised(priority_of(word), power));
      if (status()[row].state != RowState::committed) continue;  // open: it is not in the heap yet
      heap.moved(row);  // different priorities may have become equal, and then age decides
    }
    return;
  }
  PriorityTree::Adder sums(priority_tree_);
  for (uint64_t row = 0; row < rows; ++row) {
    uint64_t old = words()[row].load(kRelaxed);
    uint64_t fresh = old;
    do {
      if (priority_of(old) == 0) break;  // free, exhausted or not to be drawn
      fresh = make_word(generation_of(old), raised(priority_of(old), power));
    } while (!words()[row].compare_exchange_weak(old, fresh, kRelaxed));
    if (priority_of(old) != 0) sums.add(row, uint64_t{priority_of(fresh)} - priority_of(old));
  }
}

void Store::set_priority_locked(uint32_t row, uint32_t priority) {
  // Updates without the lock may race for the same word: the difference is to whatever value was there.
  uint64_t old = words()[row].load(kRelaxed);
  while (!words()[row].compare_exchange_weak(old, make_word(generation_of(old), priority), kRelaxed)) {
  }
  priority_tree_.add(row, uint64_t{priority} - priority_of(old));
}

uint32_t Store::fixed_point(double priority) {
  const uint32_t fixed = rounded(priority);
  // One rounding for the many; what was clamped is looked at again.
  if (fixed <= 1 || fixed == std::numeric_limits<uint32_t>::max()) [[unlikely]]
    count_clamped(priority);
  return fixed;
}

void Store::count_clamped(double priority) {
  const double scaled = priority * priority_scale_;
  if (scaled >= 4294967295.5) {
    count(control().counters.priorities_saturated);
  } else if (priority > 0 && std::nearbyint(scaled) == 0) {
    count(control().counters.priorities_rounded_up);
  }
}

uint32_t Store::rounded(double priority) const {
  const double scaled = priority * priority_scale_;
  if (scaled >= 4294967295.5) return std::numeric_limits<uint32_t>::max();
  const auto fixed = static_cast<uint32_t>(std::nearbyint(scaled));
  return fixed == 0 && priority > 0 ? 1 : fixed;  // a row with a positive priority must stay reachable
}

void Store::validate_priorities(std::span<const double> priorities) const {
  for (size_t i = 0; i < priorities.size(); ++i) {
    if (!(priorities[i] >= 0) || std::isinf(priorities[i])) {
      fail(ErrorKind::schema, "a priority is a finite number >= 0, priority ", i, " of ", priorities.size(), " is ",
           priorities[i]);
    }
  }
}

}  // namespace geartrain
