// Bindings of the share planner: lists of rates and shares in and out.

#include "collectives/share_planner.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>

#include "python/bind.h"

namespace geartrain {
namespace {

using Values = std::vector<double>;

std::pair<Values, double> unpacked(SharesPlan plan) {
  return {std::move(plan.shares), plan.seconds};
}

}  // namespace

void bind_planner(nb::module_& module) {
  module.def("plan_shares", [](const Values& workers, const Values& reducers, double bytes) {
    return unpacked(plan_shares({workers, reducers}, bytes));
  });
  module.def("equal_rates",
             [](size_t workers, const std::vector<std::string>& reducers) { return equal_rates(workers, reducers); });
  module.def("plan_dedicated", [](const Values& workers, const Values& reducers, double bytes) {
    return unpacked(plan_dedicated({workers, reducers}, bytes));
  });
  module.def("shares_seconds", [](const Values& workers, const Values& reducers, const Values& shares, double bytes) {
    return shares_seconds({workers, reducers}, shares, bytes);
  });
  module.def("moved_bytes", [](size_t workers, size_t reducers, const Values& shares, double bytes) {
    return moved_bytes(workers, reducers, shares, bytes);
  });
  module.def("ring_bytes", &ring_bytes);
  module.def("ring_hops", &ring_hops);
  module.def("tree_bytes", &tree_bytes);
  module.def("tree_seconds", &tree_seconds);
  module.def("tree_hops", &tree_hops);
  module.attr("DIRECT_HOPS") = kDirectHops;
  module.def("reducers_needed", [](const Values& workers, double rate) { return reducers_needed(workers, rate); });
  module.def("dedicated_reducers_needed",
             [](const Values& workers, double rate) { return dedicated_reducers_needed(workers, rate); });
}

}  // namespace geartrain
