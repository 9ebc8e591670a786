// Priorities of steps: fixed-point, in the step words, their sums in a tree of their own (segment.h).

#include <algorithm>
#include <cmath>

#include "base/errors.h"
#include "segment/bucket_order.h"
#include "store/priority_writer.h"
#include "store/store.h"

namespace geartrain {
namespace {

constexpr size_t kStepsAhead = 12;  // steps whose words are fetched ahead of their update

// What a process did before it died is what a repair finds, in this order: the processor runs a killed program's
// instructions as a prefix, so only the compiler must not reorder them.
void in_order() {
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

}  // namespace

// --- under the lock -------------------------------------------------------------------------------------------

Store::Sums::Sums(const Store& store)
    : priorities(store.priority_tree_),
      bits(store.bit_tree_),
      steps(store.step_tree_),
      journal(store.per_step() ? &store.journals()[kMaxClients] : nullptr) {}

Store::Sums::~Sums() {
  settle();
}

void Store::Sums::settle() {
  priorities.flush();
  bits.flush();
  if (journal == nullptr) return;
  steps.flush();
  in_order();
  journal->count.store(0, kRelaxed);
}

void Store::Sums::begin(uint32_t row) {
  uint32_t noted = journal->count.load(kRelaxed);
  if (noted >= kJournalEntries) {
    settle();
    noted = 0;
  }
  journal->entries[noted].store(row, kRelaxed);
  in_order();
  journal->count.store(noted + 1, kRelaxed);
  in_order();
}

void Store::add_steps(Sums& sums, uint32_t row, uint32_t generation, uint32_t from, uint32_t to, uint32_t priority) {
  sums.begin(row);
  const uint64_t first = leaf_of(row, 0);
  for (uint64_t leaf = first + from; leaf < first + to; ++leaf) {
    step_tree_.leaves()[leaf].store(make_word(generation, priority), kRelaxed);
    sums.steps.add(leaf, priority);
  }
  in_order();
}

void Store::clear_steps(Sums& sums, uint32_t row, uint32_t generation) {
  const uint64_t first = leaf_of(row, 0);
  const uint32_t length = std::min(status()[row].length.load(kRelaxed), header().max_length);
  for (uint64_t leaf = first; leaf < first + length; ++leaf) {
    // As for a row: whoever changes the word also changes the sums by the difference.
    const uint64_t old = step_tree_.leaves()[leaf].exchange(make_word(generation, 0), kRelaxed);
    sums.steps.add(leaf, uint64_t{0} - priority_of(old));
  }
}

void Store::clear_last_steps(Sums& sums, std::span<const uint32_t> rows) {
  for (const uint32_t row : rows) {
    const uint64_t word = words()[row].load(kRelaxed);
    const uint32_t length = status()[row].length.load(kRelaxed);
    if (!is_committed(word) || length == 0) continue;
    sums.begin(row);
    const uint64_t leaf = leaf_of(row, length - 1);
    const uint64_t old = step_tree_.leaves()[leaf].exchange(make_word(generation_of(word), 0), kRelaxed);
    sums.steps.add(leaf, uint64_t{0} - priority_of(old));
  }
}

void Store::clear_followed_steps(Sums& sums, uint32_t row) {
  const uint32_t length = status()[row].length.load(kRelaxed), until = own_steps(row, length).until;
  if (until == length) return;
  const uint32_t generation = generation_of(words()[row].load(kRelaxed));
  sums.begin(row);
  for (uint64_t leaf = leaf_of(row, until); leaf < leaf_of(row, 0) + length; ++leaf) {
    const uint64_t old = step_tree_.leaves()[leaf].exchange(make_word(generation, 0), kRelaxed);
    sums.steps.add(leaf, uint64_t{0} - priority_of(old));
  }
}

// --- the calls ------------------------------------------------------------------------------------------------

void Store::check_per_step() const {
  if (!per_step()) {
    fail(ErrorKind::schema, "the keys name steps, and the store ", mapping_->path(),
         " keeps priorities of rows; create it with priority_per='step'");
  }
}

uint64_t Store::update_step_priorities(std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                                       std::span<const uint32_t> steps, std::span<const double> priorities) {
  ensure_client();
  check_per_step();
  const size_t n = rows.size();
  if (n != priorities.size() || n != generations.size() || n != steps.size()) {
    fail(ErrorKind::schema, n, " rows were given with ", steps.size(), " steps and ", priorities.size(), " priorities");
  }
  check_rows(rows);
  for (const uint32_t step : steps) {
    if (step >= header().max_length) {
      fail(ErrorKind::schema, "step ", step, " is beyond the ", header().max_length, " steps that a row can have");
    }
  }
  validate_priorities(priorities);
  uint64_t stale = 0;
  struct Update {
    uint32_t leaf, generation, priority;
  };
  const auto update = [&](size_t i) {
    return Update{static_cast<uint32_t>(leaf_of(rows[i], steps[i])), generations[i], fixed_point(priorities[i])};
  };
  PooledArray<Update> ordered;  // the same step's updates keep their order, so the last one wins
  if (n >= order_updates_from(step_tree_.shape().leaves)) {
    ordered = bucket_order<Update>(
        n, step_tree_.shape().leaves, [&](size_t i) { return leaf_of(rows[i], steps[i]); }, update);
  }
  const auto leaf_at = [&](size_t i) { return ordered.empty() ? leaf_of(rows[i], steps[i]) : ordered[i].leaf; };
  std::lock_guard one_at_a_time(journal_mutex_);  // of this process: it has one journal
  PriorityWriter writer(*this);
  StepJournal& journal = journals()[client_slot_];
  std::atomic<uint64_t>* words = step_tree_.leaves();
  const bool keeps_largest = largest_ != nullptr;
  for (size_t first = 0; first < n; first += kJournalEntries) {
    const size_t last = std::min<size_t>(n, first + kJournalEntries);
    for (size_t i = first; i < last; ++i) {
      journal.entries[i - first].store(static_cast<uint32_t>(leaf_at(i)), kRelaxed);
    }
    in_order();
    journal.count.store(static_cast<uint32_t>(last - first), kRelaxed);
    in_order();
    {
      PriorityTree::Adder sums(step_tree_, last - first);
      for (size_t i = first; i < std::min(last, first + kStepsAhead); ++i) step_tree_.prefetch(leaf_at(i));
      for (size_t i = first; i < last; ++i) {
        if (i + kStepsAhead < last) step_tree_.prefetch(leaf_at(i + kStepsAhead));
        const auto [leaf, generation, priority] = ordered.empty() ? update(i) : ordered[i];
        uint64_t old = words[leaf].load(kRelaxed);
        bool changed = false;
        while (!changed && generation_of(old) == generation && is_committed(old)) {
          if (keeps_largest) [[unlikely]]
            raise_largest(priority);
          changed = words[leaf].compare_exchange_weak(old, make_word(generation, priority), kRelaxed);
        }
        if (changed) sums.add(leaf, uint64_t{priority} - priority_of(old));
        stale += !changed;
      }
    }
    in_order();
    journal.count.store(0, kRelaxed);
  }
  count(control().counters.priorities_updated, n - stale);
  count(control().counters.stale_keys, stale);
  return stale;
}

void Store::raise_step_priorities(double power) {
  StepJournal& journal = journals()[client_slot_];
  journal.count.store(kEverything, kRelaxed);
  in_order();
  {
    PriorityTree::Adder sums(step_tree_);
    for (uint64_t row = 0; row < header().capacity; ++row) {
      if (!is_committed(words()[row].load(kRelaxed))) continue;
      const uint64_t first = leaf_of(row, 0);
      const uint32_t length = std::min(status()[row].length.load(kRelaxed), header().max_length);
      for (uint64_t leaf = first; leaf < first + length; ++leaf) {
        std::atomic<uint64_t>& word = step_tree_.leaves()[leaf];
        uint64_t old = word.load(kRelaxed);
        uint64_t fresh = old;
        do {
          if (priority_of(old) == 0) break;
          fresh = make_word(generation_of(old), raised(priority_of(old), power));
        } while (!word.compare_exchange_weak(old, fresh, kRelaxed));
        if (priority_of(old) != 0) sums.add(leaf, uint64_t{priority_of(fresh)} - priority_of(old));
      }
    }
  }
  in_order();
  journal.count.store(0, kRelaxed);
}

uint32_t Store::step_priority(uint32_t row, uint32_t generation, uint32_t step) const {
  check_per_step();
  if (step >= header().max_length) return 0;
  const uint64_t word = step_tree_.leaves()[leaf_of(row, step)].load(kRelaxed);
  return generation_of(word) == generation && is_committed(word) ? priority_of(word) : 0;
}

uint64_t Store::sum_of_steps(uint32_t row) const {
  check_per_step();
  const uint64_t first = leaf_of(row, 0);
  uint64_t sum = 0;
  for (uint64_t leaf = first; leaf < first + header().max_length; ++leaf) {
    sum += priority_of(step_tree_.leaves()[leaf].load(kRelaxed));
  }
  return sum;
}

bool Store::copy_step_priorities(uint32_t row, uint32_t generation, std::span<uint32_t> out) const {
  check_per_step();
  if (out.size() > header().max_length) return false;
  for (uint32_t step = 0; step < out.size(); ++step) {
    const uint64_t word = step_tree_.leaves()[leaf_of(row, step)].load(kRelaxed);
    if (generation_of(word) != generation) return false;
    out[step] = priority_of(word);
  }
  return true;
}

// --- repair ---------------------------------------------------------------------------------------------------

void Store::StepsInDoubt::add(const StepJournal& journal, bool of_rows) {
  const uint32_t count = journal.count.load(kRelaxed);
  if (count > kJournalEntries) {
    everything = true;
    return;
  }
  for (uint32_t i = 0; i < count; ++i) (of_rows ? rows : leaves).push_back(journal.entries[i].load(kRelaxed));
}

// What the words must be where the lock's holder died in the middle: a row's steps count if, and only if, it does.
void Store::repair_steps_of(uint32_t row) {
  const uint64_t row_word = words()[row].load(kRelaxed);
  const uint32_t generation = generation_of(row_word);
  const bool selectable = is_committed(row_word) && status()[row].state != RowState::exhausted;
  const uint32_t length = selectable ? std::min(status()[row].length.load(kRelaxed), header().max_length) : 0;
  for (uint32_t step = 0; step < header().max_length; ++step) {
    std::atomic<uint64_t>& word = step_tree_.leaves()[leaf_of(row, step)];
    const uint64_t found = word.load(kRelaxed);
    if (step < length && generation_of(found) != generation) {
      word.store(make_word(generation, 0), kRelaxed);
    } else if (step >= length && (is_committed(found) || priority_of(found) != 0)) {
      word.store(make_word(generation_of(found) + (generation_of(found) & 1), 0), kRelaxed);
    }
  }
}

void Store::repair_steps_locked(const StepsInDoubt& doubt) {
  if (!per_step()) return;
  const uint64_t capacity = header().capacity;
  bool everything = doubt.everything;
  for (const uint32_t row : doubt.rows) everything |= row >= capacity;
  for (const uint32_t leaf : doubt.leaves) everything |= leaf >= step_tree_.shape().leaves;
  if (everything) {
    for (uint64_t row = 0; row < capacity; ++row) repair_steps_of(static_cast<uint32_t>(row));
    step_tree_.rebuild();
  } else {
    for (const uint32_t row : doubt.rows) {
      repair_steps_of(row);
      step_tree_.rebuild_over(leaf_of(row, 0), leaf_of(row, header().max_length - 1));
    }
    for (const uint32_t leaf : doubt.leaves) step_tree_.rebuild_over(leaf, leaf);
  }
}

uint64_t Store::audit_steps(const std::function<void(const std::string&)>& wrong) const {
  uint64_t problems = 0;
  for (uint64_t row = 0; row < header().capacity; ++row) {
    const uint64_t row_word = words()[row].load(kRelaxed);
    const bool selectable = is_committed(row_word) && status()[row].state != RowState::exhausted;
    const uint32_t length = selectable ? status()[row].length.load(kRelaxed) : 0;
    for (uint32_t step = 0; step < header().max_length; ++step) {
      const uint64_t word = step_tree_.leaves()[leaf_of(row, step)].load(kRelaxed);
      const bool right = step < length ? generation_of(word) == generation_of(row_word)
                                       : !is_committed(word) && priority_of(word) == 0;
      if (right) continue;
      ++problems;
      wrong("step " + std::to_string(step) + " of row " + std::to_string(row) + ", which has " +
            std::to_string(length) + " steps and generation " + std::to_string(generation_of(row_word)) +
            ", has generation " + std::to_string(generation_of(word)) + " and priority " +
            std::to_string(priority_of(word)));
    }
  }
  const uint64_t sums = step_tree_.audit();
  if (sums != 0) wrong(std::to_string(sums) + " sums of steps' priorities are off");
  return problems + sums;
}

}  // namespace geartrain
