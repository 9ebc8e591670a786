// geartrain._native.Candidates: what can be drawn, as trees over arrays, and the draws.

#include "selection.h"

#include <nanobind/stl/optional.h>

#include <cstdlib>
#include <new>

#include "bind.h"
#include "errors.h"
#include "segment.h"

namespace geartrain {
namespace {

// Rows with their weights and selectable bits: a store's own, or made from an array.
class Candidates {
 public:
  explicit Candidates(const Store& store)
      : mapping_(store.mapping()), words_(store.words()), weights_(store.weight_tree()), bits_(store.bit_tree()) {}

  // A copy of fixed-point weights; every row is selectable and has generation 1.
  explicit Candidates(const In<uint32_t>& weights) {
    const uint64_t n = weights.size();
    if (n == 0 || n > kMaxRows) fail(ErrorKind::schema, "1 to ", kMaxRows, " rows can be drawn from, found ", n);
    const uint64_t bit_words = (n + 63) / 64;
    words_ = make(padded_leaves(n));
    weights_ = WeightTree(words_, make(TreeShape::of(n).nodes), n);
    auto* bits = make(padded_leaves(bit_words));
    bits_ = BitTree(bits, make(TreeShape::of(bit_words).nodes), bit_words);
    for (uint64_t row = 0; row < n; ++row) {
      words_[row].store(make_word(1, weights.data()[row]), std::memory_order_relaxed);
      bits[row / 64].fetch_or(uint64_t{1} << (row % 64), std::memory_order_relaxed);
    }
    weights_.rebuild();
    bits_.rebuild();
  }

  Candidates(const Candidates&) = delete;
  Candidates& operator=(const Candidates&) = delete;

  const std::atomic<uint64_t>* words() const { return words_; }
  const WeightTree& weights() const { return weights_; }
  const BitTree& bits() const { return bits_; }

 private:
  std::atomic<uint64_t>* make(uint64_t count) {
    auto* memory = static_cast<std::atomic<uint64_t>*>(std::aligned_alloc(64, (count * 8 + 63) / 64 * 64));
    if (memory == nullptr) throw std::bad_alloc();
    owned_.emplace_back(memory, &std::free);
    for (uint64_t i = 0; i < count; ++i) new (memory + i) std::atomic<uint64_t>(0);
    return memory;
  }

  std::shared_ptr<Mapping> mapping_;
  std::vector<std::unique_ptr<void, void (*)(void*)>> owned_;
  std::atomic<uint64_t>* words_ = nullptr;
  WeightTree weights_;
  BitTree bits_;
};

// Returns (rows, generations, probability, number of draws that failed).
template <typename Draw>
nb::tuple drawn(size_t n, Draw draw) {
  std::vector<uint32_t> rows(n), generations(n);
  std::vector<double> probability(n);
  uint64_t failed = 0;
  {
    nb::gil_scoped_release unlocked;
    failed = draw(Draws{rows, generations, probability});
  }
  return nb::make_tuple(to_numpy(std::move(rows)), to_numpy(std::move(generations)),
                        to_numpy(std::move(probability)), failed);
}

nb::tuple weighted(const Candidates& from, uint64_t seed, uint64_t step, uint32_t round, const In<uint32_t>& numbers) {
  return drawn(numbers.size(), [&](const Draws& out) {
    return draw_weighted(from.weights(), {seed, step, kRowStream}, round, view(numbers), out);
  });
}

nb::tuple uniform(const Candidates& from, uint64_t seed, uint64_t step, uint32_t round, const In<uint32_t>& numbers) {
  return drawn(numbers.size(), [&](const Draws& out) {
    return draw_uniform(from.bits(), from.words(), {seed, step, kRowStream}, round, view(numbers), out);
  });
}

nb::object window_ends(uint64_t seed, uint64_t step, uint32_t round, const In<uint32_t>& numbers,
                       const In<int32_t>& lengths) {
  if (numbers.size() != lengths.size()) fail(ErrorKind::schema, "as many lengths as draws are needed");
  std::vector<int32_t> ends(numbers.size());
  draw_window_ends({seed, step, 0}, round, view(numbers), view(lengths), ends);
  return to_numpy(std::move(ends));
}

}  // namespace

void bind_selection(nb::module_& module) {
  nb::class_<Candidates>(module, "Candidates")
      .def(nb::init<const Store&>())
      .def(nb::init<const In<uint32_t>&>(), nb::arg("weights").noconvert())  // floats would be cut to integers
      .def("total_weight", [](const Candidates& c) { return c.weights().total(); })
      .def("count", [](const Candidates& c) { return c.bits().total(); })
      .def("draw_weighted", &weighted)
      .def("draw_uniform", &uniform);
  module.def("window_ends", &window_ends);
}

}  // namespace geartrain
