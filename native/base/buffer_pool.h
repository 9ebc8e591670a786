// Pool of warm buffers for batches. A fresh 100 MB buffer costs 25,000 page faults before its first byte; a used one
// none.
//
// Buffers return when their last reference is dropped (in Python: when the last array over them is collected), so a
// batch that is still referenced is never overwritten. What the pool keeps is bounded; see kKeepBytes.
#pragma once

#include <cstddef>
#include <utility>

namespace geartrain {

// At most this much is kept warm, or four times the largest buffer in use, whichever is more.
constexpr size_t kKeepBytes = size_t{1} << 30;

// A 4096-byte aligned buffer of at least `bytes`; huge pages where they can be had. Any thread. Contents are
// arbitrary. Throws no_space.
void* take_buffer(size_t bytes);
void give_buffer(void* buffer) noexcept;

// An array in pooled memory, for scratch that would otherwise be faulted in anew for every large batch.
template <typename T>
class PooledArray {
 public:
  explicit PooledArray(size_t size = 0)
      : data_(size == 0 ? nullptr : static_cast<T*>(take_buffer(size * sizeof(T)))), size_(size) {}
  PooledArray(PooledArray&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(other.size_) {}
  PooledArray& operator=(PooledArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~PooledArray() {
    if (data_ != nullptr) give_buffer(data_);
  }
  T& operator[](size_t i) const { return data_[i]; }
  bool empty() const { return size_ == 0; }

 private:
  T* data_;
  size_t size_;
};

struct PoolCounts {
  size_t buffers_made, buffers_reused, bytes_in_use, bytes_kept;
};
PoolCounts pool_counts();

}  // namespace geartrain
