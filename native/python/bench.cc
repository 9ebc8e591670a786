// What benchmarks measure against, and what they cannot time from Python.

#include "base/clock.h"
#include "base/copy.h"
#include "python/bind.h"

namespace geartrain {
namespace {

// The floor of fetch and insert: rows of `row_bytes`, `stride` apart, copied one after the other into a warm
// destination, and nothing else done. `stream` picks the copy.
void gather_floor(const nb::ndarray<nb::ro, nb::device::cpu>& source, const nb::ndarray<nb::device::cpu>& destination,
                  const In<uint32_t>& rows, uint64_t row_bytes, uint64_t stride, bool stream) {
  const auto* from = static_cast<const std::byte*>(source.data());
  auto* to = static_cast<std::byte*>(destination.data());
  nb::gil_scoped_release unlocked;
  for (size_t i = 0; i < rows.size(); ++i) {
    copy_block(to + i * row_bytes, from + rows.data()[i] * stride, row_bytes, stream);
  }
  if (stream) stream_fence();
}

// Nanoseconds per row of allocate and commit from C++, one row at a time, nothing written in between.
double time_single_inserts(Store& store, uint64_t n) {
  nb::gil_scoped_release unlocked;
  const uint64_t began = monotonic_ns();
  for (uint64_t i = 0; i < n; ++i) {
    uint32_t row = 0, generation = 0;
    store.allocate({&row, 1});
    store.commit({&row, 1}, {}, {&generation, 1});
  }
  return static_cast<double>(monotonic_ns() - began) / static_cast<double>(n);
}

}  // namespace

void bind_bench(nb::module_& module) {
  module.def("gather_floor", &gather_floor);
  module.def("time_single_inserts", &time_single_inserts);
}

}  // namespace geartrain
