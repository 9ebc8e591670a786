// View of transitions: which field plays which part in them, how many steps and frames they span, and whose goals.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "store/store.h"

namespace geartrain {

enum class TransitionRole : uint8_t { step, observation, reward, terminated, truncated, last };

enum class GoalStrategy : uint8_t { none, future, final, episode };

// Hindsight: k in k + 1 transitions get another goal. Places of the two observations among a batch's fields.
struct GoalView {
  GoalStrategy strategy = GoalStrategy::none;
  uint32_t k = 0;
  uint32_t achieved = 0, desired = 0;

  bool operator==(const GoalView&) const = default;
};

// What a batch of transitions is made of. `roles` and the fields of a batch are in the same order.
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

}  // namespace geartrain
