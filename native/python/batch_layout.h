// Layout of a batch: where its fields and metadata lie in one buffer, with their shapes and dtypes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "fetch/batch_sampler.h"
#include "fetch/transitions.h"
#include "python/bind.h"

namespace geartrain {

// Of a field with windows of so many steps (0: whole rows), all of them or some.
inline std::vector<size_t> batch_shape(const FieldRecord& field, size_t rows, uint32_t window,
                                       const FieldSteps* steps) {
  std::vector<size_t> shape{rows};
  shape.insert(shape.end(), field.shape, field.shape + field.ndim);
  if (field.timed == 0) return shape;
  if (steps != nullptr) {
    shape[1] = steps->count;
    if (!steps->axis) shape.erase(shape.begin() + 1);
  } else if (window != 0) {
    shape[1] = window;
  }
  return shape;
}

// Of what a field gives to transitions: (rows, ...), observations above a stack of 1 (rows, frame_stack, ...).
inline std::vector<size_t> transition_shape(const FieldRecord& field, TransitionRole role, size_t rows,
                                            const TransitionView& view) {
  std::vector<size_t> shape{rows};
  if (role == TransitionRole::observation && view.frame_stack > 1) shape.push_back(view.frame_stack);
  shape.insert(shape.end(), field.shape + (field.timed != 0 ? 1 : 0), field.shape + field.ndim);
  return shape;
}

// Bytes of an array of that shape; refused on overflow.
inline size_t bytes_of(const std::vector<size_t>& shape, size_t itemsize) {
  size_t bytes = itemsize;
  for (size_t axis : shape) {
    if (__builtin_mul_overflow(bytes, axis, &bytes) || bytes > (size_t{1} << 56)) {
      fail(ErrorKind::no_space, "a batch of ", shape[0], " rows with such windows is larger than memory can be");
    }
  }
  return bytes;
}

// What a batch of n rows is made of, and where each part of it lies in one buffer: computed once for all batches of a
// kind. Of transitions, its fields are what is named in geartrain/replay/transitions.py: of each field what it gives,
// an observation twice; then reward, discount, terminated, truncated, and with goals relabelled. A batch whose rows a
// copier copies has neither fields nor a mask, which it may be made without.
class BatchLayout {
 public:
  struct Field {
    size_t at = 0;
    std::vector<size_t> shape;
    nb::dlpack::dtype dtype;
    int64_t row_elements = 0;  // from one row to the next; 0: rows lie one after the other
  };

  BatchLayout(const Store& store, size_t n, const std::vector<uint32_t>& fields, const WindowPlan& window, bool shards,
              const TransitionView* view, bool mask = true)
      : n_(n),
        window_(window),
        steps_(view != nullptr      ? view->frame_stack
               : window.length != 0 ? window.length
                                    : store.header().max_length) {
    if (n == 0) fail(ErrorKind::schema, "a batch has at least one row");
    for (uint32_t field : fields) {
      store.check_column(field);
    }
    if (view != nullptr) {
      view->check(store, fields);
      view_ = *view;
      add_transitions(store, fields);
    } else {
      add_fields(store, fields);
    }
    rows_ = take(4 * n);
    generations_ = take(4 * n);
    drawn_steps_ = take(4 * n);
    probability_ = take(8 * n);
    torn_ = take(n);
    mask_steps_ = mask ? steps_ : 0;
    mask_ = take(bytes_of({n, mask_steps_}, 1));
    starts_ = take(4 * n);
    lengths_ = take(4 * n);
    versions_ = take(8 * n);
    importance_ = take(8 * n);
    if (shards) shards_ = take(2 * n);
  }

  size_t size() const { return n_; }
  size_t steps() const { return steps_; }
  size_t mask_steps() const { return mask_steps_; }
  uint64_t nbytes() const { return nbytes_; }
  size_t buffer_bytes() const { return bytes_; }
  const std::vector<Field>& fields() const { return fields_; }
  // Whether rows of a sampler with these have a place in such a batch.
  bool fits(uint32_t window, size_t steps, const std::vector<uint64_t>& row_bytes, const TransitionView* view) const {
    return window_.length == window && steps_ == steps && row_bytes_ == row_bytes &&
           view_.has_value() == (view != nullptr) && (view == nullptr || *view_ == *view);
  }

  // A batch's arrays in its buffer.
  BatchArrays arrays(std::byte* base) const {
    BatchArrays made;
    for (const Target& target : targets_) {
      std::byte* const to = target.out == kNowhere ? nullptr : base + target.out;
      if (view_) {
        made.transitions.push_back({target.field, to, target.next == kNowhere ? nullptr : base + target.next});
      } else {
        made.fields.push_back({target.field, to, window_.steps_of(made.fields.size())});
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
    made.mask = {reinterpret_cast<uint8_t*>(base + mask_), n_ * mask_steps_};
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

  // Where everything lies, in bytes from the buffer's begin: the fields in order, then metadata by name.
  std::vector<std::pair<const char*, size_t>> metadata() const {
    return {{"mask", mask_},
            {"start", starts_},
            {"length", lengths_},
            {"version", versions_},
            {"torn", torn_},
            {"probability", probability_},
            {"importance_weights", importance_}};
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

  void add_fields(const Store& store, const std::vector<uint32_t>& fields) {
    for (size_t i = 0; i < fields.size(); ++i) {
      const FieldRecord& record = store.fields()[fields[i]];
      std::vector<size_t> shape = batch_shape(record, n_, window_.length, window_.steps_of(i));
      const size_t bytes = bytes_of(shape, record.itemsize);
      Target target{fields[i]};
      target.out = take(bytes);
      targets_.push_back(target);
      fields_.push_back({target.out, std::move(shape), array_dtype(record.dtype, record.itemsize)});
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
  WindowPlan window_;
  size_t steps_;
  size_t mask_steps_ = 0;
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

}  // namespace geartrain
