// Windows: which steps of a row a batch holds.
//
// A window of W steps is told by one of its steps, its *anchor* t: the last one, and then it holds steps
// max(0, t - W + 1) .. t; or the first one, and then it holds t .. min(t + W, length) - 1. What is missing is padded
// (request.h). A row's windows are those whose anchors are every `stride`-th step, from its first step on where windows
// are told by their first one, from its last step back where by their last; and with `whole` only those that nothing is
// missing of. They are numbered from the row's first on. So a row of `length` steps has
//
//   padded   (length - 1) / stride + 1         0 without steps
//   whole    (length - W) / stride + 1         0 where it is shorter than W
//
// A batch has of each drawn row one that is drawn uniformly (kWindowStream), the first one, or the last one. With
// stride 1, padded and told by its last step, the drawn number is that step.
//
// At::episode, told by its first step: where steps are drawn, the window that begins where the drawn step's episode
// does, of W steps at most; where rows are, their first one.
#pragma once

#include <cstdint>
#include <span>

#include "selection/selection.h"

namespace geartrain {

struct WindowPlan {
  enum class At : uint8_t { drawn, first, last, episode };

  uint32_t length = 0;  // steps; 0: whole rows, and the rest means nothing
  uint32_t stride = 1;
  bool whole = false;
  bool from_first = false;  // told by its first step
  At at = At::drawn;

  bool of_episodes() const { return at == At::episode && length != 0; }
  // Steps at a row's end, or before its first anchor, that are none.
  uint32_t need() const { return whole && length != 0 ? length - 1 : 0; }
  uint32_t count(uint32_t row_length) const { return row_length > need() ? (row_length - need() - 1) / stride + 1 : 0; }
  // What a step needs around it to be an anchor; where windows have a stride, or are not drawn, each row has its own.
  StepNeeds needs() const {
    if (length == 0 || stride != 1 || at != At::drawn) return {};
    return from_first ? StepNeeds{0, length} : StepNeeds{length - 1, 1};
  }
  // The first step that may be an anchor.
  uint32_t first_anchor() const { return from_first ? 0 : need(); }
  // Of window `number`, below count(row_length).
  uint32_t anchor(uint32_t row_length, uint32_t number) const {
    return from_first ? number * stride : row_length - 1 - (count(row_length) - 1 - number) * stride;
  }
};

// The anchors of the draws' windows. A row without windows gets 0: it was replaced since it was drawn, or has no steps.
// `anchors` may be `lengths`.
void place_windows(const WindowPlan& plan, const DrawKey& key, uint32_t round, std::span<const uint32_t> numbers,
                   std::span<const int32_t> lengths, std::span<int32_t> anchors);

// The same of drawn rows, by their lengths as of now. Where rows repeat steps, a window that is drawn uniformly is one
// that its row does not leave to a neighbour; a row that has none of its own has any of its windows.
void place_windows(const Population& from, std::span<const uint32_t> rows, const WindowPlan& plan, const DrawKey& key,
                   uint32_t round, std::span<const uint32_t> numbers, std::span<int32_t> anchors);

// Throws schema for plans that mean nothing.
void check(const WindowPlan& plan);

}  // namespace geartrain
