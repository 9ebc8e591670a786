// Transitions: what DQN, SAC and their like train on, gathered from rows of recorded steps.
//
// The transition of step t of a row of `length` steps, 0 <= t < length - 1, with m = min(n_step, length - 1 - t):
//
//   observation     the stack of frames t - frame_stack + 1 .. t and the one that ends at t + m; zeros before step 0
//   reward          sum of gamma ** k * reward[t + k], k < m, summed in double precision and rounded to float32
//   discount        gamma ** m, 0 where terminated[t + m - 1]
//   truncated       truncated[t + m - 1] where the store has it, else: not terminated, and last[t + m], or without that
//                   field t + m == length - 1; not where the next row repeats steps of this one and t + m == length - 1
//   any other       its value at t; of a field without time its block
//
// Hindsight (n_step 1): of draw i, unless below(k + 1) of its bits of kGoalStream is 0, the frames of the desired goal
// are those of the achieved goal at another step s of the row, from the next attempt's bits:
//
//   future        t + 1 + below(length - 1 - t)
//   final         length - 1
//   episode       1 + below(length - 1)
//
// Reward, discount and terminated stay those of the row, for the caller to change.
//
// In rows of several episodes (episodes.h) every step that is marked `last` ends one. Then `length - 1` above is the
// first marked step from t on, and step 0 the one behind the last marked step before t. A marked step is no transition:
// it is reported as a row that was lost is, and drawn again.
//
// Only these steps are read. Rows are taken a few dozen at a time: their words, then lengths and steps. The lines of
// the next few are asked for while those before are copied, so that their cache misses overlap.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/random.h"
#include "fetch/fetch.h"
#include "store/store.h"

namespace geartrain {

// Which field plays which part in transitions.
enum class TransitionRole : uint8_t { step, observation, reward, terminated, truncated, last };

enum class GoalStrategy : uint8_t { none, future, final, episode };

// Hindsight: k in k + 1 transitions get another goal. Places of the two observations among a batch's fields.
struct GoalView {
  GoalStrategy strategy = GoalStrategy::none;
  uint32_t k = 0;
  uint32_t achieved = 0, desired = 0;

  bool operator==(const GoalView&) const = default;
};

// What a batch of transitions is made of: the parts of its fields, how many steps and frames a transition spans, and
// whose goals it has. `roles` and the fields of a batch are in the same order.
struct TransitionView {
  uint32_t n_step = 1;
  uint32_t frame_stack = 1;
  std::vector<double> powers;  // gamma ** 0 .. gamma ** n_step
  std::vector<TransitionRole> roles;
  GoalView goals = {};

  bool operator==(const TransitionView&) const = default;

  // With n_step 1 a stack and the next one are parts of one window of frame_stack + 1 frames; else each is an array of
  // its own, since a row that ends early brings them closer together.
  bool shares_window() const { return n_step == 1 && frame_stack > 1; }
  uint32_t window_frames() const { return shares_window() ? frame_stack + 1 : frame_stack; }
  // What a transition needs around its step: frames before it, and steps that are summed up.
  StepNeeds needs() const { return {frame_stack - 1, n_step}; }
  // Bytes from one row to the next in a field's output; of rewards, float32. Observations: in each of the two.
  uint64_t row_bytes(const FieldRecord& field, TransitionRole role) const;
  // Throws schema unless the store's fields can have these roles: one reward and one terminated, ...
  void check(const Store& store, std::span<const uint32_t> fields) const;
};

// Where one field of a batch of transitions goes; nothing for those of the outputs below, which have a place of their
// own. `next`: of observations; where the two share a window, one frame behind `out`.
struct TransitionField {
  uint32_t field;
  std::byte* out = nullptr;
  std::byte* next = nullptr;
};

struct TransitionRequest {
  std::span<const uint32_t> rows, generations;  // as drawn
  std::span<const uint32_t> places;             // of each in the outputs and below
  std::span<const uint32_t> numbers;            // of each draw, which its random bits are of; empty: the places
  std::span<const uint32_t> steps;              // each row's t; empty: uniform over its transitions, from kWindowStream
  DrawKey key;
  uint32_t round = 0;
  unsigned threads = 1;
  std::span<const TransitionField> fields;
  std::span<float> discount;
  std::span<uint8_t> terminated, truncated;
  std::span<uint8_t> relabelled;  // with goals: 1 where another was taken
  // 1: the row was lost, or has no such transition.
  std::span<uint8_t> torn;
  std::span<uint8_t> mask;    // (rows, frame_stack): 1 for a real frame
  std::span<int32_t> starts;  // t
  std::span<int32_t> lengths;
  std::span<int64_t> versions;
};

// Throws schema when rows, places or fields are out of range.
void gather_transitions(const Store& store, const TransitionView& view, const TransitionRequest& request);

}  // namespace geartrain
