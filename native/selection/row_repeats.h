// Rows that share steps with their neighbours: an episode that is longer than a row goes on in the next one, which
// repeats its last steps. Each step is drawn from one of its copies only.
//
// What is drawn at step t needs `before` steps in front of t, and t and the `after - 1` behind it:
//
//   a transition of n steps with a stack of F frames    before F - 1, after n
//   a window of W steps that is told by its last one    before W - 1, after 1
//   a window of W steps that is told by its first one   before 0,     after W
//
// Let a row repeat the last k steps of the row before. Of the shared steps the row before has those that are followed
// by `after - 1` more of them, which are all but the last after - 1; the row has the rest. These have
// k - (after - 1) steps in front of them, so k >= before + after - 1 is needed for every step to be whole somewhere.
// Where the episode itself begins with the row's first step, nothing is missing in front of any.
// What a row has follows from its own two numbers, whether or not the neighbour is there: while the next row is not
// committed yet, and once a neighbour is evicted, the steps that are drawn from it are not drawn at all.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace geartrain {

// Steps that a row has in common with its neighbours.
struct SharedSteps {
  uint32_t first = 0;          // its first so many, with the row before
  uint32_t last = 0;           // its last so many actions, with the row after
  bool goes_on_here = false;   // its first step is not its episode's first
  bool goes_on_there = false;  // the episode of its last step goes on in the row after
};

// Steps [first, until) of a row.
struct StepRange {
  uint32_t first = 0, until = 0;
  uint32_t size() const { return until > first ? until - first : 0; }
  bool contains(uint64_t step) const { return step >= first && step < until; }
};

// What a draw of steps needs around each.
struct StepNeeds {
  uint32_t before = 0;
  uint32_t after = 0;  // 0: whole rows, or steps of whatever row
  uint32_t least() const { return before + after - 1; }
};

struct RowRepeats {
  // Three int32 a row: how many of its first steps repeat, how many of its last ones the next row repeats, and
  // kGoesOnHere | kGoesOnThere. nullptr: no row repeats steps.
  const std::byte* column = nullptr;
  uint64_t stride = 0;  // from one row's numbers to the next
  static constexpr int32_t kGoesOnHere = 1, kGoesOnThere = 2;

  explicit operator bool() const { return column != nullptr; }

  const std::byte* at(uint32_t row) const { return column + row * stride; }
  SharedSteps of(uint32_t row) const {
    auto* const numbers = reinterpret_cast<int32_t*>(const_cast<std::byte*>(at(row)));
    const auto read = [&](int i) { return std::atomic_ref<int32_t>(numbers[i]).load(std::memory_order_relaxed); };
    const int32_t first = std::max(read(0), 0), last = std::max(read(1), 0), edges = read(2);
    return {static_cast<uint32_t>(first), static_cast<uint32_t>(last), (edges & kGoesOnHere) != 0,
            (edges & kGoesOnThere) != 0};
  }

  // The steps of a row of `length` steps that are drawn from it. Where steps have priorities the others have none.
  static StepRange drawn(const SharedSteps& shared, uint32_t length, const StepNeeds& needs) {
    StepRange range{0, length};
    range.first = shared.first + 1 - std::min(shared.first + 1, needs.after);
    if (shared.goes_on_there) range.until = length - std::min({length, needs.after, shared.last + 1});
    return range;
  }
};

}  // namespace geartrain
