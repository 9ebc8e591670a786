// Results of one reducer, in the order in which it sends them, over all operations: the last ones, for ranks that lose
// it before they have them. They arrive here, and are copied to their places when a frame is complete, so that a frame
// that is cut off leaves the caller's numbers as they are.
//
// A rank runs no further than a window ahead of the results that it got, and nothing is reduced that one rank has not
// sent: no rank has more than a window of results that another one lacks.
//
// One thread, the loop's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>

#include "collectives/protocol.h"

namespace geartrain {

class KeptResults {
 public:
  // What ranks may differ by, with a window of so many bytes.
  static constexpr uint64_t reach(uint64_t window_bytes) { return window_bytes + 2 * kChunkBytes; }

  // The memory is not touched before it is needed.
  explicit KeptResults(uint64_t window_bytes)
      : size_(reach(window_bytes) + kChunkBytes), memory_(new std::byte[size_ + kChunkBytes]) {}

  // The destination of the next frame, which took() is called for when it is there.
  std::span<std::byte> room(uint64_t bytes) { return {memory_.get() + position_ % size_, bytes}; }
  void took(uint64_t bytes) {
    const uint64_t end = position_ % size_ + bytes;
    if (end > size_) std::memcpy(memory_.get(), memory_.get() + size_, end - size_);
    position_ += bytes;
  }
  void reset() { position_ = 0; }
  // How many bytes have come.
  uint64_t position() const { return position_; }
  // Those from `from` on, of which there are no more than reach().
  void copy(uint64_t from, std::byte* out) const {
    for (uint64_t at = from; at != position_;) {
      const uint64_t bytes = std::min(position_ - at, size_ - at % size_);
      std::memcpy(out + (at - from), memory_.get() + at % size_, bytes);
      at += bytes;
    }
  }

 private:
  const uint64_t size_;
  const std::unique_ptr<std::byte[]> memory_;  // and a frame beyond, which goes around
  uint64_t position_ = 0;
};

}  // namespace geartrain
