// Binding of batch samplers: a batch is one native object over one recycled buffer, and its arrays are made when they
// are asked for.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>

#include "base/errors.h"
#include "fetch/batch_sampler.h"
#include "python/batch_memory.h"
#include "python/batch_shapes.h"
#include "python/bind.h"
#include "selection/importance_weights.h"

namespace geartrain {
namespace {

using LimitTuple = std::tuple<int64_t, uint64_t, uint32_t>;  // min_version, inserted_from_ns, min_length

// What a batch of n rows is made of, and where each part of it lies in one buffer: computed once for all batches of a
// kind. Of transitions, its fields are what is named in geartrain/replay/transitions.py: of each field what it gives,
// an observation twice; then reward, discount, terminated, truncated, and with goals relabelled.
class BatchLayout {
 public:
  struct Field {
    size_t at = 0;
    std::vector<size_t> shape;
    nb::dlpack::dtype dtype;
    int64_t row_elements = 0;  // from one row to the next; 0: rows lie one after the other
  };

  // `recycled`: fields are in the buffer as well, and not in arrays of the caller's.
  BatchLayout(const Store& store, size_t n, const std::vector<uint32_t>& fields, uint32_t window, bool shards,
              bool recycled, const TransitionView* view)
      : n_(n),
        window_(window),
        steps_(view != nullptr ? view->frame_stack
               : window != 0   ? window
                               : store.header().max_length) {
    if (n == 0) fail(ErrorKind::schema, "a batch has at least one row");
    for (uint32_t field : fields) {
      if (field >= store.header().field_count) fail(ErrorKind::schema, "no field number ", field);
    }
    if (view != nullptr) {
      if (!recycled) fail(ErrorKind::schema, "transitions go to recycled memory, not to arrays of the caller's");
      view->check(store, fields);
      view_ = *view;
      add_transitions(store, fields);
    } else {
      add_fields(store, fields, recycled);
    }
    rows_ = take(4 * n);
    generations_ = take(4 * n);
    drawn_steps_ = take(4 * n);
    probability_ = take(8 * n);
    torn_ = take(n);
    mask_ = take(bytes_of({n, steps_}, 1));
    starts_ = take(4 * n);
    lengths_ = take(4 * n);
    versions_ = take(8 * n);
    importance_ = take(8 * n);
    if (shards) shards_ = take(2 * n);
  }

  size_t size() const { return n_; }
  size_t steps() const { return steps_; }
  uint64_t nbytes() const { return nbytes_; }
  size_t buffer_bytes() const { return bytes_; }
  const std::vector<Field>& fields() const { return fields_; }
  // Whether rows of a sampler with these have a place in such a batch.
  bool fits(uint32_t window, size_t steps, const std::vector<uint64_t>& row_bytes, const TransitionView* view) const {
    return window_ == window && steps_ == steps && row_bytes_ == row_bytes && view_.has_value() == (view != nullptr) &&
           (view == nullptr || *view_ == *view);
  }

  // A batch's arrays in its buffer; fields in `out` where that is given.
  BatchArrays arrays(std::byte* base, const std::vector<AnyArray>* out) const {
    BatchArrays made;
    for (size_t i = 0; i < targets_.size(); ++i) {
      const Target& target = targets_[i];
      std::byte* const to = target.out == kNowhere ? nullptr : base + target.out;
      if (view_) {
        made.transitions.push_back({target.field, to, target.next == kNowhere ? nullptr : base + target.next});
      } else {
        made.fields.push_back({target.field, out != nullptr ? static_cast<std::byte*>((*out)[i].data()) : to});
      }
    }
    put(made.discount, base, discount_);
    put(made.terminated, base, terminated_);
    put(made.truncated, base, truncated_);
    put(made.relabelled, base, relabelled_);
    put(made.rows, base, rows_);
    put(made.generations, base, generations_);
    put(made.steps, base, drawn_steps_);
    put(made.probability, base, probability_);
    put(made.torn, base, torn_);
    made.mask = {reinterpret_cast<uint8_t*>(base + mask_), n_ * steps_};
    put(made.starts, base, starts_);
    put(made.lengths, base, lengths_);
    put(made.versions, base, versions_);
    return made;
  }
  std::span<double> importance(std::byte* base) const { return {reinterpret_cast<double*>(base + importance_), n_}; }
  std::span<uint16_t> shards(std::byte* base) const {
    if (shards_ == kNowhere) return {};
    return {reinterpret_cast<uint16_t*>(base + shards_), n_};
  }

  void check_out(const Store& store, const std::vector<AnyArray>& out) const {
    if (out.size() != fields_.size()) {
      fail(ErrorKind::schema, fields_.size(), " fields were asked for with ", out.size(), " output arrays");
    }
    for (size_t i = 0; i < out.size(); ++i) {
      const FieldRecord& record = store.fields()[targets_[i].field];
      const size_t bytes = row_bytes_[i] * n_;
      if (out[i].nbytes() != bytes || out[i].itemsize() != record.itemsize) {
        fail(ErrorKind::schema, "the output array of field '", record.name, "' has ", out[i].nbytes(),
             " bytes, the batch needs ", bytes);
      }
    }
  }

 private:
  static constexpr size_t kNowhere = SIZE_MAX;
  struct Target {
    uint32_t field;
    size_t out = kNowhere, next = kNowhere;
  };

  size_t take(size_t bytes) {
    const size_t at = bytes_;
    if (__builtin_add_overflow(bytes_, PooledMemory::padded(bytes), &bytes_)) {
      fail(ErrorKind::no_space, "a batch of ", n_, " rows is larger than memory can be");
    }
    return at;
  }
  template <typename T>
  void put(std::span<T>& to, std::byte* base, size_t at) const {
    if (at != kNowhere) to = {reinterpret_cast<T*>(base + at), n_};
  }

  void add_fields(const Store& store, const std::vector<uint32_t>& fields, bool recycled) {
    for (const uint32_t field : fields) {
      const FieldRecord& record = store.fields()[field];
      std::vector<size_t> shape = batch_shape(record, n_, window_);
      const size_t bytes = bytes_of(shape, record.itemsize);
      Target target{field};
      if (recycled) target.out = take(bytes);
      targets_.push_back(target);
      fields_.push_back({recycled ? target.out : 0, std::move(shape), array_dtype(record.dtype, record.itemsize)});
      row_bytes_.push_back(bytes / n_);
      nbytes_ += bytes;
    }
  }

  void add_transitions(const Store& store, const std::vector<uint32_t>& fields) {
    Field reward{};
    for (size_t i = 0; i < fields.size(); ++i) {
      const FieldRecord& record = store.fields()[fields[i]];
      const TransitionRole role = view_->roles[i];
      Target to{fields[i]};
      std::vector<size_t> shape = transition_shape(record, role, n_, *view_);
      const size_t step = bytes_of(shape, record.itemsize) / n_;
      const nb::dlpack::dtype dtype = array_dtype(record.dtype, record.itemsize);
      if (role == TransitionRole::observation) {
        if (view_->shares_window()) {
          const size_t frame = step / view_->frame_stack;
          to.out = take(bytes_of({n_, view_->window_frames()}, frame));
          to.next = to.out + frame;
        } else {
          to.out = take(step * n_);
          to.next = take(step * n_);
        }
        const auto row_elements =
            view_->shares_window() ? static_cast<int64_t>(view_->row_bytes(record, role) / record.itemsize) : 0;
        fields_.push_back({to.out, shape, dtype, row_elements});
        fields_.push_back({to.next, std::move(shape), dtype, row_elements});
        nbytes_ += 2 * step * n_;
      } else if (role == TransitionRole::step) {
        to.out = take(step * n_);
        fields_.push_back({to.out, std::move(shape), dtype});
        nbytes_ += step * n_;
      } else if (role == TransitionRole::reward) {
        const size_t bytes = bytes_of(shape, sizeof(float));
        to.out = take(bytes);
        reward = {to.out, std::move(shape), nb::dtype<float>()};
        nbytes_ += bytes;
      }
      targets_.push_back(to);
      row_bytes_.push_back(view_->row_bytes(record, role));
    }
    discount_ = take(sizeof(float) * n_);
    terminated_ = take(n_);
    truncated_ = take(n_);
    fields_.push_back(std::move(reward));
    fields_.push_back({discount_, {n_}, nb::dtype<float>()});
    fields_.push_back({terminated_, {n_}, nb::dtype<bool>()});
    fields_.push_back({truncated_, {n_}, nb::dtype<bool>()});
    nbytes_ += (sizeof(float) + 2) * n_;
    if (view_->goals.strategy != GoalStrategy::none) {
      relabelled_ = take(n_);
      fields_.push_back({relabelled_, {n_}, nb::dtype<bool>()});
      nbytes_ += n_;
    }
  }

  size_t n_;
  uint32_t window_;
  size_t steps_;
  std::optional<TransitionView> view_;
  std::vector<Field> fields_;
  std::vector<Target> targets_;
  std::vector<uint64_t> row_bytes_;
  size_t discount_ = kNowhere, terminated_ = kNowhere, truncated_ = kNowhere, relabelled_ = kNowhere;
  size_t rows_ = 0, generations_ = 0, drawn_steps_ = 0, probability_ = 0, torn_ = 0, mask_ = 0, starts_ = 0,
         lengths_ = 0, versions_ = 0, importance_ = 0, shards_ = kNowhere;
  size_t bytes_ = 0;
  uint64_t nbytes_ = 0;
};

// A batch of n rows: fields in recycled memory, or in arrays of the caller's; metadata in recycled memory.
class SampledBatch {
 public:
  explicit SampledBatch(std::shared_ptr<const BatchLayout> layout, std::optional<std::vector<AnyArray>> out = {})
      : layout_(std::move(layout)),
        memory_(layout_->buffer_bytes()),
        out_(std::move(out)),
        arrays_(layout_->arrays(memory_.base(), out_ ? &*out_ : nullptr)),
        importance_(layout_->importance(memory_.base())),
        shards_(layout_->shards(memory_.base())) {}

  size_t size() const { return layout_->size(); }
  uint64_t nbytes() const { return layout_->nbytes(); }
  const BatchLayout& layout() const { return *layout_; }
  const BatchArrays& arrays() const { return arrays_; }
  std::span<uint16_t> shards() const { return shards_; }

  nb::object field(size_t i) const {
    const BatchLayout::Field& field = checked_field(i);
    if (out_) return nb::cast((*out_)[i]);
    return memory_.array(memory_.base() + field.at, field.shape, field.dtype, field.row_elements);
  }
  // What `from_dlpack` makes of a field.
  nb::object tensor(size_t i, nb::handle from_dlpack) const {
    const BatchLayout::Field& field = checked_field(i);
    if (out_) fail(ErrorKind::schema, "the fields of this batch are in the caller's own arrays");
    return made_by(from_dlpack,
                   memory_.exported(memory_.base() + field.at, field.shape, field.dtype, field.row_elements));
  }
  // The same of metadata, by the name of what gives it as an array; None where the batch has none.
  nb::object metadata_tensor(std::string_view name, nb::handle from_dlpack) const {
    const auto of = [&]<typename T>(std::span<T> values, nb::dlpack::dtype dtype, std::vector<size_t> shape) {
      return made_by(from_dlpack, memory_.exported(reinterpret_cast<std::byte*>(values.data()), shape, dtype));
    };
    if (name == "importance_weights") {
      return weighed_ ? of(importance_, nb::dtype<double>(), {size()}) : nb::none();
    }
    if (name == "mask") return of(arrays_.mask, nb::dtype<bool>(), {size(), layout_->steps()});
    if (name == "start") return of(arrays_.starts, nb::dtype<int32_t>(), {size()});
    if (name == "length") return of(arrays_.lengths, nb::dtype<int32_t>(), {size()});
    if (name == "version") return of(arrays_.versions, nb::dtype<int64_t>(), {size()});
    if (name == "probability") return of(arrays_.probability, nb::dtype<double>(), {size()});
    fail(ErrorKind::schema, "a batch has no metadata '", name, "'");
  }
  template <typename T>
  nb::object array(std::span<T> values) const {
    return memory_.array(values, {size()});
  }
  nb::object mask() const {
    return memory_.array(reinterpret_cast<std::byte*>(arrays_.mask.data()), {size(), layout_->steps()},
                         nb::dtype<bool>());
  }
  // None where no part of the batch has any.
  nb::object importance_array() const { return weighed_ ? array(importance_) : nb::none(); }
  nb::object shard_array() const { return shards_.empty() ? nb::none() : array(shards_); }

  void check_part(size_t first, size_t n) const {
    if (first > size() || n > size() - first) {
      fail(ErrorKind::schema, "rows ", first, " to ", first + n, " are no part of a batch of ", size());
    }
  }
  void set_shard(size_t first, size_t n, uint16_t shard) {
    check_part(first, n);
    if (!shards_.empty()) std::fill_n(shards_.begin() + static_cast<ptrdiff_t>(first), n, shard);
  }
  // The importance weights of a part, to be filled; where parts have none they are 1.
  std::span<double> weights(size_t first, size_t n) {
    check_part(first, n);
    if (!std::exchange(weighed_, true) && n != size()) std::fill(importance_.begin(), importance_.end(), 1.0);
    return importance_.subspan(first, n);
  }
  void set_importance(size_t first, const In<double>& given) {
    const std::span<double> to = weights(first, given.size());
    std::copy_n(given.data(), given.size(), to.begin());
  }

 private:
  static nb::object made_by(nb::handle from_dlpack, const nb::object& capsule) {
    PyObject* made = PyObject_CallFunctionObjArgs(from_dlpack.ptr(), capsule.ptr(), nullptr);
    if (made == nullptr) throw nb::python_error();
    return nb::steal(made);
  }
  const BatchLayout::Field& checked_field(size_t i) const {
    const auto& fields = layout_->fields();
    if (i >= fields.size()) fail(ErrorKind::schema, "the batch has ", fields.size(), " fields, not a number ", i);
    return fields[i];
  }

  std::shared_ptr<const BatchLayout> layout_;
  PooledMemory memory_;
  std::optional<std::vector<AnyArray>> out_;
  BatchArrays arrays_;
  std::span<double> importance_;
  bool weighed_ = false;
  std::span<uint16_t> shards_;
};

}  // namespace

BatchMemory memory_of(nb::handle batch) {
  const auto& made = nb::cast<const SampledBatch&>(batch);
  return {made.arrays(), made.shards()};
}

std::span<double> weights_to_fill(nb::handle batch) {
  auto& made = nb::cast<SampledBatch&>(batch);
  return made.weights(0, made.size());
}

namespace {

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

  // A batch of a step's n rows, as (batch, cursor, rows redrawn, rows drawn from), or None where rows or the rate
  // limiter have to be waited for.
  nb::object sample(size_t n, uint64_t step, const std::optional<LimitTuple>& limits, uint64_t cursor, bool admitted,
                    std::optional<double> beta) {
    if (layout_ == nullptr || layout_->size() != n) {
      layout_ = entered(store_, [&] {
        return std::make_shared<BatchLayout>(store_, n, fields_, window_, false, true, sampler_.view());
      });
    }
    SampledBatch batch(layout_);
    const BatchSampler::Result result = fill(batch, batch.arrays(), 0, n, what(step, limits, cursor, admitted), beta);
    if (!result.done) return nb::none();
    return nb::make_tuple(std::move(batch), result.cursor, result.redrawn, result.count);
  }

  // Fills rows [first, first + n) of a batch. Returns (cursor, rows redrawn, rows drawn from), or None as `sample`.
  nb::object sample_into(SampledBatch& batch, size_t first, size_t n, uint64_t step,
                         const std::optional<LimitTuple>& limits, uint64_t cursor, bool admitted,
                         std::optional<double> beta) {
    const BatchArrays arrays = arrays_of(batch);
    batch.check_part(first, n);
    if (n == 0) fail(ErrorKind::schema, "at least one row is drawn");
    const BatchSampler::Result result = fill(batch, arrays, first, n, what(step, limits, cursor, admitted), beta);
    if (!result.done) return nb::none();
    return nb::make_tuple(result.cursor, result.redrawn, result.count);
  }

  // Which steps count, as (max_steps, need, skip, stride) of a DrawPlan; None where rows are drawn and not steps.
  nb::object step_plan() const {
    const DrawPlan plan = sampler_.plan({}, 0, 1);
    if (!sampler_.draws_steps() && plan.max_steps == 0) return nb::none();
    return nb::make_tuple(plan.max_steps, plan.need, plan.skip, plan.stride);
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
  static BatchSampler::Step what(uint64_t step, const std::optional<LimitTuple>& limits, uint64_t cursor,
                                 bool admitted) {
    BatchSampler::Step made{.step = step, .limits = {}, .cursor = cursor, .admitted = admitted};
    if (limits) made.limits = {std::get<0>(*limits), std::get<1>(*limits), std::get<2>(*limits)};
    return made;
  }

  BatchSampler::Result fill(SampledBatch& batch, const BatchArrays& arrays, size_t first, size_t n,
                            const BatchSampler::Step& step, std::optional<double> beta) {
    return released(store_, [&] {
      const bool whole = first == 0 && n == batch.size();
      const auto part = [&] { return arrays.part(store_, window_, sampler_.view(), first, n); };
      const BatchSampler::Result result = whole ? sampler_.sample(arrays, step) : sampler_.sample(part(), step);
      if (result.done && beta) {
        const std::span<const double> probability = arrays.probability.subspan(first, n);
        importance_weights(probability, result.count, *beta, 0.0, batch.weights(first, n));
      }
      return result;
    });
  }

  // The batch's arrays by this store's field numbers: the stores of a mixture may number the same fields differently.
  BatchArrays arrays_of(const SampledBatch& batch) const {
    if (!batch.layout().fits(window_, steps_, row_bytes_, sampler_.view())) {
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
  std::shared_ptr<const BatchLayout> layout_;  // of the batches that were asked for last
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

// Transitions of a store's rows, to their places in arrays of the caller's for `room` rows: of each field what it gives
// (an observation two, or one of the frames that both share), then reward, discount, terminated, truncated, and with
// goals relabelled. `steps` are the transitions' own, `numbers` those of the draws, which goals are drawn by. Returns
// (torn, starts, lengths, versions) of the rows.
nb::tuple gathered_transitions(const Store& store, const TransitionView& view_of, const std::vector<uint32_t>& fields,
                               const In<uint32_t>& rows, const In<uint32_t>& generations, const In<uint32_t>& steps,
                               const In<uint32_t>& places, const In<uint32_t>& numbers, uint64_t seed, uint64_t step,
                               uint32_t round, unsigned threads, size_t room, const std::vector<AnyArray>& out) {
  store.check_open();
  view_of.check(store, fields);
  const size_t n = rows.size();
  if (steps.size() != n || numbers.size() != n) {  // of none of them, the rest would be taken for not given
    fail(ErrorKind::schema, n, " rows were given with ", steps.size(), " steps and ", numbers.size(), " numbers");
  }
  size_t next = 0;
  const auto take = [&](uint64_t row_bytes, std::string_view what) {
    if (next == out.size()) fail(ErrorKind::schema, "there is no array for the '", what, "' of transitions");
    const AnyArray& given = out[next++];
    if (given.nbytes() != bytes_of({room}, row_bytes)) {
      fail(ErrorKind::schema, "the array of '", what, "' has ", given.nbytes(), " bytes, ", room, " rows need ",
           row_bytes * room);
    }
    return static_cast<std::byte*>(given.data());
  };
  std::vector<TransitionField> targets;
  size_t reward = 0;
  for (size_t i = 0; i < fields.size(); ++i) {
    const FieldRecord& record = store.fields()[fields[i]];
    const TransitionRole role = view_of.roles[i];
    const uint64_t row_bytes = view_of.row_bytes(record, role);
    TransitionField to{fields[i]};
    if (role == TransitionRole::observation) {
      to.out = take(row_bytes, record.name);
      to.next = view_of.shares_window() ? to.out + row_bytes / view_of.window_frames() : take(row_bytes, record.name);
    } else if (role == TransitionRole::step) {
      to.out = take(row_bytes, record.name);
    } else if (role == TransitionRole::reward) {
      reward = i;
    }
    targets.push_back(to);
  }
  const FieldRecord& rewards = store.fields()[fields[reward]];
  targets[reward].out = take(view_of.row_bytes(rewards, TransitionRole::reward), "reward");
  const auto flags = [&](std::string_view what) {
    return std::span<uint8_t>(reinterpret_cast<uint8_t*>(take(1, what)), room);
  };
  TransitionRequest request;
  request.discount = {reinterpret_cast<float*>(take(sizeof(float), "discount")), room};
  request.terminated = flags("terminated");
  request.truncated = flags("truncated");
  if (view_of.goals.strategy != GoalStrategy::none) request.relabelled = flags("relabelled");
  if (next != out.size()) fail(ErrorKind::schema, out.size(), " arrays were given, transitions fill ", next);
  std::vector<uint8_t> torn(room), mask(bytes_of({room, view_of.frame_stack}, 1));
  std::vector<int32_t> starts(room), lengths(room);
  std::vector<int64_t> versions(room);
  request.rows = view(rows);
  request.generations = view(generations);
  request.places = view(places);
  request.numbers = view(numbers);
  request.steps = view(steps);
  request.key = {seed, step, kWindowStream};
  request.round = round;
  request.threads = threads;
  request.fields = targets;
  request.torn = torn;
  request.mask = mask;
  request.starts = starts;
  request.lengths = lengths;
  request.versions = versions;
  if (n != 0) released(store, [&] { gather_transitions(store, view_of, request); });
  const auto picked = [&]<typename T>(const std::vector<T>& from) {
    std::vector<T> made(n);
    for (size_t i = 0; i < n; ++i) made[i] = from[request.places[i]];
    return to_numpy(std::move(made));
  };
  std::vector<int32_t> frames(room);  // an episode may begin behind its row's first step
  for (size_t i = 0; i < n; ++i) {
    const auto first = mask.begin() + static_cast<std::ptrdiff_t>(size_t{request.places[i]} * view_of.frame_stack);
    frames[request.places[i]] = static_cast<int32_t>(std::count(first, first + view_of.frame_stack, uint8_t{1}));
  }
  return nb::make_tuple(picked(torn), picked(starts), picked(lengths), picked(frames), picked(versions));
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
            auto layout = std::make_shared<BatchLayout>(store, n, fields, window, shards, !out, view);
            if (out) layout->check_out(store, *out);
            new (self) SampledBatch(std::move(layout), std::move(out));
          },
          nb::arg("store"), nb::arg("n"), nb::arg("fields"), nb::arg("window"), nb::arg("shards"),
          nb::arg("out").none() = nb::none(), nb::arg("transitions").none() = nb::none())
      .def("__len__", &SampledBatch::size)
      .def_prop_ro("nbytes", &SampledBatch::nbytes)
      .def("field", &SampledBatch::field)
      .def("tensor", &SampledBatch::tensor)
      .def("metadata_tensor", &SampledBatch::metadata_tensor)
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
      .def("sample", &Sampler::sample, nb::arg("n"), nb::arg("step"), nb::arg("limits").none(), nb::arg("cursor"),
           nb::arg("admitted"), nb::arg("beta").none())
      .def("sample_into", &Sampler::sample_into, nb::arg("batch"), nb::arg("first"), nb::arg("n"), nb::arg("step"),
           nb::arg("limits").none(), nb::arg("cursor"), nb::arg("admitted"), nb::arg("beta").none())
      .def_prop_ro("step_plan", &Sampler::step_plan)
      .def("gather", &Sampler::gather, nb::arg("batch"), nb::arg("first"), nb::arg("n"), nb::arg("numbers"),
           nb::arg("rows"), nb::arg("generations"), nb::arg("probability"), nb::arg("step"), nb::arg("round"),
           nb::arg("steps").none() = nb::none());
  module.def("importance_weights", &weights_of);
  module.def("place_windows", &placed_windows);
  module.def("gather_transitions", &gathered_transitions, nb::arg("store"), nb::arg("view"), nb::arg("fields"),
             nb::arg("rows"), nb::arg("generations"), nb::arg("steps"), nb::arg("places"), nb::arg("numbers"),
             nb::arg("seed"), nb::arg("step"), nb::arg("round"), nb::arg("threads"), nb::arg("room"), nb::arg("out"));
}

}  // namespace geartrain
