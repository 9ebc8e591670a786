// Weights of rows: fixed-point, in the words, their sums in the weight tree.

#include <cmath>
#include <limits>

#include "base/errors.h"
#include "segment/bucket_order.h"
#include "store/remover_heap.h"
#include "store/store.h"

namespace geartrain {
namespace {

constexpr size_t kAhead = 12;  // rows whose words are fetched ahead of their update

}  // namespace

// Announces that this process is changing weights without the lock, so that a rebuild waits for it, and a
// rebuild after its death knows that sums may be half updated.
class WeightWriter {
 public:
  explicit WeightWriter(Store& store) : writers_(store.client(store.client_slot_).weight_writers) {
    writers_.fetch_add(1, std::memory_order_seq_cst);
    while (store.control().rebuilding.load(std::memory_order_seq_cst) != 0) {
      writers_.fetch_sub(1, std::memory_order_seq_cst);
      {
        Store::Guard wait_for_the_rebuild(store);
      }
      writers_.fetch_add(1, std::memory_order_seq_cst);
    }
  }
  ~WeightWriter() { writers_.fetch_sub(1, std::memory_order_seq_cst); }
  WeightWriter(const WeightWriter&) = delete;
  WeightWriter& operator=(const WeightWriter&) = delete;

 private:
  std::atomic<uint32_t>& writers_;
};

// --- the calls ------------------------------------------------------------------------------------------------

uint64_t Store::update_weights(std::span<const uint32_t> rows, std::span<const uint32_t> generations,
                               std::span<const double> weights) {
  ensure_client();
  if (rows.size() != weights.size() || rows.size() != generations.size()) {
    fail(ErrorKind::schema, rows.size(), " rows were given with ", weights.size(), " weights");
  }
  check_rows(rows);
  validate_weights(weights);
  uint64_t stale = 0;
  const bool ordered = header().remover == static_cast<uint32_t>(Remover::lowest_weight);
  if (ordered || header().max_times_sampled != 0) {
    // The heap follows the weights; and a row that was sampled for the last time keeps its generation while it is
    // read, so that only its state tells that its weight is zero for good.
    Guard guard(*this);
    for (size_t i = 0; i < rows.size(); ++i) {
      if (generation_of(words()[rows[i]].load(kRelaxed)) != generations[i] || (generations[i] & 1) == 0 ||
          status()[rows[i]].state == RowState::spent) {
        ++stale;
        continue;
      }
      set_weight_locked(rows[i], fixed_point(weights[i]));
      if (ordered && status()[rows[i]].state == RowState::committed) Heap(*this).moved(rows[i]);
    }
  } else {
    struct Update {
      uint32_t row, generation, weight;
    };
    const auto update = [&](size_t i) { return Update{rows[i], generations[i], fixed_point(weights[i])}; };
    PooledArray<Update> ordered;  // the same row's updates keep their order, so the last one wins
    if (rows.size() >= kOrderFrom) {
      ordered = bucket_order<Update>(rows.size(), header().capacity, [&](size_t i) { return rows[i]; }, update);
    }
    WeightWriter writer(*this);
    WeightTree::Adder sums(weight_tree_);
    for (size_t i = 0; i < rows.size(); ++i) {
      const size_t ahead = i + kAhead;
      if (ahead < rows.size()) weight_tree_.prefetch(ordered.empty() ? rows[ahead] : ordered[ahead].row);
      const auto [row, generation, weight] = ordered.empty() ? update(i) : ordered[i];
      uint64_t old = words()[row].load(kRelaxed);
      bool changed = false;
      while (!changed && generation_of(old) == generation && is_committed(old)) {
        changed = words()[row].compare_exchange_weak(old, make_word(generation, weight), kRelaxed);
      }
      // Whoever changed the word owes the sums the difference, even if the row is evicted in between: the eviction
      // takes away the weight it found.
      if (changed) sums.add(row, uint64_t{weight} - weight_of(old));
      stale += !changed;
    }
  }
  count(control().counters.weights_updated, rows.size() - stale);
  count(control().counters.stale_keys, stale);
  return stale;
}

void Store::raise_weights(double power) {
  ensure_client();
  const auto raised = [&](uint64_t word) { return fixed_point(std::pow(weight_of(word) / weight_scale_, power)); };
  const uint64_t rows = header().capacity;
  if (header().remover == static_cast<uint32_t>(Remover::lowest_weight)) {
    Guard guard(*this);
    Heap heap(*this);
    for (uint32_t row = 0; row < rows; ++row) {
      const uint64_t word = words()[row].load(kRelaxed);
      if (weight_of(word) == 0) continue;
      set_weight_locked(row, raised(word));
      if (status()[row].state != RowState::committed) continue;  // growing: it is not in the heap yet
      heap.moved(row);  // different weights may have become equal, and then age decides
    }
    return;
  }
  WeightWriter writer(*this);
  WeightTree::Adder sums(weight_tree_);
  for (uint64_t row = 0; row < rows; ++row) {
    uint64_t old = words()[row].load(kRelaxed);
    uint64_t fresh = old;
    do {
      if (weight_of(old) == 0) break;  // free, spent or not to be drawn
      fresh = make_word(generation_of(old), raised(old));
    } while (!words()[row].compare_exchange_weak(old, fresh, kRelaxed));
    if (weight_of(old) != 0) sums.add(row, uint64_t{weight_of(fresh)} - weight_of(old));
  }
}

void Store::set_weight_locked(uint32_t row, uint32_t weight) {
  // Updates without the lock may race for the same word: take what was there, whatever it was.
  uint64_t old = words()[row].load(kRelaxed);
  while (!words()[row].compare_exchange_weak(old, make_word(generation_of(old), weight), kRelaxed)) {
  }
  weight_tree_.add(row, uint64_t{weight} - weight_of(old));
}

uint32_t Store::fixed_point(double weight) {
  const double scaled = weight * weight_scale_;
  if (scaled >= 4294967295.5) {
    count(control().counters.weights_saturated);
    return std::numeric_limits<uint32_t>::max();
  }
  const auto fixed = static_cast<uint32_t>(std::nearbyint(scaled));
  if (fixed == 0 && weight > 0) {
    count(control().counters.weights_rounded_up);  // a row with some weight must stay reachable
    return 1;
  }
  return fixed;
}

void Store::validate_weights(std::span<const double> weights) const {
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!(weights[i] >= 0) || std::isinf(weights[i])) {
      fail(ErrorKind::schema, "a weight is a finite number >= 0, weight ", i, " of ", weights.size(), " is ",
           weights[i]);
    }
  }
}

}  // namespace geartrain
