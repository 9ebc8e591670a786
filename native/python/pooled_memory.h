// Pooled memory that Python's arrays and tensors share, and its export as DLPack.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/buffer_pool.h"
#include "base/errors.h"
#include "python/finalization.h"
#include "segment/segment.h"

namespace geartrain {

namespace nb = nanobind;

// A buffer of the pool and how many hold it; it returns to the pool with the last of them. Any thread, also one without
// the GIL, and while the interpreter ends.
class SharedBuffer {
 public:
  // Held once, by the caller.
  explicit SharedBuffer(size_t bytes) : base_(static_cast<std::byte*>(take_buffer(bytes))) {}
  SharedBuffer(const SharedBuffer&) = delete;
  SharedBuffer& operator=(const SharedBuffer&) = delete;

  std::byte* base() const { return base_; }
  void hold() { holders_.fetch_add(1, std::memory_order_relaxed); }
  void drop() noexcept {
    if (holders_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }

 private:
  ~SharedBuffer() { give_buffer(base_); }

  std::byte* const base_;
  std::atomic<uint32_t> holders_{1};
};

// DLPack's DLManagedTensor, as a capsule "dltensor" hands it over.
struct ManagedTensor {
  nb::dlpack::dltensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

// A tensor over a part of a buffer, for the consumer of a capsule.
class ExportedTensor {
 public:
  // Rows, a stack of frames, and the axes of a field.
  static constexpr size_t kMostAxes = kMaxDims + 2;

  // `row_elements`: from one entry of the first axis to the next, where they do not lie one after the other; or 0.
  static nb::object capsule(SharedBuffer& buffer, std::byte* at, const std::vector<size_t>& shape,
                            nb::dlpack::dtype dtype, int64_t row_elements) {
    if (shape.size() > kMostAxes) fail(ErrorKind::schema, "a tensor of ", shape.size(), " axes");
    auto* made = new ExportedTensor(buffer, at, shape, dtype, row_elements);
    PyObject* capsule = PyCapsule_New(&made->managed_, kUnused, [](PyObject* object) noexcept {
      // Whoever takes the tensor renames the capsule.
      if (PyCapsule_IsValid(object, kUnused) == 0) return;
      auto* managed = static_cast<ManagedTensor*>(PyCapsule_GetPointer(object, kUnused));
      managed->deleter(managed);
    });
    if (capsule == nullptr) {
      delete made;
      throw nb::python_error();
    }
    return nb::steal(capsule);
  }

 private:
  static constexpr const char* kUnused = "dltensor";

  ExportedTensor(SharedBuffer& buffer, std::byte* at, const std::vector<size_t>& shape, nb::dlpack::dtype dtype,
                 int64_t row_elements)
      : buffer_(buffer) {
    for (size_t axis = 0; axis < shape.size(); ++axis) shape_[axis] = static_cast<int64_t>(shape[axis]);
    int64_t elements = 1;
    for (size_t axis = shape.size(); axis-- > 0; elements *= shape_[axis]) strides_[axis] = elements;
    if (row_elements != 0) strides_[0] = row_elements;
    managed_.tensor = {at, {nb::device::cpu::value, 0}, static_cast<int32_t>(shape.size()), dtype, shape_, strides_, 0};
    managed_.context = this;
    managed_.deleter = [](ManagedTensor* managed) { delete static_cast<ExportedTensor*>(managed->context); };
    buffer_.hold();
  }
  ~ExportedTensor() { buffer_.drop(); }

  ManagedTensor managed_;
  SharedBuffer& buffer_;
  int64_t shape_[kMostAxes], strides_[kMostAxes];
};

// One pooled buffer that several arrays share, 64-byte aligned each; it returns to the pool with the last of them. Or
// memory of somebody else's, which its arrays keep alive.
class PooledMemory {
 public:
  explicit PooledMemory(size_t bytes) : buffer_(new SharedBuffer(bytes)), base_(buffer_->base()) {}
  PooledMemory(std::byte* base, nb::object owner) : base_(base), owner_(std::move(owner)) {}
  PooledMemory(PooledMemory&& other) noexcept
      : buffer_(std::exchange(other.buffer_, nullptr)),
        base_(other.base_),
        used_(other.used_),
        owner_(std::move(other.owner_)) {}
  PooledMemory& operator=(PooledMemory&&) = delete;
  ~PooledMemory() {
    if (buffer_ != nullptr) buffer_->drop();
  }
  static size_t padded(size_t bytes) { return (bytes + kBlockAlignment - 1) / kBlockAlignment * kBlockAlignment; }

  std::byte* base() const { return base_; }
  std::byte* take(size_t bytes) {
    std::byte* at = base() + used_;
    used_ += padded(bytes);
    return at;
  }
  template <typename T>
  std::span<T> take_items(size_t n) {
    return {reinterpret_cast<T*>(take(n * sizeof(T))), n};
  }
  // `row_elements`: from one entry of the first axis to the next, where they do not lie one after the other; or 0.
  nb::object array(std::byte* at, const std::vector<size_t>& shape, nb::dlpack::dtype dtype,
                   int64_t row_elements = 0) const {
    sleep_at_finalization();
    std::vector<int64_t> strides(row_elements != 0 ? shape.size() : 0, 1);
    for (size_t axis = strides.size(); axis-- > 1;) {
      strides[axis - 1] = strides[axis] * static_cast<int64_t>(shape[axis]);
    }
    if (row_elements != 0) strides[0] = row_elements;
    const int64_t* given = row_elements != 0 ? strides.data() : nullptr;
    return nb::cast(nb::ndarray<nb::numpy>(at, shape.size(), shape.data(), owner(), given, dtype));
  }
  template <typename T>
  nb::object array(std::span<T> values, const std::vector<size_t>& shape) const {
    return array(reinterpret_cast<std::byte*>(values.data()), shape, nb::dtype<T>());
  }
  // The same as a DLPack capsule, for a framework that makes a tensor of it.
  nb::object exported(std::byte* at, const std::vector<size_t>& shape, nb::dlpack::dtype dtype,
                      int64_t row_elements = 0) const {
    if (buffer_ == nullptr) fail(ErrorKind::schema, "a batch in the caller's memory has no tensors of its own");
    return ExportedTensor::capsule(*buffer_, at, shape, dtype, row_elements);
  }

 private:
  // What arrays hold: made with the first of them.
  const nb::object& owner() const {
    if (!owner_.is_valid()) {
      owner_ = nb::capsule(buffer_, [](void* p) noexcept { static_cast<SharedBuffer*>(p)->drop(); });
      buffer_->hold();
    }
    return owner_;
  }

  SharedBuffer* buffer_ = nullptr;
  std::byte* base_;
  size_t used_ = 0;
  mutable nb::object owner_;
};

}  // namespace geartrain
