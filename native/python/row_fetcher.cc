// Binding of row fetchers: rows by key, copied into a batch whose arrays are made when they are asked for.

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "fetch/fetch.h"
#include "python/bind.h"
#include "python/sampled_batch.h"

namespace geartrain {
namespace {

// Of some fields and whole rows or windows of a store, which outlives it.
class RowFetcher {
 public:
  RowFetcher(const Store& store, std::vector<uint32_t> fields, uint32_t window, bool pad_left, unsigned threads)
      : store_(store), fields_(std::move(fields)), window_(window), pad_left_(pad_left), threads_(threads) {}

  // Returns (batch, rows that are not those of the keys any more); the batch has no draws.
  nb::tuple fetch(const In<uint32_t>& rows, const In<uint32_t>& generations) {
    if (layout_ == nullptr || layout_->size() != rows.size()) {
      layout_ = entered(store_, [&] {
        return std::make_shared<BatchLayout>(store_, rows.size(), fields_, WindowPlan{.length = window_}, false,
                                             nullptr);
      });
    }
    SampledBatch batch(layout_);
    const BatchArrays& arrays = batch.arrays();
    // Bounded and then used as places: another thread may write to the caller's array in between.
    std::copy_n(rows.data(), rows.size(), arrays.rows.begin());
    FetchRequest request;
    request.rows = arrays.rows;
    request.generations = view(generations);
    request.fields = arrays.fields;
    request.window = window_;
    request.pad_left = pad_left_;
    request.within_episodes = true;
    request.threads = threads_;
    request.versions = arrays.versions;
    request.starts = arrays.starts;
    request.lengths = arrays.lengths;
    request.torn = arrays.torn;
    request.mask = arrays.mask;
    const uint64_t torn = released(store_, [&] { return geartrain::fetch(store_, request); });
    return nb::make_tuple(std::move(batch), torn);
  }

 private:
  const Store& store_;
  const std::vector<uint32_t> fields_;
  const uint32_t window_;
  const bool pad_left_;
  const unsigned threads_;
  std::shared_ptr<const BatchLayout> layout_;  // of the batch that was asked for last
};

}  // namespace

void bind_row_fetcher(nb::module_& module) {
  nb::class_<RowFetcher>(module, "RowFetcher")
      .def(nb::init<const Store&, std::vector<uint32_t>, uint32_t, bool, unsigned>(), nb::arg("store"),
           nb::arg("fields"), nb::arg("window"), nb::arg("pad_left"), nb::arg("threads"), nb::keep_alive<1, 2>())
      .def("fetch", &RowFetcher::fetch, nb::arg("rows"), nb::arg("generations"));
}

}  // namespace geartrain
