// Windows, and limits of rows, as Python gives them to bindings.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "fetch/windows.h"
#include "selection/selection.h"

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

}  // namespace geartrain
