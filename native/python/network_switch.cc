// The switch of emulated hosts: geartrain.tools.testing.cluster runs it in a process of its own.

#include "testing/network_switch.h"

#include <nanobind/stl/vector.h>

#include "python/bind.h"

namespace geartrain {

void bind_switch(nb::module_& module) {
  module.def("run_switch", [](const std::vector<int>& ports, const std::vector<double>& rates,
                              const std::vector<uint32_t>& sites, double delay_s, double loss, double queue_s,
                              uint64_t burst_bytes, uint64_t seed, int control, int answers) {
    nb::gil_scoped_release unlocked;
    run_switch({ports, rates, sites, delay_s, loss, queue_s, burst_bytes, seed, control, answers});
  });
}

}  // namespace geartrain
