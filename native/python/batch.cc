// Binding of batch samplers: a batch is one native object over one recycled buffer, and its arrays are made when they
// are asked for.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "base/errors.h"
#include "fetch/batch_sampler.h"
#include "python/batch_shapes.h"
#include "python/bind.h"
#include "selection/importance_weights.h"

namespace geartrain {
namespace {

using LimitTuple = std::tuple<int64_t, uint64_t, uint32_t>;  // min_version, inserted_from_ns, min_length

// A batch of n rows: fields in recycled memory, or in arrays of the caller's; metadata in recycled memory. Of
// transitions, its fields are what `transition_outputs` names.
class SampledBatch {
 public:
  SampledBatch(const Store& store, size_t n, const std::vector<uint32_t>& fields, uint32_t window, bool shards,
               std::optional<std::vector<AnyArray>> out, const TransitionView* view)
      : n_(n),
        window_(window),
        steps_(view != nullptr ? view->frame_stack
               : window != 0   ? window
                               : store.header().max_length),
        memory_(bytes_needed(store, n, fields, window, shards, !out, view)),
        out_(std::move(out)) {
    if (view != nullptr) {
      view_ = *view;
      add_transitions(store, fields);
    } else {
      add_fields(store, fields);
    }
    take(arrays_.rows, n);
    take(arrays_.generations, n);
    take(arrays_.steps, n);
    take(arrays_.probability, n);
    take(arrays_.torn, n);
    take(arrays_.mask, n * steps_);
    take(arrays_.starts, n);
    take(arrays_.lengths, n);
    take(arrays_.versions, n);
    take(importance_, n);
    if (shards) take(shards_, n);
  }

  size_t size() const { return n_; }
  uint64_t nbytes() const { return nbytes_; }
  uint32_t window() const { return window_; }
  size_t steps() const { return steps_; }
  const std::vector<uint64_t>& row_bytes() const { return row_bytes_; }
  const BatchArrays& arrays() const { return arrays_; }

  nb::object field(size_t i) const {
    if (i >= fields_.size()) fail(ErrorKind::schema, "the batch has ", fields_.size(), " fields, not a number ", i);
    if (out_) return nb::cast((*out_)[i]);
    const Field& field = fields_[i];
    return memory_.array(field.at, field.shape, field.dtype, field.row_elements);
  }
  const std::optional<TransitionView>& view() const { return view_; }
  template <typename T>
  nb::object array(std::span<T> values) const {
    return memory_.array(values, {n_});
  }
  nb::object mask() const {
    return memory_.array(reinterpret_cast<std::byte*>(arrays_.mask.data()), {n_, steps_}, nb::dtype<bool>());
  }
  // None where no part of the batch has any.
  nb::object importance_array() const { return weighed_ ? array(importance_) : nb::none(); }
  nb::object shard_array() const { return shards_.empty() ? nb::none() : array(shards_); }

  void check_part(size_t first, size_t n) const {
    if (first > n_ || n > n_ - first) {
      fail(ErrorKind::schema, "rows ", first, " to ", first + n, " are no part of a batch of ", n_);
    }
  }
  void set_shard(size_t first, size_t n, uint16_t shard) {
    check_part(first, n);
    if (!shards_.empty()) std::fill_n(shards_.begin() + static_cast<ptrdiff_t>(first), n, shard);
  }
  // The importance weights of a part, to be filled; where parts have none they are 1.
  std::span<double> weights(size_t first, size_t n) {
    check_part(first, n);
    if (!std::exchange(weighed_, true)) std::fill(importance_.begin(), importance_.end(), 1.0);
    return importance_.subspan(first, n);
  }
  void set_importance(size_t first, const In<double>& given) {
    const std::span<double> to = weights(first, given.size());
    std::copy_n(given.data(), given.size(), to.begin());
  }

 private:
  struct Field {
    std::byte* at;
    std::vector<size_t> shape;
    nb::dlpack::dtype dtype;
    int64_t row_elements = 0;  // from one row to the next; 0: rows lie one after the other
  };

  void add_fields(const Store& store, const std::vector<uint32_t>& fields) {
    if (out_ && out_->size() != fields.size()) {
      fail(ErrorKind::schema, fields.size(), " fields were asked for with ", out_->size(), " output arrays");
    }
    for (size_t i = 0; i < fields.size(); ++i) {
      const FieldRecord& record = store.fields()[fields[i]];
      Field field{nullptr, batch_shape(record, n_, window_), array_dtype(record.dtype, record.itemsize)};
      const size_t bytes = bytes_of(field.shape, record.itemsize);
      if (out_) {
        const AnyArray& given = (*out_)[i];
        if (given.nbytes() != bytes || given.itemsize() != record.itemsize) {
          fail(ErrorKind::schema, "the output array of field '", record.name, "' has ", given.nbytes(),
               " bytes, the batch needs ", bytes);
        }
        field.at = static_cast<std::byte*>(given.data());
      } else {
        field.at = memory_.take(bytes);
      }
      arrays_.fields.push_back({fields[i], field.at});
      fields_.push_back(std::move(field));
      row_bytes_.push_back(bytes / n_);
      nbytes_ += bytes;
    }
  }

  // The order of the fields is part of the binding (geartrain/replay/transitions.py): of each field what it gives, an
  // observation twice; then reward, discount, terminated, truncated, and with goals relabelled.
  void add_transitions(const Store& store, const std::vector<uint32_t>& fields) {
    Field reward{};
    for (size_t i = 0; i < fields.size(); ++i) {
      const FieldRecord& record = store.fields()[fields[i]];
      const TransitionRole role = view_->roles[i];
      TransitionField to{fields[i]};
      std::vector<size_t> shape = transition_shape(record, role, n_, *view_);
      const size_t step = bytes_of(shape, record.itemsize) / n_;
      const nb::dlpack::dtype dtype = array_dtype(record.dtype, record.itemsize);
      if (role == TransitionRole::observation) {
        if (view_->shares_window()) {
          const size_t frame = step / view_->frame_stack, window = frame * view_->window_frames();
          to.out = memory_.take(window * n_);
          to.next = to.out + frame;
        } else {
          to.out = memory_.take(step * n_);
          to.next = memory_.take(step * n_);
        }
        const auto row_elements =
            view_->shares_window() ? static_cast<int64_t>(view_->row_bytes(record, role) / record.itemsize) : 0;
        fields_.push_back({to.out, shape, dtype, row_elements});
        fields_.push_back({to.next, std::move(shape), dtype, row_elements});
        nbytes_ += 2 * step * n_;
      } else if (role == TransitionRole::step) {
        to.out = memory_.take(step * n_);
        fields_.push_back({to.out, std::move(shape), dtype});
        nbytes_ += step * n_;
      } else if (role == TransitionRole::reward) {
        const size_t bytes = bytes_of(shape, sizeof(float));
        to.out = memory_.take(bytes);
        reward = {to.out, std::move(shape), nb::dtype<float>()};
        nbytes_ += bytes;
      }
      arrays_.transitions.push_back(to);
      row_bytes_.push_back(view_->row_bytes(record, role));
    }
    take(arrays_.discount, n_);
    take(arrays_.terminated, n_);
    take(arrays_.truncated, n_);
    fields_.push_back(std::move(reward));
    fields_.push_back({reinterpret_cast<std::byte*>(arrays_.discount.data()), {n_}, nb::dtype<float>()});
    fields_.push_back({reinterpret_cast<std::byte*>(arrays_.terminated.data()), {n_}, nb::dtype<bool>()});
    fields_.push_back({reinterpret_cast<std::byte*>(arrays_.truncated.data()), {n_}, nb::dtype<bool>()});
    nbytes_ += (sizeof(float) + 2) * n_;
    if (view_->goals.strategy != GoalStrategy::none) {
      take(arrays_.relabelled, n_);
      fields_.push_back({reinterpret_cast<std::byte*>(arrays_.relabelled.data()), {n_}, nb::dtype<bool>()});
      nbytes_ += n_;
    }
  }

  static size_t bytes_needed(const Store& store, size_t n, const std::vector<uint32_t>& fields, uint32_t window,
                             bool shards, bool with_fields, const TransitionView* view) {
    if (n == 0) fail(ErrorKind::schema, "a batch has at least one row");
    size_t steps = window != 0 ? window : store.header().max_length, bytes = 0;
    for (uint32_t field : fields) {
      if (field >= store.header().field_count) fail(ErrorKind::schema, "no field number ", field);
    }
    if (view != nullptr) {
      if (!with_fields) fail(ErrorKind::schema, "transitions go to recycled memory, not to arrays of the caller's");
      view->check(store, fields);
      steps = view->frame_stack;
      bytes += PooledMemory::padded(4 * n) + 3 * PooledMemory::padded(n);
    }
    for (size_t i = 0; with_fields && i < fields.size(); ++i) {
      const FieldRecord& record = store.fields()[fields[i]];
      if (view == nullptr) {
        bytes += PooledMemory::padded(bytes_of(batch_shape(record, n, window), record.itemsize));
        continue;
      }
      const TransitionRole role = view->roles[i];
      const size_t itemsize = role == TransitionRole::reward ? sizeof(float) : record.itemsize;
      const size_t one = PooledMemory::padded(bytes_of(transition_shape(record, role, n, *view), itemsize));
      bytes += role == TransitionRole::observation ? 2 * one : one;
    }
    bytes += 5 * PooledMemory::padded(4 * n) + 3 * PooledMemory::padded(8 * n) + PooledMemory::padded(n) +
             PooledMemory::padded(bytes_of({n, steps}, 1));
    if (shards) bytes += PooledMemory::padded(2 * n);
    return bytes;
  }
  template <typename T>
  void take(std::span<T>& span, size_t count) {
    span = {reinterpret_cast<T*>(memory_.take(count * sizeof(T))), count};
  }

  size_t n_;
  uint32_t window_;
  size_t steps_;
  PooledMemory memory_;
  std::optional<std::vector<AnyArray>> out_;
  std::optional<TransitionView> view_;
  std::vector<Field> fields_;
  std::vector<uint64_t> row_bytes_;
  BatchArrays arrays_;
  std::span<double> importance_;
  bool weighed_ = false;
  std::span<uint16_t> shards_;
  uint64_t nbytes_ = 0;
};

// A store's sampler; the store outlives it.
class Sampler {
 public:
  Sampler(Store& store, const std::vector<uint32_t>& fields, const BatchSampler::Settings& settings)
      : store_(store), fields_(fields), window_(settings.window.length), sampler_(store, settings) {
    const TransitionView* view = sampler_.view();
    if (view != nullptr) view->check(store, fields);
    for (size_t i = 0; i < fields.size(); ++i) {
      if (fields[i] >= store.header().field_count) fail(ErrorKind::schema, "no field number ", fields[i]);
      row_bytes_.push_back(view != nullptr ? view->row_bytes(store.fields()[fields[i]], view->roles[i])
                                           : fetched_row_bytes(store, fields[i], window_));
    }
    steps_ = view != nullptr ? view->frame_stack : window_ != 0 ? window_ : store.header().max_length;
  }

  // Fills rows [first, first + n) of a batch. Returns (cursor, rows redrawn, rows drawn from), or
  // None where rows or the rate limiter have to be waited for.
  nb::object sample_into(SampledBatch& batch, size_t first, size_t n, uint64_t step,
                         const std::optional<LimitTuple>& limits, uint64_t cursor, bool admitted,
                         std::optional<double> beta) {
    const BatchArrays arrays = arrays_of(batch);
    batch.check_part(first, n);
    if (n == 0) fail(ErrorKind::schema, "at least one row is drawn");
    BatchSampler::Step what{.step = step, .limits = {}, .cursor = cursor, .admitted = admitted};
    if (limits) what.limits = {std::get<0>(*limits), std::get<1>(*limits), std::get<2>(*limits)};
    BatchSampler::Result result;
    released(store_, [&] {
      if (first == 0 && n == batch.size()) {
        result = sampler_.sample(arrays, what);
      } else {
        result = sampler_.sample(arrays.part(store_, window_, sampler_.view(), first, n), what);
      }
      if (result.done && beta) {
        importance_weights(batch.arrays().probability.subspan(first, n), result.count, *beta, 0.0,
                           batch.weights(first, n));
      }
    });
    if (!result.done) return nb::none();
    return nb::make_tuple(result.cursor, result.redrawn, result.count);
  }

  // Copies rows that Python has drawn to the places `numbers` of a part, with `steps` where it has drawn these as well.
  // Returns how many were lost.
  uint64_t gather(SampledBatch& batch, size_t first, size_t n, const In<uint32_t>& numbers, const In<uint32_t>& rows,
                  const In<uint32_t>& generations, const In<double>& probability, uint64_t step, uint32_t round,
                  const std::optional<In<uint32_t>>& steps) {
    const BatchArrays arrays = arrays_of(batch);
    batch.check_part(first, n);
    if (rows.size() != numbers.size() || generations.size() != numbers.size() || probability.size() != numbers.size()) {
      fail(ErrorKind::schema, numbers.size(), " numbers were given with ", rows.size(), " rows, ", generations.size(),
           " generations and ", probability.size(), " probabilities");
    }
    if (steps && steps->size() != numbers.size()) {
      fail(ErrorKind::schema, numbers.size(), " numbers were given with ", steps->size(), " steps");
    }
    for (uint32_t number : view(numbers)) {
      if (number >= n) fail(ErrorKind::schema, "draw ", number, " is none of ", n);
    }
    if (sampler_.draws_steps()) {
      fail(ErrorKind::schema, "the store has priorities of steps, and rows were drawn by code that knows none");
    }
    return released(store_, [&] {
      return sampler_.gather(arrays.part(store_, window_, sampler_.view(), first, n),
                             {view(numbers), view(rows), view(generations), view(probability), view(steps)}, step,
                             round);
    });
  }

 private:
  // The batch's arrays by this store's field numbers: the stores of a mixture may number the same fields differently.
  BatchArrays arrays_of(const SampledBatch& batch) const {
    const TransitionView* view = sampler_.view();
    if (batch.window() != window_ || batch.steps() != steps_ || batch.row_bytes() != row_bytes_ ||
        batch.view().has_value() != (view != nullptr) || (view != nullptr && *batch.view() != *view)) {
      fail(ErrorKind::schema, "the batch was made for other fields, windows or transitions");
    }
    BatchArrays arrays = batch.arrays();
    for (size_t i = 0; i < arrays.fields.size(); ++i) arrays.fields[i].field = fields_[i];
    for (size_t i = 0; i < arrays.transitions.size(); ++i) arrays.transitions[i].field = fields_[i];
    return arrays;
  }

  Store& store_;
  std::vector<uint32_t> fields_;
  std::vector<uint64_t> row_bytes_;
  size_t steps_ = 0;
  uint32_t window_;
  BatchSampler sampler_;
};

using WindowTuple = std::tuple<uint32_t, bool, bool, uint8_t>;  // stride, whole, from_first, at

WindowPlan window_plan(uint32_t length, const std::optional<WindowTuple>& windows) {
  WindowPlan plan{.length = length};
  if (windows) {
    const auto [stride, whole, from_first, at] = *windows;
    plan = {length, stride, whole, from_first, static_cast<WindowPlan::At>(at)};
  }
  check(plan);
  return plan;
}

// For each draw of rows of these lengths, the step that its window is told by.
nb::object placed_windows(uint32_t length, const WindowTuple& windows, uint64_t seed, uint64_t step, uint32_t round,
                          const In<uint32_t>& numbers, const In<int32_t>& lengths) {
  if (numbers.size() != lengths.size()) fail(ErrorKind::schema, "as many lengths as draws are needed");
  std::vector<int32_t> anchors(numbers.size());
  place_windows(window_plan(length, windows), {seed, step, kWindowStream}, round, view(numbers), view(lengths),
                anchors);
  return to_numpy(std::move(anchors));
}

nb::object weights_of(const In<double>& probability, uint64_t count, double beta, double lowest) {
  std::vector<double> weights(probability.size());
  importance_weights(view(probability), count, beta, lowest, weights);
  return to_numpy(std::move(weights));
}

}  // namespace

void bind_batch(nb::module_& module) {
  nb::class_<TransitionView>(module, "TransitionView")
      .def(
          "__init__",
          [](TransitionView* self, uint32_t n_step, uint32_t frame_stack, std::vector<double> powers,
             const std::vector<uint8_t>& roles, const std::tuple<uint8_t, uint32_t, uint32_t, uint32_t>& goals) {
            const auto [strategy, k, achieved, desired] = goals;
            TransitionView view{n_step,
                                frame_stack,
                                std::move(powers),
                                {},
                                {static_cast<GoalStrategy>(strategy), k, achieved, desired}};
            for (uint8_t role : roles) view.roles.push_back(static_cast<TransitionRole>(role));
            new (self) TransitionView(std::move(view));
          },
          nb::arg("n_step"), nb::arg("frame_stack"), nb::arg("powers"), nb::arg("roles"),
          nb::arg("goals") = std::tuple<uint8_t, uint32_t, uint32_t, uint32_t>{});
  nb::class_<SampledBatch>(module, "SampledBatch")
      .def(
          "__init__",
          [](SampledBatch* self, const Store& store, size_t n, const std::vector<uint32_t>& fields, uint32_t window,
             bool shards, std::optional<std::vector<AnyArray>> out, const TransitionView* view) {
            store.check_open();
            new (self) SampledBatch(store, n, fields, window, shards, std::move(out), view);
          },
          nb::arg("store"), nb::arg("n"), nb::arg("fields"), nb::arg("window"), nb::arg("shards"),
          nb::arg("out").none() = nb::none(), nb::arg("transitions").none() = nb::none())
      .def("__len__", &SampledBatch::size)
      .def_prop_ro("nbytes", &SampledBatch::nbytes)
      .def("field", &SampledBatch::field)
      .def("rows", [](const SampledBatch& b) { return b.array(b.arrays().rows); })
      .def("generations", [](const SampledBatch& b) { return b.array(b.arrays().generations); })
      .def("steps", [](const SampledBatch& b) { return b.array(b.arrays().steps); })
      .def("probability", [](const SampledBatch& b) { return b.array(b.arrays().probability); })
      .def("torn", [](const SampledBatch& b) { return b.array(b.arrays().torn); })
      .def("mask", &SampledBatch::mask)
      .def("start", [](const SampledBatch& b) { return b.array(b.arrays().starts); })
      .def("length", [](const SampledBatch& b) { return b.array(b.arrays().lengths); })
      .def("version", [](const SampledBatch& b) { return b.array(b.arrays().versions); })
      .def("importance_weights", &SampledBatch::importance_array)
      .def("shard", &SampledBatch::shard_array)
      .def("set_shard", &SampledBatch::set_shard)
      .def("set_importance", &SampledBatch::set_importance);
  nb::class_<Sampler>(module, "BatchSampler")
      .def(
          "__init__",
          [](Sampler* self, Store& store, const std::vector<uint32_t>& fields, uint32_t window, bool pad_left,
             unsigned threads, uint64_t seed, bool by_priority, bool replacement, bool stratified,
             std::optional<int> order, bool cursor, uint64_t min_rows, bool over_steps, const TransitionView* view,
             const std::optional<WindowTuple>& windows) {
            BatchSampler::Settings settings{.window = window_plan(window, windows),
                                            .pad_left = pad_left,
                                            .threads = threads,
                                            .seed = seed,
                                            .by = by_priority ? By::priority : By::row,
                                            .replacement = replacement,
                                            .stratified = stratified,
                                            .over_steps = over_steps,
                                            .transitions = {},
                                            .cursor = cursor,
                                            .min_rows = min_rows};
            if (view != nullptr) settings.transitions = *view;
            if (order) {
              settings.form = BatchSampler::Form::ordered;
              settings.order = static_cast<Order>(*order);
            }
            new (self) Sampler(store, fields, settings);
          },
          nb::keep_alive<1, 2>(), nb::arg("store"), nb::arg("fields"), nb::arg("window"), nb::arg("pad_left"),
          nb::arg("threads"), nb::arg("seed"), nb::arg("by_priority"), nb::arg("replacement"), nb::arg("stratified"),
          nb::arg("order").none(), nb::arg("cursor"), nb::arg("min_rows"), nb::arg("over_steps") = false,
          nb::arg("transitions").none() = nb::none(), nb::arg("windows").none() = nb::none())
      .def("sample_into", &Sampler::sample_into, nb::arg("batch"), nb::arg("first"), nb::arg("n"), nb::arg("step"),
           nb::arg("limits").none(), nb::arg("cursor"), nb::arg("admitted"), nb::arg("beta").none())
      .def("gather", &Sampler::gather, nb::arg("batch"), nb::arg("first"), nb::arg("n"), nb::arg("numbers"),
           nb::arg("rows"), nb::arg("generations"), nb::arg("probability"), nb::arg("step"), nb::arg("round"),
           nb::arg("steps").none() = nb::none());
  module.def("importance_weights", &weights_of);
  module.def("place_windows", &placed_windows);
}

}  // namespace geartrain
