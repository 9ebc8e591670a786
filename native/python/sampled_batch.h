// Sampled batch: one native object over one buffer, whose arrays and tensors are made when they are asked for.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/errors.h"
#include "fetch/batch_sampler.h"
#include "python/batch_layout.h"
#include "python/bind.h"

namespace geartrain {

// A batch of n rows, in recycled memory or in the caller's.
class SampledBatch {
 public:
  explicit SampledBatch(std::shared_ptr<const BatchLayout> layout)
      : SampledBatch(layout, PooledMemory(layout->buffer_bytes())) {}

  // One like it in memory of the caller's, which is overwritten where the batch is filled again.
  SampledBatch placed_in(const nb::object& owner) const {
    const auto memory = nb::cast<AnyArray>(owner);
    auto* const base = static_cast<std::byte*>(memory.data());
    if (memory.nbytes() < layout_->buffer_bytes()) {
      fail(ErrorKind::schema, "the batch takes ", layout_->buffer_bytes(), " bytes, the memory has ", memory.nbytes());
    }
    if (reinterpret_cast<uintptr_t>(base) % kBlockAlignment != 0) {
      fail(ErrorKind::schema, "the memory of a batch begins at a multiple of ", kBlockAlignment);
    }
    return SampledBatch(layout_, PooledMemory(base, owner));
  }

  size_t size() const { return layout_->size(); }
  uint64_t nbytes() const { return layout_->nbytes(); }
  const BatchLayout& layout() const { return *layout_; }
  const BatchArrays& arrays() const { return arrays_; }
  std::span<uint16_t> shards() const { return shards_; }

  // Arrays; or, with `from_dlpack`, what it makes of them.
  nb::object field(size_t i, nb::handle from_dlpack) const {
    const auto& fields = layout_->fields();
    if (i >= fields.size()) fail(ErrorKind::schema, "the batch has ", fields.size(), " fields, not a number ", i);
    const BatchLayout::Field& field = fields[i];
    return made(memory_.base() + field.at, field.shape, field.dtype, from_dlpack, field.row_elements);
  }
  template <typename T>
  nb::object array(std::span<T> values, nb::handle from_dlpack = nb::none()) const {
    return made(reinterpret_cast<std::byte*>(values.data()), {size()}, nb::dtype<T>(), from_dlpack);
  }
  nb::object mask(nb::handle from_dlpack) const {
    return made(reinterpret_cast<std::byte*>(arrays_.mask.data()), {size(), layout_->mask_steps()}, nb::dtype<bool>(),
                from_dlpack);
  }
  // All of its memory, for one who makes a copy of the whole batch.
  nb::object buffer() const { return memory_.array(memory_.base(), {layout_->buffer_bytes()}, nb::dtype<uint8_t>()); }
  bool weighed() const { return weighed_; }
  // Before it is filled again.
  void forget_weights() { weighed_ = false; }
  // None where no part of the batch has any.
  nb::object importance_array(nb::handle from_dlpack) const {
    return weighed_ ? array(importance_, from_dlpack) : nb::none();
  }
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
  SampledBatch(std::shared_ptr<const BatchLayout> layout, PooledMemory memory)
      : layout_(std::move(layout)),
        memory_(std::move(memory)),
        arrays_(layout_->arrays(memory_.base())),
        importance_(layout_->importance(memory_.base())),
        shards_(layout_->shards(memory_.base())) {}

  nb::object made(std::byte* at, const std::vector<size_t>& shape, nb::dlpack::dtype dtype, nb::handle from_dlpack,
                  int64_t row_elements = 0) const {
    if (from_dlpack.is_none()) return memory_.array(at, shape, dtype, row_elements);
    const nb::object capsule = memory_.exported(at, shape, dtype, row_elements);
    sleep_at_finalization();
    PyObject* made = PyObject_CallFunctionObjArgs(from_dlpack.ptr(), capsule.ptr(), nullptr);
    if (made == nullptr) throw nb::python_error();
    return nb::steal(made);
  }

  std::shared_ptr<const BatchLayout> layout_;
  PooledMemory memory_;
  BatchArrays arrays_;
  std::span<double> importance_;
  bool weighed_ = false;
  std::span<uint16_t> shards_;
};

}  // namespace geartrain
