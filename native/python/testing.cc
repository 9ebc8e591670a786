// Bindings of what only benchmarks and tests use: lower bounds that cannot be timed from Python, and the network switch
// of emulated hosts.

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "base/clock.h"
#include "base/copy.h"
#include "python/bind.h"
#include "testing/network_switch.h"

namespace geartrain {
namespace {

// The lower bound of fetch and insert: rows of `row_bytes`, `stride` apart, copied one after the other into a warm
// destination, and nothing else done. `stream` picks the copy.
void gather_floor(const nb::ndarray<nb::ro, nb::device::cpu>& source, const nb::ndarray<nb::device::cpu>& destination,
                  const In<uint32_t>& rows, uint64_t row_bytes, uint64_t stride, bool stream) {
  const auto* from = static_cast<const std::byte*>(source.data());
  auto* to = static_cast<std::byte*>(destination.data());
  const Unlocked unlocked;
  for (size_t i = 0; i < rows.size(); ++i) {
    copy_block(to + i * row_bytes, from + rows.data()[i] * stride, row_bytes, stream);
  }
  if (stream) stream_fence();
}

// The same for several fields, field by field: what one call has to do for a batch of them.
void gather_fields_floor(const std::vector<nb::ndarray<nb::ro, nb::device::cpu>>& sources,
                         const std::vector<nb::ndarray<nb::device::cpu>>& destinations, const In<uint32_t>& rows,
                         uint64_t row_bytes, const std::vector<uint64_t>& strides, bool stream) {
  if (destinations.size() != sources.size() || strides.size() != sources.size()) {
    fail(ErrorKind::schema, "as many sources as destinations and strides");
  }
  const Unlocked unlocked;
  for (size_t f = 0; f < sources.size(); ++f) {
    const auto* from = static_cast<const std::byte*>(sources[f].data());
    auto* to = static_cast<std::byte*>(destinations[f].data());
    for (size_t i = 0; i < rows.size(); ++i) {
      copy_block(to + i * row_bytes, from + rows.data()[i] * strides[f], row_bytes, stream);
    }
  }
  if (stream) stream_fence();
}

// Nanoseconds per row of allocate and commit from C++, one row at a time, nothing written in between. It joins the
// store of that name as a client of its own.
double time_single_inserts(const std::string& name, uint64_t n) {
  const Unlocked unlocked;
  const std::unique_ptr<Store> joined = Store::attach(name, {});
  Store& store = *joined;
  const uint64_t began = monotonic_ns();
  for (uint64_t i = 0; i < n; ++i) {
    uint32_t row = 0, generation = 0;
    store.allocate({&row, 1});
    store.commit({&row, 1}, {}, {&generation, 1});
  }
  return static_cast<double>(monotonic_ns() - began) / static_cast<double>(n);
}

// What geartrain.tools.testing.network_switch runs in a process of its own.
void forward(const std::vector<int>& ports, const std::vector<double>& rates, const std::vector<uint32_t>& sites,
             double delay_s, double loss, double queue_s, uint64_t burst_bytes, uint64_t seed, int control,
             int answers) {
  const Unlocked unlocked;
  run_switch({ports, rates, sites, delay_s, loss, queue_s, burst_bytes, seed, control, answers});
}

}  // namespace

void bind_testing(nb::module_& module) {
  module.def("gather_floor", &gather_floor);
  module.def("gather_fields_floor", &gather_fields_floor);
  module.def("time_single_inserts", &time_single_inserts);
  module.def("run_switch", &forward);
}

}  // namespace geartrain
