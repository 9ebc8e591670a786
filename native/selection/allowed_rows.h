// Internal to selection: a copy of the rows that may be chosen, for when rejection sampling would take too long.
#pragma once

#include <bit>
#include <memory>
#include <span>
#include <vector>

#include "selection/selection.h"

namespace geartrain {

[[noreturn]] void fail_empty(const DrawPlan& plan);

// Where steps are the unit, or found over steps: draws the numbers whose row is kNoRow from the steps that count of the
// rows that the limits allow. Returns how many failed for good, because the steps changed meanwhile.
uint64_t draw_from_allowed_steps(const Population& from, const DrawPlan& plan, std::span<const uint32_t> numbers,
                                 const Draws& out);

// Calls visit(row) for every selectable row that the limits allow.
template <typename Visit>
void for_each_selectable(const Population& from, const Limits& limits, Visit visit) {
  const uint64_t words = from.bits.shape().leaves;
  for (uint64_t at = 0; at < words; ++at) {
    for (uint64_t bits = from.bits.leaves()[at].load(std::memory_order_relaxed); bits != 0; bits &= bits - 1) {
      const auto row = static_cast<uint32_t>(at * 64 + static_cast<uint64_t>(std::countr_zero(bits)));
      if (limits.none() || limits.allow(from.status[row])) visit(row);
    }
  }
}

// The allowed rows of a population, with sums of their own, from which rows can be removed.
class Allowed {
 public:
  // Of the plan, what is drawn and the limits count.
  Allowed(const Population& from, const DrawPlan& plan, std::span<const uint32_t> excluded);
  Allowed(const Population& from, By by, const Limits& limits, std::span<const uint32_t> excluded)
      : Allowed(from, DrawPlan{.key = {}, .by = by, .limits = limits}, excluded) {}

  uint64_t total() const { return tree_.total(); }
  uint64_t rows() const { return rows_; }

  // The allowed rows as a population to draw from by priority; rows removed from it are absent there as well.
  Population population() const { return {tree_, {}, words_.get(), nullptr}; }

  // Writes the row that `target`, below total(), falls into.
  uint32_t take(uint64_t target, size_t i, const Draws& out) const;
  void remove(uint32_t row);

 private:
  const Population& from_;
  uint64_t rows_ = 0;
  double whole_;  // of the population, for probabilities
  Words words_, nodes_;
  PriorityTree tree_;
};

// Where steps are the unit, or found over steps: those that count of the rows that the limits allow, in their order,
// with sums of a row each. Follows priorities that change under it: a target may then fall into none.
class AllowedSteps {
 public:
  AllowedSteps(const Population& from, const DrawPlan& plan);

  uint64_t total() const { return total_; }

  struct Step {
    uint64_t word = 0;
    uint32_t row = kNoRow, step = 0;
  };
  // The step that `target` falls into; kNoRow where there is none.
  Step find(uint64_t target) const;

 private:
  struct RowSum {
    uint64_t until;  // the sum up to the row's end
    uint32_t row, steps;
  };
  uint64_t word_of(uint32_t row, uint32_t step) const;
  uint32_t share_of(uint64_t word, uint32_t row, uint32_t step) const;

  const Population& from_;
  const DrawPlan plan_;
  uint64_t total_ = 0;
  std::vector<RowSum> sums_;
};

// Row numbers that were seen, by open addressing.
class SeenRows {
 public:
  explicit SeenRows(size_t most);
  // False when the row was there already.
  bool insert(uint32_t row);

 private:
  std::vector<uint32_t> slots_;
  uint32_t mask_;
};

}  // namespace geartrain
