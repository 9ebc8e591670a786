// Windows as Python gives them to bindings.
#pragma once

#include <cstdint>
#include <optional>
#include <tuple>

#include "fetch/windows.h"

namespace geartrain {

using WindowTuple = std::tuple<uint32_t, bool, bool, uint8_t>;  // stride, whole, from_first, at

// Windows of so many steps; none are given: those that end at a drawn step, or with length 0 whole rows. Throws schema
// for windows that there are not.
inline WindowPlan window_plan(uint32_t length, const std::optional<WindowTuple>& windows) {
  WindowPlan plan{.length = length};
  if (windows) {
    const auto [stride, whole, from_first, at] = *windows;
    plan = {length, stride, whole, from_first, static_cast<WindowPlan::At>(at)};
  }
  check(plan);
  return plan;
}

}  // namespace geartrain
