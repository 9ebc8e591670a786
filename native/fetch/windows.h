// Windows: which steps of a row a batch holds.
//
// A window of W steps is told by one of its steps, its *anchor* t. With `after` steps behind it and W - 1 - after
// before it, the window holds those of t - (W - 1 - after) .. t + after that the row has. `after` is 0 where windows
// are told by their last step, and W - 1 where by their first. What is missing is padded (request.h). A row's windows
// are those whose anchors are every `stride`-th step, from its first step on where windows are told by their first one,
// else from its last step back; and with `whole` only those that nothing is missing of. They are numbered from the
// row's first on. So a row of `length` steps has
//
//   padded   (length - 1) / stride + 1         0 without steps
//   whole    (length - W) / stride + 1         0 where it is shorter than W
//
// A batch has of each drawn row one that is drawn uniformly (kWindowStream), the first one, or the last one. With
// stride 1, padded and told by its last step, the drawn number is that step.
//
// At::episode, told by its first step: where steps are drawn, the window that begins where the drawn step's episode
// does, of W steps at most; where rows are, their first one.
//
// A field has all steps of the window, or some of them (FieldSteps).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "selection/selection.h"

namespace geartrain {

// The steps that a field takes of a window, by their places in it.
struct FieldSteps {
  struct Run {
    uint32_t place, count;
  };

  std::vector<Run> runs;  // one after the other; none: the first step that the row has of the window
  uint32_t count = 1;     // of steps in all
  bool axis = true;       // whether the batch has an axis for them; without one there is one step
};

struct WindowPlan {
  enum class At : uint8_t { drawn, first, last, episode };

  uint32_t length = 0;  // steps; 0: whole rows, and the rest means nothing
  uint32_t stride = 1;
  bool whole = false;
  bool from_first = false;  // told by its first step
  At at = At::drawn;
  uint32_t after = 0;     // steps behind the anchor, unless told by its first step
  bool in_place = false;  // padded on both sides, so that the anchor always has the same place
  std::vector<std::optional<FieldSteps>> fields = {};  // of a batch's fields, in their order; nullopt, or none: all

  bool of_episodes() const { return at == At::episode && length != 0; }
  uint32_t steps_after() const { return from_first ? length - 1 : after; }
  uint32_t steps_before() const { return length - 1 - steps_after(); }
  // The steps that field `i` of a batch takes; null: all.
  const FieldSteps* steps_of(size_t i) const { return i < fields.size() && fields[i] ? &*fields[i] : nullptr; }
  // Steps of a row that are no anchors: before its first one, at its end, and both.
  uint32_t need_before() const { return whole && length != 0 ? steps_before() : 0; }
  uint32_t need_after() const { return whole && length != 0 ? steps_after() : 0; }
  uint32_t need() const { return need_before() + need_after(); }
  uint32_t count(uint32_t row_length) const { return row_length > need() ? (row_length - need() - 1) / stride + 1 : 0; }
  // What a step needs around it to be an anchor; where windows have a stride, or are not drawn, each row has its own.
  StepNeeds needs() const {
    if (length == 0 || stride != 1 || at != At::drawn) return {};
    return {steps_before(), steps_after() + 1};
  }
  // Of window `number`, below count(row_length).
  uint32_t anchor(uint32_t row_length, uint32_t number) const {
    return from_first ? number * stride : row_length - 1 - need_after() - (count(row_length) - 1 - number) * stride;
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
