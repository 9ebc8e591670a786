// Windows, limits of rows and ways to draw them, as Python gives them to bindings.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "fetch/batch_sampler.h"

namespace geartrain {

using LimitTuple = std::tuple<int64_t, uint64_t, uint32_t>;  // min_version, inserted_from_ns, min_length

inline Limits limits_of(const std::optional<LimitTuple>& limits) {
  return limits ? std::make_from_tuple<Limits>(*limits) : Limits{};
}

// Places in the window of a field's steps, none: the first step there; and whether the batch has an axis for them.
using FieldStepsTuple = std::tuple<std::vector<uint32_t>, bool>;
// stride, whole, from_first, at, after, in_place, fields
using WindowTuple =
    std::tuple<uint32_t, bool, bool, uint8_t, uint32_t, bool, std::vector<std::optional<FieldStepsTuple>>>;

inline FieldSteps field_steps(const FieldStepsTuple& given) {
  const auto& [places, axis] = given;
  FieldSteps steps{{}, places.empty() ? 1 : static_cast<uint32_t>(places.size()), axis};
  for (const uint32_t place : places) {
    if (!steps.runs.empty() && steps.runs.back().place + steps.runs.back().count == place) {
      ++steps.runs.back().count;
    } else {
      steps.runs.push_back({place, 1});
    }
  }
  return steps;
}

// Windows of so many steps; none are given: those that end at a drawn step, or with length 0 whole rows. Throws schema
// for windows that there are not.
inline WindowPlan window_plan(uint32_t length, const std::optional<WindowTuple>& windows) {
  WindowPlan plan{.length = length};
  if (windows) {
    const auto& [stride, whole, from_first, at, after, in_place, fields] = *windows;
    plan = {length, stride, whole, from_first, static_cast<WindowPlan::At>(at), after, in_place};
    for (const auto& each : fields) {
      plan.fields.push_back(each ? std::optional(field_steps(*each)) : std::nullopt);
    }
  }
  check(plan);
  return plan;
}

// by priority, with replacement, stratified, order (none), with a cursor, over steps
using DrawsTuple = std::tuple<bool, bool, bool, std::optional<int>, bool, bool>;

inline BatchSampler::Settings sampler_settings(const DrawsTuple& draws, WindowPlan window, bool pad_left,
                                               unsigned threads, uint64_t seed,
                                               const std::optional<TransitionView>& view) {
  const auto& [by_priority, replacement, stratified, order, cursor, over_steps] = draws;
  BatchSampler::Settings settings{.window = std::move(window),
                                  .pad_left = pad_left,
                                  .threads = threads,
                                  .seed = seed,
                                  .by = by_priority ? By::priority : By::row,
                                  .replacement = replacement,
                                  .stratified = stratified,
                                  .over_steps = over_steps,
                                  .transitions = view,
                                  .cursor = cursor};
  if (order) {
    settings.form = BatchSampler::Form::ordered;
    settings.order = static_cast<Order>(*order);
  }
  return settings;
}

}  // namespace geartrain
