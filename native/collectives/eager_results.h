// Eager results: what an owner sends of an operation that this rank has not begun. It is kept until then, so that the
// link of a rank that begins last is not idle until the others know that it has begun.
//
// One owner's, of one operation at a time, kEagerBytes at most: anything else ends its connection. One thread, the
// loop's.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "collectives/chunk_buffer.h"
#include "collectives/protocol.h"

namespace geartrain {

class EagerResults {
 public:
  // The destination of the next one, which took() is called for when it is there. Throws frame.
  std::span<std::byte> room(ChunkBufferPool& blocks, const WireHeader& result) {
    const uint64_t within = bytes_ % kChunkBytes;
    if ((bytes_ != 0 && result.operation != operation_) || result.offset != bytes_ || result.bytes == 0 ||
        within + result.bytes > kChunkBytes || bytes_ + result.bytes > kEagerBytes) {
      fail(ErrorKind::frame, "it sent ", result.bytes, " bytes at ", result.offset, " of operation ", result.operation,
           ", which was not begun here, where ", bytes_, " are of operation ", operation_);
    }
    if (within == 0) blocks_.emplace_back(blocks);
    operation_ = result.operation;
    arriving_ = true;
    return {blocks_.back().data() + within, result.bytes};
  }
  void took(const WireHeader& result) {
    bytes_ += result.bytes;
    arriving_ = false;
  }
  bool arriving() const { return arriving_; }
  uint64_t operation() const { return operation_; }
  uint64_t bytes() const { return bytes_; }
  bool of(uint64_t operation) const { return bytes_ != 0 && operation_ == operation; }
  void copy(std::byte* to) const {
    for (uint64_t at = 0; at < bytes_; at += kChunkBytes) {
      std::memcpy(to + at, blocks_[at / kChunkBytes].data(), std::min<uint64_t>(kChunkBytes, bytes_ - at));
    }
  }
  void clear() {
    blocks_.clear();
    bytes_ = 0;
  }

 private:
  uint64_t operation_ = 0, bytes_ = 0;
  bool arriving_ = false;  // a result whose bytes are not all there
  std::vector<ChunkBufferRef> blocks_;
};

}  // namespace geartrain
